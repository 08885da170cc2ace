// SPDX-License-Identifier: Apache-2.0
#include "client/memory/virtual_memory_map.h"

#include <gtest/gtest.h>

namespace cuda_remote::client {
namespace {

constexpr uint64_t kMiB = 1 << 20;

std::vector<uint64_t> StartsOf(const std::vector<VirtualMemoryMap::Mapping>& mappings) {
  std::vector<uint64_t> starts;
  for (const VirtualMemoryMap::Mapping& mapping : mappings) starts.push_back(mapping.start);
  return starts;
}

TEST(VirtualMemoryMapTest, AReservationHoldsAllOfTheAddressesOrNoneIsNamed) {
  VirtualMemoryMap map;
  map.Reserve(0x10 * kMiB, 4 * kMiB);
  EXPECT_EQ(map.ReservationOf(0x10 * kMiB, 4 * kMiB), 0x10 * kMiB);
  EXPECT_EQ(map.ReservationOf(0x12 * kMiB, 2 * kMiB), 0x10 * kMiB);
  EXPECT_EQ(map.ReservationOf(0x12 * kMiB, 2 * kMiB + 1), 0u);
  EXPECT_EQ(map.ReservationOf(0x14 * kMiB, 1), 0u);
  EXPECT_EQ(map.ReservationOf(0xf * kMiB, 2 * kMiB), 0u);
  // No sum of address and length that wraps around.
  EXPECT_EQ(map.ReservationOf(0x11 * kMiB, ~uint64_t(0)), 0u);
  map.Free(0x10 * kMiB);
  EXPECT_EQ(map.ReservationOf(0x10 * kMiB, kMiB), 0u);
}

TEST(VirtualMemoryMapTest, UnmapTakesOutTheMappingsThatBeginInTheRange) {
  VirtualMemoryMap map;
  for (uint64_t i = 0; i < 4; ++i) map.Map({(0x10 + 2 * i) * kMiB, 2 * kMiB, 100 + i});
  EXPECT_EQ(map.MemoryAt(0x13 * kMiB), 101u);
  EXPECT_EQ(map.MemoryAt(0x18 * kMiB), 0u);
  EXPECT_EQ(StartsOf(map.In(0x12 * kMiB, 4 * kMiB)), (std::vector<uint64_t>{0x12 * kMiB, 0x14 * kMiB}));
  const auto gone = map.Unmap(0x12 * kMiB, 4 * kMiB);
  ASSERT_EQ(gone.size(), 2u);
  EXPECT_EQ(gone[0].memory, 101u);
  EXPECT_EQ(gone[0].bytes, 2 * kMiB);
  EXPECT_EQ(gone[1].memory, 102u);
  EXPECT_EQ(map.MemoryAt(0x12 * kMiB), 0u);
  EXPECT_EQ(map.MemoryAt(0x10 * kMiB), 100u);
  EXPECT_EQ(StartsOf(map.In(0, ~uint64_t(0))), (std::vector<uint64_t>{0x10 * kMiB, 0x16 * kMiB}));
}

}  // namespace
}  // namespace cuda_remote::client
