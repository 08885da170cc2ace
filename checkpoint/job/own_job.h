// SPDX-License-Identifier: Apache-2.0
// A job that an ordinary user has started by himself, without cr-hostd, as root's tools meet it.
//
// Its folder, and with it job.json and the sockets, are that user's, who may have put anything there. So root's tools
// touch the folder with his rights only, and believe of job.json what the kernel says, too.
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_OWN_JOB_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_OWN_JOB_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/job.h"

namespace cuda_remote::checkpoint {

// For a tool that takes a JOB. In root's tool, if `name` is an ordinary user's own job and none of root's: while it
// lives, this thread acts as that user. Otherwise it changes nothing.
class OwnersRights {
 public:
  explicit OwnersRights(const std::string& name);
  OwnersRights(const OwnersRights&) = delete;
  OwnersRights& operator=(const OwnersRights&) = delete;

  // Of the job that was found in `directory`: leaves in *job what may be believed, and whom it runs as. Fails
  // if it is not that user's.
  absl::Status Check(const std::string& directory, Job* job) const;

 private:
  std::optional<Account> owner_;
  std::optional<ActAs> rights_;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_OWN_JOB_H_
