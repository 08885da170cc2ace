// SPDX-License-Identifier: Apache-2.0
// Streams, events, host functions, default streams, errors that stick.
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "softgpu/testing/fixture.h"

namespace cuda_remote::softgpu {
namespace {

class StreamTest : public SoftGpuTest {
 protected:
  void SetUp() override {
    SoftGpuTest::SetUp();
    CU_OK(cuMemAlloc_v2(&word_, 64));
    CU_OK(cuMemsetD32_v2(word_, 0, 16));
    CU_OK(cuCtxSynchronize());
  }
  uint32_t Word(int i = 0) {
    uint32_t value = 0;
    EXPECT_EQ(CUDA_SUCCESS, Cu().cuMemcpyDtoHAsync_v2(&value, word_ + 4 * i, 4, Fresh()));
    return value;
  }
  // A stream that waits for nobody.
  CUstream Fresh() {
    if (fresh_ == nullptr) Cu().cuStreamCreate(&fresh_, CU_STREAM_NON_BLOCKING);
    return fresh_;
  }
  void Open(int i) { __atomic_store_n(reinterpret_cast<uint32_t*>(word_ + 4 * i), 1, __ATOMIC_RELEASE); }

  CUdeviceptr word_ = 0;
  CUstream fresh_ = nullptr;
};

TEST_F(StreamTest, WorkIsAsynchronousAndInOrder) {
  CUstream stream;
  CU_OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CU_OK(cuStreamWaitValue32_v2(stream, word_ + 4, 1, CU_STREAM_WAIT_VALUE_GEQ));
  for (int i = 0; i < 100; ++i) ASSERT_EQ(CUDA_SUCCESS, Bump(word_, 1, stream));
  CU_IS(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
  EXPECT_EQ(0u, Word());
  Open(1);
  CU_OK(cuStreamSynchronize(stream));
  CU_IS(CUDA_SUCCESS, cuStreamQuery(stream));
  EXPECT_EQ(100u, Word());
  CU_OK(cuStreamDestroy_v2(stream));
  CU_IS(CUDA_ERROR_INVALID_HANDLE, cuStreamQuery(stream));
}

TEST_F(StreamTest, LegacyStreamWaitsForBlockingOnesAndTheyForIt) {
  CUstream blocking, free_stream;
  CU_OK(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
  CU_OK(cuStreamCreate(&free_stream, CU_STREAM_NON_BLOCKING));
  CU_OK(cuStreamWaitValue32_v2(blocking, word_ + 4, 1, CU_STREAM_WAIT_VALUE_EQ));
  ASSERT_EQ(CUDA_SUCCESS, Bump(word_, 1, nullptr));           // after the wait
  ASSERT_EQ(CUDA_SUCCESS, Bump(word_ + 8, 1, blocking));      // after the legacy stream's kernel
  ASSERT_EQ(CUDA_SUCCESS, Bump(word_ + 12, 1, free_stream));  // at once
  CU_OK(cuStreamSynchronize(free_stream));
  EXPECT_EQ(1u, Word(3));
  EXPECT_EQ(0u, Word(0));
  CU_IS(CUDA_ERROR_NOT_READY, cuStreamQuery(nullptr));
  Open(1);
  CU_OK(cuStreamSynchronize(nullptr));
  EXPECT_EQ(1u, Word(0));
  CU_OK(cuStreamSynchronize(blocking));
  EXPECT_EQ(1u, Word(2));
}

TEST_F(StreamTest, EventsOrderStreamsAndMeasure) {
  CUstream a, b;
  CU_OK(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
  CU_OK(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
  CUevent begin, end, untimed;
  CU_OK(cuEventCreate(&begin, CU_EVENT_DEFAULT));
  CU_OK(cuEventCreate(&end, CU_EVENT_DEFAULT));
  CU_OK(cuEventCreate(&untimed, CU_EVENT_DISABLE_TIMING));
  CU_IS(CUDA_SUCCESS, cuEventQuery(begin));  // never recorded
  float ms;
  CU_IS(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&ms, begin, end));
  CU_OK(cuEventRecord(begin, a));
  CU_OK(cuStreamWaitValue32_v2(a, word_ + 4, 1, CU_STREAM_WAIT_VALUE_EQ));
  ASSERT_EQ(CUDA_SUCCESS, Bump(word_, 1, a));
  CU_OK(cuEventRecord(end, a));
  CU_OK(cuStreamWaitEvent(b, end, 0));
  ASSERT_EQ(CUDA_SUCCESS, Bump(word_, 1, b));
  CU_IS(CUDA_ERROR_NOT_READY, cuEventQuery(end));
  CU_IS(CUDA_ERROR_NOT_READY, cuEventElapsedTime(&ms, begin, end));
  CU_IS(CUDA_ERROR_NOT_READY, cuStreamQuery(b));
  CU_OK(cuEventSynchronize(begin));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  Open(1);
  CU_OK(cuStreamSynchronize(b));
  CU_OK(cuEventSynchronize(end));
  EXPECT_EQ(2u, Word());
  CU_OK(cuEventElapsedTime(&ms, begin, end));
  EXPECT_GE(ms, 19);
  CU_OK(cuEventRecord(untimed, a));
  CU_IS(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&ms, begin, untimed));
  // The event may go while a stream waits for it.
  CU_OK(cuEventDestroy_v2(end));
  CU_IS(CUDA_ERROR_INVALID_HANDLE, cuEventQuery(end));
}

TEST_F(StreamTest, HostFunctionsRunInOrder) {
  struct Seen {
    std::atomic<int> functions{0};
    std::atomic<CUresult> status{CUDA_ERROR_UNKNOWN};
  } seen;
  CUstream stream;
  CU_OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  for (int i = 0; i < 10; ++i) {
    CU_OK(cuLaunchHostFunc(
        stream, [](void* p) { ++static_cast<Seen*>(p)->functions; }, &seen));
  }
  CU_OK(cuStreamAddCallback(
      stream, [](CUstream, CUresult status, void* p) { static_cast<Seen*>(p)->status = status; }, &seen, 0));
  CU_OK(cuStreamSynchronize(stream));
  EXPECT_EQ(10, seen.functions);
  EXPECT_EQ(CUDA_SUCCESS, seen.status);
}

TEST_F(StreamTest, PerThreadDefaultStreams) {
  CUstream per_thread = CU_STREAM_PER_THREAD;
  unsigned long long mine, other = 0;
  CU_OK(cuStreamGetId(per_thread, &mine));
  std::thread([&] {
    CU_OK(cuCtxSetCurrent(context_));
    CU_OK(cuStreamGetId(per_thread, &other));
    unsigned long long again;
    auto get_id =
        reinterpret_cast<CUresult (*)(CUstream, unsigned long long*)>(server::DriverSymbol("cuStreamGetId_ptsz"));
    ASSERT_EQ(CUDA_SUCCESS, get_id(nullptr, &again));
    EXPECT_EQ(other, again);
    ASSERT_EQ(CUDA_SUCCESS, Bump(word_, 5, per_thread));
  }).join();
  EXPECT_NE(0u, other);
  EXPECT_NE(mine, other);
  // The other thread's stream is gone; its work is done all the same.
  CU_OK(cuCtxSynchronize());
  EXPECT_EQ(5u, Word());
}

TEST_F(StreamTest, StreamProperties) {
  int least, greatest, priority;
  CU_OK(cuCtxGetStreamPriorityRange(&least, &greatest));
  EXPECT_LT(greatest, least);
  CUstream stream;
  CU_OK(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, greatest - 10));
  CU_OK(cuStreamGetPriority(stream, &priority));
  EXPECT_EQ(greatest, priority);
  unsigned flags;
  CU_OK(cuStreamGetFlags(stream, &flags));
  EXPECT_EQ(unsigned{CU_STREAM_NON_BLOCKING}, flags);
  CUcontext context;
  CU_OK(cuStreamGetCtx(stream, &context));
  EXPECT_EQ(context_, context);
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuStreamCreate(&stream, 2));
}

TEST_F(StreamTest, ManyThreadsOneContext) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      CU_OK(cuCtxSetCurrent(context_));
      CUstream stream;
      CU_OK(cuStreamCreate(&stream, t % 2));
      for (int i = 0; i < 50; ++i) {
        ASSERT_EQ(CUDA_SUCCESS, Bump(word_ + 4 * t, 1, stream));
        CUdeviceptr p;
        CU_OK(cuMemAllocAsync(&p, 1024, stream));
        CU_OK(cuMemsetD8Async(p, 1, 1024, stream));
        CU_OK(cuMemFreeAsync(p, stream));
      }
      CU_OK(cuStreamSynchronize(stream));
      CU_OK(cuStreamDestroy_v2(stream));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int t = 0; t < 4; ++t) EXPECT_EQ(50u, Word(t));
}

