// SPDX-License-Identifier: Apache-2.0
// Barriers of a block, fences, sleeping.
#include <algorithm>

#include "softgpu/ptx/decoder.h"

namespace cuda_remote::softgpu::ptx {
namespace {

constexpr uint16_t kPopc = 1, kAnd = 2, kOr = 3;  // Op::n of bar.red

// a: the barrier's number, b: the number of threads or, with more[0] 0, all.
bool Arrive(const Op* op, uint64_t* r, Thread* t, uint32_t* id) {
  *id = uint32_t(r[op->a]);
  if (*id >= kNamedBarriers) {
    Raise(t, op, Fault::kInvalidCode, "no such barrier");
    return false;
  }
  Barrier& barrier = t->block->barriers[*id];
  uint32_t expected = 0;
  if (op->more[0] != 0) {
    expected = uint32_t(r[op->b]);
    if (expected == 0 || expected % 32 != 0) {
      Raise(t, op, Fault::kInvalidCode, "a barrier's number of threads must be a multiple of 32");
      return false;
    }
  }
  if (barrier.arrived == 0) {
    barrier.expected = expected;
    barrier.ands = true;
    barrier.ors = barrier.count = 0;
  }
  ++barrier.arrived;
  return true;
}

const Op* BarrierSync(const Op* op, uint64_t* r, Thread* t) {
  uint32_t id = 0;
  if (!Arrive(op, r, t, &id)) return nullptr;
  Barrier& barrier = t->block->barriers[id];
  if (op->n != 0) {
    const bool predicate = (r[op->c] & 1) != 0;
    barrier.ands &= predicate;
    barrier.ors |= predicate ? 1 : 0;
    barrier.count += predicate ? 1 : 0;
  }
  barrier.waiting.push_back(t->linear);
  t->state = State::kBarrier;
  t->barrier = id;
  t->pc = op;
  CheckBarrier(t->block, id);
  return t->state == State::kReady ? t->pc : nullptr;
}

const Op* BarrierArrive(const Op* op, uint64_t* r, Thread* t) {
  uint32_t id = 0;
  if (!Arrive(op, r, t, &id)) return nullptr;
  CheckBarrier(t->block, id);
  return op + 1;
}

const Op* Fence(const Op* op, uint64_t*, Thread*) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  return op + 1;
}
const Op* Sleep(const Op* op, uint64_t*, Thread* t) { return Yield(t, op + 1); }

const Op* ClusterArrive(const Op* op, uint64_t*, Thread* t) {
  if (t->cluster_arrived) {
    return Raise(t, op, Fault::kInvalidCode, "a thread arrives at the cluster's barrier again without waiting");
  }
  Cluster* cluster = t->block->cluster;
  t->cluster_arrived = true;
  t->cluster_phase = cluster->phase;
  ++cluster->arrived;
  CheckClusterBarrier(cluster);
  return op + 1;
}

const Op* ClusterWait(const Op* op, uint64_t*, Thread* t) {
  if (!t->cluster_arrived) {
    return Raise(t, op, Fault::kInvalidCode, "a thread waits at the cluster's barrier without having arrived");
  }
  if (t->cluster_phase != t->block->cluster->phase) {
    t->cluster_arrived = false;
    return op + 1;
  }
  t->state = State::kBarrier;
  t->barrier = kClusterBarrier;
  t->pc = op;
  return nullptr;
}

bool DecodeClusterBarrier(Decoder& d) {
  if (!d.Allow("cluster arrive wait aligned release acquire relaxed") || !d.Operands(0, 0)) return false;
  if (d.Has("arrive") == d.Has("wait")) return d.Unsupported();
  d.Emit(d.Has("arrive") ? ClusterArrive : ClusterWait);
  return true;
}

bool DecodeBarrier(Decoder& d) {
  if (d.Has("cluster")) return DecodeClusterBarrier(d);
  if (d.Has("warp")) return DecodeWarpBarrier(d);
  if (!d.Allow("cta sync arrive red aligned popc and or")) return false;
  const bool reduce = d.Has("red"), arrive = d.Has("arrive"), sync = d.Has("sync");
  const size_t first = reduce ? 1 : 0, last = reduce ? 1 : 0;
  if (!reduce && !arrive && !sync) return d.Unsupported();
  if (!d.Operands(first + last + 1, first + last + 2)) return false;
  const bool counted = d.in().operands.size() == first + last + 2;
  if (arrive && !counted) return d.Fail("the number of threads is missing");
  const int32_t a = d.Src(first, Type::kU32);
  const int32_t b = counted ? d.Src(first + 1, Type::kU32) : 0;
  const int32_t c = reduce ? d.Src(d.in().operands.size() - 1, Type::kPred) : 0;
  const int32_t* more = d.List({counted ? 1 : 0});
  Op& op = d.Emit(arrive ? BarrierArrive : BarrierSync, reduce ? d.Dst(0) : 0, a, b, c);
  op.more = more;
  op.n = !reduce ? 0 : d.Has("popc") ? kPopc : d.Has("and") ? kAnd : kOr;
  return true;
}

bool DecodeFence(Decoder& d) {
  d.Emit(Fence);
  return true;
}
bool DecodeSleep(Decoder& d) {
  d.Emit(Sleep);
  return true;
}

// A kernel starts when those before it have ended, so there is nothing to wait for.
bool DecodeDependency(Decoder& d) { return d.Allow("wait launch_dependents") && d.Operands(0, 0); }

// The threads that stand for `barrier` at a count: lanes that a warp does not have or that have ended count too, as
// barriers with a count are counted in whole warps.
uint32_t Counted(const Block& block, const Barrier& barrier) {
  std::vector<bool> seen(block.warps.size(), false);
  uint32_t total = barrier.arrived;
  for (const uint32_t linear : barrier.waiting) {
    const uint32_t warp = linear / 32;
    if (seen[warp]) continue;
    seen[warp] = true;
    total += 32 - uint32_t(__builtin_popcount(block.warps[warp].live));
  }
  return total;
}

}  // namespace

