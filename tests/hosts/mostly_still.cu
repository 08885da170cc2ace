// SPDX-License-Identifier: Apache-2.0
// 256 MiB of the host's memory and 64 MiB of the GPU's, all different, of which a twentieth changes all the time until
// the file of the first argument is there. Then compares all of it, and says so. For a move, which sends while the job
// runs what does not change any more.
#include <unistd.h>

#include <vector>

#include "tests/apps/support/app.h"

namespace {

constexpr size_t kMiB = size_t{1} << 20, kHostBytes = 256 * kMiB, kGpuBytes = 64 * kMiB, kPage = 4096, kChanging = 20;

using Words = std::vector<uint64_t>;

// No two pages are equal.
Words Filled(size_t bytes, uint64_t seed) {
  Words words(bytes / sizeof(uint64_t));
  for (uint64_t& word : words) {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    word = seed;
  }
  return words;
}

// Of one page of each twenty.
void Change(Words* words, uint64_t value) {
  for (size_t at = 0; at < words->size(); at += kChanging * kPage / sizeof(uint64_t)) (*words)[at] = value;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  Words host = Filled(kHostBytes, 1), gpu = Filled(kGpuBytes, 2);
  void* device = nullptr;
  CUDA_CHECK(cudaMalloc(&device, kGpuBytes));
  CUDA_CHECK(cudaMemcpy(device, gpu.data(), kGpuBytes, cudaMemcpyHostToDevice));
  // The model must not be the host's memory, which is to have one size.
  Words().swap(gpu);
  printf("begins\n");
  fflush(stdout);
  uint64_t round = 0;
  while (access(argv[1], F_OK) != 0) {
    Change(&host, ++round);
    CUDA_CHECK(cudaMemset(device, int(round % 256), kGpuBytes / kChanging));
    CUDA_CHECK(cudaDeviceSynchronize());
    usleep(1000);
  }
  Words expected = Filled(kHostBytes, 1), found(kGpuBytes / sizeof(uint64_t));
  Change(&expected, round);
  APP_CHECK(host == expected);
  gpu = Filled(kGpuBytes, 2);
  memset(gpu.data(), int(round % 256), kGpuBytes / kChanging);
  CUDA_CHECK(cudaMemcpy(found.data(), device, kGpuBytes, cudaMemcpyDeviceToHost));
  APP_CHECK(found == gpu);
  printf("all is as it must be\n");
  return 0;
}
