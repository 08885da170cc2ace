// SPDX-License-Identifier: Apache-2.0
// What an ordinary program gets to see that has no GPU server: from the runtime, and from the driver.

#include <cuda.h>
#include <stdio.h>

int main() {
  int version = 0, count = -1;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  printf("count %s\n", cudaGetErrorName(counted));
  const cudaError_t allocated = cudaMalloc(reinterpret_cast<void**>(&count), 16);
  printf("malloc %s\n", cudaGetErrorName(allocated));
  printf("version %s\n", cuDriverGetVersion(&version) == CUDA_SUCCESS && version >= CUDA_VERSION ? "fits" : "missing");
  printf("init %d\n", int(cuInit(0)));
  return 0;
}
