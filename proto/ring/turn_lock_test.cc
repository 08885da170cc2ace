// SPDX-License-Identifier: Apache-2.0
#include "proto/ring/turn_lock.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "proto/base/clock.h"

namespace cuda_remote::ring {
namespace {

TEST(TurnLockTest, OnlyOneHasIt) {
  TurnLock lock;
  ASSERT_TRUE(lock.try_lock());
  EXPECT_FALSE(lock.try_lock());
  lock.unlock();
  ASSERT_TRUE(lock.try_lock());
  lock.unlock();
}

// Many more threads than processors; a lost wake-up would leave some asleep for ever.
TEST(TurnLockTest, ManyThreadsCountTogether) {
  constexpr int kThreads = 32, kRounds = 20000;
  TurnLock lock;
  uint64_t count = 0;  // plain: the lock is what keeps it right, and the thread sanitizer sees to that
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        std::lock_guard<TurnLock> guard(lock);
        ++count;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(count, uint64_t(kThreads) * kRounds);
}

// A holder that stays away (a full ring): the others sleep, and all of them have their turn afterwards.
TEST(TurnLockTest, SleepersHaveTheirTurn) {
  constexpr int kThreads = 16;
  TurnLock lock;
  std::atomic<int> done{0};
  std::vector<std::thread> threads;
  for (int round = 0; round < 20; ++round) {
    done = 0;
    lock.lock();
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        std::lock_guard<TurnLock> guard(lock);
        ++done;
      });
    }
    usleep(5000);
    EXPECT_EQ(done, 0);
    lock.unlock();
    for (std::thread& thread : threads) thread.join();
    threads.clear();
    EXPECT_EQ(done, kThreads);
  }
}

// Who waits long uses no processor.
TEST(TurnLockTest, WaitingLongCostsNothing) {
  TurnLock lock;
  lock.lock();
  int64_t used_ns = 0;
  std::thread waiter([&] {
    { std::lock_guard<TurnLock> guard(lock); }
    used_ns = ThreadTimeNs();
  });
  usleep(300000);
  lock.unlock();
  waiter.join();
  EXPECT_LT(used_ns, 100000000);
}

}  // namespace
}  // namespace cuda_remote::ring
