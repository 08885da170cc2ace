// SPDX-License-Identifier: Apache-2.0
// Kernels of graph_conditional: they decide what the graph does next. Linked with the device runtime, which has
// cudaGraphSetConditional, for real GPUs; as PTX for the software GPU.
#include <cuda_runtime.h>

// state[0] is carried on; state[1] counts down.
extern "C" __global__ void Decide(cudaGraphConditionalHandle handle, const unsigned* state) {
  cudaGraphSetConditional(handle, state[0] % 3 == 0 ? 1 : 0);
}

extern "C" __global__ void Arm(cudaGraphConditionalHandle handle, unsigned* state) {
  state[1] = state[0] % 6;
  cudaGraphSetConditional(handle, state[1] != 0 ? 1 : 0);
}

extern "C" __global__ void CountDown(cudaGraphConditionalHandle loop, cudaGraphConditionalHandle inner,
                                     unsigned* state) {
  state[0] = state[0] * 1664525u + 1013904223u;
  state[1] -= 1;
  cudaGraphSetConditional(loop, state[1] != 0 ? 1 : 0);
  cudaGraphSetConditional(inner, state[0] >> 31);
}

extern "C" __global__ void Choose(cudaGraphConditionalHandle handle, const unsigned* state) {
  cudaGraphSetConditional(handle, state[0] % 5);
}

extern "C" __global__ void Mix(unsigned* state, unsigned factor, unsigned add) { state[0] = state[0] * factor + add; }
