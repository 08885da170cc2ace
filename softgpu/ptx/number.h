// SPDX-License-Identifier: Apache-2.0
// Floating-point formats and rounding, apart from the machine.
//
// Thread-safe: pure functions; Rounded changes the calling thread's rounding mode for its scope.
#ifndef CUDA_REMOTE_SOFTGPU_PTX_NUMBER_H_
#define CUDA_REMOTE_SOFTGPU_PTX_NUMBER_H_

#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace cuda_remote::softgpu::ptx {

enum class Round : uint8_t { kNearest, kZero, kDown, kUp, kAway };

// A binary format narrower than double.
struct Format {
  int mantissa;  // explicit bits
  int bias;
  int max_exponent;  // biased, of the largest finite number
  bool infinities;   // else the largest exponent holds numbers, and NaN is all ones (E4M3)
};
constexpr Format kHalf = {10, 15, 30, true};
constexpr Format kBfloat = {7, 127, 254, true};
constexpr Format kTf32 = {10, 127, 254, true};
constexpr Format kE4m3 = {3, 7, 15, false};
constexpr Format kE5m2 = {2, 15, 30, true};

// The bits of `value` rounded to the format. `saturate`: to the largest finite number instead of infinity.
uint32_t Pack(double value, const Format& format, Round round, bool saturate);
// The number of the bits, exactly.
double Unpack(uint32_t bits, const Format& format);

// a * b + c with a last bit that tells whether more followed (round to odd): rounding it again to a narrow format
// gives what one rounding would.
double FusedOdd(double a, double b, double c);

// The calling thread's rounding mode, set back at the end of the scope.
class Rounded {
 public:
  explicit Rounded(Round round) : before_(std::fegetround()) {
    static constexpr int kModes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD, FE_TONEAREST};
    std::fesetround(kModes[int(round)]);
  }
  ~Rounded() { std::fesetround(before_); }

 private:
  int before_;
};

// Keeps the compiler from computing across a change of the rounding mode.
template <class T>
inline T Opaque(T value) {
  volatile T kept = value;
  return kept;
}

// Denormal numbers become zeros of the same sign.
inline float Flush(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7f800000) == 0) {
    bits &= 0x80000000;
    std::memcpy(&value, &bits, 4);
  }
  return value;
}

}  // namespace cuda_remote::softgpu::ptx

#endif  // CUDA_REMOTE_SOFTGPU_PTX_NUMBER_H_
