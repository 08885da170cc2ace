// SPDX-License-Identifier: Apache-2.0
// Histograms with atomics: counts in shared memory merged into global memory, plus every other integer atomic on words
// that all threads share. All operations commute, so the result does not depend on the order; the host checks it
// exactly.
#include <algorithm>
#include <vector>

#include "tests/apps/support/app.h"

constexpr int kBins = 64;

struct Shared {
  unsigned long long total;
  unsigned max, min, bits_or, bits_and, bits_xor;
  int signed_max;
  unsigned wrapped;  // atomicInc
  unsigned product;  // by compare-and-swap
  double exact;      // multiples of 1/8: addition is exact in any order
};

__host__ __device__ inline unsigned Sample(unsigned i, unsigned step) {
  unsigned x = i * 747796405u + step * 2891336453u + 1u;
  x = ((x >> ((x >> 28) + 4)) ^ x) * 277803737u;
  return (x >> 22) ^ x;
}

__device__ void AtomicMultiplyOdd(unsigned* address, unsigned factor) {
  unsigned seen = *address, assumed;
  do {
    assumed = seen;
    seen = atomicCAS(address, assumed, assumed * factor);
  } while (seen != assumed);
}

__global__ void Count(unsigned* bins, Shared* shared, int n, unsigned step) {
  __shared__ unsigned local[kBins];
  for (int b = threadIdx.x; b < kBins; b += blockDim.x) local[b] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    unsigned v = Sample(i, step);
    atomicAdd(&local[v % kBins], 1u);
    if (i % 16 == 0) {
      atomicAdd(&shared->total, static_cast<unsigned long long>(v));
      atomicMax(&shared->max, v);
      atomicMin(&shared->min, v);
      atomicOr(&shared->bits_or, v & 0x0f0f0f0fu);
      atomicAnd(&shared->bits_and, v | 0xfff00fffu);
      atomicXor(&shared->bits_xor, v);
      atomicMax(&shared->signed_max, -static_cast<int>(v >> 4));
      atomicInc(&shared->wrapped, 1000u);
      AtomicMultiplyOdd(&shared->product, v | 1u);
      atomicAdd(&shared->exact, (v % 1024) * 0.125);
    }
  }
  __syncthreads();
  for (int b = threadIdx.x; b < kBins; b += blockDim.x) atomicAdd(&bins[b], local[b]);
}

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {30, 8192});
  const int n = options.size;
  const Shared start = {0, 0, 0xffffffffu, 0, 0xffffffffu, 0, -0x7fffffff, 0, 1, 0.0};

  unsigned* bins;
  Shared* shared;
  CUDA_CHECK(cudaMalloc(&bins, kBins * sizeof(unsigned)));
  CUDA_CHECK(cudaMalloc(&shared, sizeof(Shared)));
  CUDA_CHECK(cudaMemset(bins, 0, kBins * sizeof(unsigned)));
  CUDA_CHECK(cudaMemcpy(shared, &start, sizeof(start), cudaMemcpyHostToDevice));

  for (int step = 1; step <= options.steps; ++step) {
    Count<<<6, 128>>>(bins, shared, n, step);
    LAUNCH_CHECK();
    app::Step(step);
  }

  std::vector<unsigned> counts(kBins), expected(kBins);
  Shared got, want = start;
  CUDA_CHECK(cudaMemcpy(counts.data(), bins, kBins * sizeof(unsigned), cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaMemcpy(&got, shared, sizeof(got), cudaMemcpyDeviceToHost));
  for (int step = 1; step <= options.steps; ++step) {
    for (int i = 0; i < n; ++i) {
      unsigned v = Sample(i, step);
      ++expected[v % kBins];
      if (i % 16) continue;
      want.total += v;
      want.max = std::max(want.max, v);
      want.min = std::min(want.min, v);
      want.bits_or |= v & 0x0f0f0f0fu;
      want.bits_and &= v | 0xfff00fffu;
      want.bits_xor ^= v;
      want.signed_max = std::max(want.signed_max, -static_cast<int>(v >> 4));
      want.wrapped = want.wrapped >= 1000u ? 0 : want.wrapped + 1;
      want.product *= v | 1u;
      want.exact += (v % 1024) * 0.125;
    }
  }
  APP_CHECK(counts == expected);
  APP_CHECK(got.total == want.total && got.max == want.max && got.min == want.min);
  APP_CHECK(got.bits_or == want.bits_or && got.bits_and == want.bits_and && got.bits_xor == want.bits_xor);
  APP_CHECK(got.signed_max == want.signed_max && got.wrapped == want.wrapped && got.product == want.product);
  APP_CHECK(got.exact == want.exact);

  app::Digest digest;
  digest.Add(counts.data(), kBins * sizeof(unsigned));
  printf("histogram n=%d steps=%d total=%llu product=%u exact=%.17g digest=%016" PRIx64 "\n", n, options.steps,
         got.total, got.product, got.exact, digest.value());
  CUDA_CHECK(cudaFree(bins));
  CUDA_CHECK(cudaFree(shared));
  return 0;
}
