// SPDX-License-Identifier: Apache-2.0
#include "softgpu/core/pool.h"

#include <utility>

#include "proto/threads/mutex.h"
#include "softgpu/core/registry.h"

namespace cuda_remote::softgpu {

void SettlePool(const AllocationPtr& allocation, bool waited) {
  CUmemoryPool handle = nullptr;
  MemoryMap::Get().Update(allocation, [&handle](Allocation& one) { std::swap(handle, one.pool); });
  const std::shared_ptr<Pool> pool = handle != nullptr ? Registry<Pool>::Get().Find(handle) : nullptr;
  if (!pool) return;
  MutexLock lock(&pool->mutex);
  pool->figures.Freed(allocation->size);
  if (waited) pool->figures.Synchronized();
}

void GiveBack(AllocationPtr allocation) {
  if (!allocation) return;
  SettlePool(allocation, true);
  MemoryMap::Get().Release(std::move(allocation));
}

void NotePoolsWaited() {
  Registry<Pool>::Get().ForEach([](Pool& pool) {
    MutexLock lock(&pool.mutex);
    pool.figures.Synchronized();
  });
}

uint64_t IdleInPools(int device) {
  uint64_t bytes = 0;
  Registry<Pool>::Get().ForEach([&](Pool& pool) {
    if (pool.device != device) return;
    MutexLock lock(&pool.mutex);
    bytes += pool.figures.idle();
  });
  return bytes;
}

}  // namespace cuda_remote::softgpu
