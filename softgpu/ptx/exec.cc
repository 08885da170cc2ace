// SPDX-License-Identifier: Apache-2.0
// Runs the threads of blocks in turn.
//
// A thread runs until it waits, ends, fails or has used its quantum. Threads of a warp are run one after the other, so
// a spinning thread delays its block and never stops it. A host thread works on one cluster of blocks at a time, which
// are one block each unless the launch says otherwise; where one makes no end (it may wait for another one) the host
// thread takes further ones in between. Cooperative launches have all blocks under way from the start.
#include <algorithm>
#include <exception>
#include <functional>
#include <new>
#include <thread>

#include "proto/base/text.h"
#include "proto/threads/mutex.h"
#include "softgpu/ptx/machine.h"

namespace cuda_remote::softgpu::ptx {
namespace {

constexpr uint32_t kQuantum = 4096;
// A warp that meets itself again and again lets the others have a turn after so many times.
constexpr int kRounds = 64;
// A block that has run for so many instructions without an end may be waiting for blocks that have not started.
constexpr uint64_t kPatience = 20 * 1000 * 1000;
constexpr size_t kMaxResident = 32;
// Helpers start when the first blocks have shown that there is enough to do.
constexpr uint64_t kHelpAfter = 200 * 1000;
constexpr size_t kMaxRegisters = 1 << 17;
constexpr size_t kMaxDepth = 1 << 15;

// Kernel, function, line, block and thread.
std::string Describe(const Thread* t, const Op* op) {
  const LaunchState& launch = *t->block->launch;
  const Code* code = t->frames.empty() ? launch.kernel : t->frames.back().code;
  std::string text = "kernel " + launch.kernel->function->name;
  if (code != launch.kernel) text += ", function " + code->function->name;
  if (op != nullptr) {
    text += ", line " + std::to_string(op->line) + " '" + std::string(code->program->LineText(op->line)) + "'";
  }
  const Block& block = *t->block;
  auto triple = [](uint32_t x, uint32_t y, uint32_t z) {
    return "(" + std::to_string(x) + "," + std::to_string(y) + "," + std::to_string(z) + ")";
  };
  return text + ", block " + triple(block.ctaid[0], block.ctaid[1], block.ctaid[2]) + ", thread " +
         triple(t->tid[0], t->tid[1], t->tid[2]);
}

void SetFault(LaunchState* launch, Fault fault, const std::string& message) {
  MutexLock lock(&launch->mutex);
  if (launch->result.fault == Fault::kNone) {
    launch->result.fault = fault;
    launch->result.message = message;
  }
  launch->stop.store(true, std::memory_order_relaxed);
}

bool Cancelled(LaunchState* launch, const Worker& worker) {
  if (launch->options->instruction_limit != 0 && worker.instructions > launch->options->instruction_limit) {
    SetFault(launch, Fault::kCancelled, "kernel " + launch->kernel->function->name + ": instruction limit");
  }
  if (launch->options->cancel != nullptr && launch->options->cancel->load(std::memory_order_relaxed)) {
    SetFault(launch, Fault::kCancelled, "kernel " + launch->kernel->function->name + ": cancelled");
  }
  return launch->stop.load(std::memory_order_relaxed);
}

// Whether two threads wait for the same meeting.
bool SameMeeting(const Thread& a, const Thread& b) {
  return a.state == State::kWarp && b.state == State::kWarp && a.mask == b.mask && a.meet == b.meet;
}

// Whether all threads that a waiting thread's mask names, but for those that have ended, are there.
bool Complete(const Block& block, uint32_t warp, const Thread& t) {
  const uint32_t needed = t.mask & block.warps[warp].live;
  for (uint32_t lanes = needed; lanes != 0; lanes &= lanes - 1) {
    if (!SameMeeting(block.threads[warp * 32 + uint32_t(__builtin_ctz(lanes))], t)) return false;
  }
  return needed != 0;
}

// Ends a meeting of all threads of the warp. Where only some are named, the others get the chance to come, too: see
// MeetInPart.
void TryMeeting(Block* block, uint32_t warp, Thread* t) {
  const uint32_t live = block->warps[warp].live;
  if ((live & ~t->mask) == 0 && Complete(*block, warp, *t)) FinishMeeting(block, warp, live, t->meet);
}

// Ends the meetings of some of a warp's threads, when no other one can run for now. CUDA leaves open what a thread gets
// that gives a mask without itself; here it is what an H100 does (580): a thread that is at the same instruction with
// the same mask takes part, as the warp executes it at once. One that is there without any thread that its mask
// names, while nobody else can come (`all_wait`), is an illegal instruction.
// True: some thread can go on, or a fault was raised.
bool MeetInPart(Block* block, uint32_t warp, bool all_wait) {
  const uint32_t base = warp * 32;
  bool progress = false;
  const auto waits = [&](uint32_t lane) { return block->threads[base + lane].state == State::kWarp; };
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if ((block->warps[warp].waiting >> lane & 1) == 0 || !waits(lane)) continue;
    const Thread& first = block->threads[base + lane];
    if ((first.mask >> lane & 1) == 0 || !Complete(*block, warp, first)) continue;
    uint32_t together = first.mask & block->warps[warp].live;
    const uint32_t named = together;
    for (uint32_t lanes = block->warps[warp].waiting & ~named; lanes != 0; lanes &= lanes - 1) {
      const uint32_t other = uint32_t(__builtin_ctz(lanes));
      const Thread& outside = block->threads[base + other];
      if (!SameMeeting(outside, first)) continue;
      for (uint32_t members = named; members != 0; members &= members - 1) {
        if (block->threads[base + uint32_t(__builtin_ctz(members))].pc == outside.pc) together |= 1u << other;
      }
    }
    FinishMeeting(block, warp, together, first.meet);
    progress = true;
  }
  if (progress || !all_wait) return progress;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if ((block->warps[warp].waiting >> lane & 1) == 0 || !waits(lane)) continue;
    Thread& outside = block->threads[base + lane];
    if ((outside.mask >> lane & 1) != 0) continue;
    bool with_member = false;
    for (uint32_t lanes = outside.mask & block->warps[warp].waiting; lanes != 0; lanes &= lanes - 1) {
      const Thread& other = block->threads[base + uint32_t(__builtin_ctz(lanes))];
      with_member = with_member || (SameMeeting(other, outside) && other.pc == outside.pc);
    }
    if (with_member) continue;
    Raise(&outside, outside.pc, Fault::kIllegalInstruction, "a thread is not in the member mask that it gives");
    return true;
  }
  return false;
}

