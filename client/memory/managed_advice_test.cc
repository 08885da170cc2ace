// SPDX-License-Identifier: Apache-2.0
#include "client/memory/managed_advice.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "proto/driverabi/job_addresses.h"

namespace cuda_remote::client {
namespace {

constexpr uint64_t kStart = driverabi::kHostBase, kPage = 4096;

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

TEST(ManagedAdviceTest, WhatIsForTheHost) {
  ManagedAdvice all;
  const auto for_host = [&all] {
    std::vector<std::pair<uint64_t, uint64_t>> pieces;
    all.VisitPieces(kStart, 4 * kPage, [&](uint64_t begin, uint64_t end, const Advice& advice) {
      if (advice.IsForHost()) pieces.emplace_back((begin - kStart) / kPage, (end - kStart) / kPage);
    });
    return pieces;
  };
  all.Update(kStart, 2 * kPage, [](Advice& advice) { advice.preferred = {CU_MEM_LOCATION_TYPE_HOST, 0}; });
  all.Update(kStart + kPage, 2 * kPage, [](Advice& advice) { advice.accessed_by.insert(CU_DEVICE_CPU); });
  EXPECT_EQ(for_host(), (std::vector<std::pair<uint64_t, uint64_t>>{{0, 1}, {1, 2}, {2, 3}}));
  // Either is enough.
  all.Update(kStart, 4 * kPage, [](Advice& advice) { advice.preferred = {CU_MEM_LOCATION_TYPE_DEVICE, 0}; });
  EXPECT_EQ(for_host(), (std::vector<std::pair<uint64_t, uint64_t>>{{1, 2}, {2, 3}}));
  all.Update(kStart, 2 * kPage, [](Advice& advice) { advice.accessed_by = {0}; });
  EXPECT_EQ(for_host(), (std::vector<std::pair<uint64_t, uint64_t>>{{2, 3}}));
}

TEST(ManagedAdviceTest, ForgetsWhatIsGoneAndNoMore) {
  ManagedAdvice all;
  all.Update(kStart, 6 * kPage, [](Advice& advice) { advice.read_mostly = true; });
  all.Forget(kStart + 2 * kPage, 2 * kPage);
  EXPECT_EQ(ReadMostly(all, kStart, 6 * kPage), std::vector<bool>({true, false, true}));
}

}  // namespace
}  // namespace cuda_remote::client
