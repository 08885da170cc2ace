// SPDX-License-Identifier: Apache-2.0
// A move between two workers of one machine: memory that one offers and the other one copies or takes over, and clients
// that want what is not offered to them.

#include <cuda.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "server/worker/memory/device_arena.h"
#include "server/worker/session/ipc.h"
#include "server/worker/testing/client.h"
#include "server/worker/testing/worker_process.h"

namespace cuda_remote::server {
namespace {

constexpr char kDriver[] = "softgpu/libsoftgpu.so";
constexpr size_t kBytes = 3 << 20;
constexpr uint64_t kPage = 2 << 20;

std::string Pattern(size_t bytes, unsigned seed) {
  std::string out(bytes, 0);
  for (size_t i = 0; i < bytes; ++i) out[i] = char((i + seed) * (i + 7) >> 5);
  return out;
}

struct Side {
  explicit Side(uint64_t session, const std::string& group = "", const std::vector<std::string>& options = {})
      : worker([&] {
          std::vector<std::string> command = {WorkerPath(), "--driver", kDriver, "--log-level", "off"};
          command.insert(command.end(), options.begin(), options.end());
          return command;
        }()),
        client(worker.Connect(nullptr, group, session)) {
    context = client.OpenContext();
  }

  uint64_t Have(const std::string& bytes) {
    const uint64_t address = client.Allocate(bytes.size());
    EXPECT_EQ(client.Write(address, bytes), CUDA_SUCCESS);
    EXPECT_EQ(client.Synchronize(), CUDA_SUCCESS);
    return address;
  }
  std::string Offer(uint64_t address) {
    wire::OpOfferMemory_Request in;
    in.address = address;
    last = client.Call(kOpOfferMemory, in);
    if (last != CUDA_SUCCESS) return std::string();
    const auto offer = client.Decode<wire::OpOfferMemory_Reply>();
    offered = offer.bytes;
    return std::string(offer.key);
  }
  CUresult Fetch(const std::string& key, uint64_t address, uint64_t bytes) {
    wire::OpFetchMemory_Request in;
    in.key = key;
    in.address = address;
    in.bytes = bytes;
    in.context = context;
    return client.Call(kOpFetchMemory, in);
  }
  struct OfferedBlock {
    uint64_t address, bytes;
    int device;
    std::string key;
  };
  std::vector<OfferedBlock> OfferBlocks() {
    std::vector<OfferedBlock> blocks;
    wire::OpOfferBlocks_Request in;
    do {
      EXPECT_EQ(client.Call(kOpOfferBlocks, in), CUDA_SUCCESS);
      const auto reply = client.Decode<wire::OpOfferBlocks_Reply>();
      for (const wire::Block& block : reply.blocks) {
        blocks.push_back({block.address, block.bytes, block.device, std::string(block.key)});
      }
      in.after = reply.next;
    } while (in.after != 0);
    return blocks;
  }
  // How many of them it has now.
  // In how many messages.
  int MakeReady() {
    wire::OpExportBlocks_Request in;
    int messages = 0;
    do {
      EXPECT_EQ(client.Call(kOpExportBlocks, in), CUDA_SUCCESS);
      in.after = client.Decode<wire::OpExportBlocks_Reply>().next;
      ++messages;
    } while (in.after != 0);
    return messages;
  }
  uint64_t FreeMemory() {
    EXPECT_EQ(client.Call(kCall_cuMemGetInfo_v2, wire::cuMemGetInfo_v2_Request{}), CUDA_SUCCESS);
    return client.Decode<wire::cuMemGetInfo_v2_Reply>().free;
  }
  size_t Adopt(const std::vector<OfferedBlock>& blocks) {
    size_t adopted = 0;
    for (size_t i = 0; i < blocks.size(); i += 64) {
      wire::OpAdoptBlocks_Request in;
      for (size_t j = i; j < blocks.size() && j < i + 64; ++j) {
        wire::Block block;
        block.address = blocks[j].address;
        block.bytes = blocks[j].bytes;
        block.device = blocks[j].device;
        block.key = blocks[j].key;
        in.blocks.push_back(block);
      }
      EXPECT_EQ(client.Call(kOpAdoptBlocks, in), CUDA_SUCCESS);
      adopted += client.Decode<wire::OpAdoptBlocks_Reply>().adopted.size();
    }
    return adopted;
  }
  std::set<uint64_t> Keep() {
    std::set<uint64_t> kept;
    wire::OpKeepBlocks_Request in;
    do {
      EXPECT_EQ(client.Call(kOpKeepBlocks, in), CUDA_SUCCESS);
      const auto reply = client.Decode<wire::OpKeepBlocks_Reply>();
      for (const wire::Block& block : reply.blocks) kept.insert(block.address);
      in.after = reply.next;
    } while (in.after != 0);
    return kept;
  }
  // Memory of the application's own making. `handle_types`: as which others may get it.
  uint64_t Map(uint64_t bytes, CUmemAllocationHandleType handle_types) {
    wire::cuMemCreate_Request create;
    create.handle = client.NewHandle(Kind::kPhysicalMemory);
    create.size = bytes;
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.requestedHandleTypes = handle_types;
    create.prop = {reinterpret_cast<const char*>(&prop), sizeof(prop)};
    EXPECT_EQ(client.Call(kCall_cuMemCreate, create), CUDA_SUCCESS);
    wire::cuMemAddressReserve_Request reserve;
    reserve.size = bytes;
    EXPECT_EQ(client.Call(kCall_cuMemAddressReserve, reserve), CUDA_SUCCESS);
    wire::cuMemMap_Request map;
    map.ptr = client.Decode<wire::cuMemAddressReserve_Reply>().address;
    map.size = bytes;
    map.handle = create.handle;
    EXPECT_EQ(client.Call(kCall_cuMemMap, map), CUDA_SUCCESS);
    return map.ptr;
  }
  void GiveAccess(uint64_t address, uint64_t bytes) {
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    wire::cuMemSetAccess_Request set;
    set.ptr = address;
    set.size = bytes;
    set.desc = {reinterpret_cast<const char*>(&access), sizeof(access)};
    set.count = 1;
    EXPECT_EQ(client.Call(kCall_cuMemSetAccess, set), CUDA_SUCCESS);
  }

