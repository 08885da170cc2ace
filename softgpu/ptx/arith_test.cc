// SPDX-License-Identifier: Apache-2.0
// Instructions by themselves: what nvcc seldom emits, and the corner cases.
#include <cmath>

#include "softgpu/ptx/test_device.h"

namespace cuda_remote::softgpu::ptx {
namespace {

// Runs one instruction sequence in one thread; r1.. hold `in` before, `result` (a register) is stored after.
uint64_t Eval(const std::string& body, const std::vector<uint64_t>& in, const std::string& result) {
  TestDevice device;
  std::string loads;
  for (size_t i = 0; i < in.size(); ++i) {
    const std::string at = "[%rd2+" + std::to_string(8 * i) + "];\n", n = std::to_string(10 + i);
    loads += "ld.global.b64 %rd" + n + ", " + at + "ld.global.b32 %r" + n + ", " + at;
    loads +=
        "ld.global.b16 %h" + n + ", " + at + "ld.global.f32 %f" + n + ", " + at + "ld.global.f64 %fd" + n + ", " + at;
  }
  const char* type = result.compare(0, 3, "%rd") == 0   ? "b64"
                     : result.compare(0, 3, "%fd") == 0 ? "f64"
                     : result[1] == 'h'                 ? "b16"
                     : result[1] == 'f'                 ? "f32"
                                                        : "b32";
  std::string store = std::string("st.global.") + type + " [%rd1], " + result + ";\n";
  if (result[1] == 'p') store = "selp.b32 %r1, 1, 0, " + result + ";\nst.global.b32 [%rd1], %r1;\n";
  if (!device.Load(Kernel(loads + body + "\n" + store))) return 0xbad;
  auto* out = device.Array<uint64_t>(4);
  auto* values = device.Array<uint64_t>(in.size() + 1);
  std::copy(in.begin(), in.end(), values);
  const auto run = device.Run("test", {1}, {1}, out, values);
  EXPECT_TRUE(run.ok()) << run.message;
  return out[0];
}

uint64_t Bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}
uint64_t Bits(double d) {
  uint64_t bits;
  std::memcpy(&bits, &d, 8);
  return bits;
}

TEST(Arith, SaturatingIntegers) {
  EXPECT_EQ(0x7fffffffu, Eval("add.sat.s32 %r1, %r10, %r11;", {0x7ffffff0, 100}, "%r1"));
  EXPECT_EQ(0x80000000u, Eval("sub.sat.s32 %r1, %r10, %r11;", {0x80000005, 100}, "%r1"));
  EXPECT_EQ(0x7fffffffu, Eval("mad.hi.sat.s32 %r1, %r10, %r11, %r12;", {0x7fffffff, 0x7fffffff, 0x7fffffff}, "%r1"));
}

TEST(Arith, DivisionByZeroAndOverflow) {
  EXPECT_EQ(0xffffffffu, Eval("div.u32 %r1, %r10, %r11;", {7, 0}, "%r1"));
  EXPECT_EQ(7u, Eval("rem.u32 %r1, %r10, %r11;", {7, 0}, "%r1"));
  EXPECT_EQ(0x80000000u, Eval("div.s32 %r1, %r10, %r11;", {0x80000000, 0xffffffff}, "%r1"));
  EXPECT_EQ(0u, Eval("rem.s64 %rd3, %rd10, %rd11;", {uint64_t{1} << 63, ~uint64_t{0}}, "%rd3"));
}

TEST(Arith, Carry) {
  const std::string add = "add.cc.u32 %r1, %r10, %r11;\naddc.cc.u32 %r2, 0, 0;\naddc.u32 %r3, 7, 0;\n";
  EXPECT_EQ(1u, Eval(add, {0xffffffff, 1}, "%r2"));
  EXPECT_EQ(7u, Eval(add, {0xffffffff, 1}, "%r3"));
  EXPECT_EQ(0u, Eval(add, {0xfffffffe, 1}, "%r2"));
  EXPECT_EQ(0xffffffffu, Eval("sub.cc.u32 %r1, %r10, %r11;\nsubc.u32 %r2, 0, 0;", {1, 2}, "%r2"));
  EXPECT_EQ(0u, Eval("sub.cc.u32 %r1, %r10, %r11;\nsubc.u32 %r2, 0, 0;", {2, 2}, "%r2"));
  // The flag itself: set when nothing was borrowed.
  EXPECT_EQ(0u, Eval("sub.cc.u32 %r1, %r10, %r11;\naddc.u32 %r2, 0, 0;", {1, 2}, "%r2"));
  EXPECT_EQ(1u, Eval("sub.cc.u32 %r1, %r10, %r11;\naddc.u32 %r2, 0, 0;", {2, 1}, "%r2"));
  EXPECT_EQ(1u, Eval("add.cc.u64 %rd3, %rd10, %rd11;\naddc.u64 %rd4, 0, 0;", {~uint64_t{0}, 1}, "%rd4"));
  EXPECT_EQ(0x80000000u + 1, Eval("mad.lo.cc.u32 %r1, %r10, %r11, %r12;\nmadc.hi.u32 %r2, %r10, %r11, 0x80000000;",
                                  {3, 1, 0xffffffff}, "%r2"));
}

TEST(Arith, BitFields) {
  EXPECT_EQ(0x34u, Eval("bfe.u32 %r1, %r10, 8, 8;", {0x123456}, "%r1"));
  EXPECT_EQ(6u, Eval("bfe.s32 %r1, %r10, 4, 4;", {0x60}, "%r1"));
  EXPECT_EQ(0xfffffffau, Eval("bfe.s32 %r1, %r10, 4, 4;", {0xa0}, "%r1"));
  EXPECT_EQ(0xffffffffu, Eval("bfe.s32 %r1, %r10, 40, 4;", {0x80000000}, "%r1"));
  EXPECT_EQ(0u, Eval("bfe.u32 %r1, %r10, 3, 0;", {~0u}, "%r1"));
  EXPECT_EQ(0x12ab5678u, Eval("bfi.b32 %r1, %r10, %r11, 16, 8;", {0xab, 0x12345678}, "%r1"));
  EXPECT_EQ(0x12345678u, Eval("bfi.b32 %r1, %r10, %r11, 32, 8;", {0xab, 0x12345678}, "%r1"));
  EXPECT_EQ(31u, Eval("bfind.u32 %r1, %r10;", {0x80000000}, "%r1"));
  EXPECT_EQ(0xffffffffu, Eval("bfind.s32 %r1, %r10;", {0xffffffff}, "%r1"));
  EXPECT_EQ(28u, Eval("bfind.shiftamt.u32 %r1, %r10;", {9}, "%r1"));
  EXPECT_EQ(62u, Eval("bfind.s64 %r1, %rd10;", {0x4000000000000000}, "%r1"));
}

TEST(Arith, ShiftsClamp) {
  EXPECT_EQ(0u, Eval("shl.b32 %r1, %r10, %r11;", {1, 32}, "%r1"));
  EXPECT_EQ(0xffffffffu, Eval("shr.s32 %r1, %r10, %r11;", {0x80000000, 77}, "%r1"));
  EXPECT_EQ(0u, Eval("shr.u64 %rd3, %rd10, %r11;", {~uint64_t{0}, 64}, "%rd3"));
  EXPECT_EQ(0xffffu, Eval("shr.s16 %h1, %h10, %r11;", {0x8000, 20}, "%h1"));
  EXPECT_EQ(5u, Eval("shf.l.clamp.b32 %r1, %r10, %r11, 40;", {5, 9}, "%r1"));
  EXPECT_EQ(9u, Eval("shf.r.clamp.b32 %r1, %r10, %r11, 32;", {5, 9}, "%r1"));
}

TEST(Arith, LogicTables) {
  EXPECT_EQ(0x0fu ^ 0x33u ^ 0x55u, Eval("lop3.b32 %r1, %r10, %r11, %r12, 0x96;", {0x0f, 0x33, 0x55}, "%r1"));
  EXPECT_EQ((0xf0u & 0xccu) | 0xaau, Eval("lop3.b32 %r1, %r10, %r11, %r12, 0xea;", {0xf0, 0xcc, 0xaa}, "%r1"));
  EXPECT_EQ(0x00ff00ffu, Eval("prmt.b32 %r1, %r10, 0, 0x8a8a;", {0x0080007f}, "%r1"));  // signs of bytes
  EXPECT_EQ(0x44332211u, Eval("prmt.b32.b4e %r1, %r10, %r11, 3;", {0x11223344, 0}, "%r1"));
  EXPECT_EQ(0x33333333u, Eval("prmt.b32.rc8 %r1, %r10, 0, 1;", {0x11223344}, "%r1"));
  EXPECT_EQ(1u, Eval("cnot.b32 %r1, %r10;", {0}, "%r1"));
}

TEST(Arith, RoundingModes) {
  const float third = 1.0f / 3;  // rounded up
  EXPECT_EQ(Bits(third), Eval("div.rn.f32 %f1, %f10, %f11;", {Bits(1.0f), Bits(3.0f)}, "%f1"));
  EXPECT_EQ(Bits(std::nextafter(third, 0.0f)), Eval("div.rm.f32 %f1, %f10, %f11;", {Bits(1.0f), Bits(3.0f)}, "%f1"));
  EXPECT_EQ(Bits(std::nextafter(1.0f, 2.0f)), Eval("add.rp.f32 %f1, %f10, %f11;", {Bits(1.0f), Bits(1e-20f)}, "%f1"));
  EXPECT_EQ(Bits(1.0f), Eval("add.rz.f32 %f1, %f10, %f11;", {Bits(1.0f), Bits(1e-20f)}, "%f1"));
  EXPECT_EQ(Bits(std::nextafter(1.0, 0.0)), Eval("sub.rm.f64 %fd1, %fd10, %fd11;", {Bits(1.0), Bits(1e-30)}, "%fd1"));
  EXPECT_EQ(Bits(16777218.0f), Eval("cvt.rz.f32.u32 %f1, %r10;", {16777219}, "%f1"));
  EXPECT_EQ(Bits(16777220.0f), Eval("cvt.rp.f32.u32 %f1, %r10;", {16777219}, "%f1"));
  EXPECT_EQ(Bits(std::nextafter(std::sqrt(2.0f), 2.0f)), Eval("sqrt.rp.f32 %f1, %f10;", {Bits(2.0f)}, "%f1"));
}

TEST(Arith, FlushAndSaturate) {
  EXPECT_EQ(Bits(-0.0f), Eval("mul.ftz.f32 %f1, %f10, %f11;", {Bits(-1e-30f), Bits(1e-10f)}, "%f1"));
  EXPECT_EQ(Bits(1.0f), Eval("add.sat.f32 %f1, %f10, %f11;", {Bits(1.5f), Bits(1.0f)}, "%f1"));
  EXPECT_EQ(Bits(0.0f), Eval("fma.rn.sat.f32 %f1, %f10, %f11, %f11;", {Bits(NAN), Bits(1.0f)}, "%f1"));
  EXPECT_EQ(Bits(0.0f), Eval("cvt.sat.f32.f32 %f1, %f10;", {Bits(-3.0f)}, "%f1"));
}

TEST(Arith, MinMaxAndNan) {
  EXPECT_EQ(Bits(2.0f), Eval("min.f32 %f1, %f10, %f11;", {Bits(NAN), Bits(2.0f)}, "%f1"));
  EXPECT_EQ(0x7fc00000u, Eval("max.NaN.f32 %f1, %f10, %f11;", {Bits(NAN), Bits(2.0f)}, "%f1") & 0x7fc00000);
  EXPECT_EQ(Bits(-0.0f), Eval("min.f32 %f1, %f10, %f11;", {Bits(0.0f), Bits(-0.0f)}, "%f1"));
  EXPECT_EQ(Bits(-3.0f), Eval("max.xorsign.abs.f32 %f1, %f10, %f11;", {Bits(-3.0f), Bits(2.0f)}, "%f1"));
}

TEST(Arith, ConversionsClampAsTheHardwareDoes) {
  EXPECT_EQ(0u, Eval("cvt.rzi.s32.f32 %r1, %f10;", {Bits(NAN)}, "%r1"));
  EXPECT_EQ(0x8000000000000000u, Eval("cvt.rzi.s64.f32 %rd3, %f10;", {Bits(NAN)}, "%rd3"));
  EXPECT_EQ(0x80000000u, Eval("cvt.rzi.s32.f64 %r1, %fd10;", {Bits(double(NAN))}, "%r1"));
  EXPECT_EQ(0u, Eval("cvt.rzi.u32.f32 %r1, %f10;", {Bits(-5.0f)}, "%r1"));
  EXPECT_EQ(0xffffffffu, Eval("cvt.rni.u32.f32 %r1, %f10;", {Bits(1e20f)}, "%r1"));
  EXPECT_EQ(127u, Eval("cvt.sat.s8.s32 %r1, %r10;", {1000}, "%r1"));
  EXPECT_EQ(0xffffff80u, Eval("cvt.sat.s8.s32 %r1, %r10;", {0xfffff000}, "%r1"));
  EXPECT_EQ(0xffffffff80000000u, Eval("cvt.s64.s32 %rd3, %r10;", {0x80000000}, "%rd3"));
  EXPECT_EQ(0xffffff80u, Eval("cvt.s32.s8 %r1, %r10;", {0x180}, "%r1"));
  EXPECT_EQ(0x7f80u, Eval("cvt.pack.sat.s8.s32.b32 %r1, %r10, %r11, 0;", {5000, 0xffffff00}, "%r1") & 0xffff);
  EXPECT_EQ(0xffff0007u, Eval("cvt.pack.sat.u16.s32 %r1, %r10, %r11;", {70000, 7}, "%r1"));
  EXPECT_EQ(0x3f802000u, Eval("cvt.rna.tf32.f32 %r1, %f10;", {0x3f801000}, "%r1"));
  EXPECT_EQ(0x7e38u, Eval("cvt.rn.satfinite.e4m3x2.f32 %h1, %f10, %f11;", {Bits(1e9f), Bits(1.0f)}, "%h1"));
}

TEST(Arith, ComparisonsAndSelection) {
  EXPECT_EQ(1u, Eval("setp.ltu.f32 %p1, %f10, %f11;", {Bits(NAN), Bits(1.0f)}, "%p1"));
  EXPECT_EQ(0u, Eval("setp.lt.f32 %p1, %f10, %f11;", {Bits(NAN), Bits(1.0f)}, "%p1"));
  EXPECT_EQ(0u, Eval("setp.ne.f32 %p1, %f10, %f11;", {Bits(NAN), Bits(1.0f)}, "%p1"));
  EXPECT_EQ(1u, Eval("setp.neu.f32 %p1, %f10, %f11;", {Bits(NAN), Bits(1.0f)}, "%p1"));
  EXPECT_EQ(1u, Eval("setp.lo.u32 %p1|%p2, %r10, %r11;", {1, 2}, "%p1"));
  EXPECT_EQ(0u, Eval("setp.lo.u32 %p1|%p2, %r10, %r11;", {1, 2}, "%p2"));
  EXPECT_EQ(0u, Eval("setp.eq.u32 %p3, 1, 0;\nsetp.lt.and.s32 %p1, %r10, %r11, %p3;", {1, 2}, "%p1"));
  EXPECT_EQ(1u, Eval("setp.eq.u32 %p3, 1, 0;\nsetp.lt.and.s32 %p1, %r10, %r11, !%p3;", {1, 2}, "%p1"));
  EXPECT_EQ(0xffffffffu, Eval("set.lt.u32.s32 %r1, %r10, %r11;", {0xffffffff, 2}, "%r1"));
  EXPECT_EQ(Bits(1.0f), Eval("set.gt.f32.s32 %f1, %r10, %r11;", {5, 2}, "%f1"));
  EXPECT_EQ(9u, Eval("slct.u32.s32 %r1, %r10, %r11, %r12;", {8, 9, 0x80000000}, "%r1"));
  EXPECT_EQ(8u, Eval("slct.u32.f32 %r1, %r10, %r11, %f12;", {8, 9, Bits(-0.0f)}, "%r1"));
}

TEST(Arith, PackingMoves) {
  EXPECT_EQ(0x0000000200000001u, Eval("mov.b64 %rd3, {%r10, %r11};", {1, 2}, "%rd3"));
  EXPECT_EQ(0x89abcdefu, Eval("mov.b64 {%r1, %r2}, %rd10;", {0x0123456789abcdef}, "%r1"));
  EXPECT_EQ(0x0123u, Eval("mov.b64 {%h1, %h2, %h3, %h4}, %rd10;", {0x0123456789abcdef}, "%h4"));
  EXPECT_EQ(0x04030201u, Eval(".reg .b8 %b<4>;\ncvt.u8.u32 %b0, 1;\ncvt.u8.u32 %b1, 2;\ncvt.u8.u32 %b2, 3;\n"
                              "cvt.u8.u32 %b3, 4;\nmov.b32 %r1, {%b0, %b1, %b2, %b3};",
                              {}, "%r1"));
  EXPECT_EQ(7u, Eval(".reg .b128 %q;\nmov.b128 %q, {%rd10, %rd11};\nmov.b128 {%rd3, %rd4}, %q;", {6, 7}, "%rd4"));
  EXPECT_EQ(0x01234567u, Eval("mov.b64 {_, %r2}, %rd10;", {0x0123456789abcdef}, "%r2"));
}

TEST(Arith, SmallNumbersAndDots) {
  EXPECT_EQ(Bits(-1.5f), Eval("copysign.f32 %f1, %f10, %f11;", {Bits(-2.0f), Bits(1.5f)}, "%f1"));
  EXPECT_EQ(1u, Eval("testp.subnormal.f32 %p1, %f10;", {1}, "%p1"));
  EXPECT_EQ(10u + 2 * 3 + 4 * 5, Eval("dp2a.lo.u32.u32 %r1, %r10, %r11, %r12;", {0x00040002, 0x0503, 10}, "%r1"));
  EXPECT_EQ(0xfffffffdu, Eval("mul24.lo.s32 %r1, %r10, %r11;", {0x00ffffff, 3}, "%r1"));
  EXPECT_EQ(3u, Eval("fns.b32 %r1, %r10, 0, 2;", {0x0a}, "%r1"));
  EXPECT_EQ(0xfffffff8u, Eval("szext.wrap.s32 %r1, %r10, 4;", {8}, "%r1"));
  EXPECT_EQ(0xff0u, Eval("bmsk.clamp.b32 %r1, 4, 8;", {}, "%r1"));
  EXPECT_EQ(12u, Eval("sad.s32 %r1, %r10, %r11, 2;", {0xfffffffb, 5}, "%r1"));
}

}  // namespace
}  // namespace cuda_remote::softgpu::ptx
