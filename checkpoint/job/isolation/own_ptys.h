// SPDX-License-Identifier: Apache-2.0
// A job's own pseudo-terminals: an instance of devpts, in which no other program has any. A restart needs those of the
// job under the numbers that they had, and finds them free. Terminals from outside, such as the one that cr-run was
// started at, are of another instance; the job finds them under their names all the same.
//
// For single-threaded processes in a mount namespace of their own; needs root.
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_OWN_PTYS_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_OWN_PTYS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::checkpoint {

// The names of those of these descriptors that are pseudo-terminals, as seen here.
std::vector<std::string> PtyNames(const std::vector<int>& descriptors);

class OwnPtys {
 public:
  OwnPtys() = default;
  OwnPtys(const OwnPtys&) = delete;
  OwnPtys& operator=(const OwnPtys&) = delete;

  // Mounts it on /dev/pts. `outside`: terminals from outside that the job gets.
  absl::Status Mount(const std::vector<std::string>& outside);
  // Shows these in it, but for one whose number a pseudo-terminal of the job's has. So a restored job must have its own
  // by now.
  void ShowOutside();
  // What must stay open as long as the job has them.
  const std::vector<UniqueFd>& places() const { return places_; }

 private:
  struct Outside {
    int number = 0;
    UniqueFd mount;
  };
  std::vector<Outside> outside_;
  std::vector<UniqueFd> places_;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_OWN_PTYS_H_
