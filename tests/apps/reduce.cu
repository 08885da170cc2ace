// SPDX-License-Identifier: Apache-2.0
// Reductions with warp shuffles and votes over an array that every step scrambles in place: sum, minimum, maximum, a
// count by ballot, and an inclusive prefix sum inside each warp. Integers, so the host's reference must agree exactly;
// a double sum beside it has a fixed order and so a fixed result.
#include <algorithm>
#include <vector>

#include "tests/apps/support/app.h"

constexpr int kBlock = 128;
constexpr unsigned kAll = 0xffffffffu;

struct Result {
  unsigned long long sum;
  unsigned min;
  unsigned max;
  unsigned odd;
  unsigned scan;
  double weighted;
};

__host__ __device__ inline unsigned Scramble(unsigned x) {
  x ^= x << 13;
  x ^= x >> 17;
  x ^= x << 5;
  return x;
}

__global__ void Advance(unsigned* state, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) state[i] = Scramble(state[i]);
}

__device__ Result ReduceWarp(Result r) {
  for (int offset = 16; offset > 0; offset /= 2) {
    r.sum += __shfl_down_sync(kAll, r.sum, offset);
    r.min = min(r.min, __shfl_xor_sync(kAll, r.min, offset));
    r.max = max(r.max, __shfl_xor_sync(kAll, r.max, offset));
    r.weighted += __shfl_down_sync(kAll, r.weighted, offset);
  }
  return r;
}

__global__ void Reduce(const unsigned* state, int n, Result* blocks) {
  __shared__ Result warps[kBlock / 32];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Result r = {0, 0xffffffffu, 0, 0, 0, 0.0};
  for (int base = blockIdx.x * blockDim.x; base < n; base += gridDim.x * blockDim.x) {
    int i = base + threadIdx.x;
    unsigned v = i < n ? state[i] : 0;
    unsigned present = __ballot_sync(kAll, i < n);
    unsigned odd = __ballot_sync(kAll, v & 1);
    unsigned scan = v & 0xff;
    for (int offset = 1; offset < 32; offset *= 2) {
      unsigned other = __shfl_up_sync(kAll, scan, offset);
      if (lane >= offset) scan += other;
    }
    unsigned total = __shfl_sync(kAll, scan, 31);
    if (lane == 0) {
      r.odd += __popc(odd & present);
      r.scan ^= total;
    }
    if (i < n) {
      r.sum += v;
      r.min = min(r.min, v);
      r.max = max(r.max, v);
      r.weighted += v * (1.0 / 4294967296.0) * (i % 31);
    }
  }
  r = ReduceWarp(r);
  if (lane == 0) warps[warp] = r;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kBlock / 32; ++w) {
      r.sum += warps[w].sum;
      r.min = min(r.min, warps[w].min);
      r.max = max(r.max, warps[w].max);
      r.odd += warps[w].odd;
      r.scan ^= warps[w].scan;
      r.weighted += warps[w].weighted;
    }
    blocks[blockIdx.x] = r;
  }
}

__global__ void Finish(const Result* blocks, int count, Result* history, int slot) {
  Result r = blocks[0];
  for (int b = 1; b < count; ++b) {
    r.sum += blocks[b].sum;
    r.min = min(r.min, blocks[b].min);
    r.max = max(r.max, blocks[b].max);
    r.odd += blocks[b].odd;
    r.scan ^= blocks[b].scan;
    r.weighted += blocks[b].weighted;
  }
  history[slot] = r;
}

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {30, 4096});
  const int n = options.size, blocks = 8;
  std::vector<unsigned> host(n);
  for (int i = 0; i < n; ++i) host[i] = 2654435761u * (i + 1) | 1u;

  unsigned* state;
  Result *partial, *history;
  CUDA_CHECK(cudaMalloc(&state, n * sizeof(unsigned)));
  CUDA_CHECK(cudaMalloc(&partial, blocks * sizeof(Result)));
  CUDA_CHECK(cudaMalloc(&history, options.steps * sizeof(Result)));
  CUDA_CHECK(cudaMemcpy(state, host.data(), n * sizeof(unsigned), cudaMemcpyHostToDevice));

  for (int step = 1; step <= options.steps; ++step) {
    Advance<<<blocks, kBlock>>>(state, n);
    Reduce<<<blocks, kBlock>>>(state, n, partial);
    Finish<<<1, 1>>>(partial, blocks, history, step - 1);
    LAUNCH_CHECK();
    app::Step(step);
  }

  std::vector<Result> results(options.steps);
  CUDA_CHECK(cudaMemcpy(results.data(), history, results.size() * sizeof(Result), cudaMemcpyDeviceToHost));
  app::Digest digest;
  for (const Result& r : results) {
    for (unsigned& v : host) v = Scramble(v);
    unsigned long long sum = 0;
    unsigned odd = 0, low = 0xffffffffu, high = 0, scan = 0;
    double weighted = 0;
    for (int i = 0; i < n; ++i) {
      sum += host[i];
      odd += host[i] & 1;
      low = std::min(low, host[i]);
      high = std::max(high, host[i]);
      weighted += host[i] * (1.0 / 4294967296.0) * (i % 31);
    }
    for (int first = 0; first < n; first += 32) {
      unsigned total = 0;
      for (int i = first; i < n && i < first + 32; ++i) total += host[i] & 0xff;
      scan ^= total;
    }
    APP_CHECK(r.sum == sum && r.odd == odd && r.min == low && r.max == high && r.scan == scan);
    APP_CHECK(app::Near(r.weighted, weighted, 1e-11));
    digest.Add(r.sum);
    digest.Add(r.odd);
    digest.Add(r.min);
    digest.Add(r.max);
    digest.Add(r.weighted);
  }
  const Result& last = results.back();
  printf("reduce n=%d steps=%d sum=%llu min=%u max=%u odd=%u weighted=%.17g digest=%016" PRIx64 "\n", n, options.steps,
         last.sum, last.min, last.max, last.odd, last.weighted, digest.value());
  CUDA_CHECK(cudaFree(state));
  CUDA_CHECK(cudaFree(partial));
  CUDA_CHECK(cudaFree(history));
  return 0;
}
