// SPDX-License-Identifier: Apache-2.0
// Sharing with other processes: the keys that go around, what the log keeps of them, and memory that is opened several
// times.
#include <cuda.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "client/calls/testing/custom_fixture.h"

namespace cuda_remote::client {
namespace {

constexpr size_t kKeyBytes = 64;
constexpr uint64_t kImported = 0x340000000000;
constexpr uint64_t kImportedBytes = 5000;

std::string KeyOf(char letter) { return std::string(kKeyBytes, letter); }

template <typename Handle>
Handle HandleWith(const std::string& key) {
  Handle handle;
  static_assert(sizeof(handle) == kKeyBytes, "");
  memcpy(&handle, key.data(), sizeof(handle));
  return handle;
}

// A file descriptor as the calls take it.
void* AsHandle(int fd) { return reinterpret_cast<void*>(intptr_t(fd)); }

constexpr auto kFile = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

class IpcTest : public CustomTest {
 protected:
  void SetUp() override {
    CustomTest::SetUp();
    opened_ = 0;
    for (const uint32_t call : {kCall_cuIpcOpenEventHandle, kCall_cuMemPoolImportFromShareableHandle})
      server_->On(call, FakeServer::Answer());
    AnswerKey<wire::cuIpcGetMemHandle_Reply>(kCall_cuIpcGetMemHandle);
    AnswerKey<wire::cuIpcGetEventHandle_Reply>(kCall_cuIpcGetEventHandle);
    AnswerKey<wire::cuMemExportToShareableHandle_Reply>(kCall_cuMemExportToShareableHandle);
    AnswerKey<wire::cuMemPoolExportToShareableHandle_Reply>(kCall_cuMemPoolExportToShareableHandle);
    AnswerKey<wire::cuMemPoolExportPointer_Reply>(kCall_cuMemPoolExportPointer);
    AnswerOpening<wire::cuIpcOpenMemHandle_v2_Reply>(kCall_cuIpcOpenMemHandle_v2);
    AnswerOpening<wire::cuMemPoolImportPointer_Reply>(kCall_cuMemPoolImportPointer);
    server_->On(kCall_cuIpcCloseMemHandle, [](const FakeServer::Request&) {
      if (opened_ == 0) return FakeServer::Answer(CUDA_ERROR_INVALID_VALUE);
      wire::cuIpcCloseMemHandle_Reply reply;
      reply.left = --opened_;
      return FakeServer::Answer(CUDA_SUCCESS, Encoded(reply));
    });
  }

  // The key that the log has of the call that has shared an object.
  template <typename Request>
  static std::string RecordedKey(Kind kind, uint64_t id) {
    const auto setting = SettingOf(kind, id, Request::kCallId, 0);
    Request request;
    EXPECT_TRUE(setting && request.Decode(setting->message));
    return std::string(request.key);
  }
  // What is shared gets this key.
  template <typename Reply>
  static void AnswerKey(uint32_t call, const std::string& key = KeyOf('k')) {
    Reply reply;
    reply.key = key;
    server_->On(call, {CUDA_SUCCESS, Encoded(reply)});
  }
  // Each key opens the same memory of device 1.
  template <typename Reply>
  static void AnswerOpening(uint32_t call) {
    server_->On(call, [](const FakeServer::Request&) {
      Reply reply;
      reply.address = kImported;
      reply.bytes = kImportedBytes;
      reply.device = 1;
      reply.opened = ++opened_;
      return FakeServer::Answer(CUDA_SUCCESS, Encoded(reply));
    });
  }

