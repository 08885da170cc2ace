// SPDX-License-Identifier: Apache-2.0
// The three tables that share no lock, wired as the session wires them: RecordedObjects, KnownMemory, DisguisedNodes.
#include <gtest/gtest.h>

#include <thread>
#include <utility>
#include <vector>

#include "client/core/recorded_objects.h"
#include "client/graphs/disguised_nodes.h"
#include "client/memory/known_memory.h"

namespace cuda_remote::client {
namespace {

using Keys = std::vector<replay::ObjectKey>;

class TablesTest : public ::testing::Test {
 protected:
  uint64_t Make(Kind kind, uint64_t parent = 0, const Keys& needs = {}, bool record = true) {
    WriterLock lock(&objects_.mutex());
    const uint64_t handle = objects_.handles().New(kind, parent);
    objects_.handles().Find(kind, handle)->parent = parent;
    if (record) objects_.log().Create({kind, handle}, needs, FrameHeader(), "", "", {});
    return handle;
  }
  void Drop(Kind kind, uint64_t id) {
    WriterLock lock(&objects_.mutex());
    objects_.DropLocked({kind, id});
  }
  // Device memory in a context, with its record.
  void Allocate(uint64_t address, uint64_t context, DeviceRange::Source source = DeviceRange::kAllocation) {
    DeviceRange range;
    range.source = source;
    range.context = context;
    {
      WriterLock lock(&memory_.mutex());
      range.buffer_id = memory_.NextBufferIdLocked();
      if (source == DeviceRange::kStreamOrdered) {
        memory_.InsertPoolMemoryLocked(address, 16, range);
      } else {
        memory_.device_ranges().Insert(address, 16, range);
      }
    }
    WriterLock lock(&objects_.mutex());
    objects_.log().Create({Kind::kDeviceMemory, address}, {{Kind::kContext, context}}, FrameHeader(), "", "", {});
  }
  bool IsKnown(uint64_t address) {
    ReaderLock lock(&memory_.mutex());
    return memory_.device_ranges().At(address) != nullptr;
  }
  uint64_t UsedOfPool() {
    WriterLock lock(&memory_.mutex());
    return memory_.pools().FiguresOf({0, 0}).used();
  }
  bool InLog(Kind kind, uint64_t id) {
    ReaderLock lock(&objects_.mutex());
    return objects_.log().Find({kind, id}) != nullptr;
  }
  // As Session::ForgetGone does.
  void Gone(const replay::ObjectKey& dead) {
    gone_.push_back(dead);
    if (dead.kind < Kind::kDeviceMemory) usable_when_told_ += objects_.Usable(dead.kind, dead.id);
    if (dead.kind == Kind::kDeviceMemory) {
      nodes_.ForgetMemory(dead.id);
      memory_.Forget(dead.id);
    }
    if (dead.kind == Kind::kGraph || dead.kind == Kind::kGraphExec) nodes_.ForgetInside(dead.id);
  }

