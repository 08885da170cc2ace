// SPDX-License-Identifier: Apache-2.0
// Values of number fields in the requests of our own operations (proto/api/operations.textproto), for both sides.
#ifndef CUDA_REMOTE_PROTO_DRIVERABI_REQUESTS_H_
#define CUDA_REMOTE_PROTO_DRIVERABI_REQUESTS_H_

#include <cstdint>

namespace cuda_remote::driverabi {

// OpMemAlloc's flags: memory that is allocated in the order of a stream, or for a checkpoint (job_addresses.h,
// kSnapshotBase).
inline constexpr uint32_t kAllocateStreamOrdered = 1, kAllocateSnapshot = 4;

// How device memory is named: the kind of OpRegions' regions. Images have these numbers, too.
enum class RegionKind : uint32_t {
  kAllocation = 1,     // by address
  kModuleSymbol = 2,   // by module and symbol: its address may be another one after a restart
  kLibrarySymbol = 3,  // by library, symbol and context
  kArray = 4,          // the contents of an array or mipmapped array, by its handle; no address
  kHeap = 5,           // the heap of a context's kernels (malloc, new), by the context's handle; address and size count
};

// OpManagedUnmap's action.
enum UnmapAction : uint32_t { kUnmapFree = 0, kUnmapClear = 1, kUnmapWaitOnly = 2 };

// OpManagedFetch's wait: which work is waited for. The last two copy nothing if the GPU is at work, and say so.
enum FetchWait : uint32_t { kAtOnce = 0, kForAll = 1, kForStream = 2, kUnlessBusy = 3, kUnlessStreamBusy = 4 };

// OpTimeline's action.
enum TimelineAction : uint32_t { kTimelineBegin = 1, kTimelineEnd = 2, kTimelineRead = 3 };

}  // namespace cuda_remote::driverabi

#endif  // CUDA_REMOTE_PROTO_DRIVERABI_REQUESTS_H_
