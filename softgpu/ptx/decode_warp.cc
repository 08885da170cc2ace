// SPDX-License-Identifier: Apache-2.0
// Operations for which the threads of a warp meet.
//
// A thread that comes to one waits (State::kWarp) until every thread of its member mask that has not ended is there
// with the same mask; then all get their results at once. Threads outside of the mask: MeetInPart in exec.cc.
#include "softgpu/ptx/decoder.h"

namespace cuda_remote::softgpu::ptx {
namespace {

// Op::n: what the meeting is for.
enum Operation : uint16_t {
  kUp,
  kDown,
  kBfly,
  kIdx,  // shfl
  kAll,
  kAny,
  kUni,
  kBallot,  // vote
  kMatchAny32,
  kMatchAny64,
  kMatchAll32,
  kMatchAll64,
  kAdd,
  kMinU,
  kMaxU,
  kMinS,
  kMaxS,
  kAnd,
  kOr,
  kXor,  // redux
  kNothing,
};

// d result, a value, more: mask, second result; b and c belong to shfl.
template <Meet meet>
const Op* MeetOp(const Op* op, uint64_t* r, Thread* t) {
  return WaitForWarp(t, op, meet, uint32_t(r[op->more[0]]), r[op->a]);
}

const Op* ActiveMask(const Op* op, uint64_t*, Thread* t) {
  // Resolved when no other thread of the warp can run for now, so that threads that are together are seen together.
  t->state = State::kConverge;
  t->pc = op;
  return nullptr;
}

void Shuffle(Block* block, uint32_t base, uint32_t members) {
  for (uint32_t lanes = members; lanes != 0; lanes &= lanes - 1) {
    const uint32_t lane = uint32_t(__builtin_ctz(lanes));
    Thread& t = block->threads[base + lane];
    const Op* op = t.pc;
    const uint32_t b = uint32_t(t.r[op->b]) & 31, c = uint32_t(t.r[op->c]);
    const uint32_t segment = c >> 8 & 31, clamp = c & 31;
    const uint32_t max_lane = (lane & segment) | (clamp & ~segment), min_lane = lane & segment;
    int32_t from = int32_t(lane);
    bool valid = false;
    switch (op->n) {
      case kUp:
        from = int32_t(lane) - int32_t(b);
        valid = from >= int32_t(max_lane);
        break;
      case kDown:
        from = int32_t(lane + b);
        valid = from <= int32_t(max_lane);
        break;
      case kBfly:
        from = int32_t(lane ^ b);
        valid = from <= int32_t(max_lane);
        break;
      default:
        from = int32_t(min_lane | (b & ~segment));
        valid = from <= int32_t(max_lane);
        break;
    }
    if (!valid) from = int32_t(lane);
    // The value of a lane that does not take part is not defined: what it brought to this instruction, as in a warp
    // that executes it at once, else the own one.
    const Thread& source = block->threads[base + uint32_t(from)];
    const bool there = (members >> from & 1) != 0 || (source.state == State::kWarp && source.pc == op);
    t.r[op->d] = uint32_t(there ? block->threads[base + uint32_t(from)].value : t.value);
    t.r[op->more[1]] = valid ? 1 : 0;
  }
}

void Vote(Block* block, uint32_t base, uint32_t members) {
  uint32_t ballot = 0;
  for (uint32_t lanes = members; lanes != 0; lanes &= lanes - 1) {
    const uint32_t lane = uint32_t(__builtin_ctz(lanes));
    if ((block->threads[base + lane].value & 1) != 0) ballot |= 1u << lane;
  }
  for (uint32_t lanes = members; lanes != 0; lanes &= lanes - 1) {
    Thread& t = block->threads[base + uint32_t(__builtin_ctz(lanes))];
    const Op* op = t.pc;
    const bool all = ballot == members, any = ballot != 0;
    t.r[op->d] = op->n == kBallot ? ballot : op->n == kAll ? all : op->n == kAny ? any : all || !any;
  }
}

void Match(Block* block, uint32_t base, uint32_t members) {
  for (uint32_t lanes = members; lanes != 0; lanes &= lanes - 1) {
    Thread& t = block->threads[base + uint32_t(__builtin_ctz(lanes))];
    const Op* op = t.pc;
    const uint64_t bits = op->n == kMatchAny64 || op->n == kMatchAll64 ? ~uint64_t{0} : 0xffffffff;
    uint32_t same = 0;
    for (uint32_t others = members; others != 0; others &= others - 1) {
      const uint32_t lane = uint32_t(__builtin_ctz(others));
      if (((block->threads[base + lane].value ^ t.value) & bits) == 0) same |= 1u << lane;
    }
    if (op->n == kMatchAll32 || op->n == kMatchAll64) {
      t.r[op->d] = same == members ? members : 0;
      t.r[op->more[1]] = same == members ? 1 : 0;
    } else {
      t.r[op->d] = same;
    }
  }
}

void Reduce(Block* block, uint32_t base, uint32_t members) {
  const uint32_t first = uint32_t(__builtin_ctz(members));
  const uint16_t operation = block->threads[base + first].pc->n;
  uint32_t out = uint32_t(block->threads[base + first].value);
  for (uint32_t lanes = members & (members - 1); lanes != 0; lanes &= lanes - 1) {
    const uint32_t v = uint32_t(block->threads[base + uint32_t(__builtin_ctz(lanes))].value);
    switch (operation) {
      case kAdd:
        out += v;
        break;
      case kMinU:
        out = v < out ? v : out;
        break;
      case kMaxU:
        out = v > out ? v : out;
        break;
      case kMinS:
        out = int32_t(v) < int32_t(out) ? v : out;
        break;
      case kMaxS:
        out = int32_t(v) > int32_t(out) ? v : out;
        break;
      case kAnd:
        out &= v;
        break;
      case kOr:
        out |= v;
        break;
      default:
        out ^= v;
        break;
    }
  }
  for (uint32_t lanes = members; lanes != 0; lanes &= lanes - 1) {
    Thread& t = block->threads[base + uint32_t(__builtin_ctz(lanes))];
    t.r[t.pc->d] = out;
  }
}

bool EmitMeeting(Decoder& d, Handler fn, uint16_t n, int32_t destination, int32_t a, int32_t b, int32_t c, int32_t mask,
                 int32_t pair) {
  const int32_t* more = d.List({mask, pair});
  Op& op = d.Emit(fn, destination, a, b, c);
  op.more = more;
  op.n = n;
  return true;
}

bool DecodeShfl(Decoder& d) {
  if (!d.Allow("sync up down bfly idx") || !d.Operands(5, 5)) return false;
  if (!d.Has("sync")) return d.Fail("only .sync forms are supported");
  const uint16_t n = d.Has("up") ? kUp : d.Has("down") ? kDown : d.Has("bfly") ? kBfly : kIdx;
  const int32_t a = d.Src(1, Type::kB32), b = d.Src(2, Type::kB32), c = d.Src(3, Type::kB32);
  const int32_t mask = d.Src(4, Type::kB32);
  return EmitMeeting(d, MeetOp<Meet::kShfl>, n, d.Dst(0), a, b, c, mask, d.Pair(d.in().operands[0]));
}

bool DecodeVote(Decoder& d) {
  if (!d.Allow("sync all any uni ballot") || !d.Operands(3, 3)) return false;
  if (!d.Has("sync")) return d.Fail("only .sync forms are supported");
  const uint16_t n = d.Has("all") ? kAll : d.Has("any") ? kAny : d.Has("uni") ? kUni : kBallot;
  const int32_t a = d.Src(1, Type::kPred), mask = d.Src(2, Type::kB32);
  return EmitMeeting(d, MeetOp<Meet::kVote>, n, d.Dst(0), a, 0, 0, mask, 0);
}

bool DecodeMatch(Decoder& d) {
  if (!d.Allow("sync any all") || !d.Operands(3, 3)) return false;
  const bool wide = SizeOf(d.TypeFromEnd()) == 8, all = d.Has("all");
  const uint16_t n = all ? (wide ? kMatchAll64 : kMatchAll32) : (wide ? kMatchAny64 : kMatchAny32);
  const int32_t a = d.Src(1, d.TypeFromEnd()), mask = d.Src(2, Type::kB32);
  const int32_t pair = d.Pair(d.in().operands[0]);
  return EmitMeeting(d, MeetOp<Meet::kMatch>, n, d.Dst(0), a, 0, 0, mask, pair);
}

bool DecodeRedux(Decoder& d) {
  if (!d.Allow("sync add min max and or xor") || !d.Operands(3, 3)) return false;
  const Type type = d.TypeFromEnd();
  if (SizeOf(type) != 4 || IsFloat(type)) return d.Unsupported();
  const bool is_signed = IsSigned(type);
  const uint16_t n = d.Has("add")   ? kAdd
                     : d.Has("min") ? (is_signed ? kMinS : kMinU)
                     : d.Has("max") ? (is_signed ? kMaxS : kMaxU)
                     : d.Has("and") ? kAnd
                     : d.Has("or")  ? kOr
                                    : kXor;
  const int32_t a = d.Src(1, type), mask = d.Src(2, Type::kB32);
  return EmitMeeting(d, MeetOp<Meet::kRedux>, n, d.Dst(0), a, 0, 0, mask, 0);
}

bool DecodeElect(Decoder& d) {
  if (!d.Allow("sync") || !d.Operands(2, 2)) return false;
  const int32_t mask = d.Src(1, Type::kB32);
  return EmitMeeting(d, MeetOp<Meet::kElect>, kNothing, d.Dst(0), 0, 0, 0, mask, d.Pair(d.in().operands[0]));
}

bool DecodeActiveMask(Decoder& d) {
  if (!d.Allow("") || !d.Operands(1, 1)) return false;
  d.Emit(ActiveMask, d.Dst(0));
  return true;
}

}  // namespace

bool DecodeWarpBarrier(Decoder& d) {
  if (!d.Allow("warp sync") || !d.Operands(1, 1)) return false;
  const int32_t mask = d.Src(0, Type::kB32);
  return EmitMeeting(d, MeetOp<Meet::kSync>, kNothing, 0, 0, 0, 0, mask, 0);
}

void FinishMeeting(Block* block, uint32_t warp, uint32_t members, Meet meet) {
  const uint32_t base = warp * 32;
  switch (meet) {
    case Meet::kShfl:
      Shuffle(block, base, members);
      break;
    case Meet::kVote:
      Vote(block, base, members);
      break;
    case Meet::kMatch:
      Match(block, base, members);
      break;
    case Meet::kRedux:
      Reduce(block, base, members);
      break;
    case Meet::kElect:
      for (uint32_t lanes = members; lanes != 0; lanes &= lanes - 1) {
        const uint32_t lane = uint32_t(__builtin_ctz(lanes)), leader = uint32_t(__builtin_ctz(members));
        Thread& t = block->threads[base + lane];
        t.r[t.pc->d] = leader;
        t.r[t.pc->more[1]] = lane == leader ? 1 : 0;
      }
      break;
    case Meet::kActive:
      for (uint32_t lanes = members; lanes != 0; lanes &= lanes - 1) {
        Thread& t = block->threads[base + uint32_t(__builtin_ctz(lanes))];
        t.r[t.pc->d] = members;
      }
      break;
    case Meet::kMatrix:
      if (!FinishMatrix(block, warp, members)) return;
      break;
    case Meet::kSync:
      break;
  }
  for (uint32_t lanes = members; lanes != 0; lanes &= lanes - 1) {
    Thread& t = block->threads[base + uint32_t(__builtin_ctz(lanes))];
    t.pc += 1;
    t.state = State::kReady;
  }
  block->warps[warp].waiting &= ~members;
}

void AddWarpOps(DecodeTable* table) {
  (*table)["shfl"] = DecodeShfl;
  (*table)["vote"] = DecodeVote;
  (*table)["match"] = DecodeMatch;
  (*table)["redux"] = DecodeRedux;
  (*table)["elect"] = DecodeElect;
  (*table)["activemask"] = DecodeActiveMask;
}

}  // namespace cuda_remote::softgpu::ptx
