// SPDX-License-Identifier: Apache-2.0
// Managed memory whose home is the GPU: allocation, and what the client answers itself about advice, prefetches and
// attachment. mirrored_memory_test.cc has managed memory with a server that does not share memory.
#include <cuda.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/calls/testing/custom_fixture.h"

namespace cuda_remote::client {
namespace {

constexpr size_t kPage = HostArena::kPage;
constexpr size_t kSegment = 2 << 20;
// kOpManagedUnmap's action, and the kinds of kOpManagedFetch's wait: nothing, all work, or a stream's.
constexpr uint32_t kFree = 0, kClear = 1;
constexpr uint32_t kAtOnce = 0, kUnlessBusy = 3, kUnlessStreamBusy = 4;

CUmemLocation Place(CUmemLocationType type, int id = 0) {
  CUmemLocation place{};
  place.type = type;
  place.id = id;
  return place;
}
CUmemLocation Gpu(int device) { return Place(CU_MEM_LOCATION_TYPE_DEVICE, device); }
const CUmemLocation kHost = Place(CU_MEM_LOCATION_TYPE_HOST);

class ManagedTest : public CustomTest {
 protected:
  static void SetUpTestSuite() {
    // The test itself passes no managed memory to system calls, and so needs no rights.
    setenv("CUDA_REMOTE_MANAGED", "protect", 1);
    Connect(true);
  }
  void SetUp() override {
    CustomTest::SetUp();
    for (const uint32_t call :
         {kOpManagedMap, kOpManagedUnmap, kOpManagedFlush, kOpManagedFetch, kOpHostMap, kOpHostUnmap}) {
      server_->On(call, FakeServer::Answer());
    }
    // What was kept of another test's memory is given back.
    EXPECT_EQ(cuMemGetInfo(nullptr, nullptr), CUDA_SUCCESS);
    Sent();
  }

  static CUdeviceptr Allocate(size_t bytes) {
    CUdeviceptr memory = 0;
    EXPECT_EQ(cuMemAllocManaged(&memory, bytes, CU_MEM_ATTACH_GLOBAL), CUDA_SUCCESS);
    return memory;
  }
  static char* AtHost(CUdeviceptr memory) { return reinterpret_cast<char*>(memory); }
  static bool IsKnown(CUdeviceptr address) {
    CUmemorytype type;
    return cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) == CUDA_SUCCESS;
  }

  // An attribute that is one number.
  static int Ask(CUmem_range_attribute attribute, CUdeviceptr memory, size_t bytes) {
    int value = 77;
    EXPECT_EQ(cuMemRangeGetAttribute(&value, sizeof(value), attribute, memory, bytes), CUDA_SUCCESS);
    return value;
  }
  static int LastPrefetch(CUdeviceptr memory, size_t bytes = 1) {
    return Ask(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, memory, bytes);
  }
  static int Preferred(CUdeviceptr memory, size_t bytes = 1) {
    return Ask(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, memory, bytes);
  }
  static std::vector<int> AccessedBy(CUdeviceptr memory, size_t bytes, size_t room) {
    std::vector<int> devices(room, 77);
    EXPECT_EQ(
        cuMemRangeGetAttribute(&devices[0], room * sizeof(int), CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, memory, bytes),
        CUDA_SUCCESS);
    return devices;
  }
};

TEST_F(ManagedTest, MemoryLivesFromItsAllocationToItsEnd) {
  CUcontext other = nullptr;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&other, 1), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxSetCurrent(other), CUDA_SUCCESS);
  Sent();
  constexpr size_t kBytes = kSegment + 100;
  const CUdeviceptr memory = Allocate(kBytes);
  const auto request = SentOne<wire::OpManagedMap_Request>();
  EXPECT_EQ(request.address, memory);
  EXPECT_EQ(request.bytes, 2 * kSegment) << "whole segments";
  EXPECT_EQ(request.offset, HostArena::OffsetOf(memory));
  EXPECT_EQ(request.device, 1);
  EXPECT_TRUE(server_->TakeFile(request.tag).ok());
  int managed = 0, device = -1;
  CUdeviceptr start = 0;
  size_t bytes = 0;
  void* host = nullptr;
  EXPECT_EQ(cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, memory + 5), CUDA_SUCCESS);
  EXPECT_EQ(managed, 1);
  EXPECT_EQ(cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, memory), CUDA_SUCCESS);
  EXPECT_EQ(device, 1);
  EXPECT_EQ(cuPointerGetAttribute(&host, CU_POINTER_ATTRIBUTE_HOST_POINTER, memory + 5), CUDA_SUCCESS);
  EXPECT_EQ(host, AtHost(memory + 5));
  EXPECT_EQ(cuMemGetAddressRange(&start, &bytes, memory + 5), CUDA_SUCCESS);
  EXPECT_EQ(start, memory);
  EXPECT_EQ(bytes, kBytes);
  EXPECT_EQ(AtHost(memory)[kBytes - 1], 0);
  AtHost(memory)[kBytes - 1] = 'x';
  EXPECT_EQ(cuMemFree(memory + kPage), CUDA_ERROR_INVALID_VALUE) << "not where it begins";
  EXPECT_EQ(Sent(), Calls());

  ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
  ASSERT_EQ(cuMemFree(memory), CUDA_SUCCESS) << "in any context";
  EXPECT_EQ(SentOne<wire::OpManagedUnmap_Request>().address, memory);
  EXPECT_EQ(SentAt<wire::OpManagedUnmap_Request>(0).action, kClear) << "the next allocation has it, zeroed";
  EXPECT_FALSE(IsKnown(memory));
  EXPECT_EQ(cuMemFree(memory), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Sent(), Calls());
  ASSERT_EQ(cuCtxSetCurrent(other), CUDA_SUCCESS);
  EXPECT_EQ(Allocate(kBytes), memory);
  EXPECT_EQ(Sent(), Calls());
  EXPECT_EQ(AtHost(memory)[kBytes - 1], 0);
  ASSERT_EQ(cuMemFree(memory), CUDA_SUCCESS);
  Sent();
  // What is free is said to be free.
  EXPECT_EQ(cuMemGetInfo(nullptr, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), (Calls{kOpManagedUnmap, kCall_cuMemGetInfo_v2}));
  EXPECT_EQ(SentAt<wire::OpManagedUnmap_Request>(0).action, kFree);
  EXPECT_EQ(cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
}

