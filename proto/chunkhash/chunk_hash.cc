// SPDX-License-Identifier: Apache-2.0
#include "proto/chunkhash/chunk_hash.h"

#include <algorithm>
#include <cstring>

#include "proto/chunkhash/steps.h"

namespace cuda_remote {

using chunkhash::kLanes, chunkhash::Pair;

ChunkHash HashChunk(const void* data, size_t bytes) {
  constexpr size_t kWord = 16;
  Pair lanes[kLanes];
  for (uint32_t lane = 0; lane < kLanes; ++lane) lanes[lane] = chunkhash::Begin(lane);
  const char* at = static_cast<const char*>(data);
  for (size_t left = bytes; left > 0;) {
    // A row: a word for each lane.
    const size_t words = std::min<size_t>(left / kWord, kLanes);
    for (size_t lane = 0; lane < words; ++lane, at += kWord) {
      uint64_t halves[2];
      memcpy(halves, at, kWord);
      chunkhash::Step(&lanes[lane], halves[0], halves[1]);
    }
    left -= words * kWord;
    if (words == kLanes || left == 0) continue;
    uint64_t halves[2] = {};
    memcpy(halves, at, left);
    chunkhash::Step(&lanes[words], halves[0], halves[1]);
    left = 0;
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
