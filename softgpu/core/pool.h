// SPDX-License-Identifier: Apache-2.0
// Stream-ordered memory and its pools.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_POOL_H_
#define CUDA_REMOTE_SOFTGPU_CORE_POOL_H_

#include <cuda.h>

#include <memory>

#include "proto/driverabi/pool_figures.h"
#include "proto/threads/mutex.h"
#include "softgpu/core/memory_map.h"

namespace cuda_remote::softgpu {

// Keeps account only: memory comes from and goes to the device. Thread-safe.
struct Pool {
  int device = 0;
  bool is_default = false;
  CUmemPoolProps props = {};
  Mutex mutex;
  int reuse[3] CR_GUARDED_BY(mutex) = {1, 1, 1};
  driverabi::PoolFigures figures CR_GUARDED_BY(mutex);
  CUmemAccess_flags access[64] CR_GUARDED_BY(mutex) = {};

  CUmemoryPool handle() { return reinterpret_cast<CUmemoryPool>(this); }
};

// Takes an allocation off the account of the pool that it is of, if it is of any: when the application frees it, not
// when its memory goes. `waited`: the host has waited for the stream.
void SettlePool(const AllocationPtr& allocation, bool waited);

// Gives an allocation of any kind back; a pool's account is kept.
void GiveBack(AllocationPtr allocation);

// The host has waited for a stream, an event or a context.
void NotePoolsWaited();

// What the pools of a device say that they keep.
uint64_t IdleInPools(int device);

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_POOL_H_
