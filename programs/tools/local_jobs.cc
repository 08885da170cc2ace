// SPDX-License-Identifier: Apache-2.0
#include "programs/tools/local_jobs.h"

#include <limits.h>
#include <stdlib.h>

#include <algorithm>

#include "checkpoint/agent/agent_client.h"
#include "checkpoint/job/cuda_processes.h"
#include "checkpoint/job/job_claim.h"
#include "proto/base/proc.h"
#include "proto/channel/handshake.h"

namespace cuda_remote::client::tools {

using namespace checkpoint;
namespace {

constexpr char kUnix[] = "unix:";

// `address` as the job's file gpu-server has it: the socket's path without links, or host and port.
std::string Comparable(const std::string& address) {
  const std::optional<std::string> socket = SocketPathOf(address);
  if (!socket) return address;
  const std::string path = Absolute(*socket);
  char real[PATH_MAX];
  return kUnix + std::string(realpath(path.c_str(), real) ? real : path);
}

// The same of an address that a process of the job has. A restarted job may see its folder under the name of another.
std::string SeenByJob(const LocalJob& local, std::string address) {
  const std::string inside = kUnix + local.job.directory() + "/";
  if (address.compare(0, inside.size(), inside) == 0) {
    address = kUnix + local.directory + "/" + address.substr(inside.size());
  }
  return Comparable(address);
}

}  // namespace

std::vector<LocalJob> LocalJobs() {
  std::vector<LocalJob> jobs;
  for (FoundJob& found : AllJobs()) {
    LocalJob local;
    local.directory = found.directory;
    local.job = std::move(found.job);
    const bool seen = JobIsAlive(local.job);
    // From inside of a job, its own processes and those of others have no numbers, or other ones.
    local.alive = seen || IsInUse(local.directory);
    // Of a job that was named by its address, its relay's socket is only the way there.
    const std::string way = SeenByJob(local, GpuServerOf(local.directory));
    const bool by_address = local.job.server().find(':') != std::string::npos &&
                            local.job.server().compare(0, sizeof(kUnix) - 1, kUnix) != 0;
    local.server = by_address ? local.job.server() : way;
    if (seen) {
      // A job that a tool works on is not disturbed.
      JobLook look;
      const bool free = look.Take(local.directory).ok();
      local.tool = look.tool();
      for (const CudaProcess& process :
           free ? FindCudaProcesses(local.job, local.directory) : std::vector<CudaProcess>()) {
        if (StateOf(process.pid) == 'T') continue;  // a signal has stopped it, and it answers nobody
        const auto agent = agent::AgentClient::Connect(local.directory, uint32_t(process.inner_pid), NameOf(process));
        const auto info = agent.ok() ? (*agent)->GetInfo() : agent.status();
        if (!info.ok()) continue;
        const std::string server = SeenByJob(local, info->server);
        local.sessions.push_back(
            {process.pid, process.inner_pid, info->session, server == way ? local.server : server});
      }
      for (int pid : StartedProcessesOf(local.job)) local.processes[InnerPid(pid)] = pid;
      // A tool stops them, too.
      local.stopped = local.tool.empty() && StateOf(local.job.pid()) == 'T';
      local.device_users = DeviceUsersOf(local.job);
    }
    jobs.push_back(std::move(local));
  }
  return jobs;
}

LocalProcess FindSession(const std::vector<LocalJob>& jobs, const std::string& address, uint64_t session, int pid,
                         const std::string& program) {
  const std::string server = Comparable(address);
  LocalProcess found;
  for (const LocalJob& job : jobs) {
    if (!job.alive) continue;
    for (const LocalSession& one : job.sessions) {
      if (one.session == session && one.server == server && one.inner_pid == pid) return {&job, one.pid};
    }
    if (job.server != server) continue;
    const auto process = job.processes.find(pid);
    const int number = process == job.processes.end() ? 0 : process->second;
    // Another process of a job: copies of an image have the same numbers, and then it cannot be told.
    const bool has_another = std::any_of(job.sessions.begin(), job.sessions.end(),
                                         [&](const LocalSession& one) { return one.pid == number; });
    if (number == 0 || has_another || ReadLink("/proc/" + std::to_string(number) + "/exe") != program) continue;
    found = found.job ? LocalProcess() : LocalProcess{&job, number};
  }
  return found;
}

}  // namespace cuda_remote::client::tools
