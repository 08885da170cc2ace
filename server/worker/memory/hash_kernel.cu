// SPDX-License-Identifier: Apache-2.0
// The hash of proto/chunkhash on a GPU: one block of kLanes threads for each chunk. A 2 MiB chunk is 256 words for each
// thread, whose loads lie side by side with its neighbours'; some hundred blocks at a time saturate the memory.
//
// The worker embeds the PTX that nvcc makes of this file.
#include "proto/chunkhash/steps.h"

using namespace cuda_remote::chunkhash;

namespace {

struct Chunk {
  uint64_t address;
  uint64_t bytes;
};

constexpr uint32_t kWord = 16;

// `bytes` of a word, the rest zero, at any address.
__device__ void StepBytes(Pair* state, const unsigned char* at, uint32_t bytes) {
  uint64_t first = 0, last = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < bytes; ++i) {
    const uint64_t byte = at[i];
    if (i < 8) {
      first |= byte << (8 * i);
    } else {
      last |= byte << (8 * (i - 8));
    }
  }
  Step(state, first, last);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kLanes)
    cuda_remote_hash(const Chunk* chunks, Pair* hashes, uint64_t every) {
  __shared__ Pair sums[kLanes];
  const uint32_t lane = threadIdx.x;
  const uint64_t address = chunks[blockIdx.x].address, bytes = chunks[blockIdx.x].bytes;
  const uint64_t words = bytes / kWord;
  const uint64_t step = every * kLanes;  // from a lane's word to its next one
  Pair state = Begin(lane);
  if (address % kWord == 0) {
    const ulonglong2* const data = reinterpret_cast<const ulonglong2*>(address);
    uint64_t i = lane;
    for (; i + 3 * step < words; i += 4 * step) {
      const ulonglong2 w0 = data[i], w1 = data[i + step], w2 = data[i + 2 * step], w3 = data[i + 3 * step];
      Step(&state, w0.x, w0.y);
      Step(&state, w1.x, w1.y);
      Step(&state, w2.x, w2.y);
      Step(&state, w3.x, w3.y);
    }
#pragma unroll 1
    for (; i < words; i += step) {
      const ulonglong2 word = data[i];
      Step(&state, word.x, word.y);
    }
  } else {
    const unsigned char* const data = reinterpret_cast<const unsigned char*>(address);
#pragma unroll 1
    for (uint64_t i = lane; i < words; i += step) StepBytes(&state, data + i * kWord, kWord);
  }
  const uint32_t rest = uint32_t(bytes % kWord);
  if (rest != 0 && lane == uint32_t(words % kLanes)) {
    StepBytes(&state, reinterpret_cast<const unsigned char*>(address) + words * kWord, rest);
  }
  sums[lane] = Mix(state);
  for (uint32_t half = kLanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) {
      sums[lane].a += sums[lane + half].a;
      sums[lane].b += sums[lane + half].b;
    }
  }
  if (lane == 0) hashes[blockIdx.x] = End(sums[0], bytes);
}