  Keys gone_;  // under the lock of objects_
  int usable_when_told_ = 0;
  RecordedObjects objects_{[this](const replay::ObjectKey& dead) { Gone(dead); }};
  KnownMemory memory_;
  DisguisedNodes nodes_;
};

TEST_F(TablesTest, AnObjectsEndIsToldOfOnceAndBeforeItsHandleGoes) {
  const uint64_t module = Make(Kind::kModule);
  const uint64_t function = Make(Kind::kFunction, module, {{Kind::kModule, module}});
  const uint64_t unrecorded = Make(Kind::kStream, 0, {}, false);
  Drop(Kind::kModule, module);
  Drop(Kind::kStream, unrecorded);
  EXPECT_EQ(gone_, (Keys{{Kind::kModule, module}, {Kind::kFunction, function}, {Kind::kStream, unrecorded}}));
  // The function's handle died with its module's.
  EXPECT_EQ(usable_when_told_, 2);
  for (const replay::ObjectKey& one : gone_) EXPECT_FALSE(objects_.Usable(one.kind, one.id));
  EXPECT_FALSE(InLog(Kind::kFunction, function));
}

TEST_F(TablesTest, WhatDependsOnAnObjectGoesAlone) {
  const uint64_t module = Make(Kind::kModule);
  const uint64_t function = Make(Kind::kFunction, module, {{Kind::kModule, module}});
  {
    WriterLock lock(&objects_.mutex());
    objects_.DropDependentsLocked({Kind::kModule, module});
  }
  EXPECT_EQ(gone_, (Keys{{Kind::kFunction, function}}));
  EXPECT_TRUE(objects_.Usable(Kind::kModule, module));
  EXPECT_TRUE(InLog(Kind::kModule, module));
}

TEST_F(TablesTest, APrimaryContextKeepsItsHandle) {
  uint64_t handle = 0;
  {
    WriterLock lock(&objects_.mutex());
    handle = objects_.PrimaryContextLocked(1);
    EXPECT_EQ(objects_.LivePrimaryContextLocked(1), nullptr);
    objects_.SetActiveLocked(handle, objects_.handles().Find(Kind::kContext, handle), true);
    EXPECT_NE(objects_.LivePrimaryContextLocked(1), nullptr);
    objects_.log().Create({Kind::kContext, handle}, {}, FrameHeader(), "", "", {});
  }
  const uint64_t stream = Make(Kind::kStream, handle);
  EXPECT_EQ(objects_.DeviceOf(handle), 1);
  EXPECT_EQ(objects_.SomeContextOn(1), handle);
  EXPECT_EQ(objects_.ContextOf(stream), handle);
  Drop(Kind::kContext, handle);
  EXPECT_FALSE(objects_.Usable(Kind::kContext, handle));
  EXPECT_FALSE(objects_.Usable(Kind::kStream, stream));
  EXPECT_EQ(objects_.SomeContextOn(1), 0u);
  WriterLock lock(&objects_.mutex());
  EXPECT_EQ(objects_.PrimaryContextLocked(1), handle);
}

TEST_F(TablesTest, MemoryGoesWithItsContext) {
  const uint64_t context = Make(Kind::kContext), other = Make(Kind::kContext);
  Allocate(0x1000, context);
  Allocate(0x2000, context, DeviceRange::kStreamOrdered);
  Allocate(0x3000, other, DeviceRange::kStreamOrdered);
  EXPECT_EQ(UsedOfPool(), 32u);
  Drop(Kind::kContext, context);
  EXPECT_FALSE(IsKnown(0x1000));
  EXPECT_FALSE(IsKnown(0x2000));
  EXPECT_TRUE(IsKnown(0x3000));
  EXPECT_EQ(UsedOfPool(), 16u);
}

TEST_F(TablesTest, FreedMemoryGoesWithItsContextToo) {
  const uint64_t context = Make(Kind::kContext);
  Allocate(0x2000, context, DeviceRange::kStreamOrdered);
  {
    WriterLock lock(&memory_.mutex());
    memory_.EraseDeviceRangeLocked(0x2000);
    FreedMemory::Block block;
    block.address = 0x2000;
    block.bytes = 16;
    block.context = context;
    std::vector<FreedMemory::Block> out;
    memory_.freed().Keep(block, &out);
  }
  Drop(Kind::kContext, context);
  EXPECT_TRUE(memory_.TakeFreed().empty());
  EXPECT_EQ(UsedOfPool(), 0u);
}

TEST_F(TablesTest, AGraphsNodesAndMemoryGoWithIt) {
  const uint64_t context = Make(Kind::kContext), graph = Make(Kind::kGraph), other = Make(Kind::kGraph);
  Allocate(0x1000, context, DeviceRange::kGraph);
  {
    WriterLock lock(&nodes_.mutex());
    nodes_.set_uses_memory();
    nodes_.set_any();
    nodes_.memory().Allocates(graph, 0x1000, 16, 0);
    nodes_.nodes()[1].graph = graph;
    nodes_.nodes()[2].graph = other;
  }
  Drop(Kind::kGraph, graph);
  DisguisedNodes::Addresses gone;
  nodes_.Destroyed({Kind::kGraph, graph}, &objects_, &gone);
  EXPECT_EQ(gone, DisguisedNodes::Addresses{0x1000});
  ReaderLock lock(&nodes_.mutex());
  EXPECT_EQ(nodes_.nodes().count(1), 0u);
  EXPECT_EQ(nodes_.nodes().count(2), 1u);
}

TEST_F(TablesTest, AnExecutableHasTheGraphsCopiesInTheirOrder) {
  const uint64_t exec = Make(Kind::kGraphExec), dead = Make(Kind::kGraphExec);
  StagedCopy pieces[10];
  const auto widths = [this](uint64_t of) {
    ReaderLock lock(&nodes_.mutex());
    std::vector<std::pair<uint64_t, size_t>> found;
    for (const StagedInExec& one : nodes_.staged()[of]) found.emplace_back(one.node, one.params.copy.WidthInBytes);
    return found;
  };
  {
    WriterLock lock(&nodes_.mutex());
    nodes_.set_any();
    // The handles' order says nothing: they are used again. Nodes of other kinds, and of other graphs, do not count.
    for (const auto& [node, graph] : std::vector<std::pair<uint64_t, uint64_t>>{
             {9, 100}, {3, 100}, {5, 100}, {4, 200}, {6, 200}, {2, 200}, {8, 300}}) {
      DisguisedNode& made = nodes_.nodes()[node];
      made.graph = graph;
      made.type = CU_GRAPH_NODE_TYPE_MEMCPY;
      made.number = nodes_.NextNumberLocked();
      made.staged.copy.WidthInBytes = 10 * node;
      made.staged.piece = &pieces[node];
    }
    nodes_.nodes()[7].graph = 100;
    nodes_.nodes()[7].type = CU_GRAPH_NODE_TYPE_MEM_FREE;
  }
  using Widths = std::vector<std::pair<uint64_t, size_t>>;
  nodes_.Instantiated(100, exec, &objects_);
  nodes_.Instantiated(100, dead, &objects_);
  EXPECT_EQ(widths(exec), (Widths{{9, 90}, {3, 30}, {5, 50}}));
  {
    WriterLock lock(&nodes_.mutex());
    nodes_.staged()[exec][1].enabled = false;
  }
  const auto disabled = [this, exec](uint64_t graph) {
    std::vector<uint64_t> found;
    for (const StagedInExec& one : nodes_.WouldStayDisabled(graph, exec, 0, &objects_)) found.push_back(one.node);
    return found;
  };
  EXPECT_EQ(disabled(200), std::vector<uint64_t>{6});
  EXPECT_EQ(disabled(300), std::vector<uint64_t>{});
  EXPECT_TRUE(nodes_.IsOfOthers(pieces[9], exec));
  EXPECT_FALSE(nodes_.IsOfOthers(pieces[9], dead));
  EXPECT_FALSE(nodes_.IsOfOthers(pieces[4], exec));
  nodes_.Updated(200, exec, 0, &objects_);
  EXPECT_EQ(widths(exec), (Widths{{9, 40}, {3, 60}, {5, 20}})) << "the nodes stay those of its own graph";
  EXPECT_EQ(widths(dead), (Widths{{9, 90}, {3, 30}, {5, 50}}));
  EXPECT_FALSE(nodes_.IsOfOthers(pieces[4], exec));
  EXPECT_TRUE(nodes_.IsOfOthers(pieces[4], 0));
  nodes_.Updated(300, exec, 0, &objects_);
  EXPECT_EQ(widths(exec), (Widths{{9, 40}, {3, 60}, {5, 20}})) << "not a graph of the same shape";
  nodes_.ForgetNode(5);
  nodes_.Instantiated(100, exec, &objects_);
  EXPECT_EQ(widths(exec), (Widths{{9, 90}, {3, 30}}));
  // They go with their executables.
  DisguisedNodes::Addresses gone;
  nodes_.Destroyed({Kind::kGraphExec, exec}, &objects_, &gone);
  Drop(Kind::kGraphExec, dead);
  ReaderLock lock(&nodes_.mutex());
  EXPECT_TRUE(nodes_.staged().empty());
}

TEST_F(TablesTest, AnExecutableHasTheCopiesOfTheGraphsInside) {
  const uint64_t graph = Make(Kind::kGraph), source = Make(Kind::kGraph), exec = Make(Kind::kGraphExec);
  const uint64_t child = Make(Kind::kGraphNode, graph), inside = Make(Kind::kGraph, child);
  const uint64_t conditional = Make(Kind::kGraphNode, graph), body = Make(Kind::kGraph, conditional);
  StagedCopy pieces[4];
  const auto add = [&](uint64_t node, uint64_t to, uint64_t number) {
    WriterLock lock(&nodes_.mutex());
    nodes_.set_any();
    DisguisedNode& made = nodes_.nodes()[node];
    made.graph = to;
    made.type = CU_GRAPH_NODE_TYPE_MEMCPY;
    made.number = number;
    made.staged.piece = &pieces[node];
    made.staged.at_launch = true;
  };
  using Found = std::vector<std::pair<uint64_t, bool>>;
  const auto under = [&] {
    Found found;
    for (const StagedInExec& one : nodes_.StagedUnder(graph, &objects_)) found.emplace_back(one.node, one.in_body);
    return found;
  };
  add(0, source, 1);
  add(1, graph, 2);
  add(2, body, 3);
  nodes_.NoteBody(body);
  EXPECT_EQ(under(), (Found{{1, false}, {2, true}}));
  // The server puts a copy of a graph into a node: what is in there is to be looked for.
  EXPECT_EQ(nodes_.Unexplored(graph, &objects_), std::vector<uint64_t>{});
  nodes_.NoteCopied(graph, &objects_);
  nodes_.NoteCopied(source, &objects_);
  {
    WriterLock lock(&objects_.mutex());
    objects_.graph_records().Retain(child, 0, source);
    objects_.graph_records().Retain(exec, 0, source);
  }
  EXPECT_EQ(nodes_.Unexplored(source, &objects_), std::vector<uint64_t>{});
  EXPECT_EQ(nodes_.Unexplored(graph, &objects_), std::vector<uint64_t>{child});
  nodes_.NoteExplored({child});
  EXPECT_EQ(nodes_.Unexplored(graph, &objects_), std::vector<uint64_t>{});
  add(3, inside, DisguisedNodes::kFirstInside);
  EXPECT_EQ(under(), (Found{{1, false}, {2, true}, {3, false}}));
  EXPECT_FALSE(nodes_.any_at_launch());
  nodes_.Instantiated(graph, exec, &objects_);
  EXPECT_TRUE(nodes_.any_at_launch());
  EXPECT_TRUE(nodes_.IsOfOthers(pieces[3], 0));
  // Another graph in the node; and the node is taken out.
  nodes_.ForgetGraphOf(child, &objects_);
  EXPECT_EQ(under(), (Found{{1, false}, {2, true}}));
  EXPECT_EQ(nodes_.Unexplored(graph, &objects_), std::vector<uint64_t>{child});
  add(3, inside, DisguisedNodes::kFirstInside);
  {
    WriterLock lock(&objects_.mutex());
    objects_.SetActiveLocked(child, objects_.handles().Find(Kind::kGraphNode, child), false);
  }
  EXPECT_EQ(under(), (Found{{1, false}, {2, true}}));
}

// What a thread sanitizer and a debugger are for: no order of locks may be the other way round, and nothing is counted
// wrong.
TEST_F(TablesTest, ThreadsChangeAllThreeAtOnce) {
  constexpr int kThreads = 4, kRounds = 200;
  {
    WriterLock lock(&nodes_.mutex());
    nodes_.set_uses_memory();
    nodes_.set_any();
  }
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([this, thread] {
      for (int round = 0; round < kRounds; ++round) {
        const uint64_t context = Make(Kind::kContext), graph = Make(Kind::kGraph);
        const uint64_t at = uint64_t(thread + 1) << 32;
        Allocate(at, context, DeviceRange::kStreamOrdered);
        Allocate(at + 0x1000, context, DeviceRange::kGraph);
        {
          WriterLock lock(&nodes_.mutex());
          nodes_.memory().Allocates(graph, at + 0x1000, 16, 0);
          nodes_.nodes()[graph].graph = graph;
        }
        EXPECT_TRUE(IsKnown(at));
        EXPECT_EQ(objects_.DeviceOf(context), 0);
        memory_.NoteWaited();
        Drop(round % 2 ? Kind::kContext : Kind::kGraph, round % 2 ? context : graph);
        DisguisedNodes::Addresses gone;
        nodes_.Destroyed({Kind::kGraph, graph}, &objects_, &gone);
        // The context's end took it already, or the graph's end gives it back.
        EXPECT_EQ(gone.size(), round % 2 ? 0u : 1u);
        Drop(Kind::kContext, context);
        Drop(Kind::kGraph, graph);
        EXPECT_FALSE(IsKnown(at));
        EXPECT_FALSE(IsKnown(at + 0x1000));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(UsedOfPool(), 0u);
  ReaderLock objects_lock(&objects_.mutex());
  EXPECT_EQ(objects_.handles().size(), 0u);
  EXPECT_EQ(objects_.log().records(), 0u);
  ReaderLock nodes_lock(&nodes_.mutex());
  EXPECT_TRUE(nodes_.memory().empty());
  EXPECT_TRUE(nodes_.nodes().empty());
}

}  // namespace
}  // namespace cuda_remote::client