TEST_F(StreamTest, FaultsStickToTheirContextAlone) {
  CUcontext other;
  CU_OK(cuCtxCreate_v2(&other, 0, 0));
  CU_OK(cuCtxSetCurrent(context_));
  CU_OK(cuLaunchKernel(wild_, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr));
  CU_IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
  CUdeviceptr p;
  CU_IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemAlloc_v2(&p, 16));
  CU_IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamQuery(nullptr));
  EXPECT_EQ(CUDA_ERROR_ILLEGAL_ADDRESS, Bump(word_, 1, nullptr));
  CUcontext current;
  CU_IS(CUDA_SUCCESS, cuCtxGetCurrent(&current));
  CU_OK(cuCtxSetCurrent(other));
  CU_OK(cuMemAlloc_v2(&p, 16));
  CU_OK(cuMemsetD8_v2(p, 1, 16));
  CU_OK(cuCtxSynchronize());
  CU_OK(cuCtxDestroy_v2(other));
}

TEST_F(StreamTest, AnEventAndTheStreamThatRecordsItAreOfOneContext) {
  CUcontext other;
  CU_OK(cuCtxCreate_v2(&other, 0, 0));
  CUevent far, recorded;
  CUstream there;
  CU_OK(cuEventCreate(&far, 0));
  CU_OK(cuEventCreate(&recorded, 0));
  CU_OK(cuStreamCreate(&there, 0));
  CU_OK(cuEventRecord(recorded, there));
  CU_OK(cuStreamSynchronize(there));
  CU_OK(cuCtxSetCurrent(context_));
  CUstream stream;
  CUevent own;
  CU_OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CU_OK(cuEventCreate(&own, 0));
  CU_OK(cuEventRecord(own, stream));
  CU_OK(cuStreamSynchronize(stream));
  const auto refused = [&](CUstream one, const std::vector<unsigned>& all_flags) {
    CU_IS(CUDA_ERROR_INVALID_HANDLE, cuEventRecord(far, one));
    for (const unsigned flags : all_flags) {
      CU_IS(CUDA_ERROR_INVALID_HANDLE, cuEventRecordWithFlags(far, one, flags));
    }
  };
  refused(stream, {0, CU_EVENT_RECORD_EXTERNAL});
  refused(nullptr, {0, CU_EVENT_RECORD_EXTERNAL});
  float milliseconds;
  CU_IS(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&milliseconds, own, recorded));
  CU_OK(cuStreamWaitEvent(stream, recorded, 0));
  CU_OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  // The node that an external event becomes may record one of another context.
  refused(stream, {0});
  refused(nullptr, {0, CU_EVENT_RECORD_EXTERNAL});
  CUgraph graph;
  CU_OK(cuStreamEndCapture(stream, &graph));
  CU_OK(cuGraphDestroy(graph));
  CU_OK(cuStreamSynchronize(stream));
  CU_OK(cuStreamDestroy_v2(stream));
  CU_OK(cuCtxDestroy_v2(other));
}