bool StartBlock(Block* block, Cluster* cluster, uint32_t rank, LaunchState* launch, Worker* worker) {
  const LaunchOptions& options = *launch->options;
  const uint32_t size[3] = {options.cluster.x, options.cluster.y, options.cluster.z};
  block->launch = launch;
  block->worker = worker;
  block->cluster = cluster;
  block->rank = rank;
  uint32_t rest = rank;
  for (int i = 0; i < 3; ++i) {
    block->place[i] = rest % size[i];
    block->ctaid[i] = cluster->index[i] * size[i] + block->place[i];
    rest /= size[i];
  }
  const uint32_t count = options.block.x * options.block.y * options.block.z;
  block->shared_bytes = launch->shared_total + (launch->prepared->reserved_shared ? kReservedShared : 0);
  block->shared_storage.assign(block->shared_bytes + 1024, 0);
  const uintptr_t storage = reinterpret_cast<uintptr_t>(block->shared_storage.data());
  block->shared = reinterpret_cast<uint8_t*>((storage + 1023) / 1024 * 1024);
  block->threads.resize(count);
  block->warps.assign((count + 31) / 32, Warp());
  for (auto& barrier : block->barriers) barrier = Barrier();
  block->live = count;
  cluster->live += count;
  for (uint32_t i = 0; i < count; ++i) {
    Thread& t = block->threads[i];
    t.block = block;
    t.linear = i;
    t.warp = i / 32;
    t.lane = i % 32;
    t.tid[0] = i % options.block.x;
    t.tid[1] = i / options.block.x % options.block.y;
    t.tid[2] = i / options.block.x / options.block.y;
    t.state = State::kReady;
    t.carry = 0;
    t.cluster_arrived = false;
    t.frames.clear();
    t.local.clear();
    block->warps[t.warp].live |= 1u << t.lane;
    if (!Enter(&t, nullptr, launch->kernel, nullptr)) return false;
    t.pc = launch->kernel->ops.data();
  }
  return true;
}

