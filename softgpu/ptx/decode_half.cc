// SPDX-License-Identifier: Apache-2.0
// Arithmetic of f16, bf16 and their pairs. Everything is computed exactly enough in double and rounded once.
#include <cmath>

#include "softgpu/ptx/decoder.h"
#include "softgpu/ptx/number.h"

namespace cuda_remote::softgpu::ptx {
namespace {

constexpr int64_t kPair = 1, kBf = 2, kSat = 4, kRelu = 8, kFtz = 16, kNan = 32, kXor = 64;  // modes
enum HalfOp : uint16_t { kAdd, kSub, kMul, kFma, kNeg, kAbs, kMin, kMax, kEx2, kTanh };

double MinMax(double a, double b, bool max, int64_t mode) {
  if ((mode & kNan) != 0 && (std::isnan(a) || std::isnan(b))) return std::nan("");
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  if ((mode & kXor) != 0) {
    const double value = max ? std::fmax(std::fabs(a), std::fabs(b)) : std::fmin(std::fabs(a), std::fabs(b));
    return std::signbit(a) != std::signbit(b) ? -value : value;
  }
  if (a == b) return std::signbit(a) == max ? b : a;
  return (a < b) != max ? a : b;
}

uint32_t One(uint16_t operation, int64_t mode, uint32_t x, uint32_t y, uint32_t z) {
  const Format& format = (mode & kBf) != 0 ? kBfloat : kHalf;
  if (operation == kNeg || operation == kAbs) {
    if ((mode & kFtz) != 0 && std::fabs(Unpack(x, format)) < 6.103515625e-05) x &= 0x8000;
    return operation == kNeg ? x ^ 0x8000 : x & 0x7fff;
  }
  double a = Unpack(x, format), b = Unpack(y, format), c = Unpack(z, format);
  const double tiny = (mode & kBf) != 0 ? 0 : 6.103515625e-05;
  if ((mode & kFtz) != 0) {
    if (std::fabs(a) < tiny) a = std::copysign(0.0, a);
    if (std::fabs(b) < tiny) b = std::copysign(0.0, b);
    if (std::fabs(c) < tiny) c = std::copysign(0.0, c);
  }
  double value = 0;
  switch (operation) {
    case kAdd:
      value = FusedOdd(1.0, a, b);
      break;
    case kSub:
      value = FusedOdd(1.0, a, -b);
      break;
    case kMul:
      value = a * b;
      break;
    case kFma:
      value = FusedOdd(a, b, c);
      break;
    case kMin:
      value = MinMax(a, b, false, mode);
      break;
    case kMax:
      value = MinMax(a, b, true, mode);
      break;
    case kEx2:
      value = std::exp2(a);
      break;
    default:
      value = std::tanh(a);
      break;
  }
  if ((mode & kSat) != 0) value = !(value > 0) ? 0 : value > 1 ? 1 : value;
  if ((mode & kRelu) != 0 && value <= 0) value = 0;
  uint32_t bits = Pack(value, format, Round::kNearest, false);
  if ((mode & kFtz) != 0 && (mode & kBf) == 0 && (bits & 0x7c00) == 0) bits &= 0x8000;
  return bits;
}

// n = HalfOp, imm = modes
const Op* RunHalf(const Op* op, uint64_t* r, Thread*) {
  const uint32_t a = uint32_t(r[op->a]), b = uint32_t(r[op->b]), c = uint32_t(r[op->c]);
  uint32_t out = One(op->n, op->imm, a & 0xffff, b & 0xffff, c & 0xffff);
  if ((op->imm & kPair) != 0) out |= One(op->n, op->imm, a >> 16, b >> 16, c >> 16) << 16;
  r[op->d] = out;
  return op + 1;
}

}  // namespace

bool DecodeHalf(Decoder& d) {
  if (!d.Allow("rn ftz sat relu NaN xorsign abs approx noftz")) return false;
  if (d.types().size() != 1) return d.Unsupported();
  const Type type = d.TypeFromEnd();
  const std::string& opcode = d.in().opcode;
  static const struct {
    const char* name;
    HalfOp operation;
    size_t sources;
  } kOps[] = {{"add", kAdd, 2}, {"sub", kSub, 2}, {"mul", kMul, 2}, {"fma", kFma, 3}, {"neg", kNeg, 1},
              {"abs", kAbs, 1}, {"min", kMin, 2}, {"max", kMax, 2}, {"ex2", kEx2, 1}, {"tanh", kTanh, 1}};
  for (const auto& entry : kOps) {
    if (opcode != entry.name) continue;
    if (!d.Simple(RunHalf, Type::kB32, entry.sources)) return false;
    Op& op = d.code().ops.back();
    op.n = entry.operation;
    op.imm = (d.Has("ftz") ? kFtz : 0) | (d.Has("sat") ? kSat : 0) | (d.Has("relu") ? kRelu : 0) |
             (d.Has("NaN") ? kNan : 0) | (d.Has("xorsign") ? kXor : 0);
    if (type == Type::kF16x2 || type == Type::kBf16x2) op.imm |= kPair;
    if (type == Type::kBf16 || type == Type::kBf16x2) op.imm |= kBf;
    return true;
  }
  return d.Unsupported();
}

}  // namespace cuda_remote::softgpu::ptx
