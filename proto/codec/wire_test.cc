// SPDX-License-Identifier: Apache-2.0
#include "proto/codec/wire.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

namespace cuda_remote::wire {
namespace {

// What PutVarint writes is read again wherever it ends, and no byte of what follows is taken for a part of it.
void ExpectRead(uint64_t value, const std::string& behind) {
  std::string bytes;
  PutVarint(&bytes, value);
  const size_t length = bytes.size();
  uint64_t read;
  for (size_t cut = 0; cut < length; ++cut) {
    ASSERT_EQ(ReadVarint(bytes.data(), bytes.data() + cut, &read), nullptr) << value << " cut to " << cut;
  }
  bytes += behind;
  ASSERT_EQ(ReadVarint(bytes.data(), bytes.data() + bytes.size(), &read), bytes.data() + length) << value;
  ASSERT_EQ(read, value);
}

TEST(ReadMessage, TakesAndSkipsFieldsUntilOneIsRefused) {
  std::string message;
  PutUint(&message, 1, 7);
  PutBytes(&message, 9, "unknown");
  PutBytes(&message, 2, "abcdef");
  PutUint(&message, 3, 8);
  uint32_t one, three;
  std::string two;
  const auto read = [&](std::string_view bytes, size_t most) {
    one = three = 0;
    two.clear();
    return ReadMessage(bytes, [&](Reader& reader) {
      switch (reader.field()) {
        case 1:
          return reader.Get(&one);
        case 2:
          return reader.Get(&two, most);
        case 3:
          return reader.Get(&three);
        default:
          return reader.Skip();
      }
    });
  };
  EXPECT_TRUE(read(message, 6));
  EXPECT_EQ(one, 7u);
  EXPECT_EQ(two, "abcdef");
  EXPECT_EQ(three, 8u);
  EXPECT_FALSE(read(message, 5)) << "longer than it may be";
  EXPECT_EQ(one, 7u);
  EXPECT_EQ(two, "");
  EXPECT_EQ(three, 0u) << "nothing is read behind a field that was refused";
  EXPECT_FALSE(read(message + "\x08", 6)) << "ends in a field";
  EXPECT_FALSE(read("\x0a" + message, 6)) << "a field of another wire type";
  EXPECT_TRUE(read("", 6));
}

TEST(ReadVarint, EveryLength) {
  for (size_t behind = 0; behind < 12; ++behind) {
    for (const char byte : {'\0', '\x7f', '\xff'}) {
      for (int bit = 0; bit < 64; ++bit) {
        for (int64_t off = -2; off <= 2; ++off) {
          ExpectRead((uint64_t(1) << bit) + uint64_t(off), std::string(behind, byte));
        }
      }
    }
  }
}

TEST(ReadVarint, RandomOnes) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 100000; ++i) {
    const uint64_t bits = random();
    ExpectRead(bits >> random() % 64, std::string(random() % 12, char(random())));
  }
}

TEST(ReadVarint, MoreBytesThanNeededAreAllowedUpToTen) {
  uint64_t read;
  for (int length = 2; length <= 10; ++length) {
    const std::string bytes = "\x85" + std::string(size_t(length - 2), '\x80') + std::string(1, '\0');
    ASSERT_EQ(ReadVarint(bytes.data(), bytes.data() + bytes.size(), &read), bytes.data() + length);
    EXPECT_EQ(read, 5u);
  }
  const std::string eleven = std::string(10, '\x80') + std::string(10, '\0');
  EXPECT_EQ(ReadVarint(eleven.data(), eleven.data() + eleven.size(), &read), nullptr);
  const std::string large = std::string(9, '\xff') + "\x02";
  EXPECT_EQ(ReadVarint(large.data(), large.data() + large.size(), &read), nullptr) << "more than 64 bits";
}

}  // namespace
}  // namespace cuda_remote::wire
