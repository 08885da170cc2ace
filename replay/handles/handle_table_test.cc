// SPDX-License-Identifier: Apache-2.0
// Tests of HandleTable.
#include "replay/handles/handle_table.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace cuda_remote::replay {
namespace {

struct Value {
  int number = 7;
  std::string text;
};

TEST(HandleTable, FindsOnlyLiveHandlesOfTheirKind) {
  HandleTable<Value> table;
  const uint64_t stream = table.New(Kind::kStream, 0);
  ASSERT_NE(stream, 0u);
  EXPECT_EQ(KindOf(stream), Kind::kStream);
  ASSERT_NE(table.Find(Kind::kStream, stream), nullptr);
  EXPECT_EQ(table.Find(Kind::kStream, stream)->number, 7);
  EXPECT_EQ(table.Find(Kind::kEvent, stream), nullptr);
  EXPECT_EQ(table.Find(Kind::kNone, 0), nullptr);
  EXPECT_EQ(table.Find(Kind::kStream, stream + 1), nullptr);
  EXPECT_EQ(table.Find(Kind::kStream, stream | 1ull << 63), nullptr);
  EXPECT_EQ(table.Find(Kind::kStream, MakeHandle(Kind::kStream, 2, 0)), nullptr);
  EXPECT_EQ(table.Find(Kind::kStream, MakeHandle(Kind::kStream, kMaxSlot, 0)), nullptr);
  table.Drop(stream);
  EXPECT_EQ(table.Find(Kind::kStream, stream), nullptr);
  table.Drop(stream);
  table.Drop(0);
  EXPECT_EQ(table.size(), 0u);
  EXPECT_EQ(table.New(Kind::kNone, 0), 0u);
}

TEST(HandleTable, UsableIsLiveAndNotSetAside) {
  HandleTable<Value> table;
  EXPECT_FALSE(table.Usable(Kind::kNone, 0));
  EXPECT_FALSE(table.Usable(Kind::kStream, MakeHandle(Kind::kStream, 1, 0)));
  EXPECT_FALSE(table.Usable(Kind::kStream, MakeHandle(Kind::kStream, kMaxSlot, 0)));
  const uint64_t context = table.New(Kind::kContext, 0), stream = table.New(Kind::kStream, context);
  EXPECT_TRUE(table.Usable(Kind::kContext, context));
  EXPECT_TRUE(table.Usable(Kind::kStream, stream));
  EXPECT_FALSE(table.Usable(Kind::kEvent, stream));
  EXPECT_FALSE(table.Usable(Kind::kStream, stream + 1));
  EXPECT_FALSE(table.Usable(Kind::kStream, stream | 1ull << 63));
  EXPECT_FALSE(table.Usable(Kind::kStream, MakeHandle(Kind::kStream, SlotOf(stream), 1)));
  table.SetUsable(context, false);
  EXPECT_FALSE(table.Usable(Kind::kContext, context));
  EXPECT_TRUE(table.Usable(Kind::kStream, stream));
  EXPECT_NE(table.Find(Kind::kContext, context), nullptr);
  table.SetUsable(context, true);
  EXPECT_TRUE(table.Usable(Kind::kContext, context));
  table.Drop(context);
  EXPECT_FALSE(table.Usable(Kind::kContext, context));
  EXPECT_FALSE(table.Usable(Kind::kStream, stream));
  table.SetUsable(stream, true);  // too late
  EXPECT_FALSE(table.Usable(Kind::kStream, stream));
}

TEST(HandleTable, UsableInManySlotsAndGenerations) {
  HandleTable<Value> table;
  std::set<uint64_t> live;
  std::vector<uint64_t> dropped;
  for (int i = 0; i < 20000; ++i) {
    const uint64_t handle = table.New(i % 2 ? Kind::kEvent : Kind::kStream, 0);
    ASSERT_TRUE(table.Usable(KindOf(handle), handle));
    live.insert(handle);
    if (i % 3 == 0) {
      dropped.push_back(*live.begin());
      table.Drop(*live.begin());
      live.erase(live.begin());
    }
  }
  for (const uint64_t handle : live) ASSERT_TRUE(table.Usable(KindOf(handle), handle));
  for (const uint64_t handle : dropped) ASSERT_FALSE(table.Usable(KindOf(handle), handle));
}

// For the thread sanitizer, too: readers take no lock.
TEST(HandleTable, UsableWhileOthersMakeAndDrop) {
  HandleTable<Value> table;
  const uint64_t kept = table.New(Kind::kContext, 0);
  std::atomic<uint64_t> last{0};
  std::atomic<bool> stop{false};
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      while (!stop) {
        ASSERT_TRUE(table.Usable(Kind::kContext, kept));
        table.Usable(Kind::kEvent, last.load(std::memory_order_relaxed));
      }
    });
  }
  for (int i = 0; i < 20000; ++i) {
    const uint64_t made = table.New(Kind::kEvent, kept);
    last.store(made, std::memory_order_relaxed);
    if (i % 2) table.Drop(made);
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
}

