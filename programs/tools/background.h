// SPDX-License-Identifier: Apache-2.0
// Does a tool's work in a process of its own that nobody kills by accident.
//
// A tool that holds a job's channel, or has just released the job for a snapshot, must not disappear in the middle: the
// job would lose its GPU. So the work is done by a process that is in no process group or family of the one that the
// user has started (and may kill). When that one is killed or interrupted, the work sees it, gives the job back, and
// ends.
#ifndef CUDA_REMOTE_PROGRAMS_TOOLS_BACKGROUND_H_
#define CUDA_REMOTE_PROGRAMS_TOOLS_BACKGROUND_H_

#include <functional>

namespace cuda_remote::client::tools {

// What the work gets.
struct Background {
  // Whether to give up.
  std::function<bool()> cancelled;
  // A pipe that takes the place of standard error in a helper which outlives the work if that is killed (cr-keeper).
  // The process that the user has started copies it to its own standard error, and waits for the helper, too. If it is
  // killed as well, nobody who reads the tool's output waits.
  int helper_messages = -1;
};

// Runs `work` there and returns what it returns, the tool's exit code. Call it from a single-threaded program.
int RunInBackground(const std::function<int(const Background&)>& work);

}  // namespace cuda_remote::client::tools

#endif  // CUDA_REMOTE_PROGRAMS_TOOLS_BACKGROUND_H_
