// SPDX-License-Identifier: Apache-2.0
// The search for an executable's handle, with a driver that gives slots as exec_pads.h says.
#include "server/worker/graphs/exec_pads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

namespace cuda_remote::server {
namespace {

constexpr uint64_t kBase = 0x7f47f2c74400, kSlot = 0xc0;

class ExecPadsTest : public ::testing::Test {
 protected:
  uint64_t Slot(uint64_t number) const { return base_ + number * kSlot; }
  uint64_t Make() {
    ++made_;
    if (made_ > most_) return 0;
    uint64_t slot = base_;
    while (!taken_.insert(slot).second) slot += kSlot;
    return slot;
  }
  uint64_t MakeAt(uint64_t wanted) {
    return pads_.MakeAt(
        wanted, 7, [this] { return Make(); }, [this](uint64_t handle) { Destroy(handle); });
  }
  void Destroy(uint64_t handle) { EXPECT_EQ(taken_.erase(handle), 1u); }
  void Clear() {
    pads_.Clear([this](uint64_t handle) { Destroy(handle); });
  }

  uint64_t base_ = kBase;
  std::set<uint64_t> taken_;
  size_t made_ = 0, most_ = 1000000;
  ExecPads pads_;
};

TEST_F(ExecPadsTest, NeedsNoneWithoutGaps) {
  for (uint64_t i = 0; i < 10; ++i) EXPECT_EQ(MakeAt(Slot(i)), Slot(i));
  EXPECT_EQ(made_, 10u);
  EXPECT_EQ(pads_.size(), 0u);
}

TEST_F(ExecPadsTest, FillsGapsAndFreesThem) {
  EXPECT_EQ(MakeAt(Slot(5)), Slot(5));
  EXPECT_EQ(pads_.size(), 5u);
  // A gap of before, which came to be used later.
  EXPECT_EQ(MakeAt(Slot(2)), Slot(2));
  EXPECT_EQ(MakeAt(Slot(8)), Slot(8));
  EXPECT_EQ(made_, 10u);
  Clear();
  EXPECT_EQ(taken_, (std::set<uint64_t>{Slot(2), Slot(5), Slot(8)}));
  EXPECT_EQ(Make(), Slot(0));
}

TEST_F(ExecPadsTest, AnyOrder) {
  std::vector<uint64_t> slots;
  for (uint64_t i = 0; i < 2000; i += 2) slots.push_back(Slot(i));
  std::shuffle(slots.begin(), slots.end(), std::mt19937(5));
  for (const uint64_t slot : slots) ASSERT_EQ(MakeAt(slot), slot);
  EXPECT_LE(made_, 4000u);
  Clear();
  EXPECT_EQ(taken_, std::set<uint64_t>(slots.begin(), slots.end()));
}

TEST_F(ExecPadsTest, AnotherBase) {
  base_ = kBase + (uint64_t{1} << 30);
  EXPECT_EQ(MakeAt(kBase), base_);
  EXPECT_EQ(made_, 1u);
  EXPECT_EQ(pads_.size(), 0u);
}

TEST_F(ExecPadsTest, GivesUpWhereAnotherHasTheSlot) {
  taken_.insert(Slot(3));
  const uint64_t got = MakeAt(Slot(3));
  EXPECT_NE(got, 0u);
  EXPECT_NE(got, Slot(3));
  EXPECT_EQ(made_, ExecPads::kMost + 1);
  EXPECT_EQ(taken_, (std::set<uint64_t>{Slot(3), got}));
}

TEST_F(ExecPadsTest, AFailureIsPassedOn) {
  most_ = 3;
  EXPECT_EQ(MakeAt(Slot(9)), 0u);
  EXPECT_TRUE(taken_.empty());
}

TEST_F(ExecPadsTest, PadsGoWithTheirContext) {
  EXPECT_EQ(MakeAt(Slot(2)), Slot(2));
  pads_.Forget(6);
  EXPECT_EQ(pads_.size(), 2u);
  pads_.Forget(7);
  EXPECT_EQ(pads_.size(), 0u);
}

}  // namespace
}  // namespace cuda_remote::server
