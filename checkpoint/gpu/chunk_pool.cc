// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/chunk_pool.h"

#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>

#include "checkpoint/gpu/parallel.h"
#include "proto/machine/machine_memory.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr size_t kPage = 4096;
// Touching does not get much faster beyond this.
constexpr unsigned kMostThreads = 16;

}  // namespace

ChunkPool::ChunkPool(uint64_t limit) : slots_(std::max<size_t>(size_t(limit / kSlotBytes), kLeastSlots)) {
  // One more, so that the first slot can begin where a huge page does.
  mapped_bytes_ = (slots_ + 1) * kSlotBytes;
  mapping_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    return;
  }
  const uintptr_t start = reinterpret_cast<uintptr_t>(mapping_);
  memory_ = reinterpret_cast<char*>((start + kSlotBytes - 1) & ~uintptr_t(kSlotBytes - 1));
  // Both are for speed only.
  madvise(mapping_, mapped_bytes_, MADV_HUGEPAGE);
  madvise(mapping_, mapped_bytes_, MADV_DONTFORK);
  ready_.reserve(slots_);  // giving back must not fail
}

ChunkPool::~ChunkPool() {
  if (mapping_) munmap(mapping_, mapped_bytes_);
}

void ChunkPool::Prepare(uint64_t bytes, const std::function<bool()>& cancelled) {
  const size_t count = size_t(std::min<uint64_t>(slots_, (bytes + kSlotBytes - 1) / kSlotBytes));
  const size_t begun = InParallel(count, kMostThreads, [&](size_t slot, bool here) {
    // Pages of any size: huge ones may have been refused.
    volatile char* const start = memory_ + slot * kSlotBytes;
    for (size_t at = 0; at < kSlotBytes; at += kPage) start[at] = 0;
    return !(here && cancelled && cancelled());
  });
  MutexLock lock(&mutex_);
  prepared_ = untouched_ = begun;
  for (size_t slot = prepared_; slot > 0; --slot) ready_.push_back(memory_ + (slot - 1) * kSlotBytes);
}

uint64_t ChunkPool::free_bytes() const {
  MutexLock lock(&mutex_);
  return (ready_.size() + slots_ - untouched_) * kSlotBytes;
}

char* ChunkPool::TakeLocked() {
  if (!ready_.empty()) {
    char* const slot = ready_.back();
    ready_.pop_back();
    return slot;
  }
  return untouched_ < slots_ ? memory_ + untouched_++ * kSlotBytes : nullptr;
}

char* ChunkPool::TryTake() {
  MutexLock lock(&mutex_);
  return TakeLocked();
}

char* ChunkPool::Take() {
  MutexLock lock(&mutex_);
  char* slot;
  while ((slot = TakeLocked()) == nullptr) given_.Wait(&mutex_);
  return slot;
}

void ChunkPool::Give(char* slot) {
  // Notified under the lock: whoever has the last slot back may destroy the pool.
  MutexLock lock(&mutex_);
  ready_.push_back(slot);
  given_.NotifyOne();
}

uint64_t SpareMemory() {
  const uint64_t left = AvailableMemory();
  // A kernel that says nothing gets the least that works.
  return left == UINT64_MAX ? 0 : left / 2;
}

}  // namespace cuda_remote::checkpoint
