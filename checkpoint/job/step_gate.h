// SPDX-License-Identifier: Apache-2.0
// Where a checkpoint or a restart waits until others have done their part, such as cr-hostd (host/README.md).
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_STEP_GATE_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_STEP_GATE_H_

#include <string>

#include "absl/status/statusor.h"
#include "checkpoint/job/caller.pb.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::checkpoint {

class StepGate {
 public:
  virtual ~StepGate() = default;

  // Returns when the others have done what belongs to the step (caller.proto), with what they answer. Fails if they
  // could not: with CancelledError if the user has interrupted them.
  virtual absl::StatusOr<std::string> Pass(Step step) = 0;
};

// Asks cr-hostd. Not thread-safe.
class HostdGate final : public StepGate {
 public:
  // `socket` keeps the bounds of messages, and is this object's from now on. -1: all steps pass at once.
  explicit HostdGate(int socket) : socket_(socket) {}

  absl::StatusOr<std::string> Pass(Step step) override;

 private:
  const UniqueFd socket_;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_STEP_GATE_H_
