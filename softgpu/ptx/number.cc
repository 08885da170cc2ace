// SPDX-License-Identifier: Apache-2.0
#include "softgpu/ptx/number.h"

namespace cuda_remote::softgpu::ptx {

uint32_t Pack(double value, const Format& format, Round round, bool saturate) {
  uint64_t bits;
  std::memcpy(&bits, &value, 8);
  const int exponent_bits = format.bias == 127 ? 8 : format.bias == 15 ? 5 : 4;
  const uint32_t sign = uint32_t(bits >> 63) << (exponent_bits + format.mantissa);
  const uint32_t max_finite =
      (uint32_t(format.max_exponent) << format.mantissa) + (1u << format.mantissa) - (format.infinities ? 1 : 2);
  const uint32_t infinity = format.infinities ? max_finite + 1 : max_finite + 1;  // E4M3: NaN
  int exponent = int(bits >> 52 & 0x7ff);
  uint64_t mantissa = bits & ((uint64_t{1} << 52) - 1);
  if (exponent == 0x7ff) {
    if (mantissa != 0) {  // NVIDIA's NaN: all ones without the sign
      return format.infinities ? (uint32_t((1 << exponent_bits) - 1) << format.mantissa) + ((1u << format.mantissa) - 1)
                               : max_finite + 1;
    }
    return sign | (saturate ? max_finite : infinity);
  }
  if (exponent == 0) return sign;  // zero; doubles' denormals are far below every format
  mantissa |= uint64_t{1} << 52;
  int target = exponent - 1023 + format.bias;
  int shift = 52 - format.mantissa;
  if (target <= 0) {  // denormal there
    shift += 1 - target;
    target = 0;
  }
  uint64_t kept = shift > 63 ? 0 : mantissa >> shift;
  const uint64_t rest = shift > 63 ? 1 : mantissa & ((uint64_t{1} << shift) - 1);
  const uint64_t half = shift > 63 ? 2 : uint64_t{1} << (shift - 1);
  bool up = false;
  switch (round) {
    case Round::kNearest:
      up = rest > half || (rest == half && (kept & 1) != 0);
      break;
    case Round::kAway:
      up = rest >= half;
      break;
    case Round::kZero:
      break;
    case Round::kDown:
      up = rest != 0 && sign != 0;
      break;
    case Round::kUp:
      up = rest != 0 && sign == 0;
      break;
  }
  kept += up ? 1 : 0;
  // A carry out of the mantissa raises the exponent by itself; so does the hidden bit of normal numbers.
  uint64_t out = target > 0 ? (uint64_t(target - 1) << format.mantissa) + kept : kept;
  if (out > max_finite) {
    const bool to_infinity = round == Round::kNearest || round == Round::kAway ||
                             (round == Round::kDown && sign != 0) || (round == Round::kUp && sign == 0);
    out = to_infinity && !saturate ? infinity : max_finite;
  }
  return sign | uint32_t(out);
}

double Unpack(uint32_t bits, const Format& format) {
  const int exponent_bits = format.bias == 127 ? 8 : format.bias == 15 ? 5 : 4;
  const uint32_t mantissa = bits & ((1u << format.mantissa) - 1);
  const int exponent = int(bits >> format.mantissa & ((1u << exponent_bits) - 1));
  const bool negative = (bits >> (format.mantissa + exponent_bits) & 1) != 0;
  double value;
  if (format.infinities && exponent == (1 << exponent_bits) - 1) {
    value = mantissa != 0 ? std::nan("") : HUGE_VAL;
  } else if (!format.infinities && exponent == 15 && mantissa == 7) {
    value = std::nan("");
  } else if (exponent == 0) {
    value = std::ldexp(double(mantissa), 1 - format.bias - format.mantissa);
  } else {
    value = std::ldexp(double(mantissa | 1u << format.mantissa), exponent - format.bias - format.mantissa);
  }
  return negative ? -value : value;
}

double FusedOdd(double a, double b, double c) {
  const double product = a * b;  // exact: the factors have few bits
  const double sum = product + c;
  if (!std::isfinite(sum)) return sum;
  // What the addition lost (Knuth's TwoSum).
  const double part = sum - product;
  const double error = (product - (sum - part)) + (c - part);
  uint64_t bits;
  std::memcpy(&bits, &sum, 8);
  if (error == 0 || (bits & 1) != 0) return sum;
  const bool away = (error > 0) == (sum > 0);
  bits += away ? 1 : uint64_t(-1);
  double out;
  std::memcpy(&out, &bits, 8);
  return out;
}

}  // namespace cuda_remote::softgpu::ptx
