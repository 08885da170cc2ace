// SPDX-License-Identifier: Apache-2.0
// Large copies of pageable memory through the buffers that the server shares. The fake server does the copies: it lies
// in this process, so it reaches the buffers at the client's addresses.
#include "client/calls/staged_copy.h"

#include <cuda.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "client/calls/testing/custom_fixture.h"
#include "client/core/session.h"
#include "client/memory/host_arena.h"
#include "proto/codec/codec.h"
#include "proto/codec/decode_as.h"

namespace cuda_remote::client {
namespace {

constexpr size_t kKiB = 1 << 10, kMiB = 1 << 20;
constexpr size_t kDeviceBytes = 20 * kMiB;

std::vector<char> Pattern(size_t bytes) {
  std::vector<char> made(bytes);
  for (size_t i = 0; i < bytes; ++i) made[i] = char(i * 7 + i / 1000);
  return made;
}

class StagedCopyTest : public CustomTest {
 protected:
  static void SetUpTestSuite() {
    setenv("CUDA_REMOTE_COPY_THREADS", "3", 1);
    CustomTest::SetUpTestSuite();
    device_ = new std::string(kDeviceBytes, 0);
    server_->On(kCall_cuMemcpyAsync, Copy);
    server_->On(kCall_cuMemcpyDtoHAsync_v2, [](const FakeServer::Request& request) {
      wire::cuMemcpyDtoHAsync_v2_Request in;
      EXPECT_TRUE(in.Decode(request.message));
      return FakeServer::Answer(CUDA_SUCCESS, "", 0, device_->substr(in.src - memory_, in.bytes));
    });
    server_->On(kCall_cuMemcpyHtoDAsync_v2, [](const FakeServer::Request& request) {
      wire::cuMemcpyHtoDAsync_v2_Request in;
      EXPECT_TRUE(in.Decode(request.message));
      EXPECT_EQ(in.bytes, request.payload.size());
      request.payload.copy(&(*device_)[in.dst - memory_], in.bytes);
      return FakeServer::Answer();
    });
  }
  void SetUp() override {
    CustomTest::SetUp();
    if (memory_ == 0) {
      ASSERT_EQ(cuMemAlloc(&memory_, kDeviceBytes), CUDA_SUCCESS);
    }
    static const std::vector<char> content = Pattern(kDeviceBytes);
    device_->assign(content.data(), content.size());
    Sent();
  }
  void TearDown() override { server_->On(kCall_cuMemcpyAsync, Copy); }

  static FakeServer::Answer Copy(const FakeServer::Request& request) {
    wire::cuMemcpyAsync_Request in;
    EXPECT_TRUE(in.Decode(request.message));
    const bool to_host = IsDevice(in.src);
    EXPECT_NE(to_host, IsDevice(in.dst));
    char* const device = &(*device_)[(to_host ? in.src : in.dst) - memory_];
    char* const buffer = reinterpret_cast<char*>(to_host ? in.dst : in.src);
    EXPECT_TRUE(HostArena::Contains(reinterpret_cast<uint64_t>(buffer)));
    memcpy(to_host ? buffer : device, to_host ? device : buffer, in.bytes);
    return {};
  }
  static bool IsDevice(uint64_t address) { return address - memory_ < kDeviceBytes; }

  // The requests since the last time, of which those for pieces must be such that together they copy `bytes` from (or
  // to) `offset` in the device's memory, each byte once. Gives the calls of the others.
  Calls ExpectPieces(bool to_host, size_t offset, size_t bytes, CUstream stream, size_t* count = nullptr) {
    Calls others;
    std::vector<wire::cuMemcpyAsync_Request> pieces;
    for (const FakeServer::Request& one : SentRequests()) {
      wire::cuMemcpyAsync_Request piece;
      if (!wire::DecodeAs(one.header.call, one.message, &piece)) {
        others.push_back(one.header.call);
        continue;
      }
      EXPECT_EQ(one.header.context_or_result, SlotOf(reinterpret_cast<uint64_t>(context_)));
      EXPECT_EQ(one.payload, "");
      EXPECT_TRUE(piece.blocking);
      EXPECT_EQ(piece.stream, reinterpret_cast<uint64_t>(stream));
      EXPECT_LE(piece.bytes, Staging::kPieceBytes);
      EXPECT_EQ(IsDevice(piece.src), to_host);
      EXPECT_EQ((to_host ? piece.dst : piece.src) % 4096, 0u) << "a buffer's begin";
      pieces.push_back(piece);
    }
    const auto device = [to_host](const auto& piece) { return to_host ? piece.src : piece.dst; };
    std::sort(pieces.begin(), pieces.end(), [&](const auto& a, const auto& b) { return device(a) < device(b); });
    uint64_t at = memory_ + offset;
    for (const auto& piece : pieces) {
      EXPECT_EQ(device(piece), at);
      at += piece.bytes;
    }
    EXPECT_EQ(at, memory_ + offset + bytes);
    if (count) *count = pieces.size();
    return others;
  }
  // A piece of the memory as it is on the device.
  static std::string OnDevice(size_t offset, size_t bytes) { return device_->substr(offset, bytes); }

