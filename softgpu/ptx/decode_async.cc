// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies, carried out at once.
#include <algorithm>

#include "softgpu/ptx/mbarrier.h"

namespace cuda_remote::softgpu::ptx {
namespace {

// [a + imm] in shared memory from [b + c's constant]; n bytes, more[0] the number of bytes to read, the rest zero.
const Op* CopyAsync(const Op* op, uint64_t* r, Thread* t) {
  uint32_t bytes = op->n, read = op->n;
  if (op->more[0] >= 0) read = std::min<uint32_t>(bytes, uint32_t(r[op->more[0]]));
  uint8_t* to = Pointer<Where::kShared>(t, op, r[op->a] + uint64_t(op->imm), bytes, true);
  if (to == nullptr) return nullptr;
  if (read != 0) {
    const uint8_t* from = Pointer<Where::kGlobal>(t, op, r[op->b] + r[op->c], bytes, false);
    if (from == nullptr) return nullptr;
    std::memcpy(to, from, read);
  }
  std::memset(to + read, 0, bytes - read);
  return op + 1;
}

// cp.async.bulk: [a + imm] from [b], r[c] bytes in pieces of 16.
template <Where to_space, Where from_space>
const Op* CopyBulk(const Op* op, uint64_t* r, Thread* t) {
  const uint32_t bytes = uint32_t(r[op->c]);
  if (bytes % 16 != 0) return Raise(t, op, Fault::kMisaligned, "the size of a bulk copy must be a multiple of 16");
  for (uint32_t at = 0; at < bytes; at += 16) {
    uint8_t* to = Pointer<to_space>(t, op, r[op->a] + uint64_t(op->imm) + at, 16, true);
    if (to == nullptr) return nullptr;
    const uint8_t* from = Pointer<from_space>(t, op, r[op->b] + r[op->more[0]] + at, 16, false);
    if (from == nullptr) return nullptr;
    std::memmove(to, from, 16);
  }
  return op + 1;
}

// cp.async.bulk to all blocks of the cluster that are in the mask r[more[1]]: to the same place in each, and each one's
// own barrier, at r[more[2]] + imm of the barrier in more[3], gets the bytes.
const Op* CopyMulticast(const Op* op, uint64_t* r, Thread* t) {
  const uint32_t bytes = uint32_t(r[op->c]);
  if (bytes % 16 != 0) return Raise(t, op, Fault::kMisaligned, "the size of a bulk copy must be a multiple of 16");
  std::vector<uint8_t> data(bytes);
  for (uint32_t at = 0; at < bytes; at += 16) {
    const uint8_t* from = Pointer<Where::kGlobal>(t, op, r[op->b] + r[op->more[0]] + at, 16, false);
    if (from == nullptr) return nullptr;
    std::memcpy(&data[at], from, 16);
  }
  const uint64_t to = r[op->a] + uint64_t(op->imm), barrier = r[op->more[2]] + r[op->more[3]];
  return Multicast(t, op, uint16_t(r[op->more[1]]), to, barrier, data) ? op + 1 : nullptr;
}

bool DecodeBulk(Decoder& d) {
  if (d.Has("commit_group") || d.Has("wait_group")) return true;
  if (!d.Allow("async bulk global shared shared::cta shared::cluster mbarrier::complete_tx::bytes bulk_group "
               "multicast::cluster L2::cache_hint")) {
    return false;
  }
  const auto& modifiers = d.in().modifiers;
  if (modifiers.size() < 4) return d.Unsupported();
  const bool to_global = modifiers[2] == "global", from_global = modifiers[3] == "global";
  const bool completes = d.Has("mbarrier::complete_tx::bytes");
  const bool multicast = d.Has("multicast::cluster");
  const size_t count = (completes ? 4 : 3) + (multicast ? 1 : 0) + (d.Has("L2::cache_hint") ? 1 : 0);
  if ((multicast && !from_global) || to_global == completes || (to_global && from_global) || !d.Operands(count, count))
    return d.Unsupported();
  Decoder::Address to, from, barrier;
  const auto& operands = d.in().operands;
  if (!d.ResolveAddress(operands[0], to_global ? Where::kGlobal : Where::kShared, false, &to) ||
      !d.ResolveAddress(operands[1], from_global ? Where::kGlobal : Where::kShared, false, &from) ||
      (completes && !d.ResolveAddress(operands[3], Where::kShared, false, &barrier))) {
    return false;
  }
  const int32_t bytes = d.Src(2, Type::kU32);
  if (multicast) {
    const int32_t* more =
        d.List({d.Const(uint64_t(from.offset)), d.Src(4, Type::kU16), barrier.slot, d.Const(uint64_t(barrier.offset))});
    Op& op = d.Emit(CopyMulticast, 0, to.slot, from.slot, bytes);
    op.imm = to.offset;
    op.more = more;
    op.cache = d.NextCache();
    return true;
  }
  const int32_t* more = d.List({d.Const(uint64_t(from.offset))});
  Op& op = d.Emit(to_global     ? CopyBulk<Where::kGlobal, Where::kShared>
                  : from_global ? CopyBulk<Where::kShared, Where::kGlobal>
                                : CopyBulk<Where::kShared, Where::kShared>,
                  0, to.slot, from.slot, bytes);
  op.imm = to.offset;
  op.more = more;
  op.cache = d.NextCache();
  return !completes || EmitMbarrierComplete(d, barrier, bytes);
}

bool DecodeCpAsync(Decoder& d) {
  if (d.Has("bulk") && d.Has("tensor")) return DecodeTensorCopy(d);
  if (d.in().modifiers.empty() || d.in().modifiers[0] != "async") return d.Unsupported();
  if (d.Has("bulk")) return DecodeBulk(d);
  if (d.Has("commit_group") || d.Has("wait_group") || d.Has("wait_all")) return true;
  if (d.Has("mbarrier")) {
    // The copies are over: an arrival. Without .noinc it would be announced to the barrier first and change nothing.
    if (!d.Allow("async mbarrier arrive noinc shared shared::cta") || !d.Operands(1, 1)) return false;
    Decoder::Address barrier;
    const bool shared = d.Has("shared") || d.Has("shared::cta");
    if (!d.ResolveAddress(d.in().operands[0], shared ? Where::kShared : Where::kGeneric, false, &barrier)) return false;
    return !d.Has("noinc") || EmitMbarrierArrive(d, barrier);
  }
  if (!d.Allow("async ca cg shared shared::cta shared::cluster global L2::cache_hint L2::64B L2::128B L2::256B") ||
      !d.Operands(3, 5)) {
    return false;
  }
  Decoder::Address to, from;
  if (!d.ResolveAddress(d.in().operands[0], Where::kShared, false, &to) ||
      !d.ResolveAddress(d.in().operands[1], Where::kGlobal, false, &from)) {
    return false;
  }
  const Operand& size = d.in().operands[2];
  if (size.kind != Operand::Kind::kImm || (size.bits != 4 && size.bits != 8 && size.bits != 16)) {
    return d.Unsupported();
  }
  const size_t extra = d.in().operands.size() - 3 - (d.Has("L2::cache_hint") ? 1 : 0);
  if (extra > 1) return d.Unsupported();
  const int32_t read = extra == 1 ? d.Src(3, Type::kU32) : -1;
  const int32_t offset = d.Const(uint64_t(from.offset));
  const int32_t* more = d.List({read});
  Op& op = d.Emit(CopyAsync, 0, to.slot, from.slot, offset);
  op.imm = to.offset;
  op.n = uint16_t(size.bits);
  op.more = more;
  op.cache = d.NextCache();
  return true;
}

}  // namespace

bool Multicast(Thread* t, const Op* op, uint32_t blocks, uint64_t to, uint64_t barrier,
               const std::vector<uint8_t>& data) {
  constexpr uint64_t kOffset = (1u << kRankShift) - 1;
  for (; blocks != 0; blocks &= blocks - 1) {
    const uint64_t rank = uint64_t(__builtin_ctz(blocks));
    uint8_t* there = SharedOfBlock(t, op, rank, to & kOffset, uint32_t(data.size()), 16);
    uint8_t* place = there == nullptr ? nullptr : SharedOfBlock(t, op, rank, barrier & kOffset, 8, 8);
    if (place == nullptr) return false;
    std::memcpy(there, data.data(), data.size());
    CompleteMbarrier(place, uint32_t(data.size()));
  }
  return true;
}

void AddAsyncOps(DecodeTable* table) { (*table)["cp"] = DecodeCpAsync; }

}  // namespace cuda_remote::softgpu::ptx
