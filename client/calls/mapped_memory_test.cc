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

#include "client/calls/testing/custom_fixture.h"
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
  EXPECT_EQ(device, 0u);  // as driver 580
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
  const auto request = SentOne<wire::OpHostMap_Request>();
  EXPECT_TRUE(pages.IsFile(server_->TakeFile(request.tag)));
  EXPECT_TRUE(request.pages);
  EXPECT_EQ(request.offset, 2 * kPage);
  EXPECT_EQ(request.address, uint64_t(pages.memory()) + 2 * kPage) << "where the program has them";
  EXPECT_EQ(request.bytes, 2 * kPage);
  EXPECT_EQ(request.registered, uint64_t(memory));
  EXPECT_EQ(request.registered_bytes, kBytes);
  EXPECT_EQ(request.flags, unsigned(CU_MEMHOSTREGISTER_PORTABLE));
  EXPECT_FALSE(request.managed);

  EXPECT_EQ(DevicePointer(memory), int64_t(memory));
  EXPECT_EQ(DevicePointer(memory + 4999), int64_t(memory) + 4999);
  EXPECT_EQ(DevicePointer(memory + kBytes), kNone);
  CUdeviceptr answer = 0;
  void* host = nullptr;
  EXPECT_EQ(cuPointerGetAttribute(&answer, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, CUdeviceptr(memory) + 9), CUDA_SUCCESS);
  EXPECT_EQ(answer, CUdeviceptr(memory + 9));
  EXPECT_EQ(cuPointerGetAttribute(&host, CU_POINTER_ATTRIBUTE_HOST_POINTER, CUdeviceptr(memory) + 9), CUDA_SUCCESS);
  EXPECT_EQ(host, memory + 9);
  EXPECT_EQ(Sent(), Calls()) << "it is shared once";
  // Copies go by addresses, without waiting.
  CUdeviceptr device = 0;
  ASSERT_EQ(cuMemAlloc(&device, kBytes), CUDA_SUCCESS);
  Sent();
  ASSERT_EQ(cuMemcpyDtoHAsync(memory + 1, device, kBytes - 1, nullptr), CUDA_SUCCESS);
  const auto copy = SentOne<wire::cuMemcpyAsync_Request>();
  EXPECT_EQ(copy.dst, uint64_t(memory) + 1);
  EXPECT_FALSE(copy.blocking);
  EXPECT_EQ(cuMemFree(device), CUDA_SUCCESS);
  Sent();

  EXPECT_EQ(cuMemHostUnregister(memory + 1), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(cuMemHostUnregister(memory), CUDA_SUCCESS);
  const auto unmap = SentOne<wire::OpHostUnmap_Request>();
  EXPECT_EQ(unmap.address, uint64_t(memory));
  EXPECT_EQ(unmap.pages, request.address);
  EXPECT_EQ(unmap.page_bytes, request.bytes);
  EXPECT_EQ(DevicePointer(memory), kNone);
  EXPECT_STREQ(memory, "what the host has written");
}

