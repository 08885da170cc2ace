// SPDX-License-Identifier: Apache-2.0
// Clusters of several blocks: who is where, shared memory of others, the barrier, what is sent to others.
#include "softgpu/ptx/test_device.h"

namespace cuda_remote::softgpu::ptx {
namespace {

// %rd3: where this thread's result goes, one word for each thread of the grid; %r1: thread, %r2: rank.
constexpr const char* kPlaces =
    "mov.u32 %r1, %tid.x;\nmov.u32 %r2, %cluster_ctarank;\nmov.u32 %r3, %ctaid.x;\nmov.u32 %r4, %ntid.x;\n"
    "mad.lo.u32 %r5, %r3, %r4, %r1;\nmul.wide.u32 %rd3, %r5, 4;\nadd.u64 %rd3, %rd3, %rd1;\n";
constexpr const char* kSync = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n";

class Clusters : public ::testing::Test {
 protected:
  // Runs `body` with blocks of `threads` in clusters of `cluster`.
  LaunchResult Run(const std::string& body, Dim3 grid, Dim3 cluster, uint32_t threads, const std::string& before = "") {
    if (!device_.Load(Kernel(body, before))) return {};
    out_ = device_.Array<uint32_t>(4096);
    in_ = device_.Array<uint32_t>(4096);
    for (uint32_t i = 0; i < 4096; ++i) in_[i] = 1000 + i;
    device_.options.cluster = cluster;
    device_.options.explicit_cluster = true;
    device_.options.instruction_limit = 10 * 1000 * 1000;
    return device_.Run("test", grid, {threads}, out_, in_);
  }

