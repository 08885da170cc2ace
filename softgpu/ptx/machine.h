// SPDX-License-Identifier: Apache-2.0
// The machine that runs decoded PTX: operations, threads, blocks.
//
// A decoded instruction is an Op: a handler and the slots of its operands in the frame of the running function.
// Immediate operands are slots too, filled when the frame is made. A handler does its work and returns the next Op, or
// null when the thread stops for now: it waits, has ended, or has failed.
//
// Thread-safety: Code and Op are immutable once prepared. A Block and its Threads belong to one host thread at a time.
// A LaunchState is shared by the host threads of a launch.
#ifndef CUDA_REMOTE_SOFTGPU_PTX_MACHINE_H_
#define CUDA_REMOTE_SOFTGPU_PTX_MACHINE_H_

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "proto/threads/mutex.h"
#include "softgpu/ptx/ir.h"

namespace cuda_remote::softgpu::ptx {

struct Op;
struct Thread;
struct Block;
struct Cluster;
struct LaunchState;
struct Code;

using Handler = const Op* (*)(const Op* op, uint64_t* r, Thread* t);

struct Op {
  Handler fn = nullptr;
  int32_t d = 0, a = 0, b = 0, c = 0;  // slots
  union {
    int64_t imm = 0;
    const Op* target;  // of a branch
    const void* aux;   // owned by Code
  };
  const int32_t* more = nullptr;  // further slots, owned by Code
  uint32_t line = 0;
  uint16_t n = 1;      // elements of a vector, or a variant of the operation
  uint16_t cache = 0;  // entry of the interval cache
};

// The slots of a frame below the function's own registers.
constexpr int32_t kBaseSlot = 0;  // local address of the frame's memory
constexpr int32_t kFirstRegister = 1;

struct CallInfo;

// A decoded function.
struct Code {
  const Function* function = nullptr;
  const Program* program = nullptr;
  std::string unsupported;  // not empty: why the function cannot run
  std::vector<Op> ops;
  std::vector<uint64_t> frame;  // first contents of the slots
  uint32_t frame_bytes = 0;     // of local memory
  std::vector<std::unique_ptr<int32_t[]>> lists;
  std::vector<std::unique_ptr<CallInfo>> calls;
  std::vector<std::unique_ptr<std::vector<const Op*>>> tables;
  std::vector<std::shared_ptr<void>> owned;  // what Op::aux points to
};

// One value that a call hands over.
struct Passed {
  int32_t slot = -1;    // register, else:
  uint32_t offset = 0;  // in the frame's local memory
  uint32_t bytes = 0;
};

enum class SystemCall : uint8_t { kNone, kPrintf, kAssert, kMalloc, kFree, kSetConditional };

struct CallInfo {
  const Code* callee = nullptr;  // null: indirect or system
  SystemCall system = SystemCall::kNone;
  std::vector<Passed> args, results;  // of the caller
};

// A kernel and everything that it can reach, decoded for its layout of shared memory.
struct Prepared {
  Reachable reach;
  std::vector<std::unique_ptr<Code>> codes;  // the kernel first
  std::unordered_map<uint64_t, const Code*> by_address;
  std::unordered_map<const Function*, Code*> by_function;
  bool reserved_shared = false;  // the code asks for the part that the system keeps for cooperative groups
  std::string error;
};

constexpr uint32_t kReservedShared = 1024;

struct Frame {
  const Op* back = nullptr;  // the call
  const Code* code = nullptr;
  uint32_t register_base = 0;
  uint32_t local_base = 0;
};

enum class State : uint8_t { kReady, kWarp, kConverge, kBarrier, kDone };

// Operations for which threads of a warp meet.
enum class Meet : uint8_t { kShfl, kVote, kMatch, kRedux, kSync, kElect, kActive, kMatrix };

struct Thread {
  uint64_t* r = nullptr;  // the running function's frame
  const Op* pc = nullptr;
  Block* block = nullptr;
  State state = State::kReady;
  Meet meet = Meet::kSync;
  bool yielded = false;
  uint32_t carry = 0;
  uint32_t lane = 0, warp = 0, linear = 0;
  uint32_t tid[3] = {0, 0, 0};
  uint32_t mask = 0;             // of the warp operation waited for
  uint32_t barrier = 0;          // id of the barrier waited for
  bool cluster_arrived = false;  // at the cluster's barrier, and has not waited there since
  uint32_t cluster_phase = 0;    // in which phase of it
  uint64_t value = 0;            // handed to the operation waited for
  std::vector<uint64_t> registers;
  std::vector<uint8_t> local;
  std::vector<Frame> frames;
};

// Those that programs name, and Thread::barrier of threads that wait at the cluster's.
constexpr uint32_t kNamedBarriers = 16, kClusterBarrier = 16;

struct Barrier {
  uint32_t arrived = 0;
  uint32_t expected = 0;  // 0: all threads of the block
  uint32_t ors = 0, count = 0;
  bool ands = true;
  std::vector<uint32_t> waiting;
};

// What one host thread keeps between blocks.
struct Worker {
  struct Entry {
    uint64_t begin = 1, bytes = 0;
    bool writable = false;
  };
  static constexpr uint32_t kEntries = 64;
  Entry cache[kEntries];
  uint64_t instructions = 0;
};

struct Warp {
  uint32_t live = 0;     // lanes that have not ended
  uint32_t waiting = 0;  // lanes in State::kWarp
};

struct Block {
  LaunchState* launch = nullptr;
  Worker* worker = nullptr;
  Cluster* cluster = nullptr;
  uint32_t rank = 0;              // in the cluster
  uint32_t place[3] = {0, 0, 0};  // in the cluster
  uint32_t ctaid[3] = {0, 0, 0};
  uint8_t* shared = nullptr;
  uint64_t shared_bytes = 0;
  std::vector<uint8_t> shared_storage;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier barriers[kNamedBarriers];
  uint32_t live = 0;
};

// Blocks that reach each other's shared memory; one host thread runs them in turn. Without clusters each block is one.
struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;  // by rank
  uint32_t index[3] = {0, 0, 0};
  uint32_t live = 0;     // threads of all blocks that have not ended
  uint32_t arrived = 0;  // those of them that are at the barrier
  uint32_t phase = 0;    // of the barrier
};

