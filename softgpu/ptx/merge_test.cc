// SPDX-License-Identifier: Apache-2.0
#include "softgpu/ptx/merge.h"

#include <gtest/gtest.h>

#include "proto/base/status_macros.h"
#include "softgpu/ptx/ptx.h"

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

StatusOr<std::unique_ptr<Module>> Link(const std::vector<std::string>& texts) {
  CR_ASSIGN_OR_RETURN(const std::string merged, Merge(texts));
  return Module::Parse(merged);
}

const GlobalInfo* Find(const Module& module, const std::string& name) {
  for (const GlobalInfo& global : module.globals()) {
    if (global.name == name) return &global;
  }
  return nullptr;
}

TEST(Merge, EitherOrder) {
  for (const auto& texts : {std::vector<std::string>{kUser, kHelper}, {kHelper, kUser}}) {
    auto linked = Link(texts);
    ASSERT_TRUE(linked.ok()) << linked.status().message();
    const std::unique_ptr<Module> module = *std::move(linked);
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

TEST(Merge, NamesWhatIsMissing) { EXPECT_EQ(Link({kUser}).status().message(), "undefined reference to 'helper'"); }

TEST(Merge, TwiceIsAnError) {
  const std::string why = Link({kHelper, kHelper}).status().message();
  EXPECT_NE(why.find("twice"), std::string::npos) << why;
}

TEST(Merge, AnyText) {
  for (const char* text :
       {"", "{", "}}}}", ".version", ".target sm_", "(((", ".extern .func", "\"", ".version 7.0\n{{{ \x01"}) {
    const StatusOr<std::string> merged = Merge({text, kHelper, text});
    EXPECT_TRUE(merged.ok() ? !merged->empty() : !merged.status().message().empty()) << text;
  }
}

}  // namespace
}  // namespace cuda_remote::softgpu::ptx