  inline static CUdeviceptr memory_ = 0;
  inline static std::string* device_ = nullptr;  // outlives the server
};

// The first one: later there are buffers.
TEST_F(StagedCopyTest, TheBuffersAreMadeOnceCopiesAreWorthThem) {
  std::string to(kMiB, 0);
  const auto copy = [&](size_t bytes) {
    std::fill(to.begin(), to.end(), 0);
    EXPECT_EQ(cuMemcpyDtoH(&to[0], memory_ + 5, bytes), CUDA_SUCCESS);
    EXPECT_EQ(to.substr(0, bytes), OnDevice(5, bytes));
    EXPECT_EQ(to.find_first_not_of('\0', bytes), std::string::npos);
  };
  copy(kMiB);
  EXPECT_EQ(Sent(), Calls{kCall_cuMemcpyDtoHAsync_v2});
  copy(kMiB - 1);
  EXPECT_EQ(Sent(), Calls{kCall_cuMemcpyDtoHAsync_v2});
  copy(16 * kKiB - 1);
  EXPECT_EQ(Sent(), Calls{kCall_cuMemcpyDtoHAsync_v2}) << "a small copy does not count";
  copy(16 * kKiB);
  const std::vector<FakeServer::Request> requests = SentRequests();
  ASSERT_EQ(requests.size(), 2u);
  wire::OpHostMap_Request map;
  ASSERT_TRUE(wire::DecodeAs(requests[0].header.call, requests[0].message, &map));
  EXPECT_TRUE(HostArena::Contains(map.address));
  EXPECT_EQ(map.bytes, Staging::kPieces * Staging::kPieceBytes);
  EXPECT_NE(map.tag, 0u) << "they are shared";
  wire::cuMemcpyAsync_Request piece;
  ASSERT_TRUE(wire::DecodeAs(requests[1].header.call, requests[1].message, &piece));
  EXPECT_EQ(piece.dst, map.address);
  copy(16 * kKiB - 1);
  EXPECT_EQ(Sent(), Calls{kCall_cuMemcpyDtoHAsync_v2}) << "the channel is as fast";
  copy(16 * kKiB);
  EXPECT_EQ(Sent(), Calls{kCall_cuMemcpyAsync}) << "there they are";
}

TEST_F(StagedCopyTest, ToTheHostInPieces) {
  CUstream stream = nullptr;
  ASSERT_EQ(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  Sent();
  for (const size_t bytes : {128 * kKiB, 256 * kKiB + 1, 512 * kKiB, 5 * kMiB + 7, 19 * kMiB}) {
    SCOPED_TRACE(bytes);
    std::string to(bytes, 0);
    EXPECT_EQ(cuMemcpyDtoHAsync(&to[0], memory_ + 3, bytes, stream), CUDA_SUCCESS);
    EXPECT_TRUE(to == OnDevice(3, bytes)) << "it is there when the call returns";
    size_t pieces = 0;
    EXPECT_EQ(ExpectPieces(true, 3, bytes, stream, &pieces), Calls());
    EXPECT_EQ(pieces > 1, bytes > 128 * kKiB) << "the GPU and the client are to work at the same time";
  }
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
}

TEST_F(StagedCopyTest, ToTheDeviceOnlyWithSeveralThreads) {
  Staging& staging = Session::Get()->memory().staging();
  const size_t bytes = 16 * kMiB;
  const std::vector<char> from = Pattern(bytes);
  const auto copy = [&](size_t length) {
    std::fill(device_->begin(), device_->end(), 0);
    EXPECT_EQ(cuMemcpyHtoD(memory_ + 9, from.data(), length), CUDA_SUCCESS);
  };
  const auto arrived = [&](size_t length) {
    return device_->compare(9, length, from.data(), length) == 0 &&
           device_->find_first_not_of('\0', 9 + length) == std::string::npos;
  };
  copy(bytes);
  EXPECT_EQ(ExpectPieces(false, 9, bytes, nullptr), Calls());
  EXPECT_TRUE(arrived(bytes));
  copy(bytes - 1);
  Calls calls = Sent();
  EXPECT_EQ(std::count(calls.begin(), calls.end(), kCall_cuMemcpyHtoDAsync_v2), long(calls.size()));
  EXPECT_TRUE(arrived(bytes - 1));
  ASSERT_EQ(staging.threads(), 3);
  staging.SetThreads(1);
  copy(bytes);
  calls = Sent();
  EXPECT_EQ(std::count(calls.begin(), calls.end(), kCall_cuMemcpyHtoDAsync_v2), long(calls.size()));
  EXPECT_TRUE(arrived(bytes));
  staging.SetThreads(3);
}

TEST_F(StagedCopyTest, AFailedPieceFailsTheCopy) {
  const size_t bytes = 6 * kMiB, bad = 2 * kMiB + 5;
  const std::string before(bytes, '#');
  uint64_t begin = 0, end = 0;
  const auto fail = [&](const FakeServer::Request& request) {
    wire::cuMemcpyAsync_Request in;
    EXPECT_TRUE(in.Decode(request.message));
    const uint64_t at = (IsDevice(in.src) ? in.src : in.dst) - memory_;
    if (at > bad || bad >= at + in.bytes) return Copy(request);
    begin = at;
    end = at + in.bytes;
    return FakeServer::Answer(CUDA_ERROR_ILLEGAL_ADDRESS);
  };
  server_->On(kCall_cuMemcpyAsync, fail);
  std::string to = before;
  EXPECT_EQ(cuMemcpyDtoH(&to[0], memory_, bytes), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_GT(end, begin);
  EXPECT_EQ(to.substr(begin, end - begin), std::string(end - begin, '#')) << "nothing came for that piece";
  begin = end = 0;
  const std::vector<char> from = Pattern(17 * kMiB);
  EXPECT_EQ(cuMemcpyHtoD(memory_, from.data(), from.size()), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_GT(end, begin);
  // No more are begun after it, but for those that each thread may have under way.
  Sent();
  server_->On(kCall_cuMemcpyAsync, CUDA_ERROR_LAUNCH_FAILED);
  std::string large(19 * kMiB, 0);
  EXPECT_EQ(cuMemcpyDtoH(&large[0], memory_, large.size()), CUDA_ERROR_LAUNCH_FAILED);
  const Calls calls = Sent();
  EXPECT_GE(calls.size(), 1u);
  EXPECT_LE(calls.size(), Staging::kPieces);
  // The next copy finds everything in order.
  server_->On(kCall_cuMemcpyAsync, Copy);
  EXPECT_EQ(cuMemcpyDtoH(&to[0], memory_, bytes), CUDA_SUCCESS);
  EXPECT_TRUE(to == OnDevice(0, bytes));
  EXPECT_EQ(ExpectPieces(true, 0, bytes, nullptr), Calls());
}

TEST_F(StagedCopyTest, AnEarlierErrorIsReportedByACopyToTheHost) {
  const auto fail_before = [this] {
    server_->On(kCall_cuMemsetD8Async, CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_EQ(cuMemsetD8Async(memory_, 1, 100, nullptr), CUDA_SUCCESS);
  };
  std::string to(2 * kMiB, 0);
  fail_before();
  EXPECT_EQ(cuMemcpyDtoH(&to[0], memory_, to.size()), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(cuMemcpyDtoH(&to[0], memory_, to.size()), CUDA_SUCCESS);
  // One to the device leaves it to the next call that waits.
  const std::vector<char> from = Pattern(16 * kMiB);
  fail_before();
  EXPECT_EQ(cuMemcpyHtoD(memory_, from.data(), from.size()), CUDA_SUCCESS);
  EXPECT_EQ(cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
  server_->On(kCall_cuMemsetD8Async, FakeServer::Answer());
}

TEST_F(StagedCopyTest, WhatWasDoneBeforeIsAskedAboutAgain) {
  CUstream stream = nullptr;
  ASSERT_EQ(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  std::string to(2 * kMiB, 0);
  EXPECT_EQ(cuStreamQuery(stream), CUDA_SUCCESS);
  server_->Take();
  EXPECT_EQ(cuStreamQuery(stream), CUDA_SUCCESS);
  EXPECT_TRUE(server_->Take().empty()) << "it is known";
  EXPECT_EQ(cuMemcpyDtoHAsync(&to[0], memory_, to.size(), stream), CUDA_SUCCESS);
  server_->Take();
  EXPECT_EQ(cuStreamQuery(stream), CUDA_SUCCESS);
  EXPECT_EQ(server_->Take().size(), 1u);
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
}

TEST_F(StagedCopyTest, NotWhileAStreamIsCaptured) {
  CUstream stream = nullptr;
  ASSERT_EQ(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  Sent();
  std::string to(kMiB, 0);
  EXPECT_EQ(cuMemcpyDtoH(&to[0], memory_, to.size()), CUDA_SUCCESS);
  EXPECT_TRUE(to == OnDevice(0, to.size()));
  EXPECT_EQ(Sent(), Calls{kCall_cuMemcpyDtoHAsync_v2});
  EXPECT_NE(Session::Get()->graphs().captures().End(reinterpret_cast<uint64_t>(stream)), nullptr);
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
}

TEST_F(StagedCopyTest, OneCopyAtATimeHasTheBuffers) {
  Session* const session = Session::Get();
  std::string to(kMiB, 0);
  ASSERT_TRUE(session->memory().staging().Acquire(0));
  std::thread other([&] {
    EXPECT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
    EXPECT_EQ(cuMemcpyDtoH(&to[0], memory_, to.size()), CUDA_SUCCESS);
  });
  other.join();
  session->memory().staging().Release();
  EXPECT_TRUE(to == OnDevice(0, to.size()));
  EXPECT_EQ(Sent(), Calls{kCall_cuMemcpyDtoHAsync_v2});
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      EXPECT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
      const size_t bytes = 3 * kMiB + size_t(t);
      for (int i = 0; i < 20; ++i) {
        std::string mine(bytes, 0);
        const size_t offset = size_t(i * 4096 + t);
        EXPECT_EQ(cuMemcpyDtoH(&mine[0], memory_ + offset, bytes), CUDA_SUCCESS);
        EXPECT_TRUE(mine == OnDevice(offset, bytes));
      }
    });
  }
  for (std::thread& one : threads) one.join();
}

TEST_F(StagedCopyTest, WithoutBuffersTheChannelServes) {
  Session* const session = Session::Get();
  session->memory().staging().GiveBack();
  EXPECT_EQ(Sent(), Calls{kOpHostUnmap});
  server_->On(kOpHostMap, CUDA_ERROR_OUT_OF_MEMORY);
  std::string to(kMiB, 0);
  EXPECT_EQ(cuMemcpyDtoH(&to[0], memory_, to.size()), CUDA_SUCCESS);
  EXPECT_TRUE(to == OnDevice(0, to.size()));
  EXPECT_EQ(Sent(), (Calls{kOpHostMap, kCall_cuMemcpyDtoHAsync_v2}));
  EXPECT_EQ(cuMemcpyDtoH(&to[0], memory_, to.size()), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls{kCall_cuMemcpyDtoHAsync_v2}) << "a server that refused is not asked again";
  // Another server may agree.
  server_->On(kOpHostMap, FakeServer::Answer());
  session->memory().staging().GiveBack();
  EXPECT_EQ(cuMemcpyDtoH(&to[0], memory_, to.size()), CUDA_SUCCESS);
  EXPECT_EQ(ExpectPieces(true, 0, to.size(), nullptr), Calls{kOpHostMap});
}

// The last one: nothing works after it.
TEST_F(StagedCopyTest, TheServerGoesInTheMiddleOfACopy) {
  std::atomic<int> pieces{0};
  server_->On(kCall_cuMemcpyAsync, [&pieces](const FakeServer::Request& request) {
    if (++pieces == 5) server_->End("the test is over");
    return Copy(request);
  });
  std::string to(16 * kMiB, 0);
  EXPECT_EQ(cuMemcpyDtoH(&to[0], memory_, to.size()), CUDA_ERROR_DEVICE_UNAVAILABLE);
  EXPECT_EQ(Session::Get()->lost(), CUDA_ERROR_DEVICE_UNAVAILABLE);
  EXPECT_EQ(cuMemcpyDtoH(&to[0], memory_, to.size()), CUDA_ERROR_DEVICE_UNAVAILABLE);
}

}  // namespace
}  // namespace cuda_remote::client
