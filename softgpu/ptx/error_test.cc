// SPDX-License-Identifier: Apache-2.0
// What is refused, and how it is said.
#include "softgpu/ptx/test_device.h"

namespace cuda_remote::softgpu::ptx {
namespace {

std::string CheckError(const std::string& body, const std::string& before = "") {
  TestDevice device;
  if (!device.Load(Kernel(body, before))) return "not loaded";
  return device.module().Check("test").message();
}

TEST(Errors, UnknownInstructionsAreNamedWithTheirLine) {
  const std::string error = CheckError("wgmma.fence.sync.aligned;");
  EXPECT_NE(std::string::npos, error.find("kernel test: line 15: instruction 'wgmma' is not supported: "
                                          "wgmma.fence.sync.aligned;"))
      << error;
}

TEST(Errors, UnsupportedForms) {
  for (const char* body :
       {"add.frobnicate.f32 %f1, %f2, %f3;", "shfl.down.b32 %r1, %r2, 1, 31;", "ld.global.u32.sometimes %r1, [%rd1];",
        "barrier.cluster.leave;", "add.u32 %r1, %r2;", "cvt.rn.f32.f8 %f1, %h1;", "mov.u32 %r1, %nosuch;",
        "bra nowhere;", "call nothing, ();", "setp.approximately.u32 %p1, %r1, %r2;", "mov.b64 {%r1, %r2, %r3}, %rd1;",
        "tex.2d.v4.f16x2.s32 {%r1,%r2,%r3,%r4}, [%rd1, {%r1, %r2}];", "mov.u64 %rd1, undefined_name;",
        "ld.global.v2.u32 %r1, [%rd1];", "st.param.u32 [out], %r1;", "ld.param.u32 %r1, [in+64];",
        "lop3.b32 %r1, %r2, %r3, %r4, %r5;", "add.u32 5, %r1, %r2;"}) {
    const std::string error = CheckError(body);
    EXPECT_NE(std::string::npos, error.find("line 15")) << body << " -> " << error;
    EXPECT_NE(std::string::npos, error.find(std::string(body).substr(0, 12))) << body << " -> " << error;
  }
}

TEST(Errors, UnsupportedCodeOfACalledFunction) {
  const std::string error = CheckError("call helper, ();", ".func helper()\n{\nwgmma.fence.sync.aligned;\nret;\n}\n");
  EXPECT_NE(std::string::npos, error.find("function helper: line 6")) << error;
}

TEST(Errors, UnsupportedCodeBehindAPointerFailsWhenCalled) {
  const std::string helper = ".func helper()\n{\nwgmma.fence.sync.aligned;\nret;\n}\n";
  const std::string call =
      "setp.eq.u64 %p1, %rd2, 0;\n@%p1 bra end;\nmov.u64 %rd3, helper;\n"
      "proto: .callprototype _ ();\n"
      "call %rd3, (), proto;\nend:";
  TestDevice device;
  ASSERT_TRUE(device.Load(Kernel(call, helper)));
  EXPECT_EQ(device.module().Check("test").message(), "");
  EXPECT_TRUE(device.Run("test", {1}, {1}, uint64_t{0}, uint64_t{0}).ok());
  EXPECT_EQ(Fault::kUnsupported, device.Run("test", {1}, {1}, uint64_t{0}, uint64_t{1}).fault);
}

TEST(Errors, CallOfNoFunction) {
  TestDevice device;
  ASSERT_TRUE(device.Load(Kernel("proto: .callprototype _ ();\ncall %rd2, (), proto;")));
  EXPECT_EQ(Fault::kInvalidCode, device.Run("test", {1}, {1}, uint64_t{0}, uint64_t{64}).fault);
}

TEST(Errors, RunningPastTheEnd) {
  TestDevice device;
  ASSERT_TRUE(
      device.Load(".version 8.0\n.target sm_80\n.address_size 64\n.entry test()\n{\n.reg .b32 %r;\n"
                  "mov.u32 %r, 1;\n}\n"));
  const auto result = device.Run("test", {1}, {1});
  EXPECT_TRUE(result.ok() || result.fault == Fault::kInvalidCode);
}

TEST(Errors, LaunchesOutOfRange) {
  TestDevice device;
  ASSERT_TRUE(
      device.Load(".version 8.0\n.target sm_80\n.address_size 64\n"
                  ".entry test(.param .u32 n) .reqntid 32, 2, 1\n{\nret;\n}\n"));
  EXPECT_TRUE(device.Run("test", {1}, {32, 2}, 5).ok());
  EXPECT_EQ(Fault::kInvalidLaunch, device.Run("test", {1}, {64, 1}, 5).fault);
  EXPECT_EQ(Fault::kInvalidLaunch, device.Run("test", {0}, {32, 2}, 5).fault);
  EXPECT_EQ(Fault::kInvalidLaunch, device.Run("test", {1, 70000}, {32, 2}, 5).fault);
  LaunchOptions options;
  options.block = {32, 2, 1};
  EXPECT_EQ(Fault::kInvalidLaunch, device.module().Launch("test", options).fault);  // no parameters
  EXPECT_EQ(Fault::kInvalidLaunch, device.module().Launch("other", options).fault);
}

TEST(Errors, InvalidBarriersAndMasks) {
  const std::pair<const char*, Fault> cases[] = {
      {"mov.u32 %r1, 16;\nbar.sync %r1;", Fault::kInvalidCode},
      {"bar.sync 1, 33;", Fault::kInvalidCode},
      {"vote.sync.any.pred %p1, %p2, 2;", Fault::kIllegalInstruction}};  // as an H100 says it; see warp_test
  for (const auto& [body, fault] : cases) {
    TestDevice device;
    ASSERT_TRUE(device.Load(Kernel(body)));
    EXPECT_EQ(fault, device.Run("test", {1}, {1}, uint64_t{0}, uint64_t{0}).fault) << body;
  }
}

TEST(Errors, BindNeedsEveryVariable) {
  auto module = Module::Parse(".version 8.0\n.target sm_80\n.address_size 64\n.global .u32 x;\n");
  ASSERT_TRUE(module.ok()) << module.status().message();
  EXPECT_EQ("variable 'x' has no address", (*module)->Bind({}).message());
}

}  // namespace
}  // namespace cuda_remote::softgpu::ptx
