// SPDX-License-Identifier: Apache-2.0
// Hashes and copies beside the job: the kernel against the definition, and the requests in a worker with the software
// GPU.

#include "server/worker/memory/side_work.h"

#include <cuda.h>
#include <gtest/gtest.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "proto/chunkhash/chunk_hash.h"
#include "proto/driverabi/job_addresses.h"
#include "proto/driverabi/requests.h"
#include "server/driver/driver_table.h"
#include "server/worker/memory/side_reads.h"
#include "server/worker/testing/client.h"
#include "server/worker/testing/worker_process.h"

namespace cuda_remote::server {
namespace {

constexpr char kDriver[] = "softgpu/libsoftgpu.so";
constexpr char kModule[] = R"(.version 7.0
.target sm_75
.address_size 64
.visible .global .align 1 .b8 odd[3];
.visible .global .align 4 .b8 table[1001];
.visible .entry nothing() { ret; }
)";

std::string Pattern(size_t bytes, unsigned seed) {
  std::string out(bytes, 0);
  for (size_t i = 0; i < bytes; ++i) out[i] = char((i + seed) * (i + 7) >> 5);
  return out;
}

std::vector<ChunkHash> HashesOf(const std::string& bytes, size_t chunk) {
  std::vector<ChunkHash> out;
  for (size_t at = 0; at < bytes.size(); at += chunk) {
    out.push_back(HashChunk(bytes.data() + at, std::min(chunk, bytes.size() - at)));
  }
  return out;
}

// Without a session.
class SideWorkTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(driver_.cuInit(0), CUDA_SUCCESS);
    ASSERT_EQ(driver_.cuCtxCreate_v2(&context_, 0, 0), CUDA_SUCCESS);
  }
  void TearDown() override { EXPECT_EQ(driver_.cuCtxDestroy_v2(context_), CUDA_SUCCESS); }
  CUdeviceptr MemoryWith(const std::string& bytes) {
    CUdeviceptr memory = 0;
    EXPECT_EQ(driver_.cuMemAlloc_v2(&memory, bytes.size()), CUDA_SUCCESS);
    EXPECT_EQ(driver_.cuMemcpyHtoD_v2(memory, bytes.data(), bytes.size()), CUDA_SUCCESS);
    return memory;
  }
  const DriverTable driver_ = *LoadDriver(kDriver);
  CUcontext context_ = nullptr;
};

// PTX that the software GPU interprets: slow, so little memory. Lengths around words, rows of all lanes, and the turn
// of the unrolled loop; addresses at which words are not aligned.
TEST_F(SideWorkTest, TheKernelGivesTheValuesOfTheDefinition) {
  StagingPool staging(driver_);
  SideWork work(driver_, &staging, /*software=*/false);
  const std::string bytes = Pattern(70000, 1);
  const CUdeviceptr memory = MemoryWith(bytes);
  std::vector<SideWork::Piece> pieces;
  for (const uint64_t offset : {0, 16, 1, 9}) {
    for (const uint64_t count : {1, 15, 16, 17, 8191, 8192, 8193, 3 * 8192 + 16, 4 * 8192, 65536 + 40}) {
      pieces.push_back({memory + offset, count});
    }
  }
  for (const uint32_t every : {1u, 2u, 3u, 16u}) {
    std::shared_ptr<char> hashes;
    SideWork::Wait wait;
    ASSERT_EQ(work.Hash(1, pieces, every, &hashes, &wait), CUDA_SUCCESS);
    ASSERT_EQ(wait(), CUDA_SUCCESS);
    for (size_t i = 0; i < pieces.size(); ++i) {
      ChunkHash got;
      memcpy(&got, hashes.get() + i * sizeof(got), sizeof(got));
      EXPECT_EQ(got, HashRows(bytes.data() + (pieces[i].address - memory), pieces[i].bytes, every))
          << pieces[i].bytes << " bytes at " << pieces[i].address - memory << ", one row of " << every;
    }
  }
}

// What the driver was asked to copy to the host, by a table that counts it.
struct Counted {
  static inline DriverTable real;
  static inline std::atomic<int> copies{0};
  static CUresult CUDAAPI Copy(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    EXPECT_LE(bytes, size_t{2} << 20);
    ++copies;
    return real.cuMemcpyDtoHAsync_v2(to, from, bytes, stream);
  }
};

