// SPDX-License-Identifier: Apache-2.0
// The kernels of mpi_stencil and their launch.
#include "tests/apps/mpi_stencil.h"

__global__ void Diffuse(const float* in, float* out, int width, int rows, unsigned long long* sum, unsigned* change) {
  int x = blockIdx.x * blockDim.x + threadIdx.x;
  int y = blockIdx.y * blockDim.y + threadIdx.y + 1;  // row 0 and row rows+1 are halos
  if (x >= width || y > rows) return;
  float center = in[y * width + x];
  float left = x > 0 ? in[y * width + x - 1] : center;
  float right = x < width - 1 ? in[y * width + x + 1] : center;
  float up = in[(y - 1) * width + x];
  float down = in[(y + 1) * width + x];
  float next = center + 0.1875f * (left + right + up + down - 4.0f * center);
  out[y * width + x] = next;
  atomicAdd(sum, static_cast<unsigned long long>(__float_as_uint(next)));
  atomicMax(change, __float_as_uint(fabsf(next - center)));
}

cudaError_t LaunchDiffuse(const float* in, float* out, int width, int rows, unsigned long long* sum, unsigned* change,
                          cudaStream_t stream) {
  const dim3 block(32, 4), grid((width + 31) / 32, (rows + 3) / 4);
  Diffuse<<<grid, block, 0, stream>>>(in, out, width, rows, sum, change);
  return cudaGetLastError();
}
