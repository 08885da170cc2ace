// SPDX-License-Identifier: Apache-2.0
// The new end of a move over the network: memory that a tool makes and fills before the replay, which then gets it.

#include <cuda.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "server/worker/memory/device_arena.h"
#include "server/worker/testing/client.h"
#include "server/worker/testing/worker_process.h"

namespace cuda_remote::server {
namespace {

constexpr char kDriver[] = "softgpu/libsoftgpu.so";
constexpr uint64_t kPage = DeviceArena::kPage;
constexpr uint64_t kAt = kArenaBase + 64 * kPage;

std::string Pattern(size_t bytes, unsigned seed) {
  std::mt19937_64 random(seed);
  std::string out(bytes, 0);
  for (char& c : out) c = char(random());
  return out;
}

struct Side {
  explicit Side(const std::vector<std::string>& options = {})
      : worker([&] {
          std::vector<std::string> command = {WorkerPath(), "--driver", kDriver, "--log-level", "off"};
          command.insert(command.end(), options.begin(), options.end());
          return command;
        }()),
        client(worker.Connect(nullptr)) {}

  using Block = std::pair<uint64_t, uint64_t>;  // address, bytes
  // The addresses of those that are there now.
  std::vector<uint64_t> Stage(const std::vector<Block>& blocks, const std::vector<uint64_t>& drop = {},
                              int device = 0) {
    wire::OpStageBlocks_Request in;
    for (const auto& [address, bytes] : blocks) {
      wire::Block block;
      block.address = address;
      block.bytes = bytes;
      block.device = device;
      in.blocks.push_back(block);
    }
    in.drop = drop;
    EXPECT_EQ(client.Call(kOpStageBlocks, in), CUDA_SUCCESS);
    return client.Decode<wire::OpStageBlocks_Reply>().staged;
  }
  CUresult Fill(uint64_t address, const std::string& bytes) {
    wire::OpFillBlock_Request in;
    in.address = address;
    return client.Call(kOpFillBlock, in, bytes);
  }
  std::vector<Block> List() {
    std::vector<Block> blocks;
    wire::OpListBlocks_Request in;
    do {
      EXPECT_EQ(client.Call(kOpListBlocks, in), CUDA_SUCCESS);
      const auto reply = client.Decode<wire::OpListBlocks_Reply>();
      for (const wire::Block& block : reply.blocks) blocks.emplace_back(block.address, block.bytes);
      in.after = reply.next;
    } while (in.after != 0);
    return blocks;
  }
  // What it says was handed over: nothing of this.
  void Keep() {
    EXPECT_EQ(client.Call(kOpKeepBlocks, wire::OpKeepBlocks_Request()), CUDA_SUCCESS);
    EXPECT_TRUE(client.Decode<wire::OpKeepBlocks_Reply>().blocks.empty());
  }

