// SPDX-License-Identifier: Apache-2.0
#include "softgpu/core/memory_map.h"

#include <atomic>

#include "proto/threads/mutex.h"
#include "softgpu/core/device.h"

namespace cuda_remote::softgpu {

uint64_t NextBufferId() {
  static std::atomic<uint64_t> next{1};
  return next++;
}

MemoryMap& MemoryMap::Get() {
  static MemoryMap* map = new MemoryMap;
  return *map;
}

bool MemoryMap::Add(AllocationPtr allocation) {
  if (allocation->id == 0) allocation->id = NextBufferId();
  allocation->sync_memops = allocation->kind == MemoryKind::kManaged;
  WriterLock lock(&mutex_);
  auto next = by_begin_.lower_bound(allocation->begin);
  if (next != by_begin_.end() && next->second->begin < allocation->end()) return false;
  if (next != by_begin_.begin() && std::prev(next)->second->end() > allocation->begin) return false;
  by_begin_.emplace_hint(next, allocation->begin, std::move(allocation));
  return true;
}

AllocationPtr MemoryMap::Remove(uint64_t begin) {
  return RemoveIf(begin, [](const Allocation&) { return true; });
}

AllocationPtr MemoryMap::RemoveIf(uint64_t begin, const std::function<bool(const Allocation&)>& predicate) {
  WriterLock lock(&mutex_);
  auto it = by_begin_.find(begin);
  if (it == by_begin_.end() || !predicate(*it->second)) return nullptr;
  AllocationPtr allocation = std::move(it->second);
  by_begin_.erase(it);
  return allocation;
}

std::vector<AllocationPtr> MemoryMap::RemoveAll(const std::function<bool(const Allocation&)>& predicate) {
  std::vector<AllocationPtr> removed;
  WriterLock lock(&mutex_);
  for (auto it = by_begin_.begin(); it != by_begin_.end();) {
    if (predicate(*it->second)) {
      removed.push_back(std::move(it->second));
      it = by_begin_.erase(it);
    } else {
      ++it;
    }
  }
  return removed;
}

AllocationPtr MemoryMap::Find(uint64_t address) const {
  ReaderLock lock(&mutex_);
  auto it = by_begin_.upper_bound(address);
  if (it == by_begin_.begin()) return nullptr;
  const AllocationPtr& allocation = std::prev(it)->second;
  const bool known = allocation->flags != kDeviceHeapFlag && !allocation->freed;
  return known && address < allocation->end() ? allocation : nullptr;
}

void MemoryMap::Update(const AllocationPtr& allocation, const std::function<void(Allocation&)>& change) {
  WriterLock lock(&mutex_);
  change(*allocation);
}

std::vector<AllocationPtr> MemoryMap::Overlapping(uint64_t begin, uint64_t end) const {
  std::vector<AllocationPtr> found;
  ReaderLock lock(&mutex_);
  auto it = by_begin_.upper_bound(begin);
  if (it != by_begin_.begin() && std::prev(it)->second->end() > begin) --it;
  for (; it != by_begin_.end() && it->second->begin < end; ++it) found.push_back(it->second);
  return found;
}

bool MemoryMap::Covers(uint64_t begin, uint64_t size) const {
  if (size == 0) return true;
  uint64_t end;
  if (__builtin_add_overflow(begin, size, &end)) return false;
  ReaderLock lock(&mutex_);
  auto it = by_begin_.upper_bound(begin);
  if (it == by_begin_.begin()) return false;
  --it;
  if (it->second->flags == kDeviceHeapFlag) return false;
  if (it->second->kind != MemoryKind::kMapped) return begin < it->second->end() && end <= it->second->end();
  for (uint64_t at = begin; it != by_begin_.end() && it->second->begin <= at; ++it) {
    const Allocation& piece = *it->second;
    if (piece.kind != MemoryKind::kMapped || !piece.readable || piece.end() <= at) return false;
    at = piece.end();
    if (at >= end) return true;
  }
  return false;
}

bool MemoryMap::Lookup(uint64_t address, ptx::Interval* interval) {
  ReaderLock lock(&mutex_);
  auto it = by_begin_.upper_bound(address);
  if (it == by_begin_.begin()) return false;
  const Allocation& allocation = *std::prev(it)->second;
  if (address >= allocation.end() || !allocation.readable) return false;
  *interval = {allocation.begin, allocation.end(), allocation.kernel_writable};
  return true;
}

void MemoryMap::Release(AllocationPtr allocation) {
  if (!allocation) return;
  if (allocation->budget != 0) {
    if (Device* device = GetDevice(allocation->device)) device->GiveMemory(allocation->budget);
  }
  {
    MutexLock lock(&launch_mutex_);
    if (launches_ != 0) {
      released_.push_back(std::move(allocation));
      return;
    }
  }
  if (allocation->release) allocation->release();
}

void MemoryMap::BeginLaunch() {
  MutexLock lock(&launch_mutex_);
  ++launches_;
}

void MemoryMap::EndLaunch() {
  std::vector<AllocationPtr> released;
  {
    MutexLock lock(&launch_mutex_);
    if (--launches_ == 0) released.swap(released_);
  }
  for (const AllocationPtr& allocation : released) {
    if (allocation->release) allocation->release();
  }
}

}  // namespace cuda_remote::softgpu
