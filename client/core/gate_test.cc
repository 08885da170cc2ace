// SPDX-License-Identifier: Apache-2.0
#include "client/core/gate.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

namespace cuda_remote::client {
namespace {

using std::chrono::milliseconds;

TEST(GateTest, OpenGateLetsEverybodyIn) {
  Gate gate;
  gate.Enter();
  gate.Enter();
  gate.Leave();
  gate.Leave();
  EXPECT_FALSE(gate.closed());
}

TEST(GateTest, CloseWaitsForCallsInside) {
  Gate gate;
  gate.Enter();
  std::atomic<bool> left{false};
  std::thread inside([&] {
    std::this_thread::sleep_for(milliseconds(50));
    left = true;
    gate.Leave();
  });
  gate.Close();
  EXPECT_EQ(gate.AwaitEmpty(10000), 0u);
  EXPECT_TRUE(left);
  inside.join();
}

TEST(GateTest, CloseWaitsForEveryLane) {
  for (unsigned lane = 0; lane < Gate::kLanes; ++lane) {
    Gate gate;
    gate.Enter(lane);
    gate.Close();
    EXPECT_EQ(gate.AwaitEmpty(1), 1u) << lane;
    gate.Leave(lane);
    EXPECT_EQ(gate.AwaitEmpty(10000), 0u) << lane;
  }
}

TEST(GateTest, ClosedGateHoldsCallsUntilOpened) {
  Gate gate;
  gate.Close();
  std::atomic<bool> entered{false};
  std::thread caller([&] {
    gate.Enter();
    entered = true;
    gate.Leave();
  });
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_FALSE(entered);
  gate.Open();
  caller.join();
  EXPECT_TRUE(entered);
}

// Nobody is ever inside while the closer believes that all have left.
TEST(GateTest, NoCallRunsWhileClosed) {
  Gate gate;
  std::atomic<bool> stop{false};
  std::atomic<int> inside{0};
  std::vector<std::thread> callers;
  for (unsigned i = 0; i < 4; ++i) {
    callers.emplace_back([&, i] {
      const unsigned lane = i % 3 * (Gate::kLanes / 2 - 1);  // two of them share one
      while (!stop) {
        gate.Enter(lane);
        inside.fetch_add(1);
        inside.fetch_sub(1);
        gate.Leave(lane);
      }
    });
  }
  for (int round = 0; round < 200; ++round) {
    gate.Close();
    ASSERT_EQ(gate.AwaitEmpty(10000), 0u);
    EXPECT_EQ(inside.load(), 0);
    gate.Open();
  }
  stop = true;
  for (auto& caller : callers) caller.join();
}

// Waits until `count` calls are held.
void AwaitHeld(Gate* gate, size_t count) {
  while (true) {
    size_t held = 0;
    gate->ForEachHeld([&](const Gate::Held&) { ++held; });
    if (held == count) return;
    std::this_thread::sleep_for(milliseconds(1));
  }
}

bool Any(const Gate::Held&) { return true; }

TEST(GateTest, AdmitsOneCallAtATimeInTheirOrder) {
  Gate gate;
  gate.Close();
  EXPECT_FALSE(gate.Admit(Any));
  std::vector<int> order;
  std::vector<std::thread> callers;
  for (int i = 0; i < 5; ++i) {
    callers.emplace_back([&, i] {
      gate.Enter(unsigned(i), {false, uint64_t(i)});
      order.push_back(i);  // one at a time, or the thread sanitizer complains
      gate.Leave(unsigned(i));
    });
    AwaitHeld(&gate, size_t(i) + 1);
  }
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(gate.Admit(Any));
    ASSERT_EQ(gate.AwaitEmpty(10000), 0u);
    ASSERT_EQ(order.size(), size_t(i) + 1);
    EXPECT_TRUE(gate.closed());
  }
  EXPECT_FALSE(gate.Admit(Any));
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4}));
}

TEST(GateTest, AdmitsTheCallThatIsChosen) {
  Gate gate;
  gate.Close();
  std::atomic<uint64_t> entered{0};
  std::vector<std::thread> callers;
  for (uint64_t i = 1; i <= 3; ++i) {
    callers.emplace_back([&, i] {
      gate.Enter(0, {i == 2, i});
      entered = i;
      gate.Leave();
    });
    AwaitHeld(&gate, i);
  }
  const auto asks = [](const Gate::Held& held) { return held.asks; };
  EXPECT_TRUE(gate.Admit(asks));
  EXPECT_EQ(gate.AwaitEmpty(10000), 0u);
  EXPECT_EQ(entered.load(), 2u);
  EXPECT_FALSE(gate.Admit(asks));
  // The last one in the list, and then the only one.
  EXPECT_TRUE(gate.Admit([](const Gate::Held& held) { return held.context == 3; }));
  EXPECT_EQ(gate.AwaitEmpty(10000), 0u);
  EXPECT_EQ(entered.load(), 3u);
  std::thread another([&] {
    gate.Enter(0, {true, 4});
    gate.Leave();
  });
  AwaitHeld(&gate, 2);
  gate.Open();
  for (auto& caller : callers) caller.join();
  another.join();
  EXPECT_EQ(gate.inside(), 0u);
}

// A call that was admitted counts from the moment of its admission, before its thread runs.
TEST(GateTest, AnAdmittedCallIsInsideAtOnce) {
  Gate gate;
  gate.Close();
  std::atomic<bool> go{false};
  std::thread caller([&] {
    gate.Enter(7, {true, 0});
    while (!go) std::this_thread::yield();
    gate.Leave(7);
  });
  AwaitHeld(&gate, 1);
  ASSERT_TRUE(gate.Admit(Any));
  EXPECT_EQ(gate.inside(), 1u);
  EXPECT_EQ(gate.AwaitEmpty(20), 1u);
  go = true;
  caller.join();
  EXPECT_EQ(gate.AwaitEmpty(10000), 0u);
}

// Opened, closed and admitted to at random, no call is lost and none is counted twice.
TEST(GateTest, ManyThreadsAreAdmittedAndLetGo) {
  Gate gate;
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> calls{0};
  std::vector<std::thread> callers;
  for (unsigned i = 0; i < 4; ++i) {
    callers.emplace_back([&, i] {
      while (!stop) {
        gate.Enter(i, {i % 2 == 0, i});
        calls.fetch_add(1);
        gate.Leave(i);
      }
    });
  }
  for (int round = 0; round < 300; ++round) {
    gate.Close();
    ASSERT_EQ(gate.AwaitEmpty(10000), 0u);
    const uint64_t before = calls;
    uint64_t admitted = 0;
    for (int i = 0; i < 5; ++i) {
      admitted += gate.Admit(Any);
      ASSERT_EQ(gate.AwaitEmpty(10000), 0u);
    }
    EXPECT_EQ(calls - before, admitted);
    gate.Open();
  }
  stop = true;
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(gate.inside(), 0u);
}

}  // namespace
}  // namespace cuda_remote::client
