// SPDX-License-Identifier: Apache-2.0
// cudaDeviceReset in the middle of the work, as libraries' clean-up code calls it: what lived on the device is gone,
// and the next call begins anew. Every sixth time the primary context is retained by the program, too, which keeps its
// address and not its contents.
#include <vector>

#include "tests/apps/support/driver.h"

// No `__device__` variable: after a reset the driver puts them elsewhere, where no other process could have them.
__global__ void Advance(unsigned* state, int n, unsigned step) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) state[i] = state[i] * 1664525u + 1013904223u + step;
}

// A reset while the program holds on to the primary context.
void ResetUnderneath() {
  CUcontext before, current, after;
  CU_CHECK(cuDevicePrimaryCtxRetain(&before, 0));
  CU_CHECK(cuCtxGetCurrent(&current));
  APP_CHECK(current == before);
  CUDA_CHECK(cudaDeviceReset());
  unsigned flags;
  int active = 1;
  CU_CHECK(cuDevicePrimaryCtxGetState(0, &flags, &active));
  APP_CHECK(active == 0);
  CUdeviceptr memory = 0;
  CU_CHECK(cuCtxSetCurrent(before));
  APP_CHECK(cuMemAlloc(&memory, 64) == CUDA_ERROR_CONTEXT_IS_DESTROYED);
  APP_CHECK(cuCtxSynchronize() == CUDA_ERROR_CONTEXT_IS_DESTROYED);
  CU_CHECK(cuDevicePrimaryCtxRetain(&after, 0));
  APP_CHECK(after == before);
  CU_CHECK(cuMemAlloc(&memory, 64));
  CU_CHECK(cuCtxSynchronize());
  CU_CHECK(cuMemFree(memory));
  CU_CHECK(cuDevicePrimaryCtxRelease(0));
  CU_CHECK(cuDevicePrimaryCtxRelease(0));
}

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {24, 1000});
  const int n = options.size;
  std::vector<unsigned> host(n), reference(n);
  for (int i = 0; i < n; ++i) host[i] = reference[i] = 2654435761u * unsigned(i + 1);
  const size_t bytes = n * sizeof(unsigned);
  unsigned* state = nullptr;
  app::Digest digest;
  for (int step = 1; step <= options.steps; ++step) {
    if (!state) {
      CUDA_CHECK(cudaMalloc(&state, bytes));
      CUDA_CHECK(cudaMemcpy(state, host.data(), bytes, cudaMemcpyHostToDevice));
    }
    Advance<<<(n + 127) / 128, 128>>>(state, n, unsigned(step));
    LAUNCH_CHECK();
    for (unsigned& v : reference) v = v * 1664525u + 1013904223u + unsigned(step);
    if (step % 3 == 0) {
      CUDA_CHECK(cudaMemcpy(host.data(), state, bytes, cudaMemcpyDeviceToHost));
      APP_CHECK(host == reference);
      digest.Add(host.data(), bytes);
      if (step % 6 == 0) {
        ResetUnderneath();
      } else {
        CUDA_CHECK(cudaDeviceReset());
      }
      state = nullptr;
    }
    app::Step(step);
  }
  printf("resets n=%d steps=%d digest=%016" PRIx64 "\n", n, options.steps, digest.value());
  return 0;
}
