// SPDX-License-Identifier: Apache-2.0
// Parsing: what a module says about itself, and texts that are wrong.
#include "softgpu/ptx/test_device.h"

namespace cuda_remote::softgpu::ptx {
namespace {

const char kHead[] = ".version 8.7\n.target sm_90a, debug\n.address_size 64\n";

// Null, and the test fails, if that fails.
std::unique_ptr<Module> Parse(const std::string& body) {
  auto module = Module::Parse(kHead + body);
  EXPECT_TRUE(module.ok()) << module.status().message();
  return module.ok() ? *std::move(module) : nullptr;
}

// Why that fails; empty if it does not.
std::string Refusal(const std::string& body) { return Module::Parse(kHead + body).status().message(); }

TEST(Parser, ModuleFacts) {
  auto module = Parse(
      "/* comment */ // another\n"
      ".visible .global .align 16 .b8 buffer[100];\n.extern .global .u32 elsewhere;\n"
      ".visible .const .f32 pi = 0f40490FDB;\n"
      ".global .attribute(.managed) .u32 shared_with_host;\n.weak .global .u64 w[3] = {1, 2};\n"
      ".visible .entry k(.param .u8 a, .param .f64 b, .param .align 16 .b8 c[20]) .maxntid 128, 2, 1 "
      ".minnctapersm 2\n{\n"
      ".shared .align 4 .b8 s[10];\n.local .align 8 .b8 l[24];\n.reg .b32 %r<10>;\nret;\n}\n");
  ASSERT_NE(nullptr, module);
  EXPECT_EQ(8, module->version_major());
  EXPECT_EQ(7, module->version_minor());
  EXPECT_EQ(90, module->target());
  ASSERT_EQ(1u, module->kernels().size());
  const KernelInfo& kernel = module->kernels()[0];
  EXPECT_EQ("k", kernel.name);
  ASSERT_EQ(3u, kernel.params.size());
  EXPECT_EQ(8u, kernel.params[1].offset);
  EXPECT_EQ(16u, kernel.params[2].offset);
  EXPECT_EQ(36u, kernel.param_bytes);
  EXPECT_EQ(10u, kernel.static_shared_bytes);
  EXPECT_EQ(24u, kernel.local_bytes);
  EXPECT_EQ(256u, kernel.max_threads);
  ASSERT_EQ(5u, module->globals().size());
  EXPECT_EQ(100u, module->globals()[0].size);
  EXPECT_EQ(16u, module->globals()[0].align);
  EXPECT_TRUE(module->globals()[0].visible);
  EXPECT_TRUE(module->globals()[1].external);
  EXPECT_EQ(Space::kConst, module->globals()[2].space);
  EXPECT_TRUE(module->globals()[3].managed);
  EXPECT_EQ(24u, module->globals()[4].size);
  EXPECT_EQ(16u, module->globals()[4].initial.size());
}

TEST(Parser, SharedMemoryOfCalledFunctionsCounts) {
  auto module = Parse(
      ".shared .align 8 .b8 of_module[64];\n.extern .shared .align 16 .b8 dynamic[];\n"
      ".func f()\n{\n.shared .align 4 .b32 own[4];\n.reg .b64 %rd<2>;\nmov.u64 %rd1, of_module;\nret;\n}\n"
      ".entry user()\n{\ncall f, ();\nret;\n}\n.entry other()\n{\n.reg .b64 %rd<2>;\nmov.u64 %rd1, "
      "dynamic;\nret;\n}\n");
  ASSERT_NE(nullptr, module);
  EXPECT_EQ(80u, module->FindKernel("user")->static_shared_bytes);
  EXPECT_EQ(0u, module->FindKernel("other")->static_shared_bytes);
}

TEST(Parser, ErrorsNameTheLine) {
  const struct {
    const char* body;
    const char* text;
  } cases[] = {
      {".entry k()\n{\nmov.u32 %r1 5;\n}\n", "line 6: "},
      {".entry k()\n{\nret\n}\n", "line 7: "},
      {".global .u33 x;\n", "line 4: unknown type .u33: .global .u33 x;"},
      {".global .align 3 .u32 x;\n", "power of two"},
      {".entry k()\n{\n.reg .b32 %r<9999999999>;\n}\n", "line 6"},
      {".entry k()\n{\n", "before the end"},
      {".entry k()\n{\nx: ret;\nx: ret;\n}\n", "declared twice"},
      {".entry k() { ret; }\n.entry k() { ret; }\n", "defined twice"},
      {".global .u32 x[4] = {1,2,3,4,5};\n", "longer than the variable"},
      {".global .b8 x[99999999999][99999999999];\n", "too large"},
      {"frobnicate\n", "directive expected"},
      {".entry k()\n{\n@%p1 ret;\n}\n", "predicate expected"},
      {"\x01\x02", "unexpected text"},
  };
  for (const auto& c : cases) {
    const std::string error = Refusal(c.body);
    EXPECT_NE(std::string::npos, error.find(c.text)) << c.body << " -> " << error;
  }
  EXPECT_FALSE(Module::Parse("").ok());
  EXPECT_FALSE(Module::Parse("hello").ok());
}

TEST(Parser, HostileDepth) {
  EXPECT_NE("", Refusal(".entry k()\n{\n" + std::string(100000, '{')));
  EXPECT_NE("", Refusal(".entry k()\n{\nmov.u32 " + std::string(100000, '[')));
  EXPECT_NE("", Refusal(".global .u32 x[1] = " + std::string(100000, '{')));
  EXPECT_NE("", Refusal(".global .u64 x = " + std::string(10001, '-') + "y;\n"));
}

TEST(Parser, DebugSectionsAndOldLinesAreSkipped) {
  auto module = Parse(
      ".file 1 \"a.cu\"\n.entry k()\n{\n.loc 1 2 3\n.pragma \"nounroll\";\nret;\n}\n.section .debug_str\n{\n"
      "$L__info_string0:\n.b8 115\n.b8 0\n}\n@@DWARF .byte 0x12, 'a'\n");
  EXPECT_NE(nullptr, module);
}

TEST(Parser, LinkedModules) {
  auto library = Parse(
      ".visible .func (.param .b32 r) add_one(.param .b32 a)\n{\n.reg .b32 %r<2>;\n"
      "ld.param.b32 %r1, [a];\n"
      "add.u32 %r1, %r1, 1;\nst.param.b32 [r], %r1;\nret;\n}\n");
  ASSERT_NE(nullptr, library);
  auto module = Parse(
      ".extern .func (.param .b32 r) add_one(.param .b32 a);\n.entry k()\n{\n"
      ".param .b32 p; .param .b32 q;\n"
      "call (q), add_one, (p);\nret;\n}\n");
  ASSERT_NE(nullptr, module);
  module->LinkWith({library.get(), module.get()});
  EXPECT_EQ("", module->Check("k").message());
}

}  // namespace
}  // namespace cuda_remote::softgpu::ptx
