// SPDX-License-Identifier: Apache-2.0
// Heat diffusion on a square, cut in four slabs. Each slab has a stream of its own; halo rows travel between neighbours
// as device-to-device copies that are ordered by events alone: the host never synchronises before the end, so a
// checkpoint finds launches and copies in flight.
#include <vector>

#include "tests/apps/support/app.h"

constexpr int kSlabs = 4;

__global__ void Diffuse(const float* in, float* out, int width, int rows, float rate) {
  int x = blockIdx.x * blockDim.x + threadIdx.x;
  int y = blockIdx.y * blockDim.y + threadIdx.y + 1;  // row 0 and row rows+1 are halos
  if (x >= width || y > rows) return;
  float center = in[y * width + x];
  float left = x > 0 ? in[y * width + x - 1] : center;
  float right = x < width - 1 ? in[y * width + x + 1] : center;
  float up = in[(y - 1) * width + x];
  float down = in[(y + 1) * width + x];
  out[y * width + x] = center + rate * (left + right + up + down - 4.0f * center);
}

static void ReferenceStep(const std::vector<float>& in, std::vector<float>* out, int n, float rate) {
  for (int y = 0; y < n; ++y) {
    for (int x = 0; x < n; ++x) {
      float center = in[y * n + x];
      float left = x > 0 ? in[y * n + x - 1] : center;
      float right = x < n - 1 ? in[y * n + x + 1] : center;
      float up = y > 0 ? in[(y - 1) * n + x] : 0.0f;
      float down = y < n - 1 ? in[(y + 1) * n + x] : 0.0f;
      (*out)[y * n + x] = center + rate * (left + right + up + down - 4.0f * center);
    }
  }
}

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {40, 64});
  const int n = (options.size + kSlabs - 1) / kSlabs * kSlabs;
  const int rows = n / kSlabs;
  const float rate = 0.1875f;
  const size_t row_bytes = n * sizeof(float);

  std::vector<float> field(n * n);
  for (int i = 0; i < n * n; ++i) field[i] = static_cast<float>((i * 7919) % 1009) / 16.0f;

  cudaStream_t stream[kSlabs];
  cudaEvent_t computed[kSlabs], exchanged[kSlabs];
  float* cur[kSlabs];
  float* next[kSlabs];
  for (int s = 0; s < kSlabs; ++s) {
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream[s], cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&computed[s], cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&exchanged[s], cudaEventDisableTiming));
    CUDA_CHECK(cudaMalloc(&cur[s], (rows + 2) * row_bytes));
    CUDA_CHECK(cudaMalloc(&next[s], (rows + 2) * row_bytes));
    CUDA_CHECK(cudaMemset(cur[s], 0, (rows + 2) * row_bytes));
    CUDA_CHECK(cudaMemset(next[s], 0, (rows + 2) * row_bytes));
    int first = s > 0 ? -1 : 0;  // with the neighbours' rows as halos
    int last = s < kSlabs - 1 ? rows + 1 : rows;
    CUDA_CHECK(cudaMemcpy(cur[s] + (first + 1) * n, field.data() + (s * rows + first) * n, (last - first) * row_bytes,
                          cudaMemcpyHostToDevice));
  }
  CUDA_CHECK(cudaDeviceSynchronize());

  dim3 block(32, 4), grid((n + 31) / 32, (rows + 3) / 4);
  for (int step = 1; step <= options.steps; ++step) {
    for (int s = 0; s < kSlabs; ++s) {
      // The neighbours' copies out of the buffer that this kernel overwrites must be done.
      if (step > 1 && s > 0) CUDA_CHECK(cudaStreamWaitEvent(stream[s], exchanged[s - 1], 0));
      if (step > 1 && s < kSlabs - 1) CUDA_CHECK(cudaStreamWaitEvent(stream[s], exchanged[s + 1], 0));
      Diffuse<<<grid, block, 0, stream[s]>>>(cur[s], next[s], n, rows, rate);
      LAUNCH_CHECK();
      CUDA_CHECK(cudaEventRecord(computed[s], stream[s]));
    }
    for (int s = 0; s < kSlabs; ++s) {
      if (s > 0) {
        CUDA_CHECK(cudaStreamWaitEvent(stream[s], computed[s - 1], 0));
        CUDA_CHECK(cudaMemcpyAsync(next[s], next[s - 1] + rows * n, row_bytes, cudaMemcpyDeviceToDevice, stream[s]));
      }
      if (s < kSlabs - 1) {
        CUDA_CHECK(cudaStreamWaitEvent(stream[s], computed[s + 1], 0));
        CUDA_CHECK(
            cudaMemcpyAsync(next[s] + (rows + 1) * n, next[s + 1] + n, row_bytes, cudaMemcpyDeviceToDevice, stream[s]));
      }
      CUDA_CHECK(cudaEventRecord(exchanged[s], stream[s]));
    }
    for (int s = 0; s < kSlabs; ++s) std::swap(cur[s], next[s]);
    app::Step(step);
  }

  std::vector<float> result(n * n);
  for (int s = 0; s < kSlabs; ++s) {
    CUDA_CHECK(
        cudaMemcpyAsync(result.data() + s * rows * n, cur[s] + n, rows * row_bytes, cudaMemcpyDeviceToHost, stream[s]));
    CUDA_CHECK(cudaStreamSynchronize(stream[s]));
  }

  std::vector<float> reference = field, other(n * n);
  for (int step = 0; step < options.steps; ++step) {
    ReferenceStep(reference, &other, n, rate);
    reference.swap(other);
  }
  for (int i = 0; i < n * n; ++i) APP_CHECK(app::Near(result[i], reference[i], 1e-4));

  app::Digest digest;
  digest.Add(result.data(), result.size() * sizeof(float));
  double sum = 0;
  for (float value : result) sum += value;
  printf("stencil n=%d steps=%d sum=%.17g digest=%016" PRIx64 "\n", n, options.steps, sum, digest.value());

  for (int s = 0; s < kSlabs; ++s) {
    CUDA_CHECK(cudaFree(cur[s]));
    CUDA_CHECK(cudaFree(next[s]));
    CUDA_CHECK(cudaEventDestroy(computed[s]));
    CUDA_CHECK(cudaEventDestroy(exchanged[s]));
    CUDA_CHECK(cudaStreamDestroy(stream[s]));
  }
  return 0;
}
