// SPDX-License-Identifier: Apache-2.0
// Which work a free waits for in a session with two GPUs: what may use the memory, and no other.

#include <cuda.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "server/worker/testing/client.h"
#include "server/worker/testing/worker_process.h"

namespace cuda_remote::server {
namespace {

constexpr uint64_t kBytes = 4 << 20;  // a block of its own, which the next allocation of this size gets
constexpr uint32_t kNonBlocking = CU_STREAM_NON_BLOCKING;

class FreeTest : public testing::Test {
 protected:
  void SetUp() override {
    setenv("SOFTGPU_DEVICES", "2", 1);
    worker_ = std::make_unique<WorkerProcess>(
        std::vector<std::string>{WorkerPath(), "--driver", "softgpu/libsoftgpu.so", "--log-level", "warn"});
    unsetenv("SOFTGPU_DEVICES");
    client_ = std::make_unique<TestClient>(worker_->Connect(nullptr));
    for (int gpu : {0, 1}) {
      wire::cuDevicePrimaryCtxRetain_Request in;
      in.context = contexts_[gpu] = client_->NewHandle(Kind::kContext);
      in.device = gpu;
      ASSERT_EQ(client_->Call(kCall_cuDevicePrimaryCtxRetain, in), CUDA_SUCCESS);
    }
    memory_ = Allocate(0, kBytes);
    other_ = Allocate(1, kBytes);
    flag_ = Allocate(1, 4);
    ASSERT_EQ(client_->Write(flag_, std::string(4, 0)), CUDA_SUCCESS);
    held_ = NewStream(1);
    free_ = NewStream(1);
    Enter(0);
    ASSERT_EQ(client_->Write(memory_, std::string(kBytes, 'a')), CUDA_SUCCESS);
    ASSERT_EQ(client_->Synchronize(), CUDA_SUCCESS);
  }

  void Enter(int gpu) { client_->context_slot = SlotOf(contexts_[gpu]); }
  uint64_t Allocate(int gpu, uint64_t bytes) {
    Enter(gpu);
    wire::OpMemAlloc_Request in;
    in.bytes = bytes;
    in.device = gpu;
    EXPECT_EQ(client_->Call(kOpMemAlloc, in), CUDA_SUCCESS);
    return client_->Decode<wire::OpMemAlloc_Reply>().address;
  }
  uint64_t NewStream(int gpu) {
    Enter(gpu);
    wire::cuStreamCreate_Request in;
    in.phStream = client_->NewHandle(Kind::kStream);
    in.Flags = kNonBlocking;
    EXPECT_EQ(client_->Call(kCall_cuStreamCreate, in), CUDA_SUCCESS);
    return in.phStream;
  }
  // From now on the second GPU's stream waits for Release.
  void Hold() {
    Enter(1);
    wire::cuStreamWaitValue32_v2_Request in;
    in.stream = held_;
    in.addr = flag_;
    in.value = 1;
    ASSERT_EQ(client_->Call(kCall_cuStreamWaitValue32_v2, in), CUDA_SUCCESS);
  }
  void Release() {
    Enter(1);
    wire::cuStreamWriteValue32_v2_Request in;
    in.stream = free_;
    in.addr = flag_;
    in.value = 1;
    ASSERT_EQ(client_->Call(kCall_cuStreamWriteValue32_v2, in), CUDA_SUCCESS);
  }
  void CopyToOther(uint64_t from, uint64_t stream) {
    wire::cuMemcpyAsync_Request in;
    in.dst = other_;
    in.src = from;
    in.bytes = kBytes;
    in.stream = stream;
    ASSERT_EQ(client_->Call(kCall_cuMemcpyAsync, in), CUDA_SUCCESS);
  }
  void BeginCapture(uint64_t stream) {
    wire::cuStreamBeginCapture_v2_Request in;
    in.hStream = stream;
    in.mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    ASSERT_EQ(client_->Call(kCall_cuStreamBeginCapture_v2, in), CUDA_SUCCESS);
  }

