// SPDX-License-Identifier: Apache-2.0
#include "host/places.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace cuda_remote::host {
namespace {

constexpr uid_t kAnna = 1000, kBert = 1001;

TEST(Places, OneUserLeavesThemToOthers) {
  Places places;
  std::vector<std::unique_ptr<Places::Place>> annas;
  for (int i = 0; i < Places::kMostOfUser; ++i) {
    annas.push_back(std::make_unique<Places::Place>(&places, kAnna));
    EXPECT_TRUE(annas.back()->taken());
  }
  EXPECT_FALSE(Places::Place(&places, kAnna).taken());
  EXPECT_FALSE(Places::Place(&places, kAnna).taken());  // the one before had none to give back
  EXPECT_TRUE(Places::Place(&places, kBert).taken());
  annas.pop_back();
  EXPECT_TRUE(Places::Place(&places, kAnna).taken());
}

TEST(Places, AllTogether) {
  Places places;
  std::vector<std::unique_ptr<Places::Place>> taken;
  for (int i = 0; i < Places::kMost; ++i) {
    taken.push_back(std::make_unique<Places::Place>(&places, kAnna + uid_t(i)));
    EXPECT_TRUE(taken.back()->taken());
  }
  EXPECT_FALSE(Places::Place(&places, 1).taken());
  taken.pop_back();
  EXPECT_TRUE(Places::Place(&places, 1).taken());
}

}  // namespace
}  // namespace cuda_remote::host
