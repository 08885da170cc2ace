// SPDX-License-Identifier: Apache-2.0
// Answers that programs and libraries work with: none is a zero that they would divide by, or take for a failure.
#include <cstring>
#include <vector>

#include "softgpu/testing/fixture.h"

namespace cuda_remote::softgpu {
namespace {

class Answers : public SoftGpuTest {};

TEST_F(Answers, AttributesThatNoGpuHasAsZero) {
  std::vector<int> wanted;
  for (int i = CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK; i <= CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT; ++i) {
    wanted.push_back(i);
  }
  for (int i = CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH; i <= CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT; ++i) {
    wanted.push_back(i);
  }
  for (int i = CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE; i <= CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_LAYERS; ++i) {
    wanted.push_back(i);
  }
  for (int i = CU_DEVICE_ATTRIBUTE_CAN_TEX2D_GATHER; i <= CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT; ++i) {
    if (i != CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID) wanted.push_back(i);
  }
  for (const int i :
       {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
        CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR,
        CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT,
        CU_DEVICE_ATTRIBUTE_GPU_PCI_DEVICE_ID, CU_DEVICE_ATTRIBUTE_GPU_PCI_SUBSYSTEM_ID}) {
    wanted.push_back(i);
  }
  for (const int i : wanted) {
    int value = 0;
    EXPECT_EQ(CUDA_SUCCESS, Cu().cuDeviceGetAttribute(&value, static_cast<CUdevice_attribute>(i), 0));
    if (i == CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT) continue;
    EXPECT_GT(value, 0) << "attribute " << i;
  }
}

// cuBLASLt gives up on the device's properties if it cannot ask whether the context is one for graphics.
TEST_F(Answers, EveryLimitHasOne) {
  for (int limit = 0; limit < CU_LIMIT_MAX; ++limit) {
    size_t value = 1;
    EXPECT_EQ(CUDA_SUCCESS, Cu().cuCtxGetLimit(&value, static_cast<CUlimit>(limit))) << limit;
  }
  size_t value = 1;
  CU_OK(cuCtxGetLimit(&value, CU_LIMIT_CIG_ENABLED));
  EXPECT_EQ(0u, value);
}

// A cluster of the size that is portable fits, with as much shared memory as there is.
TEST_F(Answers, ThereIsRoomForClusters) {
  CUlaunchAttribute attribute = {};
  attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  CUlaunchConfig config = {};
  config.blockDimX = 128;
  config.blockDimY = config.blockDimZ = config.gridDimY = config.gridDimZ = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  for (const unsigned size : {1u, 2u, 4u, 8u}) {
    attribute.value.clusterDim = {size, 1, 1};
    config.gridDimX = size;
    int clusters = 0;
    CU_OK(cuOccupancyMaxActiveClusters(&clusters, scale_, &config));
    EXPECT_GT(clusters, 0) << size;
  }
}

// The tables that cuBLASLt and cuFFT do not start without.
TEST_F(Answers, TablesOfLibraries) {
  const unsigned char ids[][16] = {
      {0x21, 0x31, 0x8c, 0x60, 0x97, 0x14, 0x32, 0x48, 0x8c, 0xa6, 0x41, 0xff, 0x73, 0x24, 0xc8, 0xf2},
      {0x17, 0x34, 0xdc, 0x26, 0x80, 0x0d, 0x47, 0x45, 0x87, 0x26, 0xc0, 0xf1, 0xe7, 0xdd, 0x8b, 0xca},
      {0x6e, 0x16, 0x3f, 0xbe, 0xb9, 0x58, 0x44, 0x4d, 0x83, 0x5c, 0xe1, 0x82, 0xaf, 0xf1, 0x99, 0x1e}};
  for (const auto& bytes : ids) {
    CUuuid id;
    std::memcpy(id.bytes, bytes, sizeof bytes);
    const void* table = nullptr;
    CU_OK(cuGetExportTable(&table, &id));
    EXPECT_NE(nullptr, table);
  }
}

class MemoryTextures : public Answers {
 protected:
  CUresult Linear(CUdeviceptr address, CUarray_format format, unsigned channels, size_t bytes) {
    CUDA_RESOURCE_DESC resource = {};
    resource.resType = CU_RESOURCE_TYPE_LINEAR;
    resource.res.linear = {address, format, channels, bytes};
    return Try(resource);
  }
  CUresult Pitched(CUdeviceptr address, size_t width, size_t height, size_t pitch) {
    CUDA_RESOURCE_DESC resource = {};
    resource.resType = CU_RESOURCE_TYPE_PITCH2D;
    resource.res.pitch2D = {address, CU_AD_FORMAT_UNSIGNED_INT8, 1, width, height, pitch};
    return Try(resource);
  }
  CUresult Try(const CUDA_RESOURCE_DESC& resource) {
    CUDA_TEXTURE_DESC sampling = {};
    CUtexObject object = 0;
    const CUresult result = Cu().cuTexObjectCreate(&object, &resource, &sampling, nullptr);
    if (result == CUDA_SUCCESS) {
      EXPECT_EQ(CUDA_SUCCESS, Cu().cuTexObjectDestroy(object));
    }
    return result;
  }
};

// As an H100's driver (580.159.04) answers.
TEST_F(MemoryTextures, WhatIsAccepted) {
  CUdeviceptr memory;
  CU_OK(cuMemAlloc_v2(&memory, 1 << 20));
  const auto kFloat = CU_AD_FORMAT_FLOAT, kByte = CU_AD_FORMAT_UNSIGNED_INT8;
  constexpr size_t kGiga = size_t{1} << 30;
  // Beyond the allocation, where nothing is, and of no size.
  EXPECT_EQ(CUDA_SUCCESS, Linear(memory, kFloat, 2, 1 << 20));
  EXPECT_EQ(CUDA_SUCCESS, Linear(memory, kFloat, 2, (1 << 20) + 65536));
  EXPECT_EQ(CUDA_SUCCESS, Linear(0x700000000000, kFloat, 1, 512));
  EXPECT_EQ(CUDA_SUCCESS, Linear(memory, kFloat, 1, 0));
  EXPECT_EQ(CUDA_SUCCESS, Linear(memory, kFloat, 1, 3));
  // Sizes: 2^30 elements and 4 GiB.
  EXPECT_EQ(CUDA_SUCCESS, Linear(memory, kByte, 1, kGiga));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, Linear(memory, kByte, 1, kGiga + 4));
  EXPECT_EQ(CUDA_SUCCESS, Linear(memory, kByte, 4, 4 * kGiga));
  EXPECT_EQ(CUDA_SUCCESS, Linear(memory, kFloat, 4, 4 * kGiga));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, Linear(memory, kFloat, 4, 4 * kGiga + 16));
  // Places and elements.
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, Linear(0, kFloat, 1, 512));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, Linear(memory + 256, kFloat, 1, 512));
  EXPECT_EQ(CUDA_SUCCESS, Linear(memory + 512, kFloat, 1, 512));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, Linear(memory, kFloat, 3, 512));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, Linear(memory, CU_AD_FORMAT_UNORM_INT8X1, 1, 512));
  // Rows.
  EXPECT_EQ(CUDA_SUCCESS, Pitched(memory, 131072, 2, 131072));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, Pitched(memory, 131073, 2, 1 << 20));
  EXPECT_EQ(CUDA_SUCCESS, Pitched(memory, 64, 65000, 512));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, Pitched(memory, 64, 65001, 512));
  EXPECT_EQ(CUDA_SUCCESS, Pitched(memory, 64, 2, 2097120));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, Pitched(memory, 64, 2, 2097152));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, Pitched(memory, 64, 2, 100));
  EXPECT_EQ(CUDA_SUCCESS, Pitched(memory, 64, 2, 32));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, Pitched(memory + 256, 64, 2, 512));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, Pitched(0, 64, 2, 512));
}

