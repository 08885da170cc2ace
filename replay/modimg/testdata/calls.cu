// SPDX-License-Identifier: Apache-2.0
// Functions that are only called, and variables whose addresses are taken.
__device__ int counters[4];
__device__ int* chosen = counters + 1;

__device__ __noinline__ int Twice(int x) { return 2 * x + counters[x & 3]; }
__device__ __noinline__ int Down(int x) { return x > 0 ? 1 + Down(x / 3 - 1) * x : 0; }

__global__ void Call(int* out, int n) { out[n] = Twice(n) + Down(n) + *chosen; }
