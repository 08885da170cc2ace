// SPDX-License-Identifier: Apache-2.0
// setp, set, selp, slct.
#include <cmath>

#include "softgpu/ptx/decoder.h"
#include "softgpu/ptx/number.h"

namespace cuda_remote::softgpu::ptx {
namespace {

// clang-format off
struct Eq { template <class T> static bool Do(T a, T b) { return a == b; } };
struct Ne { template <class T> static bool Do(T a, T b) { return a < b || a > b; } };
struct Lt { template <class T> static bool Do(T a, T b) { return a < b; } };
struct Le { template <class T> static bool Do(T a, T b) { return a <= b; } };
struct Gt { template <class T> static bool Do(T a, T b) { return a > b; } };
struct Ge { template <class T> static bool Do(T a, T b) { return a >= b; } };
// clang-format on
// Unordered: true with a NaN.
// clang-format off
struct Equ { template <class T> static bool Do(T a, T b) { return !(a < b || a > b); } };
struct Neu { template <class T> static bool Do(T a, T b) { return !(a == b); } };
struct Ltu { template <class T> static bool Do(T a, T b) { return !(a >= b); } };
struct Leu { template <class T> static bool Do(T a, T b) { return !(a > b); } };
struct Gtu { template <class T> static bool Do(T a, T b) { return !(a <= b); } };
struct Geu { template <class T> static bool Do(T a, T b) { return !(a < b); } };
struct Num { template <class T> static bool Do(T a, T b) { return a == a && b == b; } };
struct Nan { template <class T> static bool Do(T a, T b) { return !(a == a && b == b); } };
// clang-format on

template <class T, class C>
const Op* Compare(const Op* op, uint64_t* r, Thread*) {
  r[op->d] = C::Do(Get<T>(r[op->a]), Get<T>(r[op->b])) ? 1 : 0;
  return op + 1;
}
template <class C>
const Op* CompareFlushed(const Op* op, uint64_t* r, Thread*) {
  r[op->d] = C::Do(Flush(Get<float>(r[op->a])), Flush(Get<float>(r[op->b]))) ? 1 : 0;
  return op + 1;
}
// imm bit 0: bf16, bit 1: the upper half
template <class C>
const Op* CompareHalf(const Op* op, uint64_t* r, Thread*) {
  const Format& format = (op->imm & 1) != 0 ? kBfloat : kHalf;
  const int shift = (op->imm & 2) != 0 ? 16 : 0;
  r[op->d] =
      C::Do(Unpack(uint32_t(r[op->a] >> shift) & 0xffff, format), Unpack(uint32_t(r[op->b] >> shift) & 0xffff, format))
          ? 1
          : 0;
  return op + 1;
}

bool IsHalf(Type type) {
  return type == Type::kF16 || type == Type::kBf16 || type == Type::kF16x2 || type == Type::kBf16x2;
}
bool IsPair(Type type) { return type == Type::kF16x2 || type == Type::kBf16x2; }

template <class C>
Handler Pick(Type type, bool ftz) {
  if (IsHalf(type)) return CompareHalf<C>;
  if (type == Type::kF32) return ftz ? CompareFlushed<C> : Compare<float, C>;
  if (type == Type::kF64) return Compare<double, C>;
  CUDA_REMOTE_PICK_INTEGER(Compare, type, C)
}

Handler PickComparison(const std::string& name, Type type, bool ftz) {
  const bool is_float = IsFloat(type) || IsHalf(type);
  if (name == "eq") return Pick<Eq>(type, ftz);
  if (name == "ne") return Pick<Ne>(type, ftz);
  if (name == "lt" || (name == "lo" && !is_float)) return Pick<Lt>(type, ftz);
  if (name == "le" || (name == "ls" && !is_float)) return Pick<Le>(type, ftz);
  if (name == "gt" || (name == "hi" && !is_float)) return Pick<Gt>(type, ftz);
  if (name == "ge" || (name == "hs" && !is_float)) return Pick<Ge>(type, ftz);
  if (!is_float) return nullptr;
  if (name == "equ") return Pick<Equ>(type, ftz);
  if (name == "neu") return Pick<Neu>(type, ftz);
  if (name == "ltu") return Pick<Ltu>(type, ftz);
  if (name == "leu") return Pick<Leu>(type, ftz);
  if (name == "gtu") return Pick<Gtu>(type, ftz);
  if (name == "geu") return Pick<Geu>(type, ftz);
  if (name == "num") return Pick<Num>(type, ftz);
  if (name == "nan") return Pick<Nan>(type, ftz);
  return nullptr;
}

// d = (a or, with imm, not a) n b; n 1 and, 2 or, 3 xor.
const Op* Combine(const Op* op, uint64_t* r, Thread*) {
  const uint64_t a = (r[op->a] & 1) ^ uint64_t(op->imm), b = r[op->b] & 1;
  r[op->d] = op->n == 1 ? (a & b) : op->n == 2 ? (a | b) : op->n == 3 ? (a ^ b) : a;
  return op + 1;
}

// imm: the bits for true
const Op* FromPredicate(const Op* op, uint64_t* r, Thread*) {
  r[op->d] = (r[op->a] & 1) != 0 ? uint64_t(op->imm) : 0;
  return op + 1;
}
const Op* JoinHalves(const Op* op, uint64_t* r, Thread*) {
  r[op->d] = (r[op->a] & 0xffff) | (r[op->b] & 0xffff) << 16;
  return op + 1;
}

bool DecodeCompare(Decoder& d) {
  if (!d.Allow("eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan and or xor ftz")) return false;
  const bool set = d.in().opcode == "set";
  const Type type = d.TypeFromEnd();
  const Type result = set ? d.TypeFromEnd(1) : Type::kPred;
  if (d.types().size() != (set ? 2u : 1u) || d.in().modifiers.empty()) return d.Unsupported();
  uint16_t combine = d.Has("and") ? 1 : d.Has("or") ? 2 : d.Has("xor") ? 3 : 0;
  if (!d.Operands(combine != 0 ? 4 : 3, combine != 0 ? 4 : 3)) return false;
  const Handler compare = PickComparison(d.in().modifiers[0], type, d.Has("ftz"));
  if (compare == nullptr) return d.Unsupported();
  const int32_t a = d.Src(1, type), b = d.Src(2, type);
  const int32_t c = combine != 0 ? d.Src(3, Type::kPred) : 0;
  const int64_t half = type == Type::kBf16 || type == Type::kBf16x2 ? 1 : 0;
  const Operand& out = d.in().operands[0];
  if (!set && combine == 0 && out.pair == -1 && !IsHalf(type)) {
    d.Emit(compare, d.Dst(0), a, b);
    return true;
  }
  const int32_t low = d.Temp();
  d.Emit(compare, low, a, b).imm = half;
  int32_t high = -1;
  if (IsPair(type)) {
    high = d.Temp();
    d.Emit(compare, high, a, b).imm = half | 2;
  }
  if (!set) {
    // With pairs p and q are the two comparisons, else the second is the opposite of the first.
    const int32_t p = d.Dst(0), q = d.Pair(out);
    const int32_t first = d.Temp();
    d.Emit(Combine, first, low, c).n = combine;
    Op& second = d.Emit(Combine, q, high >= 0 ? high : low, c);
    second.n = combine;
    second.imm = high >= 0 ? 0 : 1;
    d.Emit(Combine, p, first, 0).n = 0;
    return true;
  }
  int64_t truth = 0;
  switch (result) {
    case Type::kU32:
    case Type::kS32:
    case Type::kB32:
      truth = 0xffffffff;
      break;
    case Type::kU16:
    case Type::kS16:
    case Type::kB16:
      truth = 0xffff;
      break;
    case Type::kF32:
      truth = 0x3f800000;
      break;
    case Type::kF16:
    case Type::kF16x2:
      truth = 0x3c00;
      break;
    case Type::kBf16:
    case Type::kBf16x2:
      truth = 0x3f80;
      break;
    default:
      return d.Unsupported();
  }
  d.Emit(Combine, low, low, c).n = combine;
  if (high < 0) {
    d.Emit(FromPredicate, d.Dst(0), low).imm = truth;
    return true;
  }
  d.Emit(Combine, high, high, c).n = combine;
  d.Emit(FromPredicate, low, low).imm = truth & 0xffff;
  d.Emit(FromPredicate, high, high).imm = truth & 0xffff;
  d.Emit(JoinHalves, d.Dst(0), low, high);
  return true;
}

const Op* Selp(const Op* op, uint64_t* r, Thread*) {
  r[op->d] = (r[op->c] & 1) != 0 ? r[op->a] : r[op->b];
  return op + 1;
}
// n 1: the selector is a float
const Op* Slct(const Op* op, uint64_t* r, Thread*) {
  bool first;
  if (op->n != 0) {
    float c = Get<float>(r[op->c]);
    if (op->imm != 0) c = Flush(c);
    first = c >= 0;
  } else {
    first = int32_t(r[op->c]) >= 0;
  }
  r[op->d] = first ? r[op->a] : r[op->b];
  return op + 1;
}

bool DecodeSelp(Decoder& d) {
  if (!d.Allow("") || !d.Operands(4, 4)) return false;
  const Type type = d.TypeFromEnd();
  if (type == Type::kB128 || type == Type::kNone) return d.Unsupported();
  const int32_t a = d.Src(1, type), b = d.Src(2, type), c = d.Src(3, Type::kPred);
  d.Emit(Selp, d.Dst(0), a, b, c);
  return true;
}

bool DecodeSlct(Decoder& d) {
  if (!d.Allow("ftz") || !d.Operands(4, 4) || d.types().size() != 2) return d.Unsupported();
  const Type type = d.TypeFromEnd(1), selector = d.TypeFromEnd();
  if (selector != Type::kS32 && selector != Type::kF32) return d.Unsupported();
  const int32_t a = d.Src(1, type), b = d.Src(2, type), c = d.Src(3, selector);
  Op& op = d.Emit(Slct, d.Dst(0), a, b, c);
  op.n = selector == Type::kF32 ? 1 : 0;
  op.imm = d.Has("ftz") ? 1 : 0;
  return true;
}

}  // namespace

void AddCompareOps(DecodeTable* table) {
  (*table)["setp"] = DecodeCompare;
  (*table)["set"] = DecodeCompare;
  (*table)["selp"] = DecodeSelp;
  (*table)["slct"] = DecodeSlct;
}

}  // namespace cuda_remote::softgpu::ptx
