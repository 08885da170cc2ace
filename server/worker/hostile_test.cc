// SPDX-License-Identifier: Apache-2.0
// Clients that do not behave: random requests to a whole cr-worker. It may refuse them or end the session with a
// reason; it must not crash, hang, or let them touch what is not theirs.

#include <cuda.h>
#include <gtest/gtest.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <random>
#include <vector>

#include "proto/base/clock.h"
#include "proto/codec/wire.h"
#include "server/worker/memory/device_arena.h"
#include "server/worker/testing/client.h"
#include "server/worker/testing/worker_process.h"

namespace cuda_remote::server {
namespace {

constexpr char kImage[] = R"(.version 7.0
.target sm_70
.address_size 64
.visible .global .align 4 .u32 counter;
.visible .entry say() { ret; }
)";

// Calls that stop their own session for long by what they are: they wait for a descriptor or an answer of the client.
bool Stalls(uint32_t call) { return call == kOpHostMap || call == kOpManagedMap || call == kOpLaunchHostFunc; }

class Chaos {
 public:
  explicit Chaos(uint64_t seed) : random_(seed) {}

  uint64_t Below(uint64_t n) { return random_() % n; }

  uint64_t Value() {
    switch (Below(8)) {
      case 0:
        return Below(5);
      case 1:
        return handles.empty() ? 0 : handles[Below(handles.size())];
      case 2:
        return MakeHandle(Kind(Below(30)), uint32_t(Below(40)), uint16_t(Below(2)));
      case 3:
        return addresses.empty() ? 0 : addresses[Below(addresses.size())] + Below(3) * 4096;
      case 4:
        return uint64_t(1) << Below(64);
      case 5:
        return ~uint64_t(0) - Below(3);
      case 6:
        return Below(1 << 20);
      default:
        return random_();
    }
  }
  std::string Bytes(size_t most) {
    std::string out(Below(most + 1), 0);
    for (size_t i = 0; i + 8 <= out.size(); i += 8) {
      const uint64_t value = Value();
      memcpy(&out[i], &value, 8);
    }
    return out;
  }
  // A message as the codec reads it, with fields that may or may not exist.
  std::string Message() {
    std::string out;
    const uint64_t fields = Below(14);
    for (uint64_t i = 0; i < fields; ++i) {
      const uint32_t number = uint32_t(Below(14) + 1);
      if (Below(4) == 0) {
        static const size_t kSizes[] = {0, 4, 8, 16, 64, 128, 200, 4000};
        wire::PutBytes(&out, int(number), Bytes(kSizes[Below(8)]));
      } else {
        wire::PutUint(&out, int(number), Value());
      }
    }
    if (Below(20) == 0) out += Bytes(20);
    if (Below(20) == 0) out.resize(Below(out.size() + 1));
    return out;
  }
  // A record of a capture, more or less: requests in frames, some of them such as a capture has.
  std::string Frames() {
    static const uint32_t kInside[] = {kCall_cuLaunchKernel,      kCall_cuMemsetD32Async, kCall_cuEventRecord,
                                       kCall_cuStreamWaitEvent,   kCall_cuMemcpyAsync,    kCall_cuGraphLaunch,
                                       kCall_cuGraphAddEmptyNode, kOpGraphNames};
    std::string out;
    for (uint64_t i = Below(6); i-- != 0;) {
      FrameHeader header;
      header.call = out.empty() && Below(8) != 0 ? uint32_t(kCall_cuStreamBeginCapture_v2)
                    : Below(12) == 0             ? Call()
                                                 : kInside[Below(8)];
      header.context_or_result = Below(4) == 0 ? uint32_t(Value()) : context;
      std::string message = Message();
      header.message_bytes = Below(20) == 0 ? uint32_t(Value()) : uint32_t(message.size());
      message.resize((message.size() + 7) / 8 * 8);
      out.append(reinterpret_cast<const char*>(&header), sizeof header);
      out += message;
    }
    if (Below(10) == 0) out.resize(Below(out.size() + 1));
    return out;
  }
  // A request to make such a capture again, with streams and events that may exist.
  std::string Capture() {
    std::string out, stream, event;
    wire::PutUint(&stream, 1, MakeHandle(Kind::kStream, 30, 1));
    wire::PutUint(&stream, 2, handles.empty() ? 0 : handles[0]);
    wire::PutUint(&event, 1, MakeHandle(Kind::kEvent, 31, 1));
    wire::PutUint(&event, 2, handles.empty() ? 0 : handles[0]);
    wire::PutUint(&out, 1, Value());
    wire::PutUint(&out, 2, Below(8) != 0 ? MakeHandle(Kind::kStream, 30, 1) : Value());
    wire::PutBytes(&out, 3, Below(10) != 0 ? stream : Message());
    wire::PutBytes(&out, 4, Below(10) != 0 ? event : Message());
    return out;
  }
  uint32_t Call() {
    if (Below(20) == 0) return kOpGraphCapture;
    if (Below(4) == 0) return kFirstOperation + uint32_t(Below(60));
    static const uint32_t kOften[] = {
        kCall_cuMemcpyHtoDAsync_v2, kCall_cuMemcpyDtoHAsync_v2, kCall_cuMemcpyAsync, kCall_cuMemcpy2DAsync_v2,
        kCall_cuMemcpy3DAsync_v2,   kCall_cuLaunchKernel,       kCall_cuMemMap,      kCall_cuMemUnmap,
        kCall_cuModuleLoadData};
    if (Below(3) == 0) return kOften[Below(9)];
    return uint32_t(Below(850));
  }

