// SPDX-License-Identifier: Apache-2.0
#include "client/memory/segment_heap.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "proto/driverabi/job_addresses.h"

namespace cuda_remote::client {
namespace {

constexpr uint64_t kBase = driverabi::kManagedBase, kSegment = SegmentHeap::kSegment;

TEST(SegmentHeapTest, SmallAllocationsShareTheSegmentsOfTheirDevice) {
  SegmentHeap heap;
  EXPECT_EQ(heap.Take(4096, 0), 0u);
  heap.Add(kBase, kSegment, 0, true);
  EXPECT_EQ(heap.Take(4096, 0), kBase);
  EXPECT_EQ(heap.Take(4096, 1), 0u);
  EXPECT_EQ(heap.Take(kSegment - 4096, 0), kBase + 4096);
  EXPECT_EQ(heap.Take(4096, 0), 0u);
  EXPECT_EQ(heap.Give(kBase, 4096), 0u);
  EXPECT_EQ(heap.Give(kBase + 4096, kSegment - 4096), kBase);
  EXPECT_EQ(heap.Take(kSegment, 0), kBase);
}

// Segments that begin at any page, one right behind the other: their free parts stay apart.
TEST(SegmentHeapTest, SegmentsMayBeginAtAnyPage) {
  constexpr uint64_t kFirst = kBase + 3 * SegmentHeap::kPage, kSecond = kFirst + kSegment;
  SegmentHeap heap;
  heap.Add(kFirst, kSegment, 0, true);
  heap.Add(kSecond, kSegment, 0, true);
  EXPECT_EQ(heap.Take(kSegment - 4096, 0), kFirst);
  EXPECT_EQ(heap.Take(kSegment, 0), kSecond);
  EXPECT_EQ(heap.Take(4096, 0), kFirst + kSegment - 4096);
  EXPECT_EQ(heap.Give(kFirst + kSegment - 4096, 4096), 0u);
  EXPECT_EQ(heap.Give(kSecond, kSegment), kSecond);
  EXPECT_EQ(heap.Give(kFirst, kSegment - 4096), kFirst);
  EXPECT_EQ(heap.Take(2 * kSegment, 0), 0u);
  EXPECT_EQ(heap.Holding(kFirst - 1), nullptr);
  EXPECT_NE(heap.Holding(kFirst), nullptr);
  EXPECT_EQ(heap.Holding(kSecond + kSegment), nullptr);
  heap.Remove(kFirst);
  EXPECT_EQ(heap.Holding(kFirst + 5), nullptr);
  EXPECT_EQ(heap.Take(kSegment, 0), kSecond);
}

// No two allocations overlap, none crosses a segment, and a segment is said to be empty exactly when it is.
TEST(SegmentHeapTest, RandomUseKeepsToTheSegments) {
  SegmentHeap heap;
  std::mt19937 random(3);
  std::map<uint64_t, std::pair<uint64_t, int>> live;  // address -> bytes, device
  uint64_t next = kBase;
  for (int i = 0; i < 20000; ++i) {
    if (live.size() < 40 || random() % 2) {
      const uint64_t bytes = SegmentHeap::RoundUp(1 + random() % (SegmentHeap::kSmall - 1));
      const int device = int(random() % 2);
      uint64_t address = heap.Take(bytes, device);
      if (address == 0) {
        heap.Add(next, kSegment, device, true);
        next += kSegment;
        address = heap.Take(bytes, device);
      }
      ASSERT_NE(address, 0u);
      ASSERT_EQ(address / kSegment, (address + bytes - 1) / kSegment);
      ASSERT_EQ(heap.At(address / kSegment * kSegment)->device, device);
      const auto after = live.lower_bound(address);
      ASSERT_TRUE(after == live.end() || after->first >= address + bytes);
      ASSERT_TRUE(after == live.begin() || std::prev(after)->first + std::prev(after)->second.first <= address);
      live[address] = {bytes, device};
    } else {
      auto it = std::next(live.begin(), long(random() % live.size()));
      const uint64_t address = it->first, segment = address / kSegment * kSegment;
      const uint64_t emptied = heap.Give(address, it->second.first);
      live.erase(it);
      const auto left = live.lower_bound(segment);
      const bool empty = left == live.end() || left->first >= segment + kSegment;
      ASSERT_EQ(emptied, empty ? segment : 0);
      if (empty) heap.Remove(segment);
    }
  }
}

}  // namespace
}  // namespace cuda_remote::client
