// SPDX-License-Identifier: Apache-2.0
// The second module of the globals program; see globals.cu.
#include "tests/apps/globals.h"
#include "tests/apps/support/app.h"

static __device__ unsigned long long checksum = 99;  // the same names as in globals.cu, other contents
static __device__ unsigned history[64];
static __constant__ unsigned long long offsets[4] = {5, 6, 7, 8};
static __device__ unsigned long long cells[2] = {1, 1};

__global__ void OtherCount(unsigned step) {
  unsigned i = threadIdx.x;
  history[i] ^= step * (i + 1);
  __syncthreads();
  if (i == 0) {
    checksum = checksum * 17 + history[step % 64] + offsets[step % 4];
    unsigned long long next = cells[0] + cells[1];
    cells[0] = cells[1];
    cells[1] = next;
  }
}

__global__ void OtherCollect(unsigned long long* out) {
  out[0] = checksum;
  unsigned long long sum = 0;
  for (int i = 0; i < 64; ++i) sum = sum * 33 + history[i];
  out[1] = sum;
  out[2] = cells[0];
  out[3] = cells[1];
}

static int steps = 0;

void OtherHalfStep(int step) {
  OtherCount<<<1, 64>>>(step);
  LAUNCH_CHECK();
  steps = step;
}

void OtherHalfReport(unsigned long long out[4]) {
  unsigned long long* buffer;
  CUDA_CHECK(cudaMalloc(&buffer, 4 * sizeof(*buffer)));
  OtherCollect<<<1, 1>>>(buffer);
  LAUNCH_CHECK();
  CUDA_CHECK(cudaMemcpy(out, buffer, 4 * sizeof(*buffer), cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaFree(buffer));

  unsigned words[64] = {};
  unsigned long long want = 99, sum = 0, first = 1, second = 1;
  for (int step = 1; step <= steps; ++step) {
    for (int i = 0; i < 64; ++i) words[i] ^= step * (i + 1);
    want = want * 17 + words[step % 64] + 5 + step % 4;
    unsigned long long next = first + second;
    first = second;
    second = next;
  }
  for (int i = 0; i < 64; ++i) sum = sum * 33 + words[i];
  APP_CHECK(out[0] == want && out[1] == sum && out[2] == first && out[3] == second);
}
