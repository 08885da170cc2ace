// SPDX-License-Identifier: Apache-2.0
// What the worker says about managed memory, from which clients conclude that a program breaks CUDA's rules: whether
// work is in progress that the program has not waited for, and whether a write of the GPU's was lost.

#include <cuda.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "proto/mirror/mirror.h"
#include "server/worker/memory/managed_memory.h"
#include "server/worker/testing/client.h"
#include "server/worker/testing/worker_process.h"

namespace cuda_remote::server {
namespace {

constexpr uint64_t kBytes = 4096;
constexpr uint64_t kLegacy = 0;

class ManagedTest : public testing::Test {
 protected:
  // On a GPU that is late does nothing before somebody waits for it. So whatever the worker puts into a stream that
  // nobody waits for stays there.
  explicit ManagedTest(const char* late_ms = "600000") : late_ms_(late_ms) {}
  void SetUp() override {
    setenv("SOFTGPU_LATE_MS", late_ms_, 1);
    worker_ = std::make_unique<WorkerProcess>(
        std::vector<std::string>{WorkerPath(), "--driver", "softgpu/libsoftgpu.so", "--log-level", "warn"});
    unsetenv("SOFTGPU_LATE_MS");
    client_ = std::make_unique<TestClient>(worker_->Connect());
    context_ = client_->OpenContext();
    memory_ = client_->Allocate(kBytes);
    ASSERT_NE(memory_, 0u);
  }

  // Of a client on another machine: no file is needed.
  void MapManaged() {
    wire::OpManagedMap_Request in;
    in.address = kManagedBase;
    in.bytes = ManagedMemory::kPage;
    ASSERT_EQ(client_->Call(kOpManagedMap, in), CUDA_SUCCESS);
  }

  // Of one on this machine, whose file it returns, with the memory registered: copies follow the work.
  int MapRegistered(uint64_t bytes) {
    const int fd = memfd_create("managed", MFD_CLOEXEC);
    EXPECT_EQ(ftruncate(fd, off_t(bytes)), 0);
    EXPECT_EQ(client_->channel().SendFd(3, fd), ChannelStatus::kOk);
    wire::OpManagedMap_Request map;
    map.tag = 3;
    map.address = kManagedBase;
    map.bytes = bytes;
    EXPECT_EQ(client_->Call(kOpManagedMap, map), CUDA_SUCCESS);
    // Memory is registered that has been copied several times.
    for (int i = 0; i < 6; ++i) {
      Flush({{kManagedBase, bytes}});
      EXPECT_EQ(client_->Synchronize(), CUDA_SUCCESS);
    }
    return fd;
  }

  struct Run {
    uint64_t address, bytes;
  };
  static std::string_view Payload(const std::vector<Run>& runs) {
    return std::string_view(reinterpret_cast<const char*>(runs.data()), runs.size() * sizeof(Run));
  }
  void Flush(const std::vector<Run>& runs) {
    ASSERT_EQ(client_->Call(kOpManagedFlush, wire::OpManagedFlush_Request(), Payload(runs)), CUDA_SUCCESS);
  }
  // Waits for the GPU. Returns whether the pages came with the answer.
  bool AwaitWith(const std::vector<Run>& runs) {
    char fetched = 0;
    EXPECT_EQ(client_->Call(kCall_cuCtxSynchronize, wire::cuCtxSynchronize_Request(), Payload(runs), &fetched, 1),
              CUDA_SUCCESS);
    return client_->reply.payload_bytes == 1;
  }

  // Work that has a payload.
  void Work(uint64_t stream) {
    wire::cuMemcpyHtoDAsync_v2_Request in;
    in.dst = memory_;
    in.bytes = kBytes;
    in.stream = stream;
    ASSERT_EQ(client_->Call(kCall_cuMemcpyHtoDAsync_v2, in, std::string(kBytes, 'a')), CUDA_SUCCESS);
  }
  void Await(uint64_t stream) {
    wire::cuStreamSynchronize_Request in;
    in.hStream = stream;
    ASSERT_EQ(client_->Call(kCall_cuStreamSynchronize, in), CUDA_SUCCESS);
  }
  void Destroy(uint64_t stream) {
    wire::cuStreamDestroy_v2_Request in;
    in.hStream = stream;
    ASSERT_EQ(client_->Call(kCall_cuStreamDestroy_v2, in), CUDA_SUCCESS);
  }