  // Returns the number of the request, once it has had the time that a free takes which does not wait.
  uint64_t BeginFree(uint64_t address) {
    wire::OpMemFree_Request in;
    in.address = address;
    std::string message;
    in.Encode(&message);
    FrameHeader header;
    header.call = kOpMemFree;
    header.context_or_result = client_->context_slot;
    const uint64_t freeing = client_->channel().Begin(header, message, {}, nullptr, 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return freeing;
  }

  // `use` gives the second GPU work, or the right to use the memory. The memory then is not another allocation's before
  // the second GPU is done.
  void ExpectHeld(const std::function<void()>& use) {
    Hold();
    use();
    Enter(0);
    const uint64_t freeing = BeginFree(memory_);
    EXPECT_NE(Allocate(0, kBytes), memory_);
    Release();
    Reply reply;
    EXPECT_EQ(client_->channel().Wait(freeing, &reply), ChannelStatus::kOk);
    EXPECT_EQ(reply.result, 0u);
    EXPECT_EQ(Allocate(0, kBytes), memory_);
  }

  std::unique_ptr<WorkerProcess> worker_;
  std::unique_ptr<TestClient> client_;
  uint64_t contexts_[2] = {};
  uint64_t memory_ = 0;  // of the first GPU; the rest is the second one's
  uint64_t other_ = 0, flag_ = 0, held_ = 0, free_ = 0;
};

TEST_F(FreeTest, WorkThatCannotUseIt) {
  Hold();
  Enter(0);
  EXPECT_EQ(client_->Free(memory_), CUDA_SUCCESS);
  const uint64_t again = Allocate(0, kBytes);
  EXPECT_EQ(again, memory_);
  BeginCapture(NewStream(0));
  EXPECT_EQ(client_->Free(again), CUDA_SUCCESS);
  // The memory of the one that is held.
  Enter(0);
  const uint64_t freeing = BeginFree(other_);
  EXPECT_NE(Allocate(1, kBytes), other_);
  Release();
  Reply reply;
  EXPECT_EQ(client_->channel().Wait(freeing, &reply), ChannelStatus::kOk);
}

TEST_F(FreeTest, Copies) {
  ExpectHeld([&] { CopyToOther(memory_, held_); });
  EXPECT_EQ(client_->Read(other_, kBytes), std::string(kBytes, 'a'));
}

TEST_F(FreeTest, CopiesInAStreamOfAnotherContext) {
  ExpectHeld([&] {
    Enter(0);
    CopyToOther(memory_, held_);
  });
}

TEST_F(FreeTest, CopiesWhileAStreamIsCaptured) {
  ExpectHeld([&] {
    CopyToOther(memory_, held_);
    Enter(0);
    BeginCapture(NewStream(0));
  });
}

TEST_F(FreeTest, CopiesBetweenContexts) {
  ExpectHeld([&] {
    wire::cuMemcpyPeerAsync_Request in;
    in.dst = other_;
    in.dst_context = contexts_[1];
    in.src = memory_;
    in.src_context = contexts_[0];
    in.bytes = kBytes;
    in.stream = held_;
    ASSERT_EQ(client_->Call(kCall_cuMemcpyPeerAsync, in), CUDA_SUCCESS);
  });
}

TEST_F(FreeTest, CopiesFromTheHost) {
  ExpectHeld([&] {
    wire::cuMemcpyHtoDAsync_v2_Request in;
    in.dst = memory_;
    in.bytes = 8;
    in.stream = held_;
    ASSERT_EQ(client_->Call(kCall_cuMemcpyHtoDAsync_v2, in, "contents"), CUDA_SUCCESS);
  });
}

// The worker's own memory for payloads: no request waits for what the program has yet to send.
TEST_F(FreeTest, MemoryForPayloads) {
  constexpr uint64_t kLarge = 40 << 20;
  const uint64_t large = Allocate(0, kLarge);
  Hold();
  Enter(0);
  for (uint64_t i = 0; i < 12; ++i) {
    const uint64_t bytes = kLarge - i * (3 << 20);
    const std::string contents(bytes, char('a' + i));
    ASSERT_EQ(client_->Write(large, contents), CUDA_SUCCESS);
    ASSERT_EQ(client_->Read(large, bytes), contents);
  }
  Release();
  EXPECT_EQ(client_->Synchronize(), CUDA_SUCCESS);
}

uint64_t ResidentBytes(pid_t pid) {
  std::ifstream figures("/proc/" + std::to_string(pid) + "/statm");
  uint64_t whole = 0, resident = 0;
  figures >> whole >> resident;
  return resident * uint64_t(sysconf(_SC_PAGESIZE));
}

// The second answer is too small for the first one's memory, so that much is unused then.
void ReadMuch(TestClient* client, uint64_t from) {
  for (const uint64_t bytes : {uint64_t{196} << 20, uint64_t{90} << 20}) {
    ASSERT_EQ(client->Read(from, bytes).size(), bytes);
  }
}

TEST_F(FreeTest, UnusedMemoryForPayloads) {
  const uint64_t large = Allocate(0, 196 << 20);
  ReadMuch(client_.get(), large);
  const uint64_t before = ResidentBytes(worker_->pid());
  ASSERT_EQ(client_->Read(large, 2 << 20).size(), size_t{2} << 20);  // it needs memory, too
  EXPECT_LT(ResidentBytes(worker_->pid()), before - (uint64_t{200} << 20));
}

TEST_F(FreeTest, UnusedMemoryForPayloadsWithOneContext) {
  wire::cuDevicePrimaryCtxRelease_v2_Request in;
  in.context = contexts_[1];
  in.device = 1;
  ASSERT_EQ(client_->Call(kCall_cuDevicePrimaryCtxRelease_v2, in), CUDA_SUCCESS);
  const uint64_t large = Allocate(0, 196 << 20);
  ReadMuch(client_.get(), large);
  ASSERT_EQ(client_->Synchronize(), CUDA_SUCCESS);
  const uint64_t before = ResidentBytes(worker_->pid());
  // Nothing is at work: any request finds that much is unused.
  ASSERT_EQ(client_->Write(memory_, "c"), CUDA_SUCCESS);
  ASSERT_EQ(client_->Synchronize(), CUDA_SUCCESS);
  EXPECT_LT(ResidentBytes(worker_->pid()), before - (uint64_t{200} << 20));
}

TEST_F(FreeTest, Fills) {
  ExpectHeld([&] {
    wire::cuMemsetD32Async_Request in;
    in.dstDevice = memory_;
    in.N = 4;
    in.hStream = held_;
    ASSERT_EQ(client_->Call(kCall_cuMemsetD32Async, in), CUDA_SUCCESS);
  });
}

TEST_F(FreeTest, MemoryOperations) {
  ExpectHeld([&] {
    CUstreamBatchMemOpParams operation = {};
    operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    operation.writeValue.address = memory_;
    wire::cuStreamBatchMemOp_v2_Request in;
    in.stream = held_;
    in.count = 1;
    in.paramArray = {reinterpret_cast<const char*>(&operation), sizeof(operation)};
    ASSERT_EQ(client_->Call(kCall_cuStreamBatchMemOp_v2, in), CUDA_SUCCESS);
  });
}

TEST_F(FreeTest, PeerAccess) {
  ExpectHeld([&] {
    wire::cuCtxEnablePeerAccess_Request in;
    in.peerContext = contexts_[0];
    ASSERT_EQ(client_->Call(kCall_cuCtxEnablePeerAccess, in), CUDA_SUCCESS);
  });
}

TEST_F(FreeTest, AccessToAPool) {
  ExpectHeld([&] {
    wire::cuDeviceGetDefaultMemPool_Request pool;
    pool.pool = client_->NewHandle(Kind::kMemoryPool);
    ASSERT_EQ(client_->Call(kCall_cuDeviceGetDefaultMemPool, pool), CUDA_SUCCESS);
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = 1;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    wire::cuMemPoolSetAccess_Request in;
    in.pool = pool.pool;
    in.map = {reinterpret_cast<const char*>(&access), sizeof(access)};
    in.count = 1;
    ASSERT_EQ(client_->Call(kCall_cuMemPoolSetAccess, in), CUDA_SUCCESS);
  });
}

TEST_F(FreeTest, Graphs) {
  ExpectHeld([&] {
    wire::cuGraphCreate_Request graph;
    graph.phGraph = client_->NewHandle(Kind::kGraph);
    ASSERT_EQ(client_->Call(kCall_cuGraphCreate, graph), CUDA_SUCCESS);
    wire::cuGraphInstantiateWithParams_Request exec;
    exec.exec = client_->NewHandle(Kind::kGraphExec);
    exec.graph = graph.phGraph;
    ASSERT_EQ(client_->Call(kCall_cuGraphInstantiateWithParams, exec), CUDA_SUCCESS);
    wire::cuGraphLaunch_Request in;
    in.hGraph = exec.exec;
    in.hStream = held_;
    ASSERT_EQ(client_->Call(kCall_cuGraphLaunch, in), CUDA_SUCCESS);
  });
}

}  // namespace
}  // namespace cuda_remote::server
