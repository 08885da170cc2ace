// SPDX-License-Identifier: Apache-2.0
#include "server/worker/memory/managed_turns.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace cuda_remote::server {
namespace {

class ManagedTurnsTest : public testing::Test {
 protected:
  // `count` turns of this length, each in the place where the memory is; it moves as soon as it is to.
  void Pass(uint64_t count, uint64_t on_device, uint64_t on_host) {
    for (uint64_t i = 0; i < count; ++i) {
      if (turns_.wants_host() != on_host_) {
        on_host_ = turns_.wants_host();
        turns_.Moved(on_host_);
        ++moves_;
      }
      (on_host_ ? host_turns_ : device_turns_) += 1;
      turns_.HandedOver(now_);
      for (uint64_t k = 0; k < work_; ++k) turns_.Work();
      now_ += on_host_ ? on_host : on_device;
      turns_.CameBack(now_);
      now_ += 7;
    }
  }

  ManagedTurns turns_;
  bool on_host_ = false;
  uint64_t work_ = 1;  // of each turn
  uint64_t now_ = 1000, moves_ = 0, host_turns_ = 0, device_turns_ = 0;
};

TEST_F(ManagedTurnsTest, TheQuickerPlaceIsFoundSoon) {
  Pass(200, 50, 30);
  EXPECT_TRUE(on_host_);
  EXPECT_EQ(moves_, 1u);
  EXPECT_LE(device_turns_, ManagedTurns::kFirst + ManagedTurns::kTurns);
}

TEST_F(ManagedTurnsTest, MemoryOfSlowerKernelsStaysOnTheDevice) {
  Pass(100000, 50, 500);
  EXPECT_FALSE(on_host_);
  // Trials become rare.
  EXPECT_LE(moves_, 2u * 12);
  EXPECT_LE(host_turns_, 12 * ManagedTurns::kTurns);
}

TEST_F(ManagedTurnsTest, ItStaysOnTheDeviceIfTheHostIsALittleSlower) {
  Pass(ManagedTurns::kFirst + 2 * ManagedTurns::kTurns + 1, 50, 51);
  EXPECT_FALSE(on_host_);
  EXPECT_EQ(moves_, 2u);
}

TEST_F(ManagedTurnsTest, ItStaysOnTheHostWhileThatIsALittleSlower) {
  Pass(200, 50, 48);
  Pass(1000, 50, 53);
  EXPECT_TRUE(on_host_);
  EXPECT_EQ(moves_, 1u);
}

TEST_F(ManagedTurnsTest, SingleLongTurnsDoNotCount) {
  for (int i = 0; i < 40; ++i) {
    Pass(9, 50, 30);
    Pass(1, 100000, 100000);
  }
  EXPECT_TRUE(on_host_);
  EXPECT_EQ(moves_, 1u);
}

TEST_F(ManagedTurnsTest, ATrialInASlowMomentIsRepeatedSoon) {
  Pass(ManagedTurns::kFirst + ManagedTurns::kTurns, 50, 30);
  Pass(ManagedTurns::kTurns + 1, 80, 60);
  EXPECT_FALSE(on_host_);
  Pass(100, 50, 30);
  EXPECT_TRUE(on_host_);
}

TEST_F(ManagedTurnsTest, KernelsThatBecomeSlowerBringItBack) {
  Pass(200, 50, 30);
  ASSERT_TRUE(on_host_);
  Pass(2 * ManagedTurns::kTurns, 50, 500);
  EXPECT_FALSE(on_host_);
}

TEST_F(ManagedTurnsTest, AMoveThatFailsIsNotTriedAtEveryTurn) {
  int tried = 0;
  for (int i = 0; i < 10000; ++i) {
    if (turns_.wants_host()) {
      ++tried;
      turns_.Moved(false);
    }
    turns_.HandedOver(now_);
    turns_.CameBack(now_ += 50);
  }
  EXPECT_GT(tried, 1);
  EXPECT_LE(tried, 9);
}

TEST_F(ManagedTurnsTest, OnlyWholeTurnsAreTimed) {
  for (int i = 0; i < 1000; ++i) {
    turns_.HandedOver(now_);
    turns_.Interrupt();
    turns_.CameBack(now_ += 50);
  }
  EXPECT_FALSE(turns_.wants_host());
}

TEST_F(ManagedTurnsTest, MuchSlowerKernelsBringItBackAtOnce) {
  Pass(200, 50, 30);
  ASSERT_TRUE(on_host_);
  host_turns_ = 0;
  Pass(10, 50, 5000);
  EXPECT_FALSE(on_host_);
  EXPECT_LE(host_turns_, ManagedTurns::kMuchTooLong);
  // And one slow turn does not.
  Pass(500, 50, 30);
  ASSERT_TRUE(on_host_);
  Pass(1, 50, 5000);
  Pass(1, 50, 30);
  EXPECT_TRUE(on_host_);
}

TEST_F(ManagedTurnsTest, MoreWorkThanInTurnsBeforeMeansThatTheHostIsAway) {
  work_ = 3;
  Pass(200, 50, 30);
  ASSERT_TRUE(on_host_);
  for (uint64_t i = 0; i < 3 + ManagedTurns::kMoreWork; ++i) EXPECT_FALSE(turns_.Work()) << i;
  EXPECT_TRUE(turns_.Work());
  // The host uses it in another way.
  turns_.Interrupt();
  EXPECT_FALSE(turns_.Work());
  while (!turns_.Work()) {
  }
  turns_.HostIsAway();
  Pass(1, 50, 30);
  EXPECT_FALSE(on_host_);
  Pass(200, 50, 30);
  EXPECT_TRUE(on_host_);
}

TEST_F(ManagedTurnsTest, MemoryThatCouldNotLeaveIsNotTriedAgain) {
  Pass(200, 50, 30);
  ASSERT_TRUE(on_host_);
  while (!turns_.Work()) {
  }
  turns_.Postpone();
  int more = 0;
  while (!turns_.Work()) ++more;
  EXPECT_GT(more, 20);
  turns_.HostIsAway();
  Pass(10000, 50, 30);
  EXPECT_FALSE(on_host_);
}

TEST_F(ManagedTurnsTest, TurnsWithMuchWorkStayOnTheDevice) {
  work_ = ManagedTurns::kMostWork + 1;
  Pass(1000, 50, 30);
  EXPECT_FALSE(on_host_);
  EXPECT_EQ(moves_, 0u);
}

}  // namespace
}  // namespace cuda_remote::server
