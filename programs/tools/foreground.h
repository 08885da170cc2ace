// SPDX-License-Identifier: Apache-2.0
// What cr-run and cr-restart share: a job in the foreground, from its start to its exit code.
#ifndef CUDA_REMOTE_PROGRAMS_TOOLS_FOREGROUND_H_
#define CUDA_REMOTE_PROGRAMS_TOOLS_FOREGROUND_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "checkpoint/engine/snapshot_engine.h"
#include "checkpoint/gpu/gpu_host.h"
#include "checkpoint/job/gpu_devices.h"
#include "checkpoint/job/isolation/isolate.h"
#include "checkpoint/job/isolation/terminal.h"
#include "checkpoint/job/job.h"

namespace cuda_remote::client::tools {

// Exit codes that are not the program's. As with env, nohup and other programs that run programs, 125 to 127 mean that
// the program did not run.
inline constexpr int kExitStopped = 121;
inline constexpr int kExitFailed = 125;

// Prints "cr-run: text" to stderr.
void Say(const char* tool, const std::string& text);
// The same, with what has failed.
void Say(const char* tool, const absl::Status& failure);

// Whether a job with this exit code came to its end: it was neither killed nor saved and stopped.
inline bool EndedByItself(int code) { return code < 128 && code != kExitStopped; }

// Waits for the job in `isolated` (isolated.init != 0) or for the plain child isolated.pid, forwards signals, notices
// when the job's own server ends, and cleans the job's folder up. Returns the exit code: the program's, 128 plus the
// number of the signal that ended it, or kExitStopped if cr-checkpoint --stop did.
// `terminal`: the job's own, null if it has none. `engine`: what saves the job; null if nothing does. Says when a
// process of `job` uses this machine's own GPU.
int FinishJob(const char* tool, const checkpoint::Isolated& isolated, const std::string& directory,
              const checkpoint::Job& job, std::unique_ptr<checkpoint::JobTerminal> terminal,
              std::unique_ptr<checkpoint::GpuHosts> hosts, checkpoint::SnapshotEngine* engine);

// Lets go of standard input and output, so that a pipe ends when the program closes it.
void LetGoOfStreams();

}  // namespace cuda_remote::client::tools

#endif  // CUDA_REMOTE_PROGRAMS_TOOLS_FOREGROUND_H_
