// SPDX-License-Identifier: Apache-2.0
// Files for a job's standard output and error: cr-run and cr-restart --output, --error.
//
// A file belongs to one running job: it is locked (flock) as long as the tool runs, so that two jobs, or two copies of
// one, never write to it. Not thread-safe.
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_OUTPUTS_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_OUTPUTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::checkpoint {

// Files, as a person names them; empty: none.
struct OutputOptions {
  std::string output, error;
  bool append = false;  // go on behind what they hold, instead of emptying them
};

class Outputs {
 public:
  Outputs() = default;
  ~Outputs();
  Outputs(const Outputs&) = delete;
  Outputs& operator=(const Outputs&) = delete;

  // Opens and locks the files. On failure none was changed.
  absl::Status Open(const OutputOptions& options);
  // Locks files that a job has already, without changing them.
  absl::Status Lock(const std::vector<std::string>& paths);

  // This process's descriptors 1 and 2 are the files, for a program that is about to be started.
  void Show();
  // They are what they were.
  void Hide();

  // Of descriptor 1 or 2; empty: it was not named.
  const std::string& path(int fd) const { return paths_[fd - 1]; }
  // The files' own sizes when they were opened: where the job begins to write.
  uint64_t size(int fd) const { return sizes_[fd - 1]; }
  std::vector<std::string> all() const;

 private:
  absl::Status OpenOne(const std::string& path, bool append, int index);

  std::string paths_[2];
  UniqueFd files_[2];
  uint64_t sizes_[2] = {0, 0};
  UniqueFd before_[2];
  std::vector<UniqueFd> locks_;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_OUTPUTS_H_
