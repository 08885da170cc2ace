// SPDX-License-Identifier: Apache-2.0
// mov with its packing forms, special registers, address conversions.
#include <chrono>

#include "proto/base/clock.h"
#include "softgpu/ptx/decoder.h"

namespace cuda_remote::softgpu::ptx {
namespace {

template <class T>
const Op* Move(const Op* op, uint64_t* r, Thread*) {
  r[op->d] = Put(Get<T>(r[op->a]));
  return op + 1;
}
const Op* Move128(const Op* op, uint64_t* r, Thread*) {
  const uint64_t low = r[op->a], high = r[op->a + 1];
  r[op->d] = low;
  r[op->d + 1] = high;
  return op + 1;
}

// n sources of imm bits each to one value of up to 64 bits.
const Op* Pack2(const Op* op, uint64_t* r, Thread*) {
  const uint64_t mask = (uint64_t{1} << op->imm) - 1;
  r[op->d] = (r[op->a] & mask) | (r[op->b] & mask) << op->imm;
  return op + 1;
}
const Op* PackMany(const Op* op, uint64_t* r, Thread*) {
  const uint64_t mask = (uint64_t{1} << op->imm) - 1;
  uint64_t out = 0;
  for (uint16_t i = 0; i < op->n; ++i) out |= (r[op->more[i]] & mask) << (int64_t(i) * op->imm);
  r[op->d] = out;
  return op + 1;
}
const Op* Unpack2(const Op* op, uint64_t* r, Thread*) {
  const uint64_t mask = (uint64_t{1} << op->imm) - 1, value = r[op->a];
  r[op->d] = value & mask;
  r[op->b] = value >> op->imm & mask;
  return op + 1;
}
const Op* UnpackMany(const Op* op, uint64_t* r, Thread*) {
  const uint64_t mask = (uint64_t{1} << op->imm) - 1, value = r[op->a];
  for (uint16_t i = 0; i < op->n; ++i) r[op->more[i]] = value >> (int64_t(i) * op->imm) & mask;
  return op + 1;
}
// 128 bits and 2 or 4 parts.
const Op* Pack128(const Op* op, uint64_t* r, Thread*) {
  uint64_t out[2];
  if (op->n == 2) {
    out[0] = r[op->more[0]];
    out[1] = r[op->more[1]];
  } else {
    out[0] = uint64_t(uint32_t(r[op->more[0]])) | r[op->more[1]] << 32;
    out[1] = uint64_t(uint32_t(r[op->more[2]])) | r[op->more[3]] << 32;
  }
  r[op->d] = out[0];
  r[op->d + 1] = out[1];
  return op + 1;
}
const Op* Unpack128(const Op* op, uint64_t* r, Thread*) {
  const uint64_t low = r[op->a], high = r[op->a + 1];
  if (op->n == 2) {
    r[op->more[0]] = low;
    r[op->more[1]] = high;
  } else {
    r[op->more[0]] = uint32_t(low);
    r[op->more[1]] = low >> 32;
    r[op->more[2]] = uint32_t(high);
    r[op->more[3]] = high >> 32;
  }
  return op + 1;
}

bool DecodePacking(Decoder& d, Type type) {
  const bool packs = d.in().operands[1].kind == Operand::Kind::kVector;
  const auto& elements = d.in().operands[packs ? 1 : 0].elements;
  const uint32_t bits = 8 * SizeOf(type);
  const size_t count = elements.size();
  if ((count != 2 && count != 4 && count != 8) || bits / count < 8) return d.Unsupported();
  const int64_t each = int64_t(bits / count);
  const Type part = each == 8 ? Type::kU8 : each == 16 ? Type::kU16 : each == 32 ? Type::kU32 : Type::kU64;
  std::vector<int32_t> slots;
  for (const auto& element : elements) slots.push_back(packs ? d.Source(element, part) : d.Destination(element));
  if (type == Type::kB128) {
    if (count == 8) return d.Unsupported();
    const int32_t* more = d.List(slots);
    Op& op = packs ? d.Emit(Pack128, d.Dst(0)) : d.Emit(Unpack128, 0, d.Src(1, type));
    op.more = more;
    op.n = uint16_t(count);
    return true;
  }
  if (count == 2) {
    Op& op = packs ? d.Emit(Pack2, d.Dst(0), slots[0], slots[1]) : d.Emit(Unpack2, slots[0], d.Src(1, type), slots[1]);
    op.imm = each;
    return true;
  }
  const int32_t* more = d.List(slots);
  Op& op = packs ? d.Emit(PackMany, d.Dst(0)) : d.Emit(UnpackMany, 0, d.Src(1, type));
  op.more = more;
  op.n = uint16_t(count);
  op.imm = each;
  return true;
}

bool DecodeMov(Decoder& d) {
  if (!d.Allow("") || !d.Operands(2, 2)) return false;
  const Type type = d.TypeFromEnd();
  if (d.types().size() != 1) return d.Unsupported();
  if (d.in().operands[0].kind == Operand::Kind::kVector || d.in().operands[1].kind == Operand::Kind::kVector) {
    return DecodePacking(d, type);
  }
  const int32_t a = d.Src(1, type);
  Handler fn = nullptr;
  switch (SizeOf(type)) {
    case 1:
      fn = Move<uint8_t>;
      break;
    case 2:
      fn = Move<uint16_t>;
      break;
    case 4:
      fn = Move<uint32_t>;
      break;
    case 8:
      fn = Move<uint64_t>;
      break;
    case 16:
      fn = Move128;
      break;
    default:
      return d.Unsupported();
  }
  d.Emit(fn, d.Dst(0), a);
  return true;
}

// Special registers; n says which.
enum Special : uint16_t {
  kTid,
  kNtid,
  kCtaid,
  kNctaid,
  kLaneId,
  kWarpId,
  kNwarpId,
  kMaskEq,
  kMaskLe,
  kMaskLt,
  kMaskGe,
  kMaskGt,
  kClock,
  kClockHigh,
  kTimer,
  kTimerLow,
  kTimerHigh,
  kSmId,
  kNsmId,
  kGridId,
  kDynamicShared,
  kTotalShared,
  kZero,
  kOne,
  kReserved,
  kWorkspace,
  kClusterPlace,
  kClusterSize,
  kClusterIndex,
  kClusters,
  kClusterRank,
  kClusterBlocks,
  kExplicitCluster,
};

uint64_t Nanoseconds() { return uint64_t(std::chrono::nanoseconds(WallNow().time_since_epoch()).count()); }

uint32_t Axis(const Dim3& dim, int64_t axis) { return axis == 0 ? dim.x : axis == 1 ? dim.y : dim.z; }

const Op* ReadTid(const Op* op, uint64_t* r, Thread* t) {
  r[op->d] = t->tid[op->imm];
  return op + 1;
}
const Op* ReadCtaid(const Op* op, uint64_t* r, Thread* t) {
  r[op->d] = t->block->ctaid[op->imm];
  return op + 1;
}

const Op* ReadSpecial(const Op* op, uint64_t* r, Thread* t) {
  const LaunchState& launch = *t->block->launch;
  uint64_t value = 0;
  switch (op->n) {
    case kNtid:
      value = Axis(launch.options->block, op->imm);
      break;
    case kNctaid:
      value = Axis(launch.options->grid, op->imm);
      break;
    case kLaneId:
      value = t->lane;
      break;
    case kWarpId:
      value = t->warp;
      break;
    case kNwarpId:
      value = t->block->warps.size();
      break;
    case kMaskEq:
      value = 1u << t->lane;
      break;
    case kMaskLe:
      value = uint32_t((uint64_t{2} << t->lane) - 1);
      break;
    case kMaskLt:
      value = (1u << t->lane) - 1;
      break;
    case kMaskGe:
      value = uint32_t(~((1u << t->lane) - 1));
      break;
    case kMaskGt:
      value = uint32_t(~((uint64_t{2} << t->lane) - 1));
      break;
    case kClock:
      value = op->imm != 0 ? Nanoseconds() : uint32_t(Nanoseconds());
      break;
    case kTimer:
      value = Nanoseconds();
      break;
    case kTimerLow:
      value = uint32_t(Nanoseconds());
      break;
    case kTimerHigh:
    case kClockHigh:
      value = Nanoseconds() >> 32;
      break;
    case kNsmId:
    case kOne:
      value = 1;
      break;
    case kClusterPlace:
      value = t->block->place[op->imm];
      break;
    case kClusterSize:
      value = Axis(launch.options->cluster, op->imm);
      break;
    case kClusterIndex:
      value = t->block->cluster->index[op->imm];
      break;
    case kClusters:
      value = Axis(launch.options->grid, op->imm) / Axis(launch.options->cluster, op->imm);
      break;
    case kClusterRank:
      value = t->block->rank;
      break;
    case kClusterBlocks:
      value = t->block->cluster->blocks.size();
      break;
    case kExplicitCluster:
      value = launch.options->explicit_cluster ? 1 : 0;
      break;
    case kGridId:
      value = launch.options->grid_id;
      break;
    case kDynamicShared:
      value = launch.options->dynamic_shared_bytes;
      break;
    case kWorkspace:
      if (launch.options->cooperative) value = uint32_t(reinterpret_cast<uint64_t>(launch.workspace) >> op->imm);
      break;
    case kReserved:
      value = launch.shared_total + uint64_t(op->imm);
      break;
    case kTotalShared:
      value = launch.shared_total;
      break;
    default:
      break;
  }
  r[op->d] = value;
  return op + 1;
}

struct SpecialName {
  const char* name;
  Special special;
  int64_t imm;
};
constexpr SpecialName kSpecials[] = {
    {"%laneid", kLaneId, 0},
    {"%warpid", kWarpId, 0},
    {"%nwarpid", kNwarpId, 0},
    {"%lanemask_eq", kMaskEq, 0},
    {"%lanemask_le", kMaskLe, 0},
    {"%lanemask_lt", kMaskLt, 0},
    {"%lanemask_ge", kMaskGe, 0},
    {"%lanemask_gt", kMaskGt, 0},
    {"%clock", kClock, 0},
    {"%clock64", kClock, 1},
    {"%clock_hi", kClockHigh, 0},
    {"%globaltimer", kTimer, 0},
    {"%globaltimer_lo", kTimerLow, 0},
    {"%globaltimer_hi", kTimerHigh, 0},
    {"%smid", kSmId, 0},
    {"%nsmid", kNsmId, 0},
    {"%gridid", kGridId, 0},
    {"%dynamic_smem_size", kDynamicShared, 0},
    {"%total_smem_size", kTotalShared, 0},
    {"%aggr_smem_size", kTotalShared, 0},
    {"%is_explicit_cluster", kExplicitCluster, 0},
    {"%cluster_ctarank", kClusterRank, 0},
    {"%cluster_nctarank", kClusterBlocks, 0},
    {"%reserved_smem_offset_begin", kReserved, 0},
    {"%reserved_smem_offset_end", kReserved, kReservedShared},
    {"%reserved_smem_offset_cap", kReserved, kReservedShared},
    {"%reserved_smem_offset_0", kReserved, 0},
    {"%reserved_smem_offset_1", kReserved, 0},
    {"%current_graph_exec", kZero, 0},
    {"%envreg1", kWorkspace, 32},
    {"%envreg2", kWorkspace, 0},
};

// cvta and isspacep
const Op* ToGeneric(const Op* op, uint64_t* r, Thread*) {
  r[op->d] = r[op->a] + uint64_t(op->imm);
  return op + 1;
}
// n: the window's number; 0: global
const Op* IsSpace(const Op* op, uint64_t* r, Thread*) {
  r[op->d] = r[op->a] >> 48 == op->n ? 1 : 0;
  return op + 1;
}
// The rank of the block whose shared memory the address lies in.
uint64_t RankOf(uint64_t address, const Thread* t) {
  const uint64_t rank = (address & (kWindowBytes - 1)) >> kRankShift;
  return rank == 0 ? t->block->rank : rank - 1;
}
const Op* IsOwnShared(const Op* op, uint64_t* r, Thread* t) {
  const uint64_t address = r[op->a];
  r[op->d] = address >> 48 == kSharedWindow >> 48 && RankOf(address, t) == t->block->rank ? 1 : 0;
  return op + 1;
}

bool Window(Decoder& d, uint64_t* window) {
  if (d.Has("shared") || d.Has("shared::cta") || d.Has("shared::cluster")) {
    *window = kSharedWindow;
  } else if (d.Has("local")) {
    *window = kLocalWindow;
  } else if (d.Has("param") || d.Has("param::entry")) {
    *window = d.function().entry ? kParamWindow : kLocalWindow;
  } else if (d.Has("global") || d.Has("const")) {
    *window = 0;
  } else {
    return d.Unsupported();
  }
  return true;
}

bool DecodeCvta(Decoder& d) {
  if (!d.Allow("to global shared shared::cta shared::cluster local const param param::entry")) return false;
  uint64_t window = 0;
  if (!d.Operands(2, 2) || !Window(d, &window)) return false;
  const int32_t a = d.Src(1, Type::kU64);
  d.Emit(ToGeneric, d.Dst(0), a).imm = int64_t(d.Has("to") ? 0 - window : window);
  return true;
}

bool DecodeIsspacep(Decoder& d) {
  if (!d.Allow("global shared shared::cta shared::cluster local const param param::entry")) return false;
  uint64_t window = 0;
  if (!d.Operands(2, 2) || !Window(d, &window)) return false;
  const int32_t a = d.Src(1, Type::kU64);
  if (window == kSharedWindow && !d.Has("shared::cluster")) {
    d.Emit(IsOwnShared, d.Dst(0), a);
    return true;
  }
  // Constant memory is ordinary memory here and counts as global.
  d.Emit(IsSpace, d.Dst(0), a).n = d.Has("const") ? 0xffff : uint16_t(window >> 48);
  return true;
}

// The address in shared memory that a has, in the block of rank b. n 1: a is generic.
const Op* Mapa(const Op* op, uint64_t* r, Thread* t) {
  const uint64_t address = r[op->a], rank = uint32_t(r[op->b]);
  if (op->n != 0 && address >> 48 != kSharedWindow >> 48) {
    return Raise(t, op, Fault::kIllegalAddress, "mapa of an address that is not in shared memory");
  }
  if (rank >= t->block->cluster->blocks.size()) {
    return Raise(t, op, Fault::kInvalidCode, "no block of this rank in the cluster");
  }
  const uint64_t offset = address & ((1u << kRankShift) - 1);
  r[op->d] = (op->n != 0 ? kSharedWindow : 0) | (rank + 1) << kRankShift | offset;
  return op + 1;
}
bool DecodeMapa(Decoder& d) {
  if (!d.Allow("shared::cluster") || !d.Operands(3, 3)) return false;
  const int32_t a = d.Src(1, Type::kU64), b = d.Src(2, Type::kU32);
  d.Emit(Mapa, d.Dst(0), a, b).n = d.Has("shared::cluster") ? 0 : 1;
  return true;
}
const Op* Getctarank(const Op* op, uint64_t* r, Thread* t) {
  r[op->d] = RankOf(r[op->a], t);
  return op + 1;
}
bool DecodeGetctarank(Decoder& d) {
  if (!d.Allow("shared::cluster") || !d.Operands(2, 2)) return false;
  const int32_t a = d.Src(1, Type::kU64);
  d.Emit(Getctarank, d.Dst(0), a);
  return true;
}

}  // namespace

bool DecodeSpecial(Decoder& d, const std::string& name, int32_t slot) {
  if (name.size() > 2 && name[name.size() - 2] == '.') {
    const std::string base = name.substr(0, name.size() - 2);
    const size_t axis = std::string_view("xyz").find(name.back());
    if (axis != std::string_view::npos) {
      if (base == "%tid" || base == "%ctaid") {
        d.Emit(base == "%tid" ? ReadTid : ReadCtaid, slot).imm = int64_t(axis);
        return true;
      }
      Special special = kTid;
      if (base == "%ntid") special = kNtid;
      if (base == "%nctaid") special = kNctaid;
      if (base == "%cluster_ctaid") special = kClusterPlace;
      if (base == "%cluster_nctaid") special = kClusterSize;
      if (base == "%clusterid") special = kClusterIndex;
      if (base == "%nclusterid") special = kClusters;
      if (special != kTid) {
        Op& op = d.Emit(ReadSpecial, slot);
        op.n = special;
        op.imm = int64_t(axis);
        return true;
      }
    }
  }
  for (const auto& entry : kSpecials) {
    if (name != entry.name) continue;
    if (entry.special == kReserved) d.prepared().reserved_shared = true;
    Op& op = d.Emit(ReadSpecial, slot);
    op.n = entry.special;
    op.imm = entry.imm;
    return true;
  }
  if (name.compare(0, 7, "%envreg") == 0 || name.compare(0, 3, "%pm") == 0) {
    d.Emit(ReadSpecial, slot).n = kZero;
    return true;
  }
  return d.Fail("'" + name + "' is neither a register nor a known special register");
}

void AddMoveOps(DecodeTable* table) {
  (*table)["mov"] = DecodeMov;
  (*table)["cvta"] = DecodeCvta;
  (*table)["isspacep"] = DecodeIsspacep;
  (*table)["mapa"] = DecodeMapa;
  (*table)["getctarank"] = DecodeGetctarank;
}

}  // namespace cuda_remote::softgpu::ptx
