// SPDX-License-Identifier: Apache-2.0
// cr-worker from outside: a whole process with a small driver (testing/fake_driver.cc), driven over the session
// channel.

#include <cuda.h>
#include <gtest/gtest.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "proto/base/clock.h"
#include "proto/base/mappings.h"
#include "proto/codec/wire.h"
#include "proto/driverabi/export_tables.h"
#include "proto/mirror/mirror.h"
#include "server/worker/memory/device_arena.h"
#include "server/worker/memory/mapping_places.h"
#include "server/worker/testing/client.h"
#include "server/worker/testing/worker_process.h"

namespace cuda_remote::server {
namespace {

// Kernels and a variable that the test driver knows by name; a real one would compile them.
constexpr char kImage[] = R"(.version 7.0
.target sm_70
.address_size 64
.visible .global .align 4 .u32 counter;
.visible .entry say() { ret; }
)";

class WorkerTest : public testing::Test {
 protected:
  void SetUp() override { Start({}); }
  void Start(std::vector<std::string> more) {
    std::vector<std::string> arguments = {WorkerPath(), "--driver", DriverPath(), "--log-level", "warn"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    client_.reset();
    worker_ = std::make_unique<WorkerProcess>(arguments);
    ASSERT_EQ(worker_->ready().error, "");
    auto channel = worker_->Connect();
    ASSERT_TRUE(channel);
    client_ = std::make_unique<TestClient>(std::move(channel));
    TestClient::Printed().clear();
  }
  TestClient& client() { return *client_; }

  std::unique_ptr<WorkerProcess> worker_;
  std::unique_ptr<TestClient> client_;
};

std::string FillParams(uint64_t address, uint32_t value, uint32_t words) {
  std::string out(16, 0);
  memcpy(&out[0], &address, 8);
  memcpy(&out[8], &value, 4);
  memcpy(&out[12], &words, 4);
  return out;
}
std::string Number(uint32_t value) { return std::string(reinterpret_cast<char*>(&value), 4); }

TEST_F(WorkerTest, TellsWhatItHas) {
  EXPECT_EQ(worker_->ready().devices, 1u);
  ASSERT_EQ(client().Call(kOpSessionInfo, wire::OpSessionInfo_Request()), CUDA_SUCCESS);
  const auto info = client().Decode<wire::OpSessionInfo_Reply>();
  ASSERT_EQ(info.devices.size(), 1u);
  EXPECT_EQ(info.devices[0].name, "Fake GPU");
  EXPECT_EQ(info.devices[0].attributes.size(), size_t(CU_DEVICE_ATTRIBUTE_MAX));
  EXPECT_EQ(info.devices[0].attributes[CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS], 0);
  EXPECT_EQ(info.devices[0].attributes[CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK], 1024);
  EXPECT_EQ(info.driver_version, 13000);
  EXPECT_EQ(info.arena_base, kArenaBase);
  EXPECT_EQ(info.worker_pid, uint32_t(worker_->pid()));
  wire::OpPing_Request ping;
  ping.value = 77;
  ASSERT_EQ(client().Call(kOpPing, ping), CUDA_SUCCESS);
  EXPECT_EQ(client().Decode<wire::OpPing_Reply>().value, 77u);
}

TEST_F(WorkerTest, RefusesToStartWithoutADriver) {
  WorkerProcess broken({WorkerPath(), "--driver", "/nonexistent/libcuda.so", "--log-level", "off"});
  EXPECT_NE(broken.ready().error.find("/nonexistent/libcuda.so"), std::string::npos) << broken.ready().error;
  WorkerProcess other({WorkerPath(), "--driver", DriverPath(), "--gpu", "5", "--log-level", "off"});
  EXPECT_NE(other.ready().error.find("no GPU 5"), std::string::npos) << other.ready().error;
}

TEST_F(WorkerTest, CopiesAndKernels) {
  client().OpenContext();
  const uint64_t memory = client().Allocate(3 << 20);
  ASSERT_NE(memory, 0u);
  EXPECT_EQ(memory % DeviceArena::kPage, 0u);
  std::string bytes(2500000, 0);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = char(i * 7 + i / 1000);
  ASSERT_EQ(client().Write(memory, bytes), CUDA_SUCCESS);
  EXPECT_EQ(client().Read(memory, bytes.size()), bytes);
  const uint64_t module = client().LoadModule(kImage);
  const uint64_t fill = client().Function(module, "fill");
  ASSERT_NE(fill, 0u);
  const std::string params = FillParams(memory + 4, 0x01020304, 2);
  client().Send(kCall_cuLaunchKernel, client().Launch(fill, params));
  EXPECT_EQ(client().Read(memory, 16), bytes.substr(0, 4) + "\x04\x03\x02\x01\x04\x03\x02\x01" + bytes.substr(12, 4));
  // Device to device.
  wire::cuMemcpyAsync_Request copy;
  copy.dst = memory + 100;
  copy.src = memory + 4;
  copy.bytes = 4;
  EXPECT_EQ(client().Call(kCall_cuMemcpyAsync, copy), CUDA_SUCCESS);
  EXPECT_EQ(client().Read(memory + 100, 4), "\x04\x03\x02\x01");
  EXPECT_EQ(client().Free(memory), CUDA_SUCCESS);
  EXPECT_EQ(client().Free(memory), CUDA_ERROR_INVALID_VALUE);
}

// The driver may read a copy's source in the copy's turn, long after the executor has gone on and the channel's memory
// has other requests in it.
TEST_F(WorkerTest, PayloadsStayUntilTheGpuHasReadThem) {
  client().OpenContext();
  const uint64_t nap = client().Function(client().LoadModule(kImage), "nap");
  for (const size_t piece : {size_t{100}, size_t{10} << 10, size_t{40} << 10, size_t{512} << 10}) {
    // More than the channel holds.
    const size_t total = piece < 1000 ? size_t{4} << 20 : size_t{100} << 20, pieces = total / piece;
    const uint64_t memory = client().Allocate(total);
    for (size_t i = 0; i < pieces; ++i) {
      if (i % (pieces / 5) == 0) {
        const std::string params = Number(i == 0 ? 200 : 20);
        client().Send(kCall_cuLaunchKernel, client().Launch(nap, params));
      }
      wire::cuMemcpyHtoDAsync_v2_Request copy;
      copy.dst = memory + i * piece;
      copy.bytes = piece;
      client().Send(kCall_cuMemcpyHtoDAsync_v2, copy, std::string(piece, char(i)));
    }
    for (size_t i = 0; i < pieces; i += 1 + pieces / 400) {
      ASSERT_EQ(client().Read(memory + i * piece, piece), std::string(piece, char(i))) << i << " of " << piece;
    }
    ASSERT_EQ(client().Free(memory), CUDA_SUCCESS);
  }
  EXPECT_EQ(client().pending, CUDA_SUCCESS);
}

// What streams read from is settled before they are gone, or captured.
TEST_F(WorkerTest, PayloadsStayWhenTheirStreamIsDestroyed) {
  client().OpenContext();
  const uint64_t nap = client().Function(client().LoadModule(kImage), "nap");
  constexpr size_t kPiece = 30000, kPieces = 300;
  const uint64_t memory = client().Allocate(kPiece * kPieces);
  for (size_t i = 0; i < kPieces; ++i) {
    const uint64_t stream = client().Stream();
    ASSERT_NE(stream, 0u);
    const std::string params = Number(1);
    client().Send(kCall_cuLaunchKernel, client().Launch(nap, params, stream));
    wire::cuMemcpyHtoDAsync_v2_Request copy;
    copy.dst = memory + i * kPiece;
    copy.bytes = kPiece;
    copy.stream = stream;
    client().Send(kCall_cuMemcpyHtoDAsync_v2, copy, std::string(kPiece, char(i)));
    wire::cuStreamDestroy_v2_Request destroy;
    destroy.hStream = stream;
    ASSERT_EQ(client().Call(kCall_cuStreamDestroy_v2, destroy), CUDA_SUCCESS);
  }
  for (size_t i = 0; i < kPieces; ++i) {
    ASSERT_EQ(client().Read(memory + i * kPiece, kPiece), std::string(kPiece, char(i))) << i;
  }
  EXPECT_EQ(client().pending, CUDA_SUCCESS);
}

// A client that asks is answered once the worker has room for what comes next.
TEST_F(WorkerTest, AClientThatAsksWaitsForRoom) {
  client().OpenContext();
  const uint64_t nap = client().Function(client().LoadModule(kImage), "nap");
  const std::string params = Number(400);
  const uint64_t memory = client().Allocate(1 << 20);
  wire::cuMemcpyHtoDAsync_v2_Request copy;
  copy.dst = memory;
  copy.bytes = 1 << 20;
  copy.bounded = true;
  const std::string bytes(copy.bytes, 'x');
  wire::cuEventCreate_Request create;
  create.phEvent = client().NewHandle(Kind::kEvent);
  create.Flags = CU_EVENT_DISABLE_TIMING;
  ASSERT_EQ(client().Call(kCall_cuEventCreate, create), CUDA_SUCCESS);
  client().Send(kCall_cuLaunchKernel, client().Launch(nap, params));
  wire::cuEventRecord_Request behind_kernel;
  behind_kernel.hEvent = create.phEvent;
  client().Send(kCall_cuEventRecord, behind_kernel);
  constexpr uint64_t kPlenty = 256 << 20;  // uploads.h
  for (size_t i = 0; i < kPlenty / copy.bytes + 1; ++i) {
    copy.bounded = false;
    client().Send(kCall_cuMemcpyHtoDAsync_v2, copy, bytes);
  }
  copy.bounded = true;
  ASSERT_EQ(client().Call(kCall_cuMemcpyHtoDAsync_v2, copy, bytes), CUDA_SUCCESS);
  // There is room only when copies behind the kernel are done; the last of them need not be.
  wire::cuEventQuery_Request query;
  query.hEvent = create.phEvent;
  EXPECT_EQ(client().Call(kCall_cuEventQuery, query), CUDA_SUCCESS);
}

TEST_F(WorkerTest, RectanglesTravelPacked) {
  client().OpenContext();
  const uint64_t memory = client().Allocate(4096);
  ASSERT_EQ(client().Write(memory, std::string(4096, '.')), CUDA_SUCCESS);
  CUDA_MEMCPY2D copy = {};
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcPitch = copy.WidthInBytes = 3;
  copy.Height = 2;
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = memory;
  copy.dstPitch = 64;
  copy.dstXInBytes = 1;
  copy.dstY = 1;
  wire::cuMemcpy2DAsync_v2_Request in;
  in.copy = std::string_view(reinterpret_cast<char*>(&copy), sizeof copy);
  in.src_is_payload = in.blocking = true;
  ASSERT_EQ(client().Call(kCall_cuMemcpy2DAsync_v2, in, "abcdef"), CUDA_SUCCESS);
  EXPECT_EQ(client().Read(memory + 64, 5), ".abc.");
  EXPECT_EQ(client().Read(memory + 128, 5), ".def.");
  CUDA_MEMCPY2D back = {};
  back.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  back.srcDevice = memory;
  back.srcPitch = 64;
  back.srcXInBytes = back.srcY = 1;
  back.dstMemoryType = CU_MEMORYTYPE_HOST;
  back.dstPitch = back.WidthInBytes = 3;
  back.Height = 2;
  in.copy = std::string_view(reinterpret_cast<char*>(&back), sizeof back);
  in.src_is_payload = false;
  in.dst_is_payload = true;
  char out[6];
  ASSERT_EQ(client().Call(kCall_cuMemcpy2DAsync_v2, in, {}, out, sizeof out), CUDA_SUCCESS);
  EXPECT_EQ(std::string(out, 6), "abcdef");
}

TEST_F(WorkerTest, CopiesOutsideOwnMemoryAreRefused) {
  client().OpenContext();
  const uint64_t memory = client().Allocate(4096);
  EXPECT_EQ(client().Write(memory + 4090, "1234567"), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(client().Write(memory + 4096, "1"), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(client().Write(memory - 1, "12"), CUDA_ERROR_INVALID_VALUE);
  client().Read(0x400000, 16);
  EXPECT_EQ(client().last, CUDA_ERROR_INVALID_VALUE);
  wire::cuMemcpyHtoDAsync_v2_Request pinned;
  pinned.dst = memory;
  pinned.src = 0x400000;  // this process's own code, maybe
  pinned.bytes = 16;
  EXPECT_EQ(client().Call(kCall_cuMemcpyHtoDAsync_v2, pinned), CUDA_ERROR_INVALID_VALUE);
  wire::cuMemcpyAsync_Request copy;
  copy.dst = memory;
  copy.src = ~uint64_t(0) - 4;
  copy.bytes = 16;
  EXPECT_EQ(client().Call(kCall_cuMemcpyAsync, copy), CUDA_ERROR_INVALID_VALUE);
  copy.src = memory;
  copy.bytes = ~uint64_t(0);
  EXPECT_EQ(client().Call(kCall_cuMemcpyAsync, copy), CUDA_ERROR_INVALID_VALUE);
  // A rectangle whose last row is outside, and one whose numbers overflow.
  CUDA_MEMCPY2D shape = {};
  shape.srcMemoryType = shape.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  shape.srcDevice = shape.dstDevice = memory;
  shape.srcPitch = shape.dstPitch = 1024;
  shape.WidthInBytes = 16;
  shape.Height = 5;
  wire::cuMemcpy2DAsync_v2_Request in;
  in.copy = std::string_view(reinterpret_cast<char*>(&shape), sizeof shape);
  EXPECT_EQ(client().Call(kCall_cuMemcpy2DAsync_v2, in), CUDA_ERROR_INVALID_VALUE);
  shape.Height = 4;
  EXPECT_EQ(client().Call(kCall_cuMemcpy2DAsync_v2, in), CUDA_SUCCESS);
  shape.dstY = uint64_t(1) << 62;
  EXPECT_EQ(client().Call(kCall_cuMemcpy2DAsync_v2, in), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(WorkerTest, HandlesThatNobodyGaveOut) {
  client().OpenContext();
  wire::cuStreamSynchronize_Request stream;
  stream.hStream = MakeHandle(Kind::kStream, 99, 0);
  EXPECT_EQ(client().Call(kCall_cuStreamSynchronize, stream), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(client().Call(kCall_cuLaunchKernel, client().Launch(0x1234, {})), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(client().Call(kCall_cuCtxDestroy_v2, wire::cuCtxDestroy_v2_Request()), CUDA_ERROR_INVALID_CONTEXT);
  client().context_slot = 4711;
  EXPECT_EQ(client().Synchronize(), CUDA_ERROR_CONTEXT_IS_DESTROYED);
  EXPECT_EQ(client().Raw(0xfffff, {}), CUDA_ERROR_NOT_SUPPORTED);
}

// Where the driver's own mapping lies (fake_driver.cc), as /proc says it.
uint64_t DriverMapping(pid_t worker) {
  uint64_t address = 0;
  ForEachMapping("/proc/" + std::to_string(worker), [&](const Mapping& mapping) {
    if (mapping.name.find("memfd:fake-driver") != std::string::npos) address = mapping.begin;
    return address == 0;
  });
  return address;
}

TEST_F(WorkerTest, MappingsOfTheDriversLieApart) {
  WorkerProcess worker({WorkerPath(), "--driver", DriverPath(), "--log-level", "warn"});
  ASSERT_EQ(worker.ready().error, "");
  const std::unique_ptr<ClientChannel> channel = worker.Connect();
  ASSERT_TRUE(channel);
  const uint64_t address = DriverMapping(worker.pid());
  ASSERT_NE(address, 0u);
  EXPECT_LT(address - kMappingPlaces.begin, kMappingPlaces.bytes) << std::hex << address;
}

TEST_F(WorkerTest, FailuresThatNobodyWaitedForComeWithTheNextReply) {
  client().OpenContext();
  const uint64_t module = client().LoadModule(kImage);
  auto launch = client().Launch(client().Function(module, "say"), {});
  launch.grid_x = 0;
  client().Send(kCall_cuLaunchKernel, launch);
  EXPECT_EQ(client().Synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(client().pending, CUDA_ERROR_INVALID_VALUE);
  client().pending = CUDA_SUCCESS;
  EXPECT_EQ(client().Synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(client().pending, CUDA_SUCCESS);
}

TEST_F(WorkerTest, DeviceOutputComesBeforeTheReply) {
  client().OpenContext();
  const uint64_t say = client().Function(client().LoadModule(kImage), "say");
  for (int i = 0; i < 3; ++i) client().Send(kCall_cuLaunchKernel, client().Launch(say, {}));
  ASSERT_EQ(client().Synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(TestClient::Printed(), "hello from the GPU\nhello from the GPU\nhello from the GPU\n");
  client().Send(kCall_cuLaunchKernel, client().Launch(say, {}));
  const uint64_t memory = client().Allocate(16);
  TestClient::Printed().clear();
  client().Read(memory, 16);
  EXPECT_EQ(TestClient::Printed(), "hello from the GPU\n");
}

TEST_F(WorkerTest, AWaitDoesNotHoldUpOthers) {
  client().OpenContext();
  const uint64_t nap = client().Function(client().LoadModule(kImage), "nap");
  const std::string params = Number(300);
  client().Send(kCall_cuLaunchKernel, client().Launch(nap, params));
  FrameHeader header;
  header.call = kCall_cuCtxSynchronize;
  header.context_or_result = client().context_slot;
  std::string message;
  const uint64_t wait = client().channel().Begin(header, message, {}, nullptr, 0);
  const auto start = Now();
  EXPECT_EQ(client().Call(kOpPing, wire::OpPing_Request()), CUDA_SUCCESS);
  EXPECT_LT(Now() - start, std::chrono::milliseconds(150));
  Reply reply;
  EXPECT_EQ(client().channel().Wait(wait, &reply), ChannelStatus::kOk);
  EXPECT_EQ(reply.result, 0u);
  EXPECT_GE(Now() - start, std::chrono::milliseconds(200));
}

// Runs the client's half of host functions.
class HostFunctionThread {
 public:
  // `body`: what the functions do after the delay.
  HostFunctionThread(ClientChannel* channel, int delay_ms, std::function<void()> body = nullptr)
      : thread_([this, channel, delay_ms, body = std::move(body)] {
          FrameHeader header;
          std::string message;
          while (!stop_) {
            if (channel->ReadEvent(&header, &message, 20) != ChannelStatus::kOk) continue;
            wire::OpHostFunc_Request event;
            if (header.call != kOpHostFunc || !event.Decode(message)) continue;
            std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
            if (body) body();
            ++runs;
            wire::OpHostFuncDone_Request done;
            done.id = event.id;
            done.turn = event.turn;
            std::string bytes;
            done.Encode(&bytes);
            FrameHeader request;
            request.call = kOpHostFuncDone;
            channel->Send(request, bytes, {});
          }
        }) {}
  ~HostFunctionThread() {
    stop_ = true;
    thread_.join();
  }
  std::atomic<int> runs{0};

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

TEST_F(WorkerTest, HostFunctionsRunInTheirTurn) {
  client().OpenContext();
  HostFunctionThread functions(&client().channel(), 30);
  const uint64_t stream = client().Stream();
  for (uint64_t id = 1; id <= 3; ++id) {
    wire::OpLaunchHostFunc_Request in;
    in.stream = stream;
    in.id = id;
    in.callback = id == 2;
    ASSERT_EQ(client().Call(kOpLaunchHostFunc, in), CUDA_SUCCESS);
  }
  EXPECT_EQ(client().Synchronize(), CUDA_SUCCESS);
  EXPECT_EQ(functions.runs, 3);
}

// The driver takes 16 operations and then blocks; the answer to the host function comes after 200 launches more.
TEST_F(WorkerTest, AFullStreamBehindAHostFunctionDoesNotDeadlock) {
  client().OpenContext();
  HostFunctionThread functions(&client().channel(), 200);
  constexpr uint32_t kPieces = 200;
  constexpr size_t kPiece = 64 << 10;
  const uint64_t memory = client().Allocate(kPieces * kPiece);
  const uint64_t counter = client().Allocate(4096);
  const uint64_t fill = client().Function(client().LoadModule(kImage), "fill");
  wire::OpLaunchHostFunc_Request in;
  in.id = 5;
  ASSERT_EQ(client().Call(kOpLaunchHostFunc, in), CUDA_SUCCESS);
  for (uint32_t i = 0; i < kPieces; ++i) {
    const std::string params = FillParams(counter, i, 1);
    client().Send(kCall_cuLaunchKernel, client().Launch(fill, params));
    wire::cuMemcpyHtoDAsync_v2_Request copy;
    copy.dst = memory + i * kPiece;
    copy.bytes = kPiece;
    client().Send(kCall_cuMemcpyHtoDAsync_v2, copy, std::string(kPiece, char(i)));
  }
  EXPECT_EQ(client().Read(counter, 4), Number(kPieces - 1));
  for (uint32_t i = 0; i < kPieces; ++i) {
    ASSERT_EQ(client().Read(memory + i * kPiece, kPiece), std::string(kPiece, char(i))) << i;
  }
  EXPECT_EQ(functions.runs, 1);
}

TEST_F(WorkerTest, PinnedMemoryIsShared) {
  client().OpenContext();
  constexpr uint64_t kAddress = driverabi::kHostBase, kBytes = 1 << 20;
  const int fd = memfd_create("pinned", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(fd, kBytes), 0);
  char* const memory = static_cast<char*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  memcpy(memory, "pinned bytes", 12);
  ASSERT_EQ(client().channel().SendFd(3, fd), ChannelStatus::kOk);
  wire::OpHostMap_Request map;
  map.tag = 3;
  map.address = kAddress;
  map.bytes = kBytes;
  ASSERT_EQ(client().Call(kOpHostMap, map), CUDA_SUCCESS);
  EXPECT_EQ(client().Decode<wire::OpHostMap_Reply>().device_pointer, kAddress);
  const uint64_t device = client().Allocate(4096);
  wire::cuMemcpyAsync_Request copy;
  copy.dst = device;
  copy.src = kAddress;
  copy.bytes = 12;
  EXPECT_EQ(client().Call(kCall_cuMemcpyAsync, copy), CUDA_SUCCESS);
  EXPECT_EQ(client().Read(device, 12), "pinned bytes");
  copy.dst = kAddress + 100;
  copy.src = device;
  copy.blocking = true;
  EXPECT_EQ(client().Call(kCall_cuMemcpyAsync, copy), CUDA_SUCCESS);
  EXPECT_EQ(std::string(memory + 100, 12), "pinned bytes");
  copy.dst = kAddress + kBytes - 4;
  EXPECT_EQ(client().Call(kCall_cuMemcpyAsync, copy), CUDA_ERROR_INVALID_VALUE);
  // Over a mapping that is there already, beyond the file, and without a descriptor.
  ASSERT_EQ(client().channel().SendFd(4, fd), ChannelStatus::kOk);
  map.tag = 4;
  EXPECT_EQ(client().Call(kOpHostMap, map), CUDA_ERROR_OUT_OF_MEMORY);
  ASSERT_EQ(client().channel().SendFd(5, fd), ChannelStatus::kOk);
  map.tag = 5;
  map.address = kAddress + (1 << 30);
  map.offset = 4096;
  EXPECT_EQ(client().Call(kOpHostMap, map), CUDA_ERROR_OUT_OF_MEMORY);
  wire::OpHostUnmap_Request unmap;
  unmap.address = kAddress;
  EXPECT_EQ(client().Call(kOpHostUnmap, unmap), CUDA_SUCCESS);
  EXPECT_EQ(client().Call(kOpHostUnmap, unmap), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(client().Call(kCall_cuMemcpyAsync, copy), CUDA_ERROR_INVALID_VALUE);
  munmap(memory, kBytes);
  close(fd);
}

// The program registers memory of its own: two registrations that meet in the middle of a page of a file.
TEST_F(WorkerTest, RegisteredPagesLieWhereTheProgramHasThem) {
  client().OpenContext();
  constexpr uint64_t kPage = 4096;
  const int fd = memfd_create("registered", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(fd, 4 * kPage), 0);
  char* const memory = static_cast<char*>(mmap(nullptr, 4 * kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  const auto start = reinterpret_cast<uint64_t>(memory);
  uint64_t tag = 10;
  const auto map = [&](uint64_t page, uint64_t pages, uint64_t registered, uint64_t bytes, bool own = false) {
    wire::OpHostMap_Request in;
    in.pages = true;
    in.address = start + page * kPage;
    in.bytes = pages * kPage;
    in.offset = page * kPage;
    in.registered = registered == 0 ? 0 : start + registered;
    in.registered_bytes = bytes;
    if (!own && pages != 0) {
      in.tag = tag++;
      EXPECT_EQ(client().channel().SendFd(in.tag, fd), ChannelStatus::kOk);
    }
    return client().Call(kOpHostMap, in);
  };
  const auto unmap = [&](uint64_t registered, uint64_t page, uint64_t pages) {
    wire::OpHostUnmap_Request in;
    in.address = registered == 0 ? 0 : start + registered;
    in.pages = start + page * kPage;
    in.page_bytes = pages * kPage;
    return client().Call(kOpHostUnmap, in);
  };
  const uint64_t device = client().Allocate(4 * kPage);
  const auto fill = [&](uint64_t from, uint64_t bytes, char value) {
    client().Write(device, std::string(bytes, value));
    wire::cuMemcpyAsync_Request in;
    in.dst = start + from;
    in.src = device;
    in.bytes = bytes;
    in.blocking = true;
    return client().Call(kCall_cuMemcpyAsync, in);
  };
  EXPECT_EQ(map(0, 0, 100, 10), CUDA_ERROR_ALREADY_MAPPED) << "no page is there";
  ASSERT_EQ(map(0, 2, 100, kPage), CUDA_SUCCESS);
  EXPECT_EQ(fill(100, kPage, 'a'), CUDA_SUCCESS) << "the program's address";
  EXPECT_EQ(memory[100], 'a');
  EXPECT_EQ(memory[kPage + 99], 'a');
  EXPECT_EQ(fill(99, 1, 'b'), CUDA_ERROR_INVALID_VALUE) << "on the page, but not registered";
  EXPECT_EQ(map(1, 1, 0, 0), CUDA_ERROR_ALREADY_MAPPED) << "the page is there";
  EXPECT_EQ(map(2, 2, kPage + 99, kPage), CUDA_ERROR_ALREADY_MAPPED) << "overlaps";
  ASSERT_EQ(map(2, 2, kPage + 100, 2 * kPage), CUDA_SUCCESS) << "nothing is left of what failed";
  EXPECT_EQ(fill(kPage + 100, 2 * kPage, 'c'), CUDA_SUCCESS);
  EXPECT_EQ(memory[kPage + 99], 'a');
  EXPECT_EQ(memory[3 * kPage + 99], 'c');
  // The page that both have stays with the second.
  ASSERT_EQ(unmap(100, 0, 1), CUDA_SUCCESS);
  EXPECT_EQ(fill(100, 1, 'd'), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(fill(kPage + 100, 1, 'd'), CUDA_SUCCESS);
  EXPECT_EQ(memory[kPage + 100], 'd');
  ASSERT_EQ(unmap(kPage + 100, 1, 3), CUDA_SUCCESS);

  // Memory of the worker's own is zero, also where another registration was on the same page.
  ASSERT_EQ(map(0, 2, 100, kPage, true), CUDA_SUCCESS);
  ASSERT_EQ(map(2, 1, kPage + 100, kPage, true), CUDA_SUCCESS);
  EXPECT_EQ(fill(100, kPage, 'e'), CUDA_SUCCESS);
  ASSERT_EQ(unmap(100, 0, 1), CUDA_SUCCESS);
  ASSERT_EQ(map(0, 1, 100, kPage, true), CUDA_SUCCESS);
  wire::cuMemcpyAsync_Request copy;
  copy.dst = device;
  copy.src = start + kPage;
  copy.bytes = 100;
  EXPECT_EQ(client().Call(kCall_cuMemcpyAsync, copy), CUDA_SUCCESS);
  EXPECT_EQ(client().Read(device, 100), std::string(100, 0));
  EXPECT_EQ(memory[100], 'a') << "the program's pages are apart";

  // Where the worker has something itself, or will have.
  wire::OpHostMap_Request in;
  in.pages = true;
  in.address = 0x7fffffff0000;
  in.bytes = kPage;
  EXPECT_EQ(client().Call(kOpHostMap, in), CUDA_ERROR_ALREADY_MAPPED);
  in.address = driverabi::kArenaBase;
  EXPECT_EQ(client().Call(kOpHostMap, in), CUDA_ERROR_ALREADY_MAPPED);
  munmap(memory, 4 * kPage);
  close(fd);
}

// The host function that the full stream waits for asks for memory that it shares with the GPU, and changes it.
TEST_F(WorkerTest, AHostFunctionGetsItsMemoryFromAStuckServer) {
  client().OpenContext();
  constexpr uint64_t kAddress = driverabi::kHostBase;
  wire::OpHostMap_Request map;
  map.address = kAddress;
  map.bytes = 4096;
  ASSERT_EQ(client().Call(kOpHostMap, map), CUDA_SUCCESS);
  wire::OpMirrorAdd_Request add;
  add.address = kAddress;
  add.bytes = 4096;
  ASSERT_EQ(client().Call(kOpMirrorAdd, add), CUDA_SUCCESS);
  const uint64_t device = client().Allocate(4096);
  client().Write(device, "by the GPU");
  ClientChannel* const channel = &client().channel();
  std::string seen;
  HostFunctionThread functions(channel, 200, [&] {
    std::string changes(mirror::kMostRuns, 0), message, runs;
    FrameHeader read, write;
    read.call = kOpMirrorRead;
    write.call = kOpMirrorWrite;
    Reply reply;
    if (channel->Call(read, message, {}, &changes[0], changes.size(), &reply) != ChannelStatus::kOk) return;
    mirror::ForEachRun({changes.data(), reply.payload_bytes}, [&](uint64_t, std::string_view bytes) {
      seen = std::string(bytes);
      return true;
    });
    mirror::AppendRun(kAddress + 100, "by the host", 11, &runs);
    channel->Send(write, {}, runs);
  });
  wire::cuMemcpyAsync_Request copy;
  copy.dst = kAddress;
  copy.src = device;
  copy.bytes = 10;
  client().Send(kCall_cuMemcpyAsync, copy);
  wire::OpLaunchHostFunc_Request in;
  in.id = 5;
  ASSERT_EQ(client().Call(kOpLaunchHostFunc, in), CUDA_SUCCESS);
  copy.dst = device + 1000;
  copy.src = kAddress + 100;
  copy.bytes = 11;
  for (int i = 0; i < 200; ++i) client().Send(kCall_cuMemcpyAsync, copy);
  EXPECT_EQ(client().Read(device + 1000, 11), "by the host");
  EXPECT_EQ(functions.runs, 1);
  EXPECT_EQ(seen, "by the GPU");
}

// Pinned memory of a client that cannot share it: the worker has bytes of its own, and both tell each other what
// changes.
TEST_F(WorkerTest, MemoryOfItsOwnIsMirrored) {
  client().OpenContext();
  constexpr uint64_t kAddress = driverabi::kHostBase, kStart = kAddress + 100, kBytes = 5000;
  wire::OpHostMap_Request map;
  map.address = kAddress;
  map.bytes = 8192;
  ASSERT_EQ(client().Call(kOpHostMap, map), CUDA_SUCCESS);
  wire::OpMirrorAdd_Request add;
  add.address = kStart;
  add.bytes = kBytes;
  EXPECT_EQ(client().Call(kOpMirrorAdd, add), CUDA_SUCCESS);
  add.bytes = 8192;
  EXPECT_EQ(client().Call(kOpMirrorAdd, add), CUDA_ERROR_INVALID_VALUE);
  add.address = kAddress + 8192;
  add.bytes = 1;
  EXPECT_EQ(client().Call(kOpMirrorAdd, add), CUDA_ERROR_INVALID_VALUE);
  add.address = client().Allocate(4096);
  EXPECT_EQ(client().Call(kOpMirrorAdd, add), CUDA_ERROR_INVALID_VALUE);

  // From the client to the GPU.
  std::string runs;
  mirror::AppendRun(kStart, "from the client", 15, &runs);
  ASSERT_EQ(client().Call(kOpMirrorWrite, wire::OpMirrorWrite_Request(), runs), CUDA_SUCCESS);
  const uint64_t device = client().Allocate(4096);
  wire::cuMemcpyAsync_Request copy;
  copy.dst = device;
  copy.src = kStart;
  copy.bytes = 15;
  EXPECT_EQ(client().Call(kCall_cuMemcpyAsync, copy), CUDA_SUCCESS);
  EXPECT_EQ(client().Read(device, 15), "from the client");

  // And back: what the client sent is known to it and does not return.
  client().Write(device, "by the GPU");
  copy.dst = kStart + kBytes - 10;
  copy.src = device;
  copy.bytes = 10;
  copy.blocking = true;
  EXPECT_EQ(client().Call(kCall_cuMemcpyAsync, copy), CUDA_SUCCESS);
  std::string changes(mirror::kMostRuns, 0);
  ASSERT_EQ(client().Call(kOpMirrorRead, wire::OpMirrorRead_Request(), {}, &changes[0], changes.size()), CUDA_SUCCESS);
  changes.resize(client().reply.payload_bytes);
  int seen = 0;
  EXPECT_TRUE(mirror::ForEachRun(changes, [&seen](uint64_t address, std::string_view bytes) {
    EXPECT_EQ(address, kStart + kBytes - 10);
    EXPECT_EQ(bytes, "by the GPU");
    ++seen;
    return true;
  }));
  EXPECT_EQ(seen, 1);

  wire::OpHostUnmap_Request unmap;
  unmap.address = kAddress;
  EXPECT_EQ(client().Call(kOpHostUnmap, unmap), CUDA_SUCCESS);
  ASSERT_EQ(client().Call(kOpMirrorRead, wire::OpMirrorRead_Request(), {}, &changes[0], changes.size()), CUDA_SUCCESS);
  EXPECT_EQ(client().reply.payload_bytes, 0u);
  add.address = kStart;
  add.bytes = kBytes;
  EXPECT_EQ(client().Call(kOpMirrorAdd, add), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(WorkerTest, StreamOrderedMemoryComesBackInItsStream) {
  client().OpenContext();
  const uint64_t stream = client().Stream();
  wire::OpMemAlloc_Request in;
  in.bytes = 5 << 20;
  in.flags = 1;
  in.stream = stream;
  ASSERT_EQ(client().Call(kOpMemAlloc, in), CUDA_SUCCESS);
  const uint64_t address = client().Decode<wire::OpMemAlloc_Reply>().address;
  wire::OpMemFree_Request free;
  free.address = address;
  free.stream = stream;
  free.stream_ordered = true;
  ASSERT_EQ(client().Call(kOpMemFree, free), CUDA_SUCCESS);
  EXPECT_EQ(client().Call(kOpMemFree, free), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(client().Call(kOpMemAlloc, in), CUDA_SUCCESS);
  EXPECT_EQ(client().Decode<wire::OpMemAlloc_Reply>().address, address);
}

TEST_F(WorkerTest, PitchedMemory) {
  client().OpenContext();
  wire::OpMemAlloc_Request in;
  in.pitch_width = 1000;
  in.pitch_height = 10;
  ASSERT_EQ(client().Call(kOpMemAlloc, in), CUDA_SUCCESS);
  const auto out = client().Decode<wire::OpMemAlloc_Reply>();
  EXPECT_EQ(out.pitch, 1024u);
  EXPECT_EQ(out.bytes, 10240u);
  in.pitch_height = uint64_t(1) << 40;
  in.pitch_width = uint64_t(1) << 40;
  EXPECT_EQ(client().Call(kOpMemAlloc, in), CUDA_ERROR_OUT_OF_MEMORY);
}

TEST_F(WorkerTest, TheMemoryLimitIsTheSessionsMemory) {
  Start({"--memory-limit", std::to_string(16 << 20)});
  client().OpenContext();
  EXPECT_NE(client().Allocate(8 << 20), 0u);
  EXPECT_EQ(client().Allocate(16 << 20), 0u);
  EXPECT_EQ(client().last, CUDA_ERROR_OUT_OF_MEMORY);
  ASSERT_EQ(client().Call(kCall_cuMemGetInfo_v2, wire::cuMemGetInfo_v2_Request()), CUDA_SUCCESS);
  const auto info = client().Decode<wire::cuMemGetInfo_v2_Reply>();
  EXPECT_EQ(info.total, 16u << 20);
  EXPECT_EQ(info.free, 8u << 20);
}

TEST_F(WorkerTest, ArraysCountAgainstTheMemoryLimit) {
  Start({"--memory-limit", std::to_string(16 << 20)});
  client().OpenContext();
  const auto create = [this](uint64_t width, uint64_t height, uint64_t* handle) {
    CUDA_ARRAY_DESCRIPTOR descriptor = {width, height, CU_AD_FORMAT_FLOAT, 4};
    wire::cuArrayCreate_v2_Request in;
    in.pHandle = *handle = client().NewHandle(Kind::kArray);
    in.pAllocateArray = wire::BytesOf(descriptor);
    return client().Call(kCall_cuArrayCreate_v2, in);
  };
  uint64_t first = 0, second = 0;
  ASSERT_EQ(create(1024, 512, &first), CUDA_SUCCESS);  // 8 MiB
  EXPECT_EQ(create(1024, 768, &second), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(client().Allocate(12 << 20), 0u);
  EXPECT_EQ(client().last, CUDA_ERROR_OUT_OF_MEMORY);
  ASSERT_EQ(client().Call(kCall_cuMemGetInfo_v2, wire::cuMemGetInfo_v2_Request()), CUDA_SUCCESS);
  EXPECT_EQ(client().Decode<wire::cuMemGetInfo_v2_Reply>().free, 8u << 20);
  // What the driver refuses costs nothing.
  EXPECT_EQ(create(1 << 18, 1, &second), CUDA_ERROR_INVALID_VALUE);

  // Memory that was freed and is kept makes room.
  const uint64_t memory = client().Allocate(8 << 20);
  ASSERT_NE(memory, 0u);
  ASSERT_EQ(client().Free(memory), CUDA_SUCCESS);
  CUDA_ARRAY3D_DESCRIPTOR cube = {256, 256, 0, CU_AD_FORMAT_FLOAT, 4, 0};
  wire::cuMipmappedArrayCreate_Request levels;
  levels.pHandle = client().NewHandle(Kind::kMipmappedArray);
  cube.Depth = 6, cube.Flags = CUDA_ARRAY3D_CUBEMAP;  // six faces of 1 MiB, and a third more for the levels: 8 MiB
  levels.pMipmappedArrayDesc = wire::BytesOf(cube);
  levels.numMipmapLevels = 9;
  ASSERT_EQ(client().Call(kCall_cuMipmappedArrayCreate, levels), CUDA_SUCCESS);
  wire::cuArray3DCreate_v2_Request solid;
  cube = {64, 64, 64, CU_AD_FORMAT_UNSIGNED_INT8, 1, 0};  // 256 KiB
  solid.pHandle = client().NewHandle(Kind::kArray);
  solid.pAllocateArray = wire::BytesOf(cube);
  EXPECT_EQ(client().Call(kCall_cuArray3DCreate_v2, solid), CUDA_ERROR_OUT_OF_MEMORY);

  wire::cuMipmappedArrayDestroy_Request destroy_levels;
  destroy_levels.hMipmappedArray = levels.pHandle;
  ASSERT_EQ(client().Call(kCall_cuMipmappedArrayDestroy, destroy_levels), CUDA_SUCCESS);
  EXPECT_EQ(client().Call(kCall_cuArray3DCreate_v2, solid), CUDA_SUCCESS);
  for (const uint64_t array : {first, solid.pHandle}) {
    wire::cuArrayDestroy_Request destroy;
    destroy.hArray = array;
    ASSERT_EQ(client().Call(kCall_cuArrayDestroy, destroy), CUDA_SUCCESS);
  }
  EXPECT_NE(client().Allocate(16 << 20), 0u);
}

TEST_F(WorkerTest, VariablesOfModulesCountAgainstTheMemoryLimit) {
  Start({"--memory-limit", std::to_string(16 << 20)});
  client().OpenContext();
  const auto image = [](int bytes) {
    return ".version 7.0\n.target sm_75\n.address_size 64\n.visible .global .align 8 .b8 big[" + std::to_string(bytes) +
           "];\n";
  };
  const uint64_t module = client().LoadModule(image(10 << 20));
  ASSERT_NE(module, 0u);
  EXPECT_EQ(client().LoadModule(image(7 << 20)), 0u);
  EXPECT_EQ(client().last, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(client().Allocate(8 << 20), 0u);
  wire::cuLibraryLoadData_Request library;
  library.library = client().NewHandle(Kind::kLibrary);
  EXPECT_EQ(client().Call(kCall_cuLibraryLoadData, library, image(7 << 20)), CUDA_ERROR_OUT_OF_MEMORY);
  ASSERT_EQ(client().Call(kCall_cuLibraryLoadData, library, image(5 << 20)), CUDA_SUCCESS);
  wire::cuModuleUnload_Request unload;
  unload.hmod = module;
  ASSERT_EQ(client().Call(kCall_cuModuleUnload, unload), CUDA_SUCCESS);
  EXPECT_NE(client().Allocate(10 << 20), 0u);
}

TEST_F(WorkerTest, ContextsTakeTheirMemoryAlong) {
  wire::cuCtxCreate_v4_Request create;
  create.context = client().NewHandle(Kind::kContext);
  ASSERT_EQ(client().Call(kCall_cuCtxCreate_v4, create), CUDA_SUCCESS);
  client().context_slot = SlotOf(create.context);
  const uint64_t memory = client().Allocate(64 << 20);
  ASSERT_NE(memory, 0u);
  wire::cuCtxDestroy_v2_Request destroy;
  destroy.context = create.context;
  client().context_slot = 0;
  ASSERT_EQ(client().Call(kCall_cuCtxDestroy_v2, destroy), CUDA_SUCCESS);
  EXPECT_EQ(client().Call(kCall_cuCtxDestroy_v2, destroy), CUDA_ERROR_INVALID_CONTEXT);
  client().OpenContext();
  client().Read(memory, 16);
  EXPECT_EQ(client().last, CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(client().Allocate(64 << 20), memory);
}

TEST_F(WorkerTest, MemoryOfAPoolOutlivesItsContext) {
  const uint64_t primary = client().OpenContext();
  wire::cuCtxCreate_v4_Request create;
  create.context = client().NewHandle(Kind::kContext);
  ASSERT_EQ(client().Call(kCall_cuCtxCreate_v4, create), CUDA_SUCCESS);
  client().context_slot = SlotOf(create.context);
  wire::OpMemAlloc_Request in;
  in.bytes = 5000;
  in.flags = 1;  // stream-ordered
  ASSERT_EQ(client().Call(kOpMemAlloc, in), CUDA_SUCCESS);
  const uint64_t memory = client().Decode<wire::OpMemAlloc_Reply>().address;
  ASSERT_EQ(client().Write(memory, "contents"), CUDA_SUCCESS);
  wire::cuCtxDestroy_v2_Request destroy;
  destroy.context = create.context;
  client().context_slot = SlotOf(primary);
  ASSERT_EQ(client().Call(kCall_cuCtxDestroy_v2, destroy), CUDA_SUCCESS);
  EXPECT_EQ(client().Read(memory, 8), "contents");
  // It is listed with a context that is there, and without one if there is none.
  const auto list = [this] {
    EXPECT_EQ(client().Call(kOpRegions, wire::OpRegions_Request()), CUDA_SUCCESS);
    return client().Decode<wire::OpRegions_Reply>();
  };
  const wire::OpRegions_Reply listed = list();
  ASSERT_EQ(listed.regions.size(), 1u);
  EXPECT_TRUE(listed.refusals.empty());
  EXPECT_EQ(listed.regions[0].address, memory);
  EXPECT_EQ(listed.regions[0].context, primary);
  wire::cuDevicePrimaryCtxRelease_v2_Request release;
  release.context = primary;
  client().context_slot = 0;
  ASSERT_EQ(client().Call(kCall_cuDevicePrimaryCtxRelease_v2, release), CUDA_SUCCESS);
  const wire::OpRegions_Reply left = list();
  ASSERT_EQ(left.regions.size(), 1u);
  EXPECT_EQ(left.regions[0].context, 0u);
  ASSERT_EQ(left.refusals.size(), 1u);
  EXPECT_NE(left.refusals[0].find("no context"), std::string::npos) << left.refusals[0];
  ASSERT_EQ(client().Free(memory), CUDA_SUCCESS);
  EXPECT_TRUE(list().refusals.empty());
  // A replay allocates it again before there is any context, and the stream may be gone.
  client().flags = kFlagReplay;
  in.at = memory;
  ASSERT_EQ(client().Call(kOpMemAlloc, in), CUDA_SUCCESS);
  client().flags = 0;
  client().OpenContext();
  EXPECT_EQ(client().Write(memory, "contents"), CUDA_SUCCESS);
}

TEST_F(WorkerTest, ReplayGetsTheSameAddressOrFails) {
  client().OpenContext();
  client().flags = kFlagReplay;
  const uint64_t at = kArenaBase + 100 * DeviceArena::kPage + 1024;
  EXPECT_EQ(client().Allocate(2000, at), at);
  EXPECT_EQ(client().Allocate(2000, at), 0u);
  EXPECT_EQ(client().last, CUDA_ERROR_INVALID_VALUE);
}

TEST_F(WorkerTest, RegionsListMemoryAndVariables) {
  const uint64_t context = client().OpenContext();
  const uint64_t memory = client().Allocate(5000);
  const uint64_t module = client().LoadModule(kImage);
  ASSERT_EQ(client().Call(kOpRegions, wire::OpRegions_Request()), CUDA_SUCCESS);
  const std::string message = client().reply.message;
  wire::OpRegions_Reply regions;
  ASSERT_TRUE(regions.Decode(message));
  ASSERT_EQ(regions.regions.size(), 2u);
  EXPECT_FALSE(regions.more);
  EXPECT_TRUE(regions.refusals.empty());
  const wire::Region* symbol = nullptr;
  const wire::Region* allocation = nullptr;
  for (const auto& region : regions.regions) (region.kind == 1 ? allocation : symbol) = &region;
  ASSERT_TRUE(symbol && allocation);
  EXPECT_EQ(allocation->address, memory);
  EXPECT_EQ(allocation->bytes, 5000u);
  EXPECT_EQ(allocation->context, context);
  EXPECT_EQ(symbol->kind, 2u);
  EXPECT_EQ(symbol->symbol, "counter");
  EXPECT_EQ(symbol->bytes, 4u);
  EXPECT_EQ(symbol->object, module);

  wire::OpWriteMemory_Request write;
  write.object = module;
  write.symbol = "counter";
  write.bytes = 4;
  ASSERT_EQ(client().Call(kOpWriteMemory, write, "wxyz"), CUDA_SUCCESS);
  wire::OpReadMemory_Request read;
  read.object = module;
  read.symbol = "counter";
  read.address = 1;  // offset
  read.bytes = 3;
  char out[4] = {};
  ASSERT_EQ(client().Call(kOpReadMemory, read, {}, out, 3), CUDA_SUCCESS);
  EXPECT_STREQ(out, "xyz");
  read.bytes = 4;
  EXPECT_EQ(client().Call(kOpReadMemory, read, {}, out, 4), CUDA_ERROR_INVALID_VALUE);
  read.symbol = "nothing";
  EXPECT_EQ(client().Call(kOpReadMemory, read, {}, out, 4), CUDA_ERROR_NOT_FOUND);
  ASSERT_EQ(client().Call(kOpDrain, wire::OpDrain_Request()), CUDA_SUCCESS);
  EXPECT_EQ(client().Decode<wire::OpDrain_Reply>().captures, 0u);
}

// A replay finds a library's variables where they were only if their places do not depend on what is used first.
TEST_F(WorkerTest, LibrariesPlaceTheirVariablesInTheOrderOfTheLog) {
  const auto load = [&] {
    wire::cuLibraryLoadData_Request in;
    in.library = client().NewHandle(Kind::kLibrary);
    EXPECT_EQ(client().Call(kCall_cuLibraryLoadData, in, kImage), CUDA_SUCCESS);
    return in.library;
  };
  const auto counter = [&](uint64_t library) {
    wire::cuLibraryGetGlobal_Request in;
    in.library = library;
    in.name = "counter";
    EXPECT_EQ(client().Call(kCall_cuLibraryGetGlobal, in), CUDA_SUCCESS);
    return client().Decode<wire::cuLibraryGetGlobal_Reply>().dptr;
  };
  const uint64_t before_any_context = load();
  client().OpenContext();
  const uint64_t first = load(), second = load();
  const uint64_t of_second = counter(second), of_first = counter(first);
  EXPECT_LT(counter(before_any_context), of_first);
  EXPECT_LT(of_first, of_second);
  // In a context that comes later they exist from its beginning.
  wire::cuCtxCreate_v4_Request create;
  create.context = client().NewHandle(Kind::kContext);
  ASSERT_EQ(client().Call(kCall_cuCtxCreate_v4, create), CUDA_SUCCESS);
  client().context_slot = SlotOf(create.context);
  const uint64_t there = counter(second);
  EXPECT_LT(of_second, there);
  EXPECT_LT(counter(first), there);
}

// Another library was there when this one was loaded, and is not when it is loaded in the replay.
TEST_F(WorkerTest, ReplayedLibrariesHaveTheirVariablesWhereTheyWereInAllContexts) {
  const auto open_contexts = [&] {
    const uint64_t first = client().OpenContext();
    wire::cuCtxCreate_v4_Request create;
    create.context = client().NewHandle(Kind::kContext);
    EXPECT_EQ(client().Call(kCall_cuCtxCreate_v4, create), CUDA_SUCCESS);
    return std::vector<uint64_t>{first, create.context};
  };
  const auto load = [&](wire::cuLibraryLoadData_Request* in) {
    in->library = client().NewHandle(Kind::kLibrary);
    EXPECT_EQ(client().Call(kCall_cuLibraryLoadData, *in, kImage), CUDA_SUCCESS);
    return client().Decode<wire::cuLibraryLoadData_Reply>();
  };
  const std::vector<uint64_t> contexts = open_contexts();
  wire::cuLibraryLoadData_Request gone, in;
  load(&gone);
  const wire::cuLibraryLoadData_Reply before = load(&in);
  EXPECT_EQ(before.place_contexts, contexts);
  ASSERT_EQ(before.places.size(), 2u);  // constants: none
  ASSERT_EQ(before.other_places.size(), 2u);
  EXPECT_NE(before.places[1], before.other_places[1]);

  const auto replay = [&](const std::vector<uint64_t>& place_contexts, const std::vector<uint64_t>& other_places) {
    Start({});
    EXPECT_EQ(open_contexts(), contexts);
    in.places = before.places;
    in.place_contexts = place_contexts;
    in.other_places = other_places;
    client().flags = kFlagReplay;
    return load(&in);
  };
  const wire::cuLibraryLoadData_Reply after = replay(before.place_contexts, before.other_places);
  EXPECT_EQ(after.places, before.places);
  EXPECT_EQ(after.other_places, before.other_places);
  // A context that is gone, and fewer places than contexts.
  EXPECT_EQ(replay({contexts[0], 12345, contexts[1]}, before.other_places).places, before.places);
}

// The place cannot be had in one of the contexts.
TEST_F(WorkerTest, ReplayedLibrariesAreRefusedIfAVariableWouldLieElsewhere) {
  const uint64_t context = client().OpenContext();
  wire::cuLibraryLoadData_Request in;
  in.library = client().NewHandle(Kind::kLibrary);
  in.places = {0, 4096};
  in.place_contexts = {context};
  client().flags = kFlagReplay;
  EXPECT_EQ(client().Call(kCall_cuLibraryLoadData, in, kImage), CUDA_ERROR_INVALID_ADDRESS_SPACE);
  client().flags = 0;
  in.places.clear();
  EXPECT_EQ(client().Call(kCall_cuLibraryLoadData, in, kImage), CUDA_SUCCESS) << "the handle is free";
}

// As a restart loads memory: nobody waits for the pieces, but Drain does, and a read afterwards finds them.
TEST_F(WorkerTest, MemoryIsWrittenAndReadInPieces) {
  client().OpenContext();
  constexpr size_t kPiece = 1 << 20, kPieces = 100;
  const uint64_t memory = client().Allocate(kPiece * kPieces);
  client().context_slot = 0;
  for (size_t i = 0; i < kPieces; ++i) {
    wire::OpWriteMemory_Request write;
    write.address = memory + i * kPiece;
    write.bytes = i % 10 == 9 ? 1000 : kPiece;
    client().Send(kOpWriteMemory, write, std::string(write.bytes, char(i + 1)));
  }
  ASSERT_EQ(client().Call(kOpDrain, wire::OpDrain_Request()), CUDA_SUCCESS);
  std::string out(kPiece, 0);
  for (size_t i = kPieces; i-- > 0;) {
    wire::OpReadMemory_Request read;
    read.address = memory + i * kPiece;
    read.bytes = i % 10 == 9 ? 1000 : kPiece;
    ASSERT_EQ(client().Call(kOpReadMemory, read, {}, &out[0], read.bytes), CUDA_SUCCESS);
    ASSERT_EQ(out.substr(0, read.bytes), std::string(read.bytes, char(i + 1))) << i;
  }
  EXPECT_EQ(client().pending, CUDA_SUCCESS);
}

// A small piece goes to the driver in a thread of its own, which may be held up (as the fake driver does).
TEST_F(WorkerTest, DrainWaitsForMemoryThatNobodyWaitsFor) {
  client().OpenContext();
  constexpr size_t kBytes = 1000;
  const uint64_t memory = client().Allocate(kBytes);
  client().context_slot = 0;
  std::string out(kBytes, 0);
  for (int i = 1; i <= 10; ++i) {
    wire::OpWriteMemory_Request write;
    write.address = memory;
    write.bytes = kBytes;
    client().Send(kOpWriteMemory, write, std::string(kBytes, char(i)));
    ASSERT_EQ(client().Call(kOpDrain, wire::OpDrain_Request()), CUDA_SUCCESS);
    wire::OpReadMemory_Request read;
    read.address = memory;
    read.bytes = kBytes;
    ASSERT_EQ(client().Call(kOpReadMemory, read, {}, &out[0], kBytes), CUDA_SUCCESS);
    ASSERT_EQ(out, std::string(kBytes, char(i)));
  }
}

// A checkpoint copies memory while the job runs. The driver's time for that is not the job's.
TEST_F(WorkerTest, CallsDoNotWaitForCopiesBesideThem) {
  const uint64_t context = client().OpenContext();
  constexpr size_t kBytes = 12345;  // such a copy stays in the driver until a stream has been made (fake_driver.cc)
  const uint64_t memory = client().Allocate(kBytes);
  ASSERT_EQ(client().Write(memory, std::string(kBytes, 'x')), CUDA_SUCCESS);
  ASSERT_EQ(client().Synchronize(), CUDA_SUCCESS);
  wire::OpPeekMemory_Request peek;
  peek.address = memory;
  peek.bytes = kBytes;
  peek.context = context;
  std::string message, out(kBytes, 0);
  peek.Encode(&message);
  FrameHeader header;
  header.call = kOpPeekMemory;
  const uint64_t number = client().channel().Begin(header, message, {}, &out[0], kBytes);
  ASSERT_NE(number, 0u);
  EXPECT_NE(client().Stream(), 0u);
  Reply reply;
  ASSERT_EQ(client().channel().Wait(number, &reply), ChannelStatus::kOk);
  EXPECT_EQ(reply.result, CUDA_SUCCESS);
  EXPECT_EQ(out, std::string(kBytes, 'x'));
}

// What a lock asks again and again: nobody waits, and the answer says where the work is.
TEST_F(WorkerTest, AQuestionAboutWorkDoesNotWait) {
  client().OpenContext();
  const uint64_t stream = client().Stream();
  client().Allocate(8 << 20);
  wire::OpDrain_Request ask;
  ask.at_once = true;
  ASSERT_EQ(client().Call(kOpDrain, ask), CUDA_SUCCESS);
  wire::OpDrain_Reply work = client().Decode<wire::OpDrain_Reply>();
  EXPECT_FALSE(work.busy);
  EXPECT_GE(work.held_bytes, 8u << 20);
  EXPECT_TRUE(work.busy_streams.empty());
  std::atomic<bool> go_on{false};
  {
    HostFunctionThread functions(&client().channel(), 0, [&] {
      while (!go_on) std::this_thread::yield();
    });
    wire::OpLaunchHostFunc_Request in;
    in.stream = stream;
    in.id = 1;
    ASSERT_EQ(client().Call(kOpLaunchHostFunc, in), CUDA_SUCCESS);
    for (const bool sure : {false, true}) {
      do {
        ask.be_sure = sure;
        ASSERT_EQ(client().Call(kOpDrain, ask), CUDA_SUCCESS);
        work = client().Decode<wire::OpDrain_Reply>();
        EXPECT_TRUE(work.busy);
      } while (work.host_functions == 0);  // its turn has not come yet
      EXPECT_NE(std::find(work.busy_streams.begin(), work.busy_streams.end(), stream), work.busy_streams.end());
      EXPECT_EQ(work.busy_contexts.size(), work.busy_streams.size());
    }
    go_on = true;
    do {
      ASSERT_EQ(client().Call(kOpDrain, ask), CUDA_SUCCESS);
      work = client().Decode<wire::OpDrain_Reply>();
    } while (work.busy);
    EXPECT_EQ(functions.runs, 1);
  }
  EXPECT_TRUE(work.busy_streams.empty());
  EXPECT_EQ(work.host_functions, 0u);
  EXPECT_EQ(work.captures, 0u);
}

TEST_F(WorkerTest, RegionsComeInParts) {
  client().OpenContext();
  std::vector<uint64_t> all;
  for (int i = 0; i < 20000; ++i) all.push_back(client().Allocate(512));
  std::vector<uint64_t> listed;
  wire::OpRegions_Request in;
  int parts = 0;
  while (true) {
    ASSERT_EQ(client().Call(kOpRegions, in), CUDA_SUCCESS);
    const std::string message = client().reply.message;
    wire::OpRegions_Reply regions;
    ASSERT_TRUE(regions.Decode(message));
    for (const auto& region : regions.regions) listed.push_back(region.address);
    ++parts;
    if (!regions.more) break;
    in.after = listed.size();
  }
  EXPECT_GT(parts, 1);
  EXPECT_EQ(listed, all);  // first fit from the bottom: already in order
}

TEST_F(WorkerTest, DrainNamesCaptures) {
  client().OpenContext();
  const uint64_t stream = client().Stream();
  wire::cuStreamBeginCapture_v2_Request begin;
  begin.hStream = stream;
  ASSERT_EQ(client().Call(kCall_cuStreamBeginCapture_v2, begin), CUDA_SUCCESS);
  EXPECT_EQ(client().Call(kOpDrain, wire::OpDrain_Request()), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_EQ(client().Decode<wire::OpDrain_Reply>().captures, 1u);
  // Pageable copies cannot be part of a graph.
  const uint64_t memory = client().Allocate(64);
  wire::cuMemcpyHtoDAsync_v2_Request copy;
  copy.dst = memory;
  copy.bytes = 4;
  copy.stream = stream;
  EXPECT_EQ(client().Call(kCall_cuMemcpyHtoDAsync_v2, copy, "abcd"), CUDA_ERROR_NOT_SUPPORTED);
  wire::cuStreamEndCapture_Request end;
  end.hStream = stream;
  end.phGraph = client().NewHandle(Kind::kGraph);
  EXPECT_EQ(client().Call(kCall_cuStreamEndCapture, end), CUDA_SUCCESS);
  EXPECT_EQ(client().Call(kOpDrain, wire::OpDrain_Request()), CUDA_SUCCESS);
}

TEST_F(WorkerTest, Timeline) {
  client().OpenContext();
  wire::OpTimeline_Request in;
  in.action = 2;
  EXPECT_EQ(client().Call(kOpTimeline, in), CUDA_ERROR_NOT_READY);  // nothing was begun
  in.action = 17;
  EXPECT_EQ(client().Call(kOpTimeline, in), CUDA_ERROR_INVALID_VALUE);
  for (int round = 0; round < 2; ++round) {
    in.action = 1;
    in.capacity = 5;
    ASSERT_EQ(client().Call(kOpTimeline, in), CUDA_SUCCESS);
    for (int i = 0; i < 3; ++i) EXPECT_NE(client().Allocate(64), 0u);
    EXPECT_EQ(client().Free(12345), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(client().Call(kCall_cuCtxSynchronize, wire::cuCtxSynchronize_Request()), CUDA_SUCCESS);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(client().Call(kOpPing, wire::OpPing_Request()), CUDA_SUCCESS);
    in.action = 2;
    ASSERT_EQ(client().Call(kOpTimeline, in), CUDA_SUCCESS);
    EXPECT_EQ(client().Decode<wire::OpTimeline_Reply>().recorded, 5u);
    EXPECT_GE(client().Decode<wire::OpTimeline_Reply>().dropped, 3u);
    in.action = 3;
    in.first = 1;
    ASSERT_EQ(client().Call(kOpTimeline, in), CUDA_SUCCESS);
    const auto out = client().Decode<wire::OpTimeline_Reply>();
    ASSERT_EQ(out.sequences.size(), 4u);
    const uint32_t calls[] = {kOpMemAlloc, kOpMemAlloc, kOpMemFree, kCall_cuCtxSynchronize};
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(out.calls[i], calls[i]) << i;
      EXPECT_EQ(out.results[i], i == 2 ? 1u : 0u);
      EXPECT_LE(out.starts[i] + out.durations[i], out.now);
      if (i < 3) {
        EXPECT_EQ(out.threads[i], out.worker_pid);
      }
    }
    ASSERT_EQ(out.names.size(), 3u);
    EXPECT_EQ(out.named_calls[1], uint32_t(kOpMemAlloc));
    EXPECT_EQ(out.names[1], "OpMemAlloc");
    in.first = ~uint64_t(0);
    ASSERT_EQ(client().Call(kOpTimeline, in), CUDA_SUCCESS);
    EXPECT_TRUE(client().Decode<wire::OpTimeline_Reply>().sequences.empty());
    in.first = 0;
  }
}

TEST_F(WorkerTest, FunctionFacts) {
  client().OpenContext();
  const uint64_t fill = client().Function(client().LoadModule(kImage), "fill");
  wire::OpFunctionInfo_Request in;
  in.function = fill;
  ASSERT_EQ(client().Call(kOpFunctionInfo, in), CUDA_SUCCESS);
  const auto info = client().Decode<wire::OpFunctionInfo_Reply>();
  EXPECT_EQ(info.name, "fill");
  ASSERT_EQ(info.parameters.size(), 3u);
  EXPECT_EQ(info.parameters[2].offset, 12u);
  EXPECT_EQ(info.parameters[2].size, 4u);
  EXPECT_EQ(info.attributes.size(), size_t(CU_FUNC_ATTRIBUTE_MAX));
  EXPECT_EQ(info.attributes.back(), INT32_MIN);
  in.device = 3;
  EXPECT_EQ(client().Call(kOpFunctionInfo, in), CUDA_ERROR_INVALID_DEVICE);
}

TEST_F(WorkerTest, PrivateTablesComeFromTheDriver) {
  client().OpenContext();
  const auto id = [](const driverabi::TableId& table) { return std::string(table.begin(), table.end()); };
  wire::OpExportTable_Request in;
  const std::string streams = id(driverabi::kStreamTable), layout = id(driverabi::kLayoutTable);
  in.table = streams;
  in.word = 39;
  in.arguments = {client().Stream()};
  ASSERT_EQ(client().Call(kOpExportTable, in), CUDA_SUCCESS);
  EXPECT_EQ(client().Decode<wire::OpExportTable_Reply>().values, std::vector<uint64_t>{7});
  in.arguments = {0};
  ASSERT_EQ(client().Call(kOpExportTable, in), CUDA_SUCCESS);
  EXPECT_EQ(client().Decode<wire::OpExportTable_Reply>().values, std::vector<uint64_t>{9});
  in.arguments = {0x123456};
  EXPECT_EQ(client().Call(kOpExportTable, in), CUDA_ERROR_INVALID_HANDLE);
  in.table = layout;
  in.word = 4;
  in.arguments.clear();
  ASSERT_EQ(client().Call(kOpExportTable, in), CUDA_SUCCESS);
  const std::string message = client().reply.message;
  wire::OpExportTable_Reply reply;
  ASSERT_TRUE(reply.Decode(message));
  ASSERT_EQ(reply.data.size(), 1024u);  // two arrays of a byte for each pair of the 1024 multiprocessors
  EXPECT_EQ(reply.data[511], char(511 / 4));
  EXPECT_EQ(reply.data[512 + 511], char(511 % 4));
}

TEST_F(WorkerTest, EventTimes) {
  client().OpenContext();
  wire::OpEventTimes_Request times;
  for (const unsigned flags : {0u, unsigned(CU_EVENT_DISABLE_TIMING), 0u, 0u}) {
    wire::cuEventCreate_Request create;
    create.phEvent = client().NewHandle(Kind::kEvent);
    create.Flags = flags;
    ASSERT_EQ(client().Call(kCall_cuEventCreate, create), CUDA_SUCCESS);
    times.events.push_back(create.phEvent);
  }
  const uint64_t memory = client().Allocate(16);
  for (const size_t i : {2, 1, 0}) {
    client().Write(memory, "x");
    wire::cuEventRecord_Request record;
    record.hEvent = times.events[i];
    ASSERT_EQ(client().Call(kCall_cuEventRecord, record), CUDA_SUCCESS);
  }
  ASSERT_EQ(client().Call(kOpEventTimes, times), CUDA_SUCCESS);
  const auto out = client().Decode<wire::OpEventTimes_Reply>();
  ASSERT_EQ(out.microseconds.size(), 4u);
  EXPECT_EQ(out.microseconds[2] - out.microseconds[0], 2000);  // how long ago each of them was
  EXPECT_EQ(out.microseconds[0], 0);
  EXPECT_EQ(out.microseconds[1], -1);
  EXPECT_EQ(out.microseconds[3], -1);
}

// One that was last recorded in a capture: a checkpoint asks for it, and a replay makes it such a one again.
TEST_F(WorkerTest, CapturedEvents) {
  client().OpenContext();
  wire::OpEventTimes_Request times;
  for (int i = 0; i < 2; ++i) {
    wire::cuEventCreate_Request create;
    create.phEvent = client().NewHandle(Kind::kEvent);
    ASSERT_EQ(client().Call(kCall_cuEventCreate, create), CUDA_SUCCESS);
    wire::cuEventRecord_Request record;
    record.hEvent = create.phEvent;
    ASSERT_EQ(client().Call(kCall_cuEventRecord, record), CUDA_SUCCESS);
    times.events.push_back(create.phEvent);
  }
  const auto ask = [&] {
    EXPECT_EQ(client().Call(kOpEventTimes, times), CUDA_SUCCESS);
    return client().Decode<wire::OpEventTimes_Reply>();
  };
  times.ask_captured = true;
  EXPECT_TRUE(ask().captured.empty());
  wire::OpCaptureEvent_Request capture;
  capture.event = times.events[1];
  client().flags = kFlagReplay;
  ASSERT_EQ(client().Call(kOpCaptureEvent, capture), CUDA_SUCCESS);
  client().flags = 0;
  const auto now = ask();
  EXPECT_EQ(now.captured, std::vector<uint64_t>{times.events[1]});
  EXPECT_GE(now.microseconds[0], 0);
  EXPECT_EQ(now.microseconds[1], -1);
  times.ask_captured = false;
  EXPECT_TRUE(ask().captured.empty());
  wire::cuEventQuery_Request query;
  query.hEvent = times.events[1];
  EXPECT_EQ(client().Call(kCall_cuEventQuery, query), CUDA_ERROR_INVALID_VALUE);
  capture.event = client().NewHandle(Kind::kEvent);
  client().flags = kFlagReplay;
  EXPECT_EQ(client().Call(kOpCaptureEvent, capture), CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(WorkerTest, VirtualMemoryOfTheApplicationsOwn) {
  client().OpenContext();
  wire::cuMemAddressReserve_Request reserve;
  reserve.size = 4 * DeviceArena::kPage;
  ASSERT_EQ(client().Call(kCall_cuMemAddressReserve, reserve), CUDA_SUCCESS);
  const uint64_t address = client().Decode<wire::cuMemAddressReserve_Reply>().address;
  EXPECT_EQ(address, kReservationBase);
  wire::cuMemAddressReserve_Request odd = reserve;
  odd.flags = 1;
  EXPECT_EQ(client().Call(kCall_cuMemAddressReserve, odd), CUDA_ERROR_INVALID_VALUE);
  odd.flags = 0;
  odd.address = kReservationBase + 100 * DeviceArena::kPage + 8;  // a wish that cannot be granted
  ASSERT_EQ(client().Call(kCall_cuMemAddressReserve, odd), CUDA_SUCCESS);
  EXPECT_EQ(client().Decode<wire::cuMemAddressReserve_Reply>().address, kReservationBase + 4 * DeviceArena::kPage);
  std::vector<uint64_t> handles;
  for (int i = 0; i < 2; ++i) {
    wire::cuMemCreate_Request create;
    create.handle = client().NewHandle(Kind::kPhysicalMemory);
    create.size = DeviceArena::kPage;
    CUmemAllocationProp prop = {};
    create.prop = std::string_view(reinterpret_cast<char*>(&prop), sizeof prop);
    ASSERT_EQ(client().Call(kCall_cuMemCreate, create), CUDA_SUCCESS);
    handles.push_back(create.handle);
    wire::cuMemMap_Request map;
    map.ptr = address + i * DeviceArena::kPage;
    map.size = DeviceArena::kPage;
    map.handle = create.handle;
    ASSERT_EQ(client().Call(kCall_cuMemMap, map), CUDA_SUCCESS);
    map.ptr = kArenaBase;  // not reserved by the client
    EXPECT_EQ(client().Call(kCall_cuMemMap, map), CUDA_ERROR_INVALID_VALUE);
    wire::cuMemRelease_Request release;
    release.handle = create.handle;
    EXPECT_EQ(client().Call(kCall_cuMemRelease, release), CUDA_SUCCESS);
    EXPECT_EQ(client().Call(kCall_cuMemRelease, release), CUDA_ERROR_INVALID_VALUE);
  }
  wire::cuMemAddressFree_Request in_use;
  in_use.ptr = address;
  in_use.size = reserve.size;
  EXPECT_EQ(client().Call(kCall_cuMemAddressFree, in_use), CUDA_ERROR_INVALID_VALUE);  // something is mapped there
  wire::cuMemSetAccess_Request access;
  CUmemAccessDesc desc = {};
  access.ptr = address;
  access.size = 2 * DeviceArena::kPage;
  access.desc = std::string_view(reinterpret_cast<char*>(&desc), sizeof desc);
  access.count = 1;
  ASSERT_EQ(client().Call(kCall_cuMemSetAccess, access), CUDA_SUCCESS);
  // Across the seam of two mappings, but not beyond.
  EXPECT_EQ(client().Write(address + DeviceArena::kPage - 2, "seam"), CUDA_SUCCESS);
  EXPECT_EQ(client().Read(address + DeviceArena::kPage - 2, 4), "seam");
  EXPECT_EQ(client().Write(address + 2 * DeviceArena::kPage - 2, "seam"), CUDA_ERROR_INVALID_VALUE);
  wire::cuMemUnmap_Request unmap;
  unmap.ptr = address;
  unmap.size = 2 * DeviceArena::kPage;
  EXPECT_EQ(client().Call(kCall_cuMemUnmap, unmap), CUDA_SUCCESS);
  EXPECT_EQ(client().Write(address, "x"), CUDA_ERROR_INVALID_VALUE);
  wire::cuMemAddressFree_Request free;
  free.ptr = kArenaBase;
  free.size = kArenaBytes;
  EXPECT_EQ(client().Call(kCall_cuMemAddressFree, free), CUDA_ERROR_INVALID_VALUE);
  free.ptr = address;
  free.size = reserve.size;
  EXPECT_EQ(client().Call(kCall_cuMemAddressFree, free), CUDA_SUCCESS);
}

TEST_F(WorkerTest, BadImagesAreAnErrorNotAnEnd) {
  client().OpenContext();
  EXPECT_EQ(client().LoadModule("bad image"), 0u);
  EXPECT_EQ(client().last, CUDA_ERROR_INVALID_IMAGE);
  EXPECT_EQ(client().LoadModule(""), 0u);
  EXPECT_NE(client().LoadModule(kImage), 0u);
}

TEST_F(WorkerTest, AMalformedRequestEndsTheSession) {
  client().OpenContext();
  wire::cuMemcpyHtoDAsync_v2_Request copy;
  copy.dst = client().Allocate(64);
  copy.bytes = 5;
  EXPECT_EQ(client().Call(kCall_cuMemcpyHtoDAsync_v2, copy, "1234"), CUresult(-1));
  EXPECT_EQ(client().status, ChannelStatus::kClosed);
  const int status = worker_->WaitForEnd(5000);
  EXPECT_TRUE(WIFEXITED(status)) << status;
  EXPECT_NE(worker_->EndReason().find("malformed"), std::string::npos);
}

TEST_F(WorkerTest, TheWorkerEndsWithItsClientEvenWhileTheGpuIsBusy) {
  client().OpenContext();
  const uint64_t nap = client().Function(client().LoadModule(kImage), "nap");
  const std::string params = Number(60000);
  client().Send(kCall_cuLaunchKernel, client().Launch(nap, params));
  FrameHeader header;
  header.call = kCall_cuCtxSynchronize;
  header.context_or_result = client().context_slot;
  client().channel().Begin(header, {}, {}, nullptr, 0);
  const auto start = Now();
  client_.reset();
  const int status = worker_->WaitForEnd(5000);
  EXPECT_TRUE(WIFEXITED(status)) << status;
  EXPECT_LT(Now() - start, std::chrono::seconds(2));
}

}  // namespace
}  // namespace cuda_remote::server
