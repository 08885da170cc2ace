// SPDX-License-Identifier: Apache-2.0
// Devices, entry points, modules, libraries, launches, occupancy, injected failures.
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "softgpu/testing/fixture.h"

namespace cuda_remote::softgpu {
namespace {

using ModuleTest = SoftGpuTest;

TEST_F(ModuleTest, DeviceLooksLikeAGpu) {
  int count, major, minor, value;
  CU_OK(cuDeviceGetCount(&count));
  EXPECT_EQ(1, count);
  char name[64];
  CU_OK(cuDeviceGetName(name, sizeof name, 0));
  EXPECT_STREQ("cuda-remote software GPU", name);
  CU_OK(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0));
  CU_OK(cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0));
  EXPECT_EQ(90, major * 10 + minor);
  for (int i = 1; i < CU_DEVICE_ATTRIBUTE_MAX; ++i) {
    EXPECT_EQ(CUDA_SUCCESS, Cu().cuDeviceGetAttribute(&value, static_cast<CUdevice_attribute>(i), 0)) << i;
  }
  CU_IS(CUDA_ERROR_INVALID_DEVICE, cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 1));
  CUuuid first, second;
  CU_OK(cuDeviceGetUuid_v2(&first, 0));
  CU_OK(cuDeviceGetUuid_v2(&second, 0));
  EXPECT_EQ(0, std::memcmp(&first, &second, sizeof first));
  char bus[16];
  CU_OK(cuDeviceGetPCIBusId(bus, sizeof bus, 0));
  CUdevice found = -1;
  CU_OK(cuDeviceGetByPCIBusId(&found, bus));
  EXPECT_EQ(0, found);
  int version;
  CU_OK(cuDriverGetVersion(&version));
  EXPECT_EQ(13000, version);
}

TEST_F(ModuleTest, EntryPoints) {
  void* address = nullptr;
  CUdriverProcAddressQueryResult status;
  CU_OK(cuGetProcAddress_v2("cuMemAlloc", &address, 13000, CU_GET_PROC_ADDRESS_DEFAULT, &status));
  EXPECT_EQ(CU_GET_PROC_ADDRESS_SUCCESS, status);
  EXPECT_EQ(reinterpret_cast<void*>(Cu().cuMemAlloc_v2), address);
  CU_OK(cuGetProcAddress_v2("cuMemcpyAsync", &address, 13000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, &status));
  EXPECT_EQ(server::DriverSymbol("cuMemcpyAsync_ptsz"), address);
  CU_OK(cuGetProcAddress_v2("cuNoSuchThing", &address, 13000, 0, &status));
  EXPECT_EQ(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND, status);
  EXPECT_EQ(0, server::MissingFunctions());
  // Refused by name.
  size_t bytes;
  CUmulticastObjectProp multicast = {};
  CU_IS(CUDA_ERROR_NOT_SUPPORTED, cuMulticastGetGranularity(&bytes, &multicast, CU_MULTICAST_GRANULARITY_MINIMUM));
  const char* text;
  CU_OK(cuGetErrorName(CUDA_ERROR_NOT_SUPPORTED, &text));
  EXPECT_STREQ("CUDA_ERROR_NOT_SUPPORTED", text);
}

