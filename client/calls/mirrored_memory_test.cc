// SPDX-License-Identifier: Apache-2.0
// Memory of the host that kernels use, with a server that does not share it: pinned, registered and managed memory and
// __managed__ variables are mirrored. What the server is asked for, and when which bytes travel.
#include <cuda.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "client/calls/testing/custom_fixture.h"
#include "proto/mirror/mirror.h"

namespace cuda_remote::client {
namespace {

constexpr uint64_t kPage = HostArena::kPage;
// Where the server has a __managed__ variable: nothing of this process lies there.
constexpr uint64_t kVariable = 0x350000000040;

class MirroredMemoryTest : public CustomTest {
 protected:
  static void SetUpTestSuite() {
    // Managed memory that lies on the GPU is not mirrored.
    setenv("CUDA_REMOTE_MANAGED", "host", 1);
    Connect(false);
  }
  void SetUp() override {
    CustomTest::SetUp();
    for (const uint32_t call : {kOpHostMap, kOpHostUnmap, kOpMirrorAdd, kOpMirrorRead})
      server_->On(call, FakeServer::Answer());
  }

  // The GPU writes this at the address; the next fetch brings it.
  static void GpuWrites(uint64_t address, const std::string& bytes) {
    server_->On(kOpMirrorRead, [address, bytes, fetched = false](const FakeServer::Request&) mutable {
      std::string runs;
      if (!std::exchange(fetched, true)) mirror::AppendRun(address, bytes.data(), bytes.size(), &runs);
      return FakeServer::Answer(CUDA_SUCCESS, Encoded(wire::OpMirrorRead_Reply()), 0, runs);
    });
  }
  // What the request at this place of sent_ tells the server that the host has written, by address.
  std::vector<std::pair<uint64_t, std::string>> HostsWrites(size_t index) {
    SentAt<wire::OpMirrorWrite_Request>(index);
    std::vector<std::pair<uint64_t, std::string>> writes;
    if (index < sent_.size()) {
      EXPECT_TRUE(mirror::ForEachRun(sent_[index].payload, [&writes](uint64_t address, std::string_view bytes) {
        writes.emplace_back(address, bytes);
        return true;
      }));
    }
    return writes;
  }
  // The requests at these places of sent_ make the server have so much memory there, and mirror it.
  void ExpectMirrored(size_t index, uint64_t page, uint64_t page_bytes, uint64_t address, uint64_t bytes) {
    const auto map = SentAt<wire::OpHostMap_Request>(index);
    EXPECT_EQ(map.tag, 0u) << "there is no file to share";
    EXPECT_EQ(map.address, page);
    EXPECT_EQ(map.bytes, page_bytes);
    const auto add = SentAt<wire::OpMirrorAdd_Request>(index + 1);
    EXPECT_EQ(add.address, address);
    EXPECT_EQ(add.bytes, bytes);
  }

  static bool IsKnown(CUdeviceptr address) {
    CUmemorytype type;
    return cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) == CUDA_SUCCESS;
  }
};

TEST_F(MirroredMemoryTest, PinnedMemoryIsMirroredOnceItsDevicePointerIsAskedFor) {
  void* pinned = nullptr;
  ASSERT_EQ(cuMemHostAlloc(&pinned, 5000, 0), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls()) << "it is ordinary memory";
  const auto address = reinterpret_cast<uint64_t>(pinned);
  CUdeviceptr device = 0;
  ASSERT_EQ(cuMemHostGetDevicePointer(&device, static_cast<char*>(pinned) + 8, 0), CUDA_SUCCESS);
  EXPECT_EQ(device, address + 8);
  EXPECT_EQ(Sent(), (Calls{kOpHostMap, kOpMirrorAdd}));
  ExpectMirrored(0, address, 2 * kPage, address, 5000);
  EXPECT_EQ(cuMemHostGetDevicePointer(&device, pinned, 0), CUDA_SUCCESS);
  EXPECT_EQ(device, address);
  EXPECT_EQ(Sent(), Calls());

  // A call that waits for the GPU fetches what that has written; a free does as well, natively it waits.
  GpuWrites(address + 4999, "!");
  EXPECT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
  EXPECT_EQ(static_cast<char*>(pinned)[4999], '!');
  EXPECT_EQ(Sent(), (Calls{kCall_cuCtxSynchronize, kOpMirrorRead}));
  ASSERT_EQ(cuMemFreeHost(pinned), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), (Calls{kOpMirrorRead, kOpHostUnmap}));
  EXPECT_EQ(SentAt<wire::OpHostUnmap_Request>(1).address, address);
  EXPECT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls{kCall_cuCtxSynchronize}) << "nothing is mirrored any more";
}

