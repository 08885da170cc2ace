// Stream-ordered memory and its pools.
#ifndef CUDA_REMOTE_SERVER_SOFTGPU_POOL_H_
#define CUDA_REMOTE_SERVER_SOFTGPU_POOL_H_

#include <cuda.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "server/softgpu/memory_map.h"

namespace cuda_remote::softgpu {

// Keeps account only: memory comes from and goes to the device. Thread-safe.
struct Pool {
  int device = 0;
  bool is_default = false;
  CUmemPoolProps props = {};
  std::atomic<uint64_t> threshold{0};
  std::atomic<int> reuse[3] = {{1}, {1}, {1}};
  std::atomic<uint64_t> used{0}, used_high{0};
  std::mutex mutex;
  CUmemAccess_flags access[64] = {};

  CUmemoryPool handle() { return reinterpret_cast<CUmemoryPool>(this); }
};

// Gives an allocation of any kind back; a pool's account is kept.
void GiveBack(AllocationPtr allocation);

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SERVER_SOFTGPU_POOL_H_