TEST_F(ModuleTest, GlobalsAndFunctions) {
  CUdeviceptr counter, table;
  size_t bytes;
  CU_OK(cuModuleGetGlobal_v2(&counter, &bytes, module_, "counter"));
  EXPECT_EQ(4u, bytes);
  CU_OK(cuModuleGetGlobal_v2(&table, &bytes, module_, "table"));
  EXPECT_EQ(8u, bytes);
  uint32_t values[2];
  CU_OK(cuMemcpyDtoH_v2(values, table, 8));
  EXPECT_EQ(4u, values[1]);
  CU_IS(CUDA_ERROR_NOT_FOUND, cuModuleGetGlobal_v2(&table, &bytes, module_, "nothing"));
  CUtexref texture;
  CUsurfref surface;
  CU_IS(CUDA_ERROR_NOT_FOUND, cuModuleGetTexRef(&texture, module_, "counter"));  // no reference
  CU_IS(CUDA_ERROR_NOT_FOUND, cuModuleGetSurfRef(&surface, module_, "nothing"));
  CUfunction count_up;
  CU_OK(cuModuleGetFunction(&count_up, module_, "count_up"));
  CU_OK(cuLaunchKernel(count_up, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr));
  CU_OK(cuMemcpyDtoH_v2(values, counter, 4));
  EXPECT_EQ(8u, values[0]);
  CU_IS(CUDA_ERROR_NOT_FOUND, cuModuleGetFunction(&count_up, module_, "nothing"));
  unsigned count;
  CU_OK(cuModuleGetFunctionCount(&count, module_));
  EXPECT_EQ(4u, count);
  std::vector<CUfunction> functions(count);
  CU_OK(cuModuleEnumerateFunctions(functions.data(), count, module_));
  const char* name;
  CU_OK(cuFuncGetName(&name, functions[0]));
  EXPECT_STREQ("scale", name);
  CUmodule of;
  CU_OK(cuFuncGetModule(&of, functions[0]));
  EXPECT_EQ(module_, of);
  size_t offset, size;
  CU_OK(cuFuncGetParamInfo(scale_, 2, &offset, &size));
  EXPECT_EQ(12u, offset);
  EXPECT_EQ(4u, size);
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuFuncGetParamInfo(scale_, 3, &offset, &size));
  CU_OK(cuModuleUnload(module_));
  CU_IS(CUDA_ERROR_INVALID_HANDLE, cuFuncGetModule(&of, functions[0]));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2(values, counter, 4));
}

TEST_F(ModuleTest, LibrariesWithoutAContext) {
  CUlibrary library;
  CUkernel kernel;
  CU_OK(cuLibraryLoadData(&library, kPtx, nullptr, nullptr, 0, nullptr, nullptr, 0));
  CU_OK(cuLibraryGetKernel(&kernel, library, "count_up"));
  CU_IS(CUDA_ERROR_NOT_FOUND, cuLibraryGetKernel(&kernel, library, "nothing"));
  CUdeviceptr counter;
  size_t bytes;
  CU_OK(cuLibraryGetGlobal(&counter, &bytes, library, "counter"));
  // A kernel launches as a function does.
  CU_OK(cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr));
  CUfunction function;
  CU_OK(cuKernelGetFunction(&function, kernel));
  CU_OK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr));
  uint32_t value;
  CU_OK(cuMemcpyDtoH_v2(&value, counter, 4));
  EXPECT_EQ(9u, value);
  // Each context has variables of its own.
  CUcontext other;
  CUdeviceptr others;
  CU_OK(cuCtxCreate_v2(&other, 0, 0));
  CU_OK(cuLibraryGetGlobal(&others, &bytes, library, "counter"));
  EXPECT_NE(counter, others);
  CU_OK(cuMemcpyDtoH_v2(&value, others, 4));
  EXPECT_EQ(7u, value);
  CU_OK(cuCtxDestroy_v2(other));
  int threads;
  CU_OK(cuKernelGetAttribute(&threads, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, kernel, 0));
  EXPECT_EQ(1024, threads);
  CUlibrary of;
  CU_OK(cuKernelGetLibrary(&of, kernel));
  EXPECT_EQ(library, of);
  CU_OK(cuLibraryUnload(library));
  CU_IS(CUDA_ERROR_INVALID_HANDLE, cuKernelGetLibrary(&of, kernel));
  CU_IS(CUDA_ERROR_INVALID_HANDLE, cuLibraryUnload(library));
}

TEST_F(ModuleTest, WhatIsSetOfAFunctionIsNotTheKernels) {
  constexpr CUfunction_attribute kShared = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
  CUlibrary library;
  CUkernel kernel;
  CUfunction function, again;
  CUmodule module;
  CU_OK(cuLibraryLoadData(&library, kPtx, nullptr, nullptr, 0, nullptr, nullptr, 0));
  CU_OK(cuLibraryGetKernel(&kernel, library, "count_up"));
  CU_OK(cuKernelGetFunction(&function, kernel));
  CU_OK(cuLibraryGetModule(&module, library));
  CU_OK(cuModuleGetFunction(&again, module, "count_up"));
  EXPECT_EQ(function, again);
  const auto expect = [&](int of_kernel, int of_function) {
    int value = 0;
    CU_OK(cuKernelGetAttribute(&value, kShared, kernel, 0));
    EXPECT_EQ(of_kernel, value);
    CU_OK(cuFuncGetAttribute(&value, kShared, function));
    EXPECT_EQ(of_function, value);
  };
  expect(49152, 49152);
  CU_OK(cuKernelSetAttribute(kShared, 40000, kernel, 0));
  expect(40000, 40000);
  CU_OK(cuFuncSetAttribute(function, kShared, 50000));
  expect(40000, 50000);
  CU_OK(cuKernelSetAttribute(kShared, 70000, kernel, 0));
  expect(70000, 50000);
  CU_OK(cuLibraryUnload(library));
}

