// SPDX-License-Identifier: Apache-2.0
// cvt between integers, f32 and f64, and cvt.pack. Forms with 16- and 8-bit floats: decode_convert_half.cc.
#include <cmath>
#include <limits>
#include <type_traits>

#include "softgpu/ptx/convert.h"
#include "softgpu/ptx/number.h"

namespace cuda_remote::softgpu::ptx {
namespace {

// An integer as a register: extended by its own sign, so that a wider register is right too.
template <class D>
uint64_t Extend(D value) {
  return std::is_signed<D>::value ? uint64_t(int64_t(value)) : uint64_t(value);
}

template <class S, class D>
const Op* IntToInt(const Op* op, uint64_t* r, Thread*) {
  r[op->d] = Extend(D(Get<S>(r[op->a])));
  return op + 1;
}
template <class S, class D>
const Op* IntToIntSat(const Op* op, uint64_t* r, Thread*) {
  // NOLINTBEGIN(bugprone-signed-char-misuse): their signs are meant.
  const __int128 value = Get<S>(r[op->a]);
  const __int128 low = std::numeric_limits<D>::min(), high = std::numeric_limits<D>::max();
  // NOLINTEND(bugprone-signed-char-misuse)
  r[op->d] = Extend(D(value < low ? low : value > high ? high : value));
  return op + 1;
}
template <class S, class F>
const Op* IntToFloat(const Op* op, uint64_t* r, Thread*) {
  r[op->d] = Put(F(Get<S>(r[op->a])));
  return op + 1;
}
template <class F>
F Saturated(F value) {
  return !(value > 0) ? F(0) : value > 1 ? F(1) : value;
}
// n = rounding, imm bit 1: saturate
template <class S, class F>
const Op* IntToFloatSlow(const Op* op, uint64_t* r, Thread*) {
  F value;
  {
    const Rounded rounded{Round(op->n)};
    value = Opaque(F(Opaque(Get<S>(r[op->a]))));
  }
  r[op->d] = Put((op->imm & 2) != 0 ? Saturated(value) : value);
  return op + 1;
}
// n = rounding, imm bit 0: ftz
template <class F, class D>
const Op* FloatToInt(const Op* op, uint64_t* r, Thread*) {
  F value = Get<F>(r[op->a]);
  if (sizeof(F) == 4 && (op->imm & 1) != 0) value = F(Flush(float(value)));
  r[op->d] = Extend(ToInteger<D>(double(value), Round(op->n), sizeof(F) == 8));
  return op + 1;
}
const Op* Widen(const Op* op, uint64_t* r, Thread*) {
  r[op->d] = Put(double(Get<float>(r[op->a])));
  return op + 1;
}
const Op* Narrow(const Op* op, uint64_t* r, Thread*) {
  r[op->d] = Put(float(Get<double>(r[op->a])));
  return op + 1;
}
// n = rounding; imm bit 0 ftz, bit 1 saturate, bit 2 to an integral number.
template <class S, class F>
const Op* FloatToFloat(const Op* op, uint64_t* r, Thread*) {
  S value = Get<S>(r[op->a]);
  const bool ftz = (op->imm & 1) != 0;
  if (sizeof(S) == 4 && ftz) value = S(Flush(float(value)));
  if ((op->imm & 4) != 0) value = S(Integral(double(value), Round(op->n)));
  F out;
  {
    const Rounded rounded{Round(op->n)};
    out = Opaque(F(Opaque(value)));
  }
  if ((op->imm & 2) != 0) out = Saturated(out);
  if (sizeof(F) == 4 && ftz) out = F(Flush(float(out)));
  r[op->d] = Put(out);
  return op + 1;
}

template <class S>
Handler PickFromInt(Type to, bool sat) {
  switch (Type(to == Type::kB8 || to == Type::kB16 || to == Type::kB32 || to == Type::kB64 ? Unsigned(to) : to)) {
    case Type::kU8:
      return sat ? IntToIntSat<S, uint8_t> : IntToInt<S, uint8_t>;
    case Type::kS8:
      return sat ? IntToIntSat<S, int8_t> : IntToInt<S, int8_t>;
    case Type::kU16:
      return sat ? IntToIntSat<S, uint16_t> : IntToInt<S, uint16_t>;
    case Type::kS16:
      return sat ? IntToIntSat<S, int16_t> : IntToInt<S, int16_t>;
    case Type::kU32:
      return sat ? IntToIntSat<S, uint32_t> : IntToInt<S, uint32_t>;
    case Type::kS32:
      return sat ? IntToIntSat<S, int32_t> : IntToInt<S, int32_t>;
    case Type::kU64:
      return sat ? IntToIntSat<S, uint64_t> : IntToInt<S, uint64_t>;
    case Type::kS64:
      return sat ? IntToIntSat<S, int64_t> : IntToInt<S, int64_t>;
    case Type::kF32:
      return IntToFloat<S, float>;
    case Type::kF64:
      return IntToFloat<S, double>;
    default:
      return nullptr;
  }
}

Handler PickInt(Type from, Type to, bool sat) {
  switch (from) {
    case Type::kU8:
    case Type::kB8:
      return PickFromInt<uint8_t>(to, sat);
    case Type::kS8:
      return PickFromInt<int8_t>(to, sat);
    case Type::kU16:
    case Type::kB16:
      return PickFromInt<uint16_t>(to, sat);
    case Type::kS16:
      return PickFromInt<int16_t>(to, sat);
    case Type::kU32:
    case Type::kB32:
      return PickFromInt<uint32_t>(to, sat);
    case Type::kS32:
      return PickFromInt<int32_t>(to, sat);
    case Type::kU64:
    case Type::kB64:
      return PickFromInt<uint64_t>(to, sat);
    case Type::kS64:
      return PickFromInt<int64_t>(to, sat);
    default:
      return nullptr;
  }
}

template <class F>
Handler PickIntToFloatSlow(Type from) {
  switch (from) {
    case Type::kU8:
      return IntToFloatSlow<uint8_t, F>;
    case Type::kS8:
      return IntToFloatSlow<int8_t, F>;
    case Type::kU16:
      return IntToFloatSlow<uint16_t, F>;
    case Type::kS16:
      return IntToFloatSlow<int16_t, F>;
    case Type::kU32:
      return IntToFloatSlow<uint32_t, F>;
    case Type::kS32:
      return IntToFloatSlow<int32_t, F>;
    case Type::kU64:
      return IntToFloatSlow<uint64_t, F>;
    case Type::kS64:
      return IntToFloatSlow<int64_t, F>;
    default:
      return nullptr;
  }
}

template <class F>
Handler PickFloatToInt(Type to) {
  switch (to) {
    case Type::kU8:
      return FloatToInt<F, uint8_t>;
    case Type::kS8:
      return FloatToInt<F, int8_t>;
    case Type::kU16:
      return FloatToInt<F, uint16_t>;
    case Type::kS16:
      return FloatToInt<F, int16_t>;
    case Type::kU32:
      return FloatToInt<F, uint32_t>;
    case Type::kS32:
      return FloatToInt<F, int32_t>;
    case Type::kU64:
      return FloatToInt<F, uint64_t>;
    case Type::kS64:
      return FloatToInt<F, int64_t>;
    default:
      return nullptr;
  }
}

// cvt.pack.sat.to.s32[.b32] d, a, b[, c]: n is the width of the parts, imm bit 0 whether they are signed.
int64_t Clamp(int32_t value, uint32_t bits, bool is_signed) {
  const int64_t low = is_signed ? -(int64_t{1} << (bits - 1)) : 0;
  const int64_t high = (int64_t{1} << (is_signed ? bits - 1 : bits)) - 1;
  return value < low ? low : value > high ? high : value;
}
const Op* CvtPack(const Op* op, uint64_t* r, Thread*) {
  const uint32_t bits = op->n, mask = bits == 32 ? ~0u : (1u << bits) - 1;
  const bool is_signed = (op->imm & 1) != 0;
  const uint32_t a = uint32_t(Clamp(int32_t(r[op->a]), bits, is_signed)) & mask;
  const uint32_t b = uint32_t(Clamp(int32_t(r[op->b]), bits, is_signed)) & mask;
  const uint32_t c = bits == 16 ? 0 : uint32_t(r[op->c]) << (2 * bits);
  r[op->d] = c | a << bits | b;
  return op + 1;
}

bool DecodePack(Decoder& d) {
  if (!d.Allow("pack sat u4 s4 u2 s2") || !d.Operands(3, 4)) return false;
  uint32_t bits = 0;
  bool is_signed = false;
  for (const auto& modifier : d.in().modifiers) {
    if (modifier == "pack" || modifier == "sat") continue;
    is_signed = modifier[0] == 's';
    bits = uint32_t(std::atoi(modifier.c_str() + 1));
    break;
  }
  if ((bits != 2 && bits != 4 && bits != 8 && bits != 16) || !d.Has("sat")) return d.Unsupported();
  const int32_t a = d.Src(1, Type::kS32), b = d.Src(2, Type::kS32);
  const int32_t c = d.in().operands.size() == 4 ? d.Src(3, Type::kB32) : d.Const(0);
  Op& op = d.Emit(CvtPack, d.Dst(0), a, b, c);
  op.n = uint16_t(bits);
  op.imm = is_signed ? 1 : 0;
  return true;
}

bool IsNarrow(Type type) {
  switch (type) {
    case Type::kF16:
    case Type::kBf16:
    case Type::kF16x2:
    case Type::kBf16x2:
    case Type::kTf32:
    case Type::kE4m3x2:
    case Type::kE5m2x2:
      return true;
    default:
      return false;
  }
}

bool DecodeCvt(Decoder& d) {
  if (d.Has("pack")) return DecodePack(d);
  if (!d.Allow("rn rz rm rp rna rni rzi rmi rpi ftz sat relu satfinite") || d.types().size() != 2) {
    return d.Unsupported();
  }
  const Type to = d.types()[0], from = d.types()[1];
  if (IsNarrow(to) || IsNarrow(from)) return DecodeNarrowConversion(d);
  const bool sat = d.Has("sat"), ftz = d.Has("ftz");
  const bool integral = d.Has("rni") || d.Has("rzi") || d.Has("rmi") || d.Has("rpi");
  const Round round = d.Has("rz") || d.Has("rzi")   ? Round::kZero
                      : d.Has("rm") || d.Has("rmi") ? Round::kDown
                      : d.Has("rp") || d.Has("rpi") ? Round::kUp
                                                    : Round::kNearest;
  if (d.Has("relu") || d.Has("satfinite") || d.Has("rna")) return d.Unsupported();
  Handler fn = nullptr;
  if (!IsFloat(from)) {
    fn = PickInt(from, to, sat);
    if (IsFloat(to) && (round != Round::kNearest || sat)) {
      fn = to == Type::kF32 ? PickIntToFloatSlow<float>(from) : PickIntToFloatSlow<double>(from);
    }
  } else if (!IsFloat(to)) {
    fn = from == Type::kF32 ? PickFloatToInt<float>(to) : PickFloatToInt<double>(to);
  } else if (from == Type::kF32) {
    fn = to == Type::kF32 ? FloatToFloat<float, float> : ftz || sat ? FloatToFloat<float, double> : Widen;
  } else {
    fn = to == Type::kF64                           ? FloatToFloat<double, double>
         : round == Round::kNearest && !sat && !ftz ? Narrow
                                                    : FloatToFloat<double, float>;
  }
  if (!d.Simple(fn, from, 1)) return false;
  Op& op = d.code().ops.back();
  op.n = uint16_t(round);
  op.imm = (ftz ? 1 : 0) | (sat ? 2 : 0) | (integral ? 4 : 0);
  return true;
}

}  // namespace

double Integral(double value, Round round) {
  switch (round) {
    case Round::kZero:
      return std::trunc(value);
    case Round::kDown:
      return std::floor(value);
    case Round::kUp:
      return std::ceil(value);
    default:
      return std::nearbyint(value);  // the host's mode is to nearest, ties to even
  }
}

void AddConvertOps(DecodeTable* table) { (*table)["cvt"] = DecodeCvt; }

}  // namespace cuda_remote::softgpu::ptx
