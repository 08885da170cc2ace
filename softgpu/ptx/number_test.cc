// SPDX-License-Identifier: Apache-2.0
#include "softgpu/ptx/number.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace cuda_remote::softgpu::ptx {
namespace {

TEST(Number, EveryHalfSurvivesUnpackAndPack) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    for (const Format& format : {kHalf, kBfloat}) {
      const double value = Unpack(bits, format);
      if (std::isnan(value)) continue;
      for (const Round round : {Round::kNearest, Round::kZero, Round::kDown, Round::kUp, Round::kAway}) {
        ASSERT_EQ(bits, Pack(value, format, round, false)) << bits;
      }
    }
  }
}

TEST(Number, EverySmallFloatSurvives) {
  for (uint32_t bits = 0; bits < 256; ++bits) {
    for (const Format& format : {kE4m3, kE5m2}) {
      const double value = Unpack(bits, format);
      if (!std::isnan(value)) {
        ASSERT_EQ(bits, Pack(value, format, Round::kNearest, false)) << bits;
      }
    }
  }
}

TEST(Number, KnownHalves) {
  EXPECT_EQ(0x3c00u, Pack(1.0, kHalf, Round::kNearest, false));
  EXPECT_EQ(0x7bffu, Pack(65504, kHalf, Round::kNearest, false));
  EXPECT_EQ(0x7bffu, Pack(65519, kHalf, Round::kNearest, false));
  EXPECT_EQ(0x7c00u, Pack(65520, kHalf, Round::kNearest, false));
  EXPECT_EQ(0x7bffu, Pack(1e9, kHalf, Round::kZero, false));
  EXPECT_EQ(0x7bffu, Pack(1e9, kHalf, Round::kNearest, true));
  EXPECT_EQ(0xfc00u, Pack(-1e9, kHalf, Round::kDown, false));
  EXPECT_EQ(0xfbffu, Pack(-1e9, kHalf, Round::kUp, false));
  EXPECT_EQ(0x0001u, Pack(std::ldexp(1, -24), kHalf, Round::kNearest, false));
  EXPECT_EQ(0x0000u, Pack(std::ldexp(1, -25), kHalf, Round::kNearest, false));
  EXPECT_EQ(0x0001u, Pack(std::ldexp(1.001, -25), kHalf, Round::kNearest, false));
  EXPECT_EQ(0x0001u, Pack(1e-30, kHalf, Round::kUp, false));
  EXPECT_EQ(0x8000u, Pack(-0.0, kHalf, Round::kNearest, false));
  EXPECT_EQ(0x7fffu, Pack(std::nan(""), kHalf, Round::kNearest, false));
  EXPECT_EQ(0x3c00u, Pack(1 + std::ldexp(1, -11), kHalf, Round::kNearest, false));  // tie to even
  EXPECT_EQ(0x3c02u, Pack(1 + 3 * std::ldexp(1, -11), kHalf, Round::kNearest, false));
  EXPECT_EQ(0x3c01u, Pack(1 + std::ldexp(1, -11), kHalf, Round::kAway, false));
}

TEST(Number, BfloatAgreesWithFloatRounding) {
  uint32_t seed = 12345;
  for (int i = 0; i < 100000; ++i) {
    seed = seed * 1664525 + 1013904223;
    float value;
    std::memcpy(&value, &seed, 4);
    if (std::isnan(value)) continue;
    // Rounding the bits to nearest even is what bfloat16 is defined by.
    const uint32_t expected = (seed + 0x7fff + (seed >> 16 & 1)) >> 16;
    ASSERT_EQ(expected, Pack(value, kBfloat, Round::kNearest, false)) << value;
  }
}

TEST(Number, E4m3HasNoInfinity) {
  EXPECT_EQ(0x7eu, Pack(448, kE4m3, Round::kNearest, true));
  EXPECT_EQ(0x7eu, Pack(1e6, kE4m3, Round::kNearest, true));
  EXPECT_EQ(0x7fu, Pack(1e6, kE4m3, Round::kNearest, false));
  EXPECT_EQ(0x7fu, Pack(std::nan(""), kE4m3, Round::kNearest, true));
  EXPECT_TRUE(std::isnan(Unpack(0xff, kE4m3)));
}

TEST(Number, FusedOddRoundsOnce) {
  // 1 + 2^-11 is a tie in f16; a far smaller addend must break it upwards.
  const double tiny = std::ldexp(1, -60);
  EXPECT_EQ(0x3c01u, Pack(FusedOdd(1.0, 1 + std::ldexp(1, -11), tiny), kHalf, Round::kNearest, false));
  EXPECT_EQ(0x3c00u, Pack(FusedOdd(1.0, 1 + std::ldexp(1, -11), -tiny), kHalf, Round::kNearest, false));
  EXPECT_EQ(0x3c00u, Pack(FusedOdd(1.0, 1 + std::ldexp(1, -11), 0), kHalf, Round::kNearest, false));
  EXPECT_EQ(7.0, FusedOdd(2, 3, 1));
}

TEST(Number, FlushKeepsTheSign) {
  EXPECT_TRUE(std::signbit(Flush(-1e-40f)));
  EXPECT_EQ(0.0f, Flush(-1e-40f));
  EXPECT_EQ(1.5f, Flush(1.5f));
}

TEST(Number, RoundedSetsTheModeBack) {
  const int before = std::fegetround();
  {
    const Rounded up(Round::kUp);
    EXPECT_GT(Opaque(1.0f) + Opaque(1e-10f), 1.0f);
  }
  EXPECT_EQ(before, std::fegetround());
}

}  // namespace
}  // namespace cuda_remote::softgpu::ptx