TEST_F(ModuleTest, ManagedVariablesNeedNoContextAndAreSharedByAll) {
  CUlibrary library;
  CU_OK(cuLibraryLoadData(&library, kPtx, nullptr, nullptr, 0, nullptr, nullptr, 0));
  CU_OK(cuCtxSetCurrent(nullptr));
  CUdeviceptr word, again;
  size_t bytes;
  CU_OK(cuLibraryGetManaged(&word, &bytes, library, "managed_word"));
  EXPECT_EQ(4u, bytes);
  EXPECT_EQ(5, *reinterpret_cast<int*>(word));
  CU_IS(CUDA_ERROR_NOT_FOUND, cuLibraryGetManaged(&again, &bytes, library, "counter"));
  CU_OK(cuCtxSetCurrent(context_));
  CU_OK(cuLibraryGetGlobal(&again, &bytes, library, "managed_word"));
  EXPECT_EQ(word, again);
  ASSERT_EQ(CUDA_SUCCESS, Bump(word, 2, nullptr));
  CU_OK(cuCtxSynchronize());
  EXPECT_EQ(7, *reinterpret_cast<int*>(word));
  CU_OK(cuLibraryUnload(library));
}

TEST_F(ModuleTest, WrongImages) {
  CUmodule module;
  char log[256] = {};
  CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  void* values[] = {log, reinterpret_cast<void*>(sizeof log)};
  const char* bad = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry f() { no_such_instruction; }\n";
  CUresult result = Cu().cuModuleLoadDataEx(&module, bad, 2, options, values);
  if (result == CUDA_SUCCESS) {
    // Found when the kernel is prepared, at the latest.
    CUfunction function;
    CU_OK(cuModuleGetFunction(&function, module, "f"));
    EXPECT_NE(CUDA_SUCCESS, Cu().cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr));
  } else {
    EXPECT_EQ(CUDA_ERROR_INVALID_PTX, result);
  }
  const char* broken = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry f( { ret; }\n";
  values[1] = reinterpret_cast<void*>(sizeof log);
  CU_IS(CUDA_ERROR_INVALID_PTX, cuModuleLoadDataEx(&module, broken, 2, options, values));
  EXPECT_NE('\0', log[0]);
  EXPECT_EQ(std::strlen(log), reinterpret_cast<size_t>(values[1]));
  CU_IS(CUDA_ERROR_INVALID_IMAGE, cuModuleLoadData(&module, "certainly no image"));
  CU_IS(CUDA_ERROR_FILE_NOT_FOUND, cuModuleLoad(&module, "/no/such/file"));
  // Machine code alone.
  std::ifstream cubin("replay/modimg/variables.cubin", std::ios::binary);
  ASSERT_TRUE(cubin.good());
  std::string bytes((std::istreambuf_iterator<char>(cubin)), std::istreambuf_iterator<char>());
  CU_IS(CUDA_ERROR_NO_BINARY_FOR_GPU, cuModuleLoadData(&module, bytes.data()));
  // Everything that the compiler makes, compressed or not.
  for (const char* file : {"variables.ptx", "plain.fatbin", "default.fatbin", "all.fatbin", "size.fatbin"}) {
    CU_IS(CUDA_SUCCESS, cuModuleLoad(&module, (std::string("replay/modimg/") + file).c_str())) << file;
  }
}

