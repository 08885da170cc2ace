// SPDX-License-Identifier: Apache-2.0
// Managed memory that host and kernels change in turn (--size 1), or at the same time (--size 2), which devices without
// concurrentManagedAccess do not allow: then nothing depends on the result. The host waits in many ways.
#include <atomic>
#include <thread>

#include "tests/apps/support/app.h"

namespace {

__global__ void Add(unsigned* sum, unsigned count) {
  for (unsigned i = 0; i < count; ++i) atomicAdd_system(sum, 1u);
}

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {200, 1});
  const bool at_once = options.size == 2;
  unsigned* sums;
  unsigned* device;
  cudaEvent_t event;
  cudaStream_t stream;
  constexpr unsigned kSums = 5000;
  CUDA_CHECK(cudaMallocManaged(&sums, kSums * sizeof(unsigned)));
  CUDA_CHECK(cudaMalloc(&device, sizeof(unsigned)));
  CUDA_CHECK(cudaEventCreate(&event));
  CUDA_CHECK(cudaStreamCreate(&stream));
  for (unsigned i = 0; i < kSums; ++i) sums[i] = 0;
  unsigned expected = 0;
  for (int step = 0; step < options.steps; ++step) {
    unsigned* const sum = &sums[step % 3 * 2000];
    expected = *sum;
    Add<<<1, 32, 0, stream>>>(sum, 3);
    LAUNCH_CHECK();
    expected += 32 * 3;
    if (at_once) __atomic_fetch_add(sum, 1000u, __ATOMIC_SEQ_CST);
    switch (step % 6) {
      case 0:
        CUDA_CHECK(cudaDeviceSynchronize());
        break;
      case 1:
        CUDA_CHECK(cudaStreamSynchronize(stream));
        break;
      case 2:
        CUDA_CHECK(cudaEventRecord(event, stream));
        while (cudaEventQuery(event) == cudaErrorNotReady) {
        }
        break;
      case 3:
        while (cudaStreamQuery(stream) == cudaErrorNotReady) {
        }
        break;
      case 4: {
        std::atomic<bool> done{false};
        CUDA_CHECK(cudaLaunchHostFunc(
            stream, [](void* data) { *static_cast<std::atomic<bool>*>(data) = true; }, &done));
        while (!done) std::this_thread::yield();
        break;
      }
      default: {
        // A free waits for all work.
        unsigned* other;
        CUDA_CHECK(cudaMallocManaged(&other, 5000));
        CUDA_CHECK(cudaFree(other));
      }
    }
    if (!at_once) APP_CHECK(*sum == expected);
    *sum += 7;
  }
  CUDA_CHECK(cudaDeviceSynchronize());
  printf("done\n");
  return 0;
}
