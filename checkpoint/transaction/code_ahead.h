// SPDX-License-Identifier: Apache-2.0
// A move makes the code of a job - contexts, modules, functions - in its new sessions while the job still runs. It
// stops the job once, for the logs, and again for the move itself (LiveJob, JobTransaction).
//
// Who would notice without it: a job with many modules, such as PyTorch's, when it moves. Making its code is most of a
// replay, and would be part of the pause.
//
// For one thread.
#ifndef CUDA_REMOTE_CHECKPOINT_TRANSACTION_CODE_AHEAD_H_
#define CUDA_REMOTE_CHECKPOINT_TRANSACTION_CODE_AHEAD_H_

#include <string>

#include "absl/status/status.h"
#include "checkpoint/agent/lock.h"
#include "checkpoint/job/cuda_processes.h"
#include "checkpoint/job/job.h"
#include "checkpoint/job/job_claim.h"
#include "checkpoint/transaction/live_job.h"
#include "proto/channel/client_channel.h"
#include "replay/log/log.h"

namespace cuda_remote::checkpoint {

class CodeAhead {
 public:
  // As for LiveJob.
  CodeAhead(const Job& job, std::string directory, const JobClaim& claim, const ImagesAhead* images)
      : job_(job), before_(job, std::move(directory), claim, images) {}

  // Takes the logs of all processes, which stand for that moment. Fails where a later stop would fail, too.
  absl::Status Look(const agent::LockOptions& lock);

  // What Look has found of a process; null if nothing, or if processes share on the GPU: these are replayed together,
  // in a scope that none of them may have before all have it.
  const replay::Log* Of(const CudaProcess& process) const;

  // For how many seconds Look held calls back.
  double held_seconds() const { return held_seconds_; }

 private:
  const Job& job_;
  LiveJob before_;
  bool usable_ = false;
  double held_seconds_ = 0;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_TRANSACTION_CODE_AHEAD_H_
