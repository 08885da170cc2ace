// SPDX-License-Identifier: Apache-2.0
// mbarrier: barriers that are objects in shared memory.
//
// The object's 64 bits, which programs treat as opaque: pending arrivals (20 bits), arrivals of a phase (20), bytes
// of copies that are expected (22, signed), and on top the phase's parity. A token of a phase is the object as it was.
#include "softgpu/ptx/mbarrier.h"

namespace cuda_remote::softgpu::ptx {
namespace {

constexpr uint64_t kCount = (1 << 20) - 1;
constexpr uint64_t kPhase = uint64_t{1} << 63;

struct Barrier64 {
  uint64_t pending, expected;
  int64_t bytes;
  uint64_t phase;
};

Barrier64 Read(const uint8_t* place) {
  uint64_t word;
  std::memcpy(&word, place, 8);
  // 22 bits at 40, with their sign
  return {word & kCount, word >> 20 & kCount, int64_t(word << 2) >> 42, word & kPhase};
}
void Write(uint8_t* place, Barrier64 b) {
  if (b.pending == 0 && b.bytes == 0) {  // the phase is complete
    b.phase ^= kPhase;
    b.pending = b.expected;
  }
  const uint64_t word = b.pending | b.expected << 20 | (uint64_t(b.bytes) & 0x3fffff) << 40 | b.phase;
  std::memcpy(place, &word, 8);
}

template <Where where>
uint8_t* Place(const Op* op, uint64_t* r, Thread* t) {
  return Pointer<where>(t, op, r[op->a] + uint64_t(op->imm), 8, true);
}

const Op* Bad(Thread* t, const Op* op, const char* what) { return Raise(t, op, Fault::kInvalidCode, what); }

// b: the count
template <Where where>
const Op* Init(const Op* op, uint64_t* r, Thread* t) {
  uint8_t* place = Place<where>(op, r, t);
  if (place == nullptr) return nullptr;
  const uint64_t count = uint32_t(r[op->b]);
  if (count == 0 || count > kCount) return Bad(t, op, "mbarrier count out of range");
  Write(place, {count, count, 0, 0});
  return op + 1;
}
template <Where where>
const Op* Invalidate(const Op* op, uint64_t* r, Thread* t) {
  uint8_t* place = Place<where>(op, r, t);
  if (place == nullptr) return nullptr;
  std::memset(place, 0, 8);
  return op + 1;
}

// d: the state, b: how many arrive, c: bytes to expect; n 1: the arrivals are dropped from later phases too.
template <Where where>
const Op* Arrive(const Op* op, uint64_t* r, Thread* t) {
  uint8_t* place = Place<where>(op, r, t);
  if (place == nullptr) return nullptr;
  uint64_t state;
  std::memcpy(&state, place, 8);
  Barrier64 b = Read(place);
  const uint64_t count = uint32_t(r[op->b]);
  if (count > b.pending) return Bad(t, op, "more arrivals at an mbarrier than it expects");
  b.pending -= count;
  b.bytes += int64_t(uint32_t(r[op->c]));
  if (op->n == 1) b.expected -= std::min(count, b.expected);
  Write(place, b);
  r[op->d] = state;
  return op + 1;
}

// c: bytes; n 0 expects them, 1 completes them
template <Where where>
const Op* Transaction(const Op* op, uint64_t* r, Thread* t) {
  uint8_t* place = Place<where>(op, r, t);
  if (place == nullptr) return nullptr;
  Barrier64 b = Read(place);
  const int64_t bytes = int64_t(uint32_t(r[op->c]));
  b.bytes += op->n == 0 ? bytes : -bytes;
  Write(place, b);
  return op + 1;
}

// d: whether the phase is over; b: a state or, n bit 0, a parity. n bit 1: others run before the answer no.
template <Where where>
const Op* Wait(const Op* op, uint64_t* r, Thread* t) {
  uint8_t* place = Place<where>(op, r, t);
  if (place == nullptr) return nullptr;
  const uint64_t given = (op->n & 1) != 0 ? r[op->b] << 63 : r[op->b] & kPhase;
  const bool over = Read(place).phase != given;
  r[op->d] = over ? 1 : 0;
  return over || (op->n & 2) == 0 ? op + 1 : Yield(t, op + 1);
}

const Op* PendingCount(const Op* op, uint64_t* r, Thread*) {
  r[op->d] = r[op->a] & kCount;
  return op + 1;
}

#define CUDA_REMOTE_PICK_WHERE(fn) (address.where == Where::kShared ? fn<Where::kShared> : fn<Where::kGeneric>)

bool DecodeMbarrier(Decoder& d) {
  if (!d.Allow("init inval arrive arrive_drop expect_tx complete_tx test_wait try_wait pending_count parity noComplete "
               "shared shared::cta shared::cluster release acquire relaxed cta cluster")) {
    return false;
  }
  const auto& operands = d.in().operands;
  const auto& first = d.in().modifiers.empty() ? std::string() : d.in().modifiers[0];
  if (first == "pending_count") return d.Simple(PendingCount, Type::kB64, 1);
  const bool gives = first == "arrive" || first == "arrive_drop" || first == "test_wait" || first == "try_wait";
  const bool shared = d.Has("shared") || d.Has("shared::cta") || d.Has("shared::cluster");
  // The destination may be left out where the barrier may be another block's.
  const size_t at = gives && !operands.empty() && operands[0].kind != Operand::Kind::kAddress ? 1 : 0;
  if (!d.Operands(at + 1, at + 3)) return false;
  Decoder::Address address;
  if (!d.ResolveAddress(operands[at], shared ? Where::kShared : Where::kGeneric, false, &address)) return false;
  if (address.where != Where::kShared && address.where != Where::kGeneric) return d.Unsupported();
  Operand sink;
  sink.kind = Operand::Kind::kSink;
  const int32_t destination = gives && at == 1 ? d.Dst(0) : d.Destination(sink);
  const bool has_value = operands.size() > at + 1;
  Handler fn;
  int32_t b = 0, c = 0;
  uint16_t n = 0;
  if (first == "init") {
    if (!has_value) return d.Fail("the count is missing");
    fn = CUDA_REMOTE_PICK_WHERE(Init);
    b = d.Src(at + 1, Type::kU32);
  } else if (first == "inval") {
    fn = CUDA_REMOTE_PICK_WHERE(Invalidate);
  } else if (first == "arrive" || first == "arrive_drop") {
    fn = CUDA_REMOTE_PICK_WHERE(Arrive);
    n = first == "arrive" ? 0 : 1;
    const bool expects = d.Has("expect_tx");
    if (expects && !has_value) return d.Fail("the number of bytes is missing");
    b = has_value && !expects ? d.Src(at + 1, Type::kU32) : d.Const(1);
    c = expects ? d.Src(at + 1, Type::kU32) : d.Const(0);
  } else if (first == "expect_tx" || first == "complete_tx") {
    if (!has_value) return d.Fail("the number of bytes is missing");
    fn = CUDA_REMOTE_PICK_WHERE(Transaction);
    n = first == "expect_tx" ? 0 : 1;
    c = d.Src(at + 1, Type::kU32);
  } else if (first == "test_wait" || first == "try_wait") {
    if (!has_value || at == 0) return d.Fail("the state is missing");
    fn = CUDA_REMOTE_PICK_WHERE(Wait);
    n = uint16_t((d.Has("parity") ? 1 : 0) | (first == "try_wait" ? 2 : 0));
    b = d.Src(at + 1, Type::kB64);
  } else {
    return d.Unsupported();
  }
  Op& op = d.Emit(fn, destination, address.slot, b, c);
  op.imm = address.offset;
  op.n = n;
  return true;
}

}  // namespace

bool EmitMbarrierArrive(Decoder& d, const Decoder::Address& address) {
  Operand sink;
  sink.kind = Operand::Kind::kSink;
  const int32_t one = d.Const(1), zero = d.Const(0);
  d.Emit(CUDA_REMOTE_PICK_WHERE(Arrive), d.Destination(sink), address.slot, one, zero).imm = address.offset;
  return true;
}

bool EmitMbarrierComplete(Decoder& d, const Decoder::Address& address, int32_t bytes) {
  Op& op = d.Emit(CUDA_REMOTE_PICK_WHERE(Transaction), 0, address.slot, 0, bytes);
  op.imm = address.offset;
  op.n = 1;
  return true;
}

bool EmitAsyncCompletion(Decoder& d, uint32_t bytes) {
  Decoder::Address barrier;
  if (!d.Has("mbarrier::complete_tx::bytes")) return d.Unsupported();
  return d.ResolveAddress(d.in().operands[2], d.Has("shared::cluster") ? Where::kShared : Where::kGeneric, false,
                          &barrier) &&
         EmitMbarrierComplete(d, barrier, d.Const(bytes));
}

void CompleteMbarrier(uint8_t* place, uint32_t bytes) {
  Barrier64 b = Read(place);
  b.bytes -= int64_t(bytes);
  Write(place, b);
}

void AddMbarrierOps(DecodeTable* table) { (*table)["mbarrier"] = DecodeMbarrier; }

}  // namespace cuda_remote::softgpu::ptx