void StartCluster(Cluster* cluster, LaunchState* launch, Worker* worker, uint64_t index) {
  const LaunchOptions& options = *launch->options;
  const uint32_t across = options.grid.x / options.cluster.x, down = options.grid.y / options.cluster.y;
  cluster->index[0] = uint32_t(index % across);
  cluster->index[1] = uint32_t(index / across % down);
  cluster->index[2] = uint32_t(index / across / down);
  cluster->live = cluster->arrived = 0;
  cluster->phase = 0;
  cluster->blocks.resize(size_t(options.cluster.x) * options.cluster.y * options.cluster.z);
  uint32_t rank = 0;
  for (auto& block : cluster->blocks) {
    if (block == nullptr) block = std::make_unique<Block>();
    if (!StartBlock(block.get(), cluster, rank++, launch, worker)) return;
  }
}

// Runs a thread; true: it used up its quantum.
bool RunThread(Thread* t) {
  const Op* op = t->pc;
  uint32_t budget = kQuantum;
  do {
    op = op->fn(op, t->r, t);
  } while (op != nullptr && --budget != 0);
  t->block->worker->instructions += kQuantum - budget;
  if (op == nullptr) return t->yielded;
  t->pc = op;
  return true;
}

// Two threads are at the same instruction, called from the same places.
bool SamePlace(const Thread& a, const Thread& b) {
  if (a.pc != b.pc || a.frames.size() != b.frames.size()) return false;
  for (size_t i = 0; i < a.frames.size(); ++i) {
    if (a.frames[i].back != b.frames[i].back) return false;
  }
  return true;
}

// Gives every ready thread a turn or more; true: some thread did something.
bool RunWarp(Block* block, uint32_t warp) {
  const uint32_t base = warp * 32;
  bool progress = false;
  for (int round = 0; round < kRounds; ++round) {
    bool ran = false, spins = false;
    uint32_t converging = 0;
    for (uint32_t lanes = block->warps[warp].live; lanes != 0; lanes &= lanes - 1) {
      const uint32_t lane = uint32_t(__builtin_ctz(lanes));
      Thread* t = &block->threads[base + lane];
      if (t->state == State::kReady) {
        ran = true;
        t->yielded = false;
        spins |= RunThread(t);
        if (block->launch->stop.load(std::memory_order_relaxed)) return true;
      }
    }
    progress |= ran;
    if (ran && !spins) continue;
    for (uint32_t lanes = block->warps[warp].live; lanes != 0; lanes &= lanes - 1) {
      const uint32_t lane = uint32_t(__builtin_ctz(lanes));
      if (block->threads[base + lane].state == State::kConverge) converging |= 1u << lane;
    }
    const bool met = MeetInPart(block, warp, !ran && converging == 0);
    progress |= met;
    if (block->launch->stop.load(std::memory_order_relaxed)) return true;
    if (converging == 0 && (!met || spins)) return progress;
    while (converging != 0) {  // those at the same place are together
      const Thread& first = block->threads[base + uint32_t(__builtin_ctz(converging))];
      uint32_t together = 0;
      for (uint32_t lanes = converging; lanes != 0; lanes &= lanes - 1) {
        const uint32_t lane = uint32_t(__builtin_ctz(lanes));
        if (SamePlace(first, block->threads[base + lane])) together |= 1u << lane;
      }
      FinishMeeting(block, warp, together, Meet::kActive);
      converging &= ~together;
    }
    progress = true;
    if (spins) return progress;
  }
  return true;
}

