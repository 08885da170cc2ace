// SPDX-License-Identifier: Apache-2.0
// Input for image_test.cc: one variable of every sort, which the test looks for in the compiler's output.
#include <cstdio>

__device__ int counter = 5;
__device__ float table[1000];
__constant__ double coefficients[16];
__constant__ short filled[3] = {1, 2, 3};
static __device__ long long hidden;
__managed__ int managed;
__device__ float4 vectors[2][3];
struct Pair {
  char a;
  double b;
};
__device__ Pair pairs[4] = {{1, 2.0}};
namespace space {
__device__ char named[3];
}
template <int N>
__device__ int templated = N;
extern __shared__ int shared_memory[];

__global__ void Kernel(int* out) {
  static __device__ unsigned long long calls;
  ++calls;
  ++counter;
  table[threadIdx.x] += float(coefficients[3]) + filled[threadIdx.x];
  ++hidden;
  ++space::named[0];
  vectors[1][2].x += float(pairs[1].b);
  out[0] = int(hidden) + managed + templated<3>;
  printf("a text %d\n", shared_memory[0]);
}
