// SPDX-License-Identifier: Apache-2.0
// Deleted files that saved processes still use ("ghosts"). CRIU makes one again under a name beside its own,
// NAME.cr.NUMBER.ghost, for as long as it restores the processes. NUMBER counts from 1 in each image. So two restores
// at the same time, of jobs that have deleted a file of the same name, would share what each of them is to have for
// itself. They wait for each other instead.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_GHOST_LOCKS_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_GHOST_LOCKS_H_

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::checkpoint {

// The names that the ghosts had, from CRIU's files.img and remap-fpath.img. Any input is safe.
std::vector<std::string> GhostsIn(std::string_view files, std::string_view remaps);

// Not thread-safe. The locks do not survive an execution.
class GhostLocks {
 public:
  // `folder`: of the locks, for all restores of this machine.
  explicit GhostLocks(std::string folder = "/run/cuda-remote-restores") : folder_(std::move(folder)) {}
  GhostLocks(const GhostLocks&) = delete;
  GhostLocks& operator=(const GhostLocks&) = delete;

  // Once. Waits until no other restore has a lock for one of these names. Fails if `cancelled` says so, or if there can
  // be no lock.
  absl::Status Take(const std::vector<std::string>& ghosts, const std::function<bool()>& cancelled);
  // When the processes are restored: CRIU has removed the names by then.
  void Release();

 private:
  const std::string folder_;
  std::vector<UniqueFd> locks_;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_GHOST_LOCKS_H_
