// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/chunk_pool.h"

#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <functional>

#include "checkpoint/gpu/parallel.h"
#include "proto/machine/machine_memory.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr size_t kPage = 4096;
// Touching does not get much faster beyond this.
constexpr unsigned kMostThreads = 16;
// Chunks of more than this have a slot each.
constexpr size_t kMostPacked = ChunkPool::kSlotBytes / 2;

// What a packed chunk takes: threads write to neighbours at the same time.
size_t PackedBytes(size_t bytes) {
  constexpr size_t kCacheLine = 64;
  return (std::max<size_t>(bytes, 1) + kCacheLine - 1) & ~(kCacheLine - 1);
}

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
  packed_.resize(slots_);
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

uint64_t ChunkPool::MostTaken(const std::vector<size_t>& chunks) {
  uint64_t slots = 0, bytes = 0;
  std::vector<size_t> packed;
  for (const size_t chunk : chunks) {
    if (chunk > kMostPacked) {
      ++slots;
    } else {
      packed.push_back(PackedBytes(chunk));
      bytes += packed.back();
    }
  }
  if (packed.empty()) return slots * kSlotBytes;
  // A slot that is closed lacks less than the chunk that did not fit, and each chunk closes one slot at most: at worst
  // the largest ones do.
  std::sort(packed.begin(), packed.end(), std::greater<>());
  uint64_t closed = 0, lacking = 0;
  for (const size_t chunk : packed) {
    lacking += chunk;
    if ((closed + 1) * kSlotBytes >= bytes + lacking) break;
    ++closed;
  }
  return (slots + closed + 1) * kSlotBytes;
}

char* ChunkPool::TakeLocked(size_t bytes, uint64_t most_taken) {
  const bool packs = bytes <= kMostPacked;
  const size_t room = PackedBytes(bytes);
  if (packs && open_ != nullptr && room <= kSlotBytes - open_used_) {
    char* const memory = open_ + open_used_;
    open_used_ += room;
    ++packed_[NumberOf(open_)];
    return memory;
  }
  if ((untouched_ - ready_.size() + 1) * kSlotBytes > most_taken) return nullptr;
  char* slot = nullptr;
  if (!ready_.empty()) {
    slot = ready_.back();
    ready_.pop_back();
  } else if (untouched_ < slots_) {
    slot = memory_ + untouched_++ * kSlotBytes;
  }
  if (packs && slot != nullptr) {
    packed_[NumberOf(slot)] = 1;
    open_ = slot;
    open_used_ = room;
  }
  return slot;
}

char* ChunkPool::TryTake(size_t bytes, uint64_t most_taken) {
  MutexLock lock(&mutex_);
  return TakeLocked(bytes, most_taken);
}

char* ChunkPool::Take(size_t bytes) {
  MutexLock lock(&mutex_);
  char* memory;
  while ((memory = TakeLocked(bytes, UINT64_MAX)) == nullptr) given_.Wait(&mutex_);
  return memory;
}

void ChunkPool::Give(char* memory) {
  // Notified under the lock: whoever has the last slot back may destroy the pool.
  MutexLock lock(&mutex_);
  const size_t number = NumberOf(memory);
  if (packed_[number] > 0 && --packed_[number] > 0) return;
  char* const slot = memory_ + number * kSlotBytes;
  if (open_ == slot) open_ = nullptr;
  ready_.push_back(slot);
  // All of them: there may be room for several in this slot.
  given_.NotifyAll();
}

uint64_t SpareMemory() {
  const uint64_t left = AvailableMemory();
  // A kernel that says nothing gets the least that works.
  return left == UINT64_MAX ? 0 : left / 2;
}

}  // namespace cuda_remote::checkpoint