TEST_F(ModuleTest, LaunchChecks) {
  CUdeviceptr p;
  CU_OK(cuMemAlloc_v2(&p, 4096));
  CU_OK(cuMemsetD32_v2(p, 1, 1024));
  unsigned count = 1024, factor = 3;
  void* params[] = {&p, &count, &factor};
  auto launch = [&](unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared) {
    return Cu().cuLaunchKernel(scale_, gx, gy, gz, bx, by, bz, shared, nullptr, params, nullptr);
  };
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, launch(0, 1, 1, 32, 1, 1, 0));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, launch(1, 65536, 1, 32, 1, 1, 0));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, launch(1, 1, 1, 1025, 1, 1, 0));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, launch(1, 1, 1, 32, 32, 2, 0));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, launch(1, 1, 1, 1, 1, 65, 0));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, launch(1, 1, 1, 32, 1, 1, 49153));
  EXPECT_EQ(CUDA_SUCCESS, launch(1, 1, 1, 32, 1, 1, 49152));
  CU_OK(cuFuncSetAttribute(scale_, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 100000));
  EXPECT_EQ(CUDA_SUCCESS, launch(1, 1, 1, 32, 1, 1, 100000));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuFuncSetAttribute(scale_, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 300000));
  CU_IS(CUDA_ERROR_INVALID_HANDLE,
        cuLaunchKernel(reinterpret_cast<CUfunction>(&p), 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuLaunchKernel(scale_, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr));
  // Parameters as one buffer.
  CU_OK(cuMemsetD32_v2(p, 1, 1024));
  struct {
    CUdeviceptr p;
    unsigned count, factor;
  } packed = {p, 1024, 5};
  size_t bytes = 16;
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
  CU_OK(cuLaunchKernel(scale_, 16, 1, 1, 64, 1, 1, 0, nullptr, nullptr, extra));
  uint32_t last;
  CU_OK(cuMemcpyDtoH_v2(&last, p + 4092, 4));
  EXPECT_EQ(5u + 1023, last);
  // Part of them: the rest is zero, as factor here. More than the kernel has, or none, is refused.
  bytes = 12;
  CU_OK(cuLaunchKernel(scale_, 16, 1, 1, 64, 1, 1, 0, nullptr, nullptr, extra));
  CU_OK(cuMemcpyDtoH_v2(&last, p + 4092, 4));
  EXPECT_EQ(1023u, last);
  bytes = 32;
  CU_IS(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, cuLaunchKernel(scale_, 16, 1, 1, 64, 1, 1, 0, nullptr, nullptr, extra));
  bytes = 0;
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuLaunchKernel(scale_, 16, 1, 1, 64, 1, 1, 0, nullptr, nullptr, extra));
  // Launched through a config, with attributes.
  CUlaunchAttribute attribute = {};
  attribute.id = CU_LAUNCH_ATTRIBUTE_PRIORITY;
  CUlaunchConfig config = {};
  config.gridDimX = 16;
  config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
  config.blockDimX = 64;
  config.attrs = &attribute;
  config.numAttrs = 1;
  CU_OK(cuLaunchKernelEx(&config, scale_, params, nullptr));
  CU_OK(cuCtxSynchronize());
  // More blocks than can be resident.
  CU_IS(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
        cuLaunchCooperativeKernel(scale_, 1 << 20, 1, 1, 64, 1, 1, 0, nullptr, params));
}

TEST_F(ModuleTest, OccupancyIsConsistent) {
  int blocks, fewer, grid, block;
  CU_OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, scale_, 128, 0));
  EXPECT_GT(blocks, 0);
  EXPECT_LE(blocks * 128, 2048);
  CU_OK(cuFuncSetAttribute(scale_, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 200000));
  CU_OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&fewer, scale_, 128, 100000));
  EXPECT_EQ(2, fewer);
  CU_OK(cuOccupancyMaxPotentialBlockSize(&grid, &block, scale_, nullptr, 0, 0));
  CU_OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, scale_, block, 0));
  EXPECT_EQ(2048, block * blocks);
  size_t dynamic;
  CU_OK(cuOccupancyAvailableDynamicSMemPerBlock(&dynamic, scale_, 2, 128));
  CU_OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, scale_, 128, dynamic));
  EXPECT_EQ(2, blocks);
}

// The test's environment says SOFTGPU_FAIL=cuMemAllocPitch_v2:2:999,cuMemHostGetFlags:0:46.
TEST_F(ModuleTest, InjectedFailures) {
  if (std::getenv("SOFTGPU_FAIL") == nullptr) GTEST_SKIP() << "SOFTGPU_FAIL is not set";
  CUdeviceptr p;
  size_t pitch;
  CUresult results[4];
  for (CUresult& result : results) result = Cu().cuMemAllocPitch_v2(&p, &pitch, 16, 2, 4);
  int failures = 0;
  for (CUresult result : results) failures += result == CUDA_ERROR_UNKNOWN;
  EXPECT_EQ(1, failures);
  unsigned flags;
  for (int i = 0; i < 3; ++i) CU_IS(CUDA_ERROR_DEVICE_UNAVAILABLE, cuMemHostGetFlags(&flags, &p));
}

}  // namespace
}  // namespace cuda_remote::softgpu
