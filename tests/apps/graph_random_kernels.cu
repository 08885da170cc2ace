// SPDX-License-Identifier: Apache-2.0
// Kernels of graph_random. Linked with the device runtime, which has cudaGraphSetConditional, for real GPUs; as PTX for
// the software GPU.
#include <cuda_runtime.h>

extern "C" __global__ void Mix(unsigned* to, const unsigned* from, unsigned salt) {
  const unsigned i = threadIdx.x;
  to[i] = to[i] * 1664525u + from[i] + salt + i;
}

extern "C" __global__ void Decide(cudaGraphConditionalHandle handle, const unsigned* word, unsigned most) {
  cudaGraphSetConditional(handle, *word % most);
}

extern "C" __global__ void Arm(cudaGraphConditionalHandle handle, const unsigned* word, unsigned* left) {
  *left = *word % 4;
  cudaGraphSetConditional(handle, *left != 0 ? 1 : 0);
}

extern "C" __global__ void CountDown(cudaGraphConditionalHandle handle, unsigned* left) {
  *left -= 1;
  cudaGraphSetConditional(handle, *left != 0 ? 1 : 0);
}
