// SPDX-License-Identifier: Apache-2.0
// A job whose pauses are measured: it holds GPU memory, rewrites a fixed part of it in each step, and checks in each
// step that the part holds what the step before wrote, and now and then that the rest holds what it always held.
//
// Usage: pause_job MIB PERCENT STEP_MS SECONDS. Steps begin every STEP_MS (0: as soon as the one before is done).
// Prints "ready", then a line every 20 milliseconds, with the steps in it, the longest time from one step to the
// next, and when the line's last step ended (CLOCK_MONOTONIC), and "wrong 0" in the end; exit code 1 if anything was
// wrong.
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#define CHECK(call)                                                   \
  do {                                                                \
    const cudaError_t result = (call);                                \
    if (result != cudaSuccess) {                                      \
      fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(result)); \
      exit(2);                                                        \
    }                                                                 \
  } while (0)

namespace {

constexpr size_t kBlock = size_t{256} << 20;
constexpr int kRestEvery = 100;      // steps
constexpr double kLineEvery = 0.02;  // seconds

double Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + double(now.tv_nsec) / 1e9;
}

__device__ uint64_t Word(uint64_t index, uint64_t step) { return (index + 1) * 0x9e3779b97f4a7c15ull ^ step << 20; }

__global__ void Write(uint64_t* words, size_t count, uint64_t step) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    words[i] = Word(i, step);
  }
}

// Compares with what `step` wrote, and writes what `next` does.
__global__ void Rewrite(uint64_t* words, size_t count, uint64_t step, uint64_t next, unsigned long long* wrong) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    if (words[i] != Word(i, step)) atomicAdd(wrong, 1);
    words[i] = Word(i, next);
  }
}

__global__ void Compare(const uint64_t* words, size_t count, unsigned long long* wrong) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    if (words[i] != Word(i, 0)) atomicAdd(wrong, 1);
  }
}

struct Part {
  uint64_t *hot, *rest;
  size_t hot_words, rest_words;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    fprintf(stderr, "usage: pause_job MIB PERCENT STEP_MS SECONDS\n");
    return 2;
  }
  const size_t bytes = strtoull(argv[1], nullptr, 10) << 20;
  const size_t percent = strtoull(argv[2], nullptr, 10);
  const double step_seconds = atof(argv[3]) / 1000, seconds = atof(argv[4]);
  constexpr unsigned kGrid = 1024, kThreads = 256;
  std::vector<Part> parts;
  for (size_t held = 0; held < bytes;) {
    const size_t size = std::min(kBlock, bytes - held);
    uint64_t* memory = nullptr;
    CHECK(cudaMalloc(&memory, size));
    Part part;
    part.hot_words = size / 8 * percent / 100;
    part.rest_words = size / 8 - part.hot_words;
    part.hot = memory;
    part.rest = memory + part.hot_words;
    Write<<<kGrid, kThreads>>>(part.hot, part.hot_words, 1);
    Write<<<kGrid, kThreads>>>(part.rest, part.rest_words, 0);
    parts.push_back(part);
    held += size;
  }
  unsigned long long *wrong = nullptr, found = 0;
  CHECK(cudaMalloc(&wrong, sizeof(*wrong)));
  CHECK(cudaMemset(wrong, 0, sizeof(*wrong)));
  CHECK(cudaDeviceSynchronize());
  printf("ready\n");
  fflush(stdout);
  const double begin = Now();
  double line = begin, last = begin, longest = 0;
  int steps = 0;
  for (uint64_t step = 1; Now() - begin < seconds; ++step) {
    const bool rest = step % kRestEvery == 0;
    for (const Part& part : parts) {
      if (part.hot_words != 0) Rewrite<<<kGrid, kThreads>>>(part.hot, part.hot_words, step, step + 1, wrong);
      if (rest && part.rest_words != 0) Compare<<<kGrid, kThreads>>>(part.rest, part.rest_words, wrong);
    }
    CHECK(cudaDeviceSynchronize());
    const double now = Now();
    longest = std::max(longest, now - last);
    last = now;
    ++steps;
    if (now - line >= kLineEvery) {
      CHECK(cudaMemcpy(&found, wrong, sizeof(found), cudaMemcpyDeviceToHost));
      printf("steps %d in %.4f s, longest %.1f ms, wrong %llu, at %.4f\n", steps, now - line, longest * 1e3, found,
             now);
      fflush(stdout);
      line = now;
      steps = 0;
      longest = 0;
    }
    const double left = step_seconds - (Now() - now);
    if (left > 0) usleep(useconds_t(left * 1e6));
  }
  CHECK(cudaMemcpy(&found, wrong, sizeof(found), cudaMemcpyDeviceToHost));
  printf("wrong %llu\n", found);
  return found != 0;
}
