// SPDX-License-Identifier: Apache-2.0
// Call and the hand-written bodies against a fake server: what is sent, what is answered here, what stays in the log.
#include <cuda.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/calls/testing/custom_fixture.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "client/core/testing/fake_server.h"
#include "proto/api/call_ids.gen.h"
#include "proto/codec/codec.h"

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // texture references

namespace cuda_remote::client {
namespace {

TEST_F(CustomTest, DevicesAreAnsweredHere) {
  int count = 0, version = 0;
  char name[32] = {};
  size_t bytes = 0;
  EXPECT_EQ(cuDeviceGetCount(&count), CUDA_SUCCESS);
  EXPECT_EQ(cuDriverGetVersion(&version), CUDA_SUCCESS);
  EXPECT_EQ(cuDeviceGetName(name, sizeof(name), 0), CUDA_SUCCESS);
  EXPECT_EQ(cuDeviceTotalMem(&bytes, 0), CUDA_SUCCESS);
  EXPECT_EQ(count, 2);
  EXPECT_STREQ(name, "Fake GPU");
  EXPECT_EQ(bytes, uint64_t(16) << 30);
  EXPECT_EQ(cuDeviceGetName(name, sizeof(name), 2), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_EQ(Sent(), Calls());
}

TEST_F(CustomTest, WithoutAContextNothingIsSent) {
  ASSERT_EQ(cuCtxSetCurrent(nullptr), CUDA_SUCCESS);
  CUdeviceptr memory = 0;
  CUstream stream = nullptr;
  EXPECT_EQ(cuMemAlloc(&memory, 100), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuStreamCreate(&stream, 0), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(Sent(), Calls());
}

TEST_F(CustomTest, AStreamLivesFromItsCreationToItsEnd) {
  CUstream stream = nullptr;
  ASSERT_EQ(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  const auto handle = reinterpret_cast<uint64_t>(stream);
  EXPECT_EQ(KindOf(handle), Kind::kStream);
  EXPECT_TRUE(InLog(Kind::kStream, handle));
  const std::vector<FakeServer::Request> requests = server_->Take();
  wire::cuStreamCreate_Request request;
  ASSERT_EQ(requests.size(), 1u);
  ASSERT_TRUE(wire::DecodeAs(requests[0].header.call, requests[0].message, &request));
  EXPECT_EQ(request.Flags, unsigned(CU_STREAM_NON_BLOCKING));
  EXPECT_EQ(requests[0].header.context_or_result, SlotOf(reinterpret_cast<uint64_t>(context_)));

  ASSERT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
  EXPECT_FALSE(InLog(Kind::kStream, handle));
  Sent();
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(Sent(), Calls()) << "the client knows that there is no such stream";
}

TEST_F(CustomTest, WhatTheServerRefusesLeavesNothing) {
  server_->On(kCall_cuStreamCreate, {CUDA_ERROR_OUT_OF_MEMORY, "", 0});
  const uint64_t records = Session::Get()->objects().log().records();
  CUstream stream = nullptr;
  EXPECT_EQ(cuStreamCreate(&stream, 0), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(stream, nullptr);
  EXPECT_EQ(Session::Get()->objects().log().records(), records);
  server_->On(kCall_cuStreamCreate, FakeServer::Answer());
}

TEST_F(CustomTest, MemoryIsKnownHere) {
  CUdeviceptr memory = 0, base = 0;
  size_t bytes = 0;
  ASSERT_EQ(cuMemAlloc(&memory, 1000), CUDA_SUCCESS);
  EXPECT_TRUE(InLog(Kind::kDeviceMemory, memory));
  EXPECT_EQ(Sent(), Calls{kOpMemAlloc});
  EXPECT_EQ(cuMemGetAddressRange(&base, &bytes, memory + 10), CUDA_SUCCESS);
  EXPECT_EQ(base, memory);
  EXPECT_EQ(bytes, 1000u);
  CUmemorytype type = CUmemorytype(0);
  EXPECT_EQ(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory), CUDA_SUCCESS);
  EXPECT_EQ(type, CU_MEMORYTYPE_DEVICE);
  for (const unsigned set : {1u, 0u, 5u}) {
    int synchronous = -1;
    EXPECT_EQ(cuPointerSetAttribute(&set, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, memory + 8), CUDA_SUCCESS);
    EXPECT_EQ(cuPointerGetAttribute(&synchronous, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, memory), CUDA_SUCCESS);
    EXPECT_EQ(synchronous, int(set != 0));
  }
  EXPECT_EQ(Sent(), Calls()) << "answered by the client";
  ASSERT_EQ(cuMemFree(memory), CUDA_SUCCESS);
  EXPECT_FALSE(InLog(Kind::kDeviceMemory, memory));
  EXPECT_EQ(cuMemGetAddressRange(&base, &bytes, memory), CUDA_ERROR_NOT_FOUND);
  EXPECT_EQ(cuMemFree(memory), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(CustomTest, MemoryIsForgottenBeforeTheServerFreesIt) {
  // From then on another thread may be given the address, and what it notes of it has to stay.
  CUdeviceptr memory = 0;
  CUstream stream = nullptr;
  ASSERT_EQ(cuStreamCreate(&stream, 0), CUDA_SUCCESS);
  for (const bool ordered : {false, true}) {
    ASSERT_EQ(cuMemAlloc(&memory, 1000), CUDA_SUCCESS);
    bool asked = false, known = true;
    server_->On(kOpMemFree, [&](const FakeServer::Request&) {
      asked = true;
      known = InLog(Kind::kDeviceMemory, memory);
      return FakeServer::Answer();
    });
    EXPECT_EQ(ordered ? cuMemFreeAsync(memory, stream) : cuMemFree(memory), CUDA_SUCCESS);
    EXPECT_TRUE(asked);
    EXPECT_FALSE(known);
    server_->On(kOpMemFree, FakeServer::Answer());
  }
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
}

TEST_F(CustomTest, MemoryStaysIfTheServerRefusesToFreeIt) {
  // As the driver does for the default stream, while a stream that waits for that one is captured.
  CUdeviceptr memory = 0;
  CUstream stream = nullptr;
  ASSERT_EQ(cuMemAlloc(&memory, 1000), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamCreate(&stream, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  server_->On(kOpMemFree, {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "", 0});
  EXPECT_EQ(cuMemFreeAsync(memory, nullptr), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  EXPECT_TRUE(InLog(Kind::kDeviceMemory, memory));
  server_->On(kOpMemFree, FakeServer::Answer());
  EXPECT_EQ(cuMemFreeAsync(memory, nullptr), CUDA_SUCCESS);
  EXPECT_FALSE(InLog(Kind::kDeviceMemory, memory));
  EXPECT_NE(Session::Get()->graphs().captures().End(reinterpret_cast<uint64_t>(stream)), nullptr);
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
}

TEST_F(CustomTest, AnErrorOfACallThatNobodyWaitedForIsReportedOnce) {
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuMemAlloc(&memory, 1000), CUDA_SUCCESS);
  server_->On(kCall_cuMemsetD8Async, {CUDA_ERROR_ILLEGAL_ADDRESS, "", 0});
  EXPECT_EQ(cuMemsetD8Async(memory, 1, 100, nullptr), CUDA_SUCCESS);
  // A call that makes something does not fail for another's sake.
  CUevent event = nullptr;
  EXPECT_EQ(cuEventCreate(&event, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
  server_->On(kCall_cuMemsetD8Async, FakeServer::Answer());
  EXPECT_EQ(cuEventDestroy(event), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
}

TEST_F(CustomTest, TimesOfEventsFromBeforeAMove) {
  // Both events completed on an earlier server: this one does not know the time between them.
  CUevent first = nullptr, second = nullptr;
  ASSERT_EQ(cuEventCreate(&first, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuEventCreate(&second, 0), CUDA_SUCCESS);
  EventTimes& times = Session::Get()->event_times();
  times.Note(reinterpret_cast<uint64_t>(first), 5000);
  times.Note(reinterpret_cast<uint64_t>(second), 2000);
  times.Moved(0);
  server_->On(kCall_cuEventElapsedTime_v2, {CUDA_ERROR_INVALID_HANDLE, "", 0});
  server_->On(kCall_cuEventElapsedTime, {CUDA_ERROR_INVALID_HANDLE, "", 0});
  float milliseconds = 0;
  EXPECT_EQ(cuEventElapsedTime(&milliseconds, first, second), CUDA_SUCCESS);
  EXPECT_FLOAT_EQ(milliseconds, 3);
  // What this server refuses to compare (events of two GPUs), though it knows each.
  CUevent third = nullptr, fourth = nullptr;
  ASSERT_EQ(cuEventCreate(&third, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuEventCreate(&fourth, 0), CUDA_SUCCESS);
  const auto ask = [](const FakeServer::Request& request) {
    wire::cuEventElapsedTime_Request in;
    EXPECT_TRUE(in.Decode(request.message));
    return in.hStart == in.hEnd ? FakeServer::Answer(CUDA_SUCCESS, Encoded(wire::cuEventElapsedTime_Reply()))
                                : FakeServer::Answer(CUDA_ERROR_INVALID_HANDLE);
  };
  server_->On(kCall_cuEventElapsedTime, ask);
  server_->On(kCall_cuEventElapsedTime_v2, ask);
  EXPECT_EQ(cuEventElapsedTime(&milliseconds, third, fourth), CUDA_ERROR_INVALID_HANDLE);
  for (const CUevent event : {first, second, third, fourth}) EXPECT_EQ(cuEventDestroy(event), CUDA_SUCCESS);
}

TEST_F(CustomTest, AnEventOfAnotherContextIsRefusedAtTheCall) {
  CUcontext far = nullptr, near = nullptr;
  CUevent of_far = nullptr, of_near = nullptr, own = nullptr;
  ASSERT_EQ(cuCtxCreate(&far, nullptr, 0, 1), CUDA_SUCCESS);
  ASSERT_EQ(cuEventCreate(&of_far, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxCreate(&near, nullptr, 0, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuEventCreate(&of_near, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
  ASSERT_EQ(cuEventCreate(&own, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
  CUstream stream = nullptr;
  ASSERT_EQ(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  for (const uint32_t call : {uint32_t(kCall_cuEventRecord), uint32_t(kCall_cuEventRecordWithFlags)})
    server_->On(call, CUDA_ERROR_INVALID_HANDLE);
  for (const CUevent event : {of_far, of_near}) {
    for (const CUstream one : {stream, CUstream(nullptr)}) {
      EXPECT_EQ(cuEventRecord(event, one), CUDA_ERROR_INVALID_HANDLE);
      EXPECT_EQ(cuEventRecordWithFlags(event, one, 0), CUDA_ERROR_INVALID_HANDLE);
    }
  }
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_SUCCESS) << "no error is left for a later call";
  for (const uint32_t call : {uint32_t(kCall_cuEventRecord), uint32_t(kCall_cuEventRecordWithFlags)})
    server_->On(call, FakeServer::Answer());
  // Others are sent without waiting, as ever.
  Sent();
  EXPECT_EQ(cuEventRecord(own, stream), CUDA_SUCCESS);
  EXPECT_EQ(cuEventRecord(own, nullptr), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxSetCurrent(near), CUDA_SUCCESS);
  EXPECT_EQ(cuEventRecord(own, stream), CUDA_SUCCESS) << "the stream's context counts, not the current one";
  EXPECT_EQ(cuEventRecord(of_near, nullptr), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
  SentRequests();
  ASSERT_EQ(sent_.size(), 4u);
  for (const auto& one : sent_) EXPECT_TRUE(one.header.flags & kFlagNoReply);
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
  EXPECT_EQ(cuEventDestroy(own), CUDA_SUCCESS);
  EXPECT_EQ(cuCtxDestroy(near), CUDA_SUCCESS);
  EXPECT_EQ(cuCtxDestroy(far), CUDA_SUCCESS);
}

TEST_F(CustomTest, ThePerThreadDefaultStreamIsThereAgainAfterAReset) {
  ASSERT_EQ(cuStreamSynchronize(CU_STREAM_PER_THREAD), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), (Calls{kCall_cuStreamCreate, kCall_cuStreamSynchronize}));
  ASSERT_EQ(cuDevicePrimaryCtxReset(0), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamSynchronize(CU_STREAM_PER_THREAD), CUDA_ERROR_CONTEXT_IS_DESTROYED);
  EXPECT_EQ(cuEventRecord(nullptr, CU_STREAM_PER_THREAD), CUDA_ERROR_INVALID_HANDLE);
  CUcontext again = nullptr;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&again, 0), CUDA_SUCCESS);
  EXPECT_EQ(again, context_);
  server_->Take();
  EXPECT_EQ(cuStreamSynchronize(CU_STREAM_PER_THREAD), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), (Calls{kCall_cuStreamCreate, kCall_cuStreamSynchronize}));
  EXPECT_EQ(cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
}

TEST_F(CustomTest, RegistrationsDoNotOverlap) {
  const auto page = size_t(sysconf(_SC_PAGESIZE));
  void* const mapped = mmap(nullptr, 8 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  char* const memory = static_cast<char*>(mapped);
  ASSERT_EQ(cuMemHostRegister(memory + 2 * page, page, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuMemHostRegister(memory + 2 * page, page, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  EXPECT_EQ(cuMemHostRegister(memory + page, 2 * page, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  EXPECT_EQ(cuMemHostRegister(memory, 8 * page, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
      << "one that lies inside";
  EXPECT_EQ(cuMemHostRegister(memory, 2 * page, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuMemHostUnregister(memory + page), CUDA_ERROR_INVALID_VALUE) << "not where it begins";
  EXPECT_EQ(cuMemHostUnregister(memory), CUDA_SUCCESS);
  EXPECT_EQ(cuMemHostUnregister(memory), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  EXPECT_EQ(cuMemHostUnregister(memory + 2 * page), CUDA_SUCCESS);
  // Memory that is not there, at an end or in the middle.
  ASSERT_EQ(munmap(memory + 4 * page, page), 0);
  EXPECT_EQ(cuMemHostRegister(memory, 8 * page, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemHostRegister(memory + 3 * page, page + 1, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemHostRegister(memory, SIZE_MAX, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemHostRegister(memory, 0, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemHostRegister(memory, page, 0x80), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemHostRegister(memory, 4 * page, 0), CUDA_SUCCESS) << "up to it";
  EXPECT_EQ(cuMemHostUnregister(memory), CUDA_SUCCESS);
  EXPECT_EQ(munmap(memory, 8 * page), 0);
}

TEST_F(CustomTest, MappedMemoryIsOfItsOwnDevice) {
  constexpr uint64_t kReserved = 0x320000000000;
  constexpr size_t kBytes = size_t(2) << 20;
  server_->On(kCall_cuMemAddressReserve, [](const FakeServer::Request&) {
    wire::cuMemAddressReserve_Reply reply;
    reply.address = kReserved;
    return FakeServer::Answer(CUDA_SUCCESS, Encoded(reply));
  });
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = 3;
  CUdeviceptr address = 0;
  CUmemGenericAllocationHandle memory = 0;
  ASSERT_EQ(cuMemAddressReserve(&address, 2 * kBytes, 0, 0, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuMemCreate(&memory, kBytes, &properties, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuMemMap(address + kBytes, 2 * kBytes, 0, memory, 0), CUDA_ERROR_INVALID_VALUE) << "past the reservation";
  EXPECT_EQ(cuMemMap(address, kBytes, 0, memory + 1, 0), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(cuMemMap(address, kBytes, 0, memory, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuMemRelease(memory), CUDA_SUCCESS);
  EXPECT_EQ(cuMemRelease(memory), CUDA_ERROR_INVALID_VALUE);
  EXPECT_TRUE(InLog(Kind::kPhysicalMemory, memory)) << "it lives on while it is mapped";
  int device = -1;
  uint64_t types = 0;
  EXPECT_EQ(cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address + 5), CUDA_SUCCESS);
  EXPECT_EQ(device, 3);
  EXPECT_EQ(cuPointerGetAttribute(&types, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, address), CUDA_SUCCESS);
  EXPECT_EQ(types, uint64_t(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  EXPECT_EQ(cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address + kBytes),
            CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(cuMemUnmap(address, kBytes), CUDA_SUCCESS);
  EXPECT_FALSE(InLog(Kind::kPhysicalMemory, memory));
  // It is of no context, whichever is current.
  CUcontext other = nullptr;
  CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  ASSERT_EQ(cuCtxCreate(&other, nullptr, 0, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuMemAddressFree(address, 2 * kBytes), CUDA_SUCCESS);
  ASSERT_EQ(cuMemAddressReserve(&address, 2 * kBytes, 0, 0, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuMemCreate(&memory, kBytes, &properties, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuMemMap(address, kBytes, 0, memory, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuMemSetAccess(address, kBytes, &access, 1), CUDA_SUCCESS);
  const size_t records = Records();
  ASSERT_EQ(cuCtxDestroy(other), CUDA_SUCCESS);
  EXPECT_EQ(Records(), records - 1) << "the context's own";
  EXPECT_TRUE(InLog(Kind::kReservation, address));
  EXPECT_TRUE(InLog(Kind::kMapping, address));
  EXPECT_EQ(RecordOf(Kind::kMapping, address)->header.context_or_result, 0u);
  ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
  EXPECT_EQ(cuMemUnmap(address, kBytes), CUDA_SUCCESS);
  EXPECT_EQ(cuMemRelease(memory), CUDA_SUCCESS);
  EXPECT_EQ(cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemAddressFree(address, 2 * kBytes), CUDA_SUCCESS);
}

// CUDA: neither cuCtxDestroy nor a reset destroys what cuMemAllocAsync and cuMemAllocFromPoolAsync have allocated.
TEST_F(CustomTest, MemoryOfPoolsOutlivesContexts) {
  CUmemPoolProps props{};
  props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  props.location.id = 1;
  CUmemoryPool pool = nullptr;
  ASSERT_EQ(cuMemPoolCreate(&pool, &props), CUDA_SUCCESS);
  server_->On(kOpMemAlloc, [](const FakeServer::Request& request) {
    static uint64_t next = driverabi::kReservationBase;
    wire::OpMemAlloc_Request in;
    wire::OpMemAlloc_Reply out;
    EXPECT_TRUE(in.Decode(request.message));
    out.address = next += uint64_t(1) << 21;
    out.bytes = in.bytes;
    return FakeServer::Answer{CUDA_SUCCESS, Encoded(out)};
  });
  const std::function<CUresult(CUcontext)> ends[] = {
      [](CUcontext context) { return cuCtxDestroy(context); },
      [](CUcontext) { return cuDevicePrimaryCtxRelease(1); },
      [](CUcontext) {
        const CUresult result = cuDevicePrimaryCtxReset(1);
        return result == CUDA_SUCCESS ? cuDevicePrimaryCtxRelease(1) : result;
      },
  };
  for (const auto& end : ends) {
    CUcontext context = nullptr;
    if (&end == &ends[0]) {
      ASSERT_EQ(cuCtxCreate(&context, nullptr, 0, 1), CUDA_SUCCESS);
    } else {
      ASSERT_EQ(cuDevicePrimaryCtxRetain(&context, 1), CUDA_SUCCESS);
      ASSERT_EQ(cuCtxSetCurrent(context), CUDA_SUCCESS);
    }
    CUstream stream = nullptr;
    CUdeviceptr plain = 0, of_device = 0, of_pool = 0, freed = 0;
    ASSERT_EQ(cuStreamCreate(&stream, 0), CUDA_SUCCESS);
    ASSERT_EQ(cuMemAlloc(&plain, 100), CUDA_SUCCESS);
    ASSERT_EQ(cuMemAllocAsync(&of_device, 100, stream), CUDA_SUCCESS);
    ASSERT_EQ(cuMemAllocFromPoolAsync(&of_pool, 100, pool, stream), CUDA_SUCCESS);
    ASSERT_EQ(cuMemAllocAsync(&freed, 100, stream), CUDA_SUCCESS);
    ASSERT_EQ(cuMemFreeAsync(freed, stream), CUDA_SUCCESS);
    EXPECT_EQ(RecordOf(Kind::kDeviceMemory, plain)->header.context_or_result, SlotOf(HandleOf(context)));
    EXPECT_EQ(RecordOf(Kind::kDeviceMemory, of_device)->header.context_or_result, 0u);
    EXPECT_TRUE(InLog(Kind::kDeviceMemory, freed)) << "kept for the stream's next allocation";
    Sent();
    ASSERT_EQ(end(context), CUDA_SUCCESS);
    // What was freed in its stream goes back while the stream is there.
    SentRequests();
    ASSERT_EQ(sent_.size(), 2u);
    EXPECT_EQ(sent_[0].header.context_or_result, SlotOf(HandleOf(context)));
    const auto back = SentAt<wire::OpMemFree_Request>(0);
    EXPECT_EQ(back.address, freed);
    EXPECT_TRUE(back.stream_ordered);
    ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
    EXPECT_FALSE(InLog(Kind::kDeviceMemory, plain));
    EXPECT_FALSE(InLog(Kind::kDeviceMemory, freed));
    EXPECT_EQ(cuMemFree(plain), CUDA_ERROR_INVALID_VALUE);
    for (const CUdeviceptr memory : {of_device, of_pool}) {
      EXPECT_TRUE(InLog(Kind::kDeviceMemory, memory));
      int device = -1;
      EXPECT_EQ(cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, memory), CUDA_SUCCESS);
      EXPECT_EQ(device, 1);
    }
    Sent();
    EXPECT_EQ(cuMemFree(of_device), CUDA_SUCCESS);
    EXPECT_EQ(SentOne<wire::OpMemFree_Request>().address, of_device);
    EXPECT_EQ(cuMemFreeAsync(of_pool, nullptr), CUDA_SUCCESS);
    EXPECT_EQ(SentOne<wire::OpMemFree_Request>().address, of_pool);
    EXPECT_FALSE(InLog(Kind::kDeviceMemory, of_device));
    EXPECT_FALSE(InLog(Kind::kDeviceMemory, of_pool));
  }
  EXPECT_EQ(cuMemPoolDestroy(pool), CUDA_SUCCESS);
  // A context that is gone cannot be named in the free.
  FreedMemory::Block block;
  block.address = driverabi::kReservationBase;
  block.bytes = 64;
  block.context = MakeHandle(Kind::kContext, 1000, 1);
  Sent();
  Session::Get()->memory().GiveBack({block});
  SentRequests();
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_EQ(sent_[0].header.context_or_result, 0u);
  EXPECT_FALSE(SentAt<wire::OpMemFree_Request>(0).stream_ordered);
}

TEST_F(CustomTest, HostMemoryInACaptureIsNeededByItsGraph) {
  void* pinned = nullptr;
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuMemHostAlloc(&pinned, 4096, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuMemAlloc(&memory, 4096), CUDA_SUCCESS);
  CUstream stream = nullptr;
  ASSERT_EQ(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  const auto address = reinterpret_cast<CUdeviceptr>(pinned);
  constexpr uint64_t kManaged = 0x330000000000;
  {
    DeviceRange range;
    range.source = DeviceRange::kManaged;
    range.managed = true;
    WriterLock lock(&Session::Get()->memory().mutex());
    Session::Get()->memory().device_ranges().Insert(kManaged, 4096, range);
  }
  CUDA_MEMCPY3D_PEER shaped{};
  shaped.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  shaped.srcDevice = kManaged;
  shaped.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  shaped.dstDevice = memory;
  shaped.WidthInBytes = 16;
  shaped.Height = shaped.Depth = 1;
  struct {
    uint64_t needed;
    std::function<CUresult()> copy;
  } const copies[] = {
      {address, [&] { return cuMemcpyAsync(memory, address, 16, stream); }},
      {address, [&] { return cuMemcpyPeerAsync(memory, context_, address, context_, 16, stream); }},
      {kManaged, [&] { return cuMemcpyPeerAsync(memory, context_, kManaged, context_, 16, stream); }},
      {kManaged, [&] { return cuMemcpy3DPeerAsync(&shaped, stream); }},
  };
  for (const auto& [needed, copy] : copies) {
    ASSERT_EQ(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    EXPECT_EQ(copy(), CUDA_SUCCESS);
    const auto captured = Session::Get()->graphs().captures().End(reinterpret_cast<uint64_t>(stream));
    ASSERT_NE(captured, nullptr);
    EXPECT_EQ(captured->obstacle, "");
    const replay::ObjectKey key{Kind::kHostMemory, needed};
    EXPECT_NE(std::find(captured->needs.begin(), captured->needs.end(), key), captured->needs.end())
        << std::hex << needed;
  }
  {
    WriterLock lock(&Session::Get()->memory().mutex());
    Session::Get()->memory().device_ranges().Erase(kManaged);
  }
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFreeHost(pinned), CUDA_SUCCESS);
}

// A setting that names what is gone would stop a replay.
TEST_F(CustomTest, ASettingGoesWithWhatItNames) {
  CUcontext peer = nullptr, reset = nullptr;
  ASSERT_EQ(cuCtxCreate(&peer, nullptr, 0, 1), CUDA_SUCCESS);
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&reset, 1), CUDA_SUCCESS);
  CUtexref texture = nullptr;
  CUarray array = nullptr;
  CUdeviceptr memory = 0;
  CUDA_ARRAY_DESCRIPTOR shape{16, 16, CU_AD_FORMAT_FLOAT, 1};
  ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
  ASSERT_EQ(cuTexRefCreate(&texture), CUDA_SUCCESS);
  ASSERT_EQ(cuArrayCreate(&array, &shape), CUDA_SUCCESS);
  ASSERT_EQ(cuMemAlloc(&memory, 4096), CUDA_SUCCESS);
  const size_t records = Records();
  EXPECT_EQ(cuCtxEnablePeerAccess(peer, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuCtxEnablePeerAccess(reset, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuTexRefSetArray(texture, array, CU_TRSA_OVERRIDE_FORMAT), CUDA_SUCCESS);
  size_t offset = 0;
  server_->On(kCall_cuTexRefSetAddress_v2, {CUDA_SUCCESS, Encoded(wire::cuTexRefSetAddress_v2_Reply()), 0});
  EXPECT_EQ(cuTexRefSetAddress(&offset, texture, memory + 100, 1000), CUDA_SUCCESS);
  EXPECT_EQ(Records(), records + 4);
  EXPECT_EQ(cuCtxDestroy(peer), CUDA_SUCCESS);
  EXPECT_EQ(cuDevicePrimaryCtxReset(1), CUDA_SUCCESS);
  EXPECT_EQ(cuArrayDestroy(array), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
  EXPECT_EQ(Records(), records - 4) << "the four objects and the four settings";
  EXPECT_TRUE(InLog(Kind::kTextureReference, HandleOf(texture)));
  EXPECT_TRUE(InLog(Kind::kContext, HandleOf(context_)));
  EXPECT_EQ(cuTexRefDestroy(texture), CUDA_SUCCESS);
  EXPECT_EQ(cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
}

// Its destructor runs on another thread, as soon as the server has let go of the last reference.
TEST_F(CustomTest, AUserObjectMayBeGoneBeforeItsLastReleaseReturns) {
  static int destroyed;
  destroyed = 0;
  CUgraph graph = nullptr;
  ASSERT_EQ(cuGraphCreate(&graph, 0), CUDA_SUCCESS);
  for (const uint32_t last : {kCall_cuUserObjectRelease, kCall_cuGraphReleaseUserObject}) {
    CUuserObject object = nullptr;
    ASSERT_EQ(cuUserObjectCreate(
                  &object, nullptr, [](void*) { ++destroyed; }, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
              CUDA_SUCCESS);
    const bool of_graph = last == kCall_cuGraphReleaseUserObject;
    if (of_graph) {
      ASSERT_EQ(cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE), CUDA_SUCCESS);
    }
    const auto is_there = [object] {
      ReaderLock lock(&Session::Get()->objects().mutex());
      return Session::Get()->objects().handles().Find(Kind::kUserObject, HandleOf(object)) != nullptr;
    };
    server_->On(last, [&](const FakeServer::Request&) {
      wire::OpUserObjectGone_Request gone;
      gone.object = HandleOf(object);
      server_->Event(kOpUserObjectGone, Encoded(gone));
      while (is_there()) usleep(1000);
      return FakeServer::Answer();
    });
    EXPECT_EQ(of_graph ? cuGraphReleaseUserObject(graph, object, 1) : cuUserObjectRelease(object, 1), CUDA_SUCCESS);
    server_->On(last, FakeServer::Answer());
    ReaderLock lock(&Session::Get()->objects().mutex());
    for (const replay::Record* const record : Session::Get()->objects().log().InOrder()) {
      EXPECT_NE(record->header.call, last) << "a replay has no such object";
      EXPECT_NE(record->header.call, uint32_t(kCall_cuGraphRetainUserObject));
    }
  }
  EXPECT_EQ(destroyed, 2);
  EXPECT_EQ(cuGraphDestroy(graph), CUDA_SUCCESS);
}

TEST_F(CustomTest, CopiedAttributesOfAStreamAreItsOwn) {
  CUstream from = nullptr, to = nullptr;
  ASSERT_EQ(cuStreamCreate(&from, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamCreate(&to, 0), CUDA_SUCCESS);
  const auto set = [](CUstream stream, CUstreamAttrID id, int number) {
    CUstreamAttrValue value{};
    value.priority = number;
    return cuStreamSetAttribute(stream, id, &value);
  };
  const auto recorded = [](uint64_t stream, CUstreamAttrID id) {
    const Kind kind = KindOf(stream);
    const auto record = SettingOf(kind, stream, kCall_cuStreamSetAttribute, id);
    wire::cuStreamSetAttribute_Request request;
    CUstreamAttrValue value{};
    if (!record || !request.Decode(record->message)) return -1;
    EXPECT_EQ(request.param.size(), sizeof value);
    memcpy(&value, request.param.data(), std::min(sizeof value, request.param.size()));
    EXPECT_EQ(request.hStream, kind == Kind::kStream ? stream : 0);
    return value.priority;
  };
  constexpr CUstreamAttrID kPolicy = CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY,
                           kDomain = CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN;
  EXPECT_EQ(set(from, kPolicy, 5), CUDA_SUCCESS);
  EXPECT_EQ(set(to, kPolicy, 1), CUDA_SUCCESS);
  EXPECT_EQ(set(to, kDomain, 1), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamCopyAttributes(to, from), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamCopyAttributes(to, to), CUDA_SUCCESS);
  EXPECT_EQ(set(from, kPolicy, 6), CUDA_SUCCESS);
  EXPECT_EQ(recorded(HandleOf(to), kPolicy), 5) << "what the source was told later does not matter";
  EXPECT_EQ(recorded(HandleOf(to), kDomain), -1) << "the source was never told";
  // A default stream has no record of its own.
  EXPECT_EQ(cuStreamCopyAttributes(nullptr, from), CUDA_SUCCESS);
  EXPECT_EQ(recorded(HandleOf(context_), kPolicy), 6);
  EXPECT_EQ(cuStreamDestroy(from), CUDA_SUCCESS);
  EXPECT_EQ(recorded(HandleOf(to), kPolicy), 5);
  // What was known of the stream's priority need not be true any more.
  int priority = 0;
  EXPECT_EQ(cuStreamGetPriority(to, &priority), CUDA_SUCCESS);
  Sent();
  EXPECT_EQ(cuStreamGetPriority(to, &priority), CUDA_SUCCESS);
  EXPECT_EQ(set(to, CU_LAUNCH_ATTRIBUTE_PRIORITY, -1), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamGetPriority(to, &priority), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), (Calls{kCall_cuStreamSetAttribute, kCall_cuStreamGetPriority}));
  EXPECT_EQ(cuStreamDestroy(to), CUDA_SUCCESS);
}

// Nobody waits for the stream: what it waits for itself may come from whoever makes the call.
TEST_F(CustomTest, RectanglesOfPinnedMemoryAreCopiedInTheStreamsOrder) {
  CUstream stream = nullptr;
  CUdeviceptr memory = 0;
  void* allocated = nullptr;
  ASSERT_EQ(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  ASSERT_EQ(cuMemAlloc(&memory, 4096), CUDA_SUCCESS);
  ASSERT_EQ(cuMemHostAlloc(&allocated, 4096, 0), CUDA_SUCCESS);
  char* const pinned = static_cast<char*>(allocated);
  CUDA_MEMCPY2D rows{};
  rows.srcMemoryType = CU_MEMORYTYPE_HOST;
  rows.srcHost = pinned;
  rows.srcXInBytes = 3;
  rows.srcY = 1;
  rows.srcPitch = 100;
  rows.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  rows.dstDevice = memory;
  rows.WidthInBytes = 10;
  rows.Height = 4;
  CUDA_MEMCPY3D boxes{};
  boxes.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  boxes.srcDevice = memory;
  boxes.dstMemoryType = CU_MEMORYTYPE_HOST;
  boxes.dstHost = pinned;
  boxes.WidthInBytes = 16;
  boxes.Height = boxes.Depth = 4;
  CUDA_MEMCPY3D_PEER between{};
  between.srcMemoryType = between.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  between.srcDevice = memory;
  between.dstDevice = memory + 2048;
  between.srcContext = between.dstContext = context_;
  between.WidthInBytes = 16;
  between.Height = between.Depth = 1;
  Sent();
  for (const bool blocking : {false, true}) {
    EXPECT_EQ(blocking ? cuMemcpy2D(&rows) : cuMemcpy2DAsync(&rows, stream), CUDA_SUCCESS);
    const auto flat = SentOne<wire::cuMemcpy2DAsync_v2_Request>();
    EXPECT_EQ(flat.copy, BytesOf(rows));
    EXPECT_EQ(flat.blocking, blocking);
    EXPECT_FALSE(flat.src_is_payload || flat.dst_is_payload);
    EXPECT_EQ(blocking ? cuMemcpy3D(&boxes) : cuMemcpy3DAsync(&boxes, stream), CUDA_SUCCESS);
    const auto deep = SentOne<wire::cuMemcpy3DAsync_v2_Request>();
    EXPECT_EQ(deep.copy, BytesOf(boxes));
    EXPECT_EQ(deep.blocking, blocking);
    EXPECT_FALSE(deep.src_is_payload || deep.dst_is_payload);
    EXPECT_EQ(blocking ? cuMemcpy3DPeer(&between) : cuMemcpy3DPeerAsync(&between, stream), CUDA_SUCCESS);
    EXPECT_EQ(SentOne<wire::cuMemcpy3DPeerAsync_Request>().blocking, blocking);
  }
  // Pageable memory: the bytes travel.
  std::vector<char> there(4096);
  rows.srcHost = there.data();
  EXPECT_EQ(cuMemcpy2DAsync(&rows, stream), CUDA_SUCCESS);
  EXPECT_TRUE(SentOne<wire::cuMemcpy2DAsync_v2_Request>().src_is_payload);
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFreeHost(allocated), CUDA_SUCCESS);
}

// Rows and slices of host memory travel packed. Those without a pitch or a height hold the box and what lies before it.
TEST_F(CustomTest, BoxesOfPageableMemory) {
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuMemAlloc(&memory, 4096), CUDA_SUCCESS);
  std::string there(600, '.');
  for (size_t i = 0; i < there.size(); ++i) there[i] = char('a' + i % 26);
  CUDA_MEMCPY3D box{};
  box.srcMemoryType = CU_MEMORYTYPE_HOST;
  box.srcHost = there.data();
  box.srcXInBytes = 1;
  box.srcY = 2;
  box.srcZ = 1;
  box.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  box.dstDevice = memory;
  box.dstY = 3;
  box.WidthInBytes = 4;
  box.Height = 2;
  box.Depth = 3;
  for (const bool given : {true, false}) {
    box.srcPitch = given ? 10 : 0;
    box.srcHeight = given ? 7 : 0;
    const size_t pitch = given ? 10 : 5, height = given ? 7 : 4;
    Sent();
    ASSERT_EQ(cuMemcpy3D(&box), CUDA_SUCCESS);
    SentRequests();
    ASSERT_EQ(sent_.size(), 3u) << "a slice each";
    for (size_t z = 0; z < 3; ++z) {
      std::string expected;
      for (size_t y = 0; y < 2; ++y) expected += there.substr(((1 + z) * height + 2 + y) * pitch + 1, 4);
      EXPECT_EQ(sent_[z].payload, expected) << z;
      CUDA_MEMCPY3D slice;
      const auto request = SentAt<wire::cuMemcpy3DAsync_v2_Request>(z);
      ASSERT_EQ(request.copy.size(), sizeof slice);
      memcpy(&slice, request.copy.data(), sizeof slice);
      EXPECT_EQ(slice.dstZ, z);
      EXPECT_EQ(slice.dstPitch, 4u);
      EXPECT_EQ(slice.dstHeight, 5u) << "where the slice is, the server's driver must know";
    }
  }
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
}

// Where a pitch or a height is given, it must hold what is copied, also of one row and one slice. All of this is
// refused before anything is sent or copied, whichever memory it is.
TEST_F(CustomTest, PitchesAndHeightsHoldWhatIsCopied) {
  CUstream stream = nullptr;
  CUdeviceptr memory = 0;
  void* pinned = nullptr;
  ASSERT_EQ(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  ASSERT_EQ(cuMemAlloc(&memory, 4096), CUDA_SUCCESS);
  ASSERT_EQ(cuMemHostAlloc(&pinned, 4096, 0), CUDA_SUCCESS);
  std::string pageable(4096, 'a');
  const CUdeviceptr places[] = {reinterpret_cast<CUdeviceptr>(&pageable[0]), reinterpret_cast<CUdeviceptr>(pinned),
                                memory};
  const auto side_of = [&](CUdeviceptr place) { return place == memory ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST; };
  // All ways to copy a box, or a rectangle if it is one.
  const auto copy = [&](const CUDA_MEMCPY3D& box, CUresult expected) {
    EXPECT_EQ(cuMemcpy3D(&box), expected);
    EXPECT_EQ(cuMemcpy3DAsync(&box, stream), expected);
    CUDA_MEMCPY3D_PEER peer;  // the same, but for its contexts
    memcpy(&peer, &box, sizeof peer);
    peer.srcContext = peer.dstContext = context_;
    EXPECT_EQ(cuMemcpy3DPeer(&peer), expected);
    EXPECT_EQ(cuMemcpy3DPeerAsync(&peer, stream), expected);
    if (box.Depth > 1 || box.srcHeight + box.dstHeight + box.srcZ + box.dstZ != 0) return;
    CUDA_MEMCPY2D flat{};
    flat.srcXInBytes = box.srcXInBytes;
    flat.srcY = box.srcY;
    flat.srcMemoryType = box.srcMemoryType;
    flat.srcHost = box.srcHost;
    flat.srcDevice = box.srcDevice;
    flat.srcPitch = box.srcPitch;
    flat.dstXInBytes = box.dstXInBytes;
    flat.dstY = box.dstY;
    flat.dstMemoryType = box.dstMemoryType;
    flat.dstHost = box.dstHost;
    flat.dstDevice = box.dstDevice;
    flat.dstPitch = box.dstPitch;
    flat.WidthInBytes = box.WidthInBytes;
    flat.Height = box.Height;
    EXPECT_EQ(cuMemcpy2D(&flat), expected);
    EXPECT_EQ(cuMemcpy2DUnaligned(&flat), expected);
    EXPECT_EQ(cuMemcpy2DAsync(&flat, stream), expected);
  };
  constexpr uint32_t calls[] = {kCall_cuMemcpy2DAsync_v2, kCall_cuMemcpy3DAsync_v2};
  for (const CUdeviceptr from : places) {
    for (const CUdeviceptr to : places) {
      // What comes from the device for pageable memory.
      const bool answers = from == memory && to == places[0];
      size_t bytes = 8;
      for (const uint32_t call : calls) {
        server_->On(call, [&bytes, answers](const FakeServer::Request&) {
          return FakeServer::Answer(CUDA_SUCCESS, {}, 0, answers ? std::string(bytes, 'a') : std::string());
        });
      }
      SCOPED_TRACE(testing::Message() << "from " << from << " to " << to);
      CUDA_MEMCPY3D good{};
      good.srcMemoryType = side_of(from);
      good.srcHost = reinterpret_cast<const void*>(from);
      good.srcDevice = from;
      good.dstMemoryType = side_of(to);
      good.dstHost = reinterpret_cast<void*>(to);
      good.dstDevice = to;
      good.WidthInBytes = 8;
      good.Height = good.Depth = 1;
      good.srcXInBytes = good.dstXInBytes = 4;
      Sent();
      for (const auto pitch : {&CUDA_MEMCPY3D::srcPitch, &CUDA_MEMCPY3D::dstPitch}) {
        for (const size_t given : {7, 11}) {  // less than the width, and than what the row needs
          for (const size_t rows : {1, 2}) {
            CUDA_MEMCPY3D box = good;
            box.*pitch = given;
            box.Height = rows;
            copy(box, CUDA_ERROR_INVALID_VALUE);
          }
        }
      }
      good.srcY = good.dstY = 1;
      for (const auto height : {&CUDA_MEMCPY3D::srcHeight, &CUDA_MEMCPY3D::dstHeight}) {
        for (const size_t given : {1, 2}) {
          for (const size_t slices : {1, 2}) {
            CUDA_MEMCPY3D box = good;
            box.*height = given;
            box.Height = 2;
            box.Depth = slices;
            copy(box, CUDA_ERROR_INVALID_VALUE);
          }
        }
      }
      EXPECT_EQ(Sent(), Calls());
      EXPECT_EQ(pageable, std::string(4096, 'a'));
      copy(good, CUDA_SUCCESS);  // no pitches, no heights
      good.srcY = good.dstY = 0;
      for (const size_t large : {size_t{1} << 31, size_t{1} << 40}) {
        good.srcPitch = good.dstPitch = large;
        copy(good, CUDA_SUCCESS);
      }
      CUDA_MEMCPY3D_BATCH_OP op{};
      op.src.type = op.dst.type = CU_MEMCPY_OPERAND_TYPE_POINTER;
      op.src.op.ptr.ptr = from;
      op.dst.op.ptr.ptr = to;
      op.extent = {8, 2, 1};
      Sent();
      for (size_t* const number : {&op.src.op.ptr.rowLength, &op.dst.op.ptr.rowLength, &op.src.op.ptr.layerHeight,
                                   &op.dst.op.ptr.layerHeight}) {
        *number = 1;
        EXPECT_EQ(Custom_cuMemcpy3DBatchAsync_v2(1, &op, 0, stream, false), CUDA_ERROR_INVALID_VALUE);
        *number = 0;
      }
      EXPECT_EQ(Sent(), Calls());
      bytes = 16;
      EXPECT_EQ(Custom_cuMemcpy3DBatchAsync_v2(1, &op, 0, stream, false), CUDA_SUCCESS);
    }
  }
  // A row without a pitch has the place of one that has rows before it, each as long as what it needs.
  for (const uint32_t call : calls) server_->On(call, FakeServer::Answer());
  CUDA_MEMCPY3D row{};
  row.srcMemoryType = CU_MEMORYTYPE_HOST;
  row.srcHost = "0123456789ABCDEFGHIJ";
  row.srcXInBytes = 1;
  row.srcY = 2;
  row.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  row.dstDevice = memory;
  row.WidthInBytes = 4;
  row.Height = row.Depth = 1;
  Sent();
  EXPECT_EQ(cuMemcpy3D(&row), CUDA_SUCCESS);
  SentRequests();
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_EQ(sent_[0].payload, "BCDE");
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFreeHost(pinned), CUDA_SUCCESS);
}

// The host cannot read or write memory of the GPU: copies that give it as the host's side are the server's.
TEST_F(CustomTest, MemoryOfTheGpuAsTheHostsSideOfACopy) {
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuMemAlloc(&memory, 4096), CUDA_SUCCESS);
  CUstream stream = nullptr;
  ASSERT_EQ(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  const CUdeviceptr to = memory, from = memory + 2048;
  void* const host_to = reinterpret_cast<void*>(to);
  const void* const host_from = reinterpret_cast<const void*>(from);
  Sent();
  const auto line = [&](CUresult result) {
    EXPECT_EQ(result, CUDA_SUCCESS);
    const auto sent = SentOne<wire::cuMemcpyAsync_Request>();
    EXPECT_EQ(sent.dst, to);
    EXPECT_EQ(sent.src, from);
    EXPECT_EQ(sent.bytes, 1000u);
  };
  line(cuMemcpyHtoD(to, host_from, 1000));
  line(cuMemcpyHtoDAsync(to, host_from, 1000, stream));
  line(cuMemcpyDtoH(host_to, from, 1000));
  line(cuMemcpyDtoHAsync(host_to, from, 1000, stream));
  CUDA_MEMCPY2D rows{};
  rows.srcMemoryType = rows.dstMemoryType = CU_MEMORYTYPE_HOST;
  rows.srcHost = host_from;
  rows.dstHost = host_to;
  rows.srcPitch = rows.dstPitch = 32;
  rows.WidthInBytes = 16;
  rows.Height = 4;
  EXPECT_EQ(cuMemcpy2DAsync(&rows, stream), CUDA_SUCCESS);
  const auto flat = SentOne<wire::cuMemcpy2DAsync_v2_Request>();
  EXPECT_FALSE(flat.src_is_payload || flat.dst_is_payload);
  // In a graph, too.
  CUgraph graph = nullptr;
  ASSERT_EQ(cuGraphCreate(&graph, 0), CUDA_SUCCESS);
  CUDA_MEMCPY3D box{};
  box.srcMemoryType = CU_MEMORYTYPE_HOST;
  box.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  box.srcHost = host_from;
  box.dstDevice = to;
  box.WidthInBytes = 16;
  box.Height = box.Depth = 1;
  CUgraphNode node = nullptr;
  Sent();
  ASSERT_EQ(cuGraphAddMemcpyNode(&node, graph, nullptr, 0, &box, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(SentOne<wire::cuGraphAddNode_v2_Request>().params.type, uint32_t(CU_GRAPH_NODE_TYPE_MEMCPY));
  EXPECT_EQ(cuGraphDestroy(graph), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
}

// The thread's own default stream is none that a batch is refused for.
TEST_F(CustomTest, BatchesAreNotForTheLegacyStream) {
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuMemAlloc(&memory, 4096), CUDA_SUCCESS);
  CUdeviceptr to = memory, from = memory + 2048;
  size_t bytes = 16, first = 0;
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  const auto lines = [&](CUstream stream, bool per_thread) {
    return Custom_cuMemcpyBatchAsync_v2(&to, &from, &bytes, 1, &attributes, &first, 1, stream, per_thread);
  };
  CUDA_MEMCPY3D_BATCH_OP box{};
  box.src.type = box.dst.type = CU_MEMCPY_OPERAND_TYPE_POINTER;
  box.src.op.ptr.ptr = from;
  box.dst.op.ptr.ptr = to;
  box.extent = {16, 1, 1};
  const auto boxes = [&](CUstream stream, bool per_thread) {
    return Custom_cuMemcpy3DBatchAsync_v2(1, &box, 0, stream, per_thread);
  };
  EXPECT_EQ(lines(nullptr, true), CUDA_SUCCESS);
  EXPECT_EQ(boxes(nullptr, true), CUDA_SUCCESS);
  EXPECT_EQ(lines(CU_STREAM_PER_THREAD, false), CUDA_SUCCESS);
  EXPECT_EQ(boxes(CU_STREAM_PER_THREAD, false), CUDA_SUCCESS);
  for (const bool per_thread : {false, true}) {
    EXPECT_EQ(lines(CU_STREAM_LEGACY, per_thread), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(boxes(CU_STREAM_LEGACY, per_thread), CUDA_ERROR_INVALID_VALUE);
  }
  EXPECT_EQ(lines(nullptr, false), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(boxes(nullptr, false), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
}

TEST_F(CustomTest, ListsThatAreLongerOrShorterThanAskedFor) {
  CUgraph graph = nullptr;
  ASSERT_EQ(cuGraphCreate(&graph, 0), CUDA_SUCCESS);
  CUgraphNode nodes[4];
  const auto ask = [&](uint64_t count, size_t handles) {
    wire::cuGraphGetNodes_Reply reply;
    const std::vector<uint64_t> some(handles, 0x1234);
    reply.nodes = {reinterpret_cast<const char*>(some.data()), some.size() * sizeof(some[0])};
    reply.numNodes = count;
    server_->On(kCall_cuGraphGetNodes, FakeServer::Answer(CUDA_SUCCESS, Encoded(reply)));
    std::fill(nodes, nodes + 4, reinterpret_cast<CUgraphNode>(1));
    size_t room = 3;
    const CUresult result = cuGraphGetNodes(graph, nodes, &room);
    EXPECT_EQ(nodes[3], reinterpret_cast<CUgraphNode>(1)) << "it is not the call's";
    return result == CUDA_SUCCESS ? int(room) : -int(result);
  };
  EXPECT_EQ(ask(2, 2), 2);
  EXPECT_EQ(nodes[1], reinterpret_cast<CUgraphNode>(0x1234));
  EXPECT_EQ(nodes[2], nullptr) << "what is offered and not needed";
  EXPECT_EQ(ask(3, 3), 3);
  // No server that means well answers so.
  EXPECT_EQ(ask(4, 4), -int(CUDA_ERROR_UNKNOWN));
  EXPECT_EQ(ask(2, 4), -int(CUDA_ERROR_UNKNOWN));
  EXPECT_EQ(cuGraphGetNodes(graph, nodes, nullptr), CUDA_ERROR_INVALID_VALUE);
  server_->On(kCall_cuGraphGetNodes, FakeServer::Answer());
  EXPECT_EQ(cuGraphDestroy(graph), CUDA_SUCCESS);
  size_t room = 3;
  EXPECT_EQ(cuGraphGetNodes(graph, nodes, &room), CUDA_ERROR_INVALID_VALUE) << "it is gone";
}

TEST_F(CustomTest, ParametersInBothWays) {
  const OneKernel one(server_, sizeof(int));
  Sent();
  const auto launch = [&one](void** parameters, void** extra) {
    return cuLaunchKernel(one.kernel(), 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, extra);
  };
  int value = 7;
  void* parameters[] = {&value};
  size_t bytes = sizeof(value);
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &value, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
  EXPECT_EQ(launch(parameters, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(launch(nullptr, extra), CUDA_SUCCESS);
  EXPECT_EQ(launch(parameters, extra), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(launch(nullptr, nullptr), CUDA_ERROR_INVALID_VALUE);
  void* none[] = {nullptr};
  EXPECT_EQ(launch(none, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Sent(), (Calls{kOpFunctionInfo, kCall_cuLaunchKernel, kCall_cuLaunchKernel}));
  // Longer than any kernel's.
  std::vector<char> block(size_t(2) << 20);
  extra[1] = block.data();
  bytes = block.size();
  EXPECT_EQ(launch(nullptr, extra), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Session::Get()->lost(), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls());
}

// The server refuses requests that somebody waits for.
void OnWaiting(FakeServer* server, uint32_t call, CUresult error) {
  server->On(call, [error](const FakeServer::Request& request) {
    return FakeServer::Answer((request.header.flags & kFlagNoReply) != 0 ? CUDA_SUCCESS : error);
  });
}

// What the driver refuses comes out of the call itself.
TEST_F(CustomTest, ALaunchInAStreamOfAnotherContextIsWaitedFor) {
  const OneKernel one(server_, sizeof(int));
  // A kernel with which nothing is wrong, so that its launches are not waited for.
  wire::OpFunctionInfo_Reply plain;
  plain.name = "kernel";
  plain.parameters.emplace_back();
  plain.parameters[0].size = sizeof(int);
  plain.attributes.assign(CU_FUNC_ATTRIBUTE_MAX, 0);
  plain.attributes[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = 64;
  server_->On(kOpFunctionInfo, FakeServer::Answer(CUDA_SUCCESS, Encoded(plain)));
  const auto launch = [&one](CUstream stream) {
    int value = 7;
    void* parameters[] = {&value};
    return cuLaunchKernel(one.kernel(), 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr);
  };
  CUstream own = nullptr, foreign = nullptr;
  CUcontext other = nullptr;
  ASSERT_EQ(cuStreamCreate(&own, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxCreate(&other, nullptr, 0, 1), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamCreate(&foreign, 0), CUDA_SUCCESS);
  OnWaiting(server_, kCall_cuLaunchKernel, CUDA_ERROR_INVALID_HANDLE);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(launch(foreign), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_EQ(launch(nullptr), CUDA_ERROR_INVALID_HANDLE) << "the default stream of the current context";
    EXPECT_EQ(launch(own), CUDA_SUCCESS) << "not waited for";
  }
  server_->On(kCall_cuLaunchKernel, FakeServer::Answer());
  EXPECT_EQ(launch(foreign), CUDA_SUCCESS) << "the driver's opinion counts";
  EXPECT_EQ(cuCtxDestroy(other), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamDestroy(own), CUDA_SUCCESS);
}

TEST_F(CustomTest, WrongMemoryOperationsAreWaitedFor) {
  CUdeviceptr memory = 0;
  CUstream stream = nullptr;
  ASSERT_EQ(cuMemAlloc(&memory, 64), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamCreate(&stream, 0), CUDA_SUCCESS);
  const auto batch = [&](CUdeviceptr address, unsigned flags, unsigned id) {
    CUstreamBatchMemOpParams operations[2] = {};
    operations[0].operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    operations[0].writeValue.address = memory;
    operations[1].operation = CUstreamBatchMemOpType(id);
    operations[1].waitValue.address = address;
    operations[1].waitValue.flags = flags;
    return cuStreamBatchMemOp(stream, 2, operations, 0);
  };
  using Operation = std::function<CUresult(CUdeviceptr, unsigned)>;
  const struct {
    const char* name;
    uint32_t call;
    unsigned bytes;
    Operation run;
  } all[] = {
      {"wait 32", kCall_cuStreamWaitValue32_v2, 4,
       [&](CUdeviceptr at, unsigned flags) { return cuStreamWaitValue32(stream, at, 1, flags); }},
      {"wait 64", kCall_cuStreamWaitValue64_v2, 8,
       [&](CUdeviceptr at, unsigned flags) { return cuStreamWaitValue64(stream, at, 1, flags); }},
      {"write 32", kCall_cuStreamWriteValue32_v2, 4,
       [&](CUdeviceptr at, unsigned flags) { return cuStreamWriteValue32(stream, at, 1, flags); }},
      {"write 64", kCall_cuStreamWriteValue64_v2, 8,
       [&](CUdeviceptr at, unsigned flags) { return cuStreamWriteValue64(stream, at, 1, flags); }},
      {"batch: wait 32", kCall_cuStreamBatchMemOp_v2, 4,
       [&](CUdeviceptr at, unsigned flags) { return batch(at, flags, CU_STREAM_MEM_OP_WAIT_VALUE_32); }},
      {"batch: write 64", kCall_cuStreamBatchMemOp_v2, 8,
       [&](CUdeviceptr at, unsigned flags) { return batch(at, flags, CU_STREAM_MEM_OP_WRITE_VALUE_64); }},
  };
  for (const auto& one : all) {
    SCOPED_TRACE(one.name);
    OnWaiting(server_, one.call, CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(one.run(memory + 8, 0), CUDA_SUCCESS) << "not waited for";
    EXPECT_EQ(one.run(memory + one.bytes / 2, 0), CUDA_ERROR_INVALID_VALUE) << "not aligned";
    EXPECT_EQ(one.run(0, 0), CUDA_ERROR_INVALID_VALUE) << "no address";
    EXPECT_EQ(one.run(memory + 64, 0), CUDA_ERROR_INVALID_VALUE) << "behind the memory";
    EXPECT_EQ(one.run(memory + 8, 0x100), CUDA_ERROR_INVALID_VALUE) << "unknown flags";
    server_->On(one.call, FakeServer::Answer());
    EXPECT_EQ(one.run(memory + 8, 0x100), CUDA_SUCCESS) << "the driver's opinion counts";
  }
  OnWaiting(server_, kCall_cuStreamBatchMemOp_v2, CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(batch(memory, 0, 99), CUDA_ERROR_INVALID_VALUE) << "no operation";
  EXPECT_EQ(cuStreamBatchMemOp(stream, 1, nullptr, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuStreamBatchMemOp(stream, 0, nullptr, 1), CUDA_ERROR_INVALID_VALUE) << "flags";
  server_->On(kCall_cuStreamBatchMemOp_v2, FakeServer::Answer());
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
}

TEST_F(CustomTest, HandlesThatAreNoKernels) {
  const OneKernel one(server_, sizeof(int));
  Sent();
  CUfunction again = nullptr;
  EXPECT_EQ(cuModuleGetFunction(&again, one.module(), nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuModuleGetFunction(&again, one.module(), "kernel"), CUDA_SUCCESS);
  EXPECT_EQ(again, one.kernel()) << "asked for twice";
  const auto launch = [](CUfunction function) {
    return cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr);
  };
  EXPECT_EQ(launch(nullptr), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(launch(reinterpret_cast<CUfunction>(one.module())), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(launch(reinterpret_cast<CUfunction>(0x7f0000001000)), CUDA_ERROR_INVALID_HANDLE);
  CUmodule other = nullptr;
  ASSERT_EQ(cuModuleLoadData(&other, OneKernel::kImage), CUDA_SUCCESS);
  CUfunction gone = nullptr;
  ASSERT_EQ(cuModuleGetFunction(&gone, other, "kernel"), CUDA_SUCCESS);
  int value = 0;
  EXPECT_EQ(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_NUM_REGS, gone), CUDA_SUCCESS);
  EXPECT_EQ(cuFuncGetAttribute(&value, CUfunction_attribute(CU_FUNC_ATTRIBUTE_MAX), gone), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuFuncGetAttribute(&value, CUfunction_attribute(-1), gone), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(cuModuleUnload(other), CUDA_SUCCESS);
  EXPECT_EQ(launch(gone), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_NUM_REGS, gone), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(cuModuleUnload(other), CUDA_ERROR_INVALID_HANDLE);
}

// GPUs may differ, and so may what was set of a kernel on each.
TEST_F(CustomTest, AKernelHasAttributesOnEachDevice) {
  server_->On(kOpFunctionInfo, [](const FakeServer::Request& request) {
    wire::OpFunctionInfo_Request in;
    EXPECT_TRUE(in.Decode(request.message));
    wire::OpFunctionInfo_Reply info;
    info.attributes.assign(CU_FUNC_ATTRIBUTE_MAX, 100 + in.device);
    return FakeServer::Answer(CUDA_SUCCESS, Encoded(info));
  });
  CUlibrary library = nullptr;
  CUkernel kernel = nullptr;
  ASSERT_EQ(cuLibraryLoadData(&library, OneKernel::kImage, nullptr, nullptr, 0, nullptr, nullptr, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuLibraryGetKernel(&kernel, library, "kernel"), CUDA_SUCCESS);
  Sent();
  const auto registers = [kernel](CUdevice device) {
    int value = 0;
    const CUresult result = cuKernelGetAttribute(&value, CU_FUNC_ATTRIBUTE_NUM_REGS, kernel, device);
    return result == CUDA_SUCCESS ? value : -int(result);
  };
  EXPECT_EQ(registers(1), 101) << "not the current context's";
  EXPECT_EQ(registers(0), 100);
  EXPECT_EQ(registers(1), 101);
  EXPECT_EQ(registers(0), 100);
  EXPECT_EQ(Sent(), (Calls{kOpFunctionInfo, kOpFunctionInfo})) << "each is asked once";
  int value = 0;
  EXPECT_EQ(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_NUM_REGS, reinterpret_cast<CUfunction>(kernel)), CUDA_SUCCESS);
  EXPECT_EQ(value, 100) << "the current context's";
  // Once something is set, what is known may not be true any more, on any device.
  ASSERT_EQ(cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1, kernel, 1), CUDA_SUCCESS);
  Sent();
  EXPECT_EQ(registers(1), 101);
  EXPECT_EQ(registers(0), 100);
  EXPECT_EQ(Sent(), (Calls{kOpFunctionInfo, kOpFunctionInfo}));
  EXPECT_EQ(registers(-1), -int(CUDA_ERROR_INVALID_DEVICE));
  EXPECT_EQ(registers(2), -int(CUDA_ERROR_INVALID_DEVICE));
  EXPECT_EQ(cuLibraryUnload(library), CUDA_SUCCESS);
  EXPECT_EQ(registers(0), -int(CUDA_ERROR_INVALID_HANDLE));
}

// A function of a library's module is the kernel's in that context: one handle. What cuFuncSetAttribute sets of it
// counts before what cuKernelSetAttribute sets, and is not the kernel's.
TEST_F(CustomTest, AKernelAndAFunctionOfItsLibrarysModule) {
  constexpr CUfunction_attribute kShared = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
  int of_kernel = 100, of_function = 100;  // as the server's driver knows them
  server_->On(kOpFunctionInfo, [&](const FakeServer::Request& request) {
    wire::OpFunctionInfo_Request asked;
    EXPECT_TRUE(asked.Decode(request.message));
    wire::OpFunctionInfo_Reply info;
    info.attributes.assign(CU_FUNC_ATTRIBUTE_MAX, KindOf(asked.function) == Kind::kKernel ? of_kernel : of_function);
    return FakeServer::Answer(CUDA_SUCCESS, Encoded(info));
  });
  for (const bool kernel_first : {true, false}) {
    SCOPED_TRACE(kernel_first);
    of_kernel = of_function = 100;
    CUlibrary library = nullptr;
    CUkernel kernel = nullptr;
    CUmodule module = nullptr;
    CUfunction first = nullptr, second = nullptr;
    ASSERT_EQ(cuLibraryLoadData(&library, OneKernel::kImage, nullptr, nullptr, 0, nullptr, nullptr, 0), CUDA_SUCCESS);
    ASSERT_EQ(cuLibraryGetKernel(&kernel, library, "kernel"), CUDA_SUCCESS);
    ASSERT_EQ(cuLibraryGetModule(&module, library), CUDA_SUCCESS);
    const auto get = [&](CUfunction* function, bool by_kernel) {
      return by_kernel ? cuKernelGetFunction(function, kernel) : cuModuleGetFunction(function, module, "kernel");
    };
    ASSERT_EQ(get(&first, kernel_first), CUDA_SUCCESS);
    Sent();
    ASSERT_EQ(get(&second, !kernel_first), CUDA_SUCCESS);
    EXPECT_EQ(first, second);
    EXPECT_EQ(Sent(), Calls());
    const auto expect_current = [&] {
      int value = 0;
      EXPECT_EQ(cuKernelGetAttribute(&value, kShared, kernel, 0), CUDA_SUCCESS);
      EXPECT_EQ(value, of_kernel);
      EXPECT_EQ(cuFuncGetAttribute(&value, kShared, first), CUDA_SUCCESS);
      EXPECT_EQ(value, of_function);
    };
    expect_current();
    ASSERT_EQ(cuKernelSetAttribute(kShared, of_kernel = of_function = 200, kernel, 0), CUDA_SUCCESS);
    expect_current();
    ASSERT_EQ(cuFuncSetAttribute(first, kShared, of_function = 300), CUDA_SUCCESS);
    expect_current();
    ASSERT_EQ(cuKernelSetAttribute(kShared, of_kernel = 400, kernel, 0), CUDA_SUCCESS);
    expect_current();
    ASSERT_EQ(cuFuncSetAttribute(first, kShared, of_function = 500), CUDA_SUCCESS);
    expect_current();
    // Of another context it is another function.
    CUcontext other = nullptr;
    ASSERT_EQ(cuCtxCreate(&other, nullptr, 0, 0), CUDA_SUCCESS);
    ASSERT_EQ(get(&second, true), CUDA_SUCCESS);
    EXPECT_NE(first, second);
    ASSERT_EQ(get(&second, false), CUDA_SUCCESS);
    EXPECT_EQ(first, second) << "the module's context counts";
    EXPECT_EQ(cuCtxDestroy(other), CUDA_SUCCESS);
    EXPECT_EQ(cuLibraryUnload(library), CUDA_SUCCESS);
  }
}

// A replay makes no context current for a kernel, which is of none.
TEST_F(CustomTest, WhatIsSetOfAKernelInAContextCanBeSetAgain) {
  server_->On(kOpFunctionInfo, FakeServer::Answer());
  CUlibrary library = nullptr;
  CUkernel kernel = nullptr;
  CUcontext other = nullptr;
  ASSERT_EQ(cuLibraryLoadData(&library, OneKernel::kImage, nullptr, nullptr, 0, nullptr, nullptr, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuLibraryGetKernel(&kernel, library, "kernel"), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxCreate(&other, nullptr, 0, 1), CUDA_SUCCESS);
  const auto function = reinterpret_cast<CUfunction>(kernel);
  const uint64_t handle = HandleOf(kernel);
  ASSERT_EQ(cuFuncSetCacheConfig(function, CU_FUNC_CACHE_PREFER_L1), CUDA_SUCCESS);
  const auto cache = SettingOf(Kind::kKernel, handle, kCall_cuFuncSetCacheConfig, HandleOf(other));
  ASSERT_TRUE(cache);
  EXPECT_EQ(cache->header.context_or_result, SlotOf(HandleOf(other)));
  constexpr auto kBytes = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
  const uint64_t of_device = uint64_t(1) << 32 | uint64_t(kBytes);
  ASSERT_EQ(cuKernelSetAttribute(kBytes, 1000, kernel, 1), CUDA_SUCCESS);
  ASSERT_EQ(cuFuncSetAttribute(function, kBytes, 2000), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxDestroy(other), CUDA_SUCCESS);
  EXPECT_FALSE(SettingOf(Kind::kKernel, handle, kCall_cuFuncSetCacheConfig, HandleOf(other))) << "of that context";
  EXPECT_FALSE(SettingOf(Kind::kKernel, handle, kCall_cuFuncSetAttribute, of_device));
  const auto shared = SettingOf(Kind::kKernel, handle, kCall_cuKernelSetAttribute, of_device);
  ASSERT_TRUE(shared) << "of the device";
  wire::cuKernelSetAttribute_Request request;
  ASSERT_TRUE(request.Decode(shared->message));
  EXPECT_EQ(request.val, 2000);
  EXPECT_EQ(request.dev, 1);
  EXPECT_EQ(request.kernel, handle);
  EXPECT_EQ(shared->header.context_or_result, 0u);
  // The same once more is known; another value is not.
  ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
  Sent();
  ASSERT_EQ(cuKernelSetAttribute(kBytes, 2000, kernel, 1), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls());
  ASSERT_EQ(cuKernelSetAttribute(kBytes, 1000, kernel, 1), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls{kCall_cuKernelSetAttribute});
  EXPECT_EQ(cuLibraryUnload(library), CUDA_SUCCESS);
}

// A device has one current pool. When that is destroyed, it is the default one, and not one of before.
TEST_F(CustomTest, OnePoolIsADevicesCurrentOne) {
  CUmemPoolProps properties{};
  properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  CUmemoryPool first = nullptr, second = nullptr;
  ASSERT_EQ(cuMemPoolCreate(&first, &properties), CUDA_SUCCESS);
  ASSERT_EQ(cuMemPoolCreate(&second, &properties), CUDA_SUCCESS);
  const auto set = [](CUmemoryPool pool, int device) {
    return (SettingOf(Kind::kMemoryPool, HandleOf(pool), kCall_cuDeviceSetMemPool, uint64_t(device)) ? 1 : 0) +
           (SettingOf(Kind::kMemoryPool, HandleOf(pool), kCall_cuMemSetMemPool, uint64_t(device)) ? 1 : 0);
  };
  ASSERT_EQ(cuDeviceSetMemPool(1, first), CUDA_SUCCESS);
  ASSERT_EQ(cuDeviceSetMemPool(0, first), CUDA_SUCCESS);
  ASSERT_EQ(cuMemSetMemPool(&properties.location, CU_MEM_ALLOCATION_TYPE_PINNED, second), CUDA_SUCCESS);
  EXPECT_EQ(set(first, 0), 0);
  EXPECT_EQ(set(first, 1), 1) << "of another device";
  EXPECT_EQ(set(second, 0), 1);
  ASSERT_EQ(cuDeviceSetMemPool(0, second), CUDA_SUCCESS);
  EXPECT_EQ(set(second, 0), 1);
  EXPECT_EQ(cuMemPoolDestroy(second), CUDA_SUCCESS);
  EXPECT_EQ(set(first, 0), 0);
  EXPECT_EQ(cuMemPoolDestroy(first), CUDA_SUCCESS);
}

TEST_F(CustomTest, ArgumentsThatAreTooLongLoseNoSession) {
  const OneKernel one(server_, sizeof(int));
  Sent();
  int value = 7;
  void* parameters[] = {&value};
  std::vector<CUlaunchAttribute> attributes(size_t(40000));
  for (CUlaunchAttribute& one : attributes) one.id = CU_LAUNCH_ATTRIBUTE_IGNORE;
  CUlaunchConfig config{};
  config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimX = config.blockDimY = config.blockDimZ = 1;
  config.attrs = attributes.data();
  config.numAttrs = unsigned(attributes.size());
  EXPECT_EQ(cuLaunchKernelEx(&config, one.kernel(), parameters, nullptr), CUDA_ERROR_NOT_SUPPORTED);
  config.attrs = nullptr;
  EXPECT_EQ(cuLaunchKernelEx(&config, one.kernel(), parameters, nullptr), CUDA_ERROR_INVALID_VALUE);
  config.numAttrs = 0;
  EXPECT_EQ(cuLaunchKernelEx(&config, one.kernel(), parameters, nullptr), CUDA_SUCCESS);
  const std::string name(size_t(2) << 20, 'x');
  CUfunction function = nullptr;
  EXPECT_EQ(cuModuleGetFunction(&function, one.module(), name.c_str()), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(Session::Get()->lost(), CUDA_SUCCESS);
}

TEST_F(CustomTest, ArgumentsThatAreWrong) {
  CUdeviceptr memory = 0;
  size_t bytes = 0;
  int value = 0;
  void* host = nullptr;
  EXPECT_EQ(cuMemAlloc(nullptr, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemAlloc(&memory, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemAllocPitch(&memory, &bytes, 0, 1, 4), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemAllocPitch(&memory, &bytes, 1, 0, 4), CUDA_ERROR_INVALID_VALUE);
  for (const unsigned element : {0u, 1u, 3u, 32u})
    EXPECT_EQ(cuMemAllocPitch(&memory, &bytes, 1, 1, element), CUDA_ERROR_INVALID_VALUE) << element;
  EXPECT_EQ(cuMemHostAlloc(nullptr, 1, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemHostAlloc(&host, 1, 0x80), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemFreeHost(&value), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemFreeHost(nullptr), CUDA_SUCCESS);
  EXPECT_EQ(cuDeviceGetAttribute(nullptr, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 0), CUDA_ERROR_INVALID_VALUE);
  for (const int attribute : {-1, 0, 200, 1 << 30})
    EXPECT_EQ(cuDeviceGetAttribute(&value, CUdevice_attribute(attribute), 0), CUDA_ERROR_INVALID_VALUE) << attribute;
  for (const int device : {-1, 2})
    EXPECT_EQ(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_WARP_SIZE, device), CUDA_ERROR_INVALID_DEVICE);
  // Copies of nothing, and of nothing that is there.
  ASSERT_EQ(cuMemAlloc(&memory, 100), CUDA_SUCCESS);
  Sent();
  EXPECT_EQ(cuMemcpyHtoD(memory, nullptr, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuMemcpyDtoH(nullptr, memory, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuMemcpy(memory, memory, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuMemcpyHtoD(memory, nullptr, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemcpyDtoH(nullptr, memory, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemcpy(0, memory, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemcpyDtoH(&value, memory, SIZE_MAX), CUDA_ERROR_INVALID_VALUE) << "more than there is";
  EXPECT_EQ(cuMemcpyHtoD(memory, &value, SIZE_MAX), CUDA_ERROR_INVALID_VALUE);
  CUDA_MEMCPY2D rows{};
  rows.srcMemoryType = CU_MEMORYTYPE_HOST;
  rows.srcHost = &value;
  rows.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  rows.dstDevice = memory;
  rows.WidthInBytes = 2;
  rows.Height = 2;
  rows.srcPitch = 1;
  EXPECT_EQ(cuMemcpy2D(&rows), CUDA_ERROR_INVALID_VALUE) << "rows that overlap";
  rows.dstDevice = 0;
  rows.dstMemoryType = CU_MEMORYTYPE_ARRAY;
  rows.srcPitch = 2;
  EXPECT_EQ(cuMemcpy2D(&rows), CUDA_ERROR_INVALID_VALUE) << "no array";
  EXPECT_EQ(cuMemcpy2D(nullptr), CUDA_ERROR_INVALID_VALUE);
  // Boxes that reach out of their rows or slices, of either side.
  char bytes_there[64] = {};
  CUDA_MEMCPY3D good{};
  good.srcMemoryType = CU_MEMORYTYPE_HOST;
  good.srcHost = bytes_there;
  good.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  good.dstDevice = memory;
  good.WidthInBytes = good.Height = good.Depth = 2;
  good.srcXInBytes = good.srcY = good.dstXInBytes = good.dstY = 1;
  good.srcPitch = good.srcHeight = good.dstPitch = good.dstHeight = 3;
  size_t CUDA_MEMCPY3D::*const limits[] = {&CUDA_MEMCPY3D::srcPitch, &CUDA_MEMCPY3D::srcHeight,
                                           &CUDA_MEMCPY3D::dstPitch, &CUDA_MEMCPY3D::dstHeight};
  for (const auto limit : limits) {
    for (const size_t number : {size_t{2}, SIZE_MAX}) {
      CUDA_MEMCPY3D box = good;
      box.*limit = number;
      EXPECT_EQ(cuMemcpy3D(&box), CUDA_ERROR_INVALID_VALUE);
      EXPECT_EQ(cuMemcpy3DAsync(&box, nullptr), CUDA_ERROR_INVALID_VALUE);
      CUDA_MEMCPY3D_PEER peer;  // the same, but for its contexts
      static_assert(sizeof peer == sizeof box, "");
      memcpy(&peer, &box, sizeof peer);
      peer.srcContext = peer.dstContext = context_;
      EXPECT_EQ(cuMemcpy3DPeer(&peer), CUDA_ERROR_INVALID_VALUE);
    }
  }
  // What is asked about pointers.
  uint64_t answers[2] = {1, 1};
  void* data[] = {&answers[0], &answers[1]};
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_BUFFER_ID};
  EXPECT_EQ(cuPointerGetAttribute(&answers[0], CUpointer_attribute(0), memory), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuPointerGetAttribute(&answers[0], CUpointer_attribute(1000), memory), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuPointerGetAttribute(nullptr, attributes[0], memory), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuPointerGetAttributes(0, attributes, data, memory), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuPointerGetAttributes(2, attributes, data, memory), CUDA_SUCCESS);
  EXPECT_EQ(answers[0], 100u);
  EXPECT_NE(answers[1], 1u);
  EXPECT_EQ(cuPointerGetAttributes(2, attributes, data, reinterpret_cast<CUdeviceptr>(&value)), CUDA_SUCCESS);
  EXPECT_EQ(answers[0], 100u) << "ordinary memory is in no range: the driver leaves it alone";
  EXPECT_EQ(answers[1], 0u) << "ordinary memory";
  data[1] = nullptr;
  EXPECT_EQ(cuPointerGetAttributes(2, attributes, data, memory), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Sent(), Calls()) << "all of this is known here";
  EXPECT_EQ(cuMemFree(memory + 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemFree(0), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
}

TEST_F(CustomTest, UnsupportedCallsSaySo) {
  EXPECT_EQ(Call::Unsupported("cuNoSuchThing", "this is a test"), CUDA_ERROR_NOT_SUPPORTED);
}

// The last one: nothing works after it.
TEST_F(CustomTest, WithoutItsServerEveryCallFails) {
  server_->End("the test is over");
  EXPECT_EQ(cuCtxSynchronize(), CUDA_ERROR_DEVICE_UNAVAILABLE);
  CUdeviceptr memory = 0;
  EXPECT_EQ(cuMemAlloc(&memory, 100), CUDA_ERROR_DEVICE_UNAVAILABLE);
  EXPECT_EQ(Session::Get()->lost(), CUDA_ERROR_DEVICE_UNAVAILABLE);
}

}  // namespace
}  // namespace cuda_remote::client
