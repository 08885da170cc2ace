// SPDX-License-Identifier: Apache-2.0
// Tests of the memory pool of a checkpoint, and of how much it may take.

#include "checkpoint/gpu/chunk_pool.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <set>
#include <thread>

namespace cuda_remote::checkpoint {
namespace {

constexpr uint64_t kSlot = ChunkPool::kSlotBytes;

TEST(ChunkPool, GivesSlotsUpToItsLimitAndThenWaits) {
  ChunkPool pool(40 * kSlot + 5);
  ASSERT_TRUE(pool.ok());
  EXPECT_EQ(pool.limit(), 40 * kSlot);
  std::set<char*> slots;
  for (int i = 0; i < 40; ++i) {
    char* const slot = pool.TryTake();
    ASSERT_NE(slot, nullptr);
    EXPECT_TRUE(slots.insert(slot).second);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(slot) % kSlot, 0u) << "no room for a huge page";
    slot[0] = slot[kSlot - 1] = 'x';
  }
  EXPECT_EQ(pool.TryTake(), nullptr);
  char* const given = *slots.begin();
  std::thread giver([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    pool.Give(given);
  });
  EXPECT_EQ(pool.Take(), given);
  giver.join();
  for (char* slot : slots) pool.Give(slot);
  // The one that was used last is the one that the processor's caches still know.
  EXPECT_EQ(pool.Take(), *slots.rbegin());
  pool.Give(*slots.rbegin());
}

TEST(ChunkPool, ASmallLimitStillWorks) {
  ChunkPool pool(0);
  ASSERT_TRUE(pool.ok());
  EXPECT_EQ(pool.limit(), ChunkPool::kLeastSlots * kSlot);
}

uint64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  uint64_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * uint64_t(sysconf(_SC_PAGESIZE));
}

TEST(ChunkPool, PreparedMemoryIsThere) {
  ChunkPool pool(100 * kSlot);
  const uint64_t before = ResidentBytes();
  pool.Prepare(50 * kSlot - 1, nullptr);
  EXPECT_EQ(pool.prepared(), 50 * kSlot);
#if !defined(__SANITIZE_THREAD__)
  EXPECT_GE(ResidentBytes() - before, 49 * kSlot);
#endif
  // All slots are different ones, prepared or not.
  std::set<char*> slots;
  while (char* const slot = pool.TryTake()) slots.insert(slot);
  EXPECT_EQ(slots.size(), 100u);
  for (char* slot : slots) pool.Give(slot);
  ChunkPool small(40 * kSlot);
  small.Prepare(1000 * kSlot, nullptr);
  EXPECT_EQ(small.prepared(), 40 * kSlot);
}

TEST(ChunkPool, PreparingCanBeCancelled) {
  ChunkPool pool(1000 * kSlot);
  std::atomic<int> asked{0};
  pool.Prepare(1000 * kSlot, [&] { return ++asked >= 3; });
  EXPECT_LT(pool.prepared(), 1000 * kSlot);
  std::set<char*> slots;
  while (char* const slot = pool.TryTake()) slots.insert(slot);
  EXPECT_EQ(slots.size(), 1000u);
  for (char* slot : slots) pool.Give(slot);
}

TEST(ChunkPool, ManyThreadsNeverHaveTheSameSlot) {
  ChunkPool pool(ChunkPool::kLeastSlots * kSlot);
  std::atomic<bool> wrong{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 2000; ++i) {
        char* const first = pool.Take();
        char* const second = pool.TryTake();
        *first = char(t);
        if (second) *second = char(t);
        std::this_thread::yield();
        if (*first != char(t) || (second && *second != char(t))) wrong = true;
        pool.Give(first);
        if (second) pool.Give(second);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(wrong);
}

TEST(SpareMemory, IsPartOfTheMachines) {
  EXPECT_GT(SpareMemory(), 0u);
  EXPECT_LT(SpareMemory(), uint64_t{1} << 50);
}

}  // namespace
}  // namespace cuda_remote::checkpoint
