// SPDX-License-Identifier: Apache-2.0
// Tiled matrix products in shared memory (static tiles and dynamic shared memory in turn): repeatedly X <- A * X /
// max|A * X|.
#include <cmath>
#include <vector>

#include "tests/apps/support/app.h"

constexpr int kTile = 16;

__global__ void MultiplyStatic(const float* a, const float* b, float* c, int n) {
  __shared__ float tile_a[kTile][kTile];
  __shared__ float tile_b[kTile][kTile + 1];
  int row = blockIdx.y * kTile + threadIdx.y, column = blockIdx.x * kTile + threadIdx.x;
  float sum = 0.0f;
  for (int k = 0; k < n; k += kTile) {
    tile_a[threadIdx.y][threadIdx.x] = a[row * n + k + threadIdx.x];
    tile_b[threadIdx.y][threadIdx.x] = b[(k + threadIdx.y) * n + column];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTile; ++i) sum += tile_a[threadIdx.y][i] * tile_b[i][threadIdx.x];
    __syncthreads();
  }
  c[row * n + column] = sum;
}

__global__ void MultiplyDynamic(const float* a, const float* b, float* c, int n) {
  extern __shared__ float tiles[];
  float* tile_a = tiles;
  float* tile_b = tiles + kTile * kTile;
  int tx = threadIdx.x, ty = threadIdx.y;
  int row = blockIdx.y * kTile + ty, column = blockIdx.x * kTile + tx;
  float sum = 0.0f;
  for (int k = 0; k < n; k += kTile) {
    tile_a[ty * kTile + tx] = a[row * n + k + tx];
    tile_b[ty * kTile + tx] = b[(k + ty) * n + column];
    __syncthreads();
    for (int i = 0; i < kTile; ++i) sum += tile_a[ty * kTile + i] * tile_b[i * kTile + tx];
    __syncthreads();
  }
  c[row * n + column] = sum;
}

// The bit pattern of a non-negative float orders like the float.
__global__ void LargestBits(const float* c, int count, unsigned* bits) {
  unsigned best = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    best = max(best, __float_as_uint(fabsf(c[i])));
  }
  atomicMax(bits, best);
}

__global__ void Scale(const float* c, float* x, int count, const unsigned* bits) {
  float factor = 1.0f / __uint_as_float(*bits);
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) x[i] = c[i] * factor;
}

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {12, 48});
  const int n = (options.size + kTile - 1) / kTile * kTile, count = n * n;
  std::vector<float> a(count), x(count), c(count);
  for (int i = 0; i < count; ++i) {
    a[i] = static_cast<float>((i * 37) % 101 - 50) / 64.0f + (i % (n + 1) == 0 ? 1.0f : 0.0f);
    x[i] = static_cast<float>((i * 53) % 97 - 48) / 32.0f;
  }
  float *da, *dx, *dc;
  unsigned* bits;
  CUDA_CHECK(cudaMalloc(&da, count * sizeof(float)));
  CUDA_CHECK(cudaMalloc(&dx, count * sizeof(float)));
  CUDA_CHECK(cudaMalloc(&dc, count * sizeof(float)));
  CUDA_CHECK(cudaMalloc(&bits, sizeof(unsigned)));
  CUDA_CHECK(cudaMemcpy(da, a.data(), count * sizeof(float), cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaMemcpy(dx, x.data(), count * sizeof(float), cudaMemcpyHostToDevice));

  dim3 block(kTile, kTile), grid(n / kTile, n / kTile);
  const size_t shared = 2 * kTile * kTile * sizeof(float);
  for (int step = 1; step <= options.steps; ++step) {
    if (step % 2) {
      MultiplyStatic<<<grid, block>>>(da, dx, dc, n);
    } else {
      MultiplyDynamic<<<grid, block, shared>>>(da, dx, dc, n);
    }
    LAUNCH_CHECK();
    CUDA_CHECK(cudaMemsetAsync(bits, 0, sizeof(unsigned), 0));
    LargestBits<<<4, 128>>>(dc, count, bits);
    Scale<<<(count + 127) / 128, 128>>>(dc, dx, count, bits);
    LAUNCH_CHECK();
    app::Step(step);
  }

  std::vector<float> result(count);
  CUDA_CHECK(cudaMemcpy(result.data(), dx, count * sizeof(float), cudaMemcpyDeviceToHost));
  for (int step = 0; step < options.steps; ++step) {
    float largest = 0;
    for (int row = 0; row < n; ++row) {
      for (int column = 0; column < n; ++column) {
        double sum = 0;
        for (int k = 0; k < n; ++k) sum += static_cast<double>(a[row * n + k]) * x[k * n + column];
        c[row * n + column] = static_cast<float>(sum);
        largest = std::fmax(largest, std::fabs(c[row * n + column]));
      }
    }
    for (int i = 0; i < count; ++i) x[i] = c[i] / largest;
  }
  for (int i = 0; i < count; ++i) APP_CHECK(app::Near(result[i], x[i], 2e-4));

  app::Digest digest;
  digest.Add(result.data(), count * sizeof(float));
  double trace = 0;
  for (int i = 0; i < n; ++i) trace += result[i * n + i];
  printf("matmul n=%d steps=%d trace=%.17g digest=%016" PRIx64 "\n", n, options.steps, trace, digest.value());
  CUDA_CHECK(cudaFree(da));
  CUDA_CHECK(cudaFree(dx));
  CUDA_CHECK(cudaFree(dc));
  CUDA_CHECK(cudaFree(bits));
  return 0;
}