  WorkerProcess worker;
  TestClient client;
};

TEST(Stage, TheReplayGetsIt) {
  Side side;
  const std::string large = Pattern(3 * kPage, 1), small = Pattern(5000, 2);
  // Before there is any context.
  EXPECT_EQ(side.Stage({{kAt, 4 * kPage}, {kAt + 8 * kPage, kPage}, {kAt + 16 * kPage, 2 * kPage}}).size(), 3u);
  for (size_t at = 0; at < large.size(); at += 700000)
    EXPECT_EQ(side.Fill(kAt + at, large.substr(at, 700000)), CUDA_SUCCESS);
  EXPECT_EQ(side.Fill(kAt + 8 * kPage + 512, small), CUDA_SUCCESS);
  EXPECT_TRUE(side.List().empty());
  // What is staged cannot be got at otherwise.
  EXPECT_NE(side.client.Write(kAt, "x"), CUDA_SUCCESS);
  EXPECT_EQ(side.client.Read(kAt, 1), "");
  side.client.OpenContext();
  EXPECT_NE(side.client.Write(kAt, "x"), CUDA_SUCCESS);
  // Then with a context.
  EXPECT_EQ(side.Stage({{kAt + 32 * kPage, kPage}}, {kAt + 16 * kPage}), std::vector<uint64_t>{kAt + 32 * kPage});
  EXPECT_EQ(side.Fill(kAt + 32 * kPage, small), CUDA_SUCCESS);
  EXPECT_EQ(side.Fill(kAt + 16 * kPage, small), CUDA_ERROR_INVALID_VALUE);
  side.client.flags = kFlagReplay;
  ASSERT_EQ(side.client.Allocate(4 * kPage - 100, kAt), kAt);
  ASSERT_EQ(side.client.Allocate(5000, kAt + 8 * kPage + 512), kAt + 8 * kPage + 512);
  side.client.flags = 0;
  EXPECT_EQ(side.Fill(kAt, small), CUDA_ERROR_INVALID_VALUE);
  side.Keep();
  EXPECT_TRUE(side.client.Read(kAt, large.size()) == large);
  EXPECT_TRUE(side.client.Read(kAt + 8 * kPage + 512, small.size()) == small);
  EXPECT_EQ(side.List(), (std::vector<Side::Block>{{kAt, 4 * kPage}, {kAt + 8 * kPage, kPage}}));
  EXPECT_EQ(side.Fill(kAt + 32 * kPage, small), CUDA_ERROR_INVALID_VALUE);
  // Others open it.
  wire::cuIpcGetMemHandle_Request share;
  share.address = kAt;
  EXPECT_EQ(side.client.Call(kCall_cuIpcGetMemHandle, share), CUDA_SUCCESS);
  EXPECT_EQ(side.client.Synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(side.client.pending, CUDA_SUCCESS);
}

TEST(Stage, OnEachGpu) {
  setenv("SOFTGPU_DEVICES", "2", 1);
  Side side;
  unsetenv("SOFTGPU_DEVICES");
  const std::string bytes = Pattern(kPage, 3);
  EXPECT_EQ(side.Stage({{kAt, kPage}}, {}, 1), std::vector<uint64_t>{kAt});
  EXPECT_EQ(side.Stage({{kAt + kPage, kPage}}, {}, 2), std::vector<uint64_t>());
  EXPECT_EQ(side.Stage({{kAt + kPage, kPage}}, {}, -1), std::vector<uint64_t>());
  EXPECT_EQ(side.Fill(kAt, bytes), CUDA_SUCCESS);
  wire::cuDevicePrimaryCtxRetain_Request retain;
  retain.context = side.client.NewHandle(Kind::kContext);
  retain.device = 1;
  ASSERT_EQ(side.client.Call(kCall_cuDevicePrimaryCtxRetain, retain), CUDA_SUCCESS);
  side.client.context_slot = SlotOf(retain.context);
  wire::OpMemAlloc_Request in;
  in.bytes = kPage;
  in.at = kAt;
  in.device = 1;
  ASSERT_EQ(side.client.Call(kOpMemAlloc, in), CUDA_SUCCESS);
  side.Keep();
  EXPECT_TRUE(side.client.Read(kAt, kPage) == bytes);
}

TEST(Stage, LeavesTheGpuSomeRoom) {
  setenv("SOFTGPU_MEMORY", "512M", 1);
  Side side;
  unsetenv("SOFTGPU_MEMORY");
  // More than a quarter of a GiB stays.
  EXPECT_EQ(side.Stage({{kAt, 200 << 20}, {kAt + (200 << 20), 64 << 20}, {kAt + (400 << 20), 10 << 20}}),
            (std::vector<uint64_t>{kAt, kAt + (400 << 20)}));
  side.client.OpenContext();
  EXPECT_NE(side.client.Allocate(240 << 20), 0u);
}

TEST(Stage, WithinTheLimit) {
  Side side({"--memory-limit", std::to_string(4 * kPage)});
  EXPECT_EQ(side.Stage({{kAt, 3 * kPage}, {kAt + 8 * kPage, 2 * kPage}, {kAt + 16 * kPage, kPage}}),
            (std::vector<uint64_t>{kAt, kAt + 16 * kPage}));
  side.client.OpenContext();
  // What the job has needs it more.
  EXPECT_EQ(side.client.Allocate(4 * kPage, kAt + 32 * kPage), kAt + 32 * kPage);
  EXPECT_EQ(side.Fill(kAt, "x"), CUDA_ERROR_INVALID_VALUE);
}

// What the driver refuses leaves nothing behind.
TEST(Stage, WhatTheDriverRefuses) {
  for (const char* const call : {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemGetInfo_v2"}) {
    setenv("SOFTGPU_FAIL", (std::string(call) + ":1:801").c_str(), 1);
    Side side;
    unsetenv("SOFTGPU_FAIL");
    // Another kind of memory is tried where the first is refused.
    const bool staged = !side.Stage({{kAt, 3 * kPage}}).empty();
    EXPECT_EQ(staged, call == std::string("cuMemCreate")) << call;
    EXPECT_EQ(side.Fill(kAt, "x"), staged ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE) << call;
    EXPECT_EQ(side.Stage({{kAt, 3 * kPage}}), std::vector<uint64_t>{kAt}) << call;
    EXPECT_EQ(side.Fill(kAt, "x"), CUDA_SUCCESS) << call;
  }
}

// A job that allocates and frees while its memory is staged again and again: in the end the replay has every allocation
// at its address, with its contents if all was filled, and nothing else.
TEST(Stage, FollowsAJobThatAllocatesAndFrees) {
  for (unsigned seed = 1; seed <= 5; ++seed) {
    std::mt19937_64 random(seed);
    Side job, other;
    job.client.OpenContext();
    std::map<uint64_t, std::string> model;
    std::map<uint64_t, uint64_t> staged;
    for (int round = 0; round < 12; ++round) {
      for (int i = 0; i < 12; ++i) {
        if (model.size() > 6 && random() % 2 == 0) {
          const auto one = std::next(model.begin(), long(random() % model.size()));
          EXPECT_EQ(job.client.Free(one->first), CUDA_SUCCESS);
          model.erase(one);
          continue;
        }
        const std::string bytes = Pattern(1 + random() % (random() % 3 == 0 ? 3 * kPage : 9000), unsigned(random()));
        const uint64_t address = job.client.Allocate(bytes.size());
        ASSERT_NE(address, 0u);
        model[address] = bytes;
      }
      std::map<uint64_t, uint64_t> now;
      for (const auto& [address, bytes] : job.List()) now[address] = bytes;
      std::vector<uint64_t> drop;
      std::vector<Side::Block> wanted;
      for (const auto& [address, bytes] : staged) {
        // Sometimes it is not noticed.
        if (now.count(address) == 0 && random() % 4 != 0) drop.push_back(address);
      }
      for (const auto& block : now) wanted.push_back(block);
      EXPECT_EQ(other.Stage(wanted, drop).size(), wanted.size());
      staged = now;
      for (const auto& [address, bytes] : model) {
        for (size_t at = 0; at < bytes.size(); at += 1 << 20) {
          EXPECT_EQ(other.Fill(address + at, bytes.substr(at, 1 << 20)), CUDA_SUCCESS);
        }
      }
    }
    // One that was freed and allocated since lies across others.
    const auto last = std::prev(model.end());
    EXPECT_EQ(job.client.Free(last->first), CUDA_SUCCESS);
    model.erase(last);
    const uint64_t late = job.client.Allocate(5 * kPage);
    other.client.OpenContext();
    other.client.flags = kFlagReplay;
    for (const auto& [address, bytes] : model) ASSERT_EQ(other.client.Allocate(bytes.size(), address), address);
    ASSERT_EQ(other.client.Allocate(5 * kPage, late), late);
    other.client.flags = 0;
    other.Keep();
    for (const auto& [address, bytes] : model) {
      EXPECT_TRUE(other.client.Read(address, bytes.size()) == bytes) << seed << " " << address;
    }
    EXPECT_EQ(other.List(), job.List()) << seed;
    EXPECT_EQ(other.client.pending, CUDA_SUCCESS);
  }
}

}  // namespace
}  // namespace cuda_remote::server
