// SPDX-License-Identifier: Apache-2.0
#include "proto/chunkhash/chunk_hash.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace cuda_remote {
namespace {

std::string Pattern(size_t bytes) {
  std::string out(bytes, 0);
  for (size_t i = 0; i < bytes; ++i) out[i] = char(i * i + i / 7);
  return out;
}

ChunkHash HashOf(const std::string& bytes) { return HashChunk(bytes.data(), bytes.size()); }

// Images keep the values.
TEST(ChunkHash, NeverChanges) {
  EXPECT_EQ(HashOf(""), (ChunkHash{0x5c5e1e9a50174e3c, 0x7d8dd08b0643c7f0}));
  EXPECT_EQ(HashOf(Pattern(100003)), (ChunkHash{0xfe1de045e6daf722, 0xa2c9f9a4b9501c86}));
}

// A change shows where it lies in one of the rows, or behind the last whole word.
TEST(ChunkHash, OfSomeRowsOnly) {
  constexpr size_t kRow = 8192;
  for (const uint32_t every : {1u, 2u, 3u, 16u}) {
    for (const size_t bytes : {size_t{100}, 3 * kRow, 40 * kRow + 5, 33 * kRow + 100, 48 * kRow + 4000}) {
      const std::string before = Pattern(bytes);
      const ChunkHash hash = HashRows(before.data(), bytes, every);
      for (size_t at = 0; at < bytes; at += 1021) {
        std::string now = before;
        ++now[at];
        const bool seen = at / kRow % every == 0 || at >= bytes / 16 * 16;
        EXPECT_EQ(HashRows(now.data(), bytes, every) != hash, seen) << bytes << " bytes, " << at << ", " << every;
      }
      std::string now = before;
      ++now.back();
      EXPECT_EQ(HashRows(now.data(), bytes, every) != hash, (bytes - 1) / kRow % every == 0 || bytes % 16 != 0);
    }
  }
  EXPECT_EQ(HashRows("", 0, 16), HashOf(""));
}

TEST(ChunkHash, DoesNotDependOnTheAddress) {
  const std::string bytes = Pattern(70001);
  std::vector<char> memory(bytes.size() + 32);
  for (size_t shift = 0; shift < 32; ++shift) {
    memcpy(memory.data() + shift, bytes.data(), bytes.size());
    ASSERT_EQ(HashChunk(memory.data() + shift, bytes.size()), HashOf(bytes)) << shift;
  }
}

// Zeros of all lengths, and every length of the same bytes.
TEST(ChunkHash, LengthsDiffer) {
  std::set<std::pair<uint64_t, uint64_t>> seen;
  const std::string zeros(20000, 0), bytes = "x" + Pattern(19999);
  for (size_t length = 1; length <= zeros.size(); length += length < 100 ? 1 : 17) {
    for (const std::string& from : {zeros, bytes}) {
      const ChunkHash hash = HashChunk(from.data(), length);
      ASSERT_TRUE(seen.insert({hash.low, hash.high}).second) << length;
    }
  }
}

// Changes that programs make: one bit, the signs of two numbers, two words exchanged, a row moved by a word.
TEST(ChunkHash, SeesSmallAndRegularChanges) {
  for (const bool zero : {true, false}) {
    const std::string bytes = zero ? std::string(40000, 0) : Pattern(40000);
    const ChunkHash before = HashOf(bytes);
    std::set<std::pair<uint64_t, uint64_t>> low{{before.low, 0}}, high{{before.high, 0}};
    const auto differs = [&](const std::string& changed, size_t at) {
      const ChunkHash now = HashOf(changed);
      // Each half by itself does.
      ASSERT_TRUE(low.insert({now.low, 0}).second) << at;
      ASSERT_TRUE(high.insert({now.high, 0}).second) << at;
    };
    for (size_t at = 0; at < bytes.size(); at += 61) {
      std::string changed = bytes;
      changed[at] = char(changed[at] ^ (1 << at % 8));
      differs(changed, at);
    }
    for (size_t at = 7; at + 8192 + 8 < bytes.size(); at += 488) {
      for (const size_t distance : {size_t{8}, size_t{16}, size_t{4096}, size_t{8192}}) {
        std::string changed = bytes;
        changed[at] = char(changed[at] ^ 0x80);
        changed[at + distance] = char(changed[at + distance] ^ 0x80);
        differs(changed, at);
        if (zero) continue;
        changed = bytes;
        std::swap_ranges(&changed[at], &changed[at + 8], &changed[at + distance]);
        if (changed != bytes) differs(changed, at);
      }
    }
    if (!zero) differs(bytes.substr(16) + bytes.substr(0, 16), 0);
  }
}

}  // namespace
}  // namespace cuda_remote
