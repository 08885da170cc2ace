// SPDX-License-Identifier: Apache-2.0
#include "client/memory/address_map.h"

#include <gtest/gtest.h>

namespace cuda_remote::client {
namespace {

TEST(AddressMapTest, FindsTheRangeThatAnAddressLiesIn) {
  AddressMap<int> map;
  map.Insert(1000, 100, 1);
  map.Insert(2000, 100, 2);
  EXPECT_EQ(map.Find(999), nullptr);
  ASSERT_NE(map.Find(1000), nullptr);
  EXPECT_EQ(map.Find(1000)->value, 1);
  ASSERT_NE(map.Find(1099), nullptr);
  EXPECT_EQ(map.Find(1100), nullptr);
  EXPECT_EQ(map.Find(2050)->value, 2);
}

TEST(AddressMapTest, AtWantsTheStart) {
  AddressMap<int> map;
  map.Insert(1000, 100, 1);
  EXPECT_NE(map.At(1000), nullptr);
  EXPECT_EQ(map.At(1001), nullptr);
  EXPECT_TRUE(map.Erase(1000));
  EXPECT_FALSE(map.Erase(1000));
  EXPECT_EQ(map.Find(1000), nullptr);
}

TEST(AddressMapTest, ContainsDoesNotWrap) {
  AddressMap<int> map;
  map.Insert(1000, 100, 1);
  const auto* range = map.At(1000);
  EXPECT_TRUE(range->Contains(1000, 100));
  EXPECT_TRUE(range->Contains(1099, 1));
  EXPECT_FALSE(range->Contains(1099, 2));
  EXPECT_FALSE(range->Contains(1050, ~uint64_t(0)));
  EXPECT_FALSE(range->Contains(999, 1));
}

TEST(AddressMapTest, RangesThatOverlap) {
  AddressMap<int> map;
  map.Insert(1000, 100, 1);
  map.Insert(2000, 100, 2);
  EXPECT_EQ(map.FindIn(900, 100), nullptr);
  EXPECT_EQ(map.FindIn(900, 101)->start, 1000u);
  EXPECT_EQ(map.FindIn(1050, 10)->start, 1000u);
  EXPECT_EQ(map.FindIn(1099, 5000)->start, 1000u);
  EXPECT_EQ(map.FindIn(1100, 900), nullptr);
  EXPECT_EQ(map.FindIn(1100, 5000)->start, 2000u) << "one that lies inside";
  EXPECT_EQ(map.FindIn(2100, 100), nullptr);
}

TEST(AddressMapTest, AZeroSizedRangeOwnsItsStart) {
  AddressMap<int> map;
  map.Insert(1000, 0, 1);
  EXPECT_NE(map.Find(1000), nullptr);
  EXPECT_EQ(map.Find(1001), nullptr);
}

}  // namespace
}  // namespace cuda_remote::client
