// SPDX-License-Identifier: Apache-2.0
// Matrix instructions: what nvcc makes of testdata/matrix.cu, against an H100's results (testdata/matrix_h100.txt) and
// against products computed here.
#include <cmath>
#include <map>
#include <sstream>
#include <vector>

#include "softgpu/ptx/matrix.h"
#include "softgpu/ptx/number.h"
#include "softgpu/ptx/test_device.h"
#include "softgpu/ptx/test_file.h"

namespace cuda_remote::softgpu::ptx {
namespace {

class Matrices : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { ASSERT_TRUE(device_.Load(ReadTestFile(GetParam()))); }
  bool Has(const std::string& kernel) const { return device_.module().FindKernel(kernel) != nullptr; }
  TestDevice device_;
};
INSTANTIATE_TEST_SUITE_P(Builds, Matrices, ::testing::Values("matrix_75.ptx", "matrix_80.ptx", "matrix_90.ptx"));

// Bit by bit, roundings, infinities and NaNs included.
TEST_P(Matrices, ProductsAreAnH100s) {
  std::istringstream golden(ReadTestFile("testdata/matrix_h100.txt"));
  uint32_t* operand[4];
  for (auto& words : operand) words = device_.Array<uint32_t>(256);
  int compared = 0;
  for (std::string line, word; std::getline(golden, line);) {
    std::istringstream head(line);
    std::string kernel;
    int counts[4];
    if (!(head >> word) || word != "mma") continue;
    head >> kernel >> counts[0] >> counts[1] >> counts[2] >> counts[3];
    std::vector<uint32_t> values[4];
    for (auto& list : values) {
      std::getline(golden, line);
      std::istringstream all(line);
      while (all >> word) list.push_back(uint32_t(std::stoul(word, nullptr, 16)));
    }
    if (!Has("mma_" + kernel)) continue;
    for (int k = 0; k < 3; ++k) {
      ASSERT_EQ(values[k].size(), size_t(32 * counts[k])) << kernel;
      for (int i = 0; i < 32 * counts[k]; ++i) operand[k][i / counts[k] * 8 + i % counts[k]] = values[k][size_t(i)];
    }
    const auto result = device_.Run("mma_" + kernel, {1}, {32}, operand[0], operand[1], operand[2], operand[3]);
    ASSERT_TRUE(result.ok()) << result.message;
    for (int i = 0; i < 32 * counts[3]; ++i) {
      ASSERT_EQ(values[3][size_t(i)], operand[3][i / counts[3] * 8 + i % counts[3]])
          << kernel << ", thread " << i / counts[3] << ", word " << i % counts[3];
    }
    ++compared;
  }
  EXPECT_GE(compared, std::string(GetParam()) == "matrix_75.ptx" ? 1 : 17);
}

// Element i of memory is the number i, or one of its bytes.
TEST_P(Matrices, FragmentsAreAnH100s) {
  std::istringstream golden(ReadTestFile("testdata/matrix_h100.txt"));
  constexpr uint32_t kBytes = 65536;
  auto* in = device_.Array<uint8_t>(kBytes);
  auto* out = device_.Array<uint8_t>(4096);
  int compared = 0;
  for (std::string line, word; std::getline(golden, line);) {
    std::istringstream head(line);
    std::string kernel;
    uint32_t pass, each;
    uint64_t wanted;
    if (!(head >> word) || word != "load") continue;
    head >> kernel >> pass >> each >> std::hex >> wanted;
    if (!Has(kernel)) continue;
    const auto type = [&kernel](const char* name) { return kernel.find(std::string("_") + name + "_") != kernel.npos; };
    const uint32_t bytes = type("u8") ? 1 : type("f64") ? 8 : type("f16") || type("bf16") ? 2 : 4;
    for (uint32_t i = 0; i < kBytes / bytes; ++i) {
      const uint64_t number = bytes == 1 && pass == 1 ? i >> 8 : i;
      std::memcpy(in + i * bytes, &number, bytes);
    }
    // Two fragments of f16 hold everything twice from 8.0 on; code for 7.5 is the same.
    const auto result = device_.Run(kernel, {1}, {32}, in, uint32_t{64}, out);
    ASSERT_TRUE(result.ok()) << result.message;
    uint64_t hash = 0xcbf29ce484222325;
    for (uint32_t i = 0; i < 32 * each; ++i) hash = (hash ^ out[i]) * 0x100000001b3;
    EXPECT_EQ(wanted, hash) << kernel << ", pass " << pass;
    ++compared;
  }
  EXPECT_GE(compared, std::string(GetParam()) == "matrix_75.ptx" ? 40 : 60);
}

struct Product {
  const char* name;
  Shape shape;
  Element element, sum;
};
constexpr Shape kSquare = {16, 16, 16}, kTall = {32, 8, 16}, kWide = {8, 32, 16};
constexpr Product kProducts[] = {{"f16_f32", kSquare, Element::kF16, Element::kF32},
                                 {"f16_f32", kTall, Element::kF16, Element::kF32},
                                 {"f16_f32", kWide, Element::kF16, Element::kF32},
                                 {"f16_f16", kSquare, Element::kF16, Element::kF16},
                                 {"f16_f16", kTall, Element::kF16, Element::kF16},
                                 {"f16_f16", kWide, Element::kF16, Element::kF16},
                                 {"bf16_f32", kSquare, Element::kBf16, Element::kF32},
                                 {"bf16_f32", kTall, Element::kBf16, Element::kF32},
                                 {"bf16_f32", kWide, Element::kBf16, Element::kF32},
                                 {"tf32", {16, 16, 8}, Element::kTf32, Element::kF32},
                                 {"f64", {8, 8, 4}, Element::kF64, Element::kF64},
                                 {"u8", kSquare, Element::kU8, Element::kS32},
                                 {"u8", kTall, Element::kU8, Element::kS32},
                                 {"u8", kWide, Element::kU8, Element::kS32},
                                 {"s8", kSquare, Element::kS8, Element::kS32},
                                 {"s8", kTall, Element::kS8, Element::kS32},
                                 {"s8", kWide, Element::kS8, Element::kS32}};

template <class T>
uint64_t Word(T value) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(value));
  return word;
}

