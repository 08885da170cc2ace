// SPDX-License-Identifier: Apache-2.0
// What is compiled for AVX2 and what is not must give the same.

#include "proto/base/hash.h"

#include <gtest/gtest.h>

#include <array>
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

// Puts ones into the upper halves of all vector registers.
void UseUpperHalves() {
#define CR_REGISTERS(one)                                                                                       \
  one("0") one("1") one("2") one("3") one("4") one("5") one("6") one("7") one("8") one("9") one("10") one("11") \
      one("12") one("13") one("14") one("15")
#define CR_ONES(n) "vpcmpeqd %%ymm" n ", %%ymm" n ", %%ymm" n "\n"
  asm volatile(CR_REGISTERS(CR_ONES)::
                   : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
                     "xmm12", "xmm13", "xmm14", "xmm15");
}

using Halves = std::array<char, 16 * 16>;

// What is in them now. The array is there already: a function of the C library that clears memory may clear the
// registers, too.
const Halves& UpperHalves() {
  static Halves halves;
#define CR_UPPER(n) "vextracti128 $1, %%ymm" n ", 16*" n "(%0)\n"
  asm volatile(CR_REGISTERS(CR_UPPER)::"r"(&halves) : "memory");
  return halves;
#undef CR_UPPER
#undef CR_ONES
#undef CR_REGISTERS
}

// Else the application's code would be slow after a call of CUDA.
TEST(Hash, LeavesTheUpperHalvesOfVectorRegistersCleared) {
  if (!__builtin_cpu_supports("avx2")) GTEST_SKIP() << "this processor has none";
  const Halves cleared{};
  const std::string bytes(1 << 20, 'x'), secret(kSecretBytes, 's');
  UseUpperHalves();
  EXPECT_NE(UpperHalves(), cleared);
  for (const size_t size : {size_t{0}, size_t{100}, size_t{241}, size_t{4096}, bytes.size()}) {
    const std::string_view part(bytes.data(), size);
    UseUpperHalves();
    HashOf(part);
    EXPECT_EQ(UpperHalves(), cleared) << size;
    UseUpperHalves();
    KeyedHashOf(part, secret);
    EXPECT_EQ(UpperHalves(), cleared) << size;
    UseUpperHalves();
    Hash64Of(part);
    EXPECT_EQ(UpperHalves(), cleared) << size;
    Hasher hasher;
    UseUpperHalves();
    hasher.Add(part);
    EXPECT_EQ(UpperHalves(), cleared) << size;
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
