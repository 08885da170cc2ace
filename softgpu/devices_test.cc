// SPDX-License-Identifier: Apache-2.0
// Two devices with settings of their own (SOFTGPU_DEVICES=2 SOFTGPU_MEMORY=64M SOFTGPU_UUID=...).
#include <cstring>

#include "softgpu/testing/fixture.h"

namespace cuda_remote::softgpu {
namespace {

TEST(Devices, AreApart) {
  CU_OK(cuInit(0));
  int count;
  CU_OK(cuDeviceGetCount(&count));
  ASSERT_EQ(2, count);
  CUuuid first, second;
  CU_OK(cuDeviceGetUuid_v2(&first, 0));
  CU_OK(cuDeviceGetUuid_v2(&second, 1));
  const unsigned char wanted[16] = {0,    0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77,
                                    0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0};
  EXPECT_EQ(0, std::memcmp(&first, wanted, 16));
  EXPECT_EQ(1, second.bytes[15]);
  size_t total;
  CU_OK(cuDeviceTotalMem_v2(&total, 1));
  EXPECT_EQ(size_t{64} << 20, total);

  // Each has its own budget, its own primary context, its own variables of a library.
  CUcontext contexts[2];
  CUdeviceptr memory[2], counters[2], rest;
  CUlibrary library;
  CU_OK(cuLibraryLoadData(&library, kPtx, nullptr, nullptr, 0, nullptr, nullptr, 0));
  CUkernel kernel;
  CU_OK(cuLibraryGetKernel(&kernel, library, "count_up"));
  for (int i = 0; i < 2; ++i) {
    CU_OK(cuDevicePrimaryCtxRetain(&contexts[i], i));
    CU_OK(cuCtxSetCurrent(contexts[i]));
    CUdevice device;
    CU_OK(cuCtxGetDevice(&device));
    EXPECT_EQ(i, device);
    CU_OK(cuMemAlloc_v2(&memory[i], 40 << 20));
    CU_IS(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&rest, 40 << 20));
    for (int k = 0; k <= i; ++k) {
      CU_OK(cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr));
    }
    size_t bytes;
    CU_OK(cuLibraryGetGlobal(&counters[i], &bytes, library, "counter"));
    int ordinal;
    CU_OK(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, memory[i]));
    EXPECT_EQ(i, ordinal);
    CU_OK(cuCtxSynchronize());
  }
  uint32_t values[2];
  for (int i = 0; i < 2; ++i) CU_OK(cuMemcpyDtoH_v2(&values[i], counters[i], 4));
  EXPECT_EQ(8u, values[0]);
  EXPECT_EQ(9u, values[1]);
  int can;
  CU_OK(cuDeviceCanAccessPeer(&can, 0, 1));
  EXPECT_EQ(1, can);
  CU_OK(cuCtxEnablePeerAccess(contexts[0], 0));
  CU_IS(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, cuCtxEnablePeerAccess(contexts[0], 0));
  CU_OK(cuCtxDisablePeerAccess(contexts[0]));
  CU_IS(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, cuCtxDisablePeerAccess(contexts[0]));
  CU_OK(cuCtxEnablePeerAccess(contexts[0], 0));
  CU_OK(cuMemsetD32_v2(memory[1], 77, 4));
  CU_OK(cuMemcpyPeer(memory[0], contexts[0], memory[1], contexts[1], 16));
  CU_OK(cuCtxSynchronize());
  CU_OK(cuMemcpyDtoH_v2(values, memory[0], 4));
  EXPECT_EQ(77u, values[0]);
  for (int i = 0; i < 2; ++i) CU_OK(cuDevicePrimaryCtxRelease_v2(i));
  // Their memory went with the contexts.
  CUcontext fresh;
  CU_OK(cuCtxCreate_v2(&fresh, 0, 0));
  CU_OK(cuMemAlloc_v2(&rest, 40 << 20));
  CU_OK(cuCtxDestroy_v2(fresh));
}

}  // namespace
}  // namespace cuda_remote::softgpu