// Nobody in the cluster can go on.
void RaiseDeadlock(const Cluster& cluster) {
  for (const auto& block : cluster.blocks) {
    for (const auto& t : block->threads) {
      if (t.state == State::kDone) continue;
      const char* where = t.state != State::kBarrier     ? "an operation of the warp"
                          : t.barrier == kClusterBarrier ? "the barrier of the cluster"
                                                         : "a barrier of the block";
      SetFault(block->launch, Fault::kDeadlock,
               std::string("threads wait for each other for ever, e.g. at ") + where + ": " + Describe(&t, t.pc));
      return;
    }
  }
}

// One turn of every warp. False: the cluster has ended or failed.
bool RunCluster(Cluster* cluster) {
  const Block& first = *cluster->blocks[0];
  bool progress = false;
  for (const auto& block : cluster->blocks) {
    for (uint32_t warp = 0; warp < block->warps.size(); ++warp) {
      progress |= RunWarp(block.get(), warp);
      if (first.launch->stop.load(std::memory_order_relaxed)) return false;
    }
  }
  if (cluster->live == 0) return false;
  if (Cancelled(first.launch, *first.worker)) return false;
  if (!progress) RaiseDeadlock(*cluster);
  return progress;
}

// Calls `run`; a lack of host memory becomes a fault.
template <class F>
void Guarded(LaunchState* launch, F run) {
  try {
    run();
  } catch (const std::bad_alloc&) {
    SetFault(launch, Fault::kStackOverflow,
             "kernel " + launch->kernel->function->name + ": the host has no memory for its threads");
  }
}

void RunClusters(LaunchState* launch, const std::function<void()>& call_for_help) {
  Worker worker;
  std::vector<std::unique_ptr<Cluster>> resident, spare;
  uint64_t last_end = 0;
  bool called = false;
  auto start = [&]() {
    const uint64_t index = launch->next_cluster.fetch_add(1);
    if (index >= launch->clusters) return false;
    std::unique_ptr<Cluster> cluster;
    if (spare.empty()) {
      cluster = std::make_unique<Cluster>();
    } else {
      cluster = std::move(spare.back());
      spare.pop_back();
    }
    StartCluster(cluster.get(), launch, &worker, index);
    resident.push_back(std::move(cluster));
    return true;
  };
  while (!launch->stop.load(std::memory_order_relaxed)) {
    if (resident.empty() && !start()) break;
    bool ended = false;
    for (size_t i = 0; i < resident.size();) {
      if (RunCluster(resident[i].get())) {
        ++i;
        continue;
      }
      ended = true;
      spare.push_back(std::move(resident[i]));
      resident.erase(resident.begin() + long(i));
      if (launch->stop.load(std::memory_order_relaxed)) break;
    }
    if (ended) last_end = worker.instructions;
    if (Cancelled(launch, worker)) break;
    if (!called && worker.instructions > kHelpAfter && launch->next_cluster.load() < launch->clusters) {
      called = true;
      call_for_help();
    }
    if (!resident.empty() && worker.instructions - last_end > kPatience && resident.size() < kMaxResident) {
      last_end = worker.instructions;
      start();
    }
  }
  MutexLock lock(&launch->mutex);
  launch->result.instructions += worker.instructions;
}

// All blocks at once, a fixed share for each host thread.
void RunCooperative(LaunchState* launch, uint64_t first, uint64_t step) {
  Worker worker;
  std::vector<std::unique_ptr<Cluster>> resident;
  for (uint64_t index = first; index < launch->clusters; index += step) {
    resident.push_back(std::make_unique<Cluster>());
    StartCluster(resident.back().get(), launch, &worker, index);
  }
  uint32_t turns = 0;
  while (!resident.empty() && !launch->stop.load(std::memory_order_relaxed)) {
    for (size_t i = 0; i < resident.size();) {
      if (RunCluster(resident[i].get())) {
        ++i;
      } else {
        if (launch->stop.load(std::memory_order_relaxed)) break;
        resident.erase(resident.begin() + long(i));
      }
    }
    if (Cancelled(launch, worker)) break;
    // Where there are fewer cores than host threads, spinning keeps others from what it waits for. Not every turn:
    // giving up the core may cost much more than a turn.
    if (++turns % 16 == 0) std::this_thread::yield();
  }
  MutexLock lock(&launch->mutex);
  launch->result.instructions += worker.instructions;
}

}  // namespace

