// SPDX-License-Identifier: Apache-2.0
#include "server/worker/memory/device_arena.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <map>
#include <set>
#include <tuple>
#include <vector>

namespace cuda_remote::server {
namespace {

constexpr uint64_t kPage = DeviceArena::kPage;

// What the arena asked the driver for. The driver's functions carry no state, so this is global.
struct FakeDriver {
  uint64_t reserved = 0;
  uint64_t most_reservable = kArenaBytes;
  uint64_t move = 0;  // reservations come out this much higher
  uint64_t capacity = 64 << 20;
  uint64_t physical = 0;  // bytes in use
  std::map<uint64_t, uint64_t> handles;
  std::map<uint64_t, uint64_t> mapped;  // address -> bytes
  std::map<uint64_t, std::set<int>> access;
  uint64_t next = 1;
  int creates = 0;
  uint64_t largest = ~uint64_t(0);  // more than this in one piece is an invalid value
  bool shareable = false;           // whether the last piece can be exported
} g;

DriverTable MakeTable() {
  g = FakeDriver();
  DriverTable table = {};
  table.cuMemAddressReserve = [](CUdeviceptr* p, size_t bytes, size_t, CUdeviceptr hint, unsigned long long) {
    if (bytes > g.most_reservable) return CUDA_ERROR_OUT_OF_MEMORY;
    g.reserved = bytes;
    *p = hint + g.move;
    return CUDA_SUCCESS;
  };
  table.cuMemAddressFree = [](CUdeviceptr, size_t) { return CUDA_SUCCESS; };
  table.cuMemCreate = [](CUmemGenericAllocationHandle* h, size_t bytes, const CUmemAllocationProp* prop,
                         unsigned long long) {
    ++g.creates;
    if (bytes > g.largest) return CUDA_ERROR_INVALID_VALUE;
    g.shareable = prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (g.physical + bytes > g.capacity) return CUDA_ERROR_OUT_OF_MEMORY;
    g.physical += bytes;
    *h = g.next++;
    g.handles[*h] = bytes;
    return CUDA_SUCCESS;
  };
  table.cuMemRelease = [](CUmemGenericAllocationHandle h) {
    g.handles.erase(h);
    return CUDA_SUCCESS;
  };
  table.cuMemMap = [](CUdeviceptr p, size_t bytes, size_t, CUmemGenericAllocationHandle, unsigned long long) {
    for (const auto& [address, length] : g.mapped) {
      if (address < p + bytes && p < address + length) return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    g.mapped[p] = bytes;
    return CUDA_SUCCESS;
  };
  // A descriptor's number is how many pages it stands for.
  table.cuMemImportFromShareableHandle = [](CUmemGenericAllocationHandle* h, void* fd, CUmemAllocationHandleType) {
    *h = g.next++;
    g.handles[*h] = reinterpret_cast<uintptr_t>(fd) * kPage;
    g.physical += g.handles[*h];
    return CUDA_SUCCESS;
  };
  table.cuMemExportToShareableHandle = [](void* fd, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                                          unsigned long long) {
    *static_cast<int*>(fd) = open("/dev/null", O_RDONLY | O_CLOEXEC);
    return CUDA_SUCCESS;
  };
  table.cuMemUnmap = [](CUdeviceptr p, size_t bytes) {
    EXPECT_EQ(g.mapped[p], bytes);
    g.mapped.erase(p);
    g.access.erase(p);
    g.physical -= bytes;
    return CUDA_SUCCESS;
  };
  table.cuMemSetAccess = [](CUdeviceptr p, size_t, const CUmemAccessDesc* desc, size_t count) {
    for (size_t i = 0; i < count; ++i) g.access[p].insert(desc[i].location.id);
    return CUDA_SUCCESS;
  };
  return table;
}

class DeviceArenaTest : public testing::Test {
 protected:
  void Make(uint64_t limit = 0, int devices = 2) { arena_ = *DeviceArena::Create(MakeTable(), devices, limit); }
  uint64_t Allocate(uint64_t bytes, uint64_t at = 0, int device = 0) {
    uint64_t address = 0;
    last_ = arena_->Allocate(device, bytes, at, &address);
    return last_ == CUDA_SUCCESS ? address : 0;
  }
  std::unique_ptr<DeviceArena> arena_;
  CUresult last_ = CUDA_SUCCESS;
};

TEST_F(DeviceArenaTest, ReservesLessWhereThereIsLess) {
  const DriverTable table = MakeTable();
  g.most_reservable = uint64_t{1} << 41;
  const auto arena = DeviceArena::Create(table, 1, 0);
  ASSERT_TRUE(arena.ok()) << arena.status().message();
  EXPECT_EQ((*arena)->bytes(), uint64_t{1} << 40);
}

TEST_F(DeviceArenaTest, RefusesAnotherBase) {
  const DriverTable table = MakeTable();
  g.move = kPage;
  const auto arena = DeviceArena::Create(table, 1, 0);
  EXPECT_NE(arena.status().message().find("device addresses at 0x"), std::string::npos);
}

TEST_F(DeviceArenaTest, SmallAllocationsShareAPage) {
  Make();
  const uint64_t a = Allocate(1), b = Allocate(600), c = Allocate(512);
  EXPECT_EQ(a, kArenaBase);
  EXPECT_EQ(b, a + 512);
  EXPECT_EQ(c, b + 1024);
  EXPECT_EQ(g.creates, 1);
  EXPECT_EQ(arena_->used_bytes(), 512u + 1024 + 512);
  arena_->Free(b);
  EXPECT_EQ(Allocate(1024), b);
}

// Sessions of one owner have a limit together: what another one holds is not there for this one.
TEST_F(DeviceArenaTest, SharesABudgetWithOthers) {
  Make();
  const std::unique_ptr<MemoryBudget> page = *MemoryBudget::Create();
  const std::unique_ptr<MemoryBudget> other = *MemoryBudget::Open(dup(page->fd()), 1, 6 * kPage);
  ASSERT_NE(Allocate(kPage), 0u);  // before the limit counts
  arena_->SetBudget(*MemoryBudget::Open(dup(page->fd()), 0, 6 * kPage));
  ASSERT_TRUE(other->Take(2 * kPage));
  const uint64_t a = Allocate(2 * kPage);
  EXPECT_NE(a, 0u);
  EXPECT_TRUE(arena_->Charge(kPage));
  EXPECT_EQ(Allocate(kPage), 0u);
  EXPECT_EQ(last_, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_FALSE(arena_->Charge(1));
  size_t free = 100 * kPage, total = 100 * kPage;
  arena_->Adjust(0, &free, &total);
  EXPECT_EQ(free, 0u);
  EXPECT_EQ(total, 6 * kPage);
  // What stays mapped though it is free goes back before an allocation fails.
  arena_->Free(a);
  EXPECT_NE(Allocate(kPage), 0u);
  other->Give(2 * kPage);
  arena_->Discharge(kPage);
  EXPECT_NE(Allocate(3 * kPage), 0u);
  // What the driver refuses was not taken.
  EXPECT_EQ(other->Left(), kPage);
}

TEST_F(DeviceArenaTest, DevicesDoNotSharePages) {
  Make();
  const uint64_t a = Allocate(512), b = Allocate(512, 0, 1);
  EXPECT_NE(a / kPage, b / kPage);
  EXPECT_EQ(g.access[a], std::set<int>{0});
  EXPECT_EQ(g.access[b], std::set<int>{1});
  EXPECT_EQ(Allocate(512, b + 512, 0), 0u);  // another device's page
}

TEST_F(DeviceArenaTest, LargeOnesHavePagesOfTheirOwnAndComeBackWithoutTheDriver) {
  Make();
  const uint64_t a = Allocate(3 << 20);
  EXPECT_EQ(a % kPage, 0u);
  EXPECT_EQ(g.mapped[a], 2 * kPage);
  arena_->Free(a);
  EXPECT_EQ(g.creates, 1);
  EXPECT_EQ(Allocate(4 << 20), a);
  EXPECT_EQ(g.creates, 1);
  arena_->Free(a);
  EXPECT_NE(Allocate(5 << 20), 0u);
  EXPECT_EQ(g.creates, 2);
  arena_->Trim();
  EXPECT_EQ(g.mapped.size(), 1u);
  EXPECT_TRUE(g.handles.empty());
}

TEST_F(DeviceArenaTest, ExactAddressesForReplay) {
  Make();
  const uint64_t at = kArenaBase + 7 * kPage;
  EXPECT_EQ(Allocate(600, at + 4096), at + 4096);
  EXPECT_EQ(Allocate(600, at + 4096), 0u);
  EXPECT_EQ(last_, CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Allocate(512, at + 5120), at + 5120);
  EXPECT_EQ(Allocate(kPage, at), 0u);
  EXPECT_EQ(Allocate(3 * kPage, at + kPage), at + kPage);
  EXPECT_EQ(Allocate(kPage, at + kPage + 512), 0u);
  EXPECT_EQ(Allocate(512, 0x1234), 0u);
  EXPECT_EQ(Allocate(512, kArenaBase + kArenaBytes), 0u);
  EXPECT_EQ(Allocate(kPage, kArenaBase + kArenaBytes - kPage / 2), 0u);
}

TEST_F(DeviceArenaTest, ExactAddressesPushCachedMemoryOut) {
  Make();
  const uint64_t a = Allocate(4 * kPage);
  arena_->Free(a);
  EXPECT_EQ(Allocate(kPage, a + kPage), a + kPage);
  EXPECT_EQ(Allocate(512, a), a);
  arena_->Free(a);
  EXPECT_EQ(Allocate(kPage, a), a);  // the empty small page made room
}

TEST_F(DeviceArenaTest, SameOrderSameAddresses) {
  std::vector<uint64_t> first, second;
  for (auto* out : {&first, &second}) {
    Make();
    for (const uint64_t bytes : {100u, 5000000u, 4096u, 900000u, 900000u, 900000u, 2097152u}) {
      out->push_back(Allocate(bytes));
    }
    arena_->Free((*out)[1]);
    out->push_back(Allocate(200000));
  }
  EXPECT_EQ(first, second);
}

TEST_F(DeviceArenaTest, OutOfMemoryAfterTheCacheIsGone) {
  Make();
  g.capacity = 16 * kPage;
  const uint64_t a = Allocate(8 * kPage);
  arena_->Free(a);
  EXPECT_NE(Allocate(12 * kPage), 0u);  // the cached pages gave way
  EXPECT_EQ(Allocate(8 * kPage), 0u);
  EXPECT_EQ(last_, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_NE(Allocate(4 * kPage), 0u);
  EXPECT_EQ(Allocate(1), 0u);
  EXPECT_EQ(Allocate(~uint64_t(0)), 0u);
  EXPECT_EQ(last_, CUDA_ERROR_OUT_OF_MEMORY);
}

// An absurd request may be refused in other ways than for want of memory; what comes after it is as before.
TEST_F(DeviceArenaTest, ARefusedPieceLeavesTheOthersShareable) {
  Make();
  g.largest = 8 * kPage;
  EXPECT_EQ(Allocate(9 * kPage), 0u);
  EXPECT_EQ(last_, CUDA_ERROR_INVALID_VALUE);
  EXPECT_NE(Allocate(kPage), 0u);
  EXPECT_TRUE(g.shareable);
}

TEST_F(DeviceArenaTest, TheLimitHoldsForEverything) {
  Make(8 * kPage);
  EXPECT_NE(Allocate(4 * kPage), 0u);
  EXPECT_TRUE(arena_->Charge(3 * kPage));
  EXPECT_EQ(Allocate(2 * kPage), 0u);
  EXPECT_EQ(last_, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_FALSE(arena_->Charge(2 * kPage));
  arena_->Discharge(3 * kPage);
  EXPECT_NE(Allocate(2 * kPage), 0u);
  size_t free = 100 * kPage, total = 200 * kPage;
  arena_->Adjust(0, &free, &total);
  EXPECT_EQ(total, 8 * kPage);
  EXPECT_EQ(free, 2 * kPage);
}

TEST_F(DeviceArenaTest, CachedMemoryCountsAsFree) {
  Make();
  arena_->Free(Allocate(4 * kPage));
  size_t free = 10 * kPage, total = 20 * kPage;
  arena_->Adjust(0, &free, &total);
  EXPECT_EQ(free, 14 * kPage);
  size_t other = 10 * kPage;
  arena_->Adjust(1, &other, &total);
  EXPECT_EQ(other, 10 * kPage);
}

// Address, bytes, device.
using Blocks = std::vector<std::tuple<uint64_t, uint64_t, int>>;
Blocks Seen(const std::vector<DeviceArena::Block>& blocks) {
  Blocks seen;
  for (const DeviceArena::Block& block : blocks) seen.emplace_back(block.address, block.bytes, block.device);
  return seen;
}

TEST_F(DeviceArenaTest, LiveBlocksHaveLiveAllocations) {
  Make();
  const uint64_t a = Allocate(600), b = Allocate(600), c = Allocate(3 * kPage), d = Allocate(kPage, 0, 1);
  const uint64_t e = Allocate(2 * kPage);
  arena_->Free(e);  // stays mapped
  arena_->Free(a);
  const Blocks all = {{b / kPage * kPage, kPage, 0}, {c, 3 * kPage, 0}, {d, kPage, 1}};
  EXPECT_EQ(Seen(arena_->LiveBlocks(0, 100)), all);
  EXPECT_EQ(Seen(arena_->LiveBlocks(0, 2)), Blocks(all.begin(), all.begin() + 2));
  EXPECT_EQ(Seen(arena_->LiveBlocks(c, 100)), Blocks(all.begin() + 1, all.end()));
  arena_->Free(b);
  EXPECT_EQ(Seen(arena_->LiveBlocks(0, 100)), Blocks(all.begin() + 1, all.end()));
}

TEST_F(DeviceArenaTest, AdoptedMemoryIsGivenOutAtItsAddresses) {
  Make();
  const uint64_t small = kArenaBase + 4 * kPage, large = kArenaBase + 8 * kPage, unused = kArenaBase + 16 * kPage;
  ASSERT_EQ(arena_->EnablePeer(0, 1), CUDA_SUCCESS);
  ASSERT_EQ(arena_->Adopt({small, kPage, 0}, 1, false), CUDA_SUCCESS);
  ASSERT_EQ(arena_->Adopt({large, 3 * kPage, 0}, 3, false), CUDA_SUCCESS);
  ASSERT_EQ(arena_->Adopt({unused, 2 * kPage, 1}, 2, false), CUDA_SUCCESS);
  EXPECT_TRUE(g.handles.empty());
  EXPECT_EQ(g.access[large], (std::set<int>{0, 1}));
  // Nobody gets it by chance, nor another piece or for another GPU.
  EXPECT_EQ(Allocate(kPage), small + kPage);
  EXPECT_EQ(Allocate(600), small + 2 * kPage);
  EXPECT_EQ(Allocate(2 * kPage, large), 0u);
  EXPECT_EQ(Allocate(3 * kPage, large, 1), 0u);
  EXPECT_EQ(Allocate(600, large), 0u);
  EXPECT_EQ(arena_->Adopt({large, 3 * kPage, 0}, 3, false), CUDA_ERROR_INVALID_VALUE);
  const int creates = g.creates;
  EXPECT_EQ(Allocate(3 * kPage - 5, large), large);
  EXPECT_EQ(Allocate(600, small + 512), small + 512);
  EXPECT_EQ(Allocate(512, small), small);
  EXPECT_EQ(g.creates, creates);
  EXPECT_EQ(g.mapped.count(unused), 1u);
  arena_->DropUnclaimed();
  EXPECT_EQ(g.mapped.count(unused), 0u);
  EXPECT_EQ(Seen(arena_->ClaimedBlocks(0, 1)), (Blocks{{small, kPage, 0}}));
  EXPECT_EQ(Seen(arena_->ClaimedBlocks(small + kPage, 9)), (Blocks{{large, 3 * kPage, 0}}));
  // It ends as other memory does.
  arena_->Free(large);
  arena_->Trim();
  EXPECT_EQ(g.mapped.count(large), 0u);
  EXPECT_EQ(Allocate(3 * kPage, large), large);
  EXPECT_EQ(g.creates, creates + 1);
  EXPECT_EQ(Seen(arena_->ClaimedBlocks(0, 9)), (Blocks{{small, kPage, 0}}));
}

TEST_F(DeviceArenaTest, AdoptedMemoryCounts) {
  Make(4 * kPage);
  const uint64_t at = kArenaBase + 8 * kPage;
  EXPECT_EQ(arena_->Adopt({at, 5 * kPage, 0}, 5, false), CUDA_ERROR_OUT_OF_MEMORY);
  ASSERT_EQ(arena_->Adopt({at, 3 * kPage, 0}, 3, false), CUDA_SUCCESS);
  EXPECT_EQ(Allocate(2 * kPage), 0u);
  EXPECT_NE(Allocate(kPage), 0u);
  arena_->DropUnclaimed();
  EXPECT_NE(Allocate(3 * kPage), 0u);
  EXPECT_EQ(g.physical, 4 * kPage);
}

// Until the old session has ended, its owner's budget has the memory twice.
TEST_F(DeviceArenaTest, TheSameMemoryCountsOnceInABudget) {
  const std::unique_ptr<MemoryBudget> page = *MemoryBudget::Create();
  const std::unique_ptr<MemoryBudget> old = *MemoryBudget::Open(dup(page->fd()), 1, 8 * kPage);
  ASSERT_TRUE(old->Take(6 * kPage));
  for (const bool twice : {false, true}) {
    Make();
    arena_->SetBudget(*MemoryBudget::Open(dup(page->fd()), 0, 8 * kPage));
    const uint64_t at = kArenaBase + 8 * kPage;
    ASSERT_EQ(arena_->Adopt({at, 5 * kPage, 0}, 5, twice), twice ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
    if (!twice) continue;
    ASSERT_EQ(Allocate(5 * kPage, at), at);
    // The replay goes on within the limit.
    EXPECT_EQ(Allocate(2 * kPage, kArenaBase), kArenaBase);
    EXPECT_EQ(Allocate(kPage, kArenaBase + 4 * kPage), 0u);
    // The job's own calls come when the old session is gone.
    EXPECT_EQ(Allocate(kPage), 0u);
    old->Give(6 * kPage);
    EXPECT_NE(Allocate(kPage), 0u);
    EXPECT_EQ(old->Left(), 0u);
  }
}

TEST_F(DeviceArenaTest, StagedMemoryIsGivenOutAtItsAddresses) {
  Make();
  const uint64_t small = kArenaBase + 4 * kPage, large = kArenaBase + 8 * kPage, unused = kArenaBase + 16 * kPage;
  ASSERT_EQ(arena_->EnablePeer(0, 1), CUDA_SUCCESS);
  ASSERT_EQ(arena_->Stage({small, kPage, 0}), CUDA_SUCCESS);
  ASSERT_EQ(arena_->Stage({large, 3 * kPage, 0}), CUDA_SUCCESS);
  ASSERT_EQ(arena_->Stage({unused, 2 * kPage, 1}), CUDA_SUCCESS);
  EXPECT_EQ(g.access[large], (std::set<int>{0, 1}));
  int creates = g.creates;
  ASSERT_EQ(arena_->Stage({large, 3 * kPage, 0}), CUDA_SUCCESS);  // it is there
  EXPECT_EQ(g.creates, creates);
  int device = -1;
  EXPECT_TRUE(arena_->IsStaged(unused + kPage, kPage, &device));
  EXPECT_EQ(device, 1);
  EXPECT_TRUE(arena_->IsStaged(large, 3 * kPage, &device));
  EXPECT_EQ(device, 0);
  EXPECT_FALSE(arena_->IsStaged(large + kPage, 3 * kPage, &device));
  EXPECT_FALSE(arena_->IsStaged(large - 1, 1, &device));
  EXPECT_FALSE(arena_->IsStaged(large, ~uint64_t(0), &device));
  EXPECT_FALSE(arena_->IsStaged(unused + 2 * kPage, 1, &device));
  // Nobody gets it by chance.
  EXPECT_EQ(Allocate(kPage), small + kPage);
  creates = g.creates;
  EXPECT_EQ(Allocate(3 * kPage - 5, large), large);
  EXPECT_EQ(Allocate(600, small + 512), small + 512);
  EXPECT_EQ(Allocate(512, small), small);
  EXPECT_EQ(g.creates, creates);
  // From then on it is memory like other memory.
  EXPECT_FALSE(arena_->IsStaged(large, kPage, &device));
  EXPECT_FALSE(arena_->IsStaged(small, 512, &device));
  EXPECT_EQ(arena_->Stage({large, 3 * kPage, 0}), CUDA_ERROR_INVALID_VALUE);
  arena_->Unstage(large);
  arena_->DropUnclaimed();
  EXPECT_EQ(g.mapped.count(unused), 0u);
  EXPECT_EQ(g.mapped.count(large), 1u);
  EXPECT_TRUE(arena_->ClaimedBlocks(0, 9).empty());
  arena_->Free(large);
  arena_->Trim();
  EXPECT_EQ(g.mapped.count(large), 0u);
}

// The job has freed and allocated since, or the replay places something else.
TEST_F(DeviceArenaTest, StagedMemoryGivesWay) {
  Make();
  const uint64_t at = kArenaBase + 8 * kPage;
  int device;
  ASSERT_EQ(arena_->Stage({at, 3 * kPage, 0}), CUDA_SUCCESS);
  ASSERT_EQ(arena_->Stage({at + 4 * kPage, kPage, 0}), CUDA_SUCCESS);
  EXPECT_EQ(Allocate(2 * kPage, at + 2 * kPage), at + 2 * kPage);  // across its end
  EXPECT_FALSE(arena_->IsStaged(at, kPage, &device));
  EXPECT_TRUE(arena_->IsStaged(at + 4 * kPage, kPage, &device));
  EXPECT_EQ(Allocate(600, at + 4 * kPage, 1), at + 4 * kPage);  // on another GPU
  ASSERT_EQ(arena_->Stage({at, 2 * kPage, 0}), CUDA_SUCCESS);
  ASSERT_EQ(arena_->Stage({at + kPage, kPage, 1}), CUDA_SUCCESS);  // other blocks are there now
  EXPECT_FALSE(arena_->IsStaged(at, kPage, &device));
  arena_->Unstage(at + kPage);
  EXPECT_EQ(g.mapped.count(at + kPage), 0u);
  EXPECT_EQ(Allocate(2 * kPage, at), at);
  for (const DeviceArena::Block& nonsense : {DeviceArena::Block{at + 512, kPage, 0},
                                             {at, 0, 0},
                                             {at, kPage + 1, 0},
                                             {1, kPage, 0},
                                             {kArenaBase, kArenaBytes + kPage, 0},
                                             {at, kPage, 7}}) {
    EXPECT_EQ(arena_->Stage(nonsense), CUDA_ERROR_INVALID_VALUE);
  }
}

TEST_F(DeviceArenaTest, StagedMemoryTakesNothingFromAllocations) {
  const uint64_t at = kArenaBase + 64 * kPage;
  int device;
  // The session's limit.
  Make(4 * kPage);
  EXPECT_EQ(arena_->Stage({at, 5 * kPage, 0}), CUDA_ERROR_OUT_OF_MEMORY);
  ASSERT_EQ(arena_->Stage({at, 3 * kPage, 0}), CUDA_SUCCESS);
  EXPECT_NE(Allocate(2 * kPage, kArenaBase), 0u);
  EXPECT_FALSE(arena_->IsStaged(at, kPage, &device));
  ASSERT_EQ(arena_->Stage({at, 2 * kPage, 0}), CUDA_SUCCESS);
  EXPECT_TRUE(arena_->Charge(2 * kPage));
  EXPECT_EQ(g.physical, 2 * kPage);
  // The GPU's memory.
  Make();
  g.capacity = 6 * kPage;
  EXPECT_EQ(arena_->Stage({at, 7 * kPage, 0}), CUDA_ERROR_OUT_OF_MEMORY);
  for (uint64_t i = 0; i < 3; ++i) ASSERT_EQ(arena_->Stage({at + 2 * i * kPage, 2 * kPage, 0}), CUDA_SUCCESS);
  EXPECT_NE(Allocate(3 * kPage), 0u);
  EXPECT_TRUE(arena_->IsStaged(at, 2 * kPage, &device));
  EXPECT_FALSE(arena_->IsStaged(at + 2 * kPage, kPage, &device));
  // The budget of all of the owner's sessions, of which it leaves a part.
  const std::unique_ptr<MemoryBudget> page = *MemoryBudget::Create();
  Make();
  arena_->SetBudget(*MemoryBudget::Open(dup(page->fd()), 0, 16 * kPage));
  const std::unique_ptr<MemoryBudget> other = *MemoryBudget::Open(dup(page->fd()), 1, 16 * kPage);
  EXPECT_EQ(arena_->Stage({at, 15 * kPage, 0}), CUDA_ERROR_OUT_OF_MEMORY);
  ASSERT_EQ(arena_->Stage({at, 14 * kPage, 0}), CUDA_SUCCESS);
  EXPECT_TRUE(other->Take(2 * kPage));
  EXPECT_EQ(Allocate(14 * kPage, at), at);
  EXPECT_EQ(other->Left(), 0u);
  arena_->Free(at);
  arena_->Trim();
  EXPECT_EQ(other->Left(), 14 * kPage);
}

TEST_F(DeviceArenaTest, PeersReachOldAndNewMemory) {
  Make();
  const uint64_t before = Allocate(kPage);
  ASSERT_EQ(arena_->EnablePeer(0, 1), CUDA_SUCCESS);
  const uint64_t after = Allocate(kPage);
  EXPECT_EQ(g.access[before], (std::set<int>{0, 1}));
  EXPECT_EQ(g.access[after], (std::set<int>{0, 1}));
}

TEST_F(DeviceArenaTest, FreeOfNonsenseIsIgnored) {
  Make();
  const uint64_t a = Allocate(512);
  arena_->Free(a + 512);
  arena_->Free(0);
  arena_->Free(a);
  arena_->Free(a);
  EXPECT_EQ(arena_->used_bytes(), 0u);
}

TEST_F(DeviceArenaTest, EmptyPagesGoExceptOne) {
  Make();
  std::vector<uint64_t> all;
  for (int i = 0; i < 12; ++i) all.push_back(Allocate(512 << 10));
  EXPECT_EQ(g.mapped.size(), 3u);
  for (const uint64_t address : all) arena_->Free(address);
  EXPECT_LE(g.mapped.size(), 2u);
  EXPECT_GE(g.mapped.size(), 1u);
}

}  // namespace
}  // namespace cuda_remote::server
