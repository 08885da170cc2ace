// SPDX-License-Identifier: Apache-2.0
// What nvcc makes of testdata/half.cu.
#include <cmath>

#include "softgpu/ptx/number.h"
#include "softgpu/ptx/test_device.h"
#include "softgpu/ptx/test_file.h"

namespace cuda_remote::softgpu::ptx {
namespace {

class Halves : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { ASSERT_TRUE(device_.Load(ReadTestFile(GetParam()))); }

  void Work(const char* kernel, const Format& format) {
    const int n = 60;
    auto* in = device_.Array<uint16_t>(3 * n);
    auto* out = device_.Array<uint16_t>(16 * n);
    auto* pairs = device_.Array<uint32_t>(4 * n);
    auto pack = [&](double v) { return uint16_t(Pack(v, format, Round::kNearest, false)); };
    for (int i = 0; i < 3 * n; ++i) in[i] = pack((i * 37 % 101 - 50) * 0.173 + (i % 7) * 1e-3);
    const auto result = device_.Run(kernel, {1}, {uint32_t(n)}, in, out, pairs);
    ASSERT_TRUE(result.ok()) << result.message;
    for (int i = 0; i < n; ++i) {
      const double a = Unpack(in[3 * i], format), b = Unpack(in[3 * i + 1], format), c = Unpack(in[3 * i + 2], format);
      const double expected[] = {a + b,
                                 a - b,
                                 a * b,
                                 std::fma(a, b, c),
                                 -a,
                                 std::fabs(a),
                                 std::fmax(a, b),
                                 std::fmin(a, b),
                                 a / b,
                                 std::sqrt(std::fabs(a)),
                                 double(float(a) * 3.0f),
                                 a < b ? 1.0 : 0.0,
                                 std::exp(c),
                                 std::log(std::fabs(a)),
                                 7.0,
                                 std::floor(a)};
      for (int k = 0; k < 16; ++k) {
        // Division, exponential and logarithm may be off by a unit.
        const int slack = k == 8 || k == 12 || k == 13 ? 2 : 0;
        EXPECT_NEAR(pack(expected[k]), out[16 * i + k], slack)
            << kernel << " " << k << " of " << a << ", " << b << ", " << c;
      }
      auto both = [&](double low, double high) { return uint32_t(pack(low)) | uint32_t(pack(high)) << 16; };
      EXPECT_EQ(both(a + b, b + c), pairs[4 * i]);
      EXPECT_EQ(both(a * b, b * c), pairs[4 * i + 1]);
      EXPECT_EQ(both(std::fma(a, b, a), std::fma(b, c, b)), pairs[4 * i + 2]);
      EXPECT_EQ(both(std::fmax(a, b), std::fmax(b, c)), pairs[4 * i + 3]);
    }
  }
  TestDevice device_;
};
INSTANTIATE_TEST_SUITE_P(Builds, Halves, ::testing::Values("half_80.ptx", "half_90.ptx"));

TEST_P(Halves, Half) { Work("half_work", kHalf); }
TEST_P(Halves, Bfloat) { Work("bf_work", kBfloat); }

TEST_P(Halves, RoundingModes) {
  const float values[] = {1.0004f, -1.0004f, 70000.0f, -70000.0f, 1e-8f, -1e-8f, 2049.0f, 0.1f};
  auto* in = device_.Array<float>(8);
  std::copy(values, values + 8, in);
  auto* out = device_.Array<uint16_t>(64);
  const auto result = device_.Run("half_round", {1}, {8}, in, out);
  ASSERT_TRUE(result.ok()) << result.message;
  for (int i = 0; i < 8; ++i) {
    const uint16_t* o = out + 8 * i;
    EXPECT_EQ(Pack(values[i], kHalf, Round::kNearest, false), o[0]);
    EXPECT_EQ(Pack(values[i], kHalf, Round::kZero, false), o[1]);
    EXPECT_EQ(Pack(values[i], kHalf, Round::kDown, false), o[2]);
    EXPECT_EQ(Pack(values[i], kHalf, Round::kUp, false), o[3]);
    EXPECT_EQ(Pack(values[i], kBfloat, Round::kNearest, false), o[4]);
    EXPECT_EQ(Pack(values[i], kBfloat, Round::kZero, false), o[5]);
    EXPECT_EQ(Pack(double(int(values[i])), kHalf, Round::kNearest, false), o[7]);
  }
}

TEST_P(Halves, Atomics) {
  auto* h = device_.Array<uint16_t>(2);
  auto* h2 = device_.Array<uint32_t>(1);
  auto* b = device_.Array<uint16_t>(2);
  const auto result = device_.Run("half_atomics", {2}, {32}, h, h2, b);
  ASSERT_TRUE(result.ok()) << result.message;
  EXPECT_EQ(32.0, Unpack(h[0], kHalf));
  EXPECT_EQ(64.0, Unpack(h2[0] & 0xffff, kHalf));
  EXPECT_EQ(16.0, Unpack(h2[0] >> 16, kHalf));
  EXPECT_EQ(64.0, Unpack(b[0], kBfloat));
}

}  // namespace
}  // namespace cuda_remote::softgpu::ptx
