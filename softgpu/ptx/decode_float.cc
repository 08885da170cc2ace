// SPDX-License-Identifier: Apache-2.0
// Arithmetic of f32 and f64, and the opcodes that integers, halves and floats share.
#include <cmath>
#include <limits>

#include "softgpu/ptx/decoder.h"
#include "softgpu/ptx/number.h"

namespace cuda_remote::softgpu::ptx {
namespace {

// clang-format off
struct Add { template <class T> static T Do(T a, T b) { return a + b; } };
struct Sub { template <class T> static T Do(T a, T b) { return a - b; } };
struct Mul { template <class T> static T Do(T a, T b) { return a * b; } };
struct Div { template <class T> static T Do(T a, T b) { return a / b; } };
struct Fma { template <class T> static T Do(T a, T b, T c) { return std::fma(a, b, c); } };
// clang-format on
// C's fmin with a difference between -0 and 0.
struct Min {
  template <class T>
  static T Do(T a, T b) {
    if (std::isnan(a)) return b;
    if (std::isnan(b)) return a;
    if (a == b) return std::signbit(a) ? a : b;
    return a < b ? a : b;
  }
};
struct Max {
  template <class T>
  static T Do(T a, T b) {
    if (std::isnan(a)) return b;
    if (std::isnan(b)) return a;
    if (a == b) return std::signbit(a) ? b : a;
    return a > b ? a : b;
  }
};
template <class F>
struct OrNan {
  template <class T>
  static T Do(T a, T b) {
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
    return F::Do(a, b);
  }
};
// The larger magnitude with the product's sign.
template <class F>
struct XorSign {
  template <class T>
  static T Do(T a, T b) {
    const bool negative = std::signbit(a) != std::signbit(b);
    const T value = F::Do(std::fabs(a), std::fabs(b));
    return negative ? -value : value;
  }
};

float Flushed(float value, bool ftz) { return ftz ? Flush(value) : value; }
double Flushed(double value, bool) { return value; }

template <class T>
T Saturated(T value) {  // NaN becomes zero
  return !(value > 0) ? T(0) : value > 1 ? T(1) : value;
}

// The mode is what is left after the fast variants: n = rounding, imm bit 0 ftz, bit 1 saturate.
template <class T, class F>
const Op* Slow2(const Op* op, uint64_t* r, Thread*) {
  const bool ftz = (op->imm & 1) != 0;
  const T a = Flushed(Get<T>(r[op->a]), ftz), b = Flushed(Get<T>(r[op->b]), ftz);
  T value;
  {
    const Rounded rounded{Round(op->n)};
    value = Opaque(F::Do(Opaque(a), Opaque(b)));
  }
  value = Flushed(value, ftz);
  r[op->d] = Put((op->imm & 2) != 0 ? Saturated(value) : value);
  return op + 1;
}
template <class T, class F>
const Op* Slow3(const Op* op, uint64_t* r, Thread*) {
  const bool ftz = (op->imm & 1) != 0;
  const T a = Flushed(Get<T>(r[op->a]), ftz), b = Flushed(Get<T>(r[op->b]), ftz), c = Flushed(Get<T>(r[op->c]), ftz);
  T value;
  {
    const Rounded rounded{Round(op->n)};
    value = Opaque(F::Do(Opaque(a), Opaque(b), Opaque(c)));
  }
  value = Flushed(value, ftz);
  r[op->d] = Put((op->imm & 2) != 0 ? Saturated(value) : value);
  return op + 1;
}

// Two floats in 64 bits: add.f32x2 and kin.
template <class F>
const Op* Pair2(const Op* op, uint64_t* r, Thread*) {
  const uint64_t a = r[op->a], b = r[op->b];
  r[op->d] = Put(F::Do(Get<float>(a), Get<float>(b))) | Put(F::Do(Get<float>(a >> 32), Get<float>(b >> 32))) << 32;
  return op + 1;
}
const Op* PairFma(const Op* op, uint64_t* r, Thread*) {
  const uint64_t a = r[op->a], b = r[op->b], c = r[op->c];
  r[op->d] = Put(std::fma(Get<float>(a), Get<float>(b), Get<float>(c))) |
             Put(std::fma(Get<float>(a >> 32), Get<float>(b >> 32), Get<float>(c >> 32))) << 32;
  return op + 1;
}

template <class F>
bool Emit2(Decoder& d, Round round) {
  const Type type = d.TypeFromEnd();
  const bool plain = round == Round::kNearest && !d.Has("ftz") && !d.Has("sat");
  const bool single = type == Type::kF32;
  const Handler fn =
      plain ? (single ? RunBinary<float, F> : RunBinary<double, F>) : (single ? Slow2<float, F> : Slow2<double, F>);
  if (!d.Simple(fn, type, 2)) return false;
  d.code().ops.back().n = uint16_t(round);
  d.code().ops.back().imm = (d.Has("ftz") ? 1 : 0) | (d.Has("sat") ? 2 : 0);
  return true;
}

Round RoundOf(Decoder& d) {
  return d.Has("rz") ? Round::kZero : d.Has("rm") ? Round::kDown : d.Has("rp") ? Round::kUp : Round::kNearest;
}

bool DecodePairs(Decoder& d) {
  const std::string& opcode = d.in().opcode;
  for (const auto& modifier : d.in().modifiers) {
    if (modifier != "rn" && modifier != "f32x2") return d.Fail("." + modifier + " is not supported here");
  }
  if (opcode == "add") return d.Simple(Pair2<Add>, Type::kB64, 2);
  if (opcode == "sub") return d.Simple(Pair2<Sub>, Type::kB64, 2);
  if (opcode == "mul") return d.Simple(Pair2<Mul>, Type::kB64, 2);
  if (opcode == "fma") return d.Simple(PairFma, Type::kB64, 3);
  return d.Unsupported();
}

template <class F>
bool EmitMinMax(Decoder& d) {
  if (d.Has("xorsign"))
    return d.Has("NaN") ? Emit2<XorSign<OrNan<F>>>(d, Round::kNearest) : Emit2<XorSign<F>>(d, Round::kNearest);
  return d.Has("NaN") ? Emit2<OrNan<F>>(d, Round::kNearest) : Emit2<F>(d, Round::kNearest);
}

template <class T, bool negate>
const Op* Sign(const Op* op, uint64_t* r, Thread*) {
  constexpr uint64_t kTop = uint64_t{1} << (8 * sizeof(T) - 1);
  T value = Flushed(Get<T>(r[op->a]), op->imm != 0);
  const uint64_t bits = Put(value);
  r[op->d] = negate ? bits ^ kTop : bits & ~kTop;
  return op + 1;
}

bool DecodeShared(Decoder& d) {
  const Type type = d.TypeFromEnd();
  const std::string& opcode = d.in().opcode;
  if (!d.in().modifiers.empty() && d.in().modifiers.back() == "f32x2") return DecodePairs(d);
  if (type == Type::kF16 || type == Type::kF16x2 || type == Type::kBf16 || type == Type::kBf16x2) return DecodeHalf(d);
  if (!IsFloat(type)) return DecodeIntegerArithmetic(d);
  // add.f32.f16 and other mixed forms are not here.
  if (d.types().size() != 1) return d.Unsupported();
  if (opcode == "abs" || opcode == "neg") {
    if (!d.Allow("ftz")) return false;
    const bool negate = opcode == "neg", single = type == Type::kF32;
    const Handler fn = single ? (negate ? Sign<float, true> : Sign<float, false>)
                              : (negate ? Sign<double, true> : Sign<double, false>);
    if (!d.Simple(fn, type, 1)) return false;
    d.code().ops.back().imm = d.Has("ftz") ? 1 : 0;
    return true;
  }
  if (opcode == "min" || opcode == "max") {
    if (!d.Allow("ftz NaN xorsign abs")) return false;
    return opcode == "min" ? EmitMinMax<Min>(d) : EmitMinMax<Max>(d);
  }
  if (!d.Allow(opcode == "div" ? "rn rz rm rp ftz approx full" : "rn rz rm rp ftz sat")) return false;
  const Round round = RoundOf(d);
  if (opcode == "add") return Emit2<Add>(d, round);
  if (opcode == "sub") return Emit2<Sub>(d, round);
  if (opcode == "mul") return Emit2<Mul>(d, round);
  if (opcode == "div") return Emit2<Div>(d, round);
  if (opcode == "fma" || opcode == "mad") {
    const bool plain = round == Round::kNearest && !d.Has("ftz") && !d.Has("sat");
    const bool single = type == Type::kF32;
    const Handler fn = plain ? (single ? RunTernary<float, Fma> : RunTernary<double, Fma>)
                             : (single ? Slow3<float, Fma> : Slow3<double, Fma>);
    if (!d.Simple(fn, type, 3)) return false;
    d.code().ops.back().n = uint16_t(round);
    d.code().ops.back().imm = (d.Has("ftz") ? 1 : 0) | (d.Has("sat") ? 2 : 0);
    return true;
  }
  return d.Unsupported();
}

}  // namespace

void AddFloatOps(DecodeTable* table) {
  for (const char* name : {"add", "sub", "mul", "mad", "fma", "div", "abs", "neg", "min", "max"}) {
    (*table)[name] = DecodeShared;
  }
}

}  // namespace cuda_remote::softgpu::ptx
