// SPDX-License-Identifier: Apache-2.0
#include "client/core/event_times.h"

#include <gtest/gtest.h>

namespace cuda_remote::client {
namespace {

TEST(EventTimes, AnEventOfAnEarlierServerLiesBeforeTheMove) {
  EventTimes times;
  double at = 0;
  times.Note(7, 250);
  EXPECT_FALSE(times.Before(7, &at)) << "it has not moved yet";
  times.Moved(1000000);
  ASSERT_TRUE(times.Before(7, &at));
  EXPECT_EQ(at, -250);
  EXPECT_EQ(times.At(3000000), 2000);
  EXPECT_FALSE(times.Before(8, &at));
}

TEST(EventTimes, OnlyTheLastMoveCounts) {
  EventTimes times;
  double at = 0;
  times.Note(1, 10);
  times.Moved(1000);
  times.ForgetNoted();
  times.Note(2, 20);
  times.Moved(5000);
  EXPECT_FALSE(times.Before(1, &at)) << "nobody noted it for the second move";
  EXPECT_TRUE(times.Before(2, &at));
}

TEST(EventTimes, AMoveThatIsUndoneLeavesNothing) {
  EventTimes times;
  double at = 0;
  times.Note(1, 10);
  times.Moved(1000);
  times.ForgetNoted();
  times.Note(1, 30);
  times.Moved(9000);
  times.MoveBack();
  ASSERT_TRUE(times.Before(1, &at));
  EXPECT_EQ(at, -10);
  EXPECT_EQ(times.At(1000), 0);
}

}  // namespace
}  // namespace cuda_remote::client