TEST_F(MirroredMemoryTest, PinnedMemoryThatAKernelIsGivenIsMirroredBefore) {
  const OneKernel one(server_, sizeof(void*));
  void *pinned = nullptr, *other = nullptr;
  ASSERT_EQ(cuMemHostAlloc(&pinned, 1000, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuMemHostAlloc(&other, 1000, 0), CUDA_SUCCESS);
  const auto address = reinterpret_cast<uint64_t>(pinned);
  char* argument = static_cast<char*>(pinned) + 16;
  void* parameters[] = {&argument};
  const auto launch = [&] { return cuLaunchKernel(one.kernel(), 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr); };
  // The launch's facts first, so that they are not in the way.
  int ordinary = 0;
  argument = reinterpret_cast<char*>(&ordinary);
  ASSERT_EQ(launch(), CUDA_SUCCESS) << "a pointer that nobody knows is the application's affair";
  argument = static_cast<char*>(pinned) + 16;
  Sent();
  // Without the memory there, the kernel must not run.
  server_->On(kOpHostMap, {CUDA_ERROR_OUT_OF_MEMORY});
  EXPECT_EQ(launch(), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(Sent(), Calls{kOpHostMap});
  server_->On(kOpHostMap, FakeServer::Answer());
  strcpy(static_cast<char*>(pinned) + 3, "the host's");
  ASSERT_EQ(launch(), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), (Calls{kOpHostMap, kOpMirrorAdd, kOpMirrorWrite, kCall_cuLaunchKernel}));
  ExpectMirrored(0, address, kPage, address, 1000);
  EXPECT_EQ(HostsWrites(2), (std::vector<std::pair<uint64_t, std::string>>{{address + 3, "the host's"}}));
  // What has not changed does not travel again.
  ASSERT_EQ(launch(), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls{kCall_cuLaunchKernel});
  static_cast<char*>(pinned)[0] = 'x';
  ASSERT_EQ(launch(), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), (Calls{kOpMirrorWrite, kCall_cuLaunchKernel}));
  EXPECT_EQ(HostsWrites(0), (std::vector<std::pair<uint64_t, std::string>>{{address, "x"}}));
  EXPECT_EQ(cuMemFreeHost(other), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls()) << "no kernel was given it";
  EXPECT_EQ(cuMemFreeHost(pinned), CUDA_SUCCESS);
}

