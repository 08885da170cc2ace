// SPDX-License-Identifier: Apache-2.0
// Where the worker puts what a checkpoint keeps on the GPU for a while (server/worker/snapshot_memory.h): outside of
// all addresses that a job can have. And how OpMemAlloc is asked for it.
#ifndef CUDA_REMOTE_PROTO_DRIVERABI_SNAPSHOT_ADDRESSES_H_
#define CUDA_REMOTE_PROTO_DRIVERABI_SNAPSHOT_ADDRESSES_H_

#include <cstdint>

namespace cuda_remote::driverabi {

inline constexpr uint64_t kSnapshotBase = 0x600000000000;
inline constexpr uint64_t kSnapshotBytes = uint64_t{1} << 40;

// In OpMemAlloc_Request::flags, beside those for a job's memory.
inline constexpr uint32_t kAllocateSnapshot = 4;

}  // namespace cuda_remote::driverabi

#endif  // CUDA_REMOTE_PROTO_DRIVERABI_SNAPSHOT_ADDRESSES_H_
