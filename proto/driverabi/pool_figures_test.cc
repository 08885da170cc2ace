// SPDX-License-Identifier: Apache-2.0
#include "proto/driverabi/pool_figures.h"

#include <gtest/gtest.h>

namespace cuda_remote::driverabi {
namespace {

constexpr uint64_t kChunk = PoolFigures::kChunk;

TEST(PoolFiguresTest, UsedIsWhatIsAllocated) {
  PoolFigures pool;
  EXPECT_EQ(pool.used(), 0u);
  EXPECT_EQ(pool.reserved(), 0u);
  pool.Allocated(1000);
  pool.Allocated(24);
  EXPECT_EQ(pool.used(), 1024u);
  EXPECT_EQ(pool.reserved(), kChunk);
  pool.Freed(1000);
  EXPECT_EQ(pool.used(), 24u);
  EXPECT_EQ(pool.used_high(), 1024u);
  pool.Allocated(500);
  EXPECT_EQ(pool.used_high(), 1024u);
  pool.ResetUsedHigh();
  EXPECT_EQ(pool.used_high(), 524u);
  pool.Freed(500);
  EXPECT_EQ(pool.used_high(), 524u);
}

TEST(PoolFiguresTest, ReservedInChunks) {
  PoolFigures pool;
  for (uint64_t i = 0; i < kChunk / 512; ++i) pool.Allocated(1);
  EXPECT_EQ(pool.used(), kChunk / 512);
  EXPECT_EQ(pool.reserved(), kChunk);
  pool.Allocated(1);
  EXPECT_EQ(pool.reserved(), 2 * kChunk);
  pool.Allocated(kChunk);
  EXPECT_EQ(pool.reserved(), 3 * kChunk);
  // What a driver of 580 said of these.
  PoolFigures seen;
  for (int i = 0; i < 6; ++i) seen.Allocated(20 << 20);
  EXPECT_EQ(seen.reserved(), uint64_t{128} << 20);
  PoolFigures large;
  large.Allocated(uint64_t{1000} << 20);
  EXPECT_EQ(large.reserved(), uint64_t{1024} << 20);
}

TEST(PoolFiguresTest, ReservedGoesWithTheNextWait) {
  PoolFigures pool;
  pool.Allocated(3 * kChunk);
  pool.Allocated(kChunk);
  pool.Freed(3 * kChunk);
  EXPECT_EQ(pool.reserved(), 4 * kChunk);
  EXPECT_EQ(pool.idle(), 3 * kChunk);
  EXPECT_TRUE(pool.releasable());
  pool.Synchronized();
  EXPECT_EQ(pool.reserved(), kChunk);
  EXPECT_EQ(pool.reserved_high(), 4 * kChunk);
  EXPECT_FALSE(pool.releasable());
  pool.ResetReservedHigh();
  EXPECT_EQ(pool.reserved_high(), kChunk);
  // What is there already serves the next allocation.
  pool.Allocated(kChunk / 4);
  pool.Freed(kChunk);
  pool.Allocated(kChunk);
  EXPECT_EQ(pool.reserved(), 2 * kChunk);
}

TEST(PoolFiguresTest, ThresholdHoldsOntoMemory) {
  PoolFigures pool;
  pool.set_threshold(2 * kChunk + 5);
  for (int i = 0; i < 5; ++i) pool.Allocated(kChunk);
  for (int i = 0; i < 5; ++i) pool.Freed(kChunk);
  EXPECT_TRUE(pool.releasable());
  pool.Synchronized();
  EXPECT_EQ(pool.reserved(), 2 * kChunk);
  EXPECT_EQ(pool.used(), 0u);
  EXPECT_FALSE(pool.releasable());
  pool.set_threshold(UINT64_MAX);
  pool.Allocated(100 * kChunk);
  pool.Freed(100 * kChunk);
  EXPECT_FALSE(pool.releasable());
  pool.Synchronized();
  EXPECT_EQ(pool.reserved(), 100 * kChunk);
}

TEST(PoolFiguresTest, TrimKeepsWhatIsUsedAndWhatIsAskedFor) {
  PoolFigures pool;
  pool.set_threshold(UINT64_MAX);
  pool.Allocated(10 * kChunk);
  pool.Allocated(2 * kChunk);
  pool.Freed(10 * kChunk);
  pool.TrimTo(20 * kChunk);
  EXPECT_EQ(pool.reserved(), 12 * kChunk);
  pool.TrimTo(5 * kChunk + 1);
  EXPECT_EQ(pool.reserved(), 6 * kChunk);
  pool.TrimTo(0);
  EXPECT_EQ(pool.reserved(), 2 * kChunk);
  pool.Freed(2 * kChunk);
  pool.TrimTo(UINT64_MAX);
  EXPECT_EQ(pool.reserved(), 2 * kChunk);
  pool.TrimTo(0);
  EXPECT_EQ(pool.reserved(), 0u);
}

TEST(PoolFiguresTest, LimitsAreInChunks) {
  EXPECT_TRUE(PoolFigures::Fits(0, 100 * kChunk, kChunk));
  EXPECT_TRUE(PoolFigures::Fits(1, 0, kChunk));
  EXPECT_FALSE(PoolFigures::Fits(1, 1, kChunk));
  EXPECT_TRUE(PoolFigures::Fits(kChunk + 1, kChunk, kChunk));
  EXPECT_FALSE(PoolFigures::Fits(kChunk + 1, 2 * kChunk, 1));
  EXPECT_FALSE(PoolFigures::Fits(kChunk, 2 * kChunk, 1));
  EXPECT_TRUE(PoolFigures::Fits(UINT64_MAX, kChunk, kChunk));
}

}  // namespace
}  // namespace cuda_remote::driverabi
