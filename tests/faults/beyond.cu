// SPDX-License-Identifier: Apache-2.0
// More managed memory than the GPU has: --size MiB in pieces of 8 MiB, and as much in one piece. Kernels, fills and the
// host use every page of it.
#include <vector>

#include "tests/apps/support/app.h"

namespace {

constexpr size_t kPiece = size_t{8} << 20;
constexpr size_t kWords = kPiece / sizeof(unsigned);
// Kernels change a word of each page: one of so many.
constexpr size_t kStride = 1024;

__global__ void Advance(unsigned* words, size_t count, unsigned step) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count / kStride; i += gridDim.x * blockDim.x) {
    words[i * kStride] = words[i * kStride] * 3 + unsigned(i) + step;
  }
}

// Adds a word of each page of a piece to the one large piece.
__global__ void Gather(unsigned* large, const unsigned* piece, size_t count) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count / kStride; i += gridDim.x * blockDim.x) {
    large[i * kStride] += piece[i * kStride];
  }
}

unsigned At(size_t piece, size_t word) { return unsigned(piece * 2654435761u + word); }

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {4, 160});
  const size_t count = (size_t(options.size) << 20) / kPiece, all = count * kWords;
  std::vector<unsigned*> pieces(count);
  unsigned* large;
  // The words that kernels change, of all pieces and of the large one.
  std::vector<unsigned> model(all / kStride), large_model(all / kStride);
  CUDA_CHECK(cudaMallocManaged(&large, all * sizeof(unsigned)));
  for (size_t p = 0; p < count; ++p) {
    CUDA_CHECK(cudaMallocManaged(&pieces[p], kPiece));
    for (size_t i = 0; i < kWords; ++i) pieces[p][i] = large[p * kWords + i] = At(p, i);
    for (size_t i = 0; i < kWords; i += kStride) {
      model[(p * kWords + i) / kStride] = large_model[(p * kWords + i) / kStride] = At(p, i);
    }
  }
  for (int step = 0; step < options.steps; ++step) {
    Advance<<<8, 128>>>(large, all, unsigned(step));
    LAUNCH_CHECK();
    for (size_t p = 0; p < count; ++p) {
      CUDA_CHECK(cudaMemsetAsync(pieces[p] + kWords / 2, int(p + size_t(step)), kPiece / 2, nullptr));
      Advance<<<8, 128>>>(pieces[p], kWords, unsigned(step));
      LAUNCH_CHECK();
      Gather<<<8, 128>>>(large + p * kWords, pieces[p], kWords);
      LAUNCH_CHECK();
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    for (size_t i = 0; i < large_model.size(); ++i) large_model[i] = large_model[i] * 3 + unsigned(i) + unsigned(step);
    for (size_t p = 0; p < count; ++p) {
      const unsigned filled = unsigned((p + size_t(step)) & 0xff) * 0x01010101u;
      for (size_t i = 0; i < kWords; ++i) {
        const unsigned rest = i < kWords / 2 ? At(p, i) : filled;
        if (i % kStride != 0) {
          APP_CHECK(pieces[p][i] == rest && large[p * kWords + i] == At(p, i));
          continue;
        }
        unsigned &word = model[(p * kWords + i) / kStride], &sum = large_model[(p * kWords + i) / kStride];
        word = (i < kWords / 2 ? word : filled) * 3 + unsigned(i / kStride) + unsigned(step);
        sum += word;
        APP_CHECK(pieces[p][i] == word && large[p * kWords + i] == sum);
      }
      // The host's turn.
      const size_t at = size_t(step) * kStride;
      pieces[p][at] = model[(p * kWords + at) / kStride] = unsigned(p);
      large[p * kWords + at] = large_model[(p * kWords + at) / kStride] = unsigned(step);
    }
    app::Digest digest;
    digest.Add(large_model.data(), large_model.size() * sizeof(unsigned));
    printf("step %d digest %016llx\n", step, (unsigned long long)digest.value());
    fflush(stdout);
    app::Step(step);
  }
  for (unsigned* piece : pieces) CUDA_CHECK(cudaFree(piece));
  CUDA_CHECK(cudaFree(large));
  return 0;
}