  WorkerProcess worker;
  TestClient client;
  uint64_t context = 0, offered = 0;
  CUresult last = CUDA_SUCCESS;
};

TEST(Offers, ALargeAllocationIsCopied) {
  Side old(1), now(2);
  const std::string bytes = Pattern(kBytes, 1);
  const uint64_t from = old.Have(bytes), to = now.client.Allocate(kBytes);
  const std::string key = old.Offer(from);
  ASSERT_EQ(key.size(), kIpcKeyBytes);
  EXPECT_EQ(old.offered, kBytes);
  ASSERT_EQ(now.Fetch(key, to, kBytes), CUDA_SUCCESS);
  EXPECT_TRUE(now.client.Read(to, kBytes) == bytes);
  // They share nothing now.
  EXPECT_EQ(old.client.Write(from, "zzzz"), CUDA_SUCCESS);
  EXPECT_EQ(old.client.Synchronize(), CUDA_SUCCESS);
  EXPECT_TRUE(now.client.Read(to, kBytes) == bytes);
}

// Small ones share a page, and only what is offered is copied.
TEST(Offers, NeighboursStay) {
  Side old(1), now(2);
  const std::string bytes = Pattern(5000, 2);
  const uint64_t first = old.Have(std::string(5000, 'a')), second = old.Have(bytes);
  ASSERT_EQ(first / kPage, second / kPage);
  const uint64_t before = now.Have(std::string(5000, 'b')), to = now.client.Allocate(5000);
  const uint64_t behind = now.Have(std::string(5000, 'c'));
  ASSERT_EQ(now.Fetch(old.Offer(second), to, 5000), CUDA_SUCCESS);
  EXPECT_TRUE(now.client.Read(to, 5000) == bytes);
  EXPECT_TRUE(now.client.Read(before, 5000) == std::string(5000, 'b'));
  EXPECT_TRUE(now.client.Read(behind, 5000) == std::string(5000, 'c'));
}

// Many at the same time, whose mappings come and go in any order: all addresses for them are free again.
TEST(Offers, ManyAtATime) {
  Side old(1), now(2);
  struct One {
    uint64_t from, to;
    std::string bytes;
  };
  std::vector<One> all;
  for (unsigned i = 0; i < 70; ++i) {
    const std::string bytes = Pattern(kBytes / 2, i);
    all.push_back({old.Have(bytes), now.client.Allocate(kBytes / 2), bytes});
  }
  const uint64_t reserved = now.Map(kPage, CU_MEM_HANDLE_TYPE_NONE);
  std::vector<uint64_t> open;
  std::vector<std::string> keys;
  for (const One& one : all) keys.push_back(old.Offer(one.from));
  for (size_t i = 0; i < all.size(); ++i) {
    wire::OpFetchMemory_Request in;
    in.key = keys[i];
    in.address = all[i].to;
    in.bytes = kBytes / 2;
    in.context = now.context;
    std::string message;
    in.Encode(&message);
    FrameHeader header;
    header.call = kOpFetchMemory;
    header.context_or_result = now.client.context_slot;
    open.push_back(now.client.channel().Begin(header, message, {}, nullptr, 0));
  }
  for (const uint64_t sequence : open) {
    Reply reply;
    ASSERT_EQ(now.client.channel().Wait(sequence, &reply), ChannelStatus::kOk);
    EXPECT_EQ(reply.result, 0u);
  }
  for (const One& one : all) EXPECT_TRUE(now.client.Read(one.to, kBytes / 2) == one.bytes);
  // The application's next reservation is where it would have been without all that.
  Side plain(3);
  EXPECT_EQ(plain.Map(kPage, CU_MEM_HANDLE_TYPE_NONE), reserved);
  const uint64_t next = plain.Map(kPage, CU_MEM_HANDLE_TYPE_NONE);
  EXPECT_EQ(now.Map(kPage, CU_MEM_HANDLE_TYPE_NONE), next);
}

TEST(Offers, AnOfferIsTakenOnce) {
  Side old(1), now(2);
  const uint64_t from = old.Have(Pattern(kBytes, 1)), to = now.client.Allocate(kBytes);
  const std::string key = old.Offer(from);
  ASSERT_EQ(now.Fetch(key, to, kBytes), CUDA_SUCCESS);
  EXPECT_EQ(now.Fetch(key, to, kBytes), CUDA_ERROR_INVALID_HANDLE);
  // A second offer ends the first one, and so does the end of the memory.
  const std::string second = old.Offer(from), third = old.Offer(from);
  EXPECT_NE(second, third);
  EXPECT_EQ(now.Fetch(second, to, kBytes), CUDA_ERROR_INVALID_HANDLE);
  ASSERT_EQ(old.client.Free(from), CUDA_SUCCESS);
  EXPECT_EQ(now.Fetch(third, to, kBytes), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(now.client.status, ChannelStatus::kOk);
}

TEST(Offers, OnlyTheSameOwnerGetsThem) {
  Side old(1, std::string(16, 'a')), same(2, std::string(16, 'a')), other(3, std::string(16, 'b')), none(4);
  const std::string bytes = Pattern(kBytes, 1);
  const uint64_t from = old.Have(bytes), to = same.client.Allocate(kBytes);
  const std::string key = old.Offer(from);
  EXPECT_EQ(other.Fetch(key, other.client.Allocate(kBytes), kBytes), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(none.Fetch(key, none.client.Allocate(kBytes), kBytes), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(old.Fetch(key, from, kBytes), CUDA_ERROR_INVALID_CONTEXT);
  // Magic, kind, home, secret.
  for (const size_t at : {0, 8, 16, 31, 32, 47}) {
    std::string wrong = key;
    wrong[at] ^= 1;
    EXPECT_NE(same.Fetch(wrong, to, kBytes), CUDA_SUCCESS) << at;
  }
  EXPECT_EQ(same.Fetch("", to, kBytes), CUDA_ERROR_INVALID_HANDLE);
  ASSERT_EQ(same.Fetch(key, to, kBytes), CUDA_SUCCESS);
  EXPECT_TRUE(same.client.Read(to, kBytes) == bytes);
}

// An offer is no key of an application's, and a key of an application's is no offer.
TEST(Offers, KeysAreNotMixed) {
  Side old(1), now(2);
  const uint64_t from = old.Have(Pattern(kBytes, 1)), to = now.client.Allocate(kBytes);
  wire::cuIpcOpenMemHandle_v2_Request open;
  open.key = old.Offer(from);
  open.flags = CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
  EXPECT_NE(now.client.Call(kCall_cuIpcOpenMemHandle_v2, open), CUDA_SUCCESS);
  wire::cuIpcGetMemHandle_Request share;
  share.address = from;
  ASSERT_EQ(old.client.Call(kCall_cuIpcGetMemHandle, share), CUDA_SUCCESS);
  const std::string key(old.client.Decode<wire::cuIpcGetMemHandle_Reply>().key);
  EXPECT_EQ(now.Fetch(key, to, kBytes), CUDA_ERROR_INVALID_HANDLE);
  // What was offered hinders no checkpoint, and no replay: nothing counts as shared.
  Side fresh(3);
  ASSERT_EQ(fresh.Fetch(old.Offer(from), fresh.client.Allocate(kBytes), kBytes), CUDA_SUCCESS);
  wire::OpShareIn_Request scope;
  const std::string name(kIpcScopeBytes, 's');
  scope.scope = name;
  EXPECT_EQ(fresh.client.Call(kOpShareIn, scope), CUDA_SUCCESS);
}

TEST(Offers, OnlyWhatTheSessionHas) {
  Side old(1), now(2);
  const uint64_t from = old.Have(Pattern(kBytes, 1)), to = now.client.Allocate(kBytes);
  for (const uint64_t address : {uint64_t(0), from + 512, from + kPage, uint64_t(1) << 60}) {
    EXPECT_EQ(old.Offer(address), "");
    EXPECT_EQ(old.last, CUDA_ERROR_INVALID_VALUE);
  }
  // Neither more nor less than is offered, and only where there is room.
  EXPECT_EQ(now.Fetch(old.Offer(from), to, kBytes - 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(now.Fetch(old.Offer(from), to, 2 * kBytes), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(now.Fetch(old.Offer(from), to + 4096, kBytes), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(now.Fetch(old.Offer(from), 0, kBytes), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(now.Fetch(old.Offer(from), to, kBytes), CUDA_SUCCESS);
  EXPECT_EQ(now.client.status, ChannelStatus::kOk);
  EXPECT_EQ(old.client.status, ChannelStatus::kOk);
}

TEST(Offers, WhatTheApplicationHasMapped) {
  Side old(1), now(2);
  const std::string bytes = Pattern(kPage, 1);
  const uint64_t from = old.Map(kPage, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  old.GiveAccess(from, kPage);
  ASSERT_EQ(old.client.Write(from, bytes), CUDA_SUCCESS);
  ASSERT_EQ(old.client.Synchronize(), CUDA_SUCCESS);
  // Without access: the copy gets there all the same.
  const uint64_t to = now.Map(kPage, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  ASSERT_EQ(now.Fetch(old.Offer(from), to, kPage), CUDA_SUCCESS);
  EXPECT_TRUE(now.client.Read(to, kPage) == bytes);
  // The driver does not give away what was not meant to be given away.
  EXPECT_EQ(old.Offer(old.Map(kPage, CU_MEM_HANDLE_TYPE_NONE)), "");
  EXPECT_NE(old.last, CUDA_SUCCESS);
  const std::string key = old.Offer(from);
  wire::cuMemUnmap_Request unmap;
  unmap.ptr = from;
  unmap.size = kPage;
  ASSERT_EQ(old.client.Call(kCall_cuMemUnmap, unmap), CUDA_SUCCESS);
  EXPECT_EQ(now.Fetch(key, to, kPage), CUDA_ERROR_INVALID_HANDLE);
}

// From GPU to GPU: the new session does not see the old one's.
TEST(Offers, ToAnotherGpu) {
  setenv("SOFTGPU_DEVICES", "2", 1);
  Side old(1, "", {"--gpu", "0"}), now(2, "", {"--gpu", "1"});
  unsetenv("SOFTGPU_DEVICES");
  const std::string bytes = Pattern(kBytes, 1);
  const uint64_t from = old.Have(bytes), to = now.client.Allocate(kBytes);
  ASSERT_EQ(now.Fetch(old.Offer(from), to, kBytes), CUDA_SUCCESS);
  EXPECT_TRUE(now.client.Read(to, kBytes) == bytes);
}

// Whatever the driver refuses is refused, nothing else happens, and the next one may work.
TEST(Offers, WhatTheDriverRefuses) {
  Side old(1);
  const uint64_t from = old.Have(Pattern(kBytes, 1));
  for (const char* const call : {"cuMemImportFromShareableHandle", "cuMemcpyDtoDAsync_v2", "cuEventRecord"}) {
    setenv("SOFTGPU_FAIL", (std::string(call) + ":1:801").c_str(), 1);
    Side now(2);
    unsetenv("SOFTGPU_FAIL");
    const uint64_t to = now.client.Allocate(kBytes);
    EXPECT_EQ(now.Fetch(old.Offer(from), to, kBytes), CUDA_ERROR_NOT_SUPPORTED) << call;
    ASSERT_EQ(now.Fetch(old.Offer(from), to, kBytes), CUDA_SUCCESS) << call;
    EXPECT_TRUE(now.client.Read(to, kBytes) == Pattern(kBytes, 1)) << call;
  }
  setenv("SOFTGPU_FAIL", "cuMemExportToShareableHandle:1:801", 1);
  Side refuses(3);
  unsetenv("SOFTGPU_FAIL");
  EXPECT_EQ(refuses.Offer(refuses.Have("x")), "");
  EXPECT_EQ(refuses.last, CUDA_ERROR_NOT_SUPPORTED);
}

// The memory itself goes over: it is the same in both until one ends, stays when the old one has ended, and can be
// used, shared, freed and handed on as memory of the new one's own.
TEST(Blocks, AreHandedOver) {
  auto old = std::make_unique<Side>(1);
  auto now = std::make_unique<Side>(2);
  const std::string large = Pattern(kBytes, 1), small = Pattern(5000, 2);
  const uint64_t a = old->Have(large), b = old->Have(small), c = old->Have(small), d = old->Have(large);
  // Neither what is free nor what is kept for later is offered.
  ASSERT_EQ(old->client.Free(d), CUDA_SUCCESS);
  const auto blocks = old->OfferBlocks();
  ASSERT_EQ(blocks.size(), 2u);
  ASSERT_EQ(now->Adopt(blocks), 2u);
  ASSERT_EQ(now->client.Allocate(5000, c), c);
  ASSERT_EQ(now->client.Allocate(kBytes, a), a);
  ASSERT_EQ(now->client.Allocate(5000, b), b);
  EXPECT_EQ(now->Keep(), (std::set<uint64_t>{a, b / kPage * kPage}));
  EXPECT_TRUE(now->client.Read(a, kBytes) == large);
  EXPECT_EQ(old->client.Write(c, std::string(5000, 'x')), CUDA_SUCCESS);
  EXPECT_EQ(old->client.Synchronize(), CUDA_SUCCESS);
  EXPECT_TRUE(now->client.Read(c, 5000) == std::string(5000, 'x'));
  old.reset();
  EXPECT_TRUE(now->client.Read(a, kBytes) == large);
  EXPECT_TRUE(now->client.Read(b, 5000) == small);
  // The rest of the small ones' page is free.
  const uint64_t e = now->Have("new");
  EXPECT_EQ(e / kPage, b / kPage);
  // Another process opens it.
  wire::cuIpcGetMemHandle_Request share;
  share.address = a;
  ASSERT_EQ(now->client.Call(kCall_cuIpcGetMemHandle, share), CUDA_SUCCESS);
  const std::string key(now->client.Decode<wire::cuIpcGetMemHandle_Reply>().key);
  Side other(3);
  wire::cuIpcOpenMemHandle_v2_Request open;
  open.key = key;
  open.flags = CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
  ASSERT_EQ(other.client.Call(kCall_cuIpcOpenMemHandle_v2, open), CUDA_SUCCESS);
  const uint64_t opened = other.client.Decode<wire::cuIpcOpenMemHandle_v2_Reply>().address;
  EXPECT_TRUE(other.client.Read(opened, kBytes) == large);
  // And on it goes.
  auto third = std::make_unique<Side>(4);
  ASSERT_EQ(third->Adopt(now->OfferBlocks()), 2u);
  for (const uint64_t at : {b, c}) ASSERT_EQ(third->client.Allocate(5000, at), at);
  ASSERT_EQ(third->client.Allocate(kBytes, a), a);
  ASSERT_EQ(third->client.Allocate(3, e), e);
  EXPECT_EQ(third->Keep().size(), 2u);
  now.reset();
  EXPECT_TRUE(third->client.Read(a, kBytes) == large);
  EXPECT_TRUE(third->client.Read(b, 5000) == small);
  EXPECT_EQ(third->client.Read(e, 3), "new");
  // Freed, it is memory like other memory.
  ASSERT_EQ(third->client.Free(a), CUDA_SUCCESS);
  const uint64_t again = third->Have(small + large);
  EXPECT_TRUE(third->client.Read(again, small.size() + large.size()) == small + large);
}

// What the old one makes ready beforehand changes nothing: what goes over is what is there then, and what was freed
// meanwhile is free.
TEST(Blocks, AreMadeReadyBeforehand) {
  Side old(1), now(2);
  constexpr size_t kLarge = DeviceArena::kMaxCachedBlock + kPage;  // unmapped when it is freed
  const uint64_t before = old.FreeMemory();
  const std::string bytes = Pattern(kBytes, 1), other = Pattern(kBytes, 2), large = Pattern(kLarge, 3);
  const uint64_t a = old.Have(bytes), b = old.Have(large);
  EXPECT_EQ(old.MakeReady(), 1);
  ASSERT_EQ(old.client.Write(a, other), CUDA_SUCCESS);
  ASSERT_EQ(old.client.Free(b), CUDA_SUCCESS);
  EXPECT_EQ(old.FreeMemory(), before - DeviceArena::kPage * 2);
  const std::string later = Pattern(kLarge, 4);
  ASSERT_EQ(old.client.Allocate(kLarge, b), b);
  ASSERT_EQ(old.client.Write(b, later), CUDA_SUCCESS);
  ASSERT_EQ(old.client.Synchronize(), CUDA_SUCCESS);
  ASSERT_EQ(now.Adopt(old.OfferBlocks()), 2u);
  ASSERT_EQ(now.client.Allocate(kBytes, a), a);
  ASSERT_EQ(now.client.Allocate(kLarge, b), b);
  EXPECT_EQ(now.Keep().size(), 2u);
  EXPECT_TRUE(now.client.Read(a, kBytes) == other);
  EXPECT_TRUE(now.client.Read(b, kLarge) == later);
  // More blocks than one message makes ready; and again.
  for (int i = 0; i < 9; ++i) old.Have(bytes);
  EXPECT_EQ(old.MakeReady(), 3);
  EXPECT_EQ(old.MakeReady(), 3);
}

// A move that comes to nothing leaves everything as it was.
TEST(Blocks, TheOldOneGoesOnIfTheNewOneEnds) {
  Side old(1);
  const std::string bytes = Pattern(kBytes, 1), small = Pattern(700, 2);
  const uint64_t a = old.Have(bytes), b = old.Have(small);
  for (int i = 0; i < 3; ++i) {
    Side now(2);
    ASSERT_EQ(now.Adopt(old.OfferBlocks()), 2u);
    if (i == 0) continue;
    ASSERT_EQ(now.client.Allocate(kBytes, a), a);
    if (i == 2) {
      EXPECT_EQ(now.Keep(), std::set<uint64_t>{a});
    }
  }
  EXPECT_TRUE(old.client.Read(a, kBytes) == bytes);
  EXPECT_TRUE(old.client.Read(b, 700) == small);
  ASSERT_EQ(old.client.Free(a), CUDA_SUCCESS);
  const uint64_t c = old.Have(bytes + bytes);
  EXPECT_TRUE(old.client.Read(c, 2 * kBytes) == bytes + bytes);
  EXPECT_TRUE(old.client.Read(b, 700) == small);
}

// Memory that no allocation has got is let go, and what lies there later is the new one's own.
TEST(Blocks, WhatNobodyWantsIsLetGo) {
  Side old(1), now(2);
  const std::string bytes = Pattern(kBytes, 1);
  const uint64_t a = old.Have(bytes), b = old.Have(bytes);
  ASSERT_EQ(now.Adopt(old.OfferBlocks()), 2u);
  ASSERT_EQ(now.client.Allocate(kBytes, b), b);
  EXPECT_EQ(now.Keep(), std::set<uint64_t>{b});
  ASSERT_EQ(now.client.Allocate(kBytes, a), a);
  EXPECT_EQ(now.Keep(), std::set<uint64_t>{b});
  EXPECT_EQ(now.client.Write(a, std::string(kBytes, 'n')), CUDA_SUCCESS);
  EXPECT_EQ(now.client.Synchronize(), CUDA_SUCCESS);
  EXPECT_TRUE(old.client.Read(a, kBytes) == bytes);
  EXPECT_TRUE(now.client.Read(b, kBytes) == bytes);
  // Freed and allocated again, it is not the old one's any more, whatever it contains.
  Side other(3);
  ASSERT_EQ(other.Adopt(old.OfferBlocks()), 2u);
  ASSERT_EQ(other.client.Allocate(kBytes, b), b);
  ASSERT_EQ(other.client.Free(b), CUDA_SUCCESS);
  ASSERT_EQ(other.client.Allocate(kBytes, b), b);
  EXPECT_EQ(other.Keep(), std::set<uint64_t>());
}

TEST(Blocks, MoreThanAMessageHolds) {
  Side old(1), now(2);
  std::vector<std::pair<uint64_t, std::string>> all;
  for (unsigned i = 0; i < 70; ++i) {
    const std::string bytes = Pattern(kBytes / 2, i);
    all.emplace_back(old.Have(bytes), bytes);
  }
  const auto blocks = old.OfferBlocks();
  ASSERT_EQ(blocks.size(), all.size());
  ASSERT_EQ(now.Adopt(blocks), all.size());
  for (const auto& one : all) ASSERT_EQ(now.client.Allocate(kBytes / 2, one.first), one.first);
  EXPECT_EQ(now.Keep().size(), all.size());
  for (const auto& one : all) EXPECT_TRUE(now.client.Read(one.first, kBytes / 2) == one.second);
}

// Each is taken once, by the same owner, on the same GPU, where there is room for it; and the old session's next
// allocation or free ends what nobody has taken.
TEST(Blocks, OnlyForTheNextSession) {
  Side old(1, std::string(16, 'a')), other(2, std::string(16, 'b')), now(3, std::string(16, 'a'));
  const std::string bytes = Pattern(kBytes, 1);
  const uint64_t a = old.Have(bytes);
  EXPECT_EQ(other.Adopt(old.OfferBlocks()), 0u);
  EXPECT_EQ(old.Adopt(old.OfferBlocks()), 0u);
  auto blocks = old.OfferBlocks();
  ASSERT_EQ(blocks.size(), 1u);
  ASSERT_EQ(now.Adopt(blocks), 1u);
  EXPECT_EQ(now.Adopt(blocks), 0u);
  EXPECT_EQ(now.Adopt(old.OfferBlocks()), 0u);  // the addresses are taken
  ASSERT_EQ(now.client.Allocate(kBytes, a), a);
  EXPECT_EQ(now.Adopt(old.OfferBlocks()), 0u);
  Side late(4, std::string(16, 'a'));
  blocks = old.OfferBlocks();
  const uint64_t b = old.client.Allocate(100);
  EXPECT_EQ(late.Adopt(blocks), 0u);
  blocks = old.OfferBlocks();
  ASSERT_EQ(old.client.Free(b), CUDA_SUCCESS);
  EXPECT_EQ(late.Adopt(blocks), 0u);
  // Nonsense is refused, and nothing comes of it.
  for (int i = 0; i < 6; ++i) {
    blocks = old.OfferBlocks();
    ASSERT_GE(blocks.size(), 1u);
    blocks.resize(1);
    if (i == 0) blocks[0].bytes += kPage;
    if (i == 1) blocks[0].address += 512;
    if (i == 2) blocks[0].address = uint64_t(1) << 60;
    if (i == 3) blocks[0].device = 1;
    if (i == 4) blocks[0].device = -1;
    if (i == 5) blocks[0].key[40] ^= 1;
    EXPECT_EQ(late.Adopt(blocks), 0u) << i;
  }
  ASSERT_EQ(late.Adopt(old.OfferBlocks()), old.OfferBlocks().size());
  EXPECT_TRUE(now.client.Read(a, kBytes) == bytes);
  for (Side* side : {&old, &other, &now, &late}) EXPECT_EQ(side->client.status, ChannelStatus::kOk);
}

TEST(Blocks, NotFromGpuToGpu) {
  setenv("SOFTGPU_DEVICES", "2", 1);
  Side old(1, "", {"--gpu", "0"}), now(2, "", {"--gpu", "1"}), same(3, "", {"--gpu", "0"});
  unsetenv("SOFTGPU_DEVICES");
  old.Have(Pattern(kBytes, 1));
  EXPECT_EQ(now.Adopt(old.OfferBlocks()), 0u);
  EXPECT_EQ(same.Adopt(old.OfferBlocks()), 1u);
}

TEST(Blocks, WithinTheLimit) {
  Side old(1), now(2, "", {"--memory-limit", "6291456"});
  const uint64_t a = old.Have(Pattern(kBytes, 1));
  old.Have(Pattern(kBytes, 2));
  EXPECT_EQ(now.Adopt(old.OfferBlocks()), 1u);
  ASSERT_EQ(now.client.Allocate(kBytes, a), a);
  EXPECT_NE(now.client.Allocate(kPage), 0u);
  EXPECT_EQ(now.client.Allocate(kPage), 0u);
  EXPECT_EQ(now.client.last, CUDA_ERROR_OUT_OF_MEMORY);
}

TEST(Blocks, WhatTheDriverRefuses) {
  Side old(1);
  const std::string bytes = Pattern(kBytes, 1);
  const uint64_t from = old.Have(bytes);
  for (const char* const call : {"cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"}) {
    setenv("SOFTGPU_FAIL", (std::string(call) + ":1:801").c_str(), 1);
    Side now(2);
    unsetenv("SOFTGPU_FAIL");
    EXPECT_EQ(now.Adopt(old.OfferBlocks()), 0u) << call;
    // Nothing is left of it.
    ASSERT_EQ(now.client.Allocate(kBytes, from), from) << call;
    EXPECT_EQ(now.Keep(), std::set<uint64_t>()) << call;
    EXPECT_EQ(now.client.Write(from, std::string(kBytes, 'n')), CUDA_SUCCESS);
    EXPECT_EQ(now.client.Synchronize(), CUDA_SUCCESS);
    EXPECT_TRUE(old.client.Read(from, kBytes) == bytes) << call;
    ASSERT_EQ(now.client.Free(from), CUDA_SUCCESS);
    ASSERT_EQ(now.Adopt(old.OfferBlocks()), 1u) << call;
  }
  setenv("SOFTGPU_FAIL", "cuMemExportToShareableHandle:1:801", 1);
  Side refuses(3);
  unsetenv("SOFTGPU_FAIL");
  refuses.Have("x");
  EXPECT_TRUE(refuses.OfferBlocks().empty());
}

}  // namespace
}  // namespace cuda_remote::server
