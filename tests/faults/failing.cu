// SPDX-License-Identifier: Apache-2.0
// A program whose kernel fails, in the way that its argument says: none, assert, illegal, misaligned, trap, or wild (a
// store far away in a stream of its own). It prints on both sides of the fault, and then the errors that the runtime
// gives. At the end, with the error that cannot be cleared, is a step (app::Step).
//
// Usage: failing KIND
#include <cassert>
#include <cstdio>
#include <cstring>

#include "tests/apps/support/app.h"

__global__ void Speak(int number) { printf("device: line %d of thread %d\n", number, int(threadIdx.x)); }

__global__ void Fail(int kind, int* data) {
  if (threadIdx.x == 0) printf("device: about to do %d\n", kind);
  switch (kind) {
    case 1:
      assert(data[threadIdx.x] < 3);
      break;
    case 2:
      *reinterpret_cast<int*>(0x10) = 1;
      break;
    case 3:
      *reinterpret_cast<int*>(reinterpret_cast<char*>(data) + 1) = 1;
      break;
    case 4:
      __trap();
      break;
    case 5:
      data[1ull << 40] = 1;
      break;
    default:
      data[threadIdx.x] += 1;
  }
}

static void Show(const char* what, cudaError_t error) { printf("%s: %s\n", what, cudaGetErrorName(error)); }

int main(int argc, char** argv) {
  static const char* const kKinds[] = {"none", "assert", "illegal", "misaligned", "trap", "wild"};
  int kind = -1;
  for (int i = 0; i < 6; ++i) {
    if (argc == 2 && !strcmp(argv[1], kKinds[i])) kind = i;
  }
  if (kind < 0) {
    fprintf(stderr, "usage: %s none|assert|illegal|misaligned|trap|wild\n", argv[0]);
    return 2;
  }
  int* data = nullptr;
  int host[4] = {1, 2, 3, 4};
  Show("malloc", cudaMalloc(&data, sizeof(host)));
  Show("copy", cudaMemcpy(data, host, sizeof(host), cudaMemcpyHostToDevice));
  printf("host: first\n");
  Speak<<<1, 2>>>(1);
  Show("launch", cudaGetLastError());
  Show("synchronize", cudaDeviceSynchronize());
  printf("host: second\n");
  cudaStream_t stream;
  Show("stream", cudaStreamCreate(&stream));
  Fail<<<1, 4, 0, stream>>>(kind, data);
  Show("launch", cudaGetLastError());
  Show("stream synchronize", cudaStreamSynchronize(stream));
  printf("host: third\n");
  // Sticky: from here on everything fails, in the same way.
  Show("copy back", cudaMemcpy(host, data, sizeof(host), cudaMemcpyDeviceToHost));
  int* more = nullptr;
  Show("malloc", cudaMalloc(&more, 64));
  Speak<<<1, 1>>>(2);
  Show("launch", cudaGetLastError());
  Show("synchronize", cudaDeviceSynchronize());
  Show("peek", cudaPeekAtLastError());
  if (kind == 0) printf("%d %d %d %d\n", host[0], host[1], host[2], host[3]);
  // A reset makes the device usable again only for what has not failed; natively the process has to end.
  fflush(stdout);
  app::Step(1);
  return 0;
}
