// SPDX-License-Identifier: Apache-2.0
#include "server/worker/session/handle_map.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

namespace cuda_remote::server {
namespace {

constexpr uint64_t kContext = MakeHandle(Kind::kContext, 1, 0);
constexpr uint64_t kStream = MakeHandle(Kind::kStream, 2, 7);
constexpr uint64_t kModule = MakeHandle(Kind::kModule, 300, 0);
constexpr uint64_t kFunction = MakeHandle(Kind::kFunction, 301, 0);

TEST(HandleMapTest, FindsOnlyExactlyWhatWasBound) {
  HandleMap map;
  ASSERT_TRUE(map.MayBind(Kind::kStream, kStream));
  map.Bind(Kind::kStream, kStream, 0x1000, 0);
  ASSERT_NE(map.Find(Kind::kStream, kStream), nullptr);
  EXPECT_EQ(map.Find(Kind::kStream, kStream)->real, 0x1000u);
  EXPECT_EQ(map.Virtual(Kind::kStream, 0x1000), kStream);
  EXPECT_EQ(map.Virtual(Kind::kEvent, 0x1000), 0u);
  EXPECT_EQ(map.Find(Kind::kEvent, kStream), nullptr);
  EXPECT_EQ(map.Find(Kind::kStream, MakeHandle(Kind::kStream, 2, 8)), nullptr);
  EXPECT_EQ(map.Find(Kind::kStream, kStream | 1), nullptr);
  EXPECT_EQ(map.Find(Kind::kStream, kStream | uint64_t(1) << 63), nullptr);
  EXPECT_EQ(map.Find(Kind::kStream, 0), nullptr);
  EXPECT_EQ(map.Find(Kind::kNone, 0), nullptr);
}

TEST(HandleMapTest, RefusesToBindNonsense) {
  HandleMap map;
  map.Bind(Kind::kStream, kStream, 1, 0);
  EXPECT_FALSE(map.MayBind(Kind::kStream, kStream));                            // taken
  EXPECT_FALSE(map.MayBind(Kind::kEvent, MakeHandle(Kind::kEvent, 2, 9)));      // slot taken
  EXPECT_FALSE(map.MayBind(Kind::kEvent, MakeHandle(Kind::kStream, 3, 0)));     // wrong kind
  EXPECT_FALSE(map.MayBind(Kind::kEvent, MakeHandle(Kind::kEvent, 0, 0)));      // slot 0
  EXPECT_FALSE(map.MayBind(Kind::kEvent, MakeHandle(Kind::kEvent, 3, 0) | 5));  // stray bits
  EXPECT_FALSE(map.MayBind(Kind::kEvent, MakeHandle(Kind::kEvent, 3, 0) | uint64_t(1) << 60));
  EXPECT_FALSE(map.MayBind(Kind::kNone, MakeHandle(Kind::kNone, 3, 0)));
  EXPECT_FALSE(map.MayBind(Kind::kDeviceMemory, MakeHandle(Kind::kDeviceMemory, 3, 0)));
  EXPECT_TRUE(map.MayBind(Kind::kEvent, MakeHandle(Kind::kEvent, kMaxSlot, 0xffff)));
}

TEST(HandleMapTest, DescendantsGoFirst) {
  HandleMap map;
  map.Bind(Kind::kContext, kContext, 1, 0);
  map.Bind(Kind::kModule, kModule, 2, kContext);
  map.Bind(Kind::kFunction, kFunction, 3, kModule);
  map.Bind(Kind::kStream, kStream, 4, kContext);
  std::vector<uint64_t> gone;
  map.Unbind(kContext, [&gone](const HandleMap::Entry& entry) { gone.push_back(entry.handle); });
  EXPECT_EQ(gone.size(), 4u);
  EXPECT_EQ(gone.back(), kContext);
  EXPECT_EQ(map.size(), 0u);
  EXPECT_TRUE(map.MayBind(Kind::kContext, kContext));
}

TEST(HandleMapTest, SiblingsInAnyOrder) {
  HandleMap map;
  map.Bind(Kind::kContext, kContext, 1, 0);
  std::vector<uint64_t> all;
  for (uint32_t i = 0; i < 100; ++i) {
    all.push_back(MakeHandle(Kind::kEvent, 10 + i, 0));
    map.Bind(Kind::kEvent, all.back(), 1000 + i, kContext);
  }
  for (uint32_t i = 0; i < 100; i += 3) map.Unbind(all[i], nullptr);
  for (uint32_t i = 1; i < 100; i += 3) map.Unbind(all[i], nullptr);
  size_t count = 0;
  map.ForEach(Kind::kEvent, [&count](const HandleMap::Entry&) { ++count; });
  EXPECT_EQ(count, 33u);
  map.Unbind(kContext, nullptr);
  EXPECT_EQ(map.size(), 0u);
}

TEST(HandleMapTest, EachOfAKindInTheOrderOfSlots) {
  HandleMap map;
  std::map<uint32_t, uint64_t> streams;
  uint32_t random = 1;
  for (int i = 0; i < 20000; ++i) {
    random = random * 1664525 + 1013904223;
    const uint32_t slot = 1 + (random >> 8) % 1000;
    const Kind kind = random >> 30 != 0 ? Kind::kEvent : Kind::kStream;
    const uint64_t handle = MakeHandle(kind, slot, uint16_t(i));
    if (const HandleMap::Entry* const there = map.At(slot)) {
      map.Unbind(there->handle, nullptr);
      streams.erase(slot);
    } else {
      map.Bind(kind, handle, uint64_t(i), 0);
      if (kind == Kind::kStream) streams[slot] = handle;
    }
    if (i % 1000 != 0) continue;
    std::vector<uint64_t> expected, seen;
    for (const auto& [at, stream] : streams) expected.push_back(stream);
    map.ForEach(Kind::kStream, [&seen](const HandleMap::Entry& entry) { seen.push_back(entry.handle); });
    EXPECT_EQ(seen, expected);
    EXPECT_EQ(map.Count(Kind::kStream), expected.size());
  }
}

TEST(HandleMapTest, ADeepChainNeedsNoStack) {
  HandleMap map;
  uint64_t parent = 0;
  for (uint32_t i = 1; i <= 200000; ++i) {
    const uint64_t handle = MakeHandle(Kind::kGraph, i, 0);
    map.Bind(Kind::kGraph, handle, i, parent);
    parent = handle;
  }
  map.Unbind(MakeHandle(Kind::kGraph, 1, 0), nullptr);
  EXPECT_EQ(map.size(), 0u);
}

TEST(HandleMapTest, TwoHandlesOfOneObject) {
  HandleMap map;
  const uint64_t other = MakeHandle(Kind::kFunction, 5, 0);
  map.Bind(Kind::kFunction, kFunction, 9, 0);
  map.Bind(Kind::kFunction, other, 9, 0);
  map.Unbind(kFunction, nullptr);
  EXPECT_EQ(map.Virtual(Kind::kFunction, 9), other);
}

TEST(HandleMapTest, DiesWithItsNewParent) {
  HandleMap map;
  const uint64_t graph = MakeHandle(Kind::kGraph, 20, 0), child = MakeHandle(Kind::kGraph, 21, 0);
  const uint64_t node = MakeHandle(Kind::kGraphNode, 22, 0), inner = MakeHandle(Kind::kGraphNode, 23, 0);
  map.Bind(Kind::kContext, kContext, 1, 0);
  map.Bind(Kind::kGraph, graph, 2, 0);
  map.Bind(Kind::kGraphNode, node, 3, graph);
  map.Bind(Kind::kGraph, child, 4, kContext);
  map.Bind(Kind::kGraphNode, inner, 5, child);
  map.SetParent(Kind::kGraph, child, node);
  EXPECT_TRUE(map.IsUnder(inner, graph));
  EXPECT_FALSE(map.IsUnder(inner, kContext));
  map.SetParent(Kind::kGraph, graph, inner);  // a circle: refused
  EXPECT_FALSE(map.IsUnder(graph, child));
  map.Unbind(kContext, nullptr);
  EXPECT_NE(map.Find(Kind::kGraph, child), nullptr);
  std::vector<uint64_t> gone;
  map.Unbind(graph, [&gone](const HandleMap::Entry& entry) { gone.push_back(entry.handle); });
  EXPECT_EQ(gone, (std::vector<uint64_t>{inner, child, node, graph}));
  EXPECT_EQ(map.size(), 0u);
}

TEST(HandleMapTest, OwnParentAndDeadParentAreNone) {
  HandleMap map;
  map.Bind(Kind::kStream, kStream, 1, kStream);
  map.Bind(Kind::kContext, kContext, 2, kModule);
  map.Unbind(kStream, nullptr);
  map.Unbind(kContext, nullptr);
  map.Unbind(kModule, nullptr);
  EXPECT_EQ(map.size(), 0u);
}

}  // namespace
}  // namespace cuda_remote::server
