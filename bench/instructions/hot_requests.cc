// SPDX-License-Identifier: Apache-2.0
// What the worker does for each request of a launch or a record besides the driver's own work: the executor and its
// handlers, with a driver whose functions do nothing. No client: the requests are put into the ring beforehand.
//
// Usage: hot_requests [COUNT]    Prints one JSON object: for each kind of request the nanoseconds that one takes, of
// many (COUNT) that follow one another. Under callgrind (count.py), told to collect in Executor::Run, each kind is one
// dump, named after it, of kBlock requests.
#include <cuda.h>
#include <unistd.h>
#include <valgrind/callgrind.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "proto/base/clock.h"
#include "proto/channel/handshake.h"
#include "proto/channel/server_channel.h"
#include "proto/codec/codec.h"
#include "proto/frame/frame.h"
#include "proto/frame/handle.h"
#include "proto/ring/memory.h"
#include "proto/ring/ring.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/memory/staging.h"
#include "server/worker/session/executor.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::bench {
namespace {

using server::LoadedDriver;
using server::WorkerSession;

// Requests that are counted, under callgrind.
constexpr uint64_t kBlock = 256;
// The best of so many counts.
constexpr int kRounds = 30;

[[noreturn]] void Fail(const std::string& what) {
  fprintf(stderr, "hot_requests: %s\n", what.c_str());
  _exit(1);
}

// The driver's calls so far, and those between which the time is taken.
uint64_t g_calls, g_first, g_last;
int64_t g_started_ns, g_ended_ns;
ServerChannel* g_channel;

void Called() {
  if (++g_calls == g_first) {
    g_started_ns = NowNs();
  } else if (g_calls == g_last) {
    g_ended_ns = NowNs();
    g_channel->Stop();
  }
}

LoadedDriver NothingDriver() {
  LoadedDriver driver;
  driver.table.cuThreadExchangeStreamCaptureMode = [](CUstreamCaptureMode*) { return CUDA_SUCCESS; };
  driver.table.cuCtxSetCurrent = [](CUcontext) { return CUDA_SUCCESS; };
  driver.table.cuLaunchKernel = [](CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                   CUstream, void**, void**) {
    Called();
    return CUDA_SUCCESS;
  };
  driver.table.cuEventRecord = [](CUevent, CUstream) {
    Called();
    return CUDA_SUCCESS;
  };
  return driver;
}

struct Request {
  const char* name;
  uint32_t call;
  std::string message;
};

const uint64_t kContext = MakeHandle(Kind::kContext, 1, 0);
const uint64_t kStream = MakeHandle(Kind::kStream, 2, 0);
const uint64_t kEvent = MakeHandle(Kind::kEvent, 3, 0);
const uint64_t kFunction = MakeHandle(Kind::kFunction, 4, 0);

std::vector<Request> TheRequests() {
  std::vector<Request> all;
  wire::cuLaunchKernel_Request launch;
  launch.stream = kStream;
  launch.f = kFunction;
  launch.grid_x = launch.grid_y = launch.grid_z = launch.block_x = launch.block_y = launch.block_z = 1;
  all.push_back({"worker: launch, no arguments", kCall_cuLaunchKernel, ""});
  launch.Encode(&all.back().message);
  const std::string block(48, 'x');
  launch.params = block;
  all.push_back({"worker: launch, 8 arguments", kCall_cuLaunchKernel, ""});
  launch.Encode(&all.back().message);
  wire::cuEventRecord_Request record;
  record.hEvent = kEvent;
  record.hStream = kStream;
  all.push_back({"worker: event record", kCall_cuEventRecord, ""});
  record.Encode(&all.back().message);
  return all;
}

// Nanoseconds for one of `count` requests.
double Measure(const LoadedDriver& driver, const Request& request, uint64_t count) {
  int sockets[2];
  if (!SocketPair(sockets)) Fail("no socket pair");
  StatusOr<std::unique_ptr<ServerChannel>> made = ServerChannel::Create(UniqueFd(sockets[0]), Welcome(), nullptr);
  if (!made.ok()) Fail("no channel: " + made.status().message());
  const std::unique_ptr<ServerChannel> channel = *std::move(made);
  Packet welcome;
  if (ReceivePacket(sockets[1], &welcome, 1000) != ChannelStatus::kOk) Fail("no channel: its Welcome does not come");
  StatusOr<std::unique_ptr<ring::RingMemory>> mapped = ring::RingMemory::Map(std::move(welcome.fd));
  if (!mapped.ok()) Fail(mapped.status().message());
  const std::unique_ptr<ring::RingMemory> memory = *std::move(mapped);
  ring::RingWriter writer(memory.get(), ring::kRequestRing);
  server::StagingPool staging(driver.table);
  WorkerSession::Parts parts;
  parts.driver = &driver;
  parts.staging = &staging;
  parts.calls = server::CallsOf;
  parts.channel = channel.get();
  WorkerSession session(parts);
  session.BindContext(kContext, reinterpret_cast<CUcontext>(16), 0, true);
  session.Bind(Kind::kStream, kStream, 32, kContext);
  session.Bind(Kind::kEvent, kEvent, 48, kContext);
  session.Bind(Kind::kFunction, kFunction, 64, kContext);
  for (uint64_t i = 1; i <= 2 * count; ++i) {
    FrameHeader header;
    header.call = request.call;
    header.flags = kFlagNoReply;
    header.sequence = i;
    header.context_or_result = SlotOf(kContext);
    header.message_bytes = uint32_t(request.message.size());
    const uint64_t bytes = ring::FrameBytes(request.message.size(), 0);
    char* where;
    if (writer.Reserve(bytes, &where) != ring::RingStatus::kOk) Fail("more requests than there is room for");
    memcpy(where, &header, sizeof(header));
    memcpy(where + sizeof(header), request.message.data(), request.message.size());
    writer.Commit(bytes);
  }
  g_calls = 0;
  g_first = count;
  g_last = 2 * count;
  g_channel = channel.get();
  {
    server::Executor executor(&session, channel.get());
    const std::string why = executor.Run();
    if (g_calls != g_last) Fail(std::string(request.name) + ": the executor ended too early: " + why);
  }
  session.Stop();
  close(sockets[1]);
  return double(g_ended_ns - g_started_ns) / double(count);
}

int Main(int argc, char** argv) {
  const bool counting = RUNNING_ON_VALGRIND != 0;
  const uint64_t count = argc > 1 ? strtoull(argv[1], nullptr, 10) : counting ? kBlock / 2 : 5000;
  if (count == 0) Fail("COUNT must be a number");
  const LoadedDriver driver = NothingDriver();
  std::string out;
  for (const Request& request : TheRequests()) {
    double best = 0;
    for (int round = 0; round < (counting ? 1 : kRounds); ++round) {
      const double now = Measure(driver, request, count);
      if (best == 0 || now < best) best = now;
    }
    if (counting) CALLGRIND_DUMP_STATS_AT(request.name);
    out += (out.empty() ? "\"" : ", \"") + std::string(request.name) + "\": " + std::to_string(best);
  }
  printf("{\"block\": %d, \"nanoseconds\": {%s}}\n", int(kBlock), out.c_str());
  return 0;
}

}  // namespace
}  // namespace cuda_remote::bench

int main(int argc, char** argv) { return cuda_remote::bench::Main(argc, argv); }
