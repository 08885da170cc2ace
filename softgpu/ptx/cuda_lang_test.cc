// SPDX-License-Identifier: Apache-2.0
// What nvcc makes of C++: testdata/lang.cu, compared with the same computations here.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "softgpu/ptx/test_device.h"
#include "softgpu/ptx/test_file.h"

namespace cuda_remote::softgpu::ptx {
namespace {

class Lang : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { ASSERT_TRUE(device_.Load(ReadTestFile(GetParam()))); }
  TestDevice device_;
};
INSTANTIATE_TEST_SUITE_P(Builds, Lang, ::testing::Values("lang_75.ptx", "lang_90.ptx", "lang_debug.ptx"));

struct Pair {
  int a;
  double b;
  char c[5];
};
struct Big {
  long long v[20];
};

TEST_P(Lang, StructsByValue) {
  auto* out = device_.Array<Pair>(32);
  auto* sum = device_.Array<long long>(32);
  Pair pair = {21, 1.25, {1, 2, 3, 4, 5}};
  Big big;
  for (int i = 0; i < 20; ++i) big.v[i] = i * 1000000007LL;
  const auto result = device_.Run("structs", {1}, {32}, pair, big, out, sum);
  ASSERT_TRUE(result.ok()) << result.message;
  for (int i = 0; i < 32; ++i) {
    EXPECT_EQ(42, out[i].a);
    EXPECT_EQ(2.5, out[i].b);
    EXPECT_EQ(6, out[i].c[4]);
    EXPECT_EQ(190 * 1000000007LL + i, sum[i]);
  }
}

int Fib(int n) { return n < 2 ? n : Fib(n - 1) + Fib(n - 2); }

TEST_P(Lang, Recursion) {
  auto* out = device_.Array<int>(32);
  const auto result = device_.Run("recursion", {1}, {16}, out);
  ASSERT_TRUE(result.ok()) << result.message;
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(Fib(i), out[2 * i]);
    EXPECT_EQ(2 * i + 3, out[2 * i + 1]);  // Ackermann(2, n)
  }
}

TEST_P(Lang, EndlessRecursionIsStackOverflow) {
  device_.options.stack_bytes = 4096;
  auto* out = device_.Array<int>(2 * 1024);
  const auto result = device_.Run("recursion", {1}, {1024}, out);
  EXPECT_EQ(Fault::kStackOverflow, result.fault) << result.message;
}

TEST_P(Lang, FunctionPointers) {
  auto* out = device_.Array<int>(32);
  const auto result = device_.Run("pointers", {1}, {32}, out, 1);
  ASSERT_TRUE(result.ok()) << result.message;
  for (int i = 0; i < 32; ++i) {
    const int expected[] = {i + 7, i - 7, i * 7};
    EXPECT_EQ(expected[(i + 1) % 3], out[i]);
  }
}

TEST_P(Lang, VirtualFunctionsAndHeap) {
  auto* area = device_.Array<float>(64);
  auto* corners = device_.Array<int>(64);
  const auto result = device_.Run("virtuals", {1}, {64}, area, corners);
  ASSERT_TRUE(result.ok()) << result.message;
  for (int i = 0; i < 64; ++i) {
    EXPECT_EQ(i % 2 ? float(i) * i : 3.0f * i * i, area[i]);
    EXPECT_EQ(i % 2 ? 4 : 0, corners[i]);
  }
  auto* pointers = device_.Array<int*>(8);
  ASSERT_TRUE(device_.Run("heap", {1}, {8}, pointers, 10).ok());
  for (int i = 0; i < 8; ++i) EXPECT_EQ(45 * i, pointers[i][0]);
}

TEST_P(Lang, Switches) {
  auto* in = device_.Array<int>(32);
  auto* out = device_.Array<int>(32);
  for (int i = 0; i < 32; ++i) {
    in[i] = i - 8;
    out[i] = 50;
  }
  const auto result = device_.Run("switches", {1}, {32}, in, out);
  ASSERT_TRUE(result.ok()) << result.message;
  for (int i = 0; i < 32; ++i) {
    const int v = in[i];
    const int cases[] = {1, 55, 32, 3 ^ 0x55, __builtin_popcount(4 * 77777), 1, -7, -7, 512};
    EXPECT_EQ(v >= 0 && v <= 8 ? cases[v] : 1000 + v, out[i]) << v;
  }
}