  // Work of `stream` waits until memory_, which is cleared, has been written to in another one.
  void Hold(uint64_t stream) {
    ASSERT_EQ(client_->Write(memory_, std::string(4, 0)), CUDA_SUCCESS);
    ASSERT_EQ(client_->Synchronize(), CUDA_SUCCESS);
    wire::cuStreamWaitValue32_v2_Request wait;
    wait.stream = stream;
    wait.addr = memory_;
    wait.value = 1;
    ASSERT_EQ(client_->Call(kCall_cuStreamWaitValue32_v2, wait), CUDA_SUCCESS);
  }
  void LetGo(uint64_t stream) {
    wire::cuStreamWriteValue32_v2_Request write;
    write.stream = stream;
    write.addr = memory_;
    write.value = 1;
    ASSERT_EQ(client_->Call(kCall_cuStreamWriteValue32_v2, write), CUDA_SUCCESS);
    EXPECT_EQ(client_->Synchronize(), CUDA_SUCCESS);
  }

  // Whether an access of the host finds work in progress: any, or that of a stream.
  bool FindsWork(uint64_t stream = 0) {
    wire::OpManagedFetch_Request in;
    in.address = kManagedBase;
    in.bytes = kBytes;
    in.wait = stream == 0 ? 3 : 4;
    in.stream = stream;
    std::string bytes(kBytes, 0);
    EXPECT_EQ(client_->Call(kOpManagedFetch, in, {}, &bytes[0], bytes.size()), CUDA_SUCCESS);
    return client_->Decode<wire::OpManagedFetch_Reply>().busy;
  }

  void Tell(uint64_t address, std::string_view bytes) {
    std::string runs;
    mirror::AppendRun(address, bytes.data(), bytes.size(), &runs);
    ASSERT_EQ(client_->Call(kOpMirrorWrite, wire::OpMirrorWrite_Request(), runs), CUDA_SUCCESS);
  }
  // Whether the client has written over what the GPU had written.
  bool WasLost() {
    std::string changes(mirror::kMostRuns, 0);
    EXPECT_EQ(client_->Call(kOpMirrorRead, wire::OpMirrorRead_Request(), {}, &changes[0], changes.size()),
              CUDA_SUCCESS);
    return client_->Decode<wire::OpMirrorRead_Reply>().lost;
  }

  const char* const late_ms_;
  std::unique_ptr<WorkerProcess> worker_;
  std::unique_ptr<TestClient> client_;
  uint64_t context_ = 0, memory_ = 0;
};

class ManagedInTimeTest : public ManagedTest {
 protected:
  ManagedInTimeTest() : ManagedTest("0") {}

  // A function of the host's in the stream, until the client has run it.
  void RunFunction(uint64_t stream) {
    wire::OpLaunchHostFunc_Request in;
    in.stream = stream;
    in.id = ++functions_;
    ASSERT_EQ(client_->Call(kOpLaunchHostFunc, in), CUDA_SUCCESS);
    FrameHeader header;
    std::string message;
    wire::OpHostFunc_Request event;
    ASSERT_EQ(client_->channel().ReadEvent(&header, &message, 60000), ChannelStatus::kOk);
    ASSERT_EQ(header.call, uint32_t(kOpHostFunc));
    ASSERT_TRUE(event.Decode(message));
    wire::OpHostFuncDone_Request done;
    done.id = event.id;
    done.turn = event.turn;
    client_->Send(kOpHostFuncDone, done);
  }