uint64_t Encode(Element element, double value) {
  switch (element) {
    case Element::kF16:
      return Pack(value, kHalf, Round::kNearest, false);
    case Element::kBf16:
      return Pack(value, kBfloat, Round::kNearest, false);
    case Element::kF64:
      return Word(value);
    case Element::kTf32:
    case Element::kF32:
      return Word(float(value));
    default:
      return uint64_t(int64_t(value));
  }
}

double Decode(Element element, uint64_t bits) {
  switch (element) {
    case Element::kU8:
      return double(bits & 0xff);
    case Element::kS8:
      return double(int8_t(bits));
    case Element::kS32:
      return double(int32_t(bits));
    default:
      return NumberOf(element, bits);
  }
}

// Small integers, so that nothing is rounded, in every shape and type.
TEST_P(Matrices, ProductsOfWmma) {
  auto* a = device_.Array<uint8_t>(8192);
  auto* b = device_.Array<uint8_t>(8192);
  auto* c = device_.Array<uint8_t>(8192);
  auto* d = device_.Array<uint8_t>(8192);
  int ran = 0;
  for (const Product& p : kProducts) {
    const auto [m, n, k] = p.shape;
    const std::string kernel =
        std::string("product_") + p.name + "_m" + std::to_string(m) + "n" + std::to_string(n) + "k" + std::to_string(k);
    if (!Has(kernel)) continue;
    const uint32_t bytes = ElementBits(p.element) / 8, sum_bytes = ElementBits(p.sum) / 8;
    const auto fill = [](uint8_t* to, Element element, uint32_t count, uint32_t factor) {
      const uint32_t size = ElementBits(element) / 8;
      for (uint32_t i = 0; i < count; ++i) {
        const int value = int(i * factor % 23) - (element == Element::kU8 ? 0 : 11);
        const uint64_t bits = Encode(element, value);
        std::memcpy(to + i * size, &bits, size);
      }
    };
    fill(a, p.element, m * k, 7);
    fill(b, p.element, k * n, 5);
    fill(c, p.sum, m * n, 3);
    const auto result = device_.Run(kernel, {1}, {32}, a, b, c, d, uint8_t{0});
    ASSERT_TRUE(result.ok()) << result.message;
    const auto at = [](const uint8_t* from, Element element, uint32_t index) {
      const uint32_t size = ElementBits(element) / 8;
      uint64_t bits = 0;
      std::memcpy(&bits, from + index * size, size);
      return Decode(element, bits);
    };
    for (uint32_t row = 0; row < m; ++row) {
      for (uint32_t column = 0; column < n; ++column) {
        double sum = at(c, p.sum, row * n + column);
        for (uint32_t i = 0; i < k; ++i) sum += at(a, p.element, row * k + i) * at(b, p.element, i * n + column);
        // f16 has integers up to 2048 only, and rounds once.
        if (p.sum == Element::kF16) sum = Decode(p.sum, Encode(p.sum, sum));
        ASSERT_EQ(sum, at(d, p.sum, row * n + column)) << kernel << " " << row << "," << column;
      }
    }
    EXPECT_LE(m * k * bytes, 8192u);
    EXPECT_LE(m * n * sum_bytes, 8192u);
    ++ran;
  }
  EXPECT_EQ(ran, std::string(GetParam()) == "matrix_75.ptx" ? 12 : 17);
}

