// SPDX-License-Identifier: Apache-2.0
// Video instructions against loops over the parts of a word.
#include <algorithm>
#include <functional>
#include <random>

#include "softgpu/ptx/test_device.h"

namespace cuda_remote::softgpu::ptx {
namespace {

using Combine = std::function<int64_t(int64_t, int64_t)>;

int64_t Part(uint32_t word, int index, int bits, bool is_signed) {
  const uint64_t value = uint64_t{word} >> (index * bits) & ((uint64_t{1} << bits) - 1);
  const bool negative = is_signed && (value >> (bits - 1)) != 0;
  return negative ? int64_t(value) - (int64_t{1} << bits) : int64_t(value);
}

// What `instruction %r3, %r1, %r2, %r4` gives for three words.
uint32_t Answer(const std::string& instruction, uint32_t a, uint32_t b, uint32_t c, bool third = true) {
  TestDevice device;
  const std::string code = "ld.global.u32 %r1, [%rd2];\nld.global.u32 %r2, [%rd2+4];\nld.global.u32 %r4, [%rd2+8];\n" +
                           instruction + " %r3, %r1, %r2" + (third ? ", %r4" : "") + ";\nst.global.u32 [%rd1], %r3;";
  if (!device.Load(Kernel(code))) return 0;
  auto* in = device.Array<uint32_t>(3);
  auto* out = device.Array<uint32_t>(1);
  in[0] = a, in[1] = b, in[2] = c;
  const auto result = device.Run("test", {1}, {1}, uint64_t(out), uint64_t(in));
  EXPECT_TRUE(result.ok()) << result.message;
  return *out;
}

struct Kind {
  const char* name;
  Combine combine;
};
const Kind kKinds[] = {
    {"vadd", [](int64_t a, int64_t b) { return a + b; }},
    {"vsub", [](int64_t a, int64_t b) { return a - b; }},
    {"vabsdiff", [](int64_t a, int64_t b) { return std::abs(a - b); }},
    {"vmin", [](int64_t a, int64_t b) { return std::min(a, b); }},
    {"vmax", [](int64_t a, int64_t b) { return std::max(a, b); }},
    {"vavrg", [](int64_t a, int64_t b) { return (a + b + (a + b >= 0)) >> 1; }},
};

TEST(Video, PartsOfWords) {
  std::mt19937 random(5);
  for (const Kind& kind : kKinds) {
    for (const int parts : {1, 2, 4}) {
      const std::string name = kind.name;
      if (parts == 1 && name == "vavrg") continue;
      for (int variant = 0; variant < 16; ++variant) {
        const bool sd = (variant & 1) != 0, sa = (variant & 2) != 0, sb = (variant & 4) != 0, sat = (variant & 8) != 0;
        const auto type = [](bool is_signed) { return is_signed ? ".s32" : ".u32"; };
        const std::string text =
            name + (parts == 1 ? "" : std::to_string(parts)) + type(sd) + type(sa) + type(sb) + (sat ? ".sat" : "");
        const uint32_t a = random(), b = variant % 3 == 0 ? a ^ 0x80808080 : uint32_t(random()), c = random();
        const int bits = 32 / parts;
        const int64_t least = sd ? -(int64_t{1} << (bits - 1)) : 0, most = (int64_t{1} << (sd ? bits - 1 : bits)) - 1;
        uint32_t packed = 0;
        uint64_t sum = c;
        for (int i = 0; i < parts; ++i) {
          int64_t value = kind.combine(Part(a, i, bits, sa), Part(b, i, bits, sb));
          if (sat) value = std::min(std::max(value, least), most);
          packed |= uint32_t(uint64_t(value) % (uint64_t{1} << bits)) << (i * bits);
          sum += uint64_t(value);
        }
        EXPECT_EQ(packed, Answer(text, a, b, c, parts != 1)) << text << " " << a << " " << b;
        EXPECT_EQ(uint32_t(sum), Answer(text + ".add", a, b, c)) << text << ".add " << a << " " << b << " " << c;
      }
    }
  }
}

// What nvcc makes of __vabsdiffu4 and __vsadu4.
TEST(Video, SumOfAbsoluteDifferences) {
  EXPECT_EQ(0x01010101u, Answer("vabsdiff4.u32.u32.u32", 0x00ff8001, 0x01fe7f02, 0));
  EXPECT_EQ(4u + 9, Answer("vabsdiff4.u32.u32.u32.add", 0x00ff8001, 0x01fe7f02, 9));
  EXPECT_EQ(0xffffu + 0xfffeu, Answer("vabsdiff2.u32.u32.u32.add", 0xffff0000, 0x0000fffe, 0));
}

TEST(Video, ComparisonsShiftsAndProducts) {
  EXPECT_EQ(0x01000001u, Answer("vset4.s32.s32.lt", 0xff7f0001, 0x007e0002, 0));
  EXPECT_EQ(7u, Answer("vset4.u32.u32.ge.add", 0xff7f0001, 0x007e0002, 4));
  EXPECT_EQ(1u, Answer("vset.s32.u32.lt", 0xffffffff, 0, 0, false));
  EXPECT_EQ(0u, Answer("vshl.u32.u32.u32.clamp", 1, 40, 0, false));
  EXPECT_EQ(0xffffffffu, Answer("vshr.s32.s32.u32.clamp", 0x80000000, 40, 0, false));
  EXPECT_EQ(uint32_t(-6 + 5), Answer("vmad.s32.s32.s32", uint32_t(-2), 3, 5));
  EXPECT_EQ(3u, Answer("vmax.s32.s32.s32.min", uint32_t(-2), 7, 3));
}

}  // namespace
}  // namespace cuda_remote::softgpu::ptx
