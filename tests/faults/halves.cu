// SPDX-License-Identifier: Apache-2.0
// Managed memory of --size MiB that no compression makes smaller. At every step the host has written pages of it last,
// and the GPU others.
#include <vector>

#include "tests/apps/support/app.h"

namespace {

struct Numbers {
  uint64_t state;
  uint64_t operator()() {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
  }
};

// The model has other bytes, so that nothing of the two could be stored together.
constexpr uint64_t kOther = 0x5555555555555555;

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {12, 48});
  const size_t words = size_t(options.size) << 17, half = words / 2;
  uint64_t* memory;
  uint64_t* spare;
  CUDA_CHECK(cudaMallocManaged(&memory, words * sizeof(uint64_t)));
  CUDA_CHECK(cudaMalloc(&spare, size_t{1} << 20));
  std::vector<uint64_t> model(words);
  Numbers numbers{0x9e3779b97f4a7c15};
  for (size_t i = 0; i < words; ++i) model[i] = (memory[i] = numbers()) ^ kOther;
  for (int step = 0; step < options.steps; ++step) {
    // The GPU changes places between half and end, the host one page in sixteen before them.
    const size_t count = size_t{1} << 17, from = numbers() % (half - count), to = half + numbers() % (half - count);
    CUDA_CHECK(cudaMemcpyAsync(spare, memory + from, count * sizeof(uint64_t), cudaMemcpyDefault, nullptr));
    CUDA_CHECK(cudaMemcpyAsync(memory + to, spare, count * sizeof(uint64_t), cudaMemcpyDefault, nullptr));
    CUDA_CHECK(cudaDeviceSynchronize());
    memcpy(&model[to], &model[from], count * sizeof(uint64_t));
    for (size_t i = size_t(step % 16) * 512; i < half; i += 16 * 512) model[i] = (memory[i] = numbers()) ^ kOther;
    app::Step(step);
    app::Digest digest;
    digest.Add(&model[numbers() % (words - count)], count);
    printf("step %d digest %016llx\n", step, (unsigned long long)digest.value());
    fflush(stdout);
  }
  for (size_t i = 0; i < words; ++i) APP_CHECK(memory[i] == (model[i] ^ kOther));
  return 0;
}
