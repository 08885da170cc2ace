// SPDX-License-Identifier: Apache-2.0
#include "server/worker/memory/address_space.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <random>

namespace cuda_remote::server {
namespace {

TEST(AddressSpaceTest, TakesTheSmallestPartThatFitsAtTheLowestAddress) {
  AddressSpace space(512);
  space.Give(0x10000, 0x10000);
  EXPECT_EQ(space.Take(100), 0x10000u);
  EXPECT_EQ(space.Take(513), 0x10200u);
  EXPECT_EQ(space.Take(512), 0x10600u);
  space.Give(0x10000, 100);
  EXPECT_EQ(space.Take(1024), 0x10800u);  // the hole is too small
  EXPECT_EQ(space.Take(512), 0x10000u);
}

TEST(AddressSpaceTest, MergesNeighbours) {
  AddressSpace space(512);
  space.Give(0x10000, 0x1000);
  const uint64_t a = space.Take(0x800), b = space.Take(0x800);
  EXPECT_EQ(space.Take(512), 0u);
  space.Give(b, 0x800);
  space.Give(a, 0x800);
  EXPECT_EQ(space.free_bytes(), 0x1000u);
  EXPECT_EQ(space.Take(0x1000), 0x10000u);
}

TEST(AddressSpaceTest, NeverMergesAcrossABoundary) {
  AddressSpace space(512, 0x1000);
  space.Give(0x10000, 0x1000);
  space.Give(0x11000, 0x1000);
  EXPECT_EQ(space.Take(0x1800), 0u);
  EXPECT_EQ(space.Take(0x1000), 0x10000u);
}

TEST(AddressSpaceTest, TakesExactPlacesOnlyIfTheyAreFree) {
  AddressSpace space(512);
  space.Give(0x10000, 0x4000);
  EXPECT_TRUE(space.TakeAt(0x11000, 0x1000));
  EXPECT_FALSE(space.TakeAt(0x11000, 512));
  EXPECT_FALSE(space.TakeAt(0x10e00, 0x400));
  EXPECT_FALSE(space.TakeAt(0x13e00, 0x400));
  EXPECT_FALSE(space.TakeAt(0x10001, 512));
  EXPECT_FALSE(space.TakeAt(0x9000, 512));
  EXPECT_FALSE(space.TakeAt(0x10000, ~uint64_t(0)));
  EXPECT_TRUE(space.TakeAt(0x10000, 0x1000));
  EXPECT_TRUE(space.TakeAt(0x12000, 0x2000));
  EXPECT_EQ(space.free_bytes(), 0u);
}

TEST(AddressSpaceTest, HonoursAlignment) {
  AddressSpace space(512);
  space.Give(0x10200, 0x10000);
  EXPECT_EQ(space.Take(512, 0x10000), 0x20000u);
  EXPECT_EQ(space.Take(512, 0x1000), 0x11000u);
  EXPECT_EQ(space.Take(512), 0x10200u);  // the rest before it is still there
}

TEST(AddressSpaceTest, RefusesNothingAndTooMuch) {
  AddressSpace space(512);
  space.Give(0x10000, 0x1000);
  EXPECT_EQ(space.Take(0), 0u);
  EXPECT_EQ(space.Take(~uint64_t(0)), 0u);
  EXPECT_EQ(space.Take(0x1001), 0u);
}

TEST(AddressSpaceTest, TheRestOfAPartlyFreeRangeComesBack) {
  AddressSpace space(512);
  space.Give(0x10000, 0x10000);
  ASSERT_TRUE(space.TakeAt(0x10000, 0x10000));
  space.GiveRest(0x12000, 0x1000);
  space.GiveRest(0x14000, 0x1000);
  EXPECT_EQ(space.free_bytes(), 0x2000u);
  space.GiveRest(0x12800, 0x1000);  // begins in a free part
  EXPECT_EQ(space.free_bytes(), 0x2800u);
  space.GiveRest(0x12800, 0x400);  // all of it free
  EXPECT_EQ(space.free_bytes(), 0x2800u);
  space.GiveRest(0x11000, 0x3800);  // around one, and into the next one
  EXPECT_EQ(space.free_bytes(), 0x4000u);
  EXPECT_EQ(space.Take(0x4000), 0x11000u);
  space.GiveRest(0x10000, 0x10000);
  EXPECT_EQ(space.Take(0x10000), 0x10000u);
}

// Against a model: parts never overlap, all that was given back is there again.
TEST(AddressSpaceTest, RandomUseKeepsPartsApart) {
  constexpr uint64_t kBase = 1 << 20, kBytes = 1 << 20;
  std::mt19937_64 random(1);
  AddressSpace space(512);
  space.Give(kBase, kBytes);
  std::map<uint64_t, uint64_t> taken;
  const auto overlaps = [&taken](uint64_t address, uint64_t bytes) {
    auto it = taken.lower_bound(address);
    if (it != taken.end() && it->first < address + bytes) return true;
    return it != taken.begin() && std::prev(it)->first + std::prev(it)->second > address;
  };
  uint64_t used = 0;
  for (int i = 0; i < 20000; ++i) {
    if (random() % 2 == 0 || taken.empty()) {
      const uint64_t bytes = random() % 20000 + 1;
      uint64_t address;
      if (random() % 4 == 0) {
        address = kBase + random() % (kBytes / 512) * 512;
        const bool free = !overlaps(address, space.RoundUp(bytes)) && address + space.RoundUp(bytes) <= kBase + kBytes;
        ASSERT_EQ(space.TakeAt(address, bytes), free);
        if (!free) continue;
      } else {
        address = space.Take(bytes);
        if (address == 0) continue;
        ASSERT_FALSE(overlaps(address, space.RoundUp(bytes)));
      }
      taken[address] = space.RoundUp(bytes);
      used += space.RoundUp(bytes);
    } else {
      auto it = std::next(taken.begin(), random() % taken.size());
      space.Give(it->first, it->second);
      used -= it->second;
      taken.erase(it);
    }
    ASSERT_EQ(space.free_bytes(), kBytes - used);
  }
  for (const auto& [address, bytes] : taken) space.Give(address, bytes);
  EXPECT_EQ(space.Take(kBytes), kBase);
}

}  // namespace
}  // namespace cuda_remote::server
