// SPDX-License-Identifier: Apache-2.0
// Spaces, vectors, generic addresses, checks of addresses, calls by hand-written PTX.
#include "softgpu/ptx/test_device.h"

namespace cuda_remote::softgpu::ptx {
namespace {

LaunchResult RunBody(TestDevice* device, const std::string& body, uint64_t out, uint64_t in, uint32_t threads = 1,
                     const std::string& before = "") {
  if (!device->Load(Kernel(body, before))) return {};
  return device->Run("test", {1}, {threads}, out, in);
}

TEST(Memory, VectorsAndSignExtension) {
  TestDevice device;
  auto* in = device.Array<uint32_t>(16);
  auto* out = device.Array<uint64_t>(16);
  for (uint32_t i = 0; i < 16; ++i) in[i] = 0x80 + i + (i << 16);
  const auto result = RunBody(&device,
                              "ld.global.nc.v4.u32 {%r1, %r2, _, %r4}, [%rd2+16];\n"
                              "st.global.v2.u32 [%rd1], {%r1, %r4};\n"
                              "ld.global.s8 %rd3, [%rd2];\nst.global.u64 [%rd1+8], %rd3;\n"
                              "ld.global.s16 %r5, [%rd2+60];\nst.global.u32 [%rd1+16], %r5;\n"
                              "ld.volatile.global.v2.u64 {%rd4, %rd5}, [%rd2];\n"
                              "st.global.v2.b64 [%rd1+32], {%rd5, %rd4};\n"
                              "ld.relaxed.gpu.global.u8 %h1, [%rd2+4];\nst.release.sys.global.u16 [%rd1+48], %h1;\n"
                              ".reg .b128 %q;\nld.global.b128 %q, [%rd2];\nst.global.b128 [%rd1+64], %q;\n",
                              uint64_t(out), uint64_t(in));
  ASSERT_TRUE(result.ok()) << result.message;
  EXPECT_EQ(uint64_t(in[7]) << 32 | in[4], out[0]);
  EXPECT_EQ(uint64_t(-128), out[1]);
  EXPECT_EQ(0x8fu, uint32_t(out[2]));
  EXPECT_EQ(uint64_t(in[3]) << 32 | in[2], out[4]);
  EXPECT_EQ(0x81u, uint16_t(out[6]));
  EXPECT_EQ(0, std::memcmp(in, out + 8, 16));
}

TEST(Memory, SharedLocalAndGenericAddresses) {
  TestDevice device;
  auto* out = device.Array<uint64_t>(64);
  const auto result = RunBody(
      &device,
      ".shared .align 8 .b8 own[64];\n.local .align 16 .b8 mine[32];\n"
      "mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd3, %r1, 8;\n"
      "mov.u64 %rd4, own;\ncvta.shared.u64 %rd5, %rd4;\nadd.u64 %rd5, %rd5, %rd3;\n"
      "st.u64 [%rd5], %rd3;\nbar.sync 0;\nxor.b32 %r2, %r1, 1;\nmul.wide.u32 %rd6, %r2, 8;\nadd.u64 %rd6, %rd6, %rd4;\n"
      "ld.shared.u64 %rd7, [%rd6];\n"
      "mov.u64 %rd8, mine;\ncvta.local.u64 %rd9, %rd8;\nst.u64 [%rd9+8], %rd7;\nld.local.u64 %rd10, [mine+8];\n"
      "isspacep.shared %p1, %rd5;\nisspacep.local %p2, %rd9;\nisspacep.global %p3, %rd1;\nisspacep.global %p4, %rd9;\n"
      "and.pred %p1, %p1, %p2;\nand.pred %p1, %p1, %p3;\nnot.pred %p4, %p4;\nand.pred %p1, %p1, %p4;\n"
      "selp.u64 %rd10, %rd10, 999, %p1;\n"
      "bar.sync 0;\ncvta.to.shared.u64 %rd11, %rd5;\nst.shared.u64 [%rd11], %rd10;\nld.shared.u64 %rd10, [%rd11];\n"
      "add.u64 %rd12, %rd1, %rd3;\nst.global.u64 [%rd12], %rd10;\n",
      uint64_t(out), 0, 8);
  ASSERT_TRUE(result.ok()) << result.message;
  for (uint64_t i = 0; i < 8; ++i) EXPECT_EQ(8 * (i ^ 1), out[i]);
}

TEST(Memory, BadAddressesAreNamed) {
  const struct {
    const char* body;
    Fault fault;
    const char* text;
  } cases[] = {
      {"ld.global.u32 %r1, [%rd1+1073741824];", Fault::kIllegalAddress, "illegal global access of 4 bytes at 0x"},
      {"mov.u64 %rd3, 0;\nld.global.u32 %r1, [%rd3];", Fault::kIllegalAddress, "at 0x0"},
      {"mov.u64 %rd3, -8;\nst.u64 [%rd3], %rd1;", Fault::kIllegalAddress, "line"},
      {"ld.global.u32 %r1, [%rd1+2];", Fault::kMisaligned, "misaligned"},
      {"ld.global.v4.u32 {%r1,%r2,%r3,%r4}, [%rd1+8];", Fault::kMisaligned, "misaligned"},
      {"st.global.u32 [%rd2], 5;", Fault::kIllegalAddress, "illegal"},  // read-only
      {"atom.global.add.u32 %r1, [%rd2], 5;", Fault::kIllegalAddress, "illegal"},
      {"mov.u32 %r1, 64;\nld.shared.u32 %r2, [%r1];", Fault::kIllegalAddress, "illegal shared"},
      {"mov.u64 %rd3, 4096;\nld.local.u32 %r2, [%rd3];", Fault::kIllegalAddress, "illegal local"},
      {"mov.u64 %rd3, 0x0003000000000100;\nld.u32 %r2, [%rd3];", Fault::kIllegalAddress, "illegal parameter"},
      {"mov.u64 %rd3, 0x0002ffffffffffff;\nld.u8 %r2, [%rd3];", Fault::kIllegalAddress, "illegal local"},
      {"mov.u64 %rd3, 0x0007000000000000;\nld.u8 %r2, [%rd3];", Fault::kIllegalAddress, "illegal global"},
      {"atom.shared.add.u32 %r1, [%rd1], 5;", Fault::kIllegalAddress, "illegal shared"},
      {"ld.global.u64 %rd3, [%rd1+1020];", Fault::kMisaligned, "misaligned"},
      {"ld.global.u32 %r3, [%rd1+1024];", Fault::kIllegalAddress, "illegal"},
  };
  for (const auto& c : cases) {
    TestDevice device;
    const uint64_t out = device.Allocate(1024), in = device.Allocate(1024);
    device.read_only = in;
    const auto result = RunBody(&device, c.body, out, in);
    EXPECT_EQ(c.fault, result.fault) << c.body;
    EXPECT_NE(std::string::npos, result.message.find(c.text)) << result.message;
    EXPECT_NE(std::string::npos, result.message.find("kernel test, line ")) << result.message;
    EXPECT_NE(std::string::npos, result.message.find("block (0,0,0), thread (0,0,0)")) << result.message;
  }
}

TEST(Memory, KernelParametersByAddress) {
  TestDevice device;
  ASSERT_TRUE(
      device.Load(".version 8.0\n.target sm_80\n.address_size 64\n"
                  ".visible .entry test(.param .u32 n, .param .u64 .ptr .align 1 out, .param .align 4 .b8 s[12])\n{\n"
                  ".reg .b64 %rd<8>; .reg .b32 %r<8>;\n"
                  "ld.param.u64 %rd1, [out];\nmov.b64 %rd2, s;\ncvta.param.u64 %rd3, %rd2;\n"
                  "ld.u32 %r1, [%rd3+8];\nld.param.u32 %r2, [s+4];\nld.param.u32 %r3, [%rd2];\nadd.u32 %r1, %r1, %r2;\n"
                  "add.u32 %r1, %r1, %r3;\nst.global.u32 [%rd1], %r1;\nret;\n}\n"));
  EXPECT_EQ(8u, device.module().kernels()[0].params[1].offset);
  EXPECT_EQ(28u, device.module().kernels()[0].param_bytes);
  auto* out = device.Array<uint32_t>(1);
  struct {
    uint32_t v[3];
  } s = {{100, 20, 3}};
  const auto result = device.Run("test", {1}, {1}, 1u, out, s);
  ASSERT_TRUE(result.ok()) << result.message;
  EXPECT_EQ(123u, out[0]);
}

TEST(Memory, GlobalInitializersAndRelocations) {
  TestDevice device;
  ASSERT_TRUE(device.Load(
      Kernel("ld.global.u64 %rd3, [pointer];\nld.u32 %r1, [%rd3];\nst.global.u32 [%rd1], %r1;\n"
             "ld.const.f32 %f1, [c+4];\nst.global.f32 [%rd1+4], %f1;\n"
             "ld.global.u64 %rd4, [bytes];\nld.u32 %r2, [%rd4];\nst.global.u32 [%rd1+8], %r2;\n",
             ".global .align 4 .u32 array[2][2] = {{1, 2}, {3, 4}};\n"
             ".global .u64 pointer = generic(array)+12;\n"
             ".const .align 4 .f32 c[3] = {0f3F800000, -2.5, 3};\n"
             ".global .align 8 .u8 bytes[8] = {0xFF(array), 0xFF00(array), 0xFF0000(array), 0xFF000000(array), "
             "0xFF00000000(array), 0xFF0000000000(array), 0xFF000000000000(array), 0xFF00000000000000(array)};\n")));
  auto* out = device.Array<uint32_t>(4);
  const auto result = device.Run("test", {1}, {1}, out, out);
  ASSERT_TRUE(result.ok()) << result.message;
  EXPECT_EQ(4u, out[0]);
  float f;
  std::memcpy(&f, &out[1], 4);
  EXPECT_EQ(-2.5f, f);
  EXPECT_EQ(1u, out[2]);
}

TEST(Memory, AsynchronousCopies) {
  TestDevice device;
  auto* in = device.Array<uint32_t>(4);
  auto* out = device.Array<uint32_t>(4);
  for (uint32_t i = 0; i < 4; ++i) in[i] = i + 1;
  const auto result = RunBody(&device,
                              ".shared .align 16 .b8 s[16];\nmov.u32 %r1, s;\nmov.u32 %r9, 8;\n"
                              "cp.async.ca.shared.global [%r1], [%rd2], 16, %r9;\ncp.async.commit_group;\n"
                              "cp.async.wait_group 0;\nld.shared.v4.u32 {%r2,%r3,%r4,%r5}, [s];\n"
                              "st.global.v4.u32 [%rd1], {%r2,%r3,%r4,%r5};\n",
                              uint64_t(out), uint64_t(in));
  ASSERT_TRUE(result.ok()) << result.message;
  EXPECT_EQ(2u, out[1]);
  EXPECT_EQ(0u, out[2]);
}

TEST(Memory, WideAtomics) {
  TestDevice device;
  auto* data = device.Array<uint64_t>(4);
  auto* out = device.Array<uint64_t>(4);
  data[0] = 5;
  data[1] = 6;
  const auto result = RunBody(&device,
                              ".reg .b128 %q<4>;\nmov.u64 %rd3, 5;\nmov.u64 %rd4, 6;\nmov.u64 %rd5, 7;\n"
                              "mov.b128 %q0, {%rd3, %rd4};\nmov.b128 %q1, {%rd5, %rd3};\n"
                              "atom.global.cas.b128 %q2, [%rd2], %q0, %q1;\nmov.b128 {%rd6, %rd7}, %q2;\n"
                              "st.global.v2.u64 [%rd1], {%rd6, %rd7};\n"
                              "atom.global.exch.b128 %q3, [%rd2+16], %q1;\n"
                              "atom.global.cas.b16 %h1, [%rd2], 7, 9;\n",
                              uint64_t(out), uint64_t(data));
  ASSERT_TRUE(result.ok()) << result.message;
  EXPECT_EQ(5u, out[0]);
  EXPECT_EQ(6u, out[1]);
  EXPECT_EQ(9u, data[0]);
  EXPECT_EQ(5u, data[1]);
  EXPECT_EQ(7u, data[2]);
}

}  // namespace
}  // namespace cuda_remote::softgpu::ptx
