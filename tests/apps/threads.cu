// SPDX-License-Identifier: Apache-2.0
// Several host threads with a stream, buffers and an event each; in every step each thread works on its own part, then
// reads its neighbour's after a barrier, ordered by the neighbour's event. Also built with a default stream per thread.
#include <pthread.h>

#include <thread>
#include <vector>

#include "tests/apps/support/app.h"

constexpr int kThreads = 4;

__global__ void Grow(unsigned* mine, int n, unsigned step) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) mine[i] = mine[i] * 1103515245u + step;
}

__global__ void Absorb(unsigned long long* sums, const unsigned* neighbour, int n, unsigned step) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) sums[i] = sums[i] * 7 + (neighbour[i] ^ step);
}

struct Worker {
  cudaStream_t stream;
  cudaEvent_t grown, absorbed;
  unsigned* mine;
  unsigned long long* sums;
};

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {24, 1024});
  const int n = options.size, grid = (n + 127) / 128;
  std::vector<Worker> workers(kThreads);
  std::vector<std::vector<unsigned long long>> results(kThreads, std::vector<unsigned long long>(n));
  pthread_barrier_t barrier;
  pthread_barrier_init(&barrier, nullptr, kThreads);

  auto run = [&](int t) {
    Worker& self = workers[t];
    CUDA_CHECK(cudaSetDevice(0));
#ifdef APP_DEFAULT_STREAM
    self.stream = cudaStreamPerThread;
#else
    CUDA_CHECK(cudaStreamCreate(&self.stream));
#endif
    CUDA_CHECK(cudaEventCreateWithFlags(&self.grown, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&self.absorbed, cudaEventDisableTiming));
    CUDA_CHECK(cudaMalloc(&self.mine, n * sizeof(unsigned)));
    CUDA_CHECK(cudaMalloc(&self.sums, n * sizeof(unsigned long long)));
    CUDA_CHECK(cudaMemsetAsync(self.mine, t + 1, n * sizeof(unsigned), self.stream));
    CUDA_CHECK(cudaMemsetAsync(self.sums, 0, n * sizeof(unsigned long long), self.stream));
    CUDA_CHECK(cudaStreamSynchronize(self.stream));
    pthread_barrier_wait(&barrier);
    for (int step = 1; step <= options.steps; ++step) {
      const Worker& reader = workers[(t + kThreads - 1) % kThreads];
      if (step > 1) CUDA_CHECK(cudaStreamWaitEvent(self.stream, reader.absorbed, 0));
#ifdef APP_DEFAULT_STREAM
      Grow<<<grid, 128>>>(self.mine, n, step + t);  // the thread's own default stream
#else
      Grow<<<grid, 128, 0, self.stream>>>(self.mine, n, step + t);
#endif
      LAUNCH_CHECK();
      CUDA_CHECK(cudaEventRecord(self.grown, self.stream));
      pthread_barrier_wait(&barrier);
      const Worker& neighbour = workers[(t + 1) % kThreads];
      CUDA_CHECK(cudaStreamWaitEvent(self.stream, neighbour.grown, 0));
      Absorb<<<grid, 128, 0, self.stream>>>(self.sums, neighbour.mine, n, step);
      LAUNCH_CHECK();
      CUDA_CHECK(cudaEventRecord(self.absorbed, self.stream));
      pthread_barrier_wait(&barrier);
      if (t == 0) app::Step(step);
    }
    CUDA_CHECK(cudaMemcpyAsync(results[t].data(), self.sums, n * sizeof(unsigned long long), cudaMemcpyDeviceToHost,
                               self.stream));
    CUDA_CHECK(cudaStreamSynchronize(self.stream));
    pthread_barrier_wait(&barrier);
    CUDA_CHECK(cudaFree(self.mine));
    CUDA_CHECK(cudaFree(self.sums));
    CUDA_CHECK(cudaEventDestroy(self.grown));
    CUDA_CHECK(cudaEventDestroy(self.absorbed));
#ifndef APP_DEFAULT_STREAM
    CUDA_CHECK(cudaStreamDestroy(self.stream));
#endif
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) threads.emplace_back(run, t);
  for (std::thread& thread : threads) thread.join();

  // The same on the host.
  std::vector<unsigned> mine(kThreads);
  std::vector<unsigned long long> sums(kThreads);
  for (int t = 0; t < kThreads; ++t) mine[t] = 0x01010101u * (t + 1);
  for (int step = 1; step <= options.steps; ++step) {
    for (int t = 0; t < kThreads; ++t) mine[t] = mine[t] * 1103515245u + (step + t);
    for (int t = 0; t < kThreads; ++t) sums[t] = sums[t] * 7 + (mine[(t + 1) % kThreads] ^ static_cast<unsigned>(step));
  }
  app::Digest digest;
  for (int t = 0; t < kThreads; ++t) {
    for (unsigned long long value : results[t]) APP_CHECK(value == sums[t]);
    digest.Add(results[t].data(), n * sizeof(unsigned long long));
  }
  printf("threads n=%d steps=%d threads=%d digest=%016" PRIx64 "\n", n, options.steps, kThreads, digest.value());
  return 0;
}
