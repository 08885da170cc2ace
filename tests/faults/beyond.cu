// SPDX-License-Identifier: Apache-2.0
// More managed memory than the GPU has: --size MiB in pieces of 8 MiB, all of which kernels, fills and the host use.
#include <vector>

#include "tests/apps/support/app.h"

namespace {

constexpr size_t kPiece = size_t{8} << 20;
constexpr size_t kWords = kPiece / sizeof(unsigned);
constexpr size_t kEach = 4096;  // words that kernels change, at the begin of each piece

__global__ void Advance(unsigned* words, unsigned step) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  words[i] = words[i] * 3 + i + step;
}

unsigned At(size_t piece, size_t word) { return unsigned(piece * 2654435761u + word); }

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {4, 160});
  const size_t count = (size_t(options.size) << 20) / kPiece;
  std::vector<unsigned*> pieces(count);
  std::vector<std::vector<unsigned>> model(count, std::vector<unsigned>(kEach));
  for (size_t p = 0; p < count; ++p) {
    CUDA_CHECK(cudaMallocManaged(&pieces[p], kPiece));
    for (size_t i = 0; i < kWords; ++i) pieces[p][i] = At(p, i);
    for (size_t i = 0; i < kEach; ++i) model[p][i] = At(p, i);
  }
  for (int step = 0; step < options.steps; ++step) {
    for (size_t p = 0; p < count; ++p) {
      Advance<<<kEach / 128, 128>>>(pieces[p], unsigned(step));
      LAUNCH_CHECK();
      CUDA_CHECK(cudaMemsetAsync(pieces[p] + kWords / 2, int(p + size_t(step)), kPiece / 2, nullptr));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    app::Digest digest;
    for (size_t p = 0; p < count; ++p) {
      for (size_t i = 0; i < kEach; ++i) model[p][i] = model[p][i] * 3 + unsigned(i) + unsigned(step);
      APP_CHECK(memcmp(pieces[p], model[p].data(), kEach * sizeof(unsigned)) == 0);
      for (size_t i = kEach; i < kWords / 2; ++i) APP_CHECK(pieces[p][i] == At(p, i));
      const unsigned filled = unsigned((p + size_t(step)) & 0xff) * 0x01010101u;
      for (size_t i = kWords / 2; i < kWords; ++i) APP_CHECK(pieces[p][i] == filled);
      pieces[p][size_t(step)] = model[p][size_t(step)] = unsigned(p);
      digest.Add(model[p].data(), kEach * sizeof(unsigned));
    }
    printf("step %d digest %016llx\n", step, (unsigned long long)digest.value());
    fflush(stdout);
    app::Step(step);
  }
  for (unsigned* piece : pieces) CUDA_CHECK(cudaFree(piece));
  return 0;
}
