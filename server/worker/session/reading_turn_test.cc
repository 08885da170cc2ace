// SPDX-License-Identifier: Apache-2.0
#include "server/worker/session/reading_turn.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <thread>

namespace cuda_remote::server {
namespace {

// Each of the two finds what the other has left, and never half of it.
TEST(ReadingTurn, OneAtATime) {
  constexpr uint64_t kTurns = 200000;
  ReadingTurn turn;
  uint64_t first = 0, second = 0;  // equal whenever nobody has the turn
  uint64_t by_watcher = 0;
  std::atomic<bool> over{false};
  std::thread watcher([&] {
    while (!over) {
      if (!turn.TryTake()) continue;
      EXPECT_EQ(first, second);
      ++first;
      ++by_watcher;
      if (by_watcher % 64 == 0) usleep(100);  // the executor sleeps
      ++second;
      turn.GiveBack();
      if (by_watcher % 16 == 0) sched_yield();
    }
  });
  for (uint64_t i = 0; i < kTurns; ++i) {
    turn.Take();
    EXPECT_EQ(first, second);
    ++first;
    ++second;
    turn.GiveUp();
  }
  over = true;
  watcher.join();
  EXPECT_EQ(first, kTurns + by_watcher);
  EXPECT_EQ(second, first);
}

TEST(ReadingTurn, TheExecutorWaitsForTheWatcher) {
  ReadingTurn turn;
  ASSERT_TRUE(turn.TryTake());
  std::atomic<bool> taken{false};
  std::thread executor([&] {
    turn.Take();
    taken = true;
  });
  usleep(50000);
  EXPECT_FALSE(taken);
  turn.GiveBack();
  executor.join();
  EXPECT_FALSE(turn.TryTake());
  turn.GiveUp();
  EXPECT_TRUE(turn.TryTake());
}

}  // namespace
}  // namespace cuda_remote::server
