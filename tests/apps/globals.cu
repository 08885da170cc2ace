// SPDX-License-Identifier: Apache-2.0
// State that lives in module globals alone: __device__ and __constant__ variables, external and static, some written by
// the host by name, some never named by the host, with initial values and without, arrays, pointers to other globals,
// and a second module (globals_other.cu) whose static variables have the same names.
#include <vector>

#include "tests/apps/globals.h"
#include "tests/apps/support/app.h"

constexpr int kTable = 64;

__device__ unsigned long long named_counter = 1000;                    // read by name at the end
__device__ unsigned long long unnamed_counter = 7;                     // the host never names it
static __device__ unsigned history[kTable];                            // static, zero at first, never named
static __device__ unsigned long long checksum = 0x1234;                // static, the other module has one as well
__device__ unsigned long long* indirect = &unnamed_counter;            // a pointer to another global
__constant__ unsigned factors[kTable];                                 // written by the host during the run
static __constant__ unsigned long long offsets[4] = {11, 22, 33, 44};  // constant from the image
__constant__ double scale = 0.5;                                       // overwritten half way
__device__ double accumulated[4];                                      // read by name at the end

__global__ void Count(unsigned step) {
  unsigned i = threadIdx.x;
  history[i] += factors[i] * step + i;
  __syncthreads();
  if (i == 0) {
    named_counter += step;
    *indirect += offsets[step % 4];
    unsigned long long sum = checksum;
    for (int k = 0; k < kTable; ++k) sum = sum * 31 + history[k];
    checksum = sum;
    accumulated[step % 4] += scale * step;
  }
}

__global__ void Collect(unsigned long long* out) {
  out[0] = unnamed_counter;
  out[1] = checksum;
  unsigned long long sum = 0;
  for (int k = 0; k < kTable; ++k) sum = sum * 33 + history[k];
  out[2] = sum;
}

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {60, kTable});
  std::vector<unsigned> table(kTable);
  for (int i = 0; i < kTable; ++i) table[i] = 3 * i + 1;
  CUDA_CHECK(cudaMemcpyToSymbol(factors, table.data(), kTable * sizeof(unsigned)));

  for (int step = 1; step <= options.steps; ++step) {
    if (step == options.steps / 2) {
      const double quarter = 0.25;
      CUDA_CHECK(cudaMemcpyToSymbol(scale, &quarter, sizeof(quarter)));
      unsigned one = 1;
      CUDA_CHECK(cudaMemcpyToSymbol(factors, &one, sizeof(one), 5 * sizeof(unsigned)));
    }
    Count<<<1, kTable>>>(step);
    LAUNCH_CHECK();
    OtherHalfStep(step);
    app::Step(step);
  }

  unsigned long long* out;
  unsigned long long got[3], other[4], named = 0;
  double sums[4];
  CUDA_CHECK(cudaMalloc(&out, sizeof(got)));
  Collect<<<1, 1>>>(out);
  LAUNCH_CHECK();
  CUDA_CHECK(cudaMemcpy(got, out, sizeof(got), cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaMemcpyFromSymbol(&named, named_counter, sizeof(named)));
  CUDA_CHECK(cudaMemcpyFromSymbol(sums, accumulated, sizeof(sums)));
  void* address = nullptr;
  size_t bytes = 0;
  CUDA_CHECK(cudaGetSymbolAddress(&address, accumulated));
  CUDA_CHECK(cudaGetSymbolSize(&bytes, accumulated));
  APP_CHECK(address != nullptr && bytes == sizeof(sums));
  OtherHalfReport(other);

  // The same on the host.
  unsigned long long want_named = 1000, want_unnamed = 7, want_checksum = 0x1234, want_history = 0;
  const unsigned long long host_offsets[4] = {11, 22, 33, 44};
  std::vector<unsigned> want(kTable);
  double want_sums[4] = {}, factor = 0.5;
  for (int step = 1; step <= options.steps; ++step) {
    if (step == options.steps / 2) {
      factor = 0.25;
      table[5] = 1;
    }
    for (int i = 0; i < kTable; ++i) want[i] += table[i] * step + i;
    want_named += step;
    want_unnamed += host_offsets[step % 4];
    for (int i = 0; i < kTable; ++i) want_checksum = want_checksum * 31 + want[i];
    want_sums[step % 4] += factor * step;
  }
  for (int i = 0; i < kTable; ++i) want_history = want_history * 33 + want[i];
  APP_CHECK(named == want_named && got[0] == want_unnamed && got[1] == want_checksum && got[2] == want_history);
  for (int i = 0; i < 4; ++i) APP_CHECK(sums[i] == want_sums[i]);

  printf("globals steps=%d named=%llu unnamed=%llu history=%016llx sums=%.17g,%.17g,%.17g,%.17g\n", options.steps,
         named, got[0], got[2], sums[0], sums[1], sums[2], sums[3]);
  printf("globals other=%llu,%llu,%llu,%llu\n", other[0], other[1], other[2], other[3]);
  CUDA_CHECK(cudaFree(out));
  return 0;
}
