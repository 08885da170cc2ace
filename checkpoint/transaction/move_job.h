// SPDX-License-Identifier: Apache-2.0
// Moves the GPU side of a running job to other servers: the work of cr-migrate. checkpoint/README.md has its steps.
#ifndef CUDA_REMOTE_CHECKPOINT_TRANSACTION_MOVE_JOB_H_
#define CUDA_REMOTE_CHECKPOINT_TRANSACTION_MOVE_JOB_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/gpu/gpu_state.h"
#include "checkpoint/gpu/placement.h"
#include "checkpoint/gpu/precopy.h"
#include "checkpoint/job/job.h"
#include "checkpoint/transaction/job_report.h"

namespace cuda_remote::checkpoint {

struct MoveJobOptions {
  std::string to;                    // the server of processes that no rule names; empty: there are none
  int gpu = -1;                      // the only GPU that they get there; -1: all
  std::vector<PlacementRule> rules;  // for the others
  double timeout = 60;               // seconds to wait for CUDA calls that are in progress
  const std::vector<std::string>* environment = nullptr;  // GpuHostOptions::environment
};

// Of a move that has succeeded. Times are in seconds.
struct MoveJobOutcome {
  std::string servers;             // where the job is now, for messages
  double seconds = 0, paused = 0;  // in all; CUDA calls waited
  // Before the pause: all that was made ahead, and for how long calls waited for it.
  double ahead = 0, look = 0;
  // Parts of the pause.
  double handing_over = 0, replaying = 0, copying = 0;
  uint64_t objects = 0, objects_ahead = 0;
  uint64_t gpu_bytes = 0;
  PrecopyTimes before;  // copies to servers on other machines while the job ran
  CopiedBytes copied;
};

// Moves the job in `directory`: all of its processes, or none. On failure the job continues where it was. For one
// thread; starts others meanwhile.
absl::StatusOr<MoveJobOutcome> MoveJob(const MoveJobOptions& options, const Job& job, const std::string& directory,
                                       JobReport* report);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_TRANSACTION_MOVE_JOB_H_