// So small copies of the job's can come in between. Those to host memory are given to the driver by the thread that
// waits, in whose place the executor goes on; but nothing that is read may go from the beginning on.
TEST_F(SideWorkTest, CopiesInPieces) {
  Counted::real = driver_;
  DriverTable table = driver_;
  table.cuMemcpyDtoHAsync_v2 = &Counted::Copy;
  StagingPool staging(table);
  SideWork work(table, &staging, /*software=*/true);
  const std::string bytes = Pattern((5 << 20) + 77, 8);
  const CUdeviceptr memory = MemoryWith(bytes);
  for (const auto& [count, pieces] :
       {std::pair{size_t{1}, 1}, {size_t{2} << 20, 1}, {size_t{4} << 20, 2}, {bytes.size() - 3, 3}}) {
    for (const bool in_wait : {false, true}) {
      std::string out(count + 1, '?');
      SideWork::Wait wait;
      const SideWork::Piece piece{memory + 3, count};
      Counted::copies = 0;
      ASSERT_EQ(in_wait ? work.CopyOutInWait(1, piece, &out[0], &wait) : work.CopyOut(1, piece, &out[0], &wait),
                CUDA_SUCCESS);
      EXPECT_EQ(Counted::copies, in_wait ? 0 : pieces);
      EXPECT_TRUE(SideReadsAreUnderWay());
      ASSERT_EQ(wait(), CUDA_SUCCESS);
      EXPECT_EQ(Counted::copies, pieces);
      EXPECT_FALSE(SideReadsAreUnderWay());
      EXPECT_EQ(out, bytes.substr(3, count) + "?") << count;
    }
  }
}

// A copy that the driver does not take: what it took before has ended, and nothing is held up.
TEST_F(SideWorkTest, ACopyInTheWaitMayFail) {
  StagingPool staging(driver_);
  SideWork work(driver_, &staging, /*software=*/true);
  const CUdeviceptr memory = MemoryWith(Pattern(4 << 20, 9));
  std::string out(8 << 20, '?');
  SideWork::Wait wait;
  // Its end lies behind the allocation.
  ASSERT_EQ(work.CopyOutInWait(1, {memory, out.size()}, &out[0], &wait), CUDA_SUCCESS);
  EXPECT_NE(wait(), CUDA_SUCCESS);
  EXPECT_FALSE(SideReadsAreUnderWay());
  ASSERT_EQ(work.CopyOutInWait(1, {memory, 1 << 20}, &out[0], &wait), CUDA_SUCCESS);
  EXPECT_EQ(wait(), CUDA_SUCCESS);
  EXPECT_EQ(out.substr(0, 1 << 20), Pattern(4 << 20, 9).substr(0, 1 << 20));
}

class SideRequests : public testing::Test {
 protected:
  explicit SideRequests(const std::string& driver = kDriver)
      : worker_({WorkerPath(), "--driver", driver, "--log-level", "off"}), client_(worker_.Connect()) {
    context_ = client_.OpenContext();
  }

  wire::Region Memory(uint64_t address, uint64_t bytes) {
    wire::Region region;
    region.kind = 1;
    region.address = address;
    region.bytes = bytes;
    region.context = context_;
    return region;
  }
  CUresult Hash(const std::vector<wire::Region>& regions, uint64_t chunk, std::vector<ChunkHash>* hashes,
                uint32_t every = 0) {
    wire::OpHashMemory_Request in;
    in.every = every;
    in.regions.assign(regions.begin(), regions.end());
    in.chunk_bytes = chunk;
    hashes->assign(20000, {});
    const CUresult result = client_.Call(kOpHashMemory, in, {}, hashes->data(), hashes->size() * sizeof(ChunkHash));
    hashes->resize(result == CUDA_SUCCESS ? client_.reply.payload_bytes / sizeof(ChunkHash) : 0);
    return result;
  }
  // Side work waits for nothing of the job's.
  CUresult Write(uint64_t address, const std::string& bytes) {
    const CUresult result = client_.Write(address, bytes);
    return result == CUDA_SUCCESS ? client_.Synchronize() : result;
  }
  CUresult Peek(uint64_t address, std::string* out) {
    wire::OpPeekMemory_Request in;
    in.address = address;
    in.bytes = out->size();
    in.context = context_;
    return client_.Call(kOpPeekMemory, in, {}, &(*out)[0], out->size());
  }

