// SPDX-License-Identifier: Apache-2.0
// Host memory that kernels use, with a server on this machine: what is shared, what is mirrored, and at which address
// the GPU finds it. mirrored_memory_test.cc has the same for a server elsewhere.
#include <cuda.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "client/custom/testing/custom_fixture.h"
#include "proto/base/unique_fd.h"
#include "proto/driverabi/requests.h"
#include "proto/mirror/mirror.h"

namespace cuda_remote::client {
namespace {

constexpr size_t kPage = HostArena::kPage;
constexpr size_t kPages = 8;
using driverabi::kUnmapWaitOnly;

// Pages of a file, mapped shared or private, that go with the object.
class FilePages {
 public:
  explicit FilePages(int flags) {
    char path[] = "/dev/shm/mapped-memory-test-XXXXXX";
    file_.Reset(mkstemp(path));
    path_ = path;
    EXPECT_EQ(ftruncate(file_.get(), kPages * kPage), 0);
    memory_ = static_cast<char*>(mmap(nullptr, kPages * kPage, PROT_READ | PROT_WRITE, flags, file_.get(), 0));
    EXPECT_NE(memory_, MAP_FAILED);
  }
  ~FilePages() {
    munmap(memory_, kPages * kPage);
    unlink(path_.c_str());
  }
  FilePages(const FilePages&) = delete;
  FilePages& operator=(const FilePages&) = delete;

  char* memory() const { return memory_; }
  bool IsFile(const UniqueFd& other) const {
    struct stat mine, theirs;
    return other.ok() && fstat(file_.get(), &mine) == 0 && fstat(other.get(), &theirs) == 0 &&
           mine.st_ino == theirs.st_ino && mine.st_dev == theirs.st_dev;
  }

 private:
  std::string path_;
  UniqueFd file_;
  char* memory_ = nullptr;
};

class MappedMemoryTest : public CustomTest {
 protected:
  void SetUp() override {
    CustomTest::SetUp();
    for (const uint32_t call : {kOpHostMap, kOpHostUnmap, kOpMirrorAdd, kOpMirrorRead})
      server_->On(call, FakeServer::Answer());
  }

