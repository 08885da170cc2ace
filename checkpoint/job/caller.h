// SPDX-License-Identifier: Apache-2.0
// The ordinary user for whom cr-hostd has started this tool (host/README.md), which runs as root.
//
// What that user has decided, such as her environment, is for processes that run as her only: the tool's own
// environment is cr-hostd's.
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_CALLER_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_CALLER_H_

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/job/account.h"

namespace cuda_remote::checkpoint {

// What a tool announces, and cr-hostd does before it answers.
inline constexpr char kImageBegins[] = "image begins";      // makes the image's folder, as the user; answers its name
inline constexpr char kImageComplete[] = "image complete";  // signs the image, and copies it there
inline constexpr char kImageRestored[] = "image restored";  // if Caller::holds: answers when the job is to run
// Of a checkpoint over several hosts: they answer when all hosts have come so far.
inline constexpr char kJobReady[] = "job ready";
inline constexpr char kJobLocked[] = "job locked";
inline constexpr char kJobStill[] = "job still";
inline constexpr char kJobDumped[] = "job dumped";
inline constexpr char kImageUsed[] = "image used";  // removes its copy of the image

// Goes with a signal that is passed on: a terminal has sent it.
inline constexpr int kOfTerminal = 0x7e12;

class Caller {
 public:
  // From the descriptor that cr-hostd names with the option --caller. Once, before any thread is started. Fails if that
  // is not such a descriptor, or this program does not run as root.
  static absl::Status Take(int fd);
  // Null in a tool that a person has started.
  static const Caller* Get();

  // With the groups that she has now, and what the machine says of her otherwise.
  const Account& account() const { return account_; }
  const std::vector<std::string>& environment() const { return environment_; }
  // The value of a variable; null if there is none.
  const char* Variable(const std::string& name) const;
  // In a child that has become the user: her environment instead of this program's.
  void UseEnvironment() const;
  // For what is made as her. The tool's own keeps others out.
  mode_t umask() const { return umask_; }
  // Of the process that asks: by this number she may call the job.
  pid_t pid() const { return pid_; }
  // Whether cr-hostd decides when a restored job runs.
  bool holds() const { return holds_; }
  // Networks of which the job may have an address of its own (CheckNetwork).
  const std::vector<std::string>& addresses() const { return addresses_; }
  // Whether this is a part of a checkpoint over several hosts.
  bool waits() const { return waits_; }
  // For messages: the image as she named it.
  const std::string& image() const { return image_; }

  // Whether a saved job with these rights may be restored for her.
  absl::Status CheckSaved(const std::optional<Account>& saved) const;

  // Returns when cr-hostd has done what belongs to it, with what it answers. Fails if it could not.
  absl::StatusOr<std::string> Announce(const char* what) const;

 private:
  Account account_;
  std::vector<std::string> environment_, addresses_;
  std::string image_;
  mode_t umask_ = 077;
  pid_t pid_ = 0;
  bool holds_ = false, waits_ = false;
  int announcements_ = -1;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_CALLER_H_