  WorkerProcess worker_;
  TestClient client_;
  uint64_t context_ = 0;
  std::vector<ChunkHash> hashes_;
};

TEST_F(SideRequests, HashesRegionsInChunks) {
  const std::string first = Pattern(5000000, 2), second = Pattern(700, 3);
  const uint64_t a = client_.Allocate(first.size()), b = client_.Allocate(second.size());
  ASSERT_EQ(Write(a, first), CUDA_SUCCESS);
  ASSERT_EQ(Write(b, second), CUDA_SUCCESS);
  for (const size_t chunk : {size_t{4096}, size_t{2} << 20}) {
    std::vector<ChunkHash> wanted = HashesOf(first, chunk);
    wanted.push_back(HashChunk(second.data(), second.size()));
    ASSERT_EQ(Hash({Memory(a, first.size()), Memory(b, second.size())}, chunk, &hashes_), CUDA_SUCCESS);
    EXPECT_EQ(hashes_, wanted) << chunk;
  }
  // A part, and one byte that changes.
  ASSERT_EQ(Hash({Memory(a + 4096, 8192)}, 4096, &hashes_), CUDA_SUCCESS);
  EXPECT_EQ(hashes_, HashesOf(first.substr(4096, 8192), 4096));
  const std::vector<ChunkHash> before = hashes_;
  ASSERT_EQ(Write(a + 4096 + 5000, "?"), CUDA_SUCCESS);
  ASSERT_EQ(Hash({Memory(a + 4096, 8192)}, 4096, &hashes_), CUDA_SUCCESS);
  EXPECT_EQ(hashes_[0], before[0]);
  EXPECT_NE(hashes_[1], before[1]);
  // Some rows only.
  ASSERT_EQ(Hash({Memory(b, second.size()), Memory(a + 8192, 3000000)}, 2 << 20, &hashes_, 16), CUDA_SUCCESS);
  ASSERT_EQ(hashes_.size(), 3u);
  EXPECT_EQ(hashes_[0], HashChunk(second.data(), second.size()));
  EXPECT_EQ(hashes_[2], HashRows(first.data() + 8192 + (2 << 20), 3000000 - (2 << 20), 16));
}

