// SPDX-License-Identifier: Apache-2.0
#include "proto/codec/numbers.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

namespace cuda_remote::wire {
namespace {

// What Numbers writes must be what wire.h writes, byte for byte.
void ExpectSame(uint64_t value) {
  float single;
  const uint32_t low = uint32_t(value);
  memcpy(&single, &low, sizeof(single));
  double wide;
  memcpy(&wide, &value, sizeof(wide));
  std::string plain;
  PutUint(&plain, 3, value);
  PutInt(&plain, 5000, int64_t(value));
  PutUint(&plain, 0x1fffffff, value);
  PutFloat(&plain, 16, single);
  PutDouble(&plain, 4, wide);
  Numbers<5> numbers;
  numbers.Uint(3, value);
  numbers.Int(5000, int64_t(value));
  numbers.Uint(0x1fffffff, value);
  numbers.Float(16, single);
  numbers.Double(4, wide);
  std::string together;
  numbers.AppendTo(&together);
  ASSERT_EQ(together, plain) << value;
}

TEST(NumbersTest, EveryLength) {
  for (int bit = 0; bit < 64; ++bit) {
    for (int64_t off = -3; off <= 3; ++off) ExpectSame((uint64_t(1) << bit) + uint64_t(off));
  }
  ExpectSame(~uint64_t(0));
}

TEST(NumbersTest, RandomOnes) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 200000; ++i) {
    const uint64_t bits = random();
    ExpectSame(bits >> random() % 64);
  }
}

TEST(NumbersTest, AppendsToWhatIsThere) {
  Numbers<2> numbers;
  numbers.Uint(1, 0);
  numbers.Uint(2, 5);
  std::string out = "abc";
  numbers.AppendTo(&out);
  EXPECT_EQ(out, std::string("abc\x10\x05"));
}

}  // namespace
}  // namespace cuda_remote::wire
