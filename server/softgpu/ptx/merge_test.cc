// SPDX-License-Identifier: Apache-2.0
#include "server/softgpu/ptx/merge.h"

#include <gtest/gtest.h>

#include "server/softgpu/ptx/ptx.h"

namespace cuda_remote::softgpu::ptx {
namespace {

constexpr char kUser[] =
    "//\n// Generated\n//\n\n.version 7.0\n.target sm_52\n.address_size 64\n"
    ".extern .func (.param .b32 r) helper(.param .b32 a);\n.extern .global .align 4 .u32 there;\n"
    ".extern .shared .align 16 .b8 dynamic[];\n"
    ".extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);\n"
    ".global .align 4 .u32 own = 1;\n.global .align 4 .u32 list[2] = {1, 2};\n"
    ".visible .entry user(.param .u64 p)\n{\n.reg .b32 %r<4>;\n{ .param .b32 x; .param .b32 y; ld.global.u32 %r1, "
    "[own];\n"
    "st.param.b32 [x], %r1; call.uni (y), helper, (x); ld.param.b32 %r2, [y]; }\nret;\n}\n"
    ".section .debug_str\n{\n.b8 104,0\n}\n";
constexpr char kHelper[] =
    ".version 8.2\n.target sm_75, debug\n.address_size 64\n.visible .global .align 4 .u32 there = 9;\n"
    ".global .align 4 .u32 own = 2;\n.visible .func (.param .b32 r) helper(.param .b32 a)\n{\n.reg .b32 %r<4>;\n"
    "ld.param.b32 %r1, [a];\nld.global.u32 %r2, [own];\nadd.s32 %r3, %r1, %r2;\nst.param.b32 [r], %r3;\nret;\n}\n";

std::unique_ptr<Module> Link(const std::vector<std::string>& texts, std::string* error) {
  std::string merged;
  if (!Merge(texts, &merged, error)) return nullptr;
  return Module::Parse(merged, error);
}

const GlobalInfo* Find(const Module& module, const std::string& name) {
  for (const GlobalInfo& global : module.globals()) {
    if (global.name == name) return &global;
  }
  return nullptr;
}

TEST(Merge, EitherOrder) {
  for (const auto& texts : {std::vector<std::string>{kUser, kHelper}, {kHelper, kUser}}) {
    std::string error;
    auto module = Link(texts, &error);
    ASSERT_TRUE(module) << error;
    EXPECT_EQ(module->version_major(), 8);
    EXPECT_EQ(module->version_minor(), 2);
    EXPECT_EQ(module->target(), 75);
    ASSERT_TRUE(Find(*module, "there"));
    EXPECT_FALSE(Find(*module, "there")->external);
    // Both texts' own variable is there, under two names.
    ASSERT_TRUE(Find(*module, "own"));
    ASSERT_TRUE(Find(*module, "own$unit1"));
    EXPECT_NE(Find(*module, "own")->initial[0], Find(*module, "own$unit1")->initial[0]);
    EXPECT_TRUE(module->FindKernel("user"));
  }
}

TEST(Merge, NamesWhatIsMissing) {
  std::string error;
  EXPECT_FALSE(Link({kUser}, &error));
  EXPECT_NE(error.find("undefined reference"), std::string::npos) << error;
}

TEST(Merge, TwiceIsAnError) {
  std::string error;
  EXPECT_FALSE(Link({kHelper, kHelper}, &error));
  EXPECT_NE(error.find("twice"), std::string::npos) << error;
}

TEST(Merge, AnyText) {
  std::string merged, error;
  for (const char* text :
       {"", "{", "}}}}", ".version", ".target sm_", "(((", ".extern .func", "\"", ".version 7.0\n{{{ \x01"}) {
    Merge({text, kHelper, text}, &merged, &error);
  }
}

}  // namespace
}  // namespace cuda_remote::softgpu::ptx
