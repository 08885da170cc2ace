// SPDX-License-Identifier: Apache-2.0
// Does a tool's work in a process of its own that nobody kills by accident.
//
// A tool that holds a job's channel, or has just released the job for a snapshot, must not disappear in the middle: the
// job would lose its GPU. So the work is done by a process that is in no process group or family of the one that the
// user has started (and may kill). When that one is killed or interrupted, the work sees it, gives the job back, and
// ends.
#ifndef CUDA_REMOTE_CLIENT_TOOLS_BACKGROUND_H_
#define CUDA_REMOTE_CLIENT_TOOLS_BACKGROUND_H_

#include <functional>

namespace cuda_remote::client::tools {

// Runs `work` there and returns what it returns, the tool's exit code. `work` gets a function that says whether to give
// up. Call it from a single-threaded program.
int RunInBackground(const std::function<int(const std::function<bool()>& cancelled)>& work);

}  // namespace cuda_remote::client::tools

#endif  // CUDA_REMOTE_CLIENT_TOOLS_BACKGROUND_H_