TEST_P(Matrices, SumsOfIntegersSaturateIfAsked) {
  auto* a = device_.Array<uint8_t>(256);
  auto* b = device_.Array<uint8_t>(256);
  auto* c = device_.Array<int32_t>(256);
  auto* d = device_.Array<int32_t>(256);
  std::memset(a, 255, 256);
  std::memset(b, 255, 256);
  std::fill(c, c + 256, INT32_MAX - 1000);
  for (const uint8_t saturate : {0, 1}) {
    ASSERT_TRUE(device_.Run("product_u8_m16n16k16", {1}, {32}, a, b, c, d, saturate).ok());
    const int64_t sum = int64_t{INT32_MAX} - 1000 + 16 * 255 * 255;
    EXPECT_EQ(d[77], saturate != 0 ? INT32_MAX : int32_t(uint32_t(sum)));
  }
}

TEST_P(Matrices, RowsThroughSharedMemory) {
  auto* in = device_.Array<uint16_t>(256);
  auto* out = device_.Array<uint32_t>(256);
  auto* back = device_.Array<uint16_t>(256);
  for (int i = 0; i < 256; ++i) in[i] = uint16_t(i * 257 + 3);
  const auto result = device_.Run("rows", {1}, {32}, in, out, back);
  ASSERT_TRUE(result.ok()) << result.message;
  const auto element = [in](uint32_t matrix, uint32_t row, uint32_t column) {
    return uint32_t(in[matrix * 64 + row * 8 + column]);
  };
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const uint32_t row = lane / 4, column = lane % 4 * 2;
    const uint32_t* mine = out + lane * 8;
    for (uint32_t m = 0; m < 4; ++m) EXPECT_EQ(mine[m], element(m, row, column) | element(m, row, column + 1) << 16);
    for (uint32_t m = 0; m < 2; ++m) {
      EXPECT_EQ(mine[4 + m], element(m, column, row) | element(m, column + 1, row) << 16);
    }
    EXPECT_EQ(mine[6], element(0, column, row) | element(0, column + 1, row) << 16);
  }
  const bool turned = std::string(GetParam()) == "matrix_90.ptx";
  for (uint32_t i = 0; i < 256; ++i) {
    const uint32_t m = i / 64, row = i / 8 % 8, column = i % 8;
    EXPECT_EQ(back[i], turned ? element(m, column, row) : element(m, row, column)) << i;
  }
}

TEST_P(Matrices, NeedAllThreadsOfAWarp) {
  auto* in = device_.Array<uint16_t>(256);
  auto* out = device_.Array<uint32_t>(256);
  auto* back = device_.Array<uint16_t>(256);
  const auto result = device_.Run("rows", {1}, {16}, in, out, back);
  EXPECT_EQ(result.fault, Fault::kIllegalInstruction);
  EXPECT_NE(result.message.find("need all 32 threads"), std::string::npos) << result.message;
}

// f64 sums are one fma after the other; small f16 products do not lose what fits.
TEST(DotFloat, CutsAndRounds) {
  const double one[] = {1, 1}, tiny[] = {1, 0x1p-24};
  EXPECT_EQ(DotFloat(one, one, 2, 0, Element::kF32, 16), 0x40000000u);
  // 2^24 + 1 does not fit into f32 and is cut; -(2^24 + 1) as well, toward zero.
  EXPECT_EQ(DotFloat(one, tiny, 2, 0, Element::kF32, 16), 0x3f800000u);
  const double minus[] = {-1, -1};
  EXPECT_EQ(DotFloat(minus, tiny, 2, 0, Element::kF32, 16), 0xbf800000u);
  EXPECT_EQ(DotFloat(one, one, 2, INFINITY, Element::kF32, 16), 0x7f800000u);
  EXPECT_EQ(DotFloat(one, one, 2, -INFINITY, Element::kF16, 16), 0xfc00u);
  EXPECT_EQ(DotFloat(one, one, 2, NAN, Element::kF32, 16), 0x7fffffffu);
  const double opposite[] = {INFINITY, -INFINITY};
  EXPECT_EQ(DotFloat(opposite, one, 2, 0, Element::kF16, 16), 0x7fffu);
  EXPECT_EQ(DotFloat(one, one, 2, 70000, Element::kF16, 16), 0x7c00u);
}

}  // namespace
}  // namespace cuda_remote::softgpu::ptx