void CheckBarrier(Block* block, uint32_t id) {
  Barrier& barrier = block->barriers[id];
  if (barrier.arrived == 0) return;
  if (barrier.expected == 0 ? barrier.arrived < block->live
                            : barrier.arrived < barrier.expected && Counted(*block, barrier) < barrier.expected) {
    return;
  }
  for (const uint32_t linear : barrier.waiting) {
    Thread& t = block->threads[linear];
    GiveReduction(&t, barrier);
    t.state = State::kReady;
    t.pc += 1;
  }
  barrier.waiting.clear();
  barrier.arrived = 0;
}

void CheckClusterBarrier(Cluster* cluster) {
  if (cluster->arrived == 0 || cluster->arrived < cluster->live) return;
  cluster->arrived = 0;
  ++cluster->phase;
  for (const auto& block : cluster->blocks) {
    for (Thread& t : block->threads) {
      if (t.state != State::kBarrier || t.barrier != kClusterBarrier) continue;
      t.state = State::kReady;
      t.cluster_arrived = false;
      t.pc += 1;
    }
  }
}

void GiveReduction(Thread* t, const Barrier& barrier) {
  const Op* op = t->pc;
  if (op->n == kPopc) t->r[op->d] = barrier.count;
  if (op->n == kAnd) t->r[op->d] = barrier.ands ? 1 : 0;
  if (op->n == kOr) t->r[op->d] = barrier.ors;
}

void AddSyncOps(DecodeTable* table) {
  (*table)["griddepcontrol"] = DecodeDependency;
  (*table)["bar"] = DecodeBarrier;
  (*table)["barrier"] = DecodeBarrier;
  (*table)["membar"] = DecodeFence;
  (*table)["fence"] = DecodeFence;
  (*table)["nanosleep"] = DecodeSleep;
}

}  // namespace cuda_remote::softgpu::ptx
