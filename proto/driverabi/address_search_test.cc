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

}  // namespace
}  // namespace cuda_remote::driverabi
