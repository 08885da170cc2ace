// SPDX-License-Identifier: Apache-2.0
// The processes of a job that have a session with a GPU server.
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_CUDA_PROCESSES_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_CUDA_PROCESSES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/job/job.h"
#include "checkpoint/job/job.pb.h"

namespace cuda_remote::checkpoint {

struct CudaProcess {
  int pid = 0;        // as seen from here
  int inner_pid = 0;  // as it knows itself
  std::string program;
  uint64_t mark = 0;  // ProgramMark

  bool operator==(const CudaProcess& other) const {
    return pid == other.pid && inner_pid == other.inner_pid && mark == other.mark;
  }
};

// For messages: "python3 (PID 12)".
std::string NameOf(const CudaProcess& process);

// Whether it has ended, or executes another program by now: either way its session is no process's any more.
bool HasEnded(const CudaProcess& process);
// HasEnded, or a moment before that: killed or about to exit, it executes nothing of its program any more.
bool IsEnding(const CudaProcess& process);
// HasEnded for a process that has closed its connection, as one does that ends, a moment before it is seen to have
// ended: waits up to a second for the rest.
bool EndsNow(const CudaProcess& process);

// Fails if a signal such as SIGSTOP has stopped the process, which then answers nobody. Waits a moment for its going
// on.
absl::Status CheckNotStopped(const CudaProcess& process);

// For lists: what a process of this machine was started as, such as "python3"; "?" if that cannot be told.
std::string CommandNameOf(int pid);

// Whether the job has a process with this number in its namespace that executes the program with this mark; 0: any.
bool HasProcess(const Job& job, int inner_pid, uint64_t mark = 0);

// Those processes of the job (ProcessesOf) that the job itself has started: without CRIU, which enters the job's
// namespace from outside.
std::vector<int> StartedProcessesOf(const Job& job);

// In the order of their numbers. `directory`: the job's folder. Processes that this user may not look at are not found.
std::vector<CudaProcess> FindCudaProcesses(const Job& job, const std::string& directory);

// As FindJob. Also finds processes that were not started by cr-run, but with the client library and
// CUDA_REMOTE_JOB_DIR, by that folder or by the number of one of them: they can be moved and traced. The job then says
// that it cannot be saved, and has no runner.
absl::StatusOr<FoundJob> FindJobOrProcesses(const std::string& name);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_CUDA_PROCESSES_H_
