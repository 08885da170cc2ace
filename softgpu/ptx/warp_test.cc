// SPDX-License-Identifier: Apache-2.0
// Operations of a warp by threads that are not in the member mask that they give. CUDA leaves open what happens; an
// H100 (driver 580.159.04) gave what is expected here.
#include <functional>

#include "softgpu/ptx/test_device.h"

namespace cuda_remote::softgpu::ptx {
namespace {

constexpr Fault kIllegal = Fault::kIllegalInstruction;

class OutsideOfTheMask : public ::testing::Test {
 protected:
  // Runs `code`, which leaves a result in %r9 of each thread; %r1 is the lane, %r2 is lane % 2, and %p1 holds for the
  // lower half. Threads that get nowhere keep 0xdead.
  LaunchResult Run(const std::string& code) {
    const std::string head =
        "mov.u32 %r1, %tid.x;\nand.b32 %r2, %r1, 1;\nsetp.lt.u32 %p1, %r1, 16;\nsetp.ne.u32 %p2, %r2, 0;\n"
        "mul.wide.u32 %rd3, %r1, 4;\nadd.u64 %rd4, %rd1, %rd3;\nmov.u32 %r9, 0xdead;\n";
    EXPECT_TRUE(device_.Load(Kernel(head + code + "\nend:\nst.global.u32 [%rd4], %r9;")));
    out_ = device_.Array<uint32_t>(32);
    return device_.Run("test", {1}, {32}, uint64_t(out_), uint64_t{0});
  }
  void Expect(const std::string& code, const std::function<uint32_t(uint32_t)>& wanted) {
    const LaunchResult result = Run(code);
    ASSERT_TRUE(result.ok()) << result.message;
    for (uint32_t lane = 0; lane < 32; ++lane) EXPECT_EQ(wanted(lane), out_[lane]) << code << " lane " << lane;
  }
  TestDevice device_;
  uint32_t* out_ = nullptr;
};

TEST_F(OutsideOfTheMask, TakesPartWhereTheWarpIsTogether) {
  Expect("vote.sync.ballot.b32 %r9, %p2, 0xffff;", [](uint32_t) { return 0xaaaaaaaa; });
  Expect("vote.sync.ballot.b32 %r9, %p2, 0xffff0000;", [](uint32_t) { return 0xaaaaaaaa; });
  Expect("mul.lo.u32 %r3, %r1, 3;\nadd.u32 %r3, %r3, 1;\nshfl.sync.idx.b32 %r9, %r3, 20, 31, 0xffff;",
         [](uint32_t) { return 61u; });
  Expect("shr.u32 %r3, %r1, 2;\nmatch.any.sync.b32 %r9, %r3, 0xffff;",
         [](uint32_t lane) { return 0xfu << lane / 4 * 4; });
  Expect("redux.sync.add.u32 %r9, %r1, 0xffff;", [](uint32_t) { return 496u; });
  Expect("bar.warp.sync 0xffff;\nmov.u32 %r9, 5;", [](uint32_t) { return 5u; });
}

TEST_F(OutsideOfTheMask, HalvesWithTheirOwnMasks) {
  Expect("selp.b32 %r3, 0xffff, 0xffff0000, %p1;\nredux.sync.add.u32 %r9, %r1, %r3;",
         [](uint32_t lane) { return lane < 16 ? 120u : 376u; });
  Expect("selp.b32 %r3, 0xffff, 0xffffffff, %p1;\nvote.sync.ballot.b32 %r9, %p2, %r3;",
         [](uint32_t lane) { return lane < 16 ? 0xaaaau : 0xaaaa0000u; });
  // The other half's values are there.
  Expect("selp.b32 %r3, 0xffff, 0xffff0000, %p1;\nshfl.sync.idx.b32 %r9, %r1, 18, 31, %r3;",
         [](uint32_t) { return 18u; });
}

TEST_F(OutsideOfTheMask, WithoutAThreadOfTheMaskIsIllegal) {
  for (const char* code :
       {"@%p1 bra end;\nvote.sync.ballot.b32 %r9, %p2, 0xffff;",
        "@%p1 bra end;\nshfl.sync.idx.b32 %r9, %r1, 0, 31, 0xffff;",
        // Other threads are at another instruction.
        "@%p1 bra low;\nvote.sync.ballot.b32 %r9, %p2, 0xffff;\nbra end;\nlow: vote.sync.ballot.b32 %r9, %p2, 0xffff;",
        // Everybody names somebody else alone.
        "add.u32 %r3, %r1, 1;\nand.b32 %r3, %r3, 31;\nmov.u32 %r4, 1;\nshl.b32 %r4, %r4, %r3;\n"
        "vote.sync.ballot.b32 %r9, %p2, %r4;"}) {
    const LaunchResult result = Run(code);
    EXPECT_EQ(result.fault, kIllegal) << code;
    EXPECT_NE(result.message.find("not in the member mask"), std::string::npos) << result.message;
  }
}

TEST_F(OutsideOfTheMask, ThreadsThatHaveEndedAreNotWaitedFor) {
  Expect("setp.ge.u32 %p3, %r1, 8;\n@%p3 bra end;\nsetp.eq.u32 %p4, %r1, %r1;\nvote.sync.ballot.b32 %r9, %p4, 0xffff;",
         [](uint32_t lane) { return lane < 8 ? 0xffu : 0xdeadu; });
}

// Threads in the mask do not wait for others that never come by.
TEST_F(OutsideOfTheMask, OthersThatSpinDoNotHoldUp) {
  Expect(
      "@%p1 bra meet;\nwait: ld.volatile.global.u32 %r3, [%rd1];\nsetp.ne.u32 %p3, %r3, 0xffff;\n@%p3 bra wait;\n"
      "mov.u32 %r9, 1;\nbra end;\nmeet: setp.eq.u32 %p4, %r1, %r1;\nvote.sync.ballot.b32 %r9, %p4, 0xffff;",
      [](uint32_t lane) { return lane < 16 ? 0xffffu : 1u; });
}

}  // namespace
}  // namespace cuda_remote::softgpu::ptx
