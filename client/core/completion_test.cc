// SPDX-License-Identifier: Apache-2.0
#include "client/core/completion.h"

#include <gtest/gtest.h>

namespace cuda_remote::client {
namespace {

TEST(CompletionsTest, AStampChangesWithWhatMayChangeTheAnswerAndWithNothingElse) {
  Completions completions;
  const uint64_t one = MakeHandle(Kind::kEvent, 1, 0), two = MakeHandle(Kind::kEvent, 2, 0);
  const uint64_t one_before = completions.EventStamp(one), two_before = completions.EventStamp(two);
  const uint64_t work_before = completions.WorkStamp(7);
  completions.EventRecorded(one);
  EXPECT_NE(completions.EventStamp(one), one_before);
  EXPECT_EQ(completions.EventStamp(two), two_before);
  EXPECT_EQ(completions.WorkStamp(7), work_before);
  const uint64_t one_after = completions.EventStamp(one);
  completions.WorkSent();
  EXPECT_EQ(completions.EventStamp(one), one_after);
  EXPECT_NE(completions.WorkStamp(7), work_before);
  EXPECT_NE(completions.WorkStamp(8), completions.WorkStamp(7));
  completions.SomeEventsRecorded();
  EXPECT_NE(completions.EventStamp(one), one_after);
  EXPECT_NE(completions.EventStamp(two), two_before);
}

TEST(CompletionsTest, EventsThatShareACounterOnlyAskTooOften) {
  Completions completions;
  // More events than counters: each one's own record always shows.
  for (uint32_t slot = 1; slot <= 5000; ++slot) {
    const uint64_t event = MakeHandle(Kind::kEvent, slot, 0);
    const uint64_t before = completions.EventStamp(event);
    completions.EventRecorded(event);
    EXPECT_NE(completions.EventStamp(event), before);
  }
}

TEST(CompletionsTest, AnotherServerMakesAllUnknown) {
  Completions completions;
  const uint64_t event = MakeHandle(Kind::kEvent, 9, 2);
  const uint64_t event_before = completions.EventStamp(event), work_before = completions.WorkStamp(7);
  completions.ForgetAll();
  EXPECT_NE(completions.EventStamp(event), event_before);
  EXPECT_NE(completions.WorkStamp(7), work_before);
}

}  // namespace
}  // namespace cuda_remote::client
