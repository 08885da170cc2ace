// SPDX-License-Identifier: Apache-2.0
// The heaps of kernels: what malloc and new give in a kernel, one heap for each context.
//
// The driver's calls do not know this memory. A kernel of ours finds a context's heap and copies it: malloc's first
// answer lies in the last 2 MiB of it (580 on an H100), and CU_LIMIT_MALLOC_HEAP_SIZE is its size. What is free is
// written down in the heap itself, so its bytes are all that a checkpoint needs.
//
// The search makes the heap, which fixes the limit, so it is done just before the first kernel that may allocate.
// Executor only, but for Copy.
#ifndef CUDA_REMOTE_SERVER_WORKER_MEMORY_KERNEL_HEAPS_H_
#define CUDA_REMOTE_SERVER_WORKER_MEMORY_KERNEL_HEAPS_H_

#include <cuda.h>

#include <cstdint>
#include <map>
#include <memory>

#include "absl/status/statusor.h"
#include "server/driver/driver_table.h"
#include "server/worker/memory/staging.h"
#include "server/worker/session/current_context.h"

namespace cuda_remote::server {

class KernelHeaps {
 public:
  struct Place {
    uint64_t base = 0, bytes = 0;
  };

  KernelHeaps(const DriverTable& driver, StagingPool* staging) : driver_(driver), staging_(staging) {}

  // Begins the search in the current context, `handle` to the client. It does not wait for the GPU.
  void Begin(uint64_t handle);
  bool begun(uint64_t handle) const { return heaps_.count(handle) != 0; }
  // The context is gone.
  void Forget(uint64_t handle) { heaps_.erase(handle); }

  // Where a heap is that was begun, in its context, which is current; waits for the search. Fails if that is not known.
  absl::StatusOr<Place> Find(uint64_t handle);
  const auto& all() const { return heaps_; }

  // For Copy: in the heap's context, which is current.
  CUfunction copier(uint64_t handle) const { return heaps_.at(handle).copier; }
  // Copies between a heap and a buffer of the staging pool by a kernel, and waits for it. The context is current.
  static CUresult Copy(const DriverTable& driver, CUfunction copier, uint64_t heap, char* buffer, size_t bytes,
                       bool to_heap);

 private:
  struct Heap {
    CUmodule module = nullptr;
    CUfunction copier = nullptr;
    CUstream stream = nullptr;     // of the search; null: it is over
    std::shared_ptr<char> answer;  // what malloc gave
    absl::StatusOr<Place> place;   // once the search is over
  };
  CUresult Search(Heap* heap);

  const DriverTable& driver_;
  StagingPool* const staging_;
  std::map<uint64_t, Heap> heaps_;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MEMORY_KERNEL_HEAPS_H_