// An address in another block's shared memory, as mapa makes it: rank + 1 above the offset. Without a rank: one's own.
constexpr uint32_t kRankShift = 24;

struct LaunchState {
  const Prepared* prepared = nullptr;
  const Code* kernel = nullptr;
  const LaunchOptions* options = nullptr;
  const uint8_t* params = nullptr;
  uint32_t param_bytes = 0;
  uint32_t shared_total = 0;
  uint64_t clusters = 0;
  std::atomic<uint64_t> next_cluster{0};
  std::atomic<bool> stop{false};
  // What grid.sync() works with: its size and a counter of arrivals. %envreg1 and %envreg2 say where, if cooperative.
  alignas(64) uint32_t workspace[16] = {64};
  Mutex mutex;  // also of options->print
  LaunchResult result CR_GUARDED_BY(mutex);
};

// Ends the launch with a fault; returns null for the handler to return.
const Op* Raise(Thread* t, const Op* op, Fault fault, const std::string& what);

// Slow path of memory checks: asks the map; null after raising the fault.
uint8_t* GlobalRange(Thread* t, const Op* op, uint64_t address, uint64_t bytes, bool write);  // of any alignment
uint8_t* GlobalSlow(Thread* t, const Op* op, uint64_t address, uint32_t bytes, bool write);
uint8_t* BadAddress(Thread* t, const Op* op, uint64_t address, uint64_t bytes, const char* space, bool misaligned);

// `bytes` bytes of the shared memory of the block of that rank in the thread's cluster, at offset `offset`, which is a
// multiple of `align`.
uint8_t* SharedOfBlock(Thread* t, const Op* op, uint64_t rank, uint64_t offset, uint32_t bytes, uint32_t align);
// The same for an address that is not simply in one's own.
uint8_t* SharedSlow(Thread* t, const Op* op, uint64_t address, uint32_t bytes);

// How a thread's access names memory.
enum class Where : uint8_t { kGeneric, kGlobal, kShared, kLocal, kParam };