TEST_F(StreamTest, PrimaryContextComesBackAfterAReset) {
  CUcontext primary, again;
  CU_OK(cuDevicePrimaryCtxRetain(&primary, 0));
  CU_OK(cuCtxSetCurrent(primary));
  CUmodule module;
  CUfunction wild;
  CU_OK(cuModuleLoadData(&module, kPtx));
  CU_OK(cuModuleGetFunction(&wild, module, "wild"));
  CU_OK(cuLaunchKernel(wild, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr));
  CU_IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
  CU_OK(cuDevicePrimaryCtxReset_v2(0));
  unsigned flags;
  int active;
  CU_OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
  EXPECT_EQ(0, active);
  CU_IS(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuCtxSynchronize());
  CU_OK(cuDevicePrimaryCtxRetain(&again, 0));
  EXPECT_EQ(primary, again);
  CU_IS(CUDA_SUCCESS, cuCtxSynchronize());
  CU_IS(CUDA_ERROR_INVALID_HANDLE, cuModuleUnload(module));
  // Retained twice.
  CU_OK(cuDevicePrimaryCtxRelease_v2(0));
  CU_IS(CUDA_SUCCESS, cuCtxSynchronize());
  CU_OK(cuDevicePrimaryCtxRelease_v2(0));
  CU_OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
  EXPECT_EQ(0, active);
  CU_IS(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuCtxSynchronize());
  CU_OK(cuDevicePrimaryCtxRetain(&again, 0));
  EXPECT_EQ(primary, again);
  CU_OK(cuDevicePrimaryCtxRelease_v2(0));
  CU_IS(CUDA_ERROR_INVALID_CONTEXT, cuDevicePrimaryCtxRelease_v2(0));
  CU_OK(cuCtxSetCurrent(context_));
}

TEST_F(StreamTest, ContextStack) {
  CUcontext second, popped, current;
  CU_OK(cuCtxCreate_v2(&second, CU_CTX_SCHED_BLOCKING_SYNC, 0));
  unsigned flags;
  CU_OK(cuCtxGetFlags(&flags));
  EXPECT_EQ(unsigned{CU_CTX_SCHED_BLOCKING_SYNC}, flags);
  CU_OK(cuCtxPushCurrent_v2(context_));
  CU_OK(cuCtxPopCurrent_v2(&popped));
  EXPECT_EQ(context_, popped);
  CU_OK(cuCtxGetCurrent(&current));
  EXPECT_EQ(second, current);
  CU_OK(cuCtxDestroy_v2(second));
  CU_OK(cuCtxGetCurrent(&current));
  EXPECT_EQ(context_, current);
  CU_IS(CUDA_ERROR_INVALID_CONTEXT, cuCtxSetCurrent(second));
  size_t limit;
  CU_OK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 4096));
  CU_OK(cuCtxGetLimit(&limit, CU_LIMIT_STACK_SIZE));
  EXPECT_EQ(4096u, limit);
}

}  // namespace
}  // namespace cuda_remote::softgpu
