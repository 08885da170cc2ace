// SPDX-License-Identifier: Apache-2.0
// Logic, shifts, bit fields, permutations.
#include <algorithm>
#include <type_traits>

#include "softgpu/ptx/decoder.h"

namespace cuda_remote::softgpu::ptx {
namespace {

// clang-format off
struct And { template <class T> static T Do(T a, T b) { return T(a & b); } };
struct Or { template <class T> static T Do(T a, T b) { return T(a | b); } };
struct Xor { template <class T> static T Do(T a, T b) { return T(a ^ b); } };
struct Not { template <class T> static T Do(T a) { return T(~a); } };
struct NotPred { static uint8_t Do(uint8_t a) { return (a & 1) ^ 1; } };
struct Cnot { template <class T> static T Do(T a) { return T(a == 0 ? 1 : 0); } };
struct Popc { template <class T> static T Do(T a) { return T(__builtin_popcountll(a)); } };
// clang-format on
struct Clz {
  template <class T>
  static T Do(T a) {
    return T(a == 0 ? 8 * sizeof(T) : size_t(__builtin_clzll(a)) - (64 - 8 * sizeof(T)));
  }
};
struct Brev {
  template <class T>
  static T Do(T a) {
    T out = 0;
    for (size_t i = 0; i < 8 * sizeof(T); ++i) {
      out = T(out << 1 | (a & 1));
      a = T(a >> 1);
    }
    return out;
  }
};

// The amount is 32 bits wide and clamped.
template <class T>
const Op* Shl(const Op* op, uint64_t* r, Thread*) {
  const uint32_t amount = uint32_t(r[op->b]);
  r[op->d] = amount >= 8 * sizeof(T) ? 0 : Put(T(uint64_t(Get<T>(r[op->a])) << amount));
  return op + 1;
}
template <class T>
const Op* Shr(const Op* op, uint64_t* r, Thread*) {
  const uint32_t amount = std::min<uint32_t>(uint32_t(r[op->b]), 63);
  const int64_t sign_extended = int64_t(Get<T>(r[op->a]));
  r[op->d] = Put(T(std::is_signed<T>::value ? uint64_t(sign_extended >> amount)
                                            : (uint32_t(r[op->b]) > 63 ? 0 : uint64_t(sign_extended) >> amount)));
  return op + 1;
}

// shf: n 0 left, 1 right; imm 1 wraps the amount, 0 clamps it.
const Op* Shf(const Op* op, uint64_t* r, Thread*) {
  const uint64_t both = uint64_t(uint32_t(r[op->b])) << 32 | uint32_t(r[op->a]);
  const uint32_t given = uint32_t(r[op->c]);
  const uint32_t amount = op->imm != 0 ? given & 31 : std::min<uint32_t>(given, 32);
  r[op->d] = op->n == 0 ? uint32_t((both << amount) >> 32) : uint32_t(both >> amount);
  return op + 1;
}

const Op* Lop3(const Op* op, uint64_t* r, Thread*) {
  const uint32_t a = uint32_t(r[op->a]), b = uint32_t(r[op->b]), c = uint32_t(r[op->c]);
  uint32_t out = 0;
  const unsigned table = op->n;
  if (table & 0x01) out |= ~a & ~b & ~c;
  if (table & 0x02) out |= ~a & ~b & c;
  if (table & 0x04) out |= ~a & b & ~c;
  if (table & 0x08) out |= ~a & b & c;
  if (table & 0x10) out |= a & ~b & ~c;
  if (table & 0x20) out |= a & ~b & c;
  if (table & 0x40) out |= a & b & ~c;
  if (table & 0x80) out |= a & b & c;
  r[op->d] = out;
  return op + 1;
}
// lop3.and/.or with a predicate: more[0] the predicate read, more[1] the one written, imm 1: and.
const Op* Lop3Predicate(const Op* op, uint64_t* r, Thread* t) {
  const bool q = (r[op->more[0]] & 1) != 0;
  Lop3(op, r, t);
  const bool p = uint32_t(r[op->d]) != 0;
  r[op->more[1]] = op->imm != 0 ? p && q : p || q;
  return op + 1;
}

uint32_t PrmtSelector(uint32_t mode, uint32_t selector) {
  const uint32_t s = selector & 3;
  uint32_t out = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    uint32_t pick = 0;
    switch (mode) {
      case 1:  // f4e
        pick = s + i;
        break;
      case 2:  // b4e
        pick = (s + 8 - i) & 7;
        break;
      case 3:  // rc8
        pick = s;
        break;
      case 4:  // ecl
        pick = std::max(i, s);
        break;
      case 5:  // ecr
        pick = std::min(i, s);
        break;
      default:  // rc16
        pick = (s & 1) * 2 + (i & 1);
        break;
    }
    out |= pick << (4 * i);
  }
  return out;
}
const Op* Prmt(const Op* op, uint64_t* r, Thread*) {
  const uint64_t both = uint64_t(uint32_t(r[op->b])) << 32 | uint32_t(r[op->a]);
  uint32_t selector = uint32_t(r[op->c]);
  if (op->n != 0) selector = PrmtSelector(op->n, selector);
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t pick = selector >> (4 * i) & 0xf;
    uint32_t byte = uint32_t(both >> (8 * (pick & 7))) & 0xff;
    if ((pick & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;  // its sign
    out |= byte << (8 * i);
  }
  r[op->d] = out;
  return op + 1;
}

// n 1: .shiftamt
template <class T>
const Op* Bfind(const Op* op, uint64_t* r, Thread*) {
  using V = std::make_unsigned_t<T>;
  const T a = Get<T>(r[op->a]);
  const V bits = a < 0 ? V(~V(a)) : V(a);
  if (bits == 0) {
    r[op->d] = 0xffffffff;
  } else {
    const uint32_t top = 63 - uint32_t(__builtin_clzll(bits));
    r[op->d] = op->n != 0 ? uint32_t(8 * sizeof(T) - 1) - top : top;
  }
  return op + 1;
}

template <class T>
const Op* Bfe(const Op* op, uint64_t* r, Thread*) {
  using V = std::make_unsigned_t<T>;
  const uint32_t bits = 8 * sizeof(T), position = uint32_t(r[op->b]) & 0xff, length = uint32_t(r[op->c]) & 0xff;
  const V a = Get<V>(r[op->a]);
  V out = 0;
  if (length != 0) {
    if (position < bits) out = V(a >> position);
    if (std::is_signed<T>::value) {
      const uint32_t top = std::min(position + length - 1, bits - 1);
      const bool sign = (a >> top & 1) != 0;
      if (position >= bits) {
        out = sign ? V(~V(0)) : 0;
      } else {
        const uint32_t kept = top - position + 1;
        if (kept < bits) out = V(out & ((V(1) << kept) - 1));
        if (sign && kept < bits) out = V(out | (~V(0) << kept));
      }
    } else if (length < bits) {
      out = V(out & ((V(1) << length) - 1));
    }
  }
  r[op->d] = Put(out);
  return op + 1;
}

// d = a inserted into b; more[0] holds the length.
template <class T>
const Op* Bfi(const Op* op, uint64_t* r, Thread*) {
  const uint32_t bits = 8 * sizeof(T), position = uint32_t(r[op->c]) & 0xff;
  const uint32_t length = uint32_t(r[op->more[0]]) & 0xff;
  const T a = Get<T>(r[op->a]), b = Get<T>(r[op->b]);
  T out = b;
  if (position < bits && length != 0) {
    const T field = length >= bits ? T(~T(0)) : T((T(1) << length) - 1);
    const T mask = T(field << position);
    out = T((b & ~mask) | (T(a << position) & mask));
  }
  r[op->d] = Put(out);
  return op + 1;
}

const Op* Fns(const Op* op, uint64_t* r, Thread*) {
  const uint32_t mask = uint32_t(r[op->a]);
  const int32_t base = int32_t(uint32_t(r[op->b]) & 31), offset = int32_t(r[op->c]);
  uint32_t out = 0xffffffff;
  if (offset == 0) {
    if ((mask >> base & 1) != 0) out = uint32_t(base);
  } else {
    int32_t left = offset > 0 ? offset : -int64_t(offset) > 64 ? 64 : -offset;
    const int32_t step = offset > 0 ? 1 : -1;
    for (int32_t at = base; at >= 0 && at < 32; at += step) {
      if ((mask >> at & 1) != 0 && --left == 0) {
        out = uint32_t(at);
        break;
      }
    }
  }
  r[op->d] = out;
  return op + 1;
}

// szext: a cut to b bits and extended; n 1: wrap.
template <bool is_signed>
const Op* Szext(const Op* op, uint64_t* r, Thread*) {
  uint32_t bits = uint32_t(r[op->b]);
  bits = op->n != 0 ? bits & 31 : std::min<uint32_t>(bits, 32);
  const uint32_t a = uint32_t(r[op->a]);
  uint32_t out = bits >= 32 ? a : a & ((1u << bits) - 1);
  if (is_signed && bits > 0 && bits < 32 && (out >> (bits - 1) & 1) != 0) out |= ~0u << bits;
  r[op->d] = out;
  return op + 1;
}
const Op* Bmsk(const Op* op, uint64_t* r, Thread*) {
  uint32_t position = uint32_t(r[op->a]), length = uint32_t(r[op->b]);
  position = op->n != 0 ? position & 31 : std::min<uint32_t>(position, 32);
  length = op->n != 0 ? length & 31 : std::min<uint32_t>(length, 32);
  const uint64_t field = (uint64_t{1} << length) - 1;
  r[op->d] = uint32_t(position >= 32 ? 0 : field << position);
  return op + 1;
}

bool DecodeLogic(Decoder& d) {
  if (!d.Allow("")) return false;
  const std::string& opcode = d.in().opcode;
  const Type type = d.TypeFromEnd();
  const bool pred = type == Type::kPred;
  if (opcode == "not") return d.Simple(pred ? RunUnary<uint8_t, NotPred> : PickUnary<Not>(type), type, 1);
  if (opcode == "cnot") return d.Simple(PickUnary<Cnot>(type), type, 1);
  if (opcode == "and") return d.Simple(pred ? RunBinary<uint8_t, And> : PickBinary<And>(type), type, 2);
  if (opcode == "or") return d.Simple(pred ? RunBinary<uint8_t, Or> : PickBinary<Or>(type), type, 2);
  return d.Simple(pred ? RunBinary<uint8_t, Xor> : PickBinary<Xor>(type), type, 2);
}

bool DecodeShift(Decoder& d) {
  if (!d.Allow("")) return false;
  const Type type = d.in().opcode == "shl" ? Unsigned(d.TypeFromEnd()) : d.TypeFromEnd();
  const bool left = d.in().opcode == "shl";
  Handler fn = nullptr;
  switch (type) {
    case Type::kU16:
    case Type::kB16:
      fn = left ? Shl<uint16_t> : Shr<uint16_t>;
      break;
    case Type::kU32:
    case Type::kB32:
      fn = left ? Shl<uint32_t> : Shr<uint32_t>;
      break;
    case Type::kU64:
    case Type::kB64:
      fn = left ? Shl<uint64_t> : Shr<uint64_t>;
      break;
    case Type::kS16:
      fn = Shr<int16_t>;
      break;
    case Type::kS32:
      fn = Shr<int32_t>;
      break;
    case Type::kS64:
      fn = Shr<int64_t>;
      break;
    default:
      break;
  }
  return d.Simple(fn, Type::kU32, 2);
}

bool DecodeShf(Decoder& d) {
  if (!d.Allow("l r wrap clamp") || !d.Simple(Shf, Type::kB32, 3)) return false;
  d.code().ops.back().n = d.Has("r") ? 1 : 0;
  d.code().ops.back().imm = d.Has("wrap") ? 1 : 0;
  return true;
}

bool DecodeLop3(Decoder& d) {
  if (!d.Allow("and or")) return false;
  const bool predicate = d.Has("and") || d.Has("or");
  if (!d.Operands(predicate ? 6 : 5, predicate ? 6 : 5)) return false;
  const Operand& table = d.in().operands[4];
  if (table.kind != Operand::Kind::kImm) return d.Fail("the table must be a number");
  const int32_t a = d.Src(1, Type::kB32), b = d.Src(2, Type::kB32), c = d.Src(3, Type::kB32);
  if (!predicate) {
    d.Emit(Lop3, d.Dst(0), a, b, c).n = uint16_t(table.bits & 0xff);
    return true;
  }
  const int32_t q = d.Src(5, Type::kPred);
  const int32_t* more = d.List({q, d.Pair(d.in().operands[0])});
  Op& op = d.Emit(Lop3Predicate, d.Dst(0), a, b, c);
  op.n = uint16_t(table.bits & 0xff);
  op.more = more;
  op.imm = d.Has("and") ? 1 : 0;
  return true;
}

bool DecodePrmt(Decoder& d) {
  if (!d.Allow("f4e b4e rc8 ecl ecr rc16") || !d.Simple(Prmt, Type::kB32, 3)) return false;
  uint16_t mode = 0, index = 0;
  for (const char* name : {"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"}) {
    ++index;
    if (d.Has(name)) mode = index;
  }
  d.code().ops.back().n = mode;
  return true;
}

bool DecodeCount(Decoder& d) {
  if (!d.Allow("")) return false;
  const Type type = d.TypeFromEnd();
  const bool wide = SizeOf(type) == 8;
  const std::string& opcode = d.in().opcode;
  if (SizeOf(type) < 4) return d.Unsupported();
  if (opcode == "popc") return d.Simple(wide ? RunUnary<uint64_t, Popc> : RunUnary<uint32_t, Popc>, type, 1);
  if (opcode == "clz") return d.Simple(wide ? RunUnary<uint64_t, Clz> : RunUnary<uint32_t, Clz>, type, 1);
  return d.Simple(wide ? RunUnary<uint64_t, Brev> : RunUnary<uint32_t, Brev>, type, 1);
}

bool DecodeBfind(Decoder& d) {
  if (!d.Allow("shiftamt")) return false;
  Handler fn = nullptr;
  const Type type = d.TypeFromEnd();
  if (type == Type::kU32) fn = Bfind<uint32_t>;
  if (type == Type::kS32) fn = Bfind<int32_t>;
  if (type == Type::kU64) fn = Bfind<uint64_t>;
  if (type == Type::kS64) fn = Bfind<int64_t>;
  if (!d.Simple(fn, type, 1)) return false;
  d.code().ops.back().n = d.Has("shiftamt") ? 1 : 0;
  return true;
}

bool DecodeBfe(Decoder& d) {
  if (!d.Allow("")) return false;
  Handler fn = nullptr;
  const Type type = d.TypeFromEnd();
  if (type == Type::kU32) fn = Bfe<uint32_t>;
  if (type == Type::kS32) fn = Bfe<int32_t>;
  if (type == Type::kU64) fn = Bfe<uint64_t>;
  if (type == Type::kS64) fn = Bfe<int64_t>;
  return d.Simple(fn, type, 3);
}

bool DecodeBfi(Decoder& d) {
  if (!d.Allow("") || !d.Operands(5, 5)) return false;
  const Type type = d.TypeFromEnd();
  if (type != Type::kB32 && type != Type::kB64) return d.Unsupported();
  const int32_t a = d.Src(1, type), b = d.Src(2, type), c = d.Src(3, Type::kU32), length = d.Src(4, Type::kU32);
  const int32_t* more = d.List({length});
  d.Emit(type == Type::kB32 ? Bfi<uint32_t> : Bfi<uint64_t>, d.Dst(0), a, b, c).more = more;
  return true;
}

bool DecodeFns(Decoder& d) { return d.Allow("") && d.Simple(Fns, Type::kB32, 3); }

bool DecodeSzext(Decoder& d) {
  if (!d.Allow("wrap clamp")) return false;
  const bool mask = d.in().opcode == "bmsk";
  if (!d.Simple(mask ? Bmsk : IsSigned(d.TypeFromEnd()) ? Szext<true> : Szext<false>, Type::kB32, 2)) return false;
  d.code().ops.back().n = d.Has("wrap") ? 1 : 0;
  return true;
}

}  // namespace

void AddBitOps(DecodeTable* table) {
  for (const char* name : {"and", "or", "xor", "not", "cnot"}) (*table)[name] = DecodeLogic;
  for (const char* name : {"shl", "shr"}) (*table)[name] = DecodeShift;
  for (const char* name : {"popc", "clz", "brev"}) (*table)[name] = DecodeCount;
  for (const char* name : {"szext", "bmsk"}) (*table)[name] = DecodeSzext;
  (*table)["shf"] = DecodeShf;
  (*table)["lop3"] = DecodeLop3;
  (*table)["prmt"] = DecodePrmt;
  (*table)["bfind"] = DecodeBfind;
  (*table)["bfe"] = DecodeBfe;
  (*table)["bfi"] = DecodeBfi;
  (*table)["fns"] = DecodeFns;
}

}  // namespace cuda_remote::softgpu::ptx
