// SPDX-License-Identifier: Apache-2.0
// Addresses of functions in variables and in code; kernels that allocate and print.
#include <cstdio>

typedef int (*Function)(int);

struct Shape {
  __device__ virtual int Area(int x) = 0;
};
struct Square : Shape {
  __device__ __noinline__ int Area(int x) override { return x * x; }
};

__device__ __noinline__ int Twice(int x) { return 2 * x; }
__device__ __noinline__ int Negated(int x) { return -x; }
__device__ __noinline__ int Down(int x) { return x > 0 ? 1 + Down(x / 3 - 1) * x : 0; }

__device__ Function table[3] = {Twice, nullptr, Negated};
__constant__ Function fixed[2] = {nullptr, Twice};
__device__ int* last;

__global__ void Make(Shape** shapes, Function* functions, int n) {
  shapes[n] = new Square;
  functions[n] = n % 2 == 0 ? Down : table[n % 3];
  last = &n;
}
__global__ void Use(Shape** shapes, Function* functions, int n) {
  const int value = functions[n](shapes[n]->Area(n)) + fixed[n % 2](*last);
  printf("%d\n", value);
}
