// SPDX-License-Identifier: Apache-2.0
// The CUDA math library, run from PTX, against the host's. The bounds are those of the CUDA C++ Programming Guide
// with one
// more unit for the host's own error.
#include <cmath>
#include <limits>
#include <random>

#include "softgpu/ptx/test_device.h"
#include "softgpu/ptx/test_file.h"

namespace cuda_remote::softgpu::ptx {
namespace {

// The distance in units in the last place; equal or both NaN: 0.
template <class T>
double Ulps(T got, double expected_in) {
  const T expected = T(expected_in);
  if (std::isnan(got) && std::isnan(expected)) return 0;
  if (got == expected) return 0;
  if (!std::isfinite(got) || !std::isfinite(expected)) return HUGE_VAL;
  const T next = std::nextafter(std::fabs(expected), std::numeric_limits<T>::infinity());
  const double unit = double(next) - double(std::fabs(expected));
  return std::fabs(double(got) - double(expected)) / (unit > 0 ? unit : double(std::numeric_limits<T>::denorm_min()));
}

template <class T>
std::vector<T> Inputs(double low, double high) {
  std::vector<T> values;
  std::mt19937 random(7);
  for (int i = 0; i < 400; ++i) values.push_back(T(low + (high - low) * (random() / 4294967296.0)));
  for (const double v : {0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 10.0, 1e-5, -1e-5, 3.14159265358979, 100.0}) {
    if (v >= low && v <= high) values.push_back(T(v));
  }
  return values;
}

class Math : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { ASSERT_TRUE(device_.Load(ReadTestFile(GetParam()))); }

  template <class T, class F>
  void One(const char* kernel, F reference, double low, double high, double ulps, double absolute = 0) {
    std::vector<T> values = Inputs<T>(low, high);
    for (const T v : {std::numeric_limits<T>::infinity(), -std::numeric_limits<T>::infinity(),
                      std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::max()}) {
      if (absolute == 0) values.push_back(v);
    }
    const int n = int(values.size());
    T* in = device_.Array<T>(values.size());
    std::copy(values.begin(), values.end(), in);
    T* out = device_.Array<T>(values.size());
    const auto result = device_.Run(kernel, {uint32_t(n + 127) / 128}, {128}, in, out, n);
    ASSERT_TRUE(result.ok()) << result.message;
    for (int i = 0; i < n; ++i) {
      const double expected = reference(double(in[i]));
      if (std::fabs(double(out[i]) - expected) <= absolute) continue;
      EXPECT_LE(Ulps(out[i], expected), ulps) << kernel << "(" << in[i] << ") = " << out[i] << ", not " << expected;
    }
  }

  template <class T, class F>
  void Two(const char* kernel, F reference, double low, double high, double ulps) {
    std::vector<T> values = Inputs<T>(low, high);
    const int n = int(values.size());
    T* a = device_.Array<T>(values.size());
    T* b = device_.Array<T>(values.size());
    T* out = device_.Array<T>(values.size());
    for (int i = 0; i < n; ++i) {
      a[i] = values[size_t(i)];
      b[i] = values[size_t((i * 37 + 11) % n)];
    }
    const auto result = device_.Run(kernel, {uint32_t(n + 127) / 128}, {128}, a, b, out, n);
    ASSERT_TRUE(result.ok()) << result.message;
    for (int i = 0; i < n; ++i) {
      const double expected = reference(double(a[i]), double(b[i]));
      EXPECT_LE(Ulps(out[i], expected), ulps)
          << kernel << "(" << a[i] << ", " << b[i] << ") = " << out[i] << ", not " << expected;
    }
  }

