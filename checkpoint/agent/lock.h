// SPDX-License-Identifier: Apache-2.0
// Locking: a tool brings one or several processes to a state in which no CUDA call is inside and no GPU has work.
//
// Closing the gates and waiting is not enough. Work on a GPU may depend on calls that are held at a gate: a host
// function waits for a thread of the program, a kernel polls memory that a later copy writes, a rank's collective waits
// for a rank that has not begun its own. So while some GPU has work, calls are let through one at a time:
//
//   - calls that only ask about work or wait for it, from all processes: they change nothing;
//   - other calls of threads whose GPU is idle. They cannot make a wait longer that is there already. If the GPU is
//     idle again soon, the next one follows; if not, the pauses grow, so that processes with work of their own come to
//     an end, but only to a part of the time since the lock began;
//   - if that does not help, other calls of threads whose GPU has work. They follow each other while the work that they
//     put into streams ends; else each comes after a longer pause than the one before, since they may only add to a
//     queue that is about to end by itself. While one host function keeps running, it is what the GPU waits for, and
//     they follow each other faster and faster.
//
// Everything has the deadline. When it passes all gates open, and the error says which process was not idle, and why.
#ifndef CUDA_REMOTE_CHECKPOINT_AGENT_LOCK_H_
#define CUDA_REMOTE_CHECKPOINT_AGENT_LOCK_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/agent/types.h"

namespace cuda_remote::agent {

// A process that can be locked. After a failure the caller must call Open.
class Lockable {
 public:
  virtual ~Lockable() = default;
  virtual std::string Name() const = 0;
  virtual absl::Status Close() = 0;
  virtual absl::StatusOr<Activity> Look() = 0;
  // Whether there was such a call; it was let through.
  virtual absl::StatusOr<bool> Admit(const Admission& which) = 0;
  // False if it was not quiet after all: then it is as before.
  virtual absl::StatusOr<bool> Settle(int timeout_ms) = 0;
  // Undoes Close and Settle. Also of a process that was not closed.
  virtual void Open() = 0;
};

// Time, which tests make up.
struct LockClock {
  std::function<int64_t()> now_us;
  std::function<void(int64_t us)> sleep_us;
};
LockClock RealClock();

struct LockOptions {
  int timeout_ms = 60000;
  std::function<bool()> cancelled;  // null: never
  LockClock clock = RealClock();
};

// Locks all of `processes`, or none. Returns the time, by `options.clock`, from which the gates have been closed
// without a break. On failure all gates are open.
absl::StatusOr<int64_t> LockAll(const std::vector<Lockable*>& processes, const LockOptions& options);

}  // namespace cuda_remote::agent

#endif  // CUDA_REMOTE_CHECKPOINT_AGENT_LOCK_H_
