// SPDX-License-Identifier: Apache-2.0
#include "proto/chunkhash/chunk_hash.h"

#include <algorithm>
#include <cstring>

#include "proto/chunkhash/steps.h"

namespace cuda_remote {

using chunkhash::kLanes, chunkhash::Pair;

ChunkHash HashChunk(const void* data, size_t bytes) { return HashRows(data, bytes, 1); }

ChunkHash HashRows(const void* data, size_t bytes, uint32_t every) {
  constexpr size_t kWord = 16;
  Pair lanes[kLanes];
  for (uint32_t lane = 0; lane < kLanes; ++lane) lanes[lane] = chunkhash::Begin(lane);
  const char* const from = static_cast<const char*>(data);
  const size_t words = bytes / kWord;
  // A row: a word for each lane.
  for (size_t row = 0; row < words; row += size_t{every} * kLanes) {
    const char* at = from + row * kWord;
    const size_t count = std::min<size_t>(words - row, kLanes);
    for (size_t lane = 0; lane < count; ++lane, at += kWord) {
      uint64_t halves[2];
      memcpy(halves, at, kWord);
      chunkhash::Step(&lanes[lane], halves[0], halves[1]);
    }
  }
  if (const size_t rest = bytes % kWord; rest != 0) {
    uint64_t halves[2] = {};
    memcpy(halves, from + words * kWord, rest);
    chunkhash::Step(&lanes[words % kLanes], halves[0], halves[1]);
  }
  Pair sum = {0, 0};
  for (const Pair& lane : lanes) {
    const Pair mixed = chunkhash::Mix(lane);
    sum.a += mixed.a;
    sum.b += mixed.b;
  }
  sum = chunkhash::End(sum, bytes);
  return {sum.a, sum.b};
}

}  // namespace cuda_remote
