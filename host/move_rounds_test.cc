// SPDX-License-Identifier: Apache-2.0
#include "host/move_rounds.h"

#include <gtest/gtest.h>

namespace cuda_remote::host {
namespace {

constexpr uint64_t kGb = 1'000'000'000;

// How many images are sent while the job runs, if they have these sizes.
size_t RoundsFor(const std::vector<uint64_t>& sizes) {
  MoveRounds rounds;
  for (const uint64_t bytes : sizes) {
    rounds.Add(bytes);
    if (!rounds.NeedsAnother()) break;
  }
  return rounds.bytes().size();
}

TEST(MoveRounds, NoneBeforeTheFirst) { EXPECT_FALSE(MoveRounds().NeedsAnother()); }

TEST(MoveRounds, FewBytesNeedNoOther) {
  EXPECT_EQ(RoundsFor({MoveRounds::kFewBytes - 1, 1}), 1u);
  EXPECT_EQ(RoundsFor({MoveRounds::kFewBytes, 1, 1}), 2u);
  EXPECT_EQ(RoundsFor({kGb, 0, 0}), 2u);
}

TEST(MoveRounds, EndWhenTheyDoNotShrink) {
  EXPECT_EQ(RoundsFor({10 * kGb, 7 * kGb, 6 * kGb, kGb}), 3u);  // 70%, then more than 70%
  EXPECT_EQ(RoundsFor({10 * kGb, 7 * kGb + 1, kGb}), 2u);
  EXPECT_EQ(RoundsFor({10 * kGb, 10 * kGb, kGb}), 2u);
  EXPECT_EQ(RoundsFor({10 * kGb, 20 * kGb, kGb}), 2u);
}

TEST(MoveRounds, EndAfterFive) {
  EXPECT_EQ(RoundsFor({64 * kGb, 32 * kGb, 16 * kGb, 8 * kGb, 4 * kGb, 2 * kGb}), MoveRounds::kMost);
}

TEST(MoveRounds, AddsUp) {
  MoveRounds rounds;
  for (const uint64_t bytes : {5, 6, 7}) rounds.Add(bytes);
  EXPECT_EQ(rounds.total(), 18u);
  EXPECT_FALSE(rounds.empty());
}

}  // namespace
}  // namespace cuda_remote::host
