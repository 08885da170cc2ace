// SPDX-License-Identifier: Apache-2.0
// Tests of the memory pool of a checkpoint, and of how much it may take.

#include "checkpoint/gpu/chunk_pool.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <random>
#include <set>
#include <thread>
#include <vector>

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

uint64_t Taken(const ChunkPool& pool) { return pool.limit() - pool.free_bytes(); }

// Chunks of 100 KiB must not take 2 MiB each.
TEST(ChunkPool, PacksSmallChunksInSlots) {
  constexpr size_t kSmall = 100 << 10, kInASlot = kSlot / kSmall;
  ChunkPool pool(40 * kSlot);
  std::vector<char*> chunks;
  for (size_t i = 0; i < 20 * kInASlot; ++i) {
    chunks.push_back(pool.TryTake(kSmall));
    ASSERT_NE(chunks.back(), nullptr);
    memset(chunks.back(), int(i % 251), kSmall);
    // Between them, a slot of its own.
    if (i == 30) pool.Give(pool.Take());
  }
  EXPECT_EQ(Taken(pool), 20 * kSlot);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const auto is_right = [i](char byte) { return byte == char(i % 251); };
    EXPECT_TRUE(std::all_of(chunks[i], chunks[i] + kSmall, is_right)) << i;
  }
  // One of more than a half has a slot.
  char* const large = pool.TryTake(kSlot / 2 + 1);
  EXPECT_EQ(Taken(pool), 21 * kSlot);
  pool.Give(large);
  // A slot is free when its last chunk has come back, also the one that was not full.
  for (size_t i = 1; i < chunks.size(); i += 2) pool.Give(chunks[i]);
  EXPECT_EQ(Taken(pool), 20 * kSlot);
  for (size_t i = 0; i < chunks.size(); i += 2) pool.Give(chunks[i]);
  EXPECT_EQ(pool.free_bytes(), pool.limit());
  pool.Give(pool.Take(1));
  EXPECT_EQ(pool.free_bytes(), pool.limit());
  std::set<char*> slots;
  while (char* const slot = pool.TryTake()) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(slot) % kSlot, 0u);
    EXPECT_TRUE(slots.insert(slot).second);
  }
  EXPECT_EQ(slots.size(), 40u);
  for (char* slot : slots) pool.Give(slot);
}

TEST(ChunkPool, PackedChunksKeepToTheLimitsAndWait) {
  constexpr size_t kSmall = 100 << 10, kInASlot = kSlot / kSmall;
  ChunkPool pool(0);
  std::vector<char*> chunks;
  const auto take_all = [&](uint64_t most) {
    while (char* const chunk = pool.TryTake(kSmall, most)) chunks.push_back(chunk);
  };
  take_all(3 * kSlot + 5);
  EXPECT_EQ(chunks.size(), 3 * kInASlot);
  EXPECT_EQ(Taken(pool), 3 * kSlot);
  EXPECT_EQ(pool.TryTake(kSlot, 3 * kSlot), nullptr);
  take_all(UINT64_MAX);
  EXPECT_EQ(chunks.size(), ChunkPool::kLeastSlots * kInASlot);
  EXPECT_EQ(pool.TryTake(), nullptr);
  // Two that wait both find room in the slot that comes back.
  std::vector<std::thread> takers;
  std::atomic<size_t> taken{0};
  for (int i = 0; i < 2; ++i) {
    takers.emplace_back([&] {
      char* const chunk = pool.Take(kSmall);
      // Neither gives anything back before both have it.
      for (++taken; taken < 2;) std::this_thread::yield();
      pool.Give(chunk);
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(taken, 0u);
  for (size_t i = 0; i < kInASlot; ++i) pool.Give(chunks[i]);
  for (std::thread& taker : takers) taker.join();
  for (size_t i = kInASlot; i < chunks.size(); ++i) pool.Give(chunks[i]);
  EXPECT_EQ(pool.free_bytes(), pool.limit());
}

TEST(ChunkPool, SaysHowMuchChunksTakeAtMost) {
  EXPECT_EQ(ChunkPool::MostTaken({}), 0u);
  EXPECT_EQ(ChunkPool::MostTaken({kSlot, kSlot / 2 + 1, kSlot}), 3 * kSlot);
  EXPECT_EQ(ChunkPool::MostTaken({8, 8, kSlot}), 2 * kSlot);
  const uint64_t many = ChunkPool::MostTaken(std::vector<size_t>(3000, 100 << 10));
  EXPECT_GE(many, 150 * kSlot);
  EXPECT_LE(many, 156 * kSlot);
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<size_t> sizes;
    const size_t count = random() % 200, largest = kSlot >> random() % 8;
    while (sizes.size() < count) sizes.push_back(1 + random() % (random() % 8 == 0 ? kSlot : largest));
    const uint64_t most = ChunkPool::MostTaken(sizes);
    ChunkPool pool(400 * kSlot);
    if (seed % 2 == 0) pool.Take(kSlot / 3);  // left open by somebody else
    const uint64_t before = Taken(pool);
    for (const size_t size : sizes) pool.Take(size);
    EXPECT_LE(Taken(pool) - before, most) << seed;
  }
}

TEST(ChunkPool, ManyThreadsNeverHaveTheSamePackedChunk) {
  ChunkPool pool(ChunkPool::kLeastSlots * kSlot);
  std::atomic<bool> wrong{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      for (int i = 0; i < 1000; ++i) {
        const size_t bytes = 1 + random() % (random() % 4 == 0 ? kSlot : kSlot / 8);
        char* const chunk = pool.Take(bytes);
        chunk[0] = chunk[bytes - 1] = char(t);
        std::this_thread::yield();
        if (chunk[0] != char(t) || chunk[bytes - 1] != char(t)) wrong = true;
        pool.Give(chunk);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(wrong);
  EXPECT_EQ(pool.free_bytes(), pool.limit());
}

TEST(SpareMemory, IsPartOfTheMachines) {
  EXPECT_GT(SpareMemory(), 0u);
  EXPECT_LT(SpareMemory(), uint64_t{1} << 50);
}

}  // namespace
}  // namespace cuda_remote::checkpoint