TEST_F(ManagedTest, WhereTheGpuHasNoRoomItIsHostMemory) {
  server_->On(kOpManagedMap, {CUDA_ERROR_OUT_OF_MEMORY});
  server_->On(kOpHostMap, {CUDA_ERROR_OUT_OF_MEMORY});
  CUdeviceptr memory = 77;
  EXPECT_EQ(cuMemAllocManaged(&memory, kSegment, CU_MEM_ATTACH_GLOBAL), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(memory, 77u);
  EXPECT_EQ(Sent(), (Calls{kOpManagedMap, kOpHostMap}));
  const uint64_t refused = SentAt<wire::OpHostMap_Request>(1).address;
  EXPECT_FALSE(IsKnown(refused));
  EXPECT_FALSE(IsKnown(SentAt<wire::OpManagedMap_Request>(0).address));
  server_->On(kOpHostMap, FakeServer::Answer());
  memory = Allocate(kSegment);
  EXPECT_EQ(memory, refused) << "it was given back";
  EXPECT_EQ(Sent(), (Calls{kOpManagedMap, kOpHostMap}));
  const auto request = SentAt<wire::OpHostMap_Request>(1);
  EXPECT_EQ(request.bytes, kSegment);
  EXPECT_TRUE(request.managed);
  EXPECT_EQ(request.device, 0);
  EXPECT_EQ(request.offset, HostArena::OffsetOf(memory));
  EXPECT_TRUE(server_->TakeFile(request.tag).ok());
  AtHost(memory)[kSegment - 1] = 'x';
  int managed = 0;
  EXPECT_EQ(cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, memory), CUDA_SUCCESS);
  EXPECT_EQ(managed, 1);
  EXPECT_EQ(cuMemAdvise(memory, kPage, CU_MEM_ADVISE_SET_READ_MOSTLY, kHost), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls());
  // What the work ended with is the free's result; the memory is gone all the same.
  server_->On(kOpHostUnmap, {CUDA_ERROR_ILLEGAL_ADDRESS});
  EXPECT_EQ(cuMemFree(memory), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(SentOne<wire::OpHostUnmap_Request>().address, memory);
  EXPECT_FALSE(IsKnown(memory));
}

TEST_F(ManagedTest, AllocationsThatAreWrong) {
  CUdeviceptr memory = 77;
  EXPECT_EQ(cuMemAllocManaged(nullptr, 1, CU_MEM_ATTACH_GLOBAL), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemAllocManaged(&memory, 0, CU_MEM_ATTACH_GLOBAL), CUDA_ERROR_INVALID_VALUE);
  for (const unsigned flags : {0u, unsigned(CU_MEM_ATTACH_GLOBAL | CU_MEM_ATTACH_HOST), unsigned(CU_MEM_ATTACH_SINGLE)})
    EXPECT_EQ(cuMemAllocManaged(&memory, 1, flags), CUDA_ERROR_INVALID_VALUE) << flags;
  EXPECT_EQ(cuMemAllocManaged(&memory, SIZE_MAX, CU_MEM_ATTACH_GLOBAL), CUDA_ERROR_OUT_OF_MEMORY);
  ASSERT_EQ(cuCtxSetCurrent(nullptr), CUDA_SUCCESS);
  EXPECT_EQ(cuMemAllocManaged(&memory, 1, CU_MEM_ATTACH_GLOBAL), CUDA_ERROR_INVALID_CONTEXT);
  ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
  EXPECT_EQ(memory, 77u);
  EXPECT_EQ(Sent(), Calls());
}

TEST_F(ManagedTest, AdviceIsRememberedPageByPage) {
  const CUdeviceptr memory = Allocate(8 * kPage), second = memory + 4 * kPage;
  Sent();
  EXPECT_EQ(Ask(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, memory, 8 * kPage), 0);
  EXPECT_EQ(Preferred(memory), int(CU_DEVICE_INVALID));
  EXPECT_EQ(AccessedBy(memory, 8 * kPage, 1), std::vector<int>{CU_DEVICE_INVALID});

  // What holds for all pages is answered; where they differ, nothing is.
  ASSERT_EQ(cuMemAdvise(second, 1, CU_MEM_ADVISE_SET_READ_MOSTLY, kHost), CUDA_SUCCESS);
  EXPECT_EQ(Ask(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, second + 5, kPage - 5), 1) << "all of the page";
  EXPECT_EQ(Ask(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, second - 1, 2), 0);
  EXPECT_EQ(Ask(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, second, kPage + 1), 0);
  ASSERT_EQ(cuMemAdvise(second, 1, CU_MEM_ADVISE_UNSET_READ_MOSTLY, kHost), CUDA_SUCCESS);
  EXPECT_EQ(Ask(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, second, 1), 0);

  ASSERT_EQ(cuMemAdvise(memory, 8 * kPage, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, Gpu(1)), CUDA_SUCCESS);
  EXPECT_EQ(Preferred(memory, 8 * kPage), 1);
  ASSERT_EQ(cuMemAdvise(second, 4 * kPage, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, kHost), CUDA_SUCCESS);
  EXPECT_EQ(Preferred(memory, 4 * kPage), 1);
  EXPECT_EQ(Preferred(second, 4 * kPage), int(CU_DEVICE_CPU));
  EXPECT_EQ(Preferred(memory, 8 * kPage), int(CU_DEVICE_INVALID));
  const CUmemLocation node = Place(CU_MEM_LOCATION_TYPE_HOST_NUMA, 3);
  ASSERT_EQ(cuMemAdvise(second, 1, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, node), CUDA_SUCCESS);
  EXPECT_EQ(Ask(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE, second, 1), int(CU_MEM_LOCATION_TYPE_HOST_NUMA));
  EXPECT_EQ(Ask(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID, second, 1), 3);
  EXPECT_EQ(Preferred(second), int(CU_DEVICE_CPU));
  ASSERT_EQ(cuMemAdvise(memory, 8 * kPage, CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, Gpu(0)), CUDA_SUCCESS);
  EXPECT_EQ(Ask(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE, second, 1), int(CU_MEM_LOCATION_TYPE_INVALID));
  EXPECT_EQ(Ask(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID, second, 1), int(CU_DEVICE_INVALID));

  ASSERT_EQ(cuMemAdvise(memory, 8 * kPage, CU_MEM_ADVISE_SET_ACCESSED_BY, Gpu(1)), CUDA_SUCCESS);
  ASSERT_EQ(cuMemAdvise(second, 4 * kPage, CU_MEM_ADVISE_SET_ACCESSED_BY, kHost), CUDA_SUCCESS);
  EXPECT_EQ(AccessedBy(second, 4 * kPage, 3), (std::vector<int>{CU_DEVICE_CPU, 1, CU_DEVICE_INVALID}));
  EXPECT_EQ(AccessedBy(second, 4 * kPage, 1), std::vector<int>{CU_DEVICE_CPU}) << "as many as there is room for";
  EXPECT_EQ(AccessedBy(memory, 8 * kPage, 2), (std::vector<int>{1, CU_DEVICE_INVALID}));
  ASSERT_EQ(cuMemAdvise(second, kPage, CU_MEM_ADVISE_UNSET_ACCESSED_BY, Gpu(1)), CUDA_SUCCESS);
  EXPECT_EQ(AccessedBy(second, 1, 2), (std::vector<int>{CU_DEVICE_CPU, CU_DEVICE_INVALID}));

  // Several at once.
  int read_mostly = 77, devices[2] = {77, 77};
  void* data[] = {&read_mostly, devices};
  size_t sizes[] = {sizeof(read_mostly), sizeof(devices)};
  CUmem_range_attribute attributes[] = {CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY};
  EXPECT_EQ(cuMemRangeGetAttributes(data, sizes, attributes, 2, second, 1), CUDA_SUCCESS);
  EXPECT_EQ(read_mostly, 0);
  EXPECT_EQ(devices[0], int(CU_DEVICE_CPU));
  EXPECT_EQ(devices[1], int(CU_DEVICE_INVALID));

  // It goes with the memory.
  ASSERT_EQ(cuMemFree(memory), CUDA_SUCCESS);
  ASSERT_EQ(Allocate(8 * kPage), memory);
  EXPECT_EQ(AccessedBy(memory, 8 * kPage, 1), std::vector<int>{CU_DEVICE_INVALID});
  EXPECT_EQ(AccessedBy(second, 1, 1), std::vector<int>{CU_DEVICE_INVALID});
  EXPECT_EQ(Sent(), Calls()) << "the server is not asked";
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
}

TEST_F(ManagedTest, PlacesBeforeTheyHadTypes) {
  const CUdeviceptr memory = Allocate(kPage);
  EXPECT_EQ(Custom_cuMemAdvise(memory, kPage, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, 1), CUDA_SUCCESS);
  EXPECT_EQ(Ask(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE, memory, 1), int(CU_MEM_LOCATION_TYPE_DEVICE));
  EXPECT_EQ(Preferred(memory), 1);
  EXPECT_EQ(Custom_cuMemAdvise(memory, kPage, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, CU_DEVICE_CPU), CUDA_SUCCESS);
  EXPECT_EQ(Ask(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE, memory, 1), int(CU_MEM_LOCATION_TYPE_HOST));
  EXPECT_EQ(Custom_cuMemPrefetchAsync(memory, kPage, 1, nullptr, false), CUDA_SUCCESS);
  EXPECT_EQ(LastPrefetch(memory), 1);
  EXPECT_EQ(Custom_cuMemPrefetchAsync(memory, kPage, CU_DEVICE_CPU, nullptr, false), CUDA_SUCCESS);
  EXPECT_EQ(LastPrefetch(memory), int(CU_DEVICE_CPU));
  for (const CUdevice device : {2, int(CU_DEVICE_INVALID)}) {
    EXPECT_EQ(Custom_cuMemAdvise(memory, kPage, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, device),
              CUDA_ERROR_INVALID_DEVICE);
    EXPECT_EQ(Custom_cuMemPrefetchAsync(memory, kPage, device, nullptr, false), CUDA_ERROR_INVALID_DEVICE);
  }
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
}

TEST_F(ManagedTest, AdviceThatIsWrongChangesNothing) {
  const CUdeviceptr memory = Allocate(8 * kPage);
  CUdeviceptr own = 0;
  char ordinary[16];
  ASSERT_EQ(cuMemAlloc(&own, kPage), CUDA_SUCCESS);
  ASSERT_EQ(cuMemAdvise(memory, 8 * kPage, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, Gpu(1)), CUDA_SUCCESS);
  Sent();
  const auto prefer = [](CUdeviceptr address, size_t bytes, CUmemLocation place) {
    return cuMemAdvise(address, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, place);
  };
  EXPECT_EQ(prefer(memory, 0, kHost), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(prefer(memory, 8 * kPage + 1, kHost), CUDA_ERROR_INVALID_VALUE) << "past its end";
  EXPECT_EQ(prefer(memory + 1, SIZE_MAX, kHost), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(prefer(own, 1, kHost), CUDA_ERROR_INVALID_VALUE) << "not managed";
  EXPECT_EQ(prefer(CUdeviceptr(ordinary), 1, kHost), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(prefer(memory, 1, Gpu(2)), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_EQ(prefer(memory, 1, Gpu(-1)), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_EQ(prefer(memory, 1, Place(CU_MEM_LOCATION_TYPE_INVALID)), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(prefer(memory, 1, Place(CU_MEM_LOCATION_TYPE_HOST_NUMA, -1)), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(prefer(memory, 1, Place(CUmemLocationType(99))), CUDA_ERROR_INVALID_VALUE);
  for (const int advice : {0, int(CU_MEM_ADVISE_UNSET_ACCESSED_BY) + 1})
    EXPECT_EQ(cuMemAdvise(memory, 1, CUmem_advise(advice), kHost), CUDA_ERROR_INVALID_VALUE) << advice;
  EXPECT_EQ(cuMemAdvise(memory, 1, CU_MEM_ADVISE_SET_ACCESSED_BY, Gpu(2)), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_EQ(Preferred(memory, 8 * kPage), 1);
  EXPECT_EQ(AccessedBy(memory, 8 * kPage, 1), std::vector<int>{CU_DEVICE_INVALID});

  // Questions.
  int answers[2] = {77, 77};
  const auto ask = [&](void* data, size_t size, int attribute, CUdeviceptr address, size_t bytes) {
    return cuMemRangeGetAttribute(data, size, CUmem_range_attribute(attribute), address, bytes);
  };
  constexpr int kReadMostly = CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, kAccessedBy = CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY;
  EXPECT_EQ(ask(nullptr, 4, kReadMostly, memory, 1), CUDA_ERROR_INVALID_VALUE);
  for (const size_t size : {0, 3, 8})
    EXPECT_EQ(ask(answers, size, kReadMostly, memory, 1), CUDA_ERROR_INVALID_VALUE) << size;
  for (const size_t size : {0, 7})
    EXPECT_EQ(ask(answers, size, kAccessedBy, memory, 1), CUDA_ERROR_INVALID_VALUE) << size;
  EXPECT_EQ(ask(answers, 4, 99, memory, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(ask(answers, 4, kReadMostly, memory, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(ask(answers, 4, kReadMostly, memory, 8 * kPage + 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(ask(answers, 4, kReadMostly, own, 1), CUDA_ERROR_INVALID_VALUE);
  void* data[] = {&answers[0], nullptr};
  size_t sizes[] = {4, 4};
  CUmem_range_attribute attributes[] = {CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY};
  EXPECT_EQ(cuMemRangeGetAttributes(nullptr, sizes, attributes, 1, memory, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemRangeGetAttributes(data, nullptr, attributes, 1, memory, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemRangeGetAttributes(data, sizes, nullptr, 1, memory, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemRangeGetAttributes(data, sizes, attributes, 0, memory, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemRangeGetAttributes(data, sizes, attributes, 1, own, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(answers[0], 77);
  EXPECT_EQ(cuMemRangeGetAttributes(data, sizes, attributes, 2, memory, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Sent(), Calls());
  EXPECT_EQ(cuMemFree(own), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
}

TEST_F(ManagedTest, APrefetchToTheGpuHandsOverWhatTheHostHasWritten) {
  const CUdeviceptr memory = Allocate(kSegment);
  memset(AtHost(memory), 'h', kSegment);
  Sent();
  ASSERT_EQ(cuMemPrefetchAsync(memory, kPage, kHost, 0, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(LastPrefetch(memory), int(CU_DEVICE_CPU));
  EXPECT_EQ(Ask(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE, memory, 1), int(CU_MEM_LOCATION_TYPE_HOST));
  EXPECT_EQ(Sent(), Calls()) << "the host has it";
  ASSERT_EQ(cuMemPrefetchAsync(memory, 4 * kPage, Gpu(1), 0, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(LastPrefetch(memory, 4 * kPage), 1);
  EXPECT_EQ(Ask(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID, memory, 1), 1);
  EXPECT_EQ(LastPrefetch(memory, 4 * kPage + 1), int(CU_DEVICE_INVALID));
  SentOne<wire::OpManagedFlush_Request>();
  const uint64_t run[] = {memory, kSegment};
  EXPECT_EQ(sent_[0].payload, std::string(reinterpret_cast<const char*>(run), sizeof(run)));
  ASSERT_EQ(cuMemPrefetchAsync(memory, 4 * kPage, Gpu(1), 0, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls()) << "the GPU has it";
  EXPECT_EQ(AtHost(memory)[5], 'h') << "which the host fetches";
  const auto fetch = SentOne<wire::OpManagedFetch_Request>();
  EXPECT_EQ(fetch.address, memory);
  EXPECT_EQ(fetch.wait, kUnlessBusy) << "for all of the GPU's work";
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
}

TEST_F(ManagedTest, AdviceAndPrefetchesForTheHostMakeFetchesLonger) {
  const CUdeviceptr memory = Allocate(kSegment);
  const auto fetched = [this](CUdeviceptr address) {
    EXPECT_EQ(cuMemPrefetchAsync(address, 1, Gpu(0), 0, nullptr), CUDA_SUCCESS);
    Sent();
    EXPECT_EQ(AtHost(address)[0], 'h');
    return SentOne<wire::OpManagedFetch_Request>().bytes / kPage;
  };
  memset(AtHost(memory), 'h', kSegment);
  EXPECT_EQ(fetched(memory), 16u) << "with its neighbours";
  ASSERT_EQ(cuMemAdvise(memory, 64 * kPage, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, kHost), CUDA_SUCCESS);
  EXPECT_EQ(fetched(memory), 64u);
  // Advice beside it goes on where that ends.
  ASSERT_EQ(cuMemAdvise(memory + 96 * kPage, 4 * kPage, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, kHost), CUDA_SUCCESS);
  ASSERT_EQ(cuMemAdvise(memory + 64 * kPage, 32 * kPage, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, kHost), CUDA_SUCCESS);
  EXPECT_EQ(fetched(memory), 100u);
  ASSERT_EQ(cuMemAdvise(memory, 100 * kPage, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, Gpu(0)), CUDA_SUCCESS);
  EXPECT_EQ(fetched(memory), 16u);
  ASSERT_EQ(cuMemAdvise(memory + 64 * kPage, 32 * kPage, CU_MEM_ADVISE_SET_ACCESSED_BY, kHost), CUDA_SUCCESS);
  EXPECT_EQ(fetched(memory + 64 * kPage), 32u);
  ASSERT_EQ(cuMemAdvise(memory + 64 * kPage, 32 * kPage, CU_MEM_ADVISE_UNSET_ACCESSED_BY, kHost), CUDA_SUCCESS);
  EXPECT_EQ(fetched(memory + 64 * kPage), 16u);
  // A prefetch counts once.
  EXPECT_EQ(cuMemPrefetchAsync(memory, 1, Gpu(0), 0, nullptr), CUDA_SUCCESS);
  ASSERT_EQ(cuMemPrefetchAsync(memory, 48 * kPage, kHost, 0, nullptr), CUDA_SUCCESS);
  Sent();
  EXPECT_EQ(AtHost(memory)[0], 'h');
  EXPECT_EQ(SentOne<wire::OpManagedFetch_Request>().bytes, 48 * kPage);
  EXPECT_EQ(fetched(memory), 16u);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
}

// Once the host has used the same page after several waits, the waits ask for it. Sometimes, and less and less often,
// they do not, to learn whether the host still uses it.
TEST_F(ManagedTest, WaitsAskForThePagesThatTheHostUsesEachTime) {
  server_->On(kCall_cuCtxSynchronize, [](const FakeServer::Request& request) {
    return FakeServer::Answer(CUDA_SUCCESS, {}, 0, request.payload.empty() ? "" : "1");
  });
  const CUdeviceptr memory = Allocate(kSegment);
  memset(AtHost(memory), 'h', kSegment);
  // The turns in which the host had to fetch the page itself.
  const auto missed = [&](CUdeviceptr page, int turns) {
    std::vector<int> found;
    for (int turn = 1; turn <= turns; ++turn) {
      EXPECT_EQ(cuMemPrefetchAsync(memory, 1, Gpu(0), 0, nullptr), CUDA_SUCCESS);
      EXPECT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
      const Calls before = Sent();
      EXPECT_EQ(std::count(before.begin(), before.end(), kOpManagedFetch), 0) << "the answer has brought it";
      EXPECT_EQ(AtHost(page)[0], 'h');
      if (!Sent().empty()) found.push_back(turn);
    }
    return found;
  };
  EXPECT_EQ(missed(memory, 600), (std::vector<int>{1, 2, 3, 4, 20, 36, 68, 132, 260, 516}));
  // With other pages it begins anew.
  EXPECT_EQ(missed(memory + 32 * kPage, 40), (std::vector<int>{1, 2, 3, 4, 5, 21, 37}));
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
  server_->On(kCall_cuCtxSynchronize, FakeServer::Answer());
}

TEST_F(ManagedTest, PrefetchesThatAreWrongChangeNothing) {
  const CUdeviceptr memory = Allocate(8 * kPage);
  CUdeviceptr own = 0;
  CUstream gone = nullptr;
  ASSERT_EQ(cuMemAlloc(&own, kPage), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamCreate(&gone, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamDestroy(gone), CUDA_SUCCESS);
  ASSERT_EQ(cuMemPrefetchAsync(memory, 8 * kPage, kHost, 0, nullptr), CUDA_SUCCESS);
  AtHost(memory)[0] = 'h';
  Sent();
  EXPECT_EQ(cuMemPrefetchAsync(memory, 1, Gpu(0), 1, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemPrefetchAsync(memory, 0, Gpu(0), 0, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemPrefetchAsync(memory, 8 * kPage + 1, Gpu(0), 0, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemPrefetchAsync(own, 1, Gpu(0), 0, nullptr), CUDA_ERROR_INVALID_VALUE) << "not managed";
  EXPECT_EQ(cuMemPrefetchAsync(memory, 1, Gpu(2), 0, nullptr), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_EQ(cuMemPrefetchAsync(memory, 1, Place(CU_MEM_LOCATION_TYPE_INVALID), 0, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemPrefetchAsync(memory, 1, Gpu(0), 0, gone), CUDA_ERROR_INVALID_HANDLE);
  ASSERT_EQ(cuCtxSetCurrent(nullptr), CUDA_SUCCESS);
  EXPECT_EQ(cuMemPrefetchAsync(memory, 1, Gpu(0), 0, nullptr), CUDA_ERROR_INVALID_CONTEXT);
  ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
  EXPECT_EQ(LastPrefetch(memory, 8 * kPage), int(CU_DEVICE_CPU));
  EXPECT_EQ(Sent(), Calls()) << "nothing was handed over";
  EXPECT_EQ(cuMemFree(own), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
}

TEST_F(ManagedTest, PrefetchesAndDiscardsOfSeveralRanges) {
  CUstream stream = nullptr;
  ASSERT_EQ(cuStreamCreate(&stream, 0), CUDA_SUCCESS);
  const CUdeviceptr memory = Allocate(8 * kPage);
  CUdeviceptr addresses[] = {memory, memory + 2 * kPage, memory + 4 * kPage, memory + 6 * kPage};
  size_t sizes[] = {kPage, kPage, kPage, kPage};
  CUmemLocation places[] = {Gpu(1), kHost, Gpu(0)};
  struct Batch {
    size_t count;
    std::vector<size_t> first;
    unsigned long long flags;
    CUstream stream;
  };
  const auto last = [&] {
    std::vector<int> all;
    for (const CUdeviceptr address : addresses) all.push_back(LastPrefetch(address, kPage));
    return all;
  };
  constexpr int kNowhere = CU_DEVICE_INVALID, kCpu = CU_DEVICE_CPU;
  const auto prefetch = [&](Batch batch) {
    return cuMemPrefetchBatchAsync(addresses, sizes, batch.count, places, batch.first.data(), batch.first.size(),
                                   batch.flags, batch.stream);
  };
  const auto discard_and_prefetch = [&](Batch batch) {
    return cuMemDiscardAndPrefetchBatchAsync(addresses, sizes, batch.count, places, batch.first.data(),
                                             batch.first.size(), batch.flags, batch.stream);
  };
  // Each place serves the ranges from its index on.
  for (const Batch& wrong :
       {Batch{4, {}, 0, stream}, Batch{4, {1}, 0, stream}, Batch{4, {0, 0}, 0, stream}, Batch{4, {0, 2, 1}, 0, stream},
        Batch{4, {0, 4}, 0, stream}, Batch{0, {0}, 0, stream}, Batch{4, {0}, 1, stream}, Batch{4, {0}, 0, nullptr}}) {
    EXPECT_EQ(prefetch(wrong), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(discard_and_prefetch(wrong), CUDA_ERROR_INVALID_VALUE);
  }
  size_t zero = 0;
  EXPECT_EQ(cuMemPrefetchBatchAsync(nullptr, sizes, 1, places, &zero, 1, 0, stream), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemPrefetchBatchAsync(addresses, nullptr, 1, places, &zero, 1, 0, stream), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemPrefetchBatchAsync(addresses, sizes, 1, nullptr, &zero, 1, 0, stream), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemPrefetchBatchAsync(addresses, sizes, 1, places, nullptr, 1, 0, stream), CUDA_ERROR_INVALID_VALUE);
  // One that is wrong spoils all.
  sizes[3] = 3 * kPage;
  EXPECT_EQ(prefetch({4, {0, 2}, 0, stream}), CUDA_ERROR_INVALID_VALUE);
  sizes[3] = kPage;
  places[2] = Gpu(2);
  EXPECT_EQ(prefetch({4, {0, 1, 2}, 0, stream}), CUDA_ERROR_INVALID_DEVICE);
  places[2] = Gpu(0);
  EXPECT_EQ(last(), (std::vector<int>{kNowhere, kNowhere, kNowhere, kNowhere}));

  EXPECT_EQ(prefetch({4, {0, 2, 3}, 0, stream}), CUDA_SUCCESS);
  EXPECT_EQ(last(), (std::vector<int>{1, 1, kCpu, 0}));
  EXPECT_EQ(LastPrefetch(memory + kPage), kNowhere) << "what lies between";
  EXPECT_EQ(discard_and_prefetch({3, {0, 1}, 0, stream}), CUDA_SUCCESS);
  EXPECT_EQ(last(), (std::vector<int>{1, kCpu, kCpu, 0}));
  // What is only discarded goes nowhere.
  EXPECT_EQ(cuMemDiscardBatchAsync(addresses, sizes, 4, 0, stream), CUDA_SUCCESS);
  EXPECT_EQ(last(), (std::vector<int>{1, kCpu, kCpu, 0}));
  EXPECT_EQ(cuMemDiscardBatchAsync(addresses, sizes, 4, 1, stream), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemDiscardBatchAsync(addresses, sizes, 4, 0, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemDiscardBatchAsync(addresses, sizes, 0, 0, stream), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemDiscardBatchAsync(nullptr, sizes, 4, 0, stream), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemDiscardBatchAsync(addresses, nullptr, 4, 0, stream), CUDA_ERROR_INVALID_VALUE);
  addresses[1] = 0;
  EXPECT_EQ(cuMemDiscardBatchAsync(addresses, sizes, 4, 0, stream), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
}

TEST_F(ManagedTest, TheHostsAccessWaitsForTheStreamThatTheMemoryIsAttachedTo) {
  CUstream stream = nullptr;
  ASSERT_EQ(cuStreamCreate(&stream, 0), CUDA_SUCCESS);
  const CUdeviceptr memory = Allocate(kSegment);
  memset(AtHost(memory), 'h', kSegment);
  const auto fetch = [this, memory] {
    EXPECT_EQ(cuMemPrefetchAsync(memory, 1, Gpu(0), 0, nullptr), CUDA_SUCCESS);
    Sent();
    EXPECT_EQ(AtHost(memory)[0], 'h');
    return SentOne<wire::OpManagedFetch_Request>();
  };
  EXPECT_EQ(fetch().wait, kUnlessBusy);
  ASSERT_EQ(cuStreamAttachMemAsync(stream, memory, 0, CU_MEM_ATTACH_SINGLE), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls());
  auto request = fetch();
  EXPECT_EQ(request.wait, kUnlessStreamBusy);
  EXPECT_EQ(request.stream, reinterpret_cast<uint64_t>(stream));
  ASSERT_EQ(cuStreamAttachMemAsync(stream, memory, kSegment, CU_MEM_ATTACH_HOST), CUDA_SUCCESS);
  EXPECT_EQ(fetch().wait, kAtOnce);
  ASSERT_EQ(cuStreamAttachMemAsync(stream, memory, 0, CU_MEM_ATTACH_GLOBAL), CUDA_SUCCESS);
  EXPECT_EQ(fetch().wait, kUnlessBusy);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);

  // So it begins, too.
  CUdeviceptr hosts = 0;
  ASSERT_EQ(cuMemAllocManaged(&hosts, kSegment, CU_MEM_ATTACH_HOST), CUDA_SUCCESS);
  memset(AtHost(hosts), 'h', kSegment);
  EXPECT_EQ(cuMemPrefetchAsync(hosts, 1, Gpu(0), 0, nullptr), CUDA_SUCCESS);
  Sent();
  EXPECT_EQ(AtHost(hosts)[0], 'h');
  EXPECT_EQ(SentOne<wire::OpManagedFetch_Request>().wait, kAtOnce);
  EXPECT_EQ(cuMemFree(hosts), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
}

TEST_F(ManagedTest, AttachmentsThatAreWrong) {
  CUstream stream = nullptr, gone = nullptr;
  ASSERT_EQ(cuStreamCreate(&stream, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamCreate(&gone, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamDestroy(gone), CUDA_SUCCESS);
  const CUdeviceptr memory = Allocate(8 * kPage);
  CUdeviceptr own = 0;
  ASSERT_EQ(cuMemAlloc(&own, kPage), CUDA_SUCCESS);
  Sent();
  for (const unsigned flags : {0u, 3u, 8u})
    EXPECT_EQ(cuStreamAttachMemAsync(stream, memory, 0, flags), CUDA_ERROR_INVALID_VALUE) << flags;
  EXPECT_EQ(cuStreamAttachMemAsync(gone, memory, 0, CU_MEM_ATTACH_SINGLE), CUDA_ERROR_INVALID_HANDLE);
  for (const CUstream legacy : {CUstream(nullptr), CU_STREAM_LEGACY})
    EXPECT_EQ(cuStreamAttachMemAsync(legacy, memory, 0, CU_MEM_ATTACH_SINGLE), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuStreamAttachMemAsync(stream, memory, kPage, CU_MEM_ATTACH_SINGLE), CUDA_ERROR_INVALID_VALUE)
      << "not all of it";
  EXPECT_EQ(cuStreamAttachMemAsync(stream, memory + kPage, 0, CU_MEM_ATTACH_SINGLE), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuStreamAttachMemAsync(stream, own, 0, CU_MEM_ATTACH_SINGLE), CUDA_ERROR_INVALID_VALUE) << "not managed";
  EXPECT_EQ(cuStreamAttachMemAsync(stream, 0, 0, CU_MEM_ATTACH_SINGLE), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Sent(), Calls());
  EXPECT_EQ(cuMemFree(own), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
}

TEST_F(ManagedTest, TwoThreadsAllocateAdviseAndFree) {
  const auto use = [](char letter, int device) {
    EXPECT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
    for (int i = 0; i < 200 && !HasFailure(); ++i) {
      const CUdeviceptr memory = Allocate(2 * kPage);
      EXPECT_EQ(Preferred(memory, 2 * kPage), int(CU_DEVICE_INVALID)) << "nothing of what was there before";
      EXPECT_EQ(AtHost(memory)[kPage], 0);
      AtHost(memory)[kPage] = letter;
      EXPECT_EQ(cuMemAdvise(memory, 2 * kPage, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, Gpu(device)), CUDA_SUCCESS);
      EXPECT_EQ(Preferred(memory, 2 * kPage), device);
      EXPECT_EQ(AtHost(memory)[kPage], letter);
      EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
    }
  };
  std::thread other(use, 'o', 1);
  use('u', 0);
  other.join();
}

TEST_F(ManagedTest, AServerThatCannotHaveItIsAskedOnce) {
  server_->On(kOpManagedMap, {CUDA_ERROR_NOT_SUPPORTED});
  const CUdeviceptr first = Allocate(kSegment), second = Allocate(kSegment);
  EXPECT_EQ(Sent(), (Calls{kOpManagedMap, kOpHostMap, kOpHostMap}));
  EXPECT_NE(first, second);
  EXPECT_EQ(cuMemFree(first), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(second), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), (Calls{kOpHostUnmap, kOpHostUnmap}));
}

}  // namespace
}  // namespace cuda_remote::client
