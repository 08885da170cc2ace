// SPDX-License-Identifier: Apache-2.0
// SOFTGPU_LATE_MS: work begins only when somebody waits for it, and copies wait only where CUDA's documentation
// promises it. The time is set so long that nothing begins by itself.
#include <cstring>
#include <vector>

#include "softgpu/testing/fixture.h"

namespace cuda_remote::softgpu {
namespace {

class LateTest : public SoftGpuTest {
 protected:
  static constexpr size_t kBytes = 256;
  void SetUp() override {
    SoftGpuTest::SetUp();
    CU_OK(cuMemAlloc_v2(&device_, kBytes));
    CU_OK(cuMemsetD8_v2(device_, 'd', kBytes));
    CU_OK(cuCtxSynchronize());
    CU_OK(cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING));
    CU_OK(cuMemHostAlloc(&pinned_, kBytes, 0));
  }
  char* pinned() { return static_cast<char*>(pinned_); }
  // What is in device memory, without waiting: a device address is a host address here.
  char Device(size_t i = 0) { return reinterpret_cast<volatile char*>(device_)[i]; }

  CUdeviceptr device_ = 0;
  CUstream stream_ = nullptr;
  void* pinned_ = nullptr;
};

TEST_F(LateTest, SourcesAreReadInTheirTurn) {
  std::vector<char> pageable(kBytes, 'a'), registered(8192, 'a');
  memset(pinned(), 'a', kBytes);
  CU_OK(cuMemHostRegister_v2(registered.data(), registered.size(), 0));
  for (char* const source : {pageable.data(), registered.data(), pinned()}) {
    CU_OK(cuMemcpyHtoDAsync_v2(device_, source, kBytes, stream_));
    CU_IS(CUDA_ERROR_NOT_READY, cuStreamQuery(stream_));
    memset(source, 'b', kBytes);
    EXPECT_NE('b', Device());
    CU_OK(cuStreamSynchronize(stream_));
    EXPECT_EQ('b', Device());
    CU_OK(cuMemsetD8Async(device_, 'd', kBytes, stream_));
    CU_OK(cuStreamSynchronize(stream_));
  }
  CU_OK(cuMemHostUnregister(registered.data()));
}

TEST_F(LateTest, DestinationsAreWrittenInTheirTurn) {
  std::vector<char> pageable(kBytes, 'h');
  memset(pinned(), 'h', kBytes);
  for (char* const target : {pageable.data(), pinned()}) {
    CU_OK(cuMemcpyDtoHAsync_v2(target, device_, kBytes, stream_));
    EXPECT_EQ('h', *static_cast<volatile char*>(target));
    CU_OK(cuStreamSynchronize(stream_));
    EXPECT_EQ('d', *static_cast<volatile char*>(target));
  }
}

TEST_F(LateTest, ASynchronousCopyHasTakenPageableBytesAndNotMore) {
  std::vector<char> pageable(kBytes, 'a');
  CU_OK(cuMemcpyHtoD_v2(device_, pageable.data(), kBytes));
  memset(pageable.data(), 'b', kBytes);
  EXPECT_EQ('d', Device());
  CU_OK(cuStreamSynchronize(nullptr));
  EXPECT_EQ('a', Device());
}

TEST_F(LateTest, SynchronousCopiesOtherwiseWait) {
  memset(pinned(), 'p', kBytes);
  CU_OK(cuMemcpyHtoD_v2(device_, pinned(), kBytes));
  EXPECT_EQ('p', Device());
  std::vector<char> pageable(kBytes, 'a');
  CU_OK(cuMemcpyDtoH_v2(pageable.data(), device_, kBytes));
  EXPECT_EQ('p', pageable[0]);
  // Between host memory also the asynchronous form waits.
  memset(pinned(), 'q', kBytes);
  CU_OK(cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(pageable.data()), reinterpret_cast<CUdeviceptr>(pinned()), kBytes,
                      stream_));
  EXPECT_EQ('q', pageable[0]);
}

TEST_F(LateTest, BatchesReadAtOnceWhatIsAskedFor) {
  memset(pinned(), 'a', kBytes);
  CUmemcpyAttributes attributes = {};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
  CUdeviceptr to = device_, from = reinterpret_cast<CUdeviceptr>(pinned());
  size_t bytes = kBytes, first = 0;
  CU_OK(cuMemcpyBatchAsync(&to, &from, &bytes, 1, &attributes, &first, 1, stream_));
  memset(pinned(), 'b', kBytes);
  CU_OK(cuStreamSynchronize(stream_));
  EXPECT_EQ('a', Device());
  CUDA_MEMCPY3D_BATCH_OP box = {};
  box.src.type = box.dst.type = CU_MEMCPY_OPERAND_TYPE_POINTER;
  box.src.op.ptr.ptr = from;
  box.dst.op.ptr.ptr = to;
  box.extent = {kBytes, 1, 1};
  box.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
  CU_OK(cuMemcpy3DBatchAsync(1, &box, 0, stream_));
  memset(pinned(), 'c', kBytes);
  CU_OK(cuStreamSynchronize(stream_));
  EXPECT_EQ('b', Device());
}

TEST_F(LateTest, ParametersAreTakenAtTheLaunch) {
  CUdeviceptr words = 0;
  CU_OK(cuMemAlloc_v2(&words, 8));
  CU_OK(cuMemsetD32_v2(words, 0, 2));
  CUdeviceptr address = words;
  unsigned times = 3;
  void* params[] = {&address, &times};
  CU_OK(cuLaunchKernel(bump_, 1, 1, 1, 1, 1, 1, 0, stream_, params, nullptr));
  address += 4;
  times = 9;
  uint32_t now[2] = {};
  CU_OK(cuCtxSynchronize());
  CU_OK(cuMemcpyDtoH_v2(now, words, 8));
  EXPECT_EQ(3u, now[0]);
  EXPECT_EQ(0u, now[1]);
}

TEST_F(LateTest, WaitingReachesAllThatComesBefore) {
  CUstream other;
  CUevent event;
  CU_OK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  CU_OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  memset(pinned(), 'w', kBytes);
  CU_OK(cuMemcpyHtoDAsync_v2(device_, pinned(), kBytes, other));
  CU_OK(cuEventRecord(event, other));
  CU_OK(cuStreamWaitEvent(stream_, event, 0));
  CU_OK(cuStreamSynchronize(stream_));
  EXPECT_EQ('w', Device());
  CU_OK(cuEventQuery(event));
}

TEST_F(LateTest, UnregisteringWaitsForNothing) {
  std::vector<char> memory(8192, 'a');
  CU_OK(cuMemHostRegister_v2(memory.data(), memory.size(), 0));
  CU_OK(cuMemcpyHtoDAsync_v2(device_, memory.data(), kBytes, stream_));
  CU_OK(cuMemHostUnregister(memory.data()));
  CU_IS(CUDA_ERROR_NOT_READY, cuStreamQuery(stream_));
  CU_OK(cuStreamSynchronize(stream_));
}

}  // namespace
}  // namespace cuda_remote::softgpu
