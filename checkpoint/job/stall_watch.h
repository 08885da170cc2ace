// SPDX-License-Identifier: Apache-2.0
// Whether a process that a tool waits for makes no progress any more.
//
// A process with a user's number may be stopped by that user (SIGSTOP), or waits for what the user controls, such as a
// file system of the user's own. Whoever waits for it without a limit is held up by that user: an operator who saves
// other users' jobs, and a drain. So every such wait has a StallWatch, obeys signals, and ends the process (SIGKILL
// ends a stopped process, too).
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_STALL_WATCH_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_STALL_WATCH_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>

#include "proto/base/clock.h"

namespace cuda_remote::checkpoint {

// One thread at a time.
class StallWatch {
 public:
  // How long nothing may happen, in milliseconds: where the process, or one that it has started, is stopped; and else.
  struct Limits {
    int64_t stopped_ms, idle_ms;
  };
  // A disk may take its time. Nothing stops such a process but its user.
  static constexpr Limits kPatient = {10'000, 600'000};
  // For who was told to give up: work that makes progress may come to its end.
  static constexpr Limits kHurried = {1000, 10'000};

  // `process`: a child that nobody else reaps, or one that lives as long as this object is asked. `more`: a number that
  // changes with progress elsewhere, such as bytes that were received from the process; null: there is none.
  explicit StallWatch(pid_t process, std::function<uint64_t()> more = nullptr);

  // Whether the process, and those that it has started, have neither computed, nor read, nor written, nor waited for
  // anything new since so long. Ask several times a second.
  bool IsStalled(const Limits& limits = kPatient);

 private:
  const pid_t process_;
  const std::function<uint64_t()> more_;
  uint64_t progress_ = 0;
  Moment since_;
};

// Waits for the end of a child, and reaps it; kills it once it makes no progress. `limits`: as for IsStalled.
// Returns its status, as of waitpid; -1: it does not even end by SIGKILL, as when the kernel waits for a device.
int ReapWithoutStall(pid_t child, const StallWatch::Limits& limits = StallWatch::kPatient);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_STALL_WATCH_H_