TEST_F(MirroredMemoryTest, PinnedMemoryThatIsAllocatedAsMapped) {
  void* pinned = nullptr;
  server_->On(kOpMirrorAdd, {CUDA_ERROR_OUT_OF_MEMORY});
  EXPECT_EQ(cuMemHostAlloc(&pinned, 1000, CU_MEMHOSTALLOC_DEVICEMAP), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(pinned, nullptr);
  EXPECT_EQ(Sent(), (Calls{kOpHostMap, kOpMirrorAdd, kOpHostUnmap}));
  const uint64_t refused = SentAt<wire::OpHostMap_Request>(0).address;
  EXPECT_FALSE(IsKnown(refused));
  server_->On(kOpMirrorAdd, FakeServer::Answer());
  ASSERT_EQ(cuMemHostAlloc(&pinned, 1000, CU_MEMHOSTALLOC_DEVICEMAP), CUDA_SUCCESS);
  EXPECT_EQ(reinterpret_cast<uint64_t>(pinned), refused) << "it was given back";
  EXPECT_EQ(Sent(), (Calls{kOpHostMap, kOpMirrorAdd}));
  ExpectMirrored(0, refused, kPage, refused, 1000);
  EXPECT_EQ(cuMemFreeHost(pinned), CUDA_SUCCESS);
}

TEST_F(MirroredMemoryTest, RegisteredPagesHaveTheSameAddressThere) {
  void* const pages = mmap(nullptr, 4 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(pages, MAP_FAILED);
  char* const memory = static_cast<char*>(pages) + 100;
  ASSERT_EQ(cuMemHostRegister(memory, 2 * kPage, 0), CUDA_SUCCESS);
  CUdeviceptr device = 0;
  ASSERT_EQ(cuMemHostGetDevicePointer(&device, memory, 0), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), (Calls{kOpHostMap, kOpMirrorAdd}));
  EXPECT_EQ(device, HandleOf(memory));
  ExpectMirrored(0, HostArena::PageOf(device), 3 * kPage, device, 2 * kPage);
  const OneKernel one(server_, sizeof(void*));
  void* parameters[] = {&device};
  memory[5] = '5';
  Sent();
  ASSERT_EQ(cuLaunchKernel(one.kernel(), 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), (Calls{kOpFunctionInfo, kOpMirrorWrite, kCall_cuLaunchKernel}));
  EXPECT_EQ(HostsWrites(1), (std::vector<std::pair<uint64_t, std::string>>{{device + 5, "5"}}));
  GpuWrites(device + 2 * kPage - 1, "9");
  EXPECT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
  EXPECT_EQ(memory[2 * kPage - 1], '9');
  ASSERT_EQ(cuMemHostUnregister(memory), CUDA_SUCCESS);
  EXPECT_EQ(memory[2 * kPage - 1], '9') << "the program keeps its pages";
  EXPECT_FALSE(IsKnown(device));
  EXPECT_EQ(munmap(pages, 4 * kPage), 0);
}

TEST_F(MirroredMemoryTest, ManagedMemoryIsMirroredFromTheBeginning) {
  CUdeviceptr managed = 77;
  server_->On(kOpHostMap, {CUDA_ERROR_OUT_OF_MEMORY});
  EXPECT_EQ(cuMemAllocManaged(&managed, 1000, CU_MEM_ATTACH_GLOBAL), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(Sent(), Calls{kOpHostMap});
  server_->On(kOpHostMap, FakeServer::Answer());
  server_->On(kOpMirrorAdd, {CUDA_ERROR_OUT_OF_MEMORY});
  EXPECT_EQ(cuMemAllocManaged(&managed, 1000, CU_MEM_ATTACH_GLOBAL), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(Sent(), (Calls{kOpHostMap, kOpMirrorAdd, kOpHostUnmap}));
  EXPECT_EQ(managed, 77u);
  const uint64_t refused = SentAt<wire::OpHostUnmap_Request>(2).address;
  EXPECT_FALSE(IsKnown(refused));
  server_->On(kOpMirrorAdd, FakeServer::Answer());
  ASSERT_EQ(cuMemAllocManaged(&managed, 1000, CU_MEM_ATTACH_GLOBAL), CUDA_SUCCESS);
  EXPECT_EQ(managed, refused) << "it was given back";
  EXPECT_EQ(Sent(), (Calls{kOpHostMap, kOpMirrorAdd}));
  ExpectMirrored(0, managed, kPage, managed, 1000);
  const auto map = SentAt<wire::OpHostMap_Request>(0);
  EXPECT_TRUE(map.managed);
  EXPECT_EQ(map.device, 0);

  char* const memory = reinterpret_cast<char*>(managed);
  EXPECT_EQ(memory[999], 0);
  memory[999] = '9';
  GpuWrites(managed, "0");
  EXPECT_EQ(cuMemsetD8(managed + 10, 1, 4), CUDA_SUCCESS);
  EXPECT_EQ(memory[0], '0') << "the host may use it as soon as the call has returned";
  EXPECT_EQ(Sent(), (Calls{kOpMirrorWrite, kCall_cuMemsetD8_v2, kOpMirrorRead}));
  EXPECT_EQ(HostsWrites(0), (std::vector<std::pair<uint64_t, std::string>>{{managed + 999, "9"}}));
  ASSERT_EQ(cuMemFree(managed), CUDA_SUCCESS);
  EXPECT_EQ(SentOne<wire::OpHostUnmap_Request>().address, managed);
  EXPECT_FALSE(IsKnown(managed));
}

TEST_F(MirroredMemoryTest, AManagedVariableIsTheHostsAtItsAddress) {
  CUmodule module = nullptr;
  ASSERT_EQ(cuModuleLoadData(&module, OneKernel::kImage), CUDA_SUCCESS);
  wire::cuModuleGetGlobal_v2_Reply reply;
  reply.dptr = kVariable;
  reply.bytes = 100;
  reply.managed = true;
  server_->On(kCall_cuModuleGetGlobal_v2, {CUDA_SUCCESS, Encoded(reply)});
  GpuWrites(kVariable, "its initial value");
  Sent();
  CUdeviceptr variable = 0;
  size_t bytes = 0;
  server_->On(kOpMirrorAdd, {CUDA_ERROR_OUT_OF_MEMORY});
  EXPECT_EQ(cuModuleGetGlobal(&variable, &bytes, module, "variable"), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(variable, 0u);
  EXPECT_FALSE(IsKnown(kVariable));
  EXPECT_FALSE(InLog(Kind::kVariable, kVariable));
  server_->On(kOpMirrorAdd, FakeServer::Answer());
  Sent();
  ASSERT_EQ(cuModuleGetGlobal(&variable, &bytes, module, "variable"), CUDA_SUCCESS);
  EXPECT_EQ(variable, kVariable);
  EXPECT_EQ(bytes, 100u);
  EXPECT_EQ(Sent(), (Calls{kCall_cuModuleGetGlobal_v2, kOpMirrorAdd, kOpMirrorRead}));
  EXPECT_EQ(SentAt<wire::OpMirrorAdd_Request>(1).address, kVariable);
  EXPECT_EQ(SentAt<wire::OpMirrorAdd_Request>(1).bytes, 100u);
  EXPECT_STREQ(reinterpret_cast<char*>(variable), "its initial value");
  int managed = 0;
  EXPECT_EQ(cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, variable + 99), CUDA_SUCCESS);
  EXPECT_EQ(managed, 1);
  EXPECT_TRUE(InLog(Kind::kVariable, kVariable));
  EXPECT_EQ(cuMemFree(variable), CUDA_ERROR_INVALID_VALUE) << "it is the module's";
  // Another one on the same page.
  reply.dptr = kVariable + 200;
  server_->On(kCall_cuModuleGetGlobal_v2, {CUDA_SUCCESS, Encoded(reply)});
  GpuWrites(kVariable + 200, "another value");
  ASSERT_EQ(cuModuleGetGlobal(&variable, nullptr, module, "another"), CUDA_SUCCESS);
  EXPECT_STREQ(reinterpret_cast<char*>(variable), "another value");
  // One where this process has something else.
  void* const page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(page, MAP_FAILED);
  reply.dptr = reinterpret_cast<uint64_t>(page);
  server_->On(kCall_cuModuleGetGlobal_v2, {CUDA_SUCCESS, Encoded(reply)});
  Sent();
  EXPECT_EQ(cuModuleGetGlobal(&variable, nullptr, module, "third"), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(Sent(), Calls{kCall_cuModuleGetGlobal_v2});
  EXPECT_FALSE(IsKnown(reinterpret_cast<CUdeviceptr>(page)));
  EXPECT_EQ(munmap(page, kPage), 0);
  ASSERT_EQ(cuModuleUnload(module), CUDA_SUCCESS);
  EXPECT_FALSE(IsKnown(kVariable)) << "a module takes its variables with it";
  Sent();
  EXPECT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls{kCall_cuCtxSynchronize}) << "and they are mirrored no more";
  // Another module's variable in the same place has nothing of the first one's.
  ASSERT_EQ(cuModuleLoadData(&module, OneKernel::kImage), CUDA_SUCCESS);
  reply.dptr = kVariable;
  server_->On(kCall_cuModuleGetGlobal_v2, {CUDA_SUCCESS, Encoded(reply)});
  GpuWrites(kVariable, "new");
  ASSERT_EQ(cuModuleGetGlobal(&variable, nullptr, module, "variable"), CUDA_SUCCESS);
  EXPECT_STREQ(reinterpret_cast<char*>(variable), "new");
  Sent();
  EXPECT_EQ(cuMemsetD8(variable, 0, 4), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), (Calls{kCall_cuMemsetD8_v2, kOpMirrorRead})) << "the host has written nothing";
  ASSERT_EQ(cuModuleUnload(module), CUDA_SUCCESS);
}

}  // namespace
}  // namespace cuda_remote::client
