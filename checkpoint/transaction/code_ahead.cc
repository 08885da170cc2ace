// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/code_ahead.h"

#include <algorithm>

#include "checkpoint/transaction/at_step.h"
#include "checkpoint/transaction/job_transaction.h"
#include "proto/base/status_macros.h"
#include "replay/replayer/replayer.h"

namespace cuda_remote::checkpoint {

absl::Status CodeAhead::Look(const agent::LockOptions& lock) {
  AtStep("look at the logs");
  JobTransaction look(job_, &before_, /*engine=*/nullptr, /*guard=*/nullptr);
  CR_RETURN_IF_ERROR(look.Begin(lock));
  const auto& processes = before_.processes();
  usable_ = std::none_of(processes.begin(), processes.end(),
                         [](const auto& process) { return replay::Shares(process->log()); });
  // Why not, the move finds out itself.
  usable_ = look.Resume().ok() && usable_;
  held_seconds_ = look.HeldSeconds();
  return absl::OkStatus();
}

const replay::Log* CodeAhead::Of(const CudaProcess& process) const {
  const auto& processes = before_.processes();
  const auto found =
      std::find_if(processes.begin(), processes.end(), [&](const auto& one) { return one->process() == process; });
  return usable_ && found != processes.end() ? &(*found)->log() : nullptr;
}

}  // namespace cuda_remote::checkpoint
