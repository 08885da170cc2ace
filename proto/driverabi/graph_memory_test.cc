// SPDX-License-Identifier: Apache-2.0
#include "proto/driverabi/graph_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace cuda_remote::driverabi {
namespace {

constexpr uint64_t kGraph = 1, kOther = 2, kExec = 11, kOtherExec = 12, kMemory = 0x1000;

class GraphMemoryTest : public testing::Test {
 protected:
  GraphMemory memory_;
  GraphMemory::Addresses gone_;
};

TEST_F(GraphMemoryTest, LivesFromALaunchUntilItIsFreed) {
  memory_.Allocates(kGraph, kMemory, 100, 0);
  memory_.Instantiated(kGraph, kExec, false);
  EXPECT_FALSE(memory_.IsAlive(kMemory));
  EXPECT_EQ(memory_.Free(kMemory, &gone_), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(memory_.MayLaunch(kExec), CUDA_SUCCESS);
  memory_.Launched(kExec, &gone_);
  EXPECT_TRUE(memory_.IsAlive(kMemory));
  EXPECT_EQ(memory_.MayLaunch(kExec), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(memory_.Free(kMemory, &gone_), CUDA_SUCCESS);
  EXPECT_EQ(memory_.Free(kMemory, &gone_), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(memory_.MayLaunch(kExec), CUDA_SUCCESS);
  EXPECT_TRUE(gone_.empty());
}

TEST_F(GraphMemoryTest, GoesWithItsLastUser) {
  memory_.Allocates(kGraph, kMemory, 100, 0);
  memory_.Instantiated(kGraph, kExec, false);
  memory_.Launched(kExec, &gone_);
  memory_.GraphDestroyed(kGraph, &gone_);
  memory_.ExecDestroyed(kExec, &gone_);
  EXPECT_TRUE(gone_.empty());
  EXPECT_TRUE(memory_.Contains(kMemory));
  EXPECT_EQ(memory_.Free(kMemory, &gone_), CUDA_SUCCESS);
  EXPECT_EQ(gone_, GraphMemory::Addresses{kMemory});
  EXPECT_TRUE(memory_.empty());
}

TEST_F(GraphMemoryTest, FreedByAnotherGraph) {
  memory_.Allocates(kGraph, kMemory, 100, 0);
  EXPECT_EQ(memory_.MayFree(kOther, kMemory), CUDA_SUCCESS);
  memory_.Frees(kOther, kMemory);
  EXPECT_EQ(memory_.MayFree(kOther, kMemory), CUDA_ERROR_INVALID_VALUE);  // twice
  EXPECT_EQ(memory_.MayFree(kGraph, kMemory), CUDA_ERROR_INVALID_VALUE);  // its own, as another does
  memory_.Instantiated(kGraph, kExec, false);
  memory_.Instantiated(kOther, kOtherExec, false);
  EXPECT_EQ(memory_.MayLaunch(kOtherExec), CUDA_ERROR_INVALID_VALUE);
  memory_.Launched(kExec, &gone_);
  EXPECT_EQ(memory_.MayLaunch(kOtherExec), CUDA_SUCCESS);
  memory_.GraphDestroyed(kGraph, &gone_);
  memory_.ExecDestroyed(kExec, &gone_);
  memory_.Launched(kOtherExec, &gone_);
  EXPECT_TRUE(gone_.empty());  // the executable that frees it still names it
  memory_.ExecDestroyed(kOtherExec, &gone_);
  EXPECT_EQ(gone_, GraphMemory::Addresses{kMemory});
  // The graph that would free it has nothing to free; the address may be another allocation's.
  memory_.Allocates(kGraph, kMemory, 100, 0);
  memory_.Instantiated(kGraph, kExec, false);
  memory_.Launched(kExec, &gone_);
  memory_.Instantiated(kOther, kOtherExec, false);
  EXPECT_EQ(memory_.MayLaunch(kOtherExec), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(GraphMemoryTest, FreedInItsOwnGraph) {
  memory_.Allocates(kGraph, kMemory, 100, 0);
  memory_.Frees(kGraph, kMemory);
  EXPECT_EQ(memory_.MayFree(kOther, kMemory), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(memory_.MayInstantiate(kGraph), CUDA_SUCCESS);
  memory_.Instantiated(kGraph, kExec, false);
  EXPECT_NE(memory_.MayInstantiate(kGraph), CUDA_SUCCESS);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(memory_.MayLaunch(kExec), CUDA_SUCCESS);
    memory_.Launched(kExec, &gone_);
    EXPECT_FALSE(memory_.IsAlive(kMemory));
  }
  memory_.ExecDestroyed(kExec, &gone_);
  EXPECT_EQ(memory_.MayInstantiate(kGraph), CUDA_SUCCESS);
  memory_.GraphDestroyed(kGraph, &gone_);
  EXPECT_EQ(gone_, GraphMemory::Addresses{kMemory});
}

TEST_F(GraphMemoryTest, AllocatedAgainInItsOwnGraph) {
  constexpr uint64_t kNode = 21, kLaterNode = 22;
  const auto freed = [this](uint64_t graph, uint64_t bytes, int device) {
    std::vector<std::pair<uint64_t, uint64_t>> all;
    for (const GraphMemory::Freed& one : memory_.FreedFor(graph, bytes, device))
      all.emplace_back(one.address, one.node);
    return all;
  };
  using Pairs = std::vector<std::pair<uint64_t, uint64_t>>;
  memory_.Allocates(kGraph, kMemory, 100, 0);
  EXPECT_EQ(freed(kGraph, 100, 0), Pairs());
  memory_.Frees(kGraph, kMemory, kNode);
  EXPECT_EQ(freed(kGraph, 100, 0), (Pairs{{kMemory, kNode}}));
  EXPECT_EQ(freed(kGraph, 51, 0), (Pairs{{kMemory, kNode}}));
  EXPECT_EQ(freed(kGraph, 50, 0), Pairs());   // half of it would lie idle
  EXPECT_EQ(freed(kGraph, 101, 0), Pairs());  // has no room
  EXPECT_EQ(freed(kGraph, 100, 1), Pairs());  // on another device
  EXPECT_EQ(freed(kOther, 100, 0), Pairs());
  EXPECT_TRUE(memory_.AllocatesAgain(kGraph, kMemory));
  EXPECT_FALSE(memory_.AllocatesAgain(kGraph, kMemory));
  EXPECT_EQ(freed(kGraph, 100, 0), Pairs());
  memory_.DoesNotAllocateAgain(kGraph, kMemory);
  EXPECT_EQ(freed(kGraph, 100, 0), (Pairs{{kMemory, kNode}}));
  EXPECT_TRUE(memory_.AllocatesAgain(kGraph, kMemory));
  EXPECT_EQ(memory_.MayFree(kOther, kMemory), CUDA_ERROR_INVALID_VALUE);
  memory_.Instantiated(kGraph, kExec, false);
  // It is kept by the second node.
  EXPECT_EQ(memory_.MayLaunch(kExec), CUDA_SUCCESS);
  memory_.Launched(kExec, &gone_);
  EXPECT_TRUE(memory_.IsAlive(kMemory));
  EXPECT_EQ(memory_.MayLaunch(kExec), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(memory_.Free(kMemory, &gone_), CUDA_SUCCESS);
  memory_.ExecDestroyed(kExec, &gone_);
  // And freed by one more.
  EXPECT_EQ(memory_.MayFree(kGraph, kMemory), CUDA_SUCCESS);
  memory_.Frees(kGraph, kMemory, kLaterNode);
  EXPECT_EQ(memory_.MayFree(kGraph, kMemory), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(freed(kGraph, 100, 0), (Pairs{{kMemory, kLaterNode}}));
  memory_.Instantiated(kGraph, kExec, false);
  memory_.Launched(kExec, &gone_);
  EXPECT_FALSE(memory_.IsAlive(kMemory));
  memory_.GraphDestroyed(kGraph, &gone_);
  EXPECT_TRUE(gone_.empty());
  memory_.ExecDestroyed(kExec, &gone_);
  EXPECT_EQ(gone_, GraphMemory::Addresses{kMemory});
  EXPECT_TRUE(memory_.empty());
}

TEST_F(GraphMemoryTest, FreedElsewhereIsNotAllocatedAgain) {
  memory_.Allocates(kGraph, kMemory, 100, 0);
  memory_.Frees(kOther, kMemory, 21);
  EXPECT_TRUE(memory_.FreedFor(kGraph, 100, 0).empty());
  EXPECT_TRUE(memory_.FreedFor(kOther, 100, 0).empty());
}

TEST_F(GraphMemoryTest, FreesAtLaunch) {
  memory_.Allocates(kGraph, kMemory, 100, 0);
  memory_.Instantiated(kGraph, kExec, true);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(memory_.MayLaunch(kExec), CUDA_SUCCESS);
    memory_.Launched(kExec, &gone_);
    EXPECT_TRUE(memory_.IsAlive(kMemory));
  }
}

// As driver 580 counts, on an H100.
TEST_F(GraphMemoryTest, Figures) {
  constexpr uint64_t kChunk = GraphMemory::kChunk;
  const auto figures = [this](int device) {
    std::vector<uint64_t> all;
    for (int i = 0; i < 4; ++i) all.push_back(memory_.Figure(device, CUgraphMem_attribute(i)) / kChunk);
    return all;
  };
  using Four = std::vector<uint64_t>;
  memory_.Allocates(kGraph, kMemory, kChunk + 1, 1);
  memory_.Allocates(kGraph, 2 * kMemory, 1, 1);
  memory_.Instantiated(kGraph, kExec, false);
  EXPECT_EQ(figures(1), (Four{0, 0, 0, 0}));
  memory_.Uploaded(kExec);
  EXPECT_EQ(figures(1), (Four{2, 2, 2, 2}));
  EXPECT_EQ(figures(0), (Four{0, 0, 0, 0}));
  memory_.Launched(kExec, &gone_);
  memory_.Trim(1);
  EXPECT_EQ(figures(1), (Four{2, 2, 2, 2}));
  memory_.Free(kMemory, &gone_);
  EXPECT_EQ(figures(1), (Four{2, 2, 2, 2}));
  // Another graph uses what is there, and needs a chunk of its own beside what is alive.
  memory_.Allocates(kOther, 3 * kMemory, 1, 1);
  memory_.Instantiated(kOther, kOtherExec, false);
  memory_.Launched(kOtherExec, &gone_);
  EXPECT_EQ(figures(1), (Four{2, 2, 2, 2}));
  memory_.Free(2 * kMemory, &gone_);
  memory_.Trim(1);
  EXPECT_EQ(figures(1), (Four{1, 2, 1, 2}));
  memory_.ResetHigh(1, CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH);
  EXPECT_EQ(figures(1), (Four{1, 2, 1, 1}));
  memory_.Free(3 * kMemory, &gone_);
  memory_.Trim(1);
  memory_.ResetHigh(1, CU_GRAPH_MEM_ATTR_USED_MEM_HIGH);
  EXPECT_EQ(figures(1), (Four{0, 0, 0, 1}));
}

TEST_F(GraphMemoryTest, AnUpdateTakesTheOtherGraphsMemory) {
  memory_.Allocates(kGraph, kMemory, 100, 0);
  memory_.Allocates(kOther, 2 * kMemory, 100, 0);
  memory_.Instantiated(kGraph, kExec, false);
  EXPECT_TRUE(memory_.MayUpdate(kExec, kOther));
  EXPECT_FALSE(memory_.MayUpdate(kExec, 99));
  memory_.GraphDestroyed(kGraph, &gone_);
  EXPECT_TRUE(gone_.empty());
  memory_.Updated(kExec, kOther, &gone_);
  memory_.Launched(kExec, &gone_);
  EXPECT_FALSE(memory_.IsAlive(kMemory));
  EXPECT_TRUE(memory_.IsAlive(2 * kMemory));
  EXPECT_EQ(memory_.Free(2 * kMemory, &gone_), CUDA_SUCCESS);
  memory_.GraphDestroyed(kOther, &gone_);
  EXPECT_TRUE(gone_.empty());
  constexpr uint64_t kThird = 3;
  memory_.Allocates(kThird, 3 * kMemory, 100, 0);
  memory_.Updated(kExec, kThird, &gone_);
  EXPECT_EQ(gone_, GraphMemory::Addresses{2 * kMemory});
  gone_.clear();
  memory_.ExecDestroyed(kExec, &gone_);
  EXPECT_EQ(gone_, GraphMemory::Addresses{kMemory});  // what the executable was made from
}

TEST_F(GraphMemoryTest, ContextDies) {
  memory_.Allocates(kGraph, kMemory, 100, 0);
  memory_.Instantiated(kGraph, kExec, false);
  memory_.Launched(kExec, &gone_);
  memory_.Forget(kMemory);
  EXPECT_FALSE(memory_.Contains(kMemory));
  EXPECT_EQ(memory_.MayLaunch(kExec), CUDA_ERROR_INVALID_VALUE);
  memory_.ExecDestroyed(kExec, &gone_);
  memory_.GraphDestroyed(kGraph, &gone_);
  EXPECT_TRUE(gone_.empty());
  EXPECT_TRUE(memory_.empty());
}

// Other memory may have come to the address of what an executable was made from.
TEST_F(GraphMemoryTest, ContextOfTheFirstGraphDies) {
  memory_.Allocates(kGraph, kMemory, 100, 0);
  memory_.Allocates(kOther, 2 * kMemory, 100, 1);
  memory_.Instantiated(kGraph, kExec, false);
  memory_.Updated(kExec, kOther, &gone_);
  memory_.Forget(kMemory);
  constexpr uint64_t kThird = 3, kThirdExec = 13;
  memory_.Allocates(kThird, kMemory, 100, 1);
  memory_.Instantiated(kThird, kThirdExec, false);
  memory_.ExecDestroyed(kExec, &gone_);
  memory_.GraphDestroyed(kThird, &gone_);
  EXPECT_TRUE(gone_.empty());  // kThirdExec has it
  memory_.ExecDestroyed(kThirdExec, &gone_);
  EXPECT_EQ(gone_, GraphMemory::Addresses{kMemory});
}

// Random programs against the rules written down once more, as sets of references.
TEST(GraphMemoryModelTest, RandomPrograms) {
  for (unsigned seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto pick = [&random](size_t n) { return size_t(random() % n); };
    struct Graph {
      std::vector<uint64_t> allocations, frees;
      std::map<uint64_t, uint64_t> freed_by;  // its own allocations
      uint64_t exec = 0;
      bool dead = false;
    };
    struct Exec {
      Graph what;
      bool automatic = false;
    };
    GraphMemory memory;
    std::map<uint64_t, Graph> graphs;
    std::map<uint64_t, Exec> execs;
    std::set<uint64_t> there, alive;
    uint64_t next = 1;
    GraphMemory::Addresses gone;
    const auto names = [](const std::vector<uint64_t>& list, uint64_t one) {
      return std::find(list.begin(), list.end(), one) != list.end();
    };
    const auto times = [](const std::vector<uint64_t>& list, uint64_t one) {
      return std::count(list.begin(), list.end(), one);
    };
    // What must be gone by now.
    const auto settle = [&] {
      std::set<uint64_t> expected;
      for (const uint64_t address : there) {
        bool used = alive.count(address) != 0;
        for (const auto& [id, graph] : graphs) used = used || names(graph.allocations, address);
        for (const auto& [id, exec] : execs) {
          used = used || names(exec.what.allocations, address) || names(exec.what.frees, address);
        }
        if (!used) expected.insert(address);
      }
      for (const uint64_t address : expected) {
        there.erase(address);
        for (auto& [id, graph] : graphs) {
          const auto end = std::remove(graph.frees.begin(), graph.frees.end(), address);
          graph.dead = graph.dead || end != graph.frees.end();
          graph.frees.erase(end, graph.frees.end());
        }
      }
      EXPECT_EQ(std::set<uint64_t>(gone.begin(), gone.end()), expected);
      EXPECT_EQ(gone.size(), expected.size());
      gone.clear();
    };
    const auto some = [&](auto& from) {
      auto it = from.begin();
      std::advance(it, long(pick(from.size())));
      return it;
    };
    for (int step = 0; step < 300; ++step) {
      switch (pick(8)) {
        case 0:
          graphs[next++];
          break;
        case 1:
        case 2: {
          if (graphs.empty()) break;
          const auto it = some(graphs);
          Graph& graph = it->second;
          std::set<uint64_t> expected, freed;
          for (const uint64_t one : graph.allocations) {
            if (graph.freed_by.count(one) && times(graph.allocations, one) == times(graph.frees, one))
              expected.insert(one);
          }
          for (const GraphMemory::Freed& one : memory.FreedFor(it->first, 8, 0)) {
            freed.insert(one.address);
            EXPECT_EQ(one.node, graph.freed_by[one.address]);
          }
          EXPECT_EQ(freed, expected);
          if (!freed.empty() && pick(2) != 0) {
            const uint64_t address = *some(freed);
            EXPECT_TRUE(memory.AllocatesAgain(it->first, address));
            graph.allocations.push_back(address);
            break;
          }
          const uint64_t address = next++;
          memory.Allocates(it->first, address, 8, 0);
          graph.allocations.push_back(address);
          there.insert(address);
          break;
        }
        case 3: {
          if (graphs.empty() || there.empty()) break;
          const auto it = some(graphs);
          const uint64_t address = *some(there);
          bool own_frees = false, other_frees = false;
          for (const auto& [id, graph] : graphs) {
            if (!names(graph.frees, address)) continue;
            (names(graph.allocations, address) ? own_frees : other_frees) = true;
          }
          const bool own = names(it->second.allocations, address);
          const bool again = own && times(it->second.frees, address) < times(it->second.allocations, address);
          const bool may =
              (again || !names(it->second.frees, address)) && !(own && other_frees) && !(!own && own_frees);
          EXPECT_EQ(memory.MayFree(it->first, address) == CUDA_SUCCESS, may);
          if (!may) break;
          const uint64_t node = next++;
          memory.Frees(it->first, address, node);
          it->second.frees.push_back(address);
          if (own) it->second.freed_by[address] = node;
          break;
        }
        case 4: {
          if (graphs.empty()) break;
          const auto it = some(graphs);
          const bool nodes = !it->second.allocations.empty() || !it->second.frees.empty() || it->second.dead;
          EXPECT_EQ(memory.MayInstantiate(it->first) == CUDA_SUCCESS, !nodes || it->second.exec == 0);
          if (it->second.exec != 0) break;
          const bool automatic = pick(2) != 0;
          const uint64_t exec = next++;
          memory.Instantiated(it->first, exec, automatic);
          if (nodes) it->second.exec = exec;
          execs[exec] = {it->second, automatic};
          break;
        }
        case 5: {
          if (execs.empty()) break;
          const auto it = some(execs);
          const Graph& what = it->second.what;
          bool may = !what.dead;
          for (const uint64_t one : what.allocations) may = may && (it->second.automatic || !alive.count(one));
          for (const uint64_t one : what.frees) may = may && (names(what.allocations, one) || alive.count(one));
          EXPECT_EQ(memory.MayLaunch(it->first) == CUDA_SUCCESS, may);
          if (!may) break;
          memory.Launched(it->first, &gone);
          alive.insert(what.allocations.begin(), what.allocations.end());
          for (const uint64_t one : what.frees) {
            if (times(what.frees, one) >= times(what.allocations, one)) alive.erase(one);
          }
          break;
        }
        case 6: {
          if (there.empty()) break;
          const uint64_t address = *some(there);
          ASSERT_TRUE(memory.Contains(address));
          EXPECT_EQ(memory.Free(address, &gone) == CUDA_SUCCESS, alive.erase(address) != 0);
          break;
        }
        default: {
          const bool graph = pick(2) != 0;
          if (graph && !graphs.empty()) {
            const auto it = some(graphs);
            memory.GraphDestroyed(it->first, &gone);
            graphs.erase(it);
          } else if (!graph && !execs.empty()) {
            const auto it = some(execs);
            memory.ExecDestroyed(it->first, &gone);
            for (auto& [id, one] : graphs) {
              if (one.exec == it->first) one.exec = 0;
            }
            execs.erase(it);
          }
        }
      }
      settle();
      for (const uint64_t address : there) EXPECT_EQ(memory.IsAlive(address), alive.count(address) != 0);
      if (testing::Test::HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace cuda_remote::driverabi
