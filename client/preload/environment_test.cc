// SPDX-License-Identifier: Apache-2.0
#include "client/preload/environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

namespace cuda_remote::preload {
namespace {

using Variables = std::vector<std::string>;
using testing::UnorderedElementsAreArray;

class EnvironmentTest : public testing::Test {
 protected:
  EnvironmentTest() {
    char name[] = "/tmp/environment-test-XXXXXX";
    job_ = mkdtemp(name);
    lib_ = job_ + "/lib";
    library_ = lib_ + "/preload.so";
    EXPECT_EQ(system(("mkdir " + lib_).c_str()), 0);
    std::ofstream(library_) << "here";
  }
  ~EnvironmentTest() override { EXPECT_EQ(system(("rm -r " + job_).c_str()), 0); }

  // What becomes of `before`.
  Variables Changed(const Variables& before) {
    std::vector<char*> words;
    for (const std::string& variable : before) words.push_back(const_cast<char*>(variable.c_str()));
    words.push_back(nullptr);
    const Environment environment(words.data(), library_.c_str());
    if (!environment.changes()) return before;
    // Bytes behind it must stay.
    std::string space(environment.bytes() + 16, 'x');
    Variables after;
    for (char** variable = environment.Fill(space.data()); *variable; ++variable) after.emplace_back(*variable);
    EXPECT_EQ(space.substr(environment.bytes()), std::string(16, 'x'));
    return after;
  }
  std::string Preload(const std::string& more = {}) { return "LD_PRELOAD=" + more + library_; }
  std::string Path(const std::string& more = {}) { return "LD_LIBRARY_PATH=" + lib_ + more; }

  std::string job_, lib_, library_;
};

TEST_F(EnvironmentTest, AnEmptyOneGetsBoth) {
  EXPECT_THAT(Changed({}), UnorderedElementsAreArray({Preload(), Path()}));
  const Environment none(nullptr, library_.c_str());
  std::string space(none.bytes(), '\0');
  char** const variables = none.Fill(space.data());
  EXPECT_EQ(Variables({variables[0], variables[1]}), Variables({Preload(), Path()}));
  EXPECT_EQ(variables[2], nullptr);
}

TEST_F(EnvironmentTest, WhatIsThereStays) {
  EXPECT_THAT(Changed({"A=1", "LD_LIBRARY_PATH=/x:" + lib_, "LD_PRELOAD=/a.so /b.so:/c.so", "B="}),
              UnorderedElementsAreArray(
                  {std::string("A=1"), std::string("B="), Path(":/x:" + lib_), Preload("/a.so:/b.so:/c.so:")}));
  EXPECT_THAT(Changed({"LD_LIBRARY_PATH=", "LD_PRELOAD="}), UnorderedElementsAreArray({Preload(), Path()}));
  EXPECT_THAT(Changed({Preload("/a.so:")}), UnorderedElementsAreArray({Preload("/a.so:"), Path()}));
  EXPECT_THAT(Changed({Path(":/x")}), UnorderedElementsAreArray({Preload(), Path(":/x")}));
}

TEST_F(EnvironmentTest, OneThatHasBothIsLeftAlone) {
  for (const Variables& variables :
       {Variables{Preload(), Path()}, Variables{Path(":/x"), "C", Preload("/a.so "), "CUDA_REMOTE_JOB_DIR=" + job_}}) {
    EXPECT_EQ(Changed(variables), variables);
  }
}

TEST_F(EnvironmentTest, OnlyTheWholeNameCounts) {
  const Variables others = {"LD_PRELOADED=1", "LD_LIBRARY_PATH_=1", "LD_PRELOAD=" + library_ + "x",
                            "LD_LIBRARY_PATH=" + lib_ + "x"};
  EXPECT_THAT(Changed(others),
              UnorderedElementsAreArray({others[0], others[1], Preload(library_ + "x:"), Path(":" + lib_ + "x")}));
}

TEST_F(EnvironmentTest, AnotherJobsIsLeftAlone) {
  for (const std::string& job : {job_ + "2", job_ + "/", std::string("/else"), job_.substr(0, job_.size() - 1)}) {
    const Variables variables = {"CUDA_REMOTE_JOB_DIR=" + job, "LD_LIBRARY_PATH=" + job + "/lib"};
    EXPECT_EQ(Changed(variables), variables);
  }
  EXPECT_NE(Changed({"CUDA_REMOTE_JOB_DIR="}), Variables({"CUDA_REMOTE_JOB_DIR="}));
  EXPECT_NE(Changed({"CUDA_REMOTE_JOB_DIR=" + job_}), Variables({"CUDA_REMOTE_JOB_DIR=" + job_}));
}

TEST_F(EnvironmentTest, ALibraryThatCannotBeReadIsTakenOut) {
  ASSERT_EQ(unlink(library_.c_str()), 0);
  EXPECT_EQ(Changed({}), Variables());
  EXPECT_EQ(Changed({"A=1", Path()}), Variables({"A=1", Path()}));
  EXPECT_THAT(Changed({Preload("/a.so:"), Path()}),
              UnorderedElementsAreArray({std::string("LD_PRELOAD=/a.so"), Path()}));
  std::ofstream(library_) << "here";
}

}  // namespace
}  // namespace cuda_remote::preload
