// SPDX-License-Identifier: Apache-2.0
// Pinned memory: which allocation has which part of the host arena (host_arena.h), and what of it the server has
// mapped.
//
// To register memory with the driver takes longer than to allocate it natively, because the driver takes small
// allocations from memory that it has pinned already. So do we, with a server on the same machine: it maps segments of
// 2 MiB, and small allocations share them. A large allocation, or any with a server on another machine, is a piece of
// the arena by itself.
//
// Thread-safe. Allocate and Free may not be called while a thread has a lock of the tables (README, "Locks").
#ifndef CUDA_REMOTE_CLIENT_MEMORY_PINNED_HEAP_H_
#define CUDA_REMOTE_CLIENT_MEMORY_PINNED_HEAP_H_

#include <cuda.h>

#include <cstdint>

#include "client/core/server_requests.h"
#include "client/memory/host_arena.h"
#include "client/memory/host_mappings.h"
#include "client/memory/segment_heap.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::client {

class PinnedHeap {
 public:
  // All outlive this.
  PinnedHeap(HostArena* arena, HostMappings* mappings, ServerRequests* requests)
      : arena_(arena), mappings_(mappings), requests_(requests) {}

  // Zeroed memory of at least `bytes` (> 0), page-aligned, which the server has mapped if it shares memory.
  CUresult Allocate(uint64_t bytes, unsigned flags, uint64_t* address);
  // Waits for the GPU, as natively, and gives back what Allocate returned; `bytes` as there. The memory is given back
  // whatever the result is.
  CUresult Free(uint64_t address, uint64_t bytes);

  // Another server takes over that shares memory: maps the segments there.
  CUresult MapSegments();
  // Whether the address lies in a segment: then MapSegments has mapped it.
  bool InSegment(uint64_t address);

 private:
  // Segments without an allocation that stay mapped for the next one.
  static constexpr int kMostEmpty = 4;

  uint64_t TakeLocked(uint64_t bytes) CR_REQUIRES(mutex_);
  CUresult AllocateWhole(uint64_t bytes, unsigned flags, uint64_t* address);

  HostArena* const arena_;
  HostMappings* const mappings_;
  ServerRequests* const requests_;
  Mutex mutex_;
  SegmentHeap heap_ CR_GUARDED_BY(mutex_);
  int empty_ CR_GUARDED_BY(mutex_) = 0;  // segments without an allocation
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_MEMORY_PINNED_HEAP_H_
