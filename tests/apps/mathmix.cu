// SPDX-License-Identifier: Apache-2.0
// The device's math library, recursion, function pointers, local arrays, conversions, 64-bit and bit-field arithmetic,
// function attributes and occupancy. Each lane carries its value from step to step.
#include <cmath>
#include <vector>

#include "tests/apps/support/app.h"

struct Lane {
  double value;
  float single;
  unsigned long long bits;
};

typedef double (*Operation)(double);

__host__ __device__ static double Wave(double x) { return sin(x) + 0.25 * cos(3 * x); }
__host__ __device__ static double Growth(double x) { return exp(-x * x) + log1p(fabs(x)); }
__host__ __device__ static double Root(double x) { return cbrt(x) + sqrt(fabs(x) + 1.0) + atan2(x, 2.0); }
__host__ __device__ static double Special(double x) { return erf(x) + pow(fabs(x) + 0.5, 1.25) + tanh(x); }

__device__ Operation operations[4] = {Wave, Growth, Root, Special};

__host__ __device__ static unsigned Fibonacci(unsigned n) { return n < 2 ? n : Fibonacci(n - 1) + Fibonacci(n - 2); }

__host__ __device__ inline unsigned long long Permute(unsigned long long bits, unsigned step) {
  unsigned char digits[16];  // in local memory: indexed by values that are not known when compiling
  for (int i = 0; i < 16; ++i) digits[i] = bits >> (4 * i) & 15;
  for (int i = 0; i < 16; ++i) {
    int j = (digits[i] + step) & 15;
    unsigned char swap = digits[i];
    digits[i] = digits[j];
    digits[j] = swap;
  }
  unsigned long long out = 0;
  for (int i = 0; i < 16; ++i) out |= static_cast<unsigned long long>(digits[i]) << (4 * i);
  return out * 6364136223846793005ull + 1442695040888963407ull;
}

__global__ void Advance(Lane* lanes, int n, unsigned step) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  Lane lane = lanes[i];
  lane.value = operations[(i + step) % 4](lane.value) + 0.001 * Fibonacci(i % 6 + step % 3);
  lane.single = fmaf(sinf(lane.single), 1.5f, __float2int_rn(lane.single * 4.0f) * 0.125f) + sqrtf(fabsf(lane.single));
  lane.bits = Permute(lane.bits, step) ^ __brevll(lane.bits) ^ (__umul64hi(lane.bits, 0x9e3779b97f4a7c15ull) >> 3);
  lane.bits += __popcll(lane.bits) + __clz(static_cast<int>(lane.bits)) + __ffs(static_cast<int>(lane.bits >> 32));
  lanes[i] = lane;
}

__global__ void NeedsManyBytes(int* out) {
  extern __shared__ int words[];
  words[threadIdx.x] = threadIdx.x;
  __syncthreads();
  if (threadIdx.x == 0) *out = words[blockDim.x - 1];
}

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {16, 256});
  const int n = options.size;
  std::vector<Lane> host(n);
  for (int i = 0; i < n; ++i) host[i] = {i * 0.01 - 1.0, i * 0.03125f - 2.0f, 0x0123456789abcdefull * (i + 1)};
  std::vector<Lane> want = host;

  Lane* lanes;
  int* out;
  CUDA_CHECK(cudaMalloc(&lanes, n * sizeof(Lane)));
  CUDA_CHECK(cudaMalloc(&out, sizeof(int)));
  CUDA_CHECK(cudaMemcpy(lanes, host.data(), n * sizeof(Lane), cudaMemcpyHostToDevice));

  cudaFuncAttributes attributes;
  CUDA_CHECK(cudaFuncGetAttributes(&attributes, Advance));
  APP_CHECK(attributes.maxThreadsPerBlock >= 64);
  int resident = 0;
  CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, Advance, 64, 0));
  APP_CHECK(resident >= 1);
  CUDA_CHECK(cudaFuncSetAttribute(NeedsManyBytes, cudaFuncAttributeMaxDynamicSharedMemorySize, 60 * 1024));

  for (int step = 1; step <= options.steps; ++step) {
    Advance<<<(n + 63) / 64, 64>>>(lanes, n, step);
    NeedsManyBytes<<<1, 64, 56 * 1024>>>(out);  // above the default limit: the attribute must survive a restart
    LAUNCH_CHECK();
    app::Step(step);
  }
  int last = 0;
  CUDA_CHECK(cudaMemcpy(host.data(), lanes, n * sizeof(Lane), cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaMemcpy(&last, out, sizeof(last), cudaMemcpyDeviceToHost));
  APP_CHECK(last == 63);

  const Operation table[4] = {Wave, Growth, Root, Special};
  for (int step = 1; step <= options.steps; ++step) {
    for (int i = 0; i < n; ++i) {
      Lane& lane = want[i];
      lane.value = table[(i + step) % 4](lane.value) + 0.001 * Fibonacci(i % 6 + step % 3);
      unsigned long long reversed = 0;
      for (int b = 0; b < 64; ++b) reversed |= (lane.bits >> b & 1) << (63 - b);
      unsigned long long high = static_cast<unsigned __int128>(lane.bits) * 0x9e3779b97f4a7c15ull >> 64;
      lane.bits = Permute(lane.bits, step) ^ reversed ^ (high >> 3);
      unsigned low_word = static_cast<unsigned>(lane.bits);
      int zeros = low_word ? __builtin_clz(low_word) : 32;
      lane.bits += __builtin_popcountll(lane.bits) + zeros + __builtin_ffs(static_cast<int>(lane.bits >> 32));
    }
  }
  app::Digest digest;
  double sum = 0;
  for (int i = 0; i < n; ++i) {
    APP_CHECK(app::Near(host[i].value, want[i].value, 1e-8));
    APP_CHECK(host[i].bits == want[i].bits);
    APP_CHECK(std::isfinite(host[i].single));
    digest.Add(host[i].value);
    digest.Add(host[i].single);
    digest.Add(host[i].bits);
    sum += host[i].value;
  }
  printf("mathmix n=%d steps=%d sum=%.17g single=%.9g digest=%016" PRIx64 "\n", n, options.steps, sum,
         host[n / 2].single, digest.value());
  CUDA_CHECK(cudaFree(lanes));
  CUDA_CHECK(cudaFree(out));
  return 0;
}
