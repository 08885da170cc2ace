// SPDX-License-Identifier: Apache-2.0
// Branches, calls, divergence, barriers, meetings of warps.
#include "softgpu/ptx/test_device.h"

namespace cuda_remote::softgpu::ptx {
namespace {

std::vector<uint32_t> RunBody(const std::string& body, uint32_t threads, const std::string& before = "") {
  TestDevice device;
  if (!device.Load(Kernel("mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd3, %r1, 4;\nadd.u64 %rd4, %rd1, %rd3;\n" + body +
                              "\nst.global.u32 [%rd4], %r2;\n",
                          before))) {
    return {};
  }
  auto* out = device.Array<uint32_t>(threads);
  const auto result = device.Run("test", {1}, {threads}, out, out);
  EXPECT_TRUE(result.ok()) << result.message;
  return std::vector<uint32_t>(out, out + threads);
}

TEST(Control, Loops) {
  const auto out = RunBody(
      "mov.u32 %r2, 0;\nmov.u32 %r3, 0;\n"
      "loop: setp.ge.u32 %p1, %r3, %r1;\n@%p1 bra done;\nadd.u32 %r2, %r2, %r3;\n"
      "add.u32 %r3, %r3, 1;\n"
      "bra loop;\ndone:",
      50);
  for (uint32_t i = 0; i < 50; ++i) EXPECT_EQ(i * (i - 1) / 2, out[i]);
}

TEST(Control, BranchTables) {
  const auto out = RunBody(
      "rem.u32 %r3, %r1, 3;\nts: .branchtargets a, b, c;\nbrx.idx %r3, ts;\n"
      "a: mov.u32 %r2, 10;\nbra end;\nb: mov.u32 %r2, 20;\nbra end;\nc: mov.u32 %r2, 30;\n"
      "end:",
      9);
  for (uint32_t i = 0; i < 9; ++i) EXPECT_EQ(10 * (i % 3 + 1), out[i]);
}

TEST(Control, CallsWithRegisterAndMemoryParameters) {
  const auto out = RunBody(
      "call (%r2), plus, (%r1, 5);\n{\n.param .b32 p;\n.param .b32 q;\n.param .b32 result;\nst.param.b32 [p], %r2;\n"
      "st.param.b32 [q], 3;\ncall.uni (result), times, (p, q);\nld.param.b32 %r2, [result];\n}\n"
      "mov.u64 %rd5, plus_memory;\n{\n.param .b32 p;\n.param .b32 result;\nst.param.b32 [p], %r2;\n"
      "call (result), %rd5, (p), proto;\nld.param.b32 %r2, [result];\n}\n"
      "proto: .callprototype (.param .b32 _) _ (.param .b32 _);\n",
      8,
      ".func (.reg .b32 r) plus(.reg .b32 a, .reg .b32 b)\n{\nadd.u32 r, a, b;\nret;\n}\n"
      ".func (.param .b32 r) times(.param .b32 a, .param .b32 b)\n{\n.reg .b32 %r<4>;\nld.param.b32 %r1, [a];\n"
      "ld.param.b32 %r2, [b];\nmul.lo.u32 %r3, %r1, %r2;\nst.param.b32 [r], %r3;\nret;\n}\n"
      ".func (.param .b32 r) plus_memory(.param .b32 a)\n{\n.reg .b32 %r<4>;\nld.param.b32 %r1, [a];\n"
      "add.u32 %r1, %r1, 1000;\nst.param.b32 [r], %r1;\nret;\n}\n");
  for (uint32_t i = 0; i < 8; ++i) EXPECT_EQ((i + 5) * 3 + 1000, out[i]);
}

TEST(Control, GuardedInstructions) {
  const auto out = RunBody(
      "and.b32 %r3, %r1, 1;\nsetp.eq.u32 %p1, %r3, 0;\nmov.u32 %r2, 7;\n"
      "@%p1 add.u32 %r2, %r2, %r1;\n"
      "@!%p1 mov.u32 %r2, %laneid;\n",
      64);
  for (uint32_t i = 0; i < 64; ++i) EXPECT_EQ(i % 2 == 0 ? 7 + i : i % 32, out[i]);
}

TEST(Control, BarrierReductionsWithCounts) {
  const auto out = RunBody(
      "setp.lt.u32 %p1, %r1, 10;\nbar.red.popc.u32 %r2, 3, 64, %p1;\n"
      "bar.red.and.pred %p2, 0, %p1;\n"
      "bar.red.or.pred %p3, 0, !%p1;\nselp.u32 %r3, 1000, 0, %p2;\nselp.u32 %r4, 2000, 0, %p3;\n"
      "add.u32 %r2, %r2, %r3;\nadd.u32 %r2, %r2, %r4;\n",
      64);
  for (uint32_t i = 0; i < 64; ++i) EXPECT_EQ(2010u, out[i]);
}

TEST(Control, CountedBarrierWithAnIncompleteWarp) {
  // 50 threads; the second warp counts as 32.
  const auto out = RunBody("bar.sync 1, 64;\nmov.u32 %r2, 1;", 50);
  EXPECT_EQ(1u, out[49]);
}

TEST(Control, ShufflesInsideDivergentCode) {
  const auto out = RunBody(
      "mov.u32 %r2, 0;\nsetp.lt.u32 %p1, %r1, 16;\n@%p1 bra low;\n"
      "shfl.sync.down.b32 %r2|%p2, %r1, 1, 31, 0xffff0000;\nbra join;\n"
      "low: shfl.sync.up.b32 %r2, %r1, 1, 0, 0xffff;\njoin:",
      32);
  for (uint32_t i = 0; i < 32; ++i) EXPECT_EQ(i < 16 ? (i == 0 ? 0 : i - 1) : (i == 31 ? 31 : i + 1), out[i]);
}

TEST(Control, ElectAndWarpBarrier) {
  const auto out = RunBody(
      "elect.sync %r3|%p1, 0xffffffff;\nbar.warp.sync 0xffffffff;\nselp.u32 %r2, 1, 0, %p1;\n"
      "add.u32 %r2, %r2, %r3;",
      32);
  EXPECT_EQ(1u, out[0]);
  EXPECT_EQ(0u, out[1]);
}

TEST(Control, ThreadsThatEndDoNotHoldOthers) {
  const auto out = RunBody(
      "setp.eq.u32 %p1, %r1, 3;\n@%p1 exit;\nvote.sync.ballot.b32 %r2, 1, 0xffffffff;\n"
      "bar.sync 0;",
      32);
  EXPECT_EQ(0u, out[3]);
  EXPECT_EQ(~8u, out[4]);
}

TEST(Control, Deadlock) {
  TestDevice device;
  ASSERT_TRUE(
      device.Load(Kernel("mov.u32 %r1, %tid.x;\nsetp.eq.u32 %p1, %r1, 0;\n@%p1 bra a;\nbar.sync 0;\nbra end;\n"
                         "a: bar.sync 1;\nend:")));
  const auto result = device.Run("test", {1}, {64}, uint64_t{0}, uint64_t{0});
  EXPECT_EQ(Fault::kDeadlock, result.fault);
  EXPECT_NE(std::string::npos, result.message.find("bar.sync")) << result.message;
}

TEST(Control, SpinningOnAnotherThreadOfTheBlock) {
  const auto out = RunBody(
      "setp.eq.u32 %p1, %r1, 63;\n@%p1 bra set;\nspin: ld.volatile.shared.u32 %r2, [flag];\n"
      "setp.eq.u32 %p2, %r2, 0;\n@%p2 bra spin;\nbra end;\nset: nanosleep.u32 100;\n"
      "mov.u32 %r2, 77;\n"
      "st.volatile.shared.u32 [flag], %r2;\nend:",
      64, ".shared .u32 flag;\n");
  for (const uint32_t v : out) EXPECT_EQ(77u, v);
}

TEST(Control, BlocksThatWaitForLaterBlocks) {
  // Not a cooperative launch, yet the first block waits for the last one.
  TestDevice device;
  ASSERT_TRUE(
      device.Load(Kernel("mov.u32 %r1, %ctaid.x;\nsetp.eq.u32 %p1, %r1, 2;\n@%p1 st.global.u32 [%rd1], 1;\n"
                         "spin: ld.volatile.global.u32 %r2, [%rd1];\nsetp.eq.u32 %p2, %r2, 0;\n"
                         "@%p2 bra spin;\n")));
  auto* flag = device.Array<uint32_t>(1);
  device.options.host_threads = 1;
  const auto result = device.Run("test", {3}, {1}, flag, flag);
  EXPECT_TRUE(result.ok()) << result.message;
}

TEST(Control, SpecialRegisters) {
  TestDevice device;
  ASSERT_TRUE(device.Load(
      Kernel("mov.u32 %r1, %tid.y;\nmov.u32 %r2, %ntid.y;\nmov.u32 %r3, %ctaid.z;\nmov.u32 %r4, %nctaid.z;\n"
             "mov.u32 %r5, %warpid;\nmov.u32 %r6, %lanemask_lt;\nmov.u32 %r7, %nwarpid;\nmov.u64 %rd3, %gridid;\n"
             "mov.u32 %r8, %dynamic_smem_size;\nmov.u64 %rd5, %clock64;\nmov.u64 %rd6, %globaltimer;\n"
             "setp.ne.u32 %p1, %r1, 2;\n@%p1 exit;\nmov.u32 %r9, %tid.x;\nsetp.ne.u32 %p1, %r9, 9;\n@%p1 exit;\n"
             "setp.ne.u32 %p1, %r3, 1;\n@%p1 exit;\n"
             "st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4};\nst.global.v4.u32 [%rd1+16], {%r5, %r6, %r7, %r8};\n"
             "st.global.u64 [%rd1+32], %rd3;\n")));
  auto* out = device.Array<uint32_t>(16);
  device.options.dynamic_shared_bytes = 48;
  device.options.grid_id = 1234567890123;
  const auto result = device.Run("test", {1, 1, 2}, {16, 3, 1}, out, out);
  ASSERT_TRUE(result.ok()) << result.message;
  const uint32_t expected[] = {2, 3, 1, 2, 1, (1u << 9) - 1, 2, 48};
  for (int i = 0; i < 8; ++i) EXPECT_EQ(expected[i], out[i]) << i;
  EXPECT_EQ(1234567890123u, out[8] | uint64_t(out[9]) << 32);
}

}  // namespace
}  // namespace cuda_remote::softgpu::ptx
