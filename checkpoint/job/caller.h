// SPDX-License-Identifier: Apache-2.0
// The ordinary user for whom cr-hostd has started this tool (host/README.md), which runs as root.
//
// What that user has decided, such as the environment, is for processes that run as that user only: the tool's own
// environment is cr-hostd's.
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_CALLER_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_CALLER_H_

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/caller.pb.h"
#include "checkpoint/job/step_gate.h"

namespace cuda_remote::checkpoint {

class Caller {
 public:
  // From the descriptor that cr-hostd names with the option --caller. Null for -1: a person has started the tool. Fails
  // if it is not such a descriptor, or this program does not run as root.
  static absl::StatusOr<std::unique_ptr<const Caller>> From(int fd);
  // `account`: the user, as this machine knows that one; the groups are those of `facts`.
  Caller(const CallerFacts& facts, Account account, std::unique_ptr<StepGate> gate);

  // With the groups that the user has now, and what the machine says of the user otherwise.
  const Account& account() const { return account_; }
  const std::vector<std::string>& environment() const { return environment_; }
  // The value of a variable; null if there is none.
  const char* Variable(const std::string& name) const;
  // For what is made as the user. The tool's own keeps others out.
  mode_t umask() const { return umask_; }
  // Of the process that asks: by this number the user may call the job.
  pid_t pid() const { return pid_; }
  // Whether cr-hostd decides when a restored job runs.
  bool holds() const { return holds_; }
  // Networks of which the job may have an address of its own (CheckNetwork).
  const std::vector<std::string>& addresses() const { return addresses_; }
  // Whether this is a part of a checkpoint over several hosts.
  bool waits() const { return waits_; }
  // For messages: the image as the user named it.
  const std::string& image() const { return image_; }
  // Where cr-hostd does its part.
  StepGate* gate() const { return gate_.get(); }

  // Whether a saved job with these rights may be restored for the user.
  absl::Status CheckSaved(const std::optional<Account>& saved) const;

 private:
  Account account_;
  const std::vector<std::string> environment_, addresses_;
  const std::string image_;
  const mode_t umask_;
  const pid_t pid_;
  const bool holds_, waits_;
  const std::unique_ptr<StepGate> gate_;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_CALLER_H_