TEST(HandleTable, DropsDescendants) {
  HandleTable<Value> table;
  const uint64_t context = table.New(Kind::kContext, 0);
  const uint64_t module = table.New(Kind::kModule, context);
  const uint64_t function = table.New(Kind::kFunction, module);
  const uint64_t stream = table.New(Kind::kStream, context);
  const uint64_t other = table.New(Kind::kContext, 0);
  EXPECT_EQ(table.ParentOf(function), module);
  EXPECT_EQ(table.ParentOf(context), 0u);
  table.Drop(module);
  EXPECT_EQ(table.Find(Kind::kFunction, function), nullptr);
  EXPECT_NE(table.Find(Kind::kStream, stream), nullptr);
  table.DropChildren(context);
  EXPECT_EQ(table.Find(Kind::kStream, stream), nullptr);
  EXPECT_NE(table.Find(Kind::kContext, context), nullptr);
  EXPECT_NE(table.Find(Kind::kContext, other), nullptr);
  EXPECT_EQ(table.size(), 2u);
}

TEST(HandleTable, AParentThatIsGoneIsNone) {
  HandleTable<Value> table;
  const uint64_t context = table.New(Kind::kContext, 0);
  table.Drop(context);
  const uint64_t stream = table.New(Kind::kStream, context);
  EXPECT_NE(stream, 0u);
  EXPECT_EQ(table.ParentOf(stream), 0u);
}

TEST(HandleTable, ListsWhatIsBelowAHandle) {
  HandleTable<Value> table;
  const uint64_t root = table.New(Kind::kContext, 0), other = table.New(Kind::kContext, 0);
  const auto below = [&table](uint64_t handle) {
    std::set<uint64_t> found;
    table.ForEachBelow(handle, [&found](uint64_t one) { EXPECT_TRUE(found.insert(one).second); });
    return found;
  };
  EXPECT_TRUE(below(root).empty());
  const uint64_t a = table.New(Kind::kGraph, root), b = table.New(Kind::kGraph, root);
  const uint64_t a1 = table.New(Kind::kGraphNode, a), a2 = table.New(Kind::kGraphNode, a);
  const uint64_t b1 = table.New(Kind::kGraphNode, b), deep = table.New(Kind::kGraph, a1);
  table.New(Kind::kGraph, other);
  EXPECT_EQ(below(root), (std::set<uint64_t>{a, b, a1, a2, b1, deep}));
  EXPECT_EQ(below(a), (std::set<uint64_t>{a1, a2, deep}));
  EXPECT_EQ(below(b), std::set<uint64_t>{b1});
  EXPECT_TRUE(below(deep).empty());
  table.Drop(a1);
  EXPECT_EQ(below(root), (std::set<uint64_t>{a, b, a2, b1}));
  EXPECT_TRUE(below(a1).empty()) << "a stale handle";
}

TEST(HandleTable, PointersStayWhileOthersComeAndGo) {
  HandleTable<Value> table;
  const uint64_t first = table.New(Kind::kStream, 0);
  Value* value = table.Find(Kind::kStream, first);
  for (int i = 0; i < 100000; ++i) table.New(Kind::kEvent, first);
  EXPECT_EQ(table.Find(Kind::kStream, first), value);
}

TEST(HandleTable, AMillionObjectsTakeNoMoreRoomThanAThousand) {
  HandleTable<Value> table;
  const uint64_t context = table.New(Kind::kContext, 0);
  const uint64_t stale = table.New(Kind::kEvent, context);
  table.Drop(stale);
  for (int i = 0; i < 1000000; ++i) {
    const uint64_t event = table.New(Kind::kEvent, context);
    ASSERT_NE(event, 0u);
    ASSERT_NE(event, stale);
    table.Drop(event);
  }
  EXPECT_LT(table.capacity(), 1100u);
  EXPECT_EQ(table.size(), 1u);
}

TEST(HandleTable, RandomTreesKeepTheirBooks) {
  HandleTable<int> table;
  std::mt19937 random(1);
  std::set<uint64_t> given;
  std::vector<uint64_t> handles;
  for (int i = 0; i < 200000; ++i) {
    const uint64_t picked = handles.empty() ? 0 : handles[random() % handles.size()];
    if (random() % 3 != 0) {
      const uint64_t made = table.New(Kind::kGraphNode, random() % 4 ? picked : 0);
      ASSERT_TRUE(given.insert(made).second || given.size() > 60000) << "handle given twice";
      handles.push_back(made);
    } else {
      table.Drop(picked);
      ASSERT_EQ(table.Find(Kind::kGraphNode, picked), nullptr);
    }
  }
  for (uint64_t handle : handles) table.Drop(handle);
  EXPECT_EQ(table.size(), 0u);
}

TEST(HandleTable, ADeepChainIsDroppedWithoutRecursion) {
  HandleTable<int> table;
  const uint64_t root = table.New(Kind::kGraphNode, 0);
  uint64_t last = root;
  for (int i = 0; i < 1000000; ++i) last = table.New(Kind::kGraphNode, last);
  table.Drop(root);
  EXPECT_EQ(table.size(), 0u);
}

}  // namespace
}  // namespace cuda_remote::replay
