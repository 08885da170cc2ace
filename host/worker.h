// SPDX-License-Identifier: Apache-2.0
// One request of an ordinary user, from its first message to the tool's exit code: in a process of its own, as root,
// which goes on when cr-hostd ends.
#ifndef CUDA_REMOTE_HOST_WORKER_H_
#define CUDA_REMOTE_HOST_WORKER_H_

#include <string>
#include <vector>

#include "host/metrics.h"
#include "host/signature.h"
#include "proto/control/credentials.h"

namespace cuda_remote::host {

struct Settings {
  std::string socket;  // of cr-hostd; the folders of users are beside it
  std::string spool;   // for images on their way; only root can enter the folder above it
  std::string moves;   // folder with the states of moves that have come here (move_state.h)
  // Networks of which jobs may have addresses of their own (checkpoint/job/isolation/network.h); none: jobs have none.
  std::vector<std::string> addresses;
  // For other hosts' cr-hostds.
  std::string listen;              // empty: jobs do not come here
  control::TlsFiles tls;           // empty: jobs do not go either
  std::vector<std::string> hosts;  // subjects of the certificates of those from which jobs come; empty: all
  // Who may save, list and drain others' jobs (IsOperator).
  std::vector<std::string> operators;
  std::string user_cgroup;       // for jobs from other hosts (JoinUserControlGroup)
  std::string metrics;           // HOST:PORT for Prometheus; empty: none
  Counters* counters = nullptr;  // of all of cr-hostd's processes
  // For cr-ps --hosts.
  std::vector<std::string> known_hosts;  // HOST or HOST:PORT
  std::vector<std::string> gpu_servers;  // addresses; empty: root's server, if it runs
};

// What a job that has come from another host is asked for with; for root alone.
inline constexpr char kArriveTool[] = "arrive";
// What there is at hosts, which root may ask for, too.
inline constexpr char kHostsTool[] = "hosts";
// cr-drain, for operators.
inline constexpr char kDrainTool[] = "drain";
// For root alone: the GPUs that a job from another host would see here.
inline constexpr char kGpusTool[] = "gpus";
// For root alone: a job's part here, of a checkpoint or a restart over several hosts.
inline constexpr char kMemberTool[] = "member";
inline constexpr char kRejoinTool[] = "rejoin";

// Whether it can be a part of a path, and is readable.
inline constexpr size_t kMostName = 64;
bool IsJobName(const std::string& name);

// Serves the peer of `socket`.
void ServeRequest(int socket, const Settings& settings, const Key& key);

// Removes what workers that were killed have left in the spool.
void CleanSpool(const Settings& settings);

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_WORKER_H_