// Each page is mapped once, with the first of the registrations that lie on it, and unmapped with the last.
TEST_F(MappedMemoryTest, RegistrationsMayMeetInTheMiddleOfAPage) {
  const FilePages pages(MAP_SHARED);
  char *const first = pages.memory() + 100, *const second = first + 2 * kPage;
  const auto start = uint64_t(pages.memory());
  ASSERT_EQ(cuMemHostRegister(second, kPage, 0), CUDA_SUCCESS);
  auto map = SentOne<wire::OpHostMap_Request>();
  EXPECT_EQ(map.address, start + 2 * kPage);
  EXPECT_EQ(map.bytes, 2 * kPage);
  ASSERT_EQ(cuMemHostRegister(first, 2 * kPage, 0), CUDA_SUCCESS);
  map = SentOne<wire::OpHostMap_Request>();
  EXPECT_EQ(map.address, start);
  EXPECT_EQ(map.bytes, 2 * kPage) << "the third is there";
  EXPECT_EQ(map.registered_bytes, 2 * kPage);
  char* const inside = second + kPage + 8;  // on a page on which both of its neighbours are
  ASSERT_EQ(cuMemHostRegister(inside + 100, 10, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuMemHostRegister(inside, 10, 0), CUDA_SUCCESS);
  map = SentAt<wire::OpHostMap_Request>(SentRequests().size() - 1);
  EXPECT_EQ(map.bytes, 0u);
  EXPECT_EQ(map.registered, uint64_t(inside));
  ASSERT_EQ(cuMemHostUnregister(second), CUDA_SUCCESS);
  auto unmap = SentOne<wire::OpHostUnmap_Request>();
  EXPECT_EQ(unmap.page_bytes, 0u) << "others lie on both";
  ASSERT_EQ(cuMemHostUnregister(first), CUDA_SUCCESS);
  unmap = SentOne<wire::OpHostUnmap_Request>();
  EXPECT_EQ(unmap.pages, start);
  EXPECT_EQ(unmap.page_bytes, 3 * kPage);
  ASSERT_EQ(cuMemHostUnregister(inside), CUDA_SUCCESS);
  EXPECT_EQ(SentOne<wire::OpHostUnmap_Request>().page_bytes, 0u);
  ASSERT_EQ(cuMemHostUnregister(inside + 100), CUDA_SUCCESS);
  unmap = SentOne<wire::OpHostUnmap_Request>();
  EXPECT_EQ(unmap.pages, start + 3 * kPage);
  EXPECT_EQ(unmap.page_bytes, kPage);
}

TEST_F(MappedMemoryTest, WhatCannotBeSharedIsMirroredAtItsAddress) {
  const FilePages pages(MAP_PRIVATE);
  char* const memory = pages.memory() + 100;
  constexpr size_t kBytes = 5000;
  ASSERT_EQ(cuMemHostRegister(memory, kBytes, 0), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls()) << "no kernel has been given it";
  EXPECT_EQ(DevicePointer(memory), int64_t(memory));
  EXPECT_EQ(Sent(), (Calls{kOpHostMap, kOpMirrorAdd}));
  const auto map = SentAt<wire::OpHostMap_Request>(0);
  EXPECT_EQ(map.tag, 0u) << "memory of the server's own";
  EXPECT_EQ(map.address, uint64_t(pages.memory()));
  EXPECT_EQ(map.bytes, 2 * kPage);
  EXPECT_EQ(map.registered, uint64_t(memory));
  const auto add = SentAt<wire::OpMirrorAdd_Request>(1);
  EXPECT_EQ(add.address, uint64_t(memory));
  EXPECT_EQ(add.bytes, kBytes);
  EXPECT_EQ(DevicePointer(memory + 1), int64_t(memory) + 1);
  EXPECT_EQ(Sent(), Calls());

  // The program keeps the pages, and with them what kernels still write: first the work ends, then it is fetched.
  server_->On(kOpMirrorRead, [memory](const FakeServer::Request&) {
    std::string runs;
    mirror::AppendRun(uint64_t(memory) + 10, "from the GPU", 12, &runs);
    return FakeServer::Answer(CUDA_SUCCESS, Encoded(wire::OpMirrorRead_Reply()), 0, runs);
  });
  server_->Take();
  ASSERT_EQ(cuMemHostUnregister(memory), CUDA_SUCCESS);
  EXPECT_EQ(std::string(memory + 10, 12), "from the GPU");
  sent_ = server_->Take();
  ASSERT_EQ(sent_.size(), 3u);
  EXPECT_EQ(SentAt<wire::OpManagedUnmap_Request>(0).action, kUnmapWaitOnly);
  SentAt<wire::OpMirrorRead_Request>(1);
  EXPECT_EQ(SentAt<wire::OpHostUnmap_Request>(2).address, uint64_t(memory));
  EXPECT_EQ(SentAt<wire::OpHostUnmap_Request>(2).page_bytes, 2 * kPage);
  EXPECT_EQ(DevicePointer(memory), kNone);
  EXPECT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls{kCall_cuCtxSynchronize}) << "nothing is mirrored any more";
}

TEST_F(MappedMemoryTest, AKernelIsGivenMemoryThatIsNotShared) {
  const OneKernel one(server_, sizeof(void*));
  const FilePages pages(MAP_PRIVATE);
  ASSERT_EQ(cuMemHostRegister(pages.memory() + 100, 200, 0), CUDA_SUCCESS);
  void* argument = pages.memory() + 299;
  void* parameters[] = {&argument};
  Sent();
  ASSERT_EQ(cuLaunchKernel(one.kernel(), 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), (Calls{kOpFunctionInfo, kOpHostMap, kOpMirrorAdd, kCall_cuLaunchKernel}));
  EXPECT_EQ(cuMemHostUnregister(pages.memory() + 100), CUDA_SUCCESS);
}

