// SPDX-License-Identifier: Apache-2.0
#include "server/worker/session/waiters.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

namespace cuda_remote::server {
namespace {

constexpr auto kShort = std::chrono::milliseconds(50);

TEST(Waiters, TasksRunBesideEachOther) {
  Waiters waiters(4, nullptr);
  std::promise<void> second, first;
  waiters.Run([&] {
    second.get_future().wait();
    first.set_value();
  });
  waiters.Run([&] { second.set_value(); });
  first.get_future().wait();
}

TEST(Waiters, OneBehindWaitsForAllEarlierOnesAndNoLaterOne) {
  for (const size_t threads : {1, 2, 8}) {
    std::atomic<int> ended{0}, seen{-1};
    std::promise<void> done;
    std::promise<void> later;
    const std::shared_future<void> later_may_end = later.get_future().share();
    Waiters waiters(threads, nullptr);
    for (int i = 0; i < 6; ++i) {
      waiters.Run([&] {
        std::this_thread::sleep_for(kShort);
        ++ended;
      });
    }
    waiters.RunBehind([&] {
      seen = ended.load();
      done.set_value();
    });
    // Ends after the one that is behind, so it must not be waited for.
    waiters.Run([&, later_may_end] { later_may_end.wait(); });
    done.get_future().wait();
    later.set_value();
    EXPECT_EQ(seen, 6) << threads << " threads";
  }
}

TEST(Waiters, SeveralBehindComeInTheirOrder) {
  std::atomic<int> next{0};
  std::promise<void> done;
  Waiters waiters(8, nullptr);
  for (int i = 0; i < 20; ++i) {
    waiters.RunBehind([&next, i] {
      EXPECT_EQ(next, i);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      ++next;
    });
  }
  waiters.RunBehind([&] { done.set_value(); });
  done.get_future().wait();
  EXPECT_EQ(next, 20);
}

// Threads of a program wait for what another thread does when its own wait is over.
TEST(Waiters, WaitsBeyondTheLimitEndInAnyOrder) {
  Waiters waiters(2, nullptr);
  std::promise<void> last_ended;
  const std::shared_future<void> last = last_ended.get_future().share();
  std::atomic<bool> first_ended{false}, last_ready{false};
  std::atomic<int> ended{0};
  for (int i = 0; i < 2; ++i) {
    waiters.Run([&, last] {
      last.wait();
      ++ended;
    });
  }
  // Neither queues behind the two, nor this one behind that one.
  waiters.Run([&] { ++ended; }, [&] { return first_ended.load(); });
  waiters.Run(
      [&] {
        ++ended;
        last_ended.set_value();
      },
      [&] { return last_ready.load(); });
  EXPECT_EQ(ended, 0);
  last_ready = true;
  const bool went_on = last.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  EXPECT_TRUE(went_on);
  if (!went_on) last_ended.set_value();
  first_ended = true;
  std::promise<void> all;
  waiters.RunBehind([&] {
    EXPECT_EQ(ended, 4);
    all.set_value();
  });
  all.get_future().wait();
}

TEST(Waiters, EndsWithOneBehindThatHasNotBegun) {
  std::atomic<bool> slow_ended{false};
  {
    Waiters waiters(2, nullptr);
    std::promise<void> begun;
    waiters.Run([&] {
      begun.set_value();
      std::this_thread::sleep_for(kShort);
      slow_ended = true;
    });
    begun.get_future().wait();
    waiters.RunBehind([&] { EXPECT_TRUE(slow_ended); });
  }
  EXPECT_TRUE(slow_ended);
}

}  // namespace
}  // namespace cuda_remote::server