template <class T>
void CheckIntegers(TestDevice* device, const char* kernel) {
  std::vector<T> interesting = {0,
                                1,
                                2,
                                3,
                                7,
                                T(-1),
                                T(-2),
                                T(100),
                                std::numeric_limits<T>::max(),
                                std::numeric_limits<T>::min(),
                                T(std::numeric_limits<T>::max() / 3),
                                T(0x5a5a5a5a5a5a5a5aLL)};
  auto* a = device->Array<T>(144);
  auto* b = device->Array<T>(144);
  auto* out = device->Array<T>(144 * 16);
  for (size_t i = 0; i < 144; ++i) {
    a[i] = interesting[i / 12];
    b[i] = interesting[i % 12];
    if (b[i] == 0 || (b[i] == T(-1) && a[i] == std::numeric_limits<T>::min())) b[i] = 5;
  }
  const auto result = device->Run(kernel, {1}, {144}, a, b, out);
  ASSERT_TRUE(result.ok()) << result.message;
  using U = std::make_unsigned_t<T>;
  for (int i = 0; i < 144; ++i) {
    const T x = a[i], y = b[i];
    const T expected[] = {T(U(x) + U(y)),  T(U(x) - U(y)), T(uint64_t(x) * uint64_t(y)),
                          T(x / y),        T(x % y),       T(x & y),
                          T(x | y),        T(x ^ y),       T(uint64_t(x) << (y & 7)),
                          T(x >> (y & 7)), T(x < y),       T(x <= y),
                          T(x == y),       T(~x),          T(U(0) - U(x)),
                          x > y ? x : y};
    for (int k = 0; k < 16; ++k) {
      EXPECT_EQ(+expected[k], +out[16 * i + k]) << kernel << " operation " << k << " of " << +x << ", " << +y;
    }
  }
}

TEST_P(Lang, Integers) {
  CheckIntegers<signed char>(&device_, "int_i8");
  CheckIntegers<unsigned char>(&device_, "int_u8");
  CheckIntegers<short>(&device_, "int_i16");
  CheckIntegers<unsigned short>(&device_, "int_u16");
  CheckIntegers<int>(&device_, "int_i32");
  CheckIntegers<unsigned>(&device_, "int_u32");
  CheckIntegers<long long>(&device_, "int_i64");
  CheckIntegers<unsigned long long>(&device_, "int_u64");
}

uint32_t Brev(uint32_t v) {
  uint32_t out = 0;
  for (int i = 0; i < 32; ++i) out |= (v >> i & 1) << (31 - i);
  return out;
}

TEST_P(Lang, Bits) {
  auto* out = device_.Array<unsigned>(32);
  const unsigned a = 0x8765f321, b = 0x01fe4c77, c = 1000;
  const uint64_t d = 0xfedcba9876543210;
  const auto result = device_.Run("bits", {1}, {1}, a, b, c, d, out);
  ASSERT_TRUE(result.ok()) << result.message;
  EXPECT_EQ(unsigned(__builtin_popcount(a)), out[0]);
  EXPECT_EQ(0u, out[1]);
  EXPECT_EQ(1u, out[2]);
  EXPECT_EQ(Brev(a), out[3]);
  EXPECT_EQ(0x8701f34cu, out[4]);  // bytes 5, 1, 7, 3 from the lowest
  EXPECT_EQ(b << 13 | a >> 19, out[5]);
  EXPECT_EQ(a >> 13 | b << 19, out[6]);
  EXPECT_EQ(unsigned(uint64_t(a) * b >> 32), out[7]);
  EXPECT_EQ(unsigned(int64_t(int(a)) * int(b) >> 32), out[8]);
  EXPECT_EQ(a - b + c, out[9]);
  EXPECT_EQ(unsigned(int(b) - int64_t(int(a))) + c, out[10]);
  EXPECT_EQ(unsigned(__builtin_popcountll(d)), out[11]);
  EXPECT_EQ(0u, out[12]);
  EXPECT_EQ(5u, out[13]);
  EXPECT_EQ(Brev(unsigned(d >> 32)), out[14]);
  EXPECT_EQ(unsigned((unsigned __int128)d * 0x123456789abcdefull >> 96), out[15]);
  unsigned sum = 0;
  for (int i = 0; i < 32; i += 8) sum |= (((a >> i) + (b >> i)) & 0xff) << i;
  EXPECT_EQ(sum, out[16]);
  EXPECT_EQ(0x01fe4c77u, out[17]);
  int dot = int(c);
  for (int i = 0; i < 32; i += 8) dot += int(int8_t(a >> i)) * int(int8_t(b >> i));
  EXPECT_EQ(unsigned(dot), out[18]);
  EXPECT_EQ(unsigned((int64_t(int(a)) + int(b)) >> 1), out[19]);
  EXPECT_EQ(unsigned(int64_t(int(a << 8) >> 8) * (int(b << 8) >> 8)), out[20]);
  EXPECT_EQ(8u, out[21]);
  EXPECT_EQ(unsigned((unsigned __int128)d * a >> 64), out[22]);
  EXPECT_EQ(unsigned(__int128(d) / 1000003), out[23]);
}

