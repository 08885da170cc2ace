// SPDX-License-Identifier: Apache-2.0
// cvt to and from the floats of 16 and fewer bits.
#include "softgpu/ptx/convert.h"

namespace cuda_remote::softgpu::ptx {
namespace {

// In Op::imm: what to convert.
struct Conversion {
  Type to, from;
  Round round;
  bool integral, sat, relu, satfinite, ftz;
};

int64_t Packed(const Conversion& c) {
  return int64_t(c.to) | int64_t(c.from) << 8 | int64_t(c.round) << 16 | int64_t(c.integral) << 24 |
         int64_t(c.sat) << 25 | int64_t(c.relu) << 26 | int64_t(c.satfinite) << 27 | int64_t(c.ftz) << 28;
}
Conversion Unpacked(int64_t bits) {
  return {Type(bits & 0xff),     Type(bits >> 8 & 0xff), Round(bits >> 16 & 0xff), (bits >> 24 & 1) != 0,
          (bits >> 25 & 1) != 0, (bits >> 26 & 1) != 0,  (bits >> 27 & 1) != 0,    (bits >> 28 & 1) != 0};
}

double Read(Type type, uint64_t bits) {
  switch (type) {
    case Type::kF16:
      return Unpack(uint32_t(bits) & 0xffff, kHalf);
    case Type::kBf16:
      return Unpack(uint32_t(bits) & 0xffff, kBfloat);
    case Type::kE4m3:
      return Unpack(uint32_t(bits) & 0xff, kE4m3);
    case Type::kE5m2:
      return Unpack(uint32_t(bits) & 0xff, kE5m2);
    case Type::kTf32:
    case Type::kF32:
      return Get<float>(bits);
    case Type::kF64:
      return Get<double>(bits);
    case Type::kS8:
      return Get<int8_t>(bits);
    case Type::kS16:
      return Get<int16_t>(bits);
    case Type::kS32:
      return Get<int32_t>(bits);
    case Type::kS64:
      return double(Get<int64_t>(bits));
    case Type::kU8:
    case Type::kB8:
      return Get<uint8_t>(bits);
    case Type::kU16:
    case Type::kB16:
      return Get<uint16_t>(bits);
    case Type::kU32:
    case Type::kB32:
      return Get<uint32_t>(bits);
    default:
      return double(bits);
  }
}

uint64_t Write(const Conversion& c, double value) {
  const bool from_double = c.from == Type::kF64;
  switch (c.to) {
    case Type::kF16:
    case Type::kBf16:
    case Type::kE4m3:
    case Type::kE5m2: {
      const Format& format = c.to == Type::kF16    ? kHalf
                             : c.to == Type::kBf16 ? kBfloat
                             : c.to == Type::kE4m3 ? kE4m3
                                                   : kE5m2;
      uint32_t bits = Pack(value, format, c.round, c.satfinite);
      if (c.ftz && c.to == Type::kF16 && (bits & 0x7c00) == 0) bits &= 0x8000;
      return bits;
    }
    case Type::kTf32:
      return uint64_t(Pack(value, kTf32, c.round, c.satfinite)) << 13;
    case Type::kF32: {
      const float out = float(value);
      return Put(c.ftz ? Flush(out) : out);
    }
    case Type::kF64:
      return Put(value);
    case Type::kS8:
      return uint64_t(int64_t(ToInteger<int8_t>(value, c.round, from_double)));
    case Type::kS16:
      return uint64_t(int64_t(ToInteger<int16_t>(value, c.round, from_double)));
    case Type::kS32:
      return uint64_t(int64_t(ToInteger<int32_t>(value, c.round, from_double)));
    case Type::kS64:
      return uint64_t(ToInteger<int64_t>(value, c.round, from_double));
    case Type::kU8:
      return ToInteger<uint8_t>(value, c.round, from_double);
    case Type::kU16:
      return ToInteger<uint16_t>(value, c.round, from_double);
    case Type::kU32:
      return ToInteger<uint32_t>(value, c.round, from_double);
    default:
      return ToInteger<uint64_t>(value, c.round, from_double);
  }
}

uint64_t Convert(const Conversion& c, uint64_t bits) {
  double value = Read(c.from, bits);
  if (c.ftz && c.from == Type::kF32) value = Flush(float(value));
  if (c.integral) value = Integral(value, c.round);
  if (c.sat) value = !(value > 0) ? 0 : value > 1 ? 1 : value;
  if (c.relu && !(value > 0) && !std::isnan(value)) value = 0;
  return Write(c, value);
}

const Op* ConvertOne(const Op* op, uint64_t* r, Thread*) {
  r[op->d] = Convert(Unpacked(op->imm), r[op->a]);
  return op + 1;
}
// Two sources to a pair of n bits each; the first becomes the upper one.
const Op* ConvertTwo(const Op* op, uint64_t* r, Thread*) {
  const Conversion c = Unpacked(op->imm);
  r[op->d] = Convert(c, r[op->b]) | Convert(c, r[op->a]) << op->n;
  return op + 1;
}
// A pair of n bits each to a pair of c bits each.
const Op* ConvertPair(const Op* op, uint64_t* r, Thread*) {
  const Conversion c = Unpacked(op->imm);
  const uint64_t a = r[op->a];
  r[op->d] = Convert(c, a & ((1u << op->n) - 1)) | Convert(c, a >> op->n & ((1u << op->n) - 1)) << op->c;
  return op + 1;
}

Type Single(Type type) {
  switch (type) {
    case Type::kF16x2:
      return Type::kF16;
    case Type::kBf16x2:
      return Type::kBf16;
    case Type::kE4m3x2:
      return Type::kE4m3;
    case Type::kE5m2x2:
      return Type::kE5m2;
    default:
      return type;
  }
}

}  // namespace

bool DecodeNarrowConversion(Decoder& d) {
  Conversion c;
  c.to = Single(d.types()[0]);
  c.from = Single(d.types()[1]);
  c.integral = (d.Has("rni") || d.Has("rzi") || d.Has("rmi") || d.Has("rpi")) && SizeOf(c.to) > 0 &&
               (c.to == Type::kF16 || c.to == Type::kBf16 || IsFloat(c.to));
  c.round = d.Has("rz") || d.Has("rzi")   ? Round::kZero
            : d.Has("rm") || d.Has("rmi") ? Round::kDown
            : d.Has("rp") || d.Has("rpi") ? Round::kUp
            : d.Has("rna")                ? Round::kAway
                                          : Round::kNearest;
  c.sat = d.Has("sat") && (c.to == Type::kF16 || c.to == Type::kBf16 || IsFloat(c.to));
  c.relu = d.Has("relu");
  c.satfinite = d.Has("satfinite");
  c.ftz = d.Has("ftz");
  const bool pair_to = c.to != d.types()[0], pair_from = c.from != d.types()[1];
  if (!pair_to && !pair_from) {
    if (!d.Simple(ConvertOne, c.from, 1)) return false;
  } else if (pair_to && !pair_from) {
    if (c.from != Type::kF32 || !d.Simple(ConvertTwo, c.from, 2)) return d.Unsupported();
    d.code().ops.back().n = uint16_t(8 * SizeOf(c.to));
  } else if (pair_to && pair_from) {
    if (!d.Simple(ConvertPair, Type::kB32, 1)) return d.Unsupported();
    d.code().ops.back().n = uint16_t(8 * SizeOf(c.from));
    d.code().ops.back().c = int32_t(8 * SizeOf(c.to));
  } else {
    return d.Unsupported();
  }
  d.code().ops.back().imm = Packed(c);
  return true;
}

}  // namespace cuda_remote::softgpu::ptx
