// SPDX-License-Identifier: Apache-2.0
#include "proto/driverabi/address_search.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>
#include <string>

namespace cuda_remote::driverabi {
namespace {

TEST(AddressSearchTest, NothingToFind) {
  AddressSearch search;
  EXPECT_TRUE(search.empty());
  EXPECT_EQ(search.Find("\0\0\0\0\0\0\0\0\0", 9), AddressSearch::kNone);
  search.Add(~uint64_t{0x7000});
  EXPECT_FALSE(search.empty());
  EXPECT_EQ(search.Find("\0\x70\0\0\0\0\0\0", 7), AddressSearch::kNone) << "too short";
  EXPECT_EQ(search.Find("\0\x70\0\0\0\0\0\0", 8), 0u);
  EXPECT_EQ(search.Find("\0\x70\0\0\0\0\0\0", 8, 1), AddressSearch::kNone);
}

// Against a search that looks at every place, in bytes of which many are close to an address.
TEST(AddressSearchTest, FindsAllAtAnyPlace) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 200; ++round) {
    std::set<uint64_t> addresses;
    AddressSearch search;
    const size_t many = 1 + random() % 5;
    while (addresses.size() < many) addresses.insert(0x7ffddf700000 + random() % 64 * 0x100);
    if (round % 3 == 0) addresses.insert(0x7ffcdf700000);  // another upper half
    for (const uint64_t address : addresses) {
      search.Add(~address);
      search.Add(~address);
    }
    std::string bytes(random() % 200, '\0');
    for (size_t i = 0; i + 8 <= bytes.size(); i += 1 + random() % 16) {
      const uint64_t word = (random() % 8 == 0 ? 0x7ffcdf700000 : 0x7ffddf700000) + random() % 64 * 0x100;
      std::memcpy(&bytes[i], &word, sizeof(word));
    }
    std::vector<size_t> wanted, found;
    for (size_t i = 0; i + 8 <= bytes.size(); ++i) {
      uint64_t word;
      std::memcpy(&word, &bytes[i], sizeof(word));
      if (addresses.count(word) != 0) wanted.push_back(i);
    }
    for (size_t at = search.Find(bytes.data(), bytes.size()); at != AddressSearch::kNone;
         at = search.Find(bytes.data(), bytes.size(), at + 1)) {
      found.push_back(at);
    }
    EXPECT_EQ(found, wanted);
    for (const uint64_t address : addresses) EXPECT_TRUE(search.Contains(~address));
    EXPECT_FALSE(search.Contains(~uint64_t{1}));
  }
}

TEST(AddressSearchTest, PartsOfPointers) {
  const auto is_pointer = [](uint64_t word) { return word >= 0x28000000 && word < 0x28040000; };
  const uint64_t function = 0x280267c00000;
  for (uint64_t at = 1; at < 8; ++at) {
    // The function's bytes, and nothing else, in two words.
    const uint64_t packed[2] = {function << 8 * at, function >> (64 - 8 * at)};
    EXPECT_EQ(IsPartOfPointers(at, packed, is_pointer), at == 6) << at;
  }
  const uint64_t aligned[2] = {0x280267c0, 0};
  EXPECT_FALSE(IsPartOfPointers(0, aligned, is_pointer)) << "an aligned word is itself";
  const uint64_t behind_a_pointer[2] = {0x28012340, 0x280267c0}, behind_a_number[2] = {0x1234567800000000, 0x280267c0};
  EXPECT_TRUE(IsPartOfPointers(6, behind_a_pointer, is_pointer)) << "none of its bytes is in the eight";
  EXPECT_FALSE(IsPartOfPointers(6, behind_a_number, is_pointer)) << "0x280267c01234 is no part of a pointer";
}

}  // namespace
}  // namespace cuda_remote::driverabi
