// SPDX-License-Identifier: Apache-2.0
// The jobs of this user on this machine, beside the sessions that a server lists: which job a session is of, and what
// only this machine knows.
#ifndef CUDA_REMOTE_PROGRAMS_TOOLS_LOCAL_JOBS_H_
#define CUDA_REMOTE_PROGRAMS_TOOLS_LOCAL_JOBS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/job/gpu_devices.h"
#include "checkpoint/job/job.h"

namespace cuda_remote::client::tools {

// A process with CUDA. Processes of one job may be at several servers, each of which counts its sessions from 1.
struct LocalSession {
  int pid = 0;        // as this machine numbers it
  int inner_pid = 0;  // as it knows itself
  uint64_t session = 0;
  std::string server;  // the socket or address, as LocalJob::server
};

struct LocalJob {
  std::string directory;
  checkpoint::Job job;
  bool alive = false;    // if its processes cannot be seen from here, the lists below are empty
  bool stopped = false;  // by a signal, such as SIGSTOP
  std::string tool;      // that works on it, as in "cr-checkpoint (PID 12)": then `sessions` is not known
  std::vector<LocalSession> sessions;
  std::string server;            // the socket or address that it uses
  std::map<int, int> processes;  // numbers in the job's namespace (here, without one) to this machine's
  std::vector<checkpoint::DeviceUser> device_users;
};

std::vector<LocalJob> LocalJobs();

// A process of a local job.
struct LocalProcess {
  const LocalJob* job = nullptr;  // null: of none, or it cannot be told
  int pid = 0;
};

// The process that has this session with the server at `address` (as cr-ps names it: unix:PATH or HOST:PORT). `pid` and
// `program`: as the server lists them.
LocalProcess FindSession(const std::vector<LocalJob>& jobs, const std::string& address, uint64_t session, int pid,
                         const std::string& program);

}  // namespace cuda_remote::client::tools

#endif  // CUDA_REMOTE_PROGRAMS_TOOLS_LOCAL_JOBS_H_
