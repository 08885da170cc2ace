// SPDX-License-Identifier: Apache-2.0
// Terminals of jobs: one of the job's own beside this program's, and one where there is none.
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_TERMINAL_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_TERMINAL_H_

#include <poll.h>
#include <sys/types.h>
#include <termios.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::checkpoint {

// The first of the standard streams that is a terminal; -1 if none is.
int OwnTerminal();

// A pseudo-terminal whose output a process copies to standard output, with plain line ends.
struct TerminalCopy {
  int terminal = -1;  // for the job; the caller closes it once the job has it
  pid_t copier = 0;   // a child that ends when nobody has the terminal open any more
};
absl::StatusOr<TerminalCopy> CopyTerminal();

// A pseudo-terminal for a job whose session is not this program's, so that it has job control: the keys that stop and
// interrupt, groups in the foreground and background, the window's size. While this program is in the foreground, the
// keys go there, and this program's terminal is raw; what the job writes comes here at any time. In the background
// nothing is read, so the keys stay the shell's.
class JobTerminal {
 public:
  // Null if this program has no terminal, or its input or output is elsewhere.
  static absl::StatusOr<std::unique_ptr<JobTerminal>> Open();
  // Gives this program's terminal back as it was.
  ~JobTerminal();
  JobTerminal(const JobTerminal&) = delete;
  JobTerminal& operator=(const JobTerminal&) = delete;

  // The job's end, until CloseJobEnd; survives an execution.
  int job_end() const { return job_end_.get(); }
  void CloseJobEnd();
  // The standard streams that were the terminal.
  const std::vector<int>& streams() const { return streams_; }

  // For Beside.
  int Ask(std::vector<pollfd>* waiting);
  void Ready(const std::vector<pollfd>& waiting);
  // The window may have another size.
  void Resize();
  // Gives the terminal back for a while; the next Ask takes it again.
  void Release();
  // What the job has written last.
  void Drain();

 private:
  JobTerminal() = default;
  bool InForeground() const;
  void CopyOut();
  void CopyIn();

  UniqueFd own_;
  UniqueFd master_;
  UniqueFd job_end_;
  std::vector<int> streams_;
  termios before_ = {};
  bool raw_ = false, at_end_ = false;
  bool held_ = false;   // a CR whose next byte has not come yet
  std::string to_job_;  // keys that the job has not taken yet
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_TERMINAL_H_
