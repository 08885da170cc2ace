// SPDX-License-Identifier: Apache-2.0
// The heap of a context's kernels: what malloc and new give in a kernel.
//
// One range of memory, as long as CU_LIMIT_MALLOC_HEAP_SIZE says, at an address that depends on the contexts that exist
// alone. Kernels reach all of it; copies and other calls of the driver do not know it, as with the real driver. What is
// free is written down in the range itself, so its bytes are all of its state. Thread-safe.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_KERNEL_HEAP_H_
#define CUDA_REMOTE_SOFTGPU_CORE_KERNEL_HEAP_H_

#include <atomic>
#include <cstdint>

#include "proto/threads/mutex.h"

namespace cuda_remote::softgpu {

class Context;

class KernelHeap {
 public:
  KernelHeap() = default;
  KernelHeap(const KernelHeap&) = delete;
  KernelHeap& operator=(const KernelHeap&) = delete;

  // 0: there is no room. The first call makes the heap, with as many bytes as the context's limit says.
  uint64_t Take(Context& context, uint64_t bytes);
  void Give(uint64_t address);
  // Whether there is a heap; its size is fixed then.
  bool begun() const { return begun_; }
  // The context is new: it has none.
  void Reset();

 private:
  bool Begin(Context& context) CR_REQUIRES(mutex_);

  Mutex mutex_;
  std::atomic<bool> begun_{false};
  uint64_t base_ CR_GUARDED_BY(mutex_) = 0, bytes_ CR_GUARDED_BY(mutex_) = 0;
};

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_KERNEL_HEAP_H_
