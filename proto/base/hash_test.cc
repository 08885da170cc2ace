// SPDX-License-Identifier: Apache-2.0
// What is compiled for AVX2 and what is not must give the same.

#include "proto/base/hash.h"

#include <gtest/gtest.h>

#include <string>

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

namespace cuda_remote {
namespace {

TEST(Hash, IsXxh3WhateverTheProcessorHas) {
  std::string bytes((2 << 20) + 17, '\0');
  uint64_t state = 1;
  for (char& byte : bytes) byte = char((state = state * 6364136223846793005u + 1442695040888963407u) >> 56);
  for (const size_t size : {size_t{0}, size_t{1}, size_t{16}, size_t{200}, size_t{240}, size_t{241}, size_t{1024},
                            size_t{4095}, size_t{1} << 20, size_t{2} << 20, bytes.size()}) {
    const std::string_view part(bytes.data(), size);
    // This file is compiled for any processor.
    const XXH128_hash_t want = XXH3_128bits(part.data(), part.size());
    EXPECT_TRUE(HashOf(part) == (Hash128{want.low64, want.high64})) << size;
    const std::string secret = bytes.substr(0, kSecretBytes);
    const XXH128_hash_t keyed = XXH3_128bits_withSecret(part.data(), part.size(), secret.data(), secret.size());
    EXPECT_TRUE(KeyedHashOf(part, secret) == (Hash128{keyed.low64, keyed.high64})) << size;
    EXPECT_EQ(Hash64Of(part), XXH3_64bits(part.data(), part.size())) << size;
    Hasher hasher;
    for (size_t at = 0, piece = 1; at < size; at += piece, piece = piece * 3 + 1) hasher.Add(part.substr(at, piece));
    EXPECT_TRUE(hasher.Get() == HashOf(part)) << size;
    EXPECT_EQ(hasher.Get64(), Hash64Of(part)) << size;
    hasher.Reset();
    hasher.Add(part);
    EXPECT_TRUE(hasher.Get() == HashOf(part)) << size;
  }
}

TEST(Hash, PrintsAsTheUsualTools) { EXPECT_EQ(ToHex(HashOf("")), "99aa06d3014798d86001c324468d497f"); }

TEST(Hash, BytesComeBack) {
  const Hash128 hash = HashOf("some bytes");
  Hash128 read;
  ASSERT_TRUE(FromBytes(ToBytes(hash), &read));
  EXPECT_TRUE(read == hash);
  EXPECT_FALSE(FromBytes(ToBytes(hash).substr(1), &read));
}

TEST(Hash, SecretsAreRandom) {
  EXPECT_EQ(NewSecret().size(), kSecretBytes);
  EXPECT_NE(NewSecret(), NewSecret());
}

}  // namespace
}  // namespace cuda_remote
