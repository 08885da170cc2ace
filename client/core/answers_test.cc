// SPDX-License-Identifier: Apache-2.0
#include "client/core/answers.h"

#include <gtest/gtest.h>

namespace cuda_remote::client {
namespace {

TEST(Answers, KeepsUntilForgotten) {
  Answers answers;
  std::string answer;
  EXPECT_FALSE(answers.Find("limit", &answer));
  answers.Keep(answers.stamp(), "limit", "1024");
  EXPECT_TRUE(answers.Find("limit", &answer));
  EXPECT_EQ(answer, "1024");
  EXPECT_TRUE(answers.Find("limit", nullptr));
  answers.Forget();
  EXPECT_FALSE(answers.Find("limit", &answer));
}

TEST(Answers, AnAnswerOfBeforeIsNotKept) {
  Answers answers;
  const uint64_t asked = answers.stamp();
  answers.Forget();  // the limit was changed while the question was under way
  answers.Keep(asked, "limit", "1024");
  EXPECT_FALSE(answers.Find("limit", nullptr));
}

TEST(Answers, DoesNotGrowWithoutEnd) {
  Answers answers;
  for (int i = 0; i < 100000; ++i) answers.Keep(answers.stamp(), std::to_string(i), "");
  EXPECT_TRUE(answers.Find("99999", nullptr));
  EXPECT_FALSE(answers.Find("0", nullptr));
}

}  // namespace
}  // namespace cuda_remote::client