  static CUdeviceptr Open(char letter = 'm') {
    CUdeviceptr address = 0;
    EXPECT_EQ(
        cuIpcOpenMemHandle(&address, HandleWith<CUipcMemHandle>(KeyOf(letter)), CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
        CUDA_SUCCESS);
    return address;
  }
  // The memory that an address lies in; 0: the client knows of none.
  static CUdeviceptr BaseOf(CUdeviceptr address) {
    CUdeviceptr base = 0;
    return cuMemGetAddressRange(&base, nullptr, address) == CUDA_SUCCESS ? base : 0;
  }

  static CUmemoryPool NewPool() {
    CUmemPoolProps properties{};
    properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.handleTypes = kFile;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemoryPool pool = nullptr;
    EXPECT_EQ(cuMemPoolCreate(&pool, &properties), CUDA_SUCCESS);
    return pool;
  }
  static CUmemGenericAllocationHandle NewPhysicalMemory() {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = kFile;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemGenericAllocationHandle memory = 0;
    EXPECT_EQ(cuMemCreate(&memory, 2 << 20, &properties, 0), CUDA_SUCCESS);
    return memory;
  }

  // A descriptor as the calls export it.
  int ExportedFile() {
    const CUmemGenericAllocationHandle memory = NewPhysicalMemory();
    int fd = -1;
    EXPECT_EQ(cuMemExportToShareableHandle(&fd, memory, kFile, 0), CUDA_SUCCESS);
    EXPECT_EQ(cuMemRelease(memory), CUDA_SUCCESS);
    return fd;
  }

  static inline uint32_t opened_ = 0;  // the server's thread's, while calls are made
};

TEST_F(IpcTest, SharedMemoryIsRecordedWithItsKey) {
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuMemAlloc(&memory, 1000), CUDA_SUCCESS);
  Sent();
  CUipcMemHandle handle{};
  ASSERT_EQ(cuIpcGetMemHandle(&handle, memory + 100), CUDA_SUCCESS);
  EXPECT_EQ(BytesOf(handle), KeyOf('k'));
  const auto request = SentOne<wire::cuIpcGetMemHandle_Request>();
  EXPECT_EQ(request.address, memory + 100);
  EXPECT_EQ(request.key, "") << "the server chooses it";
  const auto setting = SettingOf(Kind::kDeviceMemory, memory, kCall_cuIpcGetMemHandle, 0);
  wire::cuIpcGetMemHandle_Request again;
  ASSERT_TRUE(setting) << "of the allocation that the address lies in";
  ASSERT_TRUE(again.Decode(setting->message));
  EXPECT_EQ(again.address, memory + 100);
  EXPECT_EQ(again.key, KeyOf('k')) << "a replay shares it under the same key";
  // The place in the log stays: others may have opened it since.
  ASSERT_EQ(cuIpcGetMemHandle(&handle, memory), CUDA_SUCCESS);
  EXPECT_EQ(SettingOf(Kind::kDeviceMemory, memory, kCall_cuIpcGetMemHandle, 0)->order, setting->order);
  ASSERT_EQ(cuMemFree(memory), CUDA_SUCCESS);
  EXPECT_FALSE(SettingOf(Kind::kDeviceMemory, memory, kCall_cuIpcGetMemHandle, 0));
}

TEST_F(IpcTest, SharedEventsAreRecordedInTheirContext) {
  CUevent event = nullptr;
  ASSERT_EQ(cuEventCreate(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
  ASSERT_EQ(cuEventQuery(event), CUDA_SUCCESS);
  Sent();
  ASSERT_EQ(cuEventQuery(event), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls()) << "the client knows that it is done";
  CUipcEventHandle handle{};
  ASSERT_EQ(cuIpcGetEventHandle(&handle, event), CUDA_SUCCESS);
  EXPECT_EQ(BytesOf(handle), KeyOf('k'));
  EXPECT_EQ(SentOne<wire::cuIpcGetEventHandle_Request>().event, reinterpret_cast<uint64_t>(event));
  EXPECT_EQ(RecordedKey<wire::cuIpcGetEventHandle_Request>(Kind::kEvent, HandleOf(event)), KeyOf('k'));
  const auto setting = SettingOf(Kind::kEvent, HandleOf(event), kCall_cuIpcGetEventHandle, 0);
  ASSERT_TRUE(setting);
  const auto context = reinterpret_cast<uint64_t>(context_);
  EXPECT_EQ(setting->header.context_or_result, SlotOf(context));
  EXPECT_TRUE(DependsOn(*setting, Kind::kContext, context));
  // Another process may record it now.
  ASSERT_EQ(cuEventQuery(event), CUDA_SUCCESS);
  ASSERT_EQ(cuEventQuery(event), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), (Calls{kCall_cuEventQuery, kCall_cuEventQuery}));
  // And what this one records, a call of the other one's finds recorded.
  ASSERT_EQ(cuEventRecord(event, nullptr), CUDA_SUCCESS);
  SentOne<wire::cuEventRecord_Request>();
  EXPECT_EQ(sent_[0].header.flags & kFlagNoReply, 0u) << "the call waits until the server has executed it";
  EXPECT_EQ(cuEventDestroy(event), CUDA_SUCCESS);
}

TEST_F(IpcTest, EventsOfOthersAreEvents) {
  CUevent event = nullptr;
  ASSERT_EQ(cuIpcOpenEventHandle(&event, HandleWith<CUipcEventHandle>(KeyOf('e'))), CUDA_SUCCESS);
  const auto handle = reinterpret_cast<uint64_t>(event);
  const auto request = SentOne<wire::cuIpcOpenEventHandle_Request>();
  EXPECT_EQ(request.event, handle);
  EXPECT_EQ(request.key, KeyOf('e'));
  EXPECT_EQ(KindOf(handle), Kind::kEvent);
  EXPECT_TRUE(InLog(Kind::kEvent, handle));
  ASSERT_EQ(cuEventQuery(event), CUDA_SUCCESS);
  ASSERT_EQ(cuEventQuery(event), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), (Calls{kCall_cuEventQuery, kCall_cuEventQuery})) << "the other process may record it";
  ASSERT_EQ(cuEventDestroy(event), CUDA_SUCCESS);
  EXPECT_FALSE(InLog(Kind::kEvent, handle));
}

TEST_F(IpcTest, MemoryOfOthersIsKnownUntilItIsClosed) {
  const CUdeviceptr memory = Open('m');
  EXPECT_EQ(memory, kImported);
  const auto request = SentOne<wire::cuIpcOpenMemHandle_v2_Request>();
  EXPECT_EQ(request.key, KeyOf('m'));
  EXPECT_EQ(request.flags, unsigned(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  EXPECT_EQ(request.at, 0u) << "anywhere";
  const auto record = RecordOf(Kind::kDeviceMemory, memory);
  wire::cuIpcOpenMemHandle_v2_Request again;
  ASSERT_TRUE(record);
  ASSERT_TRUE(again.Decode(record->message));
  EXPECT_EQ(again.key, KeyOf('m'));
  EXPECT_EQ(again.at, memory) << "a replay opens it at the same address";

  CUdeviceptr base = 0;
  size_t bytes = 0;
  int device = -1;
  EXPECT_EQ(cuMemGetAddressRange(&base, &bytes, memory + 10), CUDA_SUCCESS);
  EXPECT_EQ(base, memory);
  EXPECT_EQ(bytes, kImportedBytes);
  EXPECT_EQ(cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, memory), CUDA_SUCCESS);
  EXPECT_EQ(device, 1);
  EXPECT_EQ(cuMemFree(memory), CUDA_ERROR_INVALID_VALUE) << "it is closed, not freed";
  EXPECT_EQ(cuIpcCloseMemHandle(memory + 10), CUDA_ERROR_INVALID_VALUE) << "not where it begins";
  EXPECT_EQ(Sent(), Calls());

  server_->On(kCall_cuIpcCloseMemHandle, {CUDA_ERROR_ILLEGAL_ADDRESS});
  EXPECT_EQ(cuIpcCloseMemHandle(memory), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(BaseOf(memory), memory) << "the server still has it";
  EXPECT_TRUE(InLog(Kind::kDeviceMemory, memory));
  server_->On(kCall_cuIpcCloseMemHandle, FakeServer::Answer());
  Sent();
  EXPECT_EQ(cuIpcCloseMemHandle(memory), CUDA_SUCCESS);
  EXPECT_EQ(SentOne<wire::cuIpcCloseMemHandle_Request>().address, memory);
  EXPECT_EQ(BaseOf(memory), 0u);
  EXPECT_FALSE(InLog(Kind::kDeviceMemory, memory));
  EXPECT_EQ(cuIpcCloseMemHandle(memory), CUDA_ERROR_INVALID_VALUE);
  CUdeviceptr own = 0;
  ASSERT_EQ(cuMemAlloc(&own, 1000), CUDA_SUCCESS);
  Sent();
  EXPECT_EQ(cuIpcCloseMemHandle(own), CUDA_ERROR_INVALID_VALUE) << "it was never opened";
  EXPECT_EQ(Sent(), Calls());
  EXPECT_EQ(cuMemFree(own), CUDA_SUCCESS);
}

TEST_F(IpcTest, MemoryThatIsOpenedSeveralTimes) {
  const auto opening = [](uint64_t number) {
    return SettingOf(Kind::kDeviceMemory, kImported, kCall_cuIpcOpenMemHandle_v2, number);
  };
  EXPECT_EQ(Open(), kImported);
  const auto first = RecordOf(Kind::kDeviceMemory, kImported);
  ASSERT_TRUE(first);
  // From another context, too: the record is of the one that it was opened in.
  CUcontext other = nullptr;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&other, 1), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxSetCurrent(other), CUDA_SUCCESS);
  EXPECT_EQ(Open(), kImported);
  ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
  EXPECT_EQ(Open(), kImported);
  EXPECT_EQ(RecordOf(Kind::kDeviceMemory, kImported)->order, first->order);
  for (const uint64_t number : {2, 3}) {
    ASSERT_TRUE(opening(number)) << number;
    EXPECT_EQ(opening(number)->header.context_or_result, SlotOf(reinterpret_cast<uint64_t>(context_)));
  }
  EXPECT_EQ(cuIpcCloseMemHandle(kImported), CUDA_SUCCESS);
  EXPECT_FALSE(opening(3));
  EXPECT_TRUE(opening(2));
  EXPECT_EQ(BaseOf(kImported), kImported);
  EXPECT_EQ(cuIpcCloseMemHandle(kImported), CUDA_SUCCESS);
  EXPECT_FALSE(opening(2));
  EXPECT_TRUE(InLog(Kind::kDeviceMemory, kImported)) << "it is open still";
  EXPECT_EQ(BaseOf(kImported), kImported);
  EXPECT_EQ(cuIpcCloseMemHandle(kImported), CUDA_SUCCESS);
  EXPECT_FALSE(InLog(Kind::kDeviceMemory, kImported));
  EXPECT_EQ(BaseOf(kImported), 0u);
  EXPECT_EQ(cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
}

TEST_F(IpcTest, PhysicalMemoryGoesByFile) {
  const CUmemGenericAllocationHandle memory = NewPhysicalMemory();
  Sent();
  int fd = -1;
  ASSERT_EQ(cuMemExportToShareableHandle(&fd, memory, kFile, 0), CUDA_SUCCESS);
  EXPECT_EQ(SentOne<wire::cuMemExportToShareableHandle_Request>().handle, memory);
  EXPECT_EQ(RecordedKey<wire::cuMemExportToShareableHandle_Request>(Kind::kPhysicalMemory, memory), KeyOf('k'));
  // The driver's can be passed on and closed; nobody can change what it names.
  ASSERT_GE(fd, 0);
  EXPECT_NE(fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_LT(pwrite(fd, "x", 1, 0), 0);
  EXPECT_NE(ftruncate(fd, 0), 0);
  Sent();

  wire::cuMemImportFromShareableHandle_Reply reply;
  CUmemAllocationProp properties{};
  properties.location.id = 1;
  reply.bytes = 4 << 20;
  reply.prop = BytesOf(properties);
  server_->On(kCall_cuMemImportFromShareableHandle, {CUDA_SUCCESS, Encoded(reply)});
  CUmemGenericAllocationHandle imported = 0;
  ASSERT_EQ(cuMemImportFromShareableHandle(&imported, AsHandle(fd), kFile), CUDA_SUCCESS);
  auto request = SentOne<wire::cuMemImportFromShareableHandle_Request>();
  EXPECT_EQ(request.handle, imported);
  EXPECT_EQ(request.key, KeyOf('k'));
  EXPECT_EQ(KindOf(imported), Kind::kPhysicalMemory);
  EXPECT_NE(imported, memory);
  const auto record = RecordOf(Kind::kPhysicalMemory, imported);
  ASSERT_TRUE(record);
  ASSERT_TRUE(request.Decode(record->message));
  EXPECT_EQ(request.key, KeyOf('k'));
  EXPECT_EQ(request.bytes, uint64_t(4 << 20)) << "its owner may be gone by the time of a replay";
  EXPECT_EQ(request.prop, BytesOf(properties));
  EXPECT_EQ(fcntl(fd, F_GETFD), FD_CLOEXEC) << "the descriptor is the application's";
  close(fd);
  EXPECT_EQ(cuMemRelease(imported), CUDA_SUCCESS);
  EXPECT_EQ(cuMemRelease(memory), CUDA_SUCCESS);
  EXPECT_FALSE(InLog(Kind::kPhysicalMemory, imported));
}

TEST_F(IpcTest, PoolsGoByFile) {
  const CUmemoryPool pool = NewPool();
  Sent();
  int fd = -1;
  ASSERT_EQ(cuMemPoolExportToShareableHandle(&fd, pool, kFile, 0), CUDA_SUCCESS);
  EXPECT_EQ(SentOne<wire::cuMemPoolExportToShareableHandle_Request>().pool, reinterpret_cast<uint64_t>(pool));
  EXPECT_EQ(RecordedKey<wire::cuMemPoolExportToShareableHandle_Request>(Kind::kMemoryPool, HandleOf(pool)), KeyOf('k'));
  CUmemoryPool imported = nullptr;
  ASSERT_EQ(cuMemPoolImportFromShareableHandle(&imported, AsHandle(fd), kFile, 0), CUDA_SUCCESS);
  close(fd);
  const auto request = SentOne<wire::cuMemPoolImportFromShareableHandle_Request>();
  EXPECT_EQ(request.pool, reinterpret_cast<uint64_t>(imported));
  EXPECT_EQ(request.key, KeyOf('k'));
  EXPECT_NE(imported, pool);
  EXPECT_TRUE(InLog(Kind::kMemoryPool, reinterpret_cast<uint64_t>(imported)));
  EXPECT_EQ(cuMemPoolDestroy(imported), CUDA_SUCCESS);
  EXPECT_EQ(cuMemPoolDestroy(pool), CUDA_SUCCESS);
}

TEST_F(IpcTest, MemoryOfOthersPools) {
  const CUmemoryPool pool = NewPool();
  CUmemPoolPtrExportData data = HandleWith<CUmemPoolPtrExportData>(KeyOf('p'));
  CUdeviceptr memory = 0;
  Sent();
  ASSERT_EQ(cuMemPoolImportPointer(&memory, pool, &data), CUDA_SUCCESS);
  EXPECT_EQ(memory, kImported);
  const auto request = SentOne<wire::cuMemPoolImportPointer_Request>();
  EXPECT_EQ(request.pool, reinterpret_cast<uint64_t>(pool));
  EXPECT_EQ(request.key, KeyOf('p'));
  EXPECT_EQ(request.at, 0u);
  const auto record = RecordOf(Kind::kDeviceMemory, memory);
  wire::cuMemPoolImportPointer_Request again;
  ASSERT_TRUE(record);
  ASSERT_TRUE(again.Decode(record->message));
  EXPECT_EQ(again.at, memory);
  EXPECT_EQ(BaseOf(memory), memory);
  uint64_t used = 0;
  EXPECT_EQ(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used), CUDA_SUCCESS);
  EXPECT_EQ(used, kImportedBytes);
  ASSERT_EQ(cuMemPoolImportPointer(&memory, pool, &data), CUDA_SUCCESS);
  EXPECT_TRUE(SettingOf(Kind::kDeviceMemory, memory, kCall_cuMemPoolImportPointer, 2));
  Sent();

  // It is given back with the calls that free memory, not with the one that closes it.
  EXPECT_EQ(cuIpcCloseMemHandle(memory), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Sent(), Calls());
  CUstream stream = nullptr;
  ASSERT_EQ(cuStreamCreate(&stream, 0), CUDA_SUCCESS);
  Sent();
  EXPECT_EQ(cuMemFreeAsync(memory, stream), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), (Calls{kCall_cuStreamSynchronize, kCall_cuIpcCloseMemHandle})) << "after the stream's work";
  EXPECT_FALSE(SettingOf(Kind::kDeviceMemory, memory, kCall_cuMemPoolImportPointer, 2));
  EXPECT_EQ(BaseOf(memory), memory) << "it was opened twice";
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
  EXPECT_EQ(SentOne<wire::cuIpcCloseMemHandle_Request>().address, memory);
  EXPECT_EQ(BaseOf(memory), 0u);
  EXPECT_FALSE(InLog(Kind::kDeviceMemory, memory));
  EXPECT_EQ(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used), CUDA_SUCCESS);
  EXPECT_EQ(used, 0u);
  EXPECT_EQ(cuMemFree(memory), CUDA_ERROR_INVALID_VALUE);
  // A stream that fails keeps it.
  ASSERT_EQ(cuMemPoolImportPointer(&memory, pool, &data), CUDA_SUCCESS);
  server_->On(kCall_cuStreamSynchronize, {CUDA_ERROR_ILLEGAL_ADDRESS});
  Sent();
  EXPECT_EQ(cuMemFreeAsync(memory, stream), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(Sent(), Calls{kCall_cuStreamSynchronize});
  EXPECT_EQ(BaseOf(memory), memory);
  server_->On(kCall_cuStreamSynchronize, FakeServer::Answer());
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
  EXPECT_EQ(cuMemPoolDestroy(pool), CUDA_SUCCESS);
}

TEST_F(IpcTest, MemoryOfOthersPoolsOutlivesContexts) {
  const CUmemoryPool pool = NewPool();
  CUmemPoolPtrExportData data = HandleWith<CUmemPoolPtrExportData>(KeyOf('p'));
  CUcontext context = nullptr;
  ASSERT_EQ(cuCtxCreate(&context, nullptr, 0, 0), CUDA_SUCCESS);
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuMemPoolImportPointer(&memory, pool, &data), CUDA_SUCCESS);
  ASSERT_EQ(cuMemPoolImportPointer(&memory, pool, &data), CUDA_SUCCESS);
  CUcontext of_memory = context;
  EXPECT_EQ(cuPointerGetAttribute(&of_memory, CU_POINTER_ATTRIBUTE_CONTEXT, memory), CUDA_SUCCESS);
  EXPECT_EQ(of_memory, nullptr) << "as of all memory of pools";
  ASSERT_EQ(cuCtxDestroy(context), CUDA_SUCCESS);
  EXPECT_EQ(BaseOf(memory), memory);
  ASSERT_TRUE(InLog(Kind::kDeviceMemory, memory));
  EXPECT_EQ(RecordOf(Kind::kDeviceMemory, memory)->header.context_or_result, 0u);
  ASSERT_TRUE(SettingOf(Kind::kDeviceMemory, memory, kCall_cuMemPoolImportPointer, 2));
  EXPECT_EQ(SettingOf(Kind::kDeviceMemory, memory, kCall_cuMemPoolImportPointer, 2)->header.context_or_result, 0u);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
  EXPECT_FALSE(InLog(Kind::kDeviceMemory, memory));
  EXPECT_EQ(cuMemPoolDestroy(pool), CUDA_SUCCESS);
}

TEST_F(IpcTest, PointersOfAPoolAreRecordedWithTheirKey) {
  CUstream stream = nullptr;
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuStreamCreate(&stream, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuMemAllocAsync(&memory, 1000, stream), CUDA_SUCCESS);
  Sent();
  CUmemPoolPtrExportData data{};
  ASSERT_EQ(cuMemPoolExportPointer(&data, memory), CUDA_SUCCESS);
  EXPECT_EQ(BytesOf(data), KeyOf('k'));
  EXPECT_EQ(SentOne<wire::cuMemPoolExportPointer_Request>().address, memory);
  EXPECT_EQ(RecordedKey<wire::cuMemPoolExportPointer_Request>(Kind::kDeviceMemory, memory), KeyOf('k'));
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
}

TEST_F(IpcTest, WhatTheServerRefusesLeavesNothing) {
  CUdeviceptr memory = 0, imported = 77;
  CUevent event = nullptr, imported_event = nullptr;
  const CUmemoryPool pool = NewPool();
  const CUmemGenericAllocationHandle physical = NewPhysicalMemory();
  ASSERT_EQ(cuMemAlloc(&memory, 1000), CUDA_SUCCESS);
  ASSERT_EQ(cuEventCreate(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
  const int exported = ExportedFile();
  for (const uint32_t call :
       {kCall_cuIpcGetMemHandle, kCall_cuIpcOpenMemHandle_v2, kCall_cuIpcGetEventHandle, kCall_cuIpcOpenEventHandle,
        kCall_cuMemExportToShareableHandle, kCall_cuMemImportFromShareableHandle,
        kCall_cuMemPoolExportToShareableHandle, kCall_cuMemPoolImportFromShareableHandle, kCall_cuMemPoolExportPointer,
        kCall_cuMemPoolImportPointer}) {
    server_->On(call, {CUDA_ERROR_INVALID_CONTEXT});
  }
  const size_t records = Records();
  Sent();
  int fd = 77;
  CUipcMemHandle memory_handle{};
  CUipcEventHandle event_handle{};
  CUmemPoolPtrExportData data{};
  CUmemGenericAllocationHandle imported_physical = 77;
  CUmemoryPool imported_pool = nullptr;
  EXPECT_EQ(cuIpcGetMemHandle(&memory_handle, memory), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuIpcOpenMemHandle(&imported, memory_handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
            CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuIpcGetEventHandle(&event_handle, event), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuIpcOpenEventHandle(&imported_event, event_handle), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuMemExportToShareableHandle(&fd, physical, kFile, 0), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuMemImportFromShareableHandle(&imported_physical, AsHandle(exported), kFile), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuMemPoolExportToShareableHandle(&fd, pool, kFile, 0), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuMemPoolImportFromShareableHandle(&imported_pool, AsHandle(exported), kFile, 0),
            CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuMemPoolExportPointer(&data, memory), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuMemPoolImportPointer(&imported, pool, &data), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(Sent().size(), 10u) << "each asked the server";
  EXPECT_EQ(Records(), records);
  EXPECT_EQ(BytesOf(memory_handle), KeyOf('\0'));
  EXPECT_EQ(BytesOf(event_handle), KeyOf('\0'));
  EXPECT_EQ(BytesOf(data), KeyOf('\0'));
  EXPECT_EQ(imported, 77u);
  EXPECT_EQ(imported_event, nullptr);
  EXPECT_EQ(imported_physical, 77u);
  EXPECT_EQ(imported_pool, nullptr);
  EXPECT_EQ(fd, 77);
  EXPECT_EQ(BaseOf(kImported), 0u);
  close(exported);
  EXPECT_EQ(cuMemPoolDestroy(pool), CUDA_SUCCESS);
  EXPECT_EQ(cuMemRelease(physical), CUDA_SUCCESS);
  EXPECT_EQ(cuEventDestroy(event), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
}

TEST_F(IpcTest, ArgumentsThatAreWrong) {
  CUdeviceptr memory = 0;
  CUstream stream = nullptr;
  CUevent gone = nullptr;
  ASSERT_EQ(cuStreamCreate(&stream, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuEventCreate(&gone, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuEventDestroy(gone), CUDA_SUCCESS);
  const CUmemGenericAllocationHandle physical = NewPhysicalMemory();
  const CUmemoryPool pool = NewPool();
  const int exported = ExportedFile();
  int fd = 77;
  CUipcMemHandle memory_handle{};
  CUipcEventHandle event_handle{};
  CUmemPoolPtrExportData data{};
  CUmemGenericAllocationHandle imported = 0;
  CUmemoryPool imported_pool = nullptr;
  CUevent event = nullptr;
  Sent();
  EXPECT_EQ(cuIpcGetMemHandle(nullptr, memory), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuIpcOpenMemHandle(nullptr, memory_handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuIpcCloseMemHandle(0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuIpcGetEventHandle(nullptr, gone), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuIpcGetEventHandle(&event_handle, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuIpcGetEventHandle(&event_handle, gone), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(cuIpcGetEventHandle(&event_handle, reinterpret_cast<CUevent>(stream)), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(cuIpcOpenEventHandle(nullptr, event_handle), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemExportToShareableHandle(nullptr, physical, kFile, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemExportToShareableHandle(&fd, physical, kFile, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemExportToShareableHandle(&fd, reinterpret_cast<uint64_t>(pool), kFile, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemPoolExportToShareableHandle(nullptr, pool, kFile, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemPoolExportToShareableHandle(&fd, pool, kFile, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemPoolExportToShareableHandle(&fd, reinterpret_cast<CUmemoryPool>(stream), kFile, 0),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemPoolExportPointer(nullptr, memory), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemPoolImportPointer(nullptr, pool, &data), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemPoolImportPointer(&memory, pool, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemPoolImportPointer(&memory, reinterpret_cast<CUmemoryPool>(stream), &data), CUDA_ERROR_INVALID_VALUE);
  // Kinds of handles: only files can be carried over.
  for (const auto& [type, result] : {std::make_pair(CU_MEM_HANDLE_TYPE_WIN32, CUDA_ERROR_INVALID_VALUE),
                                     std::make_pair(CU_MEM_HANDLE_TYPE_NONE, CUDA_ERROR_INVALID_VALUE),
                                     std::make_pair(CU_MEM_HANDLE_TYPE_FABRIC, CUDA_ERROR_NOT_SUPPORTED)}) {
    EXPECT_EQ(cuMemExportToShareableHandle(&fd, physical, type, 0), result) << type;
    EXPECT_EQ(cuMemPoolExportToShareableHandle(&fd, pool, type, 0), result) << type;
    EXPECT_EQ(cuMemImportFromShareableHandle(&imported, AsHandle(exported), type), result) << type;
    EXPECT_EQ(cuMemPoolImportFromShareableHandle(&imported_pool, AsHandle(exported), type, 0), result) << type;
  }
  EXPECT_EQ(cuMemImportFromShareableHandle(nullptr, AsHandle(exported), kFile), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemPoolImportFromShareableHandle(nullptr, AsHandle(exported), kFile, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemPoolImportFromShareableHandle(&imported_pool, AsHandle(exported), kFile, 1), CUDA_ERROR_INVALID_VALUE);
  // Files that nobody exported: one that anybody may write to, one that is too short, a closed descriptor.
  const int open_to_all = memfd_create("test", MFD_ALLOW_SEALING), too_short = memfd_create("test", MFD_ALLOW_SEALING);
  ASSERT_EQ(pwrite(open_to_all, KeyOf('k').data(), kKeyBytes, 0), ssize_t(kKeyBytes));
  ASSERT_EQ(pwrite(too_short, KeyOf('k').data(), kKeyBytes - 1, 0), ssize_t(kKeyBytes) - 1);
  ASSERT_EQ(fcntl(too_short, F_ADD_SEALS, F_SEAL_WRITE), 0);
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  for (const int file : {open_to_all, too_short, pipes[0]}) {
    EXPECT_EQ(cuMemImportFromShareableHandle(&imported, AsHandle(file), kFile), CUDA_ERROR_NOT_SUPPORTED);
    EXPECT_EQ(cuMemPoolImportFromShareableHandle(&imported_pool, AsHandle(file), kFile, 0), CUDA_ERROR_NOT_SUPPORTED);
  }
  for (const int file : {open_to_all, too_short, pipes[0], pipes[1], exported}) close(file);
  EXPECT_EQ(cuMemImportFromShareableHandle(&imported, AsHandle(exported), kFile), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemPoolImportFromShareableHandle(&imported_pool, AsHandle(-1), kFile, 0), CUDA_ERROR_INVALID_VALUE);
  // Without a context.
  ASSERT_EQ(cuCtxSetCurrent(nullptr), CUDA_SUCCESS);
  EXPECT_EQ(cuIpcOpenMemHandle(&memory, memory_handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuIpcOpenEventHandle(&event, event_handle), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuMemPoolImportPointer(&memory, pool, &data), CUDA_ERROR_INVALID_CONTEXT);
  ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls());
  EXPECT_EQ(fd, 77);
  EXPECT_EQ(cuMemPoolDestroy(pool), CUDA_SUCCESS);
  EXPECT_EQ(cuMemRelease(physical), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
}

// What one thread opens, another one may close: the log has it in the server's order.
TEST_F(IpcTest, TwoThreadsOpenAndCloseTheSameMemory) {
  const auto use = [] {
    EXPECT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
    for (int i = 0; i < 2000 && !HasFailure(); ++i) {
      EXPECT_EQ(Open(), kImported);
      EXPECT_EQ(BaseOf(kImported + 1), kImported) << "it is open";
      EXPECT_TRUE(InLog(Kind::kDeviceMemory, kImported));
      EXPECT_EQ(cuIpcCloseMemHandle(kImported), CUDA_SUCCESS);
    }
  };
  std::thread other(use);
  use();
  other.join();
  EXPECT_EQ(opened_, 0u);
  EXPECT_EQ(BaseOf(kImported), 0u);
  EXPECT_FALSE(InLog(Kind::kDeviceMemory, kImported));
}

// The last one: nothing works after it.
TEST_F(IpcTest, AKeyOfAnotherLengthEndsTheSession) {
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuMemAlloc(&memory, 1000), CUDA_SUCCESS);
  AnswerKey<wire::cuIpcGetMemHandle_Reply>(kCall_cuIpcGetMemHandle, "short");
  CUipcMemHandle handle{};
  EXPECT_EQ(cuIpcGetMemHandle(&handle, memory), CUDA_ERROR_DEVICE_UNAVAILABLE);
  EXPECT_EQ(BytesOf(handle), KeyOf('\0'));
  EXPECT_EQ(Session::Get()->lost(), CUDA_ERROR_DEVICE_UNAVAILABLE);
}

}  // namespace
}  // namespace cuda_remote::client