  std::vector<uint64_t> handles, addresses;
  uint32_t context = 0;

 private:
  std::mt19937_64 random_;
};

class HostileTest : public testing::TestWithParam<const char*> {
 protected:
  void Run(uint64_t seed, int requests) {
    Chaos chaos(seed);
    const std::string driver = GetParam();
    if (access(driver.c_str(), R_OK) != 0) GTEST_SKIP() << driver << " is not built here";
    WorkerProcess worker({WorkerPath(), "--driver", driver, "--log-level", "off", "--memory-limit", "268435456"});
    ASSERT_EQ(worker.ready().error, "");
    auto channel = worker.Connect();
    ASSERT_TRUE(channel);
    TestClient client(std::move(channel));
    chaos.handles.push_back(client.OpenContext());
    const uint32_t context = chaos.context = client.context_slot;
    chaos.addresses = {client.Allocate(100), client.Allocate(3 << 20), kArenaBase, kReservationBase,
                       driverabi::kHostBase};
    chaos.handles.push_back(client.Stream());
    const uint64_t module = client.LoadModule(kImage);
    chaos.handles.push_back(module);
    chaos.handles.push_back(client.Function(module, "say"));
    for (int i = 0; i < requests && client.channel().alive(); ++i) {
      FrameHeader header;
      header.call = chaos.Call();
      if (Stalls(header.call)) continue;
      header.context_or_result = chaos.Below(8) == 0 ? uint32_t(chaos.Value()) : context;
      const bool capture = header.call == kOpGraphCapture && chaos.Below(4) != 0;
      if (capture || chaos.Below(8) == 0) header.flags = kFlagReplay;
      const std::string message = capture ? chaos.Capture() : chaos.Message();
      const std::string payload = capture ? chaos.Frames() : chaos.Below(2) ? std::string() : chaos.Bytes(5000);
      client.channel().Send(header, message, payload);
    }
    // Whatever has become of the session, it comes to an end in good time and not by a signal.
    std::string out(16, 0);
    Reply reply;
    FrameHeader ping;
    ping.call = kOpPing;
    const ChannelStatus status = client.channel().Call(ping, {}, {}, nullptr, 0, &reply);
    if (status == ChannelStatus::kOk) return;
    const int ended = worker.WaitForEnd(10000);
    ASSERT_NE(ended, -1) << "seed " << seed << ": neither serves nor ends";
    ASSERT_TRUE(WIFEXITED(ended)) << "seed " << seed << ": signal " << WTERMSIG(ended);
    EXPECT_EQ(WEXITSTATUS(ended), 0) << "seed " << seed;
    EXPECT_NE(worker.EndReason(), "") << "seed " << seed;
  }
};

TEST_P(HostileTest, RandomRequests) {
  uint64_t first = 1;
  int seconds = 15;
  if (const char* const text = getenv("HOSTILE_SEED")) first = strtoull(text, nullptr, 10), seconds = 0;
  const auto end = Now() + std::chrono::seconds(seconds);
  for (uint64_t seed = first; seed < first + 400; ++seed) {
    Run(seed, 400);
    if (HasFatalFailure() || IsSkipped() || Now() > end) break;
  }
}

// Each operation and each call with an empty message, then with no context.
TEST_P(HostileTest, EmptyMessages) {
  const std::string driver = GetParam();
  if (access(driver.c_str(), R_OK) != 0) GTEST_SKIP() << driver << " is not built here";
  std::unique_ptr<WorkerProcess> worker;
  std::unique_ptr<TestClient> client;
  for (const bool with_context : {true, false}) {
    for (uint32_t i = 0; i < 900; ++i) {
      const uint32_t call = i < 850 ? i : kFirstOperation + (i - 850);
      if (Stalls(call)) continue;
      if (!client || !client->channel().alive()) {
        client.reset();
        worker = std::make_unique<WorkerProcess>(
            std::vector<std::string>{WorkerPath(), "--driver", driver, "--log-level", "off"});
        client = std::make_unique<TestClient>(worker->Connect());
        client->OpenContext();
        if (!with_context) client->context_slot = 0;
      }
      client->Raw(call, {});
      if (client->status == ChannelStatus::kOk) continue;
      const int ended = worker->WaitForEnd(10000);
      ASSERT_TRUE(ended != -1 && WIFEXITED(ended)) << "call " << call << ": " << ended;
    }
    client.reset();
  }
}

INSTANTIATE_TEST_SUITE_P(Drivers, HostileTest,
                         testing::Values("server/worker/libfake_driver.so", "softgpu/libsoftgpu.so"));

}  // namespace
}  // namespace cuda_remote::server
