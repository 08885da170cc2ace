// SPDX-License-Identifier: Apache-2.0
// The tests' way to the library: loaded by path, as cr-worker does, and called through the driver table.
#ifndef CUDA_REMOTE_SOFTGPU_TESTING_FIXTURE_H_
#define CUDA_REMOTE_SOFTGPU_TESTING_FIXTURE_H_

#include <cuda.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "server/driver/driver_table.h"

namespace cuda_remote::softgpu {

// The driver. Loaded at first use from SOFTGPU_LIBRARY or softgpu/libsoftgpu.so.
inline const server::DriverTable& Cu() {
  static const server::DriverTable* table = [] {
    const char* path = std::getenv("SOFTGPU_LIBRARY");
    return new server::DriverTable(*server::LoadDriver(path != nullptr ? path : "softgpu/libsoftgpu.so"));
  }();
  return *table;
}

#define CU_OK(call) ASSERT_EQ(CUDA_SUCCESS, Cu().call)
#define CU_IS(result, call) EXPECT_EQ(result, Cu().call)

// data[i] = data[i] * factor + i, and the rest of what the tests need.
inline constexpr char kPtx[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .global .align 4 .u32 counter = 7;
.visible .global .attribute(.managed) .align 4 .u32 managed_word = 5;
.visible .const .align 4 .u32 table[2] = {3, 4};
.visible .entry scale(.param .u64 data, .param .u32 count, .param .u32 factor)
{
  .reg .pred %p<2>;
  .reg .b32 %r<10>;
  .reg .b64 %rd<5>;
  ld.param.u64 %rd1, [data];
  ld.param.u32 %r1, [count];
  ld.param.u32 %r2, [factor];
  mov.u32 %r3, %ctaid.x;
  mov.u32 %r4, %ntid.x;
  mov.u32 %r5, %tid.x;
  mad.lo.s32 %r6, %r3, %r4, %r5;
  setp.ge.u32 %p1, %r6, %r1;
  @%p1 bra DONE;
  mul.wide.u32 %rd2, %r6, 4;
  add.s64 %rd3, %rd1, %rd2;
  ld.global.u32 %r7, [%rd3];
  mad.lo.s32 %r8, %r7, %r2, %r6;
  st.global.u32 [%rd3], %r8;
DONE:
  ret;
}
.visible .entry bump(.param .u64 address, .param .u32 times)
{
  .reg .pred %p<2>;
  .reg .b32 %r<6>;
  .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [address];
  ld.param.u32 %r1, [times];
LOOP:
  ld.global.u32 %r2, [%rd1];
  add.u32 %r3, %r2, 1;
  st.global.u32 [%rd1], %r3;
  sub.u32 %r1, %r1, 1;
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra LOOP;
  ret;
}
.visible .entry wild()
{
  .reg .b32 %r<2>;
  .reg .b64 %rd<2>;
  mov.u64 %rd1, 4096;
  mov.u32 %r1, 1;
  st.global.u32 [%rd1], %r1;
  ret;
}
.visible .entry count_up()
{
  .reg .b32 %r<3>;
  ld.global.u32 %r1, [counter];
  add.u32 %r2, %r1, 1;
  st.global.u32 [counter], %r2;
  ret;
}
)";

// A context of its own for each test, with kPtx loaded.
class SoftGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    CU_OK(cuInit(0));
    CU_OK(cuCtxCreate_v2(&context_, 0, 0));
    CU_OK(cuModuleLoadData(&module_, kPtx));
    CU_OK(cuModuleGetFunction(&scale_, module_, "scale"));
    CU_OK(cuModuleGetFunction(&bump_, module_, "bump"));
    CU_OK(cuModuleGetFunction(&wild_, module_, "wild"));
  }
  void TearDown() override { CU_IS(CUDA_SUCCESS, cuCtxDestroy_v2(context_)); }

  // Adds 1 to *address `times` times.
  CUresult Bump(CUdeviceptr address, unsigned times, CUstream stream) {
    void* params[] = {&address, &times};
    return Cu().cuLaunchKernel(bump_, 1, 1, 1, 1, 1, 1, 0, stream, params, nullptr);
  }
  CUresult Scale(CUdeviceptr data, unsigned count, unsigned factor, CUstream stream) {
    void* params[] = {&data, &count, &factor};
    return Cu().cuLaunchKernel(scale_, (count + 63) / 64, 1, 1, 64, 1, 1, 0, stream, params, nullptr);
  }

  CUcontext context_ = nullptr;
  CUmodule module_ = nullptr;
  CUfunction scale_ = nullptr, bump_ = nullptr, wild_ = nullptr;
};

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_TESTING_FIXTURE_H_
