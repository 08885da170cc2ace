// SPDX-License-Identifier: Apache-2.0
// What nvcc makes of testdata/async.cu (libcu++ barriers and pipelines), and mbarriers by hand.
#include "softgpu/ptx/test_device.h"
#include "softgpu/ptx/test_file.h"

namespace cuda_remote::softgpu::ptx {
namespace {

class Async : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { ASSERT_TRUE(device_.Load(ReadTestFile(GetParam()))); }
  TestDevice device_;
};
INSTANTIATE_TEST_SUITE_P(Builds, Async, ::testing::Values("async_75.ptx", "async_80.ptx", "async_90.ptx"));

TEST_P(Async, BarrierPhases) {
  auto* out = device_.Array<int>(2 * 96);
  const auto result = device_.Run("barrier_phases", {2}, {96}, out, 7);
  ASSERT_TRUE(result.ok()) << result.message;
  for (int i = 0; i < 192; ++i) EXPECT_EQ((i % 96 + 7) % 96 + 7, out[i]);
}

TEST_P(Async, CopiesWithBarriersAndGroups) {
  auto* in = device_.Array<int>(1024);
  auto* out = device_.Array<int>(1024);
  for (int i = 0; i < 1024; ++i) in[i] = i * 3;
  auto result = device_.Run("copies", {2}, {128}, in, out);
  ASSERT_TRUE(result.ok()) << result.message;
  for (int i = 0; i < 1024; ++i) ASSERT_EQ(in[i / 512 * 512 + 511 - i % 512], out[i]);
  result = device_.Run("group_copies", {2}, {128}, in, out);
  ASSERT_TRUE(result.ok()) << result.message;
  for (int i = 0; i < 1024; ++i) ASSERT_EQ(2 * in[i], out[i]);
}

TEST_P(Async, Pipeline) {
  auto* in = device_.Array<int>(64 * 9);
  auto* out = device_.Array<int>(64);
  for (int i = 0; i < 64 * 9; ++i) in[i] = i;
  const auto result = device_.Run("pipelined", {1}, {64}, in, out, 9);
  ASSERT_TRUE(result.ok()) << result.message;
  for (int i = 0; i < 64; ++i) EXPECT_EQ(64 * 36 + 9 * (63 - i), out[i]);
}

TEST(Mbarrier, ByHand) {
  TestDevice device;
  ASSERT_TRUE(device.Load(
      Kernel(".shared .align 16 .b8 bar[8];\n.shared .align 16 .b8 tile[32];\n"
             "mbarrier.init.shared::cta.b64 [bar], 2;\n"
             "mbarrier.arrive.shared::cta.b64 %rd3, [bar];\n"
             "mbarrier.pending_count.b64 %r1, %rd3;\n"
             "mbarrier.test_wait.shared::cta.b64 %p1, [bar], %rd3;\n"  // no
             "mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 32;\n"
             "mbarrier.test_wait.parity.shared::cta.b64 %p2, [bar], 0;\n"  // no: the bytes are missing
             "mov.u32 %r2, tile;\n"
             "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd2], 32, [bar];\n"
             "mbarrier.try_wait.shared::cta.b64 %p3, [bar], %rd3;\n"       // yes
             "mbarrier.test_wait.parity.shared::cta.b64 %p4, [bar], 1;\n"  // no: the new phase
             "cp.async.bulk.global.shared::cta.bulk_group [%rd1+16], [%r2], 32;\ncp.async.bulk.commit_group;\n"
             "cp.async.bulk.wait_group 0;\n"
             "selp.u32 %r3, 1, 0, %p1;\nselp.u32 %r4, 1, 0, %p2;\nselp.u32 %r5, 1, 0, %p3;\nselp.u32 %r6, 1, 0, %p4;\n"
             "st.global.v4.u32 [%rd1], {%r3, %r4, %r5, %r6};\nst.global.u32 [%rd1+48], %r1;\n"
             "mbarrier.inval.shared::cta.b64 [bar];\n")));
  auto* in = device.Array<uint32_t>(8);
  auto* out = device.Array<uint32_t>(16);
  for (uint32_t i = 0; i < 8; ++i) in[i] = 100 + i;
  const auto result = device.Run("test", {1}, {1}, out, in);
  ASSERT_TRUE(result.ok()) << result.message;
  EXPECT_EQ(0u, out[0]);
  EXPECT_EQ(0u, out[1]);
  EXPECT_EQ(1u, out[2]);
  EXPECT_EQ(0u, out[3]);
  for (uint32_t i = 0; i < 8; ++i) EXPECT_EQ(100 + i, out[4 + i]);
  EXPECT_EQ(2u, out[12]);
}

TEST(Mbarrier, TooManyArrivalsAreAFault) {
  TestDevice device;
  ASSERT_TRUE(
      device.Load(Kernel(".shared .align 8 .b64 bar;\nmbarrier.init.shared.b64 [bar], 1;\n"
                         "mbarrier.arrive.noComplete.shared.b64 %rd3, [bar], 5;\n")));
  EXPECT_EQ(Fault::kInvalidCode, device.Run("test", {1}, {1}, uint64_t{0}, uint64_t{0}).fault);
}

TEST(Cluster, ABlockIsAClusterOfItsOwn) {
  TestDevice device;
  ASSERT_TRUE(device.Load(Kernel(
      ".shared .u32 box;\nmov.u32 %r1, %tid.x;\nsetp.ne.u32 %p1, %r1, 40;\n@%p1 bra next;\nst.shared.u32 [box], 99;\n"
      "next: barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\nmov.u32 %r2, box;\n"
      "mapa.shared::cluster.u32 %r3, %r2, 0;\nld.shared::cluster.u32 %r4, [%r3];\nmov.u32 %r5, %cluster_nctarank;\n"
      "add.u32 %r4, %r4, %r5;\nmul.wide.u32 %rd3, %r1, 4;\nadd.u64 %rd3, %rd3, %rd1;\nst.global.u32 [%rd3], %r4;\n")));
  auto* out = device.Array<uint32_t>(64);
  const auto result = device.Run("test", {1}, {64}, out, out);
  ASSERT_TRUE(result.ok()) << result.message;
  for (int i = 0; i < 64; ++i) EXPECT_EQ(100u, out[i]);
}

TEST(Stack, AllocaSaveAndRestore) {
  TestDevice device;
  ASSERT_TRUE(device.Load(
      Kernel("stacksave.u64 %rd3;\nalloca.u64 %rd4, 64, 16;\nst.local.u32 [%rd4+60], 7;\nalloca.u64 %rd5, 64, 16;\n"
             "st.local.u32 [%rd5], 8;\nld.local.u32 %r1, [%rd4+60];\nstackrestore.u64 %rd3;\nalloca.u64 %rd6, 64, 16;\n"
             "setp.eq.u64 %p1, %rd4, %rd6;\nselp.u32 %r2, 1, 0, %p1;\nst.global.v2.u32 [%rd1], {%r1, %r2};\n"
             "setp.eq.u64 %p2, %rd2, 0;\n@%p2 ret;\nalloca.u64 %rd7, %rd2, 8;\n")));
  auto* out = device.Array<uint32_t>(2);
  auto result = device.Run("test", {1}, {1}, out, uint64_t{0});
  ASSERT_TRUE(result.ok()) << result.message;
  EXPECT_EQ(7u, out[0]);
  EXPECT_EQ(1u, out[1]);
  EXPECT_EQ(Fault::kStackOverflow, device.Run("test", {1}, {1}, out, uint64_t{1} << 40).fault);
}

}  // namespace
}  // namespace cuda_remote::softgpu::ptx
