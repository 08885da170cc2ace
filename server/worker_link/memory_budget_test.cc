// SPDX-License-Identifier: Apache-2.0
#include "server/worker_link/memory_budget.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <thread>
#include <vector>

namespace cuda_remote::server {
namespace {

std::unique_ptr<MemoryBudget> Worker(const MemoryBudget& server, uint32_t slot, uint64_t limit) {
  return *MemoryBudget::Open(dup(server.fd()), slot, limit);
}

std::unique_ptr<MemoryBudget> Server() { return *MemoryBudget::Create(); }

TEST(MemoryBudget, IsSharedByTheWorkersOfAnOwner) {
  const auto server = Server();
  const auto first = Worker(*server, 0, 100), second = Worker(*server, 7, 100);
  EXPECT_TRUE(first->Take(60));
  EXPECT_FALSE(second->Take(41));
  EXPECT_TRUE(second->Take(40));
  EXPECT_EQ(first->Left(), 0u);
  EXPECT_FALSE(first->Take(1));
  EXPECT_FALSE(first->Take(~uint64_t{0}));
  second->Give(15);
  EXPECT_EQ(second->Left(), 15u);
  // A worker that is gone holds nothing.
  server->Clear(0);
  EXPECT_EQ(second->Left(), 75u);
  // What is held when a limit begins to count is held.
  second->TakeAnyway(500);
  EXPECT_EQ(second->Left(), 0u);
  EXPECT_FALSE(second->Take(1));
}

TEST(MemoryBudget, IsNeverExceeded) {
  const auto server = Server();
  constexpr uint64_t kLimit = 50;
  std::atomic<uint64_t> held{0};
  std::atomic<bool> exceeded{false};
  std::atomic<int> served{0};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      const auto budget = Worker(*server, t, kLimit);
      for (int i = 0; i < 20000; ++i) {
        const uint64_t bytes = 1 + (uint64_t(i) * 7 + t) % 20;
        if (!budget->Take(bytes)) continue;
        if (held.fetch_add(bytes) + bytes > kLimit) exceeded = true;
        ++served;
        held.fetch_sub(bytes);
        budget->Give(bytes);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(exceeded);
  EXPECT_GT(served, 0);
  EXPECT_EQ(Worker(*server, 9, kLimit)->Left(), kLimit);
}

TEST(MemoryBudget, OtherFilesAreRefused) {
  const auto refused = absl::InvalidArgumentError("what cr-server sent is not a memory budget");
  EXPECT_EQ(MemoryBudget::Open(open("/dev/null", O_RDWR), 0, 1).status(), refused);
  EXPECT_EQ(MemoryBudget::Open(dup(Server()->fd()), MemoryBudget::kSlots, 1).status(), refused);
  EXPECT_EQ(MemoryBudget::Open(-1, 0, 1).status(), refused);
}

}  // namespace
}  // namespace cuda_remote::server
