// SPDX-License-Identifier: Apache-2.0
// What the two files of cvt share.
#ifndef CUDA_REMOTE_SOFTGPU_PTX_CONVERT_H_
#define CUDA_REMOTE_SOFTGPU_PTX_CONVERT_H_

#include <cmath>
#include <cstdlib>
#include <limits>
#include <type_traits>

#include "softgpu/ptx/decoder.h"
#include "softgpu/ptx/number.h"

namespace cuda_remote::softgpu::ptx {

// Rounded to an integral number.
double Integral(double value, Round round);

// To an integer as the hardware does it: clamped. NaN is zero, except with 64-bit floats or integers: the top bit.
template <class D>
D ToInteger(double value, Round round, bool from_double) {
  if (std::isnan(value)) {
    if (!from_double && sizeof(D) < 8) return 0;
    return D(std::make_unsigned_t<D>(1) << (8 * sizeof(D) - 1));
  }
  value = Integral(value, round);
  constexpr int kBits = std::numeric_limits<D>::digits;
  const double limit = std::ldexp(1.0, kBits);
  if (value >= limit) return std::numeric_limits<D>::max();
  if (value < (std::is_signed<D>::value ? -limit : 0.0)) return std::numeric_limits<D>::min();
  return D(value);
}

// cvt to or from f16, bf16, tf32, e4m3, e5m2.
bool DecodeNarrowConversion(Decoder& d);

}  // namespace cuda_remote::softgpu::ptx

#endif  // CUDA_REMOTE_SOFTGPU_PTX_CONVERT_H_