inline uint8_t* GlobalPointer(Thread* t, const Op* op, uint64_t address, uint32_t bytes, bool write) {
  const auto& entry = t->block->worker->cache[op->cache % Worker::kEntries];
  const uint64_t offset = address - entry.begin;
  if (offset < entry.bytes && entry.bytes - offset >= bytes && (entry.writable || !write) &&
      (address & (bytes - 1)) == 0) {
    return reinterpret_cast<uint8_t*>(address);
  }
  return GlobalSlow(t, op, address, bytes, write);
}

inline uint8_t* SharedPointer(Thread* t, const Op* op, uint64_t offset, uint32_t bytes) {
  const Block* block = t->block;
  if (offset < block->shared_bytes && block->shared_bytes - offset >= bytes && (offset & (bytes - 1)) == 0) {
    return block->shared + offset;
  }
  return SharedSlow(t, op, offset, bytes);
}

inline uint8_t* LocalPointer(Thread* t, const Op* op, uint64_t offset, uint32_t bytes) {
  if (offset < t->local.size() && t->local.size() - offset >= bytes && (offset & (bytes - 1)) == 0) {
    return t->local.data() + offset;
  }
  return BadAddress(t, op, offset, bytes, "local", (offset & (bytes - 1)) != 0);
}

uint8_t* ParamPointer(Thread* t, const Op* op, uint64_t offset, uint32_t bytes, bool write);

// The host address of `bytes` (a power of two) bytes at `address`; null: the fault is raised.
template <Where where>
inline uint8_t* Pointer(Thread* t, const Op* op, uint64_t address, uint32_t bytes, bool write) {
  if (where == Where::kGlobal) return GlobalPointer(t, op, address, bytes, write);
  // These spaces have 32-bit addresses; sums wrap around.
  if (where == Where::kShared) return SharedPointer(t, op, uint32_t(address), bytes);
  if (where == Where::kLocal) return LocalPointer(t, op, uint32_t(address), bytes);
  if (where == Where::kParam) return ParamPointer(t, op, address, bytes, write);
  switch (address >> 48) {
    case 1:
      return SharedPointer(t, op, address - kSharedWindow, bytes);
    case 2:
      return LocalPointer(t, op, address - kLocalWindow, bytes);
    case 3:
      return ParamPointer(t, op, address - kParamWindow, bytes, write);
    default:
      return GlobalPointer(t, op, address, bytes, write);
  }
}

// Threads that stop: see exec.cc.
void Exit(Thread* t);
const Op* WaitForWarp(Thread* t, const Op* op, Meet meet, uint32_t mask, uint64_t value);
// Gives the threads of `members`, lanes of one warp that wait for the same operation, their results.
void FinishMeeting(Block* block, uint32_t warp, uint32_t members, Meet meet);
// The work of a matrix instruction, see decode_matrix.cc. False: the fault is raised.
bool FinishMatrix(Block* block, uint32_t warp, uint32_t members);
// Stops the thread at `next` for now, so that others run.
const Op* Yield(Thread* t, const Op* next);
// Lets the threads go on that a barrier holds, where it is complete.
void CheckBarrier(Block* block, uint32_t id);
void CheckClusterBarrier(Cluster* cluster);
// The handler of bar.red, whose threads get the result; see decode_sync.cc.
void GiveReduction(Thread* t, const Barrier& barrier);
// Starts a function: frame, registers, local memory. False: the fault is raised.
bool Enter(Thread* t, const Op* op, const Code* code, const Op* back);
// vprintf and its kin; see system.cc.
const Op* RunSystemCall(const Op* op, Thread* t, const CallInfo& call);
bool FormatPrintf(Thread* t, const Op* op, uint64_t format, uint64_t args, std::string* out, int* count);

// The low bytes of a slot as a T.
template <class T>
inline T Get(uint64_t bits) {
  T value;
  static_assert(sizeof(T) <= 8, "");
  std::memcpy(&value, &bits, sizeof(T));  // little-endian hosts only, as CUDA's are
  return value;
}

// A T as a slot, zeros above.
template <class T>
inline uint64_t Put(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

}  // namespace cuda_remote::softgpu::ptx

#endif  // CUDA_REMOTE_SOFTGPU_PTX_MACHINE_H_