  uint64_t functions_ = 0;
  std::mt19937 random_{1};
};

TEST_F(ManagedTest, StreamsThatWereWaitedForStayIdle) {
  MapManaged();
  const uint64_t one = client_->Stream(), other = client_->Stream();
  for (const uint64_t stream : {one, other, kLegacy}) {
    Work(stream);
    Await(stream);
  }
  EXPECT_FALSE(FindsWork());
  // The last moment to record events in it, and in the others that have read payloads.
  Destroy(other);
  EXPECT_FALSE(FindsWork());
  EXPECT_FALSE(FindsWork(one));
}

TEST_F(ManagedTest, LegacyStreamStaysIdleWhenACaptureBegins) {
  MapManaged();
  const uint64_t stream = client_->Stream();
  Work(kLegacy);
  Await(kLegacy);
  wire::cuStreamBeginCapture_v2_Request in;
  in.hStream = stream;
  in.mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  ASSERT_EQ(client_->Call(kCall_cuStreamBeginCapture_v2, in), CUDA_SUCCESS);
  EXPECT_FALSE(FindsWork());
}

TEST_F(ManagedTest, WorkIsFoundUntilItIsWaitedFor) {
  MapManaged();
  const uint64_t one = client_->Stream(), other = client_->Stream();
  Work(one);
  EXPECT_TRUE(FindsWork());
  EXPECT_TRUE(FindsWork(one));
  EXPECT_FALSE(FindsWork(other));
  // It goes on without its stream.
  Destroy(one);
  EXPECT_TRUE(FindsWork());
  EXPECT_EQ(client_->Synchronize(), CUDA_SUCCESS);
  EXPECT_FALSE(FindsWork());
}

// The executor watches for a moment only, and hands longer waits over. The pages come with the answer all the same.
TEST_F(ManagedTest, ALongWaitBringsThePagesThatWereAskedFor) {
  constexpr uint64_t kSegment = ManagedMemory::kPage;
  const int fd = MapRegistered(kSegment);
  wire::cuMemsetD8Async_Request fill;
  fill.dstDevice = kManagedBase;
  fill.uc = 'x';
  fill.N = kSegment;
  ASSERT_EQ(client_->Call(kCall_cuMemsetD8Async, fill), CUDA_SUCCESS);
  EXPECT_TRUE(AwaitWith({{kManagedBase + kBytes, kBytes}}));
  std::string bytes(3 * kBytes, 'o');
  ASSERT_EQ(pread(fd, &bytes[0], bytes.size(), 0), ssize_t(bytes.size()));
  EXPECT_EQ(bytes, std::string(kBytes, 0) + std::string(kBytes, 'x') + std::string(kBytes, 0));
  // Nobody has asked for any.
  ASSERT_EQ(client_->Call(kCall_cuMemsetD8Async, fill), CUDA_SUCCESS);
  EXPECT_FALSE(AwaitWith({}));
  close(fd);
}

// Host and GPU change the same memory in turn: ranges of whole pages, odd ones, scattered ones, ones on both sides of
// the end of a registration, and ones that are too long to be put off.
TEST_F(ManagedInTimeTest, BytesComeAndGoInTurns) {
  constexpr uint64_t kRegistration = 32 << 20;
  const int fd = MapRegistered(kRegistration + ManagedMemory::kPage);
  std::vector<Run> scattered;
  for (uint64_t i = 0; i < 65; ++i) scattered.push_back({kManagedBase + 2 * i * kBytes, kBytes});
  const std::vector<Run> few(scattered.begin(), scattered.begin() + 64);
  const std::vector<std::vector<Run>> all = {
      {{kManagedBase, 2 * kBytes}},
      {{kManagedBase + kRegistration - kBytes, 2 * kBytes}},
      {{kManagedBase + 5 * kBytes, 64 << 10}, {kManagedBase + (1 << 20), 48}, {kManagedBase + (2 << 20), 128 << 10}},
      {{kManagedBase + 5 * kBytes, 256 << 10}},
      {{kManagedBase + 7 * kBytes, (256 << 10) + kBytes}},
      {{kManagedBase + 8, 24}, {kManagedBase + kBytes, kBytes}},
      {{kManagedBase + 16, 40}},
      few,
      scattered,
  };
  for (int turn = 0; turn < 3; ++turn) {
    for (size_t kind = 0; kind < all.size(); ++kind) {
      SCOPED_TRACE(testing::Message() << "turn " << turn << ", kind " << kind);
      std::vector<std::string> wanted;
      for (const Run& run : all[kind]) {
        std::string bytes(run.bytes, 0);
        for (char& byte : bytes) byte = char(random_());
        ASSERT_EQ(pwrite(fd, bytes.data(), bytes.size(), off_t(run.address - kManagedBase)), ssize_t(bytes.size()));
        wanted.push_back(bytes);
      }
      Flush(all[kind]);
      // The GPU's turn: the second half of each range becomes the first one, too.
      for (size_t i = 0; i < wanted.size(); ++i) {
        wire::cuMemcpyAsync_Request copy;
        copy.dst = all[kind][i].address;
        copy.bytes = all[kind][i].bytes / 2;
        copy.src = copy.dst + copy.bytes;
        ASSERT_EQ(client_->Call(kCall_cuMemcpyAsync, copy), CUDA_SUCCESS);
        wanted[i].replace(0, copy.bytes, wanted[i], copy.bytes, copy.bytes);
      }
      ASSERT_TRUE(AwaitWith(all[kind]));
      for (size_t i = 0; i < wanted.size(); ++i) {
        std::string bytes(wanted[i].size(), 0);
        ASSERT_EQ(pread(fd, &bytes[0], bytes.size(), off_t(all[kind][i].address - kManagedBase)),
                  ssize_t(bytes.size()));
        ASSERT_EQ(bytes, wanted[i]) << "range " << i;
      }
    }
  }
  close(fd);
}

// Segments that are host memory now and device memory then.
class ManagedRestlessTest : public ManagedInTimeTest {
 protected:
  static constexpr uint64_t kSegment = ManagedMemory::kPage;
  void SetUp() override {
    setenv("CUDA_REMOTE_RESTLESS", "1", 1);
    ManagedInTimeTest::SetUp();
    unsetenv("CUDA_REMOTE_RESTLESS");
    file_ = memfd_create("managed", MFD_CLOEXEC);
    ASSERT_EQ(ftruncate(file_, 2 * off_t(kSegment)), 0);
    for (const uint64_t at : {uint64_t{0}, kSegment}) Map(at);
    model_.assign(2 * kSegment, 0);
  }
  void TearDown() override {
    close(file_);
    ManagedInTimeTest::TearDown();
  }