TEST_F(SideRequests, HashesVariables) {
  const uint64_t module = client_.LoadModule(kModule);
  ASSERT_NE(module, 0u);
  std::vector<wire::Region> regions;
  std::vector<ChunkHash> wanted;
  for (const auto& [name, bytes] : {std::pair<const char*, size_t>{"odd", 3}, {"table", 1001}}) {
    const std::string contents = Pattern(bytes, unsigned(bytes));
    wire::OpWriteMemory_Request write;
    write.object = module;
    write.symbol = name;
    write.bytes = bytes;
    ASSERT_EQ(client_.Call(kOpWriteMemory, write, contents), CUDA_SUCCESS);
    wire::Region region = Memory(1, bytes);
    region.kind = 2;
    region.object = module;
    region.symbol = name;
    regions.push_back(region);
    wanted.push_back(HashChunk(contents.data(), bytes));
  }
  ASSERT_EQ(client_.Call(kOpDrain, wire::OpDrain_Request()), CUDA_SUCCESS);
  ASSERT_EQ(Hash(regions, 4096, &hashes_), CUDA_SUCCESS);
  EXPECT_EQ(hashes_, wanted);
  regions[0].bytes = 4;
  EXPECT_EQ(Hash(regions, 4096, &hashes_), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(SideRequests, ReadsOnlyWhatTheSessionOwns) {
  const uint64_t memory = client_.Allocate(100000);
  std::string out(1000, 0);
  EXPECT_EQ(Hash({Memory(memory, 100001)}, 4096, &hashes_), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Hash({Memory(memory - 1, 10)}, 4096, &hashes_), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Hash({Memory(memory, UINT64_MAX)}, 4096, &hashes_), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Hash({Memory(memory, 1000)}, 0, &hashes_), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Hash({Memory(memory, 1000)}, 16, &hashes_), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Peek(memory + 99500, &out), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Peek(uint64_t(uintptr_t(out.data())), &out), CUDA_ERROR_INVALID_VALUE);
  wire::OpPeekMemory_Request in;
  in.address = memory;
  in.bytes = 1000;
  in.context = context_;
  in.to = uint64_t(uintptr_t(out.data()));
  EXPECT_EQ(client_.Call(kOpPeekMemory, in), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(client_.Free(memory), CUDA_SUCCESS);
  EXPECT_EQ(Hash({Memory(memory, 1000)}, 4096, &hashes_), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(SideRequests, PeeksAtMemory) {
  const std::string bytes = Pattern(300000, 4);
  const uint64_t memory = client_.Allocate(bytes.size());
  ASSERT_EQ(Write(memory, bytes), CUDA_SUCCESS);
  std::string out(200000, 0);
  ASSERT_EQ(Peek(memory + 777, &out), CUDA_SUCCESS);
  EXPECT_EQ(out, bytes.substr(777, out.size()));
}

// As a checkpoint does: chunks are copied inside the GPU, the job changes its memory, and the copies are read.
TEST_F(SideRequests, KeepsASnapshotOnTheGpu) {
  const std::string bytes = Pattern(900000, 5);
  const uint64_t memory = client_.Allocate(bytes.size());
  ASSERT_EQ(Write(memory, bytes), CUDA_SUCCESS);
  wire::OpMemAlloc_Request allocate;
  allocate.bytes = 1 << 20;
  allocate.flags = driverabi::kAllocateSnapshot;
  ASSERT_EQ(client_.Call(kOpMemAlloc, allocate), CUDA_SUCCESS);
  const uint64_t snapshot = client_.Decode<wire::OpMemAlloc_Reply>().address;
  wire::OpPeekMemory_Request copy;
  copy.address = memory;
  copy.bytes = bytes.size();
  copy.context = context_;
  copy.to = snapshot + 4096;
  ASSERT_EQ(client_.Call(kOpPeekMemory, copy), CUDA_SUCCESS);
  copy.to = snapshot + (1 << 20) + (1 << 20);
  EXPECT_EQ(client_.Call(kOpPeekMemory, copy), CUDA_ERROR_INVALID_VALUE);
  // It is none of the job's memory.
  ASSERT_EQ(client_.Call(kOpRegions, wire::OpRegions_Request()), CUDA_SUCCESS);
  for (const wire::Region& region : client_.Decode<wire::OpRegions_Reply>().regions) {
    EXPECT_LT(region.address, driverabi::kSnapshotBase);
  }
  EXPECT_EQ(Write(snapshot, "no"), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(Write(memory, std::string(bytes.size(), 'z')), CUDA_SUCCESS);
  std::string out(bytes.size() / 2, 0);
  ASSERT_EQ(Peek(snapshot + 4096 + out.size(), &out), CUDA_SUCCESS);
  EXPECT_EQ(out, bytes.substr(out.size()));
  ASSERT_EQ(Peek(snapshot + 4096, &out), CUDA_SUCCESS);
  EXPECT_EQ(out, bytes.substr(0, out.size()));
  // All has been read.
  EXPECT_EQ(Peek(snapshot + 4096, &out), CUDA_ERROR_INVALID_VALUE);
}

// A `__managed__` variable is saved once: by the worker, until the client has it mirrored, and so in its process.
TEST_F(SideRequests, LeavesOutVariablesThatTheProcessHas) {
  const uint64_t module = client_.LoadModule(
      ".version 7.0\n.target sm_75\n.address_size 64\n.visible .global .attribute(.managed) .align 4 .b8 "
      "shared[5000];\n"
      ".visible .global .align 4 .u32 own;\n.visible .entry say() { ret; }\n");
  const auto saved = [&] {
    EXPECT_EQ(client_.Call(kOpRegions, wire::OpRegions_Request()), CUDA_SUCCESS);
    std::vector<std::string> names;
    for (const wire::Region& region : client_.Decode<wire::OpRegions_Reply>().regions) {
      if (region.object == module) names.emplace_back(region.symbol);
    }
    std::sort(names.begin(), names.end());
    return names;
  };
  wire::cuModuleGetGlobal_v2_Request find;
  find.hmod = module;
  find.name = "shared";
  ASSERT_EQ(client_.Call(kCall_cuModuleGetGlobal_v2, find), CUDA_SUCCESS);
  const auto variable = client_.Decode<wire::cuModuleGetGlobal_v2_Reply>();
  EXPECT_TRUE(variable.managed);
  EXPECT_EQ(saved(), (std::vector<std::string>{"own", "shared"}));
  wire::OpMirrorAdd_Request add;
  add.address = variable.dptr;
  add.bytes = variable.bytes;
  ASSERT_EQ(client_.Call(kOpMirrorAdd, add), CUDA_SUCCESS);
  EXPECT_EQ(saved(), std::vector<std::string>{"own"});
}

// Blocks of this size are unmapped when they are freed. A read that has begun must not find nothing there.
TEST_F(SideRequests, MemoryStaysUntilItHasBeenRead) {
  constexpr uint64_t kBytes = 192 << 20;
  for (int i = 0; i < 3; ++i) {
    const uint64_t memory = client_.Allocate(kBytes);
    ASSERT_NE(memory, 0u);
    wire::OpHashMemory_Request in;
    in.regions.push_back(Memory(memory, kBytes));
    in.chunk_bytes = 2 << 20;
    client_.Send(kOpHashMemory, in);
    ASSERT_EQ(client_.Free(memory), CUDA_SUCCESS);
    ASSERT_EQ(client_.Synchronize(), CUDA_SUCCESS);
  }
  EXPECT_EQ(client_.pending, CUDA_SUCCESS);
}

// The software GPU under a name by which the worker does not know it: hashes come from the kernel.
std::string OtherDriver() {
  std::string path = testing::TempDir() + "/libgpu.so";
  unlink(path.c_str());
  char here[PATH_MAX];
  EXPECT_NE(realpath(kDriver, here), nullptr);
  EXPECT_EQ(symlink(here, path.c_str()), 0);
  return path;
}

class SideRequestsOfAGpu : public SideRequests {
 protected:
  SideRequestsOfAGpu() : SideRequests(OtherDriver()) {}
};

// The first hash loads code, which needs an idle GPU. A job that always has work in its stream must not lose its
// rounds.
TEST_F(SideRequestsOfAGpu, TheFirstHashWaitsForWorkThatHasBegun) {
  const uint64_t module = client_.LoadModule(
      ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry busy(.param .u32 turns) {\n"
      ".reg .u32 %r<3>;\n.reg .pred %p;\nld.param.u32 %r1, [turns];\nagain: sub.u32 %r1, %r1, 1;\n"
      "setp.ne.u32 %p, %r1, 0;\n@%p bra again;\nret; }\n");
  const uint64_t kernel = client_.Function(module, "busy");
  ASSERT_NE(kernel, 0u);
  const uint64_t memory = client_.Allocate(4096);
  ASSERT_EQ(Write(memory, Pattern(4096, 1)), CUDA_SUCCESS);
  const auto work = [&](uint32_t turns) {
    client_.Send(kCall_cuLaunchKernel, client_.Launch(kernel, {reinterpret_cast<const char*>(&turns), sizeof(turns)}));
  };
  // On a busy machine one attempt may not be enough.
  CUresult result = CUDA_ERROR_NOT_READY;
  for (int i = 0; i < 100 && result == CUDA_ERROR_NOT_READY; ++i) {
    work(2000000);
    result = Hash({Memory(memory, 4096)}, 4096, &hashes_);
  }
  ASSERT_EQ(result, CUDA_SUCCESS);
  EXPECT_EQ(hashes_, HashesOf(Pattern(4096, 1), 4096));
}

// It does not wait for ever: work may need a request that comes behind the hash.
TEST_F(SideRequestsOfAGpu, TheFirstHashIsRefusedWhileWorkGoesOn) {
  const uint64_t module = client_.LoadModule(
      ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry spin(.param .u64 flag) {\n"
      ".reg .u32 %r;\n.reg .u64 %a;\n.reg .pred %p;\nld.param.u64 %a, [flag];\n"
      "again: ld.volatile.global.u32 %r, [%a];\nsetp.eq.u32 %p, %r, 0;\n@%p bra again;\nret; }\n");
  const uint64_t kernel = client_.Function(module, "spin");
  ASSERT_NE(kernel, 0u);
  const uint64_t memory = client_.Allocate(4096);
  ASSERT_EQ(Write(memory, std::string(4096, 0)), CUDA_SUCCESS);
  const uint64_t spinning = client_.Stream(), other = client_.Stream();
  client_.Send(kCall_cuLaunchKernel,
               client_.Launch(kernel, {reinterpret_cast<const char*>(&memory), sizeof(memory)}, spinning));
  EXPECT_EQ(Hash({Memory(memory, 4096)}, 4096, &hashes_), CUDA_ERROR_NOT_READY);
  wire::cuMemsetD32Async_Request end;
  end.dstDevice = memory;
  end.ui = 1;
  end.N = 1;
  end.hStream = other;
  ASSERT_EQ(client_.Call(kCall_cuMemsetD32Async, end), CUDA_SUCCESS);
  ASSERT_EQ(client_.Synchronize(), CUDA_SUCCESS);
  ASSERT_EQ(Hash({Memory(memory, 4096)}, 4096, &hashes_), CUDA_SUCCESS);
}

// Otherwise each step of a job that waits for its context would wait for what a checkpoint copies just then.
TEST_F(SideRequestsOfAGpu, AWaitForTheContextDoesNotWaitForSideWork) {
  // Takes much longer than all else here.
  constexpr uint64_t kBytes = 32 << 20, kTimes = 8;
  const uint64_t module = client_.LoadModule(
      ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry busy(.param .u32 turns) {\n"
      ".reg .u32 %r<3>;\n.reg .pred %p;\nld.param.u32 %r1, [turns];\nagain: sub.u32 %r1, %r1, 1;\n"
      "setp.ne.u32 %p, %r1, 0;\n@%p bra again;\nret; }\n");
  const uint64_t kernel = client_.Function(module, "busy");
  ASSERT_NE(kernel, 0u);
  const uint64_t memory = client_.Allocate(kBytes);
  ASSERT_EQ(Write(memory, std::string(4096, 1)), CUDA_SUCCESS);
  // Loads the code.
  ASSERT_EQ(Hash({Memory(memory, 4096)}, 4096, &hashes_), CUDA_SUCCESS);
  wire::OpHashMemory_Request in;
  in.regions.assign(kTimes, Memory(memory, kBytes));
  in.chunk_bytes = 2 << 20;
  std::string message;
  in.Encode(&message);
  FrameHeader header;
  header.call = kOpHashMemory;
  std::vector<ChunkHash> hashes(kTimes * kBytes / in.chunk_bytes);
  const uint64_t hash = client_.channel().Begin(header, message, {}, hashes.data(), hashes.size() * sizeof(hashes[0]));
  ASSERT_NE(hash, 0u);
  const uint32_t turns = 300000;
  client_.Send(kCall_cuLaunchKernel, client_.Launch(kernel, {reinterpret_cast<const char*>(&turns), sizeof(turns)}));
  ASSERT_EQ(client_.Synchronize(), CUDA_SUCCESS);
  Reply reply;
  EXPECT_EQ(client_.channel().WaitFor(hash, 1, &reply), ChannelStatus::kTimeout) << "the hash was waited for";
  // What the job has put into its streams was waited for.
  EXPECT_EQ(client_.Call(kCall_cuStreamQuery, wire::cuStreamQuery_Request()), CUDA_SUCCESS);
  EXPECT_EQ(client_.channel().Wait(hash, &reply), ChannelStatus::kOk);
  EXPECT_EQ(reply.result, CUDA_SUCCESS);
  EXPECT_EQ(client_.pending, CUDA_SUCCESS);
}

}  // namespace
}  // namespace cuda_remote::server
