// SPDX-License-Identifier: Apache-2.0
// Roots, reciprocals, elementary functions, sign and class of floats.
#include <cmath>

#include "softgpu/ptx/decoder.h"
#include "softgpu/ptx/number.h"

namespace cuda_remote::softgpu::ptx {
namespace {

// The approximate functions are computed in double and rounded once: closer than the hardware's, which is allowed.
// clang-format off
struct Sin { static double Do(double a) { return std::sin(a); } };
struct Cos { static double Do(double a) { return std::cos(a); } };
struct Exp2 { static double Do(double a) { return std::exp2(a); } };
struct Log2 { static double Do(double a) { return a == 0 ? -HUGE_VAL : std::log2(a); } };
struct Tanh { static double Do(double a) { return std::tanh(a); } };
struct Rsqrt { static double Do(double a) { return a == 0 ? std::copysign(HUGE_VAL, a) : 1.0 / std::sqrt(a); } };
struct Sqrt { template <class T> static T Do(T a) { return std::sqrt(a); } };
struct Rcp { template <class T> static T Do(T a) { return T(1) / a; } };
// clang-format on

template <class F, bool ftz>
const Op* Approximate(const Op* op, uint64_t* r, Thread*) {
  float a = Get<float>(r[op->a]);
  if (ftz) a = Flush(a);
  float value = float(F::Do(double(a)));
  if (std::isnan(value)) value = Get<float>(0x7fffffff);
  r[op->d] = Put(ftz ? Flush(value) : value);
  return op + 1;
}

// rcp.approx.ftz.f64 and rsqrt.approx.ftz.f64 look at and give the upper half alone.
template <class F>
const Op* ApproximateDouble(const Op* op, uint64_t* r, Thread*) {
  const uint64_t kHigh = 0xffffffff00000000;
  uint64_t a = r[op->a] & kHigh;
  if ((a & 0x7ff0000000000000) == 0) a &= uint64_t{1} << 63;
  uint64_t value = Put(F::Do(Get<double>(a))) & kHigh;
  if ((value & 0x7ff0000000000000) == 0) value &= uint64_t{1} << 63;
  r[op->d] = value;
  return op + 1;
}

// n = rounding, imm = ftz
template <class T, class F>
const Op* Exact(const Op* op, uint64_t* r, Thread*) {
  T a = Get<T>(r[op->a]);
  if (sizeof(T) == 4 && op->imm != 0) a = T(Flush(float(a)));
  T value;
  if (op->n == 0) {
    value = F::Do(a);
  } else {
    const Rounded rounded{Round(op->n)};
    value = Opaque(F::Do(Opaque(a)));
  }
  if (sizeof(T) == 4 && op->imm != 0) value = T(Flush(float(value)));
  r[op->d] = Put(value);
  return op + 1;
}

template <class F>
bool EmitExact(Decoder& d) {
  const Type type = d.TypeFromEnd();
  if (!d.Simple(type == Type::kF32 ? Exact<float, F> : Exact<double, F>, type, 1)) return false;
  const Round round = d.Has("rz")   ? Round::kZero
                      : d.Has("rm") ? Round::kDown
                      : d.Has("rp") ? Round::kUp
                                    : Round::kNearest;
  d.code().ops.back().n = uint16_t(round);
  d.code().ops.back().imm = d.Has("ftz") ? 1 : 0;
  return true;
}

bool DecodeRoot(Decoder& d) {
  if (!d.Allow("approx rn rz rm rp ftz") || d.types().size() != 1) return d.Unsupported();
  const Type type = d.TypeFromEnd();
  if (!IsFloat(type)) return d.Unsupported();
  const std::string& opcode = d.in().opcode;
  const bool approximate = d.Has("approx"), ftz = d.Has("ftz");
  if (type == Type::kF64 && opcode == "rsqrt" && approximate && !ftz) {  // this form is precise
    return d.Simple(RunUnary<double, Rsqrt>, type, 1);
  }
  if (type == Type::kF64 && approximate && opcode != "sqrt") {
    return d.Simple(opcode == "rcp" ? ApproximateDouble<Rcp> : ApproximateDouble<Rsqrt>, type, 1);
  }
  if (opcode == "rsqrt") {
    if (type != Type::kF32) return d.Unsupported();
    return d.Simple(ftz ? Approximate<Rsqrt, true> : Approximate<Rsqrt, false>, type, 1);
  }
  return opcode == "sqrt" ? EmitExact<Sqrt>(d) : EmitExact<Rcp>(d);
}

template <class F>
bool EmitApproximate(Decoder& d) {
  return d.Simple(d.Has("ftz") ? Approximate<F, true> : Approximate<F, false>, Type::kF32, 1);
}

bool DecodeElementary(Decoder& d) {
  const Type type = d.TypeFromEnd();
  if (type == Type::kF16 || type == Type::kF16x2 || type == Type::kBf16 || type == Type::kBf16x2) return DecodeHalf(d);
  if (!d.Allow("approx ftz") || type != Type::kF32) return d.Unsupported();
  const std::string& opcode = d.in().opcode;
  if (opcode == "sin") return EmitApproximate<Sin>(d);
  if (opcode == "cos") return EmitApproximate<Cos>(d);
  if (opcode == "ex2") return EmitApproximate<Exp2>(d);
  if (opcode == "lg2") return EmitApproximate<Log2>(d);
  return EmitApproximate<Tanh>(d);
}

template <class T>
const Op* Testp(const Op* op, uint64_t* r, Thread*) {
  const T a = Get<T>(r[op->a]);
  bool out = false;
  switch (op->n) {
    case 0:
      out = std::isfinite(a);
      break;
    case 1:
      out = std::isinf(a);
      break;
    case 2:
      out = !std::isnan(a);
      break;
    case 3:
      out = std::isnan(a);
      break;
    case 4:
      out = std::fpclassify(a) == FP_NORMAL;
      break;
    default:
      out = std::fpclassify(a) == FP_SUBNORMAL;
      break;
  }
  r[op->d] = out ? 1 : 0;
  return op + 1;
}

bool DecodeTestp(Decoder& d) {
  if (!d.Allow("finite infinite number notanumber normal subnormal")) return false;
  const Type type = d.TypeFromEnd();
  if (!IsFloat(type) || !d.Simple(type == Type::kF32 ? Testp<float> : Testp<double>, type, 1)) return d.Unsupported();
  uint16_t index = 0;
  for (const char* name : {"finite", "infinite", "number", "notanumber", "normal", "subnormal"}) {
    if (d.Has(name)) d.code().ops.back().n = index;
    ++index;
  }
  return true;
}

template <class T>
const Op* Copysign(const Op* op, uint64_t* r, Thread*) {
  constexpr uint64_t kTop = uint64_t{1} << (8 * sizeof(T) - 1);
  r[op->d] = (Put(Get<T>(r[op->b])) & ~kTop) | (r[op->a] & kTop);  // the first source gives the sign
  return op + 1;
}

bool DecodeCopysign(Decoder& d) {
  const Type type = d.TypeFromEnd();
  if (!d.Allow("") || !IsFloat(type)) return d.Unsupported();
  return d.Simple(type == Type::kF32 ? Copysign<float> : Copysign<double>, type, 2);
}

}  // namespace

void AddMathOps(DecodeTable* table) {
  for (const char* name : {"sqrt", "rsqrt", "rcp"}) (*table)[name] = DecodeRoot;
  for (const char* name : {"sin", "cos", "ex2", "lg2", "tanh"}) (*table)[name] = DecodeElementary;
  (*table)["testp"] = DecodeTestp;
  (*table)["copysign"] = DecodeCopysign;
}

}  // namespace cuda_remote::softgpu::ptx