  void Map(uint64_t at) {
    const uint64_t tag = ++tags_;
    ASSERT_EQ(client_->channel().SendFd(tag, file_), ChannelStatus::kOk);
    wire::OpManagedMap_Request map;
    map.tag = tag;
    map.address = kManagedBase + at;
    map.offset = at;
    map.bytes = kSegment;
    ASSERT_EQ(client_->Call(kOpManagedMap, map), CUDA_SUCCESS);
  }
  // As a client that frees the segment's memory: `action` is that of OpManagedUnmap.
  void Unmap(uint64_t at, uint32_t action) {
    wire::OpManagedUnmap_Request unmap;
    unmap.address = kManagedBase + at;
    unmap.action = action;
    ASSERT_EQ(client_->Call(kOpManagedUnmap, unmap), CUDA_SUCCESS);
    ASSERT_EQ(fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(at), kSegment), 0);
    model_.replace(at, kSegment, kSegment, 0);
  }
  void Fill(uint64_t at, uint64_t bytes, char value) {
    wire::cuMemsetD8Async_Request fill;
    fill.dstDevice = kManagedBase + at;
    fill.uc = uint8_t(value);
    fill.N = bytes;
    ASSERT_EQ(client_->Call(kCall_cuMemsetD8Async, fill), CUDA_SUCCESS);
    model_.replace(at, bytes, bytes, value);
  }
  std::string InFile(uint64_t at, uint64_t bytes) {
    std::string data(bytes, 0);
    EXPECT_EQ(pread(file_, &data[0], bytes, off_t(at)), ssize_t(bytes));
    return data;
  }
  void Fetch(uint64_t at, uint64_t bytes) {
    wire::OpManagedFetch_Request in;
    in.address = kManagedBase + at;
    in.bytes = bytes;
    in.wait = 1;
    ASSERT_EQ(client_->Call(kOpManagedFetch, in), CUDA_SUCCESS);
  }
  // What the GPU writes is in the file at once.
  bool IsOnHost(uint64_t at) {
    const char before = InFile(at, 1)[0];
    Fill(at, 1, char(before + 1));
    EXPECT_EQ(client_->Synchronize(), CUDA_SUCCESS);
    const bool there = InFile(at, 1)[0] != before;
    Fetch(at, 1);
    EXPECT_EQ(InFile(at, 1)[0], char(before + 1));
    return there;
  }
  // The host changes pages, hands them over, the GPU changes them too, and the host waits and has them again.
  void Turn(const std::vector<Run>& runs) {
    for (const Run& run : runs) {
      std::string bytes(run.bytes, 0);
      for (char& byte : bytes) byte = char(random_());
      const uint64_t at = run.address - kManagedBase;
      ASSERT_EQ(pwrite(file_, bytes.data(), bytes.size(), off_t(at)), ssize_t(bytes.size()));
      model_.replace(at, bytes.size(), bytes);
    }
    Flush(runs);
    for (const Run& run : runs) {
      const uint64_t at = run.address - kManagedBase;
      Fill(at + random_() % run.bytes, 1, char(random_()));
      // And some that it did not change, or did not give away.
      Fill(at / kSegment * kSegment + random_() % kSegment, 1, char(random_()));
    }
    if (!AwaitWith(runs)) {
      for (const Run& run : runs) Fetch(run.address - kManagedBase, run.bytes);
    }
    for (const Run& run : runs) {
      const uint64_t at = run.address - kManagedBase;
      ASSERT_EQ(InFile(at, run.bytes), model_.substr(at, run.bytes));
    }
  }