template <class D>
D Clamped(double v) {
  if (v <= double(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
  if (v >= double(std::numeric_limits<D>::max())) return std::numeric_limits<D>::max();
  return D(v);
}

TEST_P(Lang, Conversions) {
  const double values[] = {0,           1.5,   -1.5, 2.5,   -2.5,   0.49999999999999994, 1e9,  -3e9,  4.2e9,
                           1e19,        -1e19, 1e30, -1e30, 1e-320, 16777217.0,          -0.1, 255.9, 1e308,
                           3.4028236e38};
  const size_t n = sizeof values / sizeof values[0];
  auto* in = device_.Array<double>(n);
  std::copy(values, values + n, in);
  auto* out = device_.Array<int64_t>(16 * n);
  const auto result = device_.Run("conversions", {1}, {uint32_t(n)}, in, out);
  ASSERT_TRUE(result.ok()) << result.message;
  for (size_t i = 0; i < n; ++i) {
    const double d = values[i];
    const float f = float(d);
    const int64_t* o = out + 16 * i;
    EXPECT_EQ(Clamped<int32_t>(std::trunc(d)), o[0]) << d;
    EXPECT_EQ(Clamped<int64_t>(std::trunc(d)), o[1]) << d;
    EXPECT_EQ(Clamped<uint32_t>(std::trunc(d)), uint32_t(o[2])) << d;
    EXPECT_EQ(Clamped<int32_t>(std::trunc(f)), o[3]) << d;
    EXPECT_EQ(Clamped<int64_t>(std::trunc(f)), o[4]) << d;
    EXPECT_EQ(Clamped<int32_t>(std::nearbyint(d)), o[6]) << d;
    EXPECT_EQ(Clamped<int32_t>(std::ceil(d)), o[7]) << d;
    EXPECT_EQ(Clamped<int32_t>(std::floor(f)), o[8]) << d;
    EXPECT_EQ(Clamped<uint32_t>(std::trunc(f)), uint32_t(o[9])) << d;
    float toward_zero = f, up = f;
    if (std::fabs(double(f)) > std::fabs(d)) toward_zero = std::nextafter(f, 0.0f);
    if (double(f) < d) up = std::nextafter(f, HUGE_VALF);
    int32_t bits;
    std::memcpy(&bits, &toward_zero, 4);
    EXPECT_EQ(bits, int32_t(o[11])) << d;
    std::memcpy(&bits, &up, 4);
    EXPECT_EQ(bits, int32_t(o[12])) << d;
  }
}

TEST_P(Lang, Printf) {
  const auto result = device_.Run("prints", {1}, {1}, 37);
  ASSERT_TRUE(result.ok()) << result.message;
  EXPECT_EQ(
      "int -37    37|37   |00037 unsigned 4000000000 hex ff 0XFF\n"
      "long -1234567890123 18446744073709551615 -5 77\n"
      "float 1.500000 3.142   1.23e+04 0.0001 0x1p+0\n"
      "text abc|     right|left      |cu char x percent % star     42 2.72\n"
      "(null) none\n",
      device_.printed);
}

TEST_P(Lang, PrintfReturnsTheNumberOfItsArguments) {
  auto* out = device_.Array<int>(2);
  ASSERT_TRUE(device_.Run("printed", {1}, {1}, out).ok());
  EXPECT_EQ("5 and six%\nplain\n", device_.printed);
  EXPECT_EQ(2, out[0]);
  EXPECT_EQ(0, out[1]);
}

TEST_P(Lang, AssertAndTrap) {
  EXPECT_TRUE(device_.Run("asserts", {1}, {4}, 4).ok());
  const auto result = device_.Run("asserts", {1}, {4}, 2);
  EXPECT_EQ(Fault::kAssert, result.fault);
  EXPECT_NE(std::string::npos, device_.printed.find("Assertion `threadIdx.x < n` failed.")) << device_.printed;
  EXPECT_EQ(Fault::kTrap, device_.Run("traps", {1}, {4}).fault);
}

TEST_P(Lang, Variables) {
  auto* out = device_.Array<int>(4);
  auto result = device_.Run("variables", {1}, {1}, out);
  ASSERT_TRUE(result.ok()) << result.message;
  EXPECT_EQ(8, out[0]);
  EXPECT_EQ(22, out[1]);
  EXPECT_EQ(3, out[2]);
  *device_.Symbol<int>("counter") = 100;
  ASSERT_TRUE(device_.Run("variables", {1}, {1}, out).ok());
  EXPECT_EQ(103, out[0]);
}

TEST_P(Lang, LocalArrays) {
  auto* out = device_.Array<int>(32);
  const auto result = device_.Run("locals", {1}, {32}, out, 5);
  ASSERT_TRUE(result.ok()) << result.message;
  for (int t = 0; t < 32; ++t) {
    int values[64];
    for (int i = 0; i < 64; ++i) values[i] = i * 5 + t;
    for (int i = 0; i < 64; ++i) values[(i * 7) % 64] ^= values[(i * 13 + 5) % 64];
    int s = 0;
    for (int i = 0; i < 64; ++i) s += values[(i + 5) % 64] * (i + 1);
    EXPECT_EQ(s, out[t]);
  }
}

}  // namespace
}  // namespace cuda_remote::softgpu::ptx
