#include "client/session/gate.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
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
  EXPECT_TRUE(gate.Close(10000));
  EXPECT_TRUE(left);
  inside.join();
}

TEST(GateTest, CloseWaitsForEveryLane) {
  for (unsigned lane = 0; lane < Gate::kLanes; ++lane) {
    Gate gate;
    gate.Enter(lane);
    EXPECT_FALSE(gate.Close(1)) << lane;
    gate.Leave(lane);
    EXPECT_TRUE(gate.Close(10000)) << lane;
  }
}

TEST(GateTest, CloseGivesUpAndOpensAgain) {
  Gate gate;
  gate.Enter();
  EXPECT_FALSE(gate.Close(20));
  EXPECT_FALSE(gate.closed());
  gate.Enter();  // would wait for ever at a closed gate
  gate.Leave();
  gate.Leave();
}

TEST(GateTest, ClosedGateHoldsCallsUntilOpened) {
  Gate gate;
  ASSERT_TRUE(gate.Close(1000));
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
    ASSERT_TRUE(gate.Close(10000));
    EXPECT_EQ(inside.load(), 0);
    gate.Open();
  }
  stop = true;
  for (auto& caller : callers) caller.join();
}

}  // namespace
}  // namespace cuda_remote::client
