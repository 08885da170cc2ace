// SPDX-License-Identifier: Apache-2.0
#include "client/memory/pool_accounts.h"

#include <gtest/gtest.h>

namespace cuda_remote::client {
namespace {

constexpr uint64_t kA = uint64_t(8) << 48 | 0x10, kB = uint64_t(8) << 48 | 0x20, kDefault1 = uint64_t(8) << 48 | 0x30;
constexpr uint64_t kChunk = driverabi::PoolFigures::kChunk;

uint64_t Used(PoolAccounts& pools, uint64_t pool, int device = 0) {
  return pools.FiguresOf(pools.PlaceOf(pool, device)).used();
}

TEST(PoolAccountsTest, DefaultPoolHasOneAccountWithAndWithoutHandle) {
  PoolAccounts pools;
  pools.Allocated(pools.PlaceOf(0, 1), 700);
  pools.Allocated(pools.PlaceOf(0, 0), 5);
  pools.IsDefault(kDefault1, 1);
  EXPECT_EQ(pools.PlaceOf(kDefault1, 0).device, 1);
  EXPECT_EQ(pools.PlaceOf(kDefault1, 0).pool, 0u);
  EXPECT_EQ(Used(pools, kDefault1), 700u);
  pools.Allocated(pools.PlaceOf(kDefault1, 0), 300);
  EXPECT_EQ(Used(pools, 0, 1), 1000u);
  EXPECT_EQ(Used(pools, 0, 0), 5u);
}

TEST(PoolAccountsTest, TheCurrentPoolServesWhatNamesNone) {
  PoolAccounts pools;
  pools.Created(kA, 0);
  pools.IsDefault(kDefault1, 1);
  pools.SetCurrent(0, kA);
  EXPECT_EQ(pools.PlaceOf(0, 0).pool, kA);
  EXPECT_EQ(pools.PlaceOf(0, 1).pool, 0u);
  pools.Allocated(pools.PlaceOf(0, 0), 64);
  EXPECT_EQ(Used(pools, kA), 64u);
  // A device's pool may be set back to its default one, or go.
  pools.Created(kB, 1);
  pools.SetCurrent(1, kB);
  EXPECT_EQ(pools.PlaceOf(0, 1).pool, kB);
  pools.SetCurrent(1, kDefault1);
  EXPECT_EQ(pools.PlaceOf(0, 1).pool, 0u);
  pools.Destroyed(kA);
  EXPECT_EQ(pools.PlaceOf(0, 0).pool, 0u);
}

TEST(PoolAccountsTest, MemoryMayOutliveItsPool) {
  PoolAccounts pools;
  pools.Created(kA, 0);
  pools.Allocated({0, kA}, 10 * kChunk);
  pools.Destroyed(kA);
  pools.Freed({0, kA}, 10 * kChunk);
  EXPECT_FALSE(pools.MaySynchronize());
  EXPECT_EQ(pools.IdleOn(0), 0u);
}

TEST(PoolAccountsTest, WaitsLetIdleMemoryGo) {
  PoolAccounts pools;
  pools.Created(kA, 1);
  pools.Allocated({0, 0}, 3 * kChunk);
  pools.Allocated({1, kA}, 5 * kChunk);
  EXPECT_FALSE(pools.MaySynchronize());
  pools.Freed({0, 0}, 3 * kChunk);
  pools.Freed({1, kA}, 5 * kChunk);
  EXPECT_TRUE(pools.MaySynchronize());
  EXPECT_EQ(pools.IdleOn(0), 3 * kChunk);
  EXPECT_EQ(pools.IdleOn(1), 5 * kChunk);
  pools.Synchronized();
  EXPECT_FALSE(pools.MaySynchronize());
  EXPECT_EQ(pools.IdleOn(0) + pools.IdleOn(1), 0u);
  // A threshold keeps it, until it is lowered.
  pools.FiguresOf({1, kA}).set_threshold(UINT64_MAX);
  pools.Allocated({1, kA}, kChunk);
  pools.Freed({1, kA}, kChunk);
  EXPECT_FALSE(pools.MaySynchronize());
  EXPECT_EQ(pools.IdleOn(1), kChunk);
  pools.FiguresOf({1, kA}).set_threshold(0);
  pools.NoteIdle();
  EXPECT_TRUE(pools.MaySynchronize());
}

}  // namespace
}  // namespace cuda_remote::client
