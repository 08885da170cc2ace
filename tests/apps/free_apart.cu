// SPDX-License-Identifier: Apache-2.0
// Memory of one GPU is freed while a kernel on another GPU waits for what the program does after the free. The GPUs
// have nothing to do with each other, so the free must not wait for that kernel. With one GPU the kernel has what it
// waits for before the free.
//
// Captured streams too: every third step frees while a stream of the first GPU is captured.
#include <vector>

#include "tests/apps/support/app.h"

__global__ void Fill(unsigned* out, int n, unsigned seed) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = (seed + unsigned(i)) * 2654435761u;
}

// One thread, so that any GPU has room for the copy that ends its wait.
__global__ void AddWhenTold(const volatile unsigned* told, unsigned step, unsigned* sum) {
  while (*told < step) __nanosleep(1000);
  *sum = *sum * 31u + step;
}

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {20, 1 << 14});
  const int n = options.size, blocks = (n + 255) / 256;
  int count = 0;
  CUDA_CHECK(cudaGetDeviceCount(&count));
  const int other = count - 1;
  cudaStream_t waiting, telling, captured;
  unsigned *told, *sum, *step_number;
  CUDA_CHECK(cudaSetDevice(other));
  CUDA_CHECK(cudaStreamCreateWithFlags(&waiting, cudaStreamNonBlocking));
  CUDA_CHECK(cudaStreamCreateWithFlags(&telling, cudaStreamNonBlocking));
  CUDA_CHECK(cudaMalloc(&told, sizeof(unsigned)));
  CUDA_CHECK(cudaMalloc(&sum, sizeof(unsigned)));
  CUDA_CHECK(cudaMemset(told, 0, sizeof(unsigned)));
  CUDA_CHECK(cudaMemset(sum, 0, sizeof(unsigned)));
  CUDA_CHECK(cudaDeviceSynchronize());
  CUDA_CHECK(cudaMallocHost(&step_number, sizeof(unsigned)));
  CUDA_CHECK(cudaSetDevice(0));
  CUDA_CHECK(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking));
  std::vector<unsigned> host(n);

  const auto tell = [&](int step) {
    CUDA_CHECK(cudaSetDevice(other));
    *step_number = unsigned(step);
    CUDA_CHECK(cudaMemcpyAsync(told, step_number, sizeof(unsigned), cudaMemcpyHostToDevice, telling));
    CUDA_CHECK(cudaStreamSynchronize(telling));
  };
  for (int step = 1; step <= options.steps; ++step) {
    CUDA_CHECK(cudaSetDevice(other));
    AddWhenTold<<<1, 1, 0, waiting>>>(told, unsigned(step), sum);
    LAUNCH_CHECK();
    if (other == 0) tell(step);
    CUDA_CHECK(cudaSetDevice(0));
    unsigned* memory;
    CUDA_CHECK(cudaMalloc(&memory, n * sizeof(unsigned)));
    Fill<<<blocks, 256>>>(memory, n, unsigned(step));
    LAUNCH_CHECK();
    CUDA_CHECK(cudaMemcpy(host.data(), memory, n * sizeof(unsigned), cudaMemcpyDeviceToHost));
    const bool capture = step % 3 == 0;
    if (capture) CUDA_CHECK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeRelaxed));
    CUDA_CHECK(cudaFree(memory));
    if (capture) {
      cudaGraph_t graph;
      CUDA_CHECK(cudaStreamEndCapture(captured, &graph));
      CUDA_CHECK(cudaGraphDestroy(graph));
    }
    if (other != 0) tell(step);
    CUDA_CHECK(cudaSetDevice(other));
    unsigned value = 0;
    CUDA_CHECK(cudaMemcpyAsync(&value, sum, sizeof(unsigned), cudaMemcpyDeviceToHost, waiting));
    CUDA_CHECK(cudaStreamSynchronize(waiting));
    app::Digest digest;
    digest.Add(host.data(), host.size() * sizeof(unsigned));
    digest.Add(value);
    printf("step %d: %016" PRIx64 "\n", step, digest.value());
    fflush(stdout);
    app::Step(step);
  }
  printf("free_apart steps=%d\n", options.steps);
  return 0;
}