// The program may have its memory where the server has something else.
TEST_F(MappedMemoryTest, WithoutRoomItHasAnotherAddress) {
  const FilePages shared(MAP_SHARED), own(MAP_PRIVATE);
  for (const FilePages* pages : {&shared, &own}) {
    char* const memory = pages->memory() + 50;
    server_->On(kOpHostMap, [](const FakeServer::Request& request) {
      wire::OpHostMap_Request in;
      EXPECT_TRUE(in.Decode(request.message));
      return FakeServer::Answer{HostArena::Contains(in.address) ? CUDA_SUCCESS : CUDA_ERROR_ALREADY_MAPPED};
    });
    ASSERT_EQ(cuMemHostRegister(memory, kPage, 0), CUDA_SUCCESS);
    Sent();
    const int64_t device = DevicePointer(memory);
    EXPECT_EQ(Sent(), (Calls{kOpHostMap, kOpHostMap, kOpMirrorAdd}));
    ASSERT_TRUE(HostArena::Contains(uint64_t(device)));
    EXPECT_EQ(device % kPage, 50);
    EXPECT_EQ(SentAt<wire::OpMirrorAdd_Request>(2).address, uint64_t(device));
    EXPECT_EQ(DevicePointer(reinterpret_cast<void*>(device + 7)), device + 7) << "the GPU's address stays what it is";
    // Copies take it for the application's bytes.
    strcpy(memory + 5, "the host has it");
    char copied[16] = {};
    EXPECT_EQ(cuMemcpy(CUdeviceptr(copied), CUdeviceptr(device) + 5, 15), CUDA_SUCCESS);
    EXPECT_STREQ(copied, "the host has it");
    EXPECT_EQ(cuMemHostUnregister(reinterpret_cast<void*>(device)), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    Sent();
    EXPECT_EQ(cuMemHostUnregister(memory), CUDA_SUCCESS);
    const auto& sent = SentRequests();
    ASSERT_FALSE(sent.empty());
    EXPECT_EQ(SentAt<wire::OpHostUnmap_Request>(sent.size() - 1).address, HostArena::PageOf(uint64_t(device)));
    EXPECT_EQ(DevicePointer(reinterpret_cast<void*>(device)), kNone);
    server_->On(kOpHostMap, FakeServer::Answer());
  }
}

TEST_F(MappedMemoryTest, WhatTheServersDriverRefuses) {
  const FilePages shared(MAP_SHARED), own(MAP_PRIVATE);
  server_->On(kOpHostMap, {CUDA_ERROR_OPERATING_SYSTEM});
  EXPECT_EQ(cuMemHostRegister(shared.memory(), kPage, 0), CUDA_ERROR_OPERATING_SYSTEM);
  EXPECT_EQ(cuMemHostUnregister(shared.memory()), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  ASSERT_EQ(cuMemHostRegister(own.memory(), kPage, 0), CUDA_SUCCESS);
  EXPECT_EQ(DevicePointer(own.memory()), -int64_t(CUDA_ERROR_OPERATING_SYSTEM));
  EXPECT_FALSE(IsOnDevice(own.memory()));
  server_->On(kOpHostMap, FakeServer::Answer());
  server_->On(kOpMirrorAdd, {CUDA_ERROR_OUT_OF_MEMORY});
  Sent();
  EXPECT_EQ(DevicePointer(own.memory()), -int64_t(CUDA_ERROR_OUT_OF_MEMORY));
  EXPECT_EQ(Sent(), (Calls{kOpHostMap, kOpMirrorAdd, kOpHostUnmap})) << "the server's memory goes, too";
  EXPECT_EQ(SentAt<wire::OpHostUnmap_Request>(2).address, uint64_t(own.memory()));
  EXPECT_FALSE(IsOnDevice(own.memory()));
  server_->On(kOpMirrorAdd, FakeServer::Answer());
  EXPECT_EQ(DevicePointer(own.memory()), int64_t(own.memory()));
  EXPECT_EQ(cuMemHostUnregister(own.memory()), CUDA_SUCCESS);
  Sent();
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
  const FilePages pages(MAP_PRIVATE);
  ASSERT_EQ(cuMemHostRegister(pages.memory(), kPages * kPage, 0), CUDA_SUCCESS);
  Sent();
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
  EXPECT_EQ(Sent(), (Calls{kOpHostMap, kOpMirrorAdd})) << "once for both";
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
