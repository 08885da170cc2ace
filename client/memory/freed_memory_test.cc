// SPDX-License-Identifier: Apache-2.0
#include "client/memory/freed_memory.h"

#include <gtest/gtest.h>

namespace cuda_remote::client {
namespace {

FreedMemory::Block Block(uint64_t address, uint64_t bytes, uint64_t stream = 7) {
  FreedMemory::Block block;
  block.address = address;
  block.bytes = bytes;
  block.stream = stream;
  block.context = 3;
  return block;
}

TEST(FreedMemoryTest, OnlyTheSameSizeStreamContextPoolAndDevice) {
  FreedMemory memory;
  std::vector<FreedMemory::Block> out;
  memory.Keep(Block(0x1000, 100), &out);
  EXPECT_TRUE(out.empty());
  EXPECT_EQ(memory.Take(Block(0, 101)), 0u);
  EXPECT_EQ(memory.Take(Block(0, 100, 8)), 0u);
  FreedMemory::Block other = Block(0, 100);
  other.context = 4;
  EXPECT_EQ(memory.Take(other), 0u);
  other = Block(0, 100);
  other.pool = 1;
  EXPECT_EQ(memory.Take(other), 0u);
  other = Block(0, 100);
  other.device = 1;
  EXPECT_EQ(memory.Take(other), 0u);
  EXPECT_EQ(memory.Take(Block(0, 100)), 0x1000u);
  EXPECT_EQ(memory.Take(Block(0, 100)), 0u);
  EXPECT_TRUE(memory.empty());
  EXPECT_EQ(memory.bytes(), 0u);
}

TEST(FreedMemoryTest, TheLastOneFirst) {
  FreedMemory memory;
  std::vector<FreedMemory::Block> out;
  memory.Keep(Block(0x1000, 100), &out);
  memory.Keep(Block(0x2000, 100), &out);
  EXPECT_EQ(memory.Take(Block(0, 100)), 0x2000u);
  EXPECT_EQ(memory.Take(Block(0, 100)), 0x1000u);
}

TEST(FreedMemoryTest, TheOldestGoWhenThereAreTooMany) {
  FreedMemory memory;
  std::vector<FreedMemory::Block> out;
  for (uint64_t i = 1; i <= FreedMemory::kMostBlocks + 2; ++i) memory.Keep(Block(i << 12, i), &out);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[0].address, 1u << 12);
  EXPECT_EQ(out[1].address, 2u << 12);
}

TEST(FreedMemoryTest, TheOldestGoWhenTheyAreTooLarge) {
  FreedMemory memory;
  std::vector<FreedMemory::Block> out;
  memory.Keep(Block(0x1000, FreedMemory::kMostBytes / 2), &out);
  memory.Keep(Block(0x2000, FreedMemory::kMostBytes / 2), &out);
  EXPECT_TRUE(out.empty());
  memory.Keep(Block(0x3000, 1), &out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].address, 0x1000u);
  out.clear();
  memory.Keep(Block(0x4000, FreedMemory::kMostBytes + 1), &out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].address, 0x4000u);
  EXPECT_EQ(memory.bytes(), FreedMemory::kMostBytes / 2 + 1);
}

TEST(FreedMemoryTest, ForgetAndTakeAll) {
  FreedMemory memory;
  std::vector<FreedMemory::Block> out;
  memory.Keep(Block(0x1000, 10), &out);
  memory.Keep(Block(0x2000, 20), &out);
  memory.Forget(0x1000);
  memory.Forget(0x5000);
  EXPECT_EQ(memory.bytes(), 20u);
  const auto all = memory.TakeAll();
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].address, 0x2000u);
  EXPECT_TRUE(memory.empty());
  EXPECT_EQ(memory.bytes(), 0u);
}

}  // namespace
}  // namespace cuda_remote::client