constexpr char kFetch[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .entry fetch(.param .u64 texture, .param .u64 out, .param .u32 at)
{
  .reg .b32 %r<6>;
  .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [texture];
  ld.param.u64 %rd2, [out];
  ld.param.u32 %r1, [at];
  tex.1d.v4.u32.s32 {%r2, %r3, %r4, %r5}, [%rd1, {%r1}];
  st.global.u32 [%rd2], %r2;
  ret;
}
)";

// A kernel that reads where nothing is gets the fault that a pointer would give it, also when memory was freed since.
TEST_F(MemoryTextures, ReadsAreChecked) {
  for (const bool freed : {false, true}) {
    CUmodule module;
    CUfunction fetch;
    CUdeviceptr memory, out;
    CU_OK(cuModuleLoadData(&module, kFetch));
    CU_OK(cuModuleGetFunction(&fetch, module, "fetch"));
    CU_OK(cuMemAlloc_v2(&memory, 4096));
    CU_OK(cuMemAlloc_v2(&out, 4));
    CU_OK(cuMemsetD32_v2(memory, 77, 1024));
    CUDA_RESOURCE_DESC resource = {};
    resource.resType = CU_RESOURCE_TYPE_LINEAR;
    resource.res.linear = {memory, CU_AD_FORMAT_UNSIGNED_INT32, 1, size_t{1} << 30};
    CUDA_TEXTURE_DESC sampling = {};
    sampling.flags = CU_TRSF_READ_AS_INTEGER;
    CUtexObject object;
    CU_OK(cuTexObjectCreate(&object, &resource, &sampling, nullptr));
    int at = 1023;
    unsigned value = 0;
    void* params[] = {&object, &out, &at};
    CU_OK(cuLaunchKernel(fetch, 1, 1, 1, 1, 1, 1, 0, nullptr, params, nullptr));
    CU_OK(cuMemcpyDtoH_v2(&value, out, 4));
    EXPECT_EQ(77u, value);
    if (freed) {
      CU_OK(cuMemFree_v2(memory));
    } else {
      at = 1 << 24;
    }
    CU_OK(cuLaunchKernel(fetch, 1, 1, 1, 1, 1, 1, 0, nullptr, params, nullptr));
    CU_IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
    CU_IS(CUDA_SUCCESS, cuCtxDestroy_v2(context_));
    CU_OK(cuCtxCreate_v2(&context_, 0, 0));
  }
}

}  // namespace
}  // namespace cuda_remote::softgpu