const Op* Raise(Thread* t, const Op* op, Fault fault, const std::string& what) {
  SetFault(t->block->launch, fault, what + ": " + Describe(t, op));
  t->state = State::kDone;
  return nullptr;
}

uint8_t* GlobalSlow(Thread* t, const Op* op, uint64_t address, uint32_t bytes, bool write) {
  if ((address & (bytes - 1)) != 0) return BadAddress(t, op, address, bytes, "global", true);
  return GlobalRange(t, op, address, bytes, write);
}

uint8_t* GlobalRange(Thread* t, const Op* op, uint64_t address, uint64_t bytes, bool write) {
  auto& worker = *t->block->worker;
  for (auto& known : worker.cache) {
    const uint64_t offset = address - known.begin;
    if (offset >= known.bytes || known.bytes - offset < bytes || (write && !known.writable)) continue;
    worker.cache[op->cache % Worker::kEntries] = known;
    return reinterpret_cast<uint8_t*>(address);
  }
  Interval interval;
  LaunchState* launch = t->block->launch;
  MemoryMap* memory = launch->options->memory;
  const uint64_t workspace = reinterpret_cast<uint64_t>(launch->workspace);
  const uint64_t in_workspace = address - workspace;
  if (launch->options->cooperative && in_workspace < sizeof launch->workspace &&
      sizeof launch->workspace - in_workspace >= bytes) {
    return reinterpret_cast<uint8_t*>(address);
  }
  if (memory == nullptr || address >= kSharedWindow || !memory->Lookup(address, &interval) ||
      interval.begin > address || interval.end < address || interval.end - address < bytes ||
      (write && !interval.writable)) {
    return BadAddress(t, op, address, bytes, "global", false);
  }
  auto& entry = worker.cache[op->cache % Worker::kEntries];
  entry.begin = interval.begin;
  entry.bytes = interval.end - interval.begin;
  entry.writable = interval.writable;
  return reinterpret_cast<uint8_t*>(address);
}

uint8_t* BadAddress(Thread* t, const Op* op, uint64_t address, uint64_t bytes, const char* space, bool misaligned) {
  Raise(t, op, misaligned ? Fault::kMisaligned : Fault::kIllegalAddress,
        std::string(misaligned ? "misaligned " : "illegal ") + space + " access of " + std::to_string(bytes) +
            " bytes at " + Hex(address));
  return nullptr;
}

uint8_t* SharedOfBlock(Thread* t, const Op* op, uint64_t rank, uint64_t offset, uint32_t bytes, uint32_t align) {
  const Cluster& cluster = *t->block->cluster;
  if (rank < cluster.blocks.size()) {
    const Block& block = *cluster.blocks[rank];
    if (offset % align == 0 && offset < block.shared_bytes && block.shared_bytes - offset >= bytes) {
      if (block.live != 0) return block.shared + offset;
      Raise(t, op, Fault::kIllegalAddress, "access to the shared memory of a block that has ended");
      return nullptr;
    }
  }
  return BadAddress(t, op, offset, bytes, "shared", offset % align != 0);
}

uint8_t* SharedSlow(Thread* t, const Op* op, uint64_t address, uint32_t bytes) {
  const uint64_t rank = address >> kRankShift, offset = address & ((1u << kRankShift) - 1);
  if (rank == 0) return BadAddress(t, op, address, bytes, "shared", (address & (bytes - 1)) != 0);
  return SharedOfBlock(t, op, rank - 1, offset, bytes, bytes);
}

uint8_t* ParamPointer(Thread* t, const Op* op, uint64_t offset, uint32_t bytes, bool write) {
  const LaunchState& launch = *t->block->launch;
  if (!write && offset < launch.param_bytes && launch.param_bytes - offset >= bytes && (offset & (bytes - 1)) == 0) {
    return const_cast<uint8_t*>(launch.params) + offset;
  }
  return BadAddress(t, op, offset, bytes, "parameter", (offset & (bytes - 1)) != 0);
}