  // Where the GPU finds it; else the error, negative.
  static int64_t DevicePointer(const void* memory) {
    CUdeviceptr device = 0;
    const CUresult result = cuMemHostGetDevicePointer(&device, const_cast<void*>(memory), 0);
    return result == CUDA_SUCCESS ? int64_t(device) : -int64_t(result);
  }
  static bool IsOnDevice(const void* memory) {
    Session* const session = Session::Get();
    ReaderLock lock(&session->memory().mutex());
    const auto* const range = session->memory().host_ranges().Find(reinterpret_cast<uint64_t>(memory));
    return range && range->value.on_device;
  }
};

constexpr int64_t kNone = -int64_t(CUDA_ERROR_INVALID_VALUE);

TEST_F(MappedMemoryTest, PinnedMemoryIsTheGpusAtTheSameAddress) {
  void* pinned = nullptr;
  ASSERT_EQ(cuMemHostAlloc(&pinned, 1000, 0), CUDA_SUCCESS);
  Sent();
  EXPECT_EQ(DevicePointer(pinned), int64_t(pinned));
  EXPECT_EQ(DevicePointer(static_cast<char*>(pinned) + 999), int64_t(pinned) + 999);
  EXPECT_EQ(Sent(), Calls()) << "the server has it anyway";
  EXPECT_EQ(DevicePointer(static_cast<char*>(pinned) + 1000), kNone) << "past its end";
  ASSERT_EQ(cuMemFreeHost(pinned), CUDA_SUCCESS);
  EXPECT_EQ(DevicePointer(pinned), kNone);
}

TEST_F(MappedMemoryTest, ArgumentsThatAreWrong) {
  int ordinary = 0;
  void* pinned = nullptr;
  CUdeviceptr device = 77, own = 0;
  ASSERT_EQ(cuMemHostAlloc(&pinned, 1000, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuMemAlloc(&own, 1000), CUDA_SUCCESS);
  Sent();
  EXPECT_EQ(cuMemHostGetDevicePointer(nullptr, pinned, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemHostGetDevicePointer(&device, pinned, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemHostGetDevicePointer(&device, nullptr, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemHostGetDevicePointer(&device, &ordinary, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemHostGetDevicePointer(&device, reinterpret_cast<void*>(own), 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(device, 77u);
  EXPECT_EQ(Sent(), Calls());
  EXPECT_EQ(cuMemFree(own), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFreeHost(pinned), CUDA_SUCCESS);
}

TEST_F(MappedMemoryTest, RegisteredPagesOfAFileAreShared) {
  const FilePages pages(MAP_SHARED);
  // Not at the begin of a page, nor of the file.
  char* const memory = pages.memory() + 2 * kPage + 100;
  constexpr size_t kBytes = 5000;
  strcpy(memory, "what the host has written");
  ASSERT_EQ(cuMemHostRegister(memory, kBytes, CU_MEMHOSTREGISTER_PORTABLE), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls()) << "nobody has asked for it yet";
  const int64_t device = DevicePointer(memory);
  ASSERT_GT(device, 0);
  EXPECT_NE(device, int64_t(memory)) << "the server has something else there, perhaps";
  EXPECT_EQ(device % kPage, 100);
  const auto request = SentOne<wire::OpHostMap_Request>();
  EXPECT_TRUE(pages.IsFile(server_->TakeFile(request.tag)));
  EXPECT_EQ(request.offset, 2 * kPage);
  EXPECT_EQ(request.address, HostArena::PageOf(uint64_t(device)));
  EXPECT_EQ(request.bytes, 2 * kPage);
  EXPECT_EQ(request.flags, unsigned(CU_MEMHOSTREGISTER_PORTABLE));
  EXPECT_FALSE(request.managed);

  EXPECT_EQ(DevicePointer(memory + 4999), device + 4999);
  EXPECT_EQ(DevicePointer(memory + kBytes), kNone);
  EXPECT_EQ(DevicePointer(reinterpret_cast<void*>(device + 7)), device + 7) << "the GPU's address stays what it is";
  CUdeviceptr answer = 0;
  void* host = nullptr;
  EXPECT_EQ(cuPointerGetAttribute(&answer, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, CUdeviceptr(memory) + 9), CUDA_SUCCESS);
  EXPECT_EQ(answer, CUdeviceptr(device + 9));
  EXPECT_EQ(cuPointerGetAttribute(&host, CU_POINTER_ATTRIBUTE_HOST_POINTER, CUdeviceptr(device) + 9), CUDA_SUCCESS);
  EXPECT_EQ(host, memory + 9);
  EXPECT_EQ(Sent(), Calls()) << "it is shared once";
  // Copies take the GPU's address for the application's bytes.
  char copied[9] = {};
  EXPECT_EQ(cuMemcpy(CUdeviceptr(copied), CUdeviceptr(device) + 9, 8), CUDA_SUCCESS);
  EXPECT_STREQ(copied, "host has");
  Sent();

  EXPECT_EQ(cuMemHostUnregister(reinterpret_cast<void*>(device)), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  ASSERT_EQ(cuMemHostUnregister(memory), CUDA_SUCCESS);
  EXPECT_EQ(SentOne<wire::OpHostUnmap_Request>().address, HostArena::PageOf(uint64_t(device)));
  EXPECT_EQ(DevicePointer(memory), kNone);
  EXPECT_EQ(DevicePointer(reinterpret_cast<void*>(device)), kNone);
  EXPECT_STREQ(memory, "what the host has written");
  // The addresses serve again.
  ASSERT_EQ(cuMemHostRegister(memory, kBytes, 0), CUDA_SUCCESS);
  EXPECT_EQ(DevicePointer(memory), device);
  EXPECT_EQ(cuMemHostUnregister(memory), CUDA_SUCCESS);
}

TEST_F(MappedMemoryTest, WhatCannotBeSharedIsMirrored) {
  const FilePages pages(MAP_PRIVATE);
  char* const memory = pages.memory() + 100;
  constexpr size_t kBytes = 5000;
  ASSERT_EQ(cuMemHostRegister(memory, kBytes, 0), CUDA_SUCCESS);
  const int64_t device = DevicePointer(memory);
  ASSERT_GT(device, 0);
  EXPECT_EQ(Sent(), (Calls{kOpHostMap, kOpMirrorAdd}));
  const auto map = SentAt<wire::OpHostMap_Request>(0);
  EXPECT_EQ(map.tag, 0u) << "memory of the server's own";
  EXPECT_EQ(map.address, HostArena::PageOf(uint64_t(device)));
  EXPECT_EQ(map.bytes, 2 * kPage);
  const auto add = SentAt<wire::OpMirrorAdd_Request>(1);
  EXPECT_EQ(add.address, uint64_t(device));
  EXPECT_EQ(add.bytes, kBytes);
  EXPECT_EQ(DevicePointer(memory + 1), device + 1);
  EXPECT_EQ(Sent(), Calls());

  // The program keeps the pages, and with them what kernels still write: first the work ends, then it is fetched.
  server_->On(kOpMirrorRead, [device](const FakeServer::Request&) {
    std::string runs;
    mirror::AppendRun(uint64_t(device) + 10, "from the GPU", 12, &runs);
    return FakeServer::Answer(CUDA_SUCCESS, Encoded(wire::OpMirrorRead_Reply()), 0, runs);
  });
  server_->Take();
  ASSERT_EQ(cuMemHostUnregister(memory), CUDA_SUCCESS);
  EXPECT_EQ(std::string(memory + 10, 12), "from the GPU");
  sent_ = server_->Take();
  ASSERT_EQ(sent_.size(), 3u);
  EXPECT_EQ(SentAt<wire::OpManagedUnmap_Request>(0).action, kUnmapWaitOnly);
  SentAt<wire::OpMirrorRead_Request>(1);
  EXPECT_EQ(SentAt<wire::OpHostUnmap_Request>(2).address, HostArena::PageOf(uint64_t(device)));
  EXPECT_EQ(DevicePointer(memory), kNone);
  EXPECT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls{kCall_cuCtxSynchronize}) << "nothing is mirrored any more";
}

TEST_F(MappedMemoryTest, WhatTheServerRefusesCanBeAskedForAgain) {
  const FilePages shared(MAP_SHARED), own(MAP_PRIVATE);
  for (const FilePages* pages : {&shared, &own}) {
    const bool mirrored = pages == &own;
    char* const memory = pages->memory();
    ASSERT_EQ(cuMemHostRegister(memory, kPage, 0), CUDA_SUCCESS);
    server_->On(kOpHostMap, {CUDA_ERROR_OPERATING_SYSTEM});
    EXPECT_EQ(DevicePointer(memory), -int64_t(CUDA_ERROR_OPERATING_SYSTEM));
    const uint64_t asked = SentOne<wire::OpHostMap_Request>().address;
    EXPECT_FALSE(IsOnDevice(memory));
    EXPECT_FALSE(IsOnDevice(reinterpret_cast<void*>(asked)));
    server_->On(kOpHostMap, FakeServer::Answer());
    if (mirrored) {
      server_->On(kOpMirrorAdd, {CUDA_ERROR_OUT_OF_MEMORY});
      EXPECT_EQ(DevicePointer(memory), -int64_t(CUDA_ERROR_OUT_OF_MEMORY));
      EXPECT_EQ(Sent(), (Calls{kOpHostMap, kOpMirrorAdd, kOpHostUnmap})) << "the server's memory goes, too";
      EXPECT_EQ(SentAt<wire::OpHostUnmap_Request>(2).address, asked);
      EXPECT_FALSE(IsOnDevice(memory));
      server_->On(kOpMirrorAdd, FakeServer::Answer());
    }
    EXPECT_EQ(DevicePointer(memory), int64_t(asked)) << "the addresses serve again";
    EXPECT_EQ(Sent(), mirrored ? (Calls{kOpHostMap, kOpMirrorAdd}) : Calls{kOpHostMap});
    EXPECT_TRUE(IsOnDevice(memory));
    EXPECT_EQ(cuMemHostUnregister(memory), CUDA_SUCCESS);
    Sent();
  }
}

TEST_F(MappedMemoryTest, ARefusedUnmappingIsReportedAndForgets) {
  const FilePages pages(MAP_SHARED);
  ASSERT_EQ(cuMemHostRegister(pages.memory(), kPage, 0), CUDA_SUCCESS);
  ASSERT_GT(DevicePointer(pages.memory()), 0);
  server_->On(kOpHostUnmap, {CUDA_ERROR_ILLEGAL_ADDRESS});
  EXPECT_EQ(cuMemHostUnregister(pages.memory()), CUDA_ERROR_ILLEGAL_ADDRESS) << "what the GPU's work ended with";
  server_->On(kOpHostUnmap, FakeServer::Answer());
  EXPECT_EQ(DevicePointer(pages.memory()), kNone);
  EXPECT_EQ(cuMemHostRegister(pages.memory(), kPage, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuMemHostUnregister(pages.memory()), CUDA_SUCCESS);
}

// A graph may run on another server later, which does not share the memory.
TEST_F(MappedMemoryTest, PinnedMemoryThatAGraphsKernelIsGivenIsTheGpus) {
  const OneKernel one(server_, sizeof(void*));
  void* pinned = nullptr;
  ASSERT_EQ(cuMemHostAlloc(&pinned, 1000, 0), CUDA_SUCCESS);
  void* argument = static_cast<char*>(pinned) + 8;
  void* parameters[] = {&argument};
  ASSERT_EQ(cuLaunchKernel(one.kernel(), 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr), CUDA_SUCCESS);
  EXPECT_FALSE(IsOnDevice(pinned)) << "this server has it anyway";
  CUgraph graph = nullptr;
  CUgraphNode node = nullptr;
  ASSERT_EQ(cuGraphCreate(&graph, 0), CUDA_SUCCESS);
  CUDA_KERNEL_NODE_PARAMS kernel{};
  kernel.func = one.kernel();
  kernel.gridDimX = kernel.gridDimY = kernel.gridDimZ = kernel.blockDimX = kernel.blockDimY = kernel.blockDimZ = 1;
  kernel.kernelParams = parameters;
  ASSERT_EQ(cuGraphAddKernelNode(&node, graph, nullptr, 0, &kernel), CUDA_SUCCESS);
  EXPECT_TRUE(IsOnDevice(pinned));
  EXPECT_EQ(cuGraphDestroy(graph), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFreeHost(pinned), CUDA_SUCCESS);
}

TEST_F(MappedMemoryTest, TwoThreadsAskForTheSameMemory) {
  const FilePages pages(MAP_SHARED);
  ASSERT_EQ(cuMemHostRegister(pages.memory(), kPages * kPage, 0), CUDA_SUCCESS);
  std::atomic<int> asking{0};
  server_->On(kOpHostMap, [&asking](const FakeServer::Request&) {
    while (asking < 2) std::this_thread::yield();
    // Long enough for the other thread to find that nothing is there yet, if it may look.
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return FakeServer::Answer();
  });
  int64_t other_pointer = 0;
  std::thread other([&] {
    EXPECT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
    ++asking;
    other_pointer = DevicePointer(pages.memory());
  });
  ++asking;
  const int64_t pointer = DevicePointer(pages.memory());
  other.join();
  EXPECT_GT(pointer, 0);
  EXPECT_EQ(other_pointer, pointer);
  EXPECT_EQ(Sent(), Calls{kOpHostMap}) << "once for both";
  server_->On(kOpHostMap, FakeServer::Answer());
  EXPECT_EQ(cuMemHostUnregister(pages.memory()), CUDA_SUCCESS);
}

// The last one: nothing works after it.
TEST_F(MappedMemoryTest, WithoutItsServerTheMemoryStaysTheProgramsOwn) {
  const FilePages pages(MAP_PRIVATE);
  ASSERT_EQ(cuMemHostRegister(pages.memory(), kPage, 0), CUDA_SUCCESS);
  server_->End("the test is over");
  EXPECT_EQ(cuCtxSynchronize(), CUDA_ERROR_DEVICE_UNAVAILABLE);
  EXPECT_EQ(DevicePointer(pages.memory()), -int64_t(CUDA_ERROR_DEVICE_UNAVAILABLE));
  strcpy(pages.memory(), "it is there");
  EXPECT_STREQ(pages.memory(), "it is there");
}

}  // namespace
}  // namespace cuda_remote::client
