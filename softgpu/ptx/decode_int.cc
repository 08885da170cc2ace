// SPDX-License-Identifier: Apache-2.0
// Integer arithmetic.
#include <type_traits>

#include "softgpu/ptx/decoder.h"

namespace cuda_remote::softgpu::ptx {
namespace {

template <class T>
using U = std::make_unsigned_t<T>;

// Twice as wide.
template <class T>
struct Wide;
// clang-format off
template <>
struct Wide<uint16_t> { using type = uint32_t; };
template <>
struct Wide<int16_t> { using type = int32_t; };
template <>
struct Wide<uint32_t> { using type = uint64_t; };
template <>
struct Wide<int32_t> { using type = int64_t; };
template <>
struct Wide<uint64_t> { using type = unsigned __int128; };
template <>
struct Wide<int64_t> { using type = __int128; };
// clang-format on

// Unsigned arithmetic where the sign does not matter: signed overflow would be undefined in C++.
// clang-format off
struct Add { template <class T> static T Do(T a, T b) { return T(U<T>(a) + U<T>(b)); } };
struct Sub { template <class T> static T Do(T a, T b) { return T(U<T>(a) - U<T>(b)); } };
struct MulLo { template <class T> static T Do(T a, T b) { return T(uint64_t(a) * uint64_t(b)); } };
// clang-format on
struct MulHi {
  template <class T>
  static T Do(T a, T b) {
    using W = typename Wide<T>::type;
    return T((W(a) * W(b)) >> (8 * sizeof(T)));
  }
};
struct MadLo {
  template <class T>
  static T Do(T a, T b, T c) {
    return T(uint64_t(a) * uint64_t(b) + uint64_t(c));
  }
};
struct MadHi {
  template <class T>
  static T Do(T a, T b, T c) {
    return T(U<T>(MulHi::Do(a, b)) + U<T>(c));
  }
};
struct AddSat32 {
  static int32_t Do(int32_t a, int32_t b) {
    const int64_t sum = int64_t(a) + b;
    return int32_t(sum < INT32_MIN ? INT32_MIN : sum > INT32_MAX ? INT32_MAX : sum);
  }
};
struct SubSat32 {
  static int32_t Do(int32_t a, int32_t b) {
    const int64_t sum = int64_t(a) - b;
    return int32_t(sum < INT32_MIN ? INT32_MIN : sum > INT32_MAX ? INT32_MAX : sum);
  }
};
struct MadHiSat32 {
  static int32_t Do(int32_t a, int32_t b, int32_t c) { return AddSat32::Do(MulHi::Do(a, b), c); }
};
struct Div {
  template <class T>
  static T Do(T a, T b) {
    if (b == 0) return T(-1);  // what NVIDIA GPUs give
    if (std::is_signed<T>::value && b == T(-1)) return T(U<T>(0) - U<T>(a));
    return T(a / b);
  }
};
struct Rem {
  template <class T>
  static T Do(T a, T b) {
    if (b == 0) return a;
    if (std::is_signed<T>::value && b == T(-1)) return 0;
    return T(a % b);
  }
};
// clang-format off
struct Abs { template <class T> static T Do(T a) { return a < 0 ? T(U<T>(0) - U<T>(a)) : a; } };
struct Neg { template <class T> static T Do(T a) { return T(U<T>(0) - U<T>(a)); } };
struct Min { template <class T> static T Do(T a, T b) { return a < b ? a : b; } };
struct Max { template <class T> static T Do(T a, T b) { return a > b ? a : b; } };
// clang-format on
template <class F>
struct Relu {
  template <class T>
  static T Do(T a, T b) {
    const T value = F::Do(a, b);
    return value < 0 ? T(0) : value;
  }
};
struct Sad {
  template <class T>
  static T Do(T a, T b, T c) {
    const U<T> difference = a < b ? U<T>(U<T>(b) - U<T>(a)) : U<T>(U<T>(a) - U<T>(b));
    return T(U<T>(c) + difference);
  }
};

template <class T>
const Op* MulWide(const Op* op, uint64_t* r, Thread*) {
  using W = typename Wide<T>::type;
  r[op->d] = Put(W(W(Get<T>(r[op->a])) * W(Get<T>(r[op->b]))));
  return op + 1;
}
template <class T>
const Op* MadWide(const Op* op, uint64_t* r, Thread*) {
  using W = typename Wide<T>::type;
  using V = std::make_unsigned_t<W>;
  const W product = W(W(Get<T>(r[op->a])) * W(Get<T>(r[op->b])));
  r[op->d] = Put(V(V(product) + Get<V>(r[op->c])));
  return op + 1;
}

int32_t Low24(uint64_t bits, bool is_signed) {
  const uint32_t low = uint32_t(bits) << 8;
  return is_signed ? int32_t(low) >> 8 : int32_t(low >> 8);
}
template <bool is_signed, bool high>
const Op* Mad24(const Op* op, uint64_t* r, Thread*) {
  const int64_t product = int64_t(Low24(r[op->a], is_signed)) * Low24(r[op->b], is_signed);
  r[op->d] = uint32_t((high ? product >> 16 : product) + int64_t(uint32_t(r[op->c])));
  return op + 1;
}

// Carry arithmetic: d = a + b + carry in; `n`: 1 reads the carry, 2 writes it.
template <class T>
const Op* AddCarry(const Op* op, uint64_t* r, Thread* t) {
  using W = typename Wide<T>::type;
  const W sum = W(Get<T>(r[op->a])) + W(Get<T>(r[op->b])) + W((op->n & 1) != 0 ? t->carry : 0);
  r[op->d] = Put(T(sum));
  if ((op->n & 2) != 0) t->carry = (sum >> (8 * sizeof(T))) != 0;
  return op + 1;
}
template <class T>
const Op* SubCarry(const Op* op, uint64_t* r, Thread* t) {
  using W = typename Wide<T>::type;
  // The hardware adds the complement: the flag is set when nothing was borrowed. Division code mixes sub.cc with addc.
  const W sum = W(Get<T>(r[op->a])) + W(T(~Get<T>(r[op->b]))) + W((op->n & 1) != 0 ? t->carry : 1);
  r[op->d] = Put(T(sum));
  if ((op->n & 2) != 0) t->carry = (sum >> (8 * sizeof(T))) != 0;
  return op + 1;
}
template <class T, bool high>
const Op* MadCarry(const Op* op, uint64_t* r, Thread* t) {
  using V = U<T>;
  using W = typename Wide<V>::type;
  const T a = Get<T>(r[op->a]), b = Get<T>(r[op->b]);
  const V part = V(high ? MulHi::Do(a, b) : MulLo::Do(a, b));
  const W sum = W(part) + W(Get<V>(r[op->c])) + W((op->n & 1) != 0 ? t->carry : 0);
  r[op->d] = Put(V(sum));
  if ((op->n & 2) != 0) t->carry = (sum >> (8 * sizeof(V))) != 0;
  return op + 1;
}

bool DecodeCarry(Decoder& d) {
  const std::string& opcode = d.in().opcode;
  const bool reads = opcode.back() == 'c';  // addc, subc, madc
  const bool writes = d.Has("cc");
  const Type type = d.TypeFromEnd();
  const bool wide = SizeOf(type) == 8;
  if (SizeOf(type) < 4 || IsFloat(type)) return d.Unsupported();
  Handler fn;
  if (opcode[0] == 'm') {
    if (!d.Allow("cc lo hi")) return false;
    const bool high = d.Has("hi");
    if (IsSigned(type)) {
      fn = wide ? (high ? MadCarry<int64_t, true> : MadCarry<int64_t, false>)
                : (high ? MadCarry<int32_t, true> : MadCarry<int32_t, false>);
    } else {
      fn = wide ? (high ? MadCarry<uint64_t, true> : MadCarry<uint64_t, false>)
                : (high ? MadCarry<uint32_t, true> : MadCarry<uint32_t, false>);
    }
    if (!d.Simple(fn, type, 3)) return false;
  } else {
    if (!d.Allow("cc")) return false;
    fn = opcode[0] == 'a' ? (wide ? AddCarry<uint64_t> : AddCarry<uint32_t>)
                          : (wide ? SubCarry<uint64_t> : SubCarry<uint32_t>);
    if (!d.Simple(fn, type, 2)) return false;
  }
  d.code().ops.back().n = uint16_t((reads ? 1 : 0) | (writes ? 2 : 0));
  return true;
}

bool DecodeMad24(Decoder& d) {
  if (!d.Allow("lo hi")) return false;
  const bool mad = d.in().opcode == "mad24";
  if (!d.Operands(mad ? 4 : 3, mad ? 4 : 3)) return false;
  const bool is_signed = IsSigned(d.TypeFromEnd()), high = d.Has("hi");
  const Handler fn =
      is_signed ? (high ? Mad24<true, true> : Mad24<true, false>) : (high ? Mad24<false, true> : Mad24<false, false>);
  const Type type = d.TypeFromEnd();
  const int32_t a = d.Src(1, type), b = d.Src(2, type), c = mad ? d.Src(3, type) : d.Const(0);
  d.Emit(fn, d.Dst(0), a, b, c);
  return true;
}

bool DecodeSad(Decoder& d) { return d.Allow("") && d.Simple(PickTernary<Sad>(d.TypeFromEnd()), d.TypeFromEnd(), 3); }

bool DecodeRem(Decoder& d) { return d.Allow("") && d.Simple(PickBinary<Rem>(d.TypeFromEnd()), d.TypeFromEnd(), 2); }

// dp4a, dp2a: sums of products of small parts.
template <bool a_signed, bool b_signed>
const Op* Dp4a(const Op* op, uint64_t* r, Thread*) {
  uint32_t sum = uint32_t(r[op->c]);
  for (int i = 0; i < 4; ++i) {
    const uint32_t x = uint32_t(r[op->a] >> (8 * i)) & 0xff, y = uint32_t(r[op->b] >> (8 * i)) & 0xff;
    sum += uint32_t(a_signed ? int32_t(int8_t(x)) : int32_t(x)) * uint32_t(b_signed ? int32_t(int8_t(y)) : int32_t(y));
  }
  r[op->d] = sum;
  return op + 1;
}
template <bool a_signed, bool b_signed>
const Op* Dp2a(const Op* op, uint64_t* r, Thread*) {
  uint32_t sum = uint32_t(r[op->c]);
  for (int i = 0; i < 2; ++i) {
    const uint32_t x = uint32_t(r[op->a] >> (16 * i)) & 0xffff;
    const uint32_t y = uint32_t(r[op->b] >> (8 * (i + op->n))) & 0xff;
    sum += uint32_t(a_signed ? int32_t(int16_t(x)) : int32_t(x)) * uint32_t(b_signed ? int32_t(int8_t(y)) : int32_t(y));
  }
  r[op->d] = sum;
  return op + 1;
}

bool DecodeDotProduct(Decoder& d) {
  if (!d.Allow("lo hi") || d.types().size() != 2) return d.Unsupported();
  const bool a = IsSigned(d.TypeFromEnd(1)), b = IsSigned(d.TypeFromEnd(0));
  Handler fn;
  if (d.in().opcode == "dp4a") {
    fn = a ? (b ? Dp4a<true, true> : Dp4a<true, false>) : (b ? Dp4a<false, true> : Dp4a<false, false>);
  } else {
    fn = a ? (b ? Dp2a<true, true> : Dp2a<true, false>) : (b ? Dp2a<false, true> : Dp2a<false, false>);
  }
  if (!d.Simple(fn, Type::kB32, 3)) return false;
  d.code().ops.back().n = d.Has("hi") ? 2 : 0;
  return true;
}

// add.u16x2 and kin.
template <class T, class F>
const Op* RunPair16(const Op* op, uint64_t* r, Thread*) {
  const uint64_t a = r[op->a], b = r[op->b];
  const uint16_t low = uint16_t(F::Do(T(a), T(b))), high = uint16_t(F::Do(T(a >> 16), T(b >> 16)));
  r[op->d] = uint32_t(low) | uint32_t(high) << 16;
  return op + 1;
}

bool DecodePair16(Decoder& d) {
  const std::string& opcode = d.in().opcode;
  const bool is_signed = d.Has("s16x2");
  Handler fn = nullptr;
  if (opcode == "add") fn = RunPair16<uint16_t, Add>;
  if (d.Has("relu") && d.in().modifiers.size() == 2) {
    if (!is_signed || (opcode != "min" && opcode != "max")) return d.Unsupported();
    return d.Simple(opcode == "min" ? RunPair16<int16_t, Relu<Min>> : RunPair16<int16_t, Relu<Max>>, Type::kB32, 2);
  }
  if (opcode == "min") fn = is_signed ? RunPair16<int16_t, Min> : RunPair16<uint16_t, Min>;
  if (opcode == "max") fn = is_signed ? RunPair16<int16_t, Max> : RunPair16<uint16_t, Max>;
  return d.in().modifiers.size() == 1 ? d.Simple(fn, Type::kB32, 2) : d.Unsupported();
}

Handler PickWideHandler(Type type, bool mad) {
  switch (type) {
    case Type::kU16:
      return mad ? MadWide<uint16_t> : MulWide<uint16_t>;
    case Type::kS16:
      return mad ? MadWide<int16_t> : MulWide<int16_t>;
    case Type::kU32:
      return mad ? MadWide<uint32_t> : MulWide<uint32_t>;
    case Type::kS32:
      return mad ? MadWide<int32_t> : MulWide<int32_t>;
    default:
      return nullptr;
  }
}

}  // namespace

bool DecodeIntegerArithmetic(Decoder& d) {
  const std::string& opcode = d.in().opcode;
  if (d.Has("u16x2") || d.Has("s16x2")) return DecodePair16(d);
  const Type type = d.TypeFromEnd();
  if (opcode == "add" || opcode == "sub") {
    if (d.Has("cc")) return DecodeCarry(d);
    if (!d.Allow("sat")) return false;
    const bool add = opcode == "add";
    if (d.Has("sat")) {
      if (type != Type::kS32) return d.Unsupported();
      return d.Simple(add ? RunBinary<int32_t, AddSat32> : RunBinary<int32_t, SubSat32>, type, 2);
    }
    return d.Simple(add ? PickBinary<Add>(Unsigned(type)) : PickBinary<Sub>(Unsigned(type)), type, 2);
  }
  if (opcode == "mul" || opcode == "mad") {
    if (d.Has("cc")) return DecodeCarry(d);
    if (!d.Allow("lo hi wide sat")) return false;
    const bool mad = opcode == "mad";
    const size_t sources = mad ? 3 : 2;
    if (d.Has("sat")) {
      if (!mad || type != Type::kS32 || !d.Has("hi")) return d.Unsupported();
      return d.Simple(RunTernary<int32_t, MadHiSat32>, type, 3);
    }
    if (d.Has("wide")) return d.Simple(PickWideHandler(type, mad), type, sources);
    if (d.Has("hi")) return d.Simple(mad ? PickTernary<MadHi>(type) : PickBinary<MulHi>(type), type, sources);
    return d.Simple(mad ? PickTernary<MadLo>(Unsigned(type)) : PickBinary<MulLo>(Unsigned(type)), type, sources);
  }
  if (!d.Allow(opcode == "min" || opcode == "max" ? "relu" : "")) return false;
  if (d.Has("relu")) {
    if (type != Type::kS32) return d.Unsupported();
    return d.Simple(opcode == "min" ? RunBinary<int32_t, Relu<Min>> : RunBinary<int32_t, Relu<Max>>, type, 2);
  }
  if (opcode == "div") return d.Simple(PickBinary<Div>(type), type, 2);
  if (opcode == "abs") return d.Simple(PickUnary<Abs>(type), type, 1);
  if (opcode == "neg") return d.Simple(PickUnary<Neg>(type), type, 1);
  if (opcode == "min") return d.Simple(PickBinary<Min>(type), type, 2);
  if (opcode == "max") return d.Simple(PickBinary<Max>(type), type, 2);
  return d.Unsupported();
}

void AddIntegerOps(DecodeTable* table) {
  for (const char* name : {"addc", "subc", "madc"}) (*table)[name] = DecodeCarry;
  (*table)["mul24"] = DecodeMad24;
  (*table)["mad24"] = DecodeMad24;
  (*table)["sad"] = DecodeSad;
  (*table)["rem"] = DecodeRem;
  (*table)["dp4a"] = DecodeDotProduct;
  (*table)["dp2a"] = DecodeDotProduct;
}

}  // namespace cuda_remote::softgpu::ptx