  TestDevice device_;
  uint32_t* out_ = nullptr;
  uint32_t* in_ = nullptr;
};

TEST_F(Clusters, WhereABlockIs) {
  std::string body =
      "mov.u32 %r1, %ctaid.x;\nmov.u32 %r2, %ctaid.y;\nmov.u32 %r3, %ctaid.z;\nmad.lo.u32 %r4, %r3, 6, %r2;\n"
      "mad.lo.u32 %r4, %r4, 4, %r1;\nmul.wide.u32 %rd3, %r4, 64;\nadd.u64 %rd3, %rd3, %rd1;\n";
  const char* names[] = {"%cluster_ctaid.x",  "%cluster_ctaid.y", "%cluster_ctaid.z",  "%clusterid.x",
                         "%clusterid.y",      "%clusterid.z",     "%cluster_nctaid.x", "%cluster_nctaid.y",
                         "%cluster_nctaid.z", "%nclusterid.x",    "%nclusterid.y",     "%nclusterid.z",
                         "%cluster_ctarank",  "%cluster_nctarank"};
  int offset = 0;
  for (const char* name : names) {
    body += "mov.u32 %r5, " + std::string(name) + ";\nst.global.u32 [%rd3+" + std::to_string(offset) + "], %r5;\n";
    offset += 4;
  }
  body += "mov.pred %p1, %is_explicit_cluster;\nselp.u32 %r5, 1, 0, %p1;\nst.global.u32 [%rd3+56], %r5;\n";
  const auto result = Run(body, {4, 6, 2}, {2, 3, 1}, 1);
  ASSERT_TRUE(result.ok()) << result.message;
  for (uint32_t z = 0; z < 2; ++z) {
    for (uint32_t y = 0; y < 6; ++y) {
      for (uint32_t x = 0; x < 4; ++x) {
        const uint32_t* got = out_ + ((z * 6 + y) * 4 + x) * 16;
        const uint32_t expected[15] = {x % 2, y % 3, 0, x / 2, y / 3, z, 2, 3, 1, 2, 2, 2, x % 2 + y % 3 * 2, 6, 1};
        for (int i = 0; i < 15; ++i) ASSERT_EQ(expected[i], got[i]) << x << " " << y << " " << z << ": " << i;
      }
    }
  }
}

// Every thread leaves a word, the next block takes it: by the shared address, by the generic one, and by an atomic.
TEST_F(Clusters, SharedMemoryOfOthers) {
  const auto result =
      Run(std::string(kPlaces) +
              "mov.u32 %r6, box;\nshl.b32 %r7, %r1, 2;\nadd.u32 %r6, %r6, %r7;\nst.shared.u32 [%r6], %r5;\n" + kSync +
              "add.u32 %r8, %r2, 1;\nand.b32 %r8, %r8, 3;\n"
              "mapa.shared::cluster.u32 %r9, %r6, %r8;\nld.shared::cluster.u32 %r10, [%r9];\n"
              "cvt.u64.u32 %rd5, %r6;\ncvta.shared.u64 %rd4, %rd5;\n"
              "mapa.u64 %rd6, %rd4, %r8;\nld.u32 %r11, [%rd6];\natom.add.u32 %r12, [%rd6], 500;\n"
              "getctarank.u64 %r13, %rd6;\ngetctarank.shared::cluster.u32 %r14, %r6;\n" +
              kSync +
              "ld.shared.u32 %r15, [%r6];\nisspacep.shared::cta %p1, %rd6;\n"
              "isspacep.shared::cluster %p2, %rd6;\nisspacep.shared %p3, %rd4;\n"
              "selp.u32 %r16, 1, 0, %p1;\nselp.u32 %r17, 2, 0, %p2;\nselp.u32 %r18, 4, 0, %p3;\n"
              "add.u32 %r16, %r16, %r17;\nadd.u32 %r16, %r16, %r18;\n"
              // all of it in one word: the two loads agree, the atomic came, the ranks are right
              "sub.u32 %r19, %r10, %r11;\nmul.lo.u32 %r19, %r19, 1000000;\nadd.u32 %r19, %r19, %r10;\n"
              "mad.lo.u32 %r19, %r13, 10000, %r19;\nmad.lo.u32 %r19, %r14, 100000, %r19;\n"
              "sub.u32 %r20, %r15, %r5;\nadd.u32 %r19, %r19, %r20;\n"
              "mad.lo.u32 %r19, %r16, 10000000, %r19;\nst.global.u32 [%rd3], %r19;\n",
          {8}, {4}, 64, ".shared .align 4 .b8 box[256];\n");
  ASSERT_TRUE(result.ok()) << result.message;
  for (uint32_t i = 0; i < 8 * 64; ++i) {
    const uint32_t block = i / 64, rank = block % 4, next = (rank + 1) % 4;
    const uint32_t taken = (block - rank + next) * 64 + i % 64;
    ASSERT_EQ(60000000 + rank * 100000 + next * 10000 + taken + 500, out_[i]) << i;
  }
}

TEST_F(Clusters, CooperativeToo) {
  device_.options.cooperative = true;
  device_.options.host_threads = 2;
  const auto result = Run(std::string(kPlaces) + "st.shared.u32 [box], %r3;\n" + kSync +
                              "mapa.shared::cluster.u32 %r9, box, 1;\nld.shared::cluster.u32 %r10, [%r9];\n" +
                              "st.global.u32 [%rd3], %r10;\n" + kSync,
                          {8}, {2}, 1, ".shared .u32 box;\n");
  ASSERT_TRUE(result.ok()) << result.message;
  for (uint32_t i = 0; i < 8; ++i) EXPECT_EQ(i | 1, out_[i]);
}

// Whoever has ended is not waited for, whether it had arrived or not; and whoever had arrived does not stand for
// others.
TEST_F(Clusters, TheBarrierDoesNotWaitForThoseWhoHaveEnded) {
  const auto result = Run(std::string(kPlaces) +
                              "mapa.shared::cluster.u32 %r9, box, 0;\nsetp.eq.u32 %p1, %r1, 5;\n@%p1 ret;\n"
                              "setp.ne.u32 %p2, %r1, 6;\n@%p2 bra on;\nbarrier.cluster.arrive;\nret;\non:\n"
                              // the last one comes late, with what all wait for
                              "setp.ne.u32 %p3, %r5, 79;\n@%p3 bra there;\nmov.u32 %r6, 30000;\n"
                              "again: sub.u32 %r6, %r6, 1;\nsetp.ne.u32 %p4, %r6, 0;\n@%p4 bra again;\n"
                              "st.shared::cluster.u32 [%r9], 7;\nthere:\n" +
                              kSync + "ld.shared::cluster.u32 %r7, [%r9];\nst.global.u32 [%rd3], %r7;\n" + kSync,
                          {2}, {2}, 40, ".shared .u32 box;\n");
  ASSERT_TRUE(result.ok()) << result.message;
  for (uint32_t i = 0; i < 80; ++i) EXPECT_EQ(i % 40 == 5 || i % 40 == 6 ? 0u : 7u, out_[i]) << i;
}

TEST_F(Clusters, WrongUseIsAFault) {
  const struct {
    const char* body;
    Fault fault;
    const char* message;
  } kCases[] = {
      {"barrier.cluster.wait;", Fault::kInvalidCode, "without having arrived"},
      {"barrier.cluster.arrive;\nbarrier.cluster.arrive;", Fault::kInvalidCode, "again without waiting"},
      {"mapa.shared::cluster.u32 %r1, 0, 2;", Fault::kInvalidCode, "no block of this rank"},
      {"mapa.u64 %rd3, %rd1, 0;", Fault::kIllegalAddress, "not in shared memory"},
      {"mapa.shared::cluster.u32 %r1, box, 1;\nld.shared::cluster.u32 %r2, [%r1+4096];", Fault::kIllegalAddress,
       "illegal shared access"},
      {"mapa.shared::cluster.u32 %r1, box, 1;\nld.shared::cluster.u32 %r2, [%r1+2];", Fault::kMisaligned,
       "misaligned shared access"},
      {"mov.u32 %r3, %cluster_ctarank;\nsetp.eq.u32 %p1, %r3, 0;\n@%p1 ret;\nmapa.shared::cluster.u32 %r1, box, 0;\n"
       "ld.shared::cluster.u32 %r2, [%r1];",
       Fault::kIllegalAddress, "a block that has ended"},
      {"mov.u32 %r3, %cluster_ctarank;\nsetp.eq.u32 %p1, %r3, 0;\n@%p1 bra on;\nbarrier.sync 1, 64;\non:\n"
       "barrier.cluster.arrive;\nbarrier.cluster.wait;",
       Fault::kDeadlock, "the barrier of the cluster"},
  };
  for (const auto& c : kCases) {
    const auto result = Run(c.body, {2}, {2}, 1, ".shared .align 8 .b8 box[8];\n");
    EXPECT_EQ(c.fault, result.fault) << c.body;
    EXPECT_NE(std::string::npos, result.message.find(c.message)) << c.body << ": " << result.message;
  }
}

TEST_F(Clusters, Sizes) {
  EXPECT_EQ(Fault::kInvalidLaunch, Run("ret;", {3}, {2}, 1).fault);
  EXPECT_EQ(Fault::kInvalidLaunch, Run("ret;", {32}, {32}, 1).fault);
  EXPECT_EQ(Fault::kInvalidLaunch, Run("ret;", {4}, {0}, 1).fault);
  EXPECT_TRUE(Run("ret;", {16}, {16}, 1).ok());
  ASSERT_TRUE(
      device_.Load(".version 8.5\n.target sm_90\n.address_size 64\n.visible .entry pairs()\n.explicitcluster\n"
                   ".reqnctapercluster 2, 1, 1\n{\nret;\n}\n"));
  const KernelInfo* info = device_.module().FindKernel("pairs");
  EXPECT_TRUE(info->needs_cluster);
  EXPECT_EQ(2u, info->required_cluster[0]);
  device_.options.cluster = {4};
  EXPECT_EQ(Fault::kInvalidLaunch, device_.Run("pairs", {4}, {1}).fault);
  device_.options.cluster = {2};
  EXPECT_TRUE(device_.Run("pairs", {4}, {1}).ok());
}

// A copy to blocks 0 and 2 of four, whose barriers learn of it; the others get nothing.
TEST_F(Clusters, Multicast) {
  const auto result = Run(std::string(kPlaces) +
                              "mov.u32 %r6, box;\nmbarrier.init.shared.b64 [bar], 1;\n"
                              "mbarrier.arrive.expect_tx.shared.b64 _, [bar], 32;\n" +
                              kSync +
                              "setp.ne.u32 %p1, %r2, 3;\n@%p1 bra sent;\n"
                              "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                              "[%r6], [%rd2+16], 32, [bar], 5;\nsent:\n" +
                              kSync +
                              "mbarrier.test_wait.parity.shared.b64 %p2, [bar], 0;\nselp.u32 %r7, 1, 0, %p2;\n"
                              "ld.shared.u32 %r8, [box+28];\nmad.lo.u32 %r7, %r7, 10000, %r8;\n"
                              "st.global.u32 [%rd3], %r7;\n",
                          {4}, {4}, 1, ".shared .align 16 .b8 box[32];\n.shared .align 8 .b64 bar;\n");
  ASSERT_TRUE(result.ok()) << result.message;
  EXPECT_EQ(11011u, out_[0]);
  EXPECT_EQ(0u, out_[1]);
  EXPECT_EQ(11011u, out_[2]);
  EXPECT_EQ(0u, out_[3]);
}

// Stores and additions that tell the other block's barrier, a copy between blocks, and an arrival from afar.
TEST_F(Clusters, SentToAnotherBlock) {
  const auto result = Run(
      std::string(kPlaces) +
          "mov.u32 %r6, box;\nmov.u32 %r7, bar;\nmbarrier.init.shared.b64 [bar], 2;\n"
          "mbarrier.arrive.expect_tx.shared.b64 _, [bar], 44;\nst.shared.v4.u32 [from], {%r3, 5, 6, 7};\n" +
          kSync +
          "xor.b32 %r8, %r2, 1;\nmapa.shared::cluster.u32 %r9, %r6, %r8;\nmapa.shared::cluster.u32 %r10, %r7, %r8;\n"
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%r9+16], {%r3, 40}, [%r10];\n"
          "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u64 [%r9+24], 50, [%r10];\n"
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r9+32], 3, [%r10];\n"
          "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u64 [%r9+24], 8, [%r10];\n"
          "mov.u32 %r11, from;\n"
          "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r9], [%r11], 16, [%r10];\n"
          "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r10];\n"
          "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [bar], 0;\n@!%p2 bra again;\n"
          "ld.shared.u32 %r13, [box];\nld.shared.u32 %r14, [box+12];\nld.shared.u32 %r15, [box+16];\n"
          "ld.shared.u32 %r16, [box+20];\nld.shared.u32 %r17, [box+24];\nld.shared.u32 %r18, [box+32];\n"
          "mad.lo.u32 %r19, %r13, 10, %r14;\nmad.lo.u32 %r19, %r15, 100, %r19;\nadd.u32 %r19, %r19, %r16;\n"
          "add.u32 %r19, %r19, %r17;\nadd.u32 %r19, %r19, %r18;\n"
          "st.global.u32 [%rd3], %r19;\n" +
          kSync,
      {2}, {2}, 1, ".shared .align 16 .b8 box[48];\n.shared .align 16 .b8 from[16];\n.shared .align 8 .b64 bar;\n");
  ASSERT_TRUE(result.ok()) << result.message;
  EXPECT_EQ(10u + 7 + 100 + 40 + 58 + 3, out_[0]);
  EXPECT_EQ(0u + 7 + 0 + 40 + 58 + 3, out_[1]);
}

TEST_F(Clusters, DependenciesOfGrids) {
  const auto result =
      Run("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;\nst.global.u32 [%rd1], 3;\n", {1}, {1}, 1);
  ASSERT_TRUE(result.ok()) << result.message;
  EXPECT_EQ(3u, out_[0]);
}

}  // namespace
}  // namespace cuda_remote::softgpu::ptx