  TestDevice device_;
};
INSTANTIATE_TEST_SUITE_P(Builds, Math, ::testing::Values("math_75.ptx", "math_90.ptx"));

#define HOST(name) [](double v) { return std::name(v); }
#define HOST2(name) [](double v, double w) { return std::name(v, w); }

TEST_P(Math, SingleTrigonometry) {
  One<float>("f_sinf", HOST(sin), -200, 200, 3);
  One<float>("f_sinf", HOST(sin), -1e7, 1e7, 3);
  One<float>("f_cosf", HOST(cos), -200, 200, 3);
  One<float>("f_tanf", HOST(tan), -200, 200, 5);
  One<float>("f_asinf", HOST(asin), -1, 1, 4);
  One<float>("f_acosf", HOST(acos), -1, 1, 4);
  One<float>("f_atanf", HOST(atan), -50, 50, 3);
  Two<float>("f_atan2f", HOST2(atan2), -10, 10, 4);
  One<float>("f_sinhf", HOST(sinh), -30, 30, 4);
  One<float>("f_coshf", HOST(cosh), -30, 30, 3);
  One<float>("f_tanhf", HOST(tanh), -10, 10, 3);
  One<float>("f___sinf", HOST(sin), -3.1, 3.1, 0, 1e-6);
  One<float>("f___cosf", HOST(cos), -3.1, 3.1, 0, 1e-6);
}

TEST_P(Math, SingleExponentials) {
  One<float>("f_expf", HOST(exp), -100, 90, 3);
  One<float>("f_exp2f", HOST(exp2), -150, 129, 3);
  One<float>("f_expm1f", HOST(expm1), -10, 80, 3);
  One<float>("f_logf", HOST(log), -1, 1000, 2);
  One<float>("f_log2f", HOST(log2), 0, 1e6, 2);
  One<float>("f_log10f", HOST(log10), 0, 1e6, 3);
  One<float>("f_log1pf", HOST(log1p), -1, 100, 2);
  Two<float>("f_powf", HOST2(pow), -8, 8, 5);
  One<float>("f___expf", HOST(exp), -3, 3, 4);
  One<float>("f___logf", HOST(log), 2, 1000, 4);
}

TEST_P(Math, SingleRootsAndSpecial) {
  One<float>("f_sqrtf", HOST(sqrt), -1, 1e6, 0);
  One<float>(
      "f_rsqrtf", [](double v) { return 1 / std::sqrt(v); }, 0, 1e6, 3);
  One<float>("f_cbrtf", HOST(cbrt), -1e6, 1e6, 2);
  One<float>("f_erff", HOST(erf), -5, 5, 3);
  One<float>("f_erfcf", HOST(erfc), -5, 9, 5);
  One<float>("f_tgammaf", HOST(tgamma), 0, 36, 6);
  One<float>("f_lgammaf", HOST(lgamma), 3, 1e5, 7);
  One<float>(
      "f_j0f", [](double v) { return ::j0(v); }, -8, 8, 0, 1e-6);
  for (const char* kernel : {"f_floorf", "f_ceilf", "f_roundf", "f_rintf", "f_truncf"}) {
    const std::string name(kernel + 2);
    One<float>(
        kernel,
        [&](double v) {
          return name == "floorf"   ? std::floor(v)
                 : name == "ceilf"  ? std::ceil(v)
                 : name == "roundf" ? std::round(v)
                 : name == "rintf"  ? std::nearbyint(v)
                                    : std::trunc(v);
        },
        -20, 20, 0);
  }
  Two<float>("f_fmodf", HOST2(fmod), -100, 100, 0);
  Two<float>("f_remainderf", HOST2(remainder), -100, 100, 0);
  Two<float>("f_hypotf", HOST2(hypot), -100, 100, 3);
  Two<float>("f_fmaxf", HOST2(fmax), -100, 100, 0);
  Two<float>("f_fminf", HOST2(fmin), -100, 100, 0);
  Two<float>("f_copysignf", HOST2(copysign), -100, 100, 0);
  Two<float>(
      "f_nextafterf", [](double v, double w) { return double(std::nextafter(float(v), float(w))); }, -9, 9, 0);
  Two<float>(
      "f_divf", [](double v, double w) { return double(float(v) / float(w)); }, -100, 100, 0);
  Two<float>(
      "f___fdividef", [](double v, double w) { return v / w; }, 1, 100, 2);
}

TEST_P(Math, Double) {
  One<double>("d_sin", HOST(sin), -1e5, 1e5, 3);
  One<double>("d_cos", HOST(cos), -1e5, 1e5, 3);
  One<double>("d_sin", HOST(sin), -1e12, 1e12, 3);
  One<double>("d_tan", HOST(tan), -100, 100, 3);
  One<double>("d_exp", HOST(exp), -745, 710, 2);
  One<double>("d_exp2", HOST(exp2), -1074, 1024, 2);
  One<double>("d_expm1", HOST(expm1), -40, 700, 2);
  One<double>("d_log", HOST(log), -1, 1e6, 2);
  One<double>("d_log2", HOST(log2), 0, 1e6, 2);
  One<double>("d_log10", HOST(log10), 0, 1e6, 2);
  One<double>("d_log1p", HOST(log1p), -1, 100, 2);
  One<double>("d_sqrt", HOST(sqrt), -1, 1e9, 0);
  One<double>(
      "d_rsqrt", [](double v) { return 1 / std::sqrt(v); }, 0, 1e9, 2);
  One<double>("d_cbrt", HOST(cbrt), -1e6, 1e6, 2);
  One<double>("d_erf", HOST(erf), -6, 6, 3);
  One<double>("d_erfc", HOST(erfc), -6, 26, 6);
  One<double>("d_tgamma", HOST(tgamma), 0.1, 170, 12);
  One<double>("d_lgamma", HOST(lgamma), 3, 1e5, 5);
  One<double>("d_sinh", HOST(sinh), -700, 700, 3);
  One<double>("d_cosh", HOST(cosh), -700, 700, 2);
  One<double>("d_tanh", HOST(tanh), -20, 20, 3);
  One<double>("d_asin", HOST(asin), -1, 1, 3);
  One<double>("d_acos", HOST(acos), -1, 1, 3);
  One<double>("d_atan", HOST(atan), -100, 100, 3);
  One<double>("d_floor", HOST(floor), -20, 20, 0);
  One<double>("d_ceil", HOST(ceil), -20, 20, 0);
  One<double>("d_round", HOST(round), -20, 20, 0);
  One<double>("d_rint", HOST(nearbyint), -20, 20, 0);
  One<double>("d_trunc", HOST(trunc), -20, 20, 0);
  Two<double>("d_pow", HOST2(pow), -30, 30, 3);
  Two<double>("d_fmod", HOST2(fmod), -100, 100, 0);
  Two<double>("d_remainder", HOST2(remainder), -100, 100, 0);
  Two<double>("d_atan2", HOST2(atan2), -100, 100, 3);
  Two<double>("d_hypot", HOST2(hypot), -100, 100, 3);
  Two<double>("d_fmax", HOST2(fmax), -100, 100, 0);
  Two<double>("d_fmin", HOST2(fmin), -100, 100, 0);
  Two<double>("d_copysign", HOST2(copysign), -100, 100, 0);
  Two<double>("d_nextafter", HOST2(nextafter), -100, 100, 0);
  Two<double>(
      "d_div", [](double v, double w) { return v / w; }, -100, 100, 0);
}

}  // namespace
}  // namespace cuda_remote::softgpu::ptx