  // Turns of the first segment until it is host memory.
  void BringToHost() {
    for (int turn = 0; !IsOnHost(0); ++turn) {
      ASSERT_LT(turn, 20);
      ASSERT_NO_FATAL_FAILURE(Turn({{kManagedBase, 16 * kBytes}}));
    }
  }
  uint64_t EmptyKernel() {
    const uint64_t module =
        client_->LoadModule(".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry nothing() { ret; }\n");
    return client_->Function(module, "nothing");
  }

  int file_ = -1;
  uint64_t tags_ = 2;
  std::string model_;
};

TEST_F(ManagedRestlessTest, BytesAreTheSameInBothPlaces) {
  int on_host = 0, on_device = 0;
  for (int turn = 0; turn < 300; ++turn) {
    SCOPED_TRACE(testing::Message() << "turn " << turn);
    std::vector<Run> runs;
    for (const uint64_t segment : {uint64_t{0}, kSegment}) {
      if (random_() % 3 == 0) continue;
      runs.push_back({kManagedBase + segment + random_() % 400 * kBytes, (1 + random_() % 16) * kBytes});
    }
    if (runs.empty()) continue;
    ASSERT_NO_FATAL_FAILURE(Turn(runs));
    ++(IsOnHost(kSegment * (random_() % 2)) ? on_host : on_device);
    if (turn % 20 == 19) {
      for (const uint64_t segment : {uint64_t{0}, kSegment}) {
        Fetch(segment, kSegment);
        ASSERT_EQ(InFile(segment, kSegment), model_.substr(segment, kSegment));
      }
    }
    const uint64_t segment = random_() % 2 * kSegment;
    switch (random_() % 20) {
      case 0:
        Unmap(segment, 1);
        break;
      case 1:
        Unmap(segment, 0);
        Map(segment);
        break;
      default:
        break;
    }
  }
  EXPECT_GT(on_host, 20);
  EXPECT_GT(on_device, 20);
}

TEST_F(ManagedRestlessTest, MemoryThatTheHostHasLeftGoesBackToTheDevice) {
  ASSERT_NO_FATAL_FAILURE(BringToHost());
  // The GPU goes on alone. Work that names other memory says nothing about this one.
  const uint64_t kernel = EmptyKernel();
  ASSERT_NE(kernel, 0u);
  for (uint64_t i = 0; i < 50; ++i) Fill(i, 1, char(i));
  EXPECT_TRUE(IsOnHost(0));
  for (uint64_t i = 0; i < 50; ++i) client_->Send(kCall_cuLaunchKernel, client_->Launch(kernel, {}));
  EXPECT_EQ(client_->Synchronize(), CUDA_SUCCESS);
  EXPECT_FALSE(IsOnHost(0));
  Fetch(0, kSegment);
  EXPECT_EQ(InFile(0, kSegment), model_.substr(0, kSegment));
}

// The GPU is never idle, because its work waits for a request that is yet to come.
TEST_F(ManagedRestlessTest, WorkThatWaitsForTheProgramDoesNotWaitForever) {
  const uint64_t stream = client_->Stream(), other = client_->Stream();
  const uint64_t kernel = EmptyKernel();
  ASSERT_NO_FATAL_FAILURE(BringToHost());
  ASSERT_NO_FATAL_FAILURE(Hold(stream));
  for (int i = 0; i < 30; ++i) client_->Send(kCall_cuLaunchKernel, client_->Launch(kernel, {}, stream));
  LetGo(other);
  Fetch(0, kSegment);
  EXPECT_EQ(InFile(0, kSegment), model_.substr(0, kSegment));
}

TEST_F(ManagedRestlessTest, ItsContextEnds) {
  ASSERT_NO_FATAL_FAILURE(BringToHost());
  wire::cuDevicePrimaryCtxRelease_v2_Request end;
  end.context = context_;
  ASSERT_EQ(client_->Call(kCall_cuDevicePrimaryCtxRelease_v2, end), CUDA_SUCCESS);
  client_->context_slot = 0;
  client_->OpenContext();
  Fetch(0, kSegment);
  EXPECT_EQ(InFile(0, kSegment), model_.substr(0, kSegment));
  Fill(100, 10, 'n');
  Fetch(0, kSegment);
  EXPECT_EQ(InFile(0, kSegment), model_.substr(0, kSegment));
}

// A program may go by a function of the host's that no work follows. When the client has run it, the driver still has
// to note that.
TEST_F(ManagedInTimeTest, AStreamIsIdleBehindItsLastFunction) {
  MapManaged();
  const uint64_t one = client_->Stream(), other = client_->Stream();
  for (int i = 0; i < 300; ++i) {
    RunFunction(one);
    EXPECT_FALSE(FindsWork()) << i;
    RunFunction(other);
    EXPECT_FALSE(FindsWork(other)) << i;
  }
}

TEST_F(ManagedInTimeTest, AFunctionHidesNoOtherWork) {
  MapManaged();
  const uint64_t one = client_->Stream(), other = client_->Stream();
  ASSERT_NO_FATAL_FAILURE(Hold(other));
  RunFunction(one);
  EXPECT_TRUE(FindsWork());
  EXPECT_FALSE(FindsWork(one));
  LetGo(one);
  EXPECT_FALSE(FindsWork());
}

class ManagedSmallTest : public ManagedTest {
 protected:
  ManagedSmallTest() : ManagedTest("0") {}
  void SetUp() override {
    setenv("SOFTGPU_MEMORY", "64M", 1);
    ManagedTest::SetUp();
    unsetenv("SOFTGPU_MEMORY");
  }
};

// The driver needs some for itself, as for the code of a kernel that is launched for the first time.
TEST_F(ManagedSmallTest, SomeOfTheGpuStaysFree) {
  wire::OpManagedMap_Request in;
  in.bytes = ManagedMemory::kPage;
  CUresult result = CUDA_SUCCESS;
  uint64_t mapped = 0;
  for (; result == CUDA_SUCCESS && mapped < 100; ++mapped) {
    in.address = kManagedBase + mapped * ManagedMemory::kPage;
    result = client_->Call(kOpManagedMap, in);
  }
  EXPECT_EQ(result, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_GT(mapped, 20u);
  ASSERT_EQ(client_->Call(kCall_cuMemGetInfo_v2, wire::cuMemGetInfo_v2_Request()), CUDA_SUCCESS);
  const auto info = client_->Decode<wire::cuMemGetInfo_v2_Reply>();
  EXPECT_GE(info.free, info.total / 64);
}

// A client that has been restarted or moved sends all of a variable's bytes to a worker that has just loaded its
// module.
TEST_F(ManagedTest, FirstBytesOfAVariableAreNoWriteOfTheGpu) {
  const uint64_t module = client_->LoadModule(
      ".version 7.0\n.target sm_75\n.address_size 64\n"
      ".visible .global .attribute(.managed) .align 4 .b8 variable[4] = {1, 2, 3, 4};\n");
  wire::cuModuleGetGlobal_v2_Request find;
  find.hmod = module;
  find.name = "variable";
  ASSERT_EQ(client_->Call(kCall_cuModuleGetGlobal_v2, find), CUDA_SUCCESS);
  const auto variable = client_->Decode<wire::cuModuleGetGlobal_v2_Reply>();
  wire::OpMirrorAdd_Request add;
  add.address = variable.dptr;
  add.bytes = variable.bytes;
  ASSERT_EQ(client_->Call(kOpMirrorAdd, add), CUDA_SUCCESS);
  Tell(variable.dptr, "ab");
  Tell(variable.dptr + 2, "cd");
  EXPECT_FALSE(WasLost());
  EXPECT_EQ(client_->Read(variable.dptr, 4), "abcd");
  // From then on whatever differs is the GPU's.
  ASSERT_EQ(client_->Write(variable.dptr, "gggg"), CUDA_SUCCESS);
  ASSERT_EQ(client_->Synchronize(), CUDA_SUCCESS);
  Tell(variable.dptr, "h");
  EXPECT_TRUE(WasLost());
}

}  // namespace
}  // namespace cuda_remote::server
