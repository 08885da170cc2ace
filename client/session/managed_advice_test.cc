// SPDX-License-Identifier: Apache-2.0
#include "client/session/managed_advice.h"

#include <gtest/gtest.h>

#include <vector>

namespace cuda_remote::client {
namespace {

constexpr uint64_t kStart = 0x200000000000, kPage = 4096;

std::vector<bool> ReadMostly(const ManagedAdvice& all, uint64_t address, uint64_t bytes) {
  std::vector<bool> out;
  all.Visit(address, bytes, [&out](const Advice& advice) { out.push_back(advice.read_mostly); });
  return out;
}

TEST(ManagedAdviceTest, NothingIsKnownAtFirst) {
  ManagedAdvice all;
  EXPECT_EQ(ReadMostly(all, kStart, 10 * kPage), std::vector<bool>({false}));
}

TEST(ManagedAdviceTest, AdviceIsForWholePagesAndParts) {
  ManagedAdvice all;
  all.Update(kStart + 2 * kPage + 5, 10, [](Advice& advice) { advice.read_mostly = true; });
  EXPECT_EQ(ReadMostly(all, kStart, 4 * kPage), std::vector<bool>({false, true, false}));
  EXPECT_EQ(ReadMostly(all, kStart + 2 * kPage, kPage), std::vector<bool>({true}));
  EXPECT_EQ(ReadMostly(all, kStart + 3 * kPage, 1), std::vector<bool>({false}));
  // The hole before it, and all of it, get something else.
  all.Update(kStart, 5 * kPage, [](Advice& advice) { advice.accessed_by.insert(3); });
  int pieces = 0, read_mostly = 0;
  all.Visit(kStart, 5 * kPage, [&](const Advice& advice) {
    ++pieces;
    read_mostly += advice.read_mostly;
    EXPECT_EQ(advice.accessed_by.count(3), 1u);
  });
  EXPECT_EQ(pieces, 3);
  EXPECT_EQ(read_mostly, 1);
}

TEST(ManagedAdviceTest, ForgetsWhatIsGoneAndNoMore) {
  ManagedAdvice all;
  all.Update(kStart, 6 * kPage, [](Advice& advice) { advice.read_mostly = true; });
  all.Forget(kStart + 2 * kPage, 2 * kPage);
  EXPECT_EQ(ReadMostly(all, kStart, 6 * kPage), std::vector<bool>({true, false, true}));
}

}  // namespace
}  // namespace cuda_remote::client
