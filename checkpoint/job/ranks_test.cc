// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace cuda_remote::checkpoint {
namespace {

using ::testing::ElementsAre;

std::string Environment(const std::vector<std::string>& variables) {
  std::string text;
  for (const std::string& variable : variables) text += variable + '\0';
  return text;
}

TEST(Ranks, TheLaunchersVariablesTellThem) {
  for (const char* variable : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "LOCAL_RANK"}) {
    const std::string name = variable;
    EXPECT_THAT(RanksIn({Environment({name + "=2", "HOME=/"}), Environment({"HOME=/", name + "=0"}),
                         Environment({"A=1", name + "=11", "B=2"})}),
                ElementsAre(2, 0, 11))
        << variable;
  }
}

TEST(Ranks, ANameThatEndsLikeAVariableIsNone) {
  EXPECT_THAT(RanksIn({Environment({"MY_RANK=2"}), Environment({"RANKS=3"})}), ElementsAre(-1, -1));
}

TEST(Ranks, AProcessWithoutTheVariableHasNone) {
  EXPECT_THAT(RanksIn({Environment({"RANK=1"}), Environment({"HOME=/"}), Environment({"RANK=0"})}),
              ElementsAre(1, -1, 0));
}

// srun started torchrun, which started the ranks.
TEST(Ranks, AnOuterLaunchersVariableIsTheSameInAllAndDoesNotCount) {
  EXPECT_THAT(
      RanksIn({Environment({"OMPI_COMM_WORLD_RANK=0", "RANK=1"}), Environment({"OMPI_COMM_WORLD_RANK=0", "RANK=0"})}),
      ElementsAre(1, 0));
}

TEST(Ranks, WhatIsNoNumberIsNoRank) {
  EXPECT_THAT(RanksIn({Environment({"RANK="}), Environment({"RANK=x"}), Environment({"RANK=-1"}),
                       Environment({"RANK=99999999999"})}),
              ElementsAre(-1, -1, -1, -1));
}

TEST(Ranks, OneProcessAlone) {
  EXPECT_THAT(RanksIn({Environment({"RANK=3"})}), ElementsAre(3));
  EXPECT_THAT(RanksIn({}), ElementsAre());
}

}  // namespace
}  // namespace cuda_remote::checkpoint
