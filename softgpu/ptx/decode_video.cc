// SPDX-License-Identifier: Apache-2.0
// Video instructions: vadd, vsub, vabsdiff, vmin, vmax, vshl, vshr, vmad, vset on 32-bit words, and their forms for two
// or four parts of a word at once (vavrg too). Selectors of parts are not supported: operands are whole words.
#include <algorithm>
#include <optional>

#include "softgpu/ptx/decoder.h"

namespace cuda_remote::softgpu::ptx {
namespace {

enum Video : uint8_t { kAdd, kSub, kAbsdiff, kMin, kMax, kAvrg, kSet, kShl, kShr, kMad };
enum Compare : uint8_t { kEq, kNe, kLt, kLe, kGt, kGe };
enum Second : uint8_t { kNone, kPlus, kLeast, kMost };  // what is done with c

union Ask {
  int64_t imm;
  struct {
    Video operation;
    Compare compare;
    Second second;
    uint8_t parts;
    bool signed_d, signed_a, signed_b, saturate;
  } what;
};
static_assert(sizeof(Ask) == sizeof(int64_t), "");

int64_t Part(uint32_t word, uint32_t index, uint32_t bits, bool is_signed) {
  const uint32_t part = word >> (index * bits);
  if (bits == 32) return is_signed ? int64_t(int32_t(part)) : int64_t(part);
  const uint32_t value = part & ((1u << bits) - 1);
  return is_signed && (value >> (bits - 1)) != 0 ? int64_t(value) - (int64_t{1} << bits) : int64_t(value);
}

bool Holds(Compare compare, int64_t a, int64_t b) {
  switch (compare) {
    case kEq:
      return a == b;
    case kNe:
      return a != b;
    case kLt:
      return a < b;
    case kLe:
      return a <= b;
    case kGt:
      return a > b;
    default:
      return a >= b;
  }
}

int64_t One(const decltype(Ask::what)& ask, int64_t a, int64_t b, int64_t c) {
  switch (ask.operation) {
    case kAdd:
      return a + b;
    case kSub:
      return a - b;
    case kAbsdiff:
      return a < b ? b - a : a - b;
    case kMin:
      return std::min(a, b);
    case kMax:
      return std::max(a, b);
    case kAvrg:
      return (a + b + (a + b >= 0 ? 1 : 0)) >> 1;
    case kSet:
      return Holds(ask.compare, a, b) ? 1 : 0;
    case kShl:
      return int64_t(uint64_t(a) << (std::min<uint64_t>(uint64_t(b), 32)));
    case kShr:
      return a >> std::min<uint64_t>(uint64_t(b), 32);
    default:
      return a * b + c;
  }
}

const Op* RunVideo(const Op* op, uint64_t* r, Thread*) {
  const auto ask = Ask{op->imm}.what;
  const uint32_t a = uint32_t(r[op->a]), b = uint32_t(r[op->b]), c = uint32_t(r[op->c]);
  const uint32_t bits = 32 / ask.parts;
  const int64_t least = ask.signed_d ? -(int64_t{1} << (bits - 1)) : 0;
  const int64_t most = ask.signed_d ? (int64_t{1} << (bits - 1)) - 1 : (int64_t{1} << bits) - 1;
  const int64_t third = ask.signed_d ? int64_t(int32_t(c)) : int64_t(c);
  uint32_t packed = 0;
  int64_t sum = third;
  for (uint32_t i = 0; i < ask.parts; ++i) {
    int64_t value = One(ask, Part(a, i, bits, ask.signed_a), Part(b, i, bits, ask.signed_b), third);
    if (ask.saturate) value = std::clamp(value, least, most);
    const uint32_t kept = bits == 32 ? uint32_t(value) : uint32_t(value) & ((1u << bits) - 1);
    packed |= kept << (i * bits);
    sum += ask.parts == 1 ? Part(kept, 0, 32, ask.signed_d) : value;
  }
  const int64_t first = Part(packed, 0, 32, ask.signed_d);
  switch (ask.second) {
    case kPlus:
      r[op->d] = uint32_t(sum);
      break;
    case kLeast:
      r[op->d] = uint32_t(std::min(first, third));
      break;
    case kMost:
      r[op->d] = uint32_t(std::max(first, third));
      break;
    default:
      r[op->d] = packed;
  }
  return op + 1;
}

struct VideoName {
  const char* name;
  Video operation;
};
constexpr VideoName kNames[] = {{"vadd", kAdd}, {"vsub", kSub},   {"vabsdiff", kAbsdiff}, {"vmin", kMin},
                                {"vmax", kMax}, {"vavrg", kAvrg}, {"vset", kSet},         {"vshl", kShl},
                                {"vshr", kShr}, {"vmad", kMad}};

std::optional<Compare> FindCompare(const Decoder& d) {
  static constexpr const char* kCompares[] = {"eq", "ne", "lt", "le", "gt", "ge"};
  for (uint8_t i = 0; i < 6; ++i) {
    if (d.Has(kCompares[i])) return Compare(i);
  }
  return std::nullopt;
}

bool DecodeVideo(Decoder& d) {
  std::string opcode = d.in().opcode;
  Ask ask = {};
  ask.what.parts = opcode.back() == '4' ? 4 : opcode.back() == '2' ? 2 : 1;
  if (ask.what.parts != 1) opcode.pop_back();
  for (const VideoName& name : kNames) {
    if (opcode == name.name) ask.what.operation = name.operation;
  }
  const Video operation = ask.what.operation;
  const bool set = operation == kSet, mad = operation == kMad, shift = operation == kShl || operation == kShr;
  if (!d.Allow("sat add min max eq ne lt le gt ge clamp wrap") || !d.Operands(3, 4)) return false;
  const size_t types = d.types().size();
  // vset has no type of its result; it is unsigned.
  if (types != (set ? 2u : 3u)) return d.Unsupported();
  for (const Type type : d.types()) {
    if (type != Type::kU32 && type != Type::kS32) return d.Unsupported();
  }
  ask.what.signed_d = !set && IsSigned(d.TypeFromEnd(2));
  ask.what.signed_a = IsSigned(d.TypeFromEnd(1));
  ask.what.signed_b = IsSigned(d.TypeFromEnd(0));
  ask.what.saturate = d.Has("sat");
  ask.what.second = d.Has("add") ? kPlus : d.Has("min") ? kLeast : d.Has("max") ? kMost : kNone;
  const auto compare = FindCompare(d);
  if (set != compare.has_value() || (ask.what.parts != 1 && (ask.what.second == kLeast || ask.what.second == kMost))) {
    return d.Unsupported();
  }
  if (compare) ask.what.compare = *compare;
  // Shifts by more than a word: a wrapping one takes the low five bits.
  if (shift && !d.Has("clamp")) return d.Unsupported();
  const size_t operands = d.in().operands.size();
  const bool needs_third = mad || ask.what.second != kNone || ask.what.parts != 1;
  if ((needs_third && operands != 4) || (!needs_third && operands != 3)) return d.Fail("wrong number of operands");
  const int32_t a = d.Src(1, Type::kB32), b = d.Src(2, Type::kB32);
  const int32_t c = operands == 4 ? d.Src(3, Type::kB32) : d.Const(0);
  d.Emit(RunVideo, d.Dst(0), a, b, c).imm = ask.imm;
  return true;
}

}  // namespace

void AddVideoOps(DecodeTable* table) {
  for (const char* name : {"vadd",  "vsub",  "vabsdiff",  "vmin",      "vmax",  "vset",   "vshl",   "vshr",
                           "vmad",  "vadd2", "vsub2",     "vabsdiff2", "vmin2", "vmax2",  "vavrg2", "vset2",
                           "vadd4", "vsub4", "vabsdiff4", "vmin4",     "vmax4", "vavrg4", "vset4"}) {
    (*table)[name] = DecodeVideo;
  }
}

}  // namespace cuda_remote::softgpu::ptx
