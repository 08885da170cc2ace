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
#include "proto/base/took.h"

namespace cuda_remote::agent {

// Until all callers have it: see took.h.
enum class CloseResult { kClosed, kOld, kFailed };

// A process that can be locked. After a failure the caller must call Open.
class Lockable {
 public:
  virtual ~Lockable() = default;
  virtual std::string Name() const = 0;
  // Unimplemented: the client library is older, and knows LockOld only.
  virtual absl::Status Close() {
    std::string error;
    const CloseResult result = Close(&error);
    if (result == CloseResult::kOld) return absl::UnimplementedError(error);
    return result == CloseResult::kClosed ? absl::OkStatus() : absl::UnknownError(error);
  }
  virtual absl::StatusOr<Activity> Look() {
    std::string error;
    Activity activity;
    if (!Look(&activity, &error)) return absl::UnknownError(error);
    return activity;
  }
  // Whether there was such a call; it was let through.
  virtual absl::StatusOr<bool> Admit(const Admission& which) {
    std::string error;
    bool admitted = false;
    if (!Admit(which, &admitted, &error)) return absl::UnknownError(error);
    return admitted;
  }
  // False if it was not quiet after all: then it is as before.
  virtual absl::StatusOr<bool> Settle(int timeout_ms) {
    std::string error;
    bool settled = false;
    if (!Settle(timeout_ms, &settled, &error)) return absl::UnknownError(error);
    return settled;
  }
  // Close, wait and settle in one, without letting calls through.
  virtual absl::Status LockOld(int timeout_ms) {
    std::string error;
    return LockOld(timeout_ms, &error) ? absl::OkStatus() : absl::UnknownError(error);
  }
  // Undoes Close and Settle. Also of a process that was not closed.
  virtual void Open() = 0;

  // Until all callers have it: see took.h. A Lockable has either these or those above, which are pure then.
  virtual CloseResult Close(std::string* error) {
    const absl::Status closed = Close();
    if (Took(closed, error)) return CloseResult::kClosed;
    return absl::IsUnimplemented(closed) ? CloseResult::kOld : CloseResult::kFailed;
  }
  virtual bool Look(Activity* activity, std::string* error) { return Took(Look(), activity, error); }
  virtual bool Admit(const Admission& which, bool* admitted, std::string* error) {
    return Took(Admit(which), admitted, error);
  }
  virtual bool Settle(int timeout_ms, bool* settled, std::string* error) {
    return Took(Settle(timeout_ms), settled, error);
  }
  virtual bool LockOld(int timeout_ms, std::string* error) { return Took(LockOld(timeout_ms), error); }
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
// Until all callers have it: see took.h.
inline bool LockAll(const std::vector<Lockable*>& processes, const LockOptions& options, int64_t* closed_us,
                    std::string* error) {
  int64_t unused = 0;
  return Took(LockAll(processes, options), closed_us ? closed_us : &unused, error);
}

}  // namespace cuda_remote::agent

#endif  // CUDA_REMOTE_CHECKPOINT_AGENT_LOCK_H_
