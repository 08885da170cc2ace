// SPDX-License-Identifier: Apache-2.0
// A job whose memory changes when it is told to: for incremental checkpoints (incremental.py).
//
// Usage: incremental_job MIB FOLDER. Fills MIB of GPU memory with numbers that look random, in allocations of 256 MiB,
// and prints "ready". Then it waits for the files FOLDER/1, FOLDER/2 and so on. Each holds a word: a percentage, by
// which it writes the first part of each allocation anew, or "end". After each it compares all of its memory with what
// it should be and prints "N wrong W", W being the number of wrong words.
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#define CHECK(call)                                                   \
  do {                                                                \
    const cudaError_t result = (call);                                \
    if (result != cudaSuccess) {                                      \
      fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(result)); \
      exit(2);                                                        \
    }                                                                 \
  } while (0)

namespace {

constexpr size_t kBlock = size_t{256} << 20;
constexpr unsigned kGrid = 1024, kThreads = 256;

struct Block {
  uint64_t* words;
  size_t count;
};

__device__ uint64_t Word(uint64_t seed, uint64_t index) {
  uint64_t z = seed * 0xd6e8feb86659fd93ull + (index + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

__global__ void Write(uint64_t* words, size_t count, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    words[i] = Word(seed, i);
  }
}

__global__ void Compare(const uint64_t* words, size_t from, size_t to, uint64_t seed, unsigned long long* wrong) {
  for (size_t i = from + blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < to; i += size_t(gridDim.x) * blockDim.x) {
    if (words[i] != Word(seed, i)) atomicAdd(wrong, 1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: incremental_job MIB FOLDER\n");
    return 2;
  }
  const size_t bytes = strtoull(argv[1], nullptr, 10) << 20;
  std::vector<Block> blocks;
  // How far from its start each block was written, and when; the last one comes last and is the shortest.
  std::vector<std::pair<double, uint64_t>> parts = {{1, 0}};
  for (size_t held = 0; held < bytes;) {
    Block block{nullptr, std::min(kBlock, bytes - held) / 8};
    CHECK(cudaMalloc(&block.words, block.count * 8));
    Write<<<kGrid, kThreads>>>(block.words, block.count, uint64_t(blocks.size()) << 32);
    blocks.push_back(block);
    held += block.count * 8;
  }
  unsigned long long* wrong = nullptr;
  CHECK(cudaMalloc(&wrong, sizeof(*wrong)));
  CHECK(cudaDeviceSynchronize());
  printf("ready\n");
  fflush(stdout);
  for (uint64_t number = 1;; ++number) {
    const std::string path = std::string(argv[2]) + "/" + std::to_string(number);
    char word[32] = "";
    FILE* file = nullptr;
    while (!(file = fopen(path.c_str(), "r"))) usleep(2000);
    const bool got = fscanf(file, "%31s", word) == 1;
    fclose(file);
    if (!got) {
      --number;
      continue;
    }
    const double part = atof(word) / 100;
    if (part > 0) {
      for (size_t i = 0; i < blocks.size(); ++i) {
        Write<<<kGrid, kThreads>>>(blocks[i].words, size_t(double(blocks[i].count) * part), uint64_t(i) << 32 | number);
      }
      while (!parts.empty() && parts.back().first <= part) parts.pop_back();
      parts.push_back({part, number});
    }
    CHECK(cudaMemset(wrong, 0, sizeof(*wrong)));
    for (size_t i = 0; i < blocks.size(); ++i) {
      // From the block's start on: the part that was written last, then what is left of those before.
      size_t from = 0;
      for (size_t p = parts.size(); p-- > 0;) {
        const size_t to = size_t(double(blocks[i].count) * parts[p].first);
        if (to > from) {
          Compare<<<kGrid, kThreads>>>(blocks[i].words, from, to, uint64_t(i) << 32 | parts[p].second, wrong);
        }
        from = std::max(from, to);
      }
    }
    unsigned long long found = 0;
    CHECK(cudaMemcpy(&found, wrong, sizeof(found), cudaMemcpyDeviceToHost));
    printf("%llu wrong %llu\n", static_cast<unsigned long long>(number), found);
    fflush(stdout);
    if (strcmp(word, "end") == 0) return found != 0;
  }
}