const Op* Yield(Thread* t, const Op* next) {
  t->pc = next;
  t->yielded = true;
  return nullptr;
}

void Exit(Thread* t) {
  Block* block = t->block;
  t->state = State::kDone;
  Warp& warp = block->warps[t->warp];
  warp.live &= ~(1u << t->lane);
  --block->live;
  Cluster* cluster = block->cluster;
  --cluster->live;
  if (t->cluster_arrived && t->cluster_phase == cluster->phase) --cluster->arrived;
  for (uint32_t lanes = warp.waiting; lanes != 0; lanes &= lanes - 1) {
    Thread& other = block->threads[t->warp * 32 + uint32_t(__builtin_ctz(lanes))];
    if (other.state == State::kWarp) TryMeeting(block, t->warp, &other);
  }
  for (uint32_t id = 0; id < kNamedBarriers; ++id) CheckBarrier(block, id);
  CheckClusterBarrier(cluster);
}

const Op* WaitForWarp(Thread* t, const Op* op, Meet meet, uint32_t mask, uint64_t value) {
  Block* block = t->block;
  t->pc = op;
  t->state = State::kWarp;
  t->meet = meet;
  t->mask = mask;
  t->value = value;
  block->warps[t->warp].waiting |= 1u << t->lane;
  TryMeeting(block, t->warp, t);
  return t->state == State::kReady ? t->pc : nullptr;
}

bool Enter(Thread* t, const Op* op, const Code* code, const Op* back) {
  Frame frame;
  frame.back = back;
  frame.code = code;
  if (!t->frames.empty()) {
    const Frame& last = t->frames.back();
    frame.register_base = last.register_base + uint32_t(last.code->frame.size());
  }
  frame.local_base = uint32_t((t->local.size() + 15) / 16 * 16);
  const size_t registers = frame.register_base + code->frame.size();
  const size_t local = size_t(frame.local_base) + code->frame_bytes;
  if (local > t->block->launch->options->stack_bytes || t->frames.size() >= kMaxDepth ||
      (registers > kMaxRegisters && !t->frames.empty())) {
    Raise(t, op, Fault::kStackOverflow, "stack overflow (" + std::to_string(t->frames.size()) + " calls)");
    return false;
  }
  if (t->registers.size() < registers) {
    t->registers.resize(t->frames.empty() ? registers : std::max(registers, 2 * t->registers.size()));
  }
  std::copy(code->frame.begin(), code->frame.end(), t->registers.begin() + long(frame.register_base));
  t->local.resize(local);
  t->frames.push_back(frame);
  t->r = t->registers.data() + frame.register_base;
  t->r[kBaseSlot] = frame.local_base;
  return true;
}

// Runs all blocks of a prepared launch.
void RunLaunch(LaunchState* launch) {
  const LaunchOptions& options = *launch->options;
  uint64_t workers = options.host_threads;
  if (workers == 0) workers = std::max(1u, std::thread::hardware_concurrency());
  workers = std::min(std::min<uint64_t>(workers, 256), launch->clusters);
  std::vector<std::thread> helpers;
  // Without helpers the launch is only slower, so a failure to start one is no failure.
  auto help = [&](std::function<void()> run) {
    try {
      helpers.emplace_back([launch, run] { Guarded(launch, run); });
      return true;
    } catch (const std::exception&) {
      return false;
    }
  };
  if (options.cooperative) {
    std::atomic<uint64_t> next{0};
    auto take = [&] { RunCooperative(launch, next.fetch_add(1), workers); };
    for (uint64_t i = 1; i < workers; ++i) {
      if (!help(take)) {
        SetFault(launch, Fault::kStackOverflow, "the host has no threads for a cooperative launch");
        break;
      }
    }
    Guarded(launch, take);
    for (auto& helper : helpers) helper.join();
    return;
  }
  Guarded(launch, [&] {
    RunClusters(launch, [&] {
      for (uint64_t i = 1; i < workers; ++i) {
        if (!help([launch] { RunClusters(launch, [] {}); })) break;
      }
    });
  });
  for (auto& helper : helpers) helper.join();
}

}  // namespace cuda_remote::softgpu::ptx
