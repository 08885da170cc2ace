// SPDX-License-Identifier: Apache-2.0
// printf from the device, interleaved with the host's own output: one thread prints, so the order is fixed.
#include "tests/apps/support/app.h"

__device__ unsigned long long state = 88172645463325252ull;

__global__ void Say(int step, float ratio) {
  unsigned long long x = state;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  state = x;
  printf("device step=%d state=%llx small=%d unsigned=%u\n", step, x, -step, static_cast<unsigned>(x));
  printf("  float %.6f double %.12e char %c string %s percent %% width [%5d] [%-6d] [%08x]\n", ratio, ratio / 3.0,
         'a' + step % 26, step % 2 ? "odd" : "even", step, step, step * 7919);
}

__global__ void Count(int* out, int threads) {
  if (threadIdx.x < threads) atomicAdd(out, 1);
  if (threadIdx.x == 0) printf("counting %d threads\n", threads);
}

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {12, 64});
  int* count;
  CUDA_CHECK(cudaMalloc(&count, sizeof(int)));
  CUDA_CHECK(cudaMemset(count, 0, sizeof(int)));
  unsigned long long want = 88172645463325252ull;
  for (int step = 1; step <= options.steps; ++step) {
    Say<<<1, 1>>>(step, step * 1.25f);
    Count<<<1, options.size>>>(count, options.size);
    LAUNCH_CHECK();
    CUDA_CHECK(cudaDeviceSynchronize());
    printf("host step=%d\n", step);
    fflush(stdout);
    want ^= want << 13;
    want ^= want >> 7;
    want ^= want << 17;
    app::Step(step);
  }
  int total = 0;
  unsigned long long got = 0;
  CUDA_CHECK(cudaMemcpy(&total, count, sizeof(total), cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaMemcpyFromSymbol(&got, state, sizeof(got)));
  APP_CHECK(total == options.steps * options.size && got == want);
  printf("printer steps=%d total=%d state=%llx\n", options.steps, total, got);
  CUDA_CHECK(cudaFree(count));
  return 0;
}
