// SPDX-License-Identifier: Apache-2.0
#include "client/memory/pinned_heap.h"

#include <string.h>

namespace cuda_remote::client {
namespace {

// The server registers all pinned memory alike, whatever the flags of an allocation are, and for all devices.
constexpr unsigned kSegmentFlags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
constexpr int kAnyDevice = 0;

}  // namespace

CUresult PinnedHeap::AllocateWhole(uint64_t bytes, unsigned flags, uint64_t* address) {
  void* const memory = arena_->Allocate(bytes);
  if (!memory) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = reinterpret_cast<uint64_t>(memory);
  if (!mappings_->shared_memory()) return CUDA_SUCCESS;
  const CUresult result = mappings_->Map(*address, bytes, flags);
  if (result != CUDA_SUCCESS) arena_->Free(memory, bytes);
  return result;
}

// A piece of a segment, a new one if need be; 0 if there can be none.
uint64_t PinnedHeap::TakeLocked(uint64_t bytes) {
  if (const uint64_t address = heap_.Take(bytes, kAnyDevice)) {
    const SegmentHeap::Segment* const segment = heap_.Holding(address);
    if (segment->used == bytes) --empty_;
    return address;
  }
  uint64_t segment;
  if (AllocateWhole(SegmentHeap::kSegment, kSegmentFlags, &segment) != CUDA_SUCCESS) return 0;
  heap_.Add(segment, SegmentHeap::kSegment, kAnyDevice, /*small=*/true);
  return heap_.Take(bytes, kAnyDevice);
}

CUresult PinnedHeap::Allocate(uint64_t bytes, unsigned flags, uint64_t* address) {
  if (SegmentHeap::IsSmall(bytes) && mappings_->shared_memory()) {
    MutexLock lock(&mutex_);
    *address = TakeLocked(SegmentHeap::RoundUp(bytes));
    if (*address != 0) return CUDA_SUCCESS;
  }
  // Where there is no room for a segment, there may be for this.
  return AllocateWhole(bytes, flags, address);
}

CUresult PinnedHeap::Free(uint64_t address, uint64_t bytes) {
  if (!InSegment(address)) {
    // The server waits for what uses the memory and unmaps it first, so it never sees a hole in the file.
    const CUresult result = mappings_->shared_memory() ? mappings_->Unmap(address) : CUDA_SUCCESS;
    arena_->Free(reinterpret_cast<void*>(address), bytes);
    return result;
  }
  const uint64_t rounded = SegmentHeap::RoundUp(bytes);
  const CUresult waited = requests_->WaitForWork();
  memset(reinterpret_cast<void*>(address), 0, rounded);
  MutexLock lock(&mutex_);
  const uint64_t unused = heap_.Give(address, rounded);
  if (unused == 0 || ++empty_ <= kMostEmpty) return waited;
  --empty_;
  heap_.Remove(unused);
  const CUresult unmapped = mappings_->shared_memory() ? mappings_->Unmap(unused) : CUDA_SUCCESS;
  arena_->Free(reinterpret_cast<void*>(unused), SegmentHeap::kSegment);
  return waited == CUDA_SUCCESS ? unmapped : waited;
}

CUresult PinnedHeap::MapSegments() {
  MutexLock lock(&mutex_);
  for (const auto& [address, segment] : heap_.segments()) {
    const CUresult result = mappings_->Map(address, segment.bytes, kSegmentFlags);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

bool PinnedHeap::InSegment(uint64_t address) {
  MutexLock lock(&mutex_);
  return heap_.Holding(address) != nullptr;
}

}  // namespace cuda_remote::client
