// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/cuda_processes.h"

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "proto/agent/types.h"
#include "proto/base/mappings.h"
#include "proto/base/proc.h"
#include "proto/base/read_file.h"
#include "proto/channel/handshake.h"
#include "proto/codec/text.h"
#include "proto/folder/private_folder.h"
#include "proto/folder/this_job.h"

namespace cuda_remote::checkpoint {
namespace {

// How long EndsNow waits for the end of a process, CheckNotStopped for its going on, and how often they look.
constexpr int kEndMs = 1000, kStoppedMs = 1000, kEndLookMs = 5;
constexpr char kFolderVariable[] = "CUDA_REMOTE_JOB_DIR";
// A session's rings, as proto/ring names them.
constexpr char kRings[] = "/memfd:cuda-remote-ring";
// Our own programs that have rings mapped, and may have the job's environment: a tool has, where the user has set
// CUDA_REMOTE_JOB_DIR for his shell.
constexpr const char* kOurs[] = {"cr-server", "cr-worker",  "cr-relay",      "cr-nvml",
                                 "cr-run",    "cr-restart", "cr-checkpoint", "cr-migrate"};

// What is there of it: the process may end meanwhile.
std::string Contents(const std::string& path) {
  std::string bytes;
  ReadWholeFile(path, &bytes);
  return bytes;
}

bool HasRings(const std::string& process) {
  bool has = false;
  ForEachMapping(process, [&](const Mapping& mapping) {
    has = mapping.name.compare(0, sizeof(kRings) - 1, kRings) == 0;
    return !has;
  });
  return has;
}

// Whether somebody listens on the socket of that process's agent.
bool HasAgent(const std::string& directory, int inner_pid) {
  const std::string path = SocketFolder(directory) + "/" + agent::SocketName(uint32_t(inner_pid));
  return access(path.c_str(), F_OK) == 0 && ConnectUnix(path, nullptr, kMostConnectMs).ok();
}

bool DescendsFrom(int pid, int ancestor) {
  for (int above = ParentOf(pid); above > 1; above = ParentOf(above)) {
    if (above == ancestor) return true;
  }
  return false;
}

// The value of a variable; empty if there is none.
std::string VariableOf(const std::string& environment, const std::string& name) {
  for (size_t at = 0; at < environment.size(); at = environment.find('\0', at) + 1) {
    const std::string one = environment.c_str() + at;
    if (one.compare(0, name.size() + 1, name + "=") == 0) return one.substr(name.size() + 1);
    if (environment.find('\0', at) == std::string::npos) break;
  }
  return {};
}

// Whether a process with these variables is of the job in this folder, where nothing else tells.
bool NamesJob(const std::string& environment, const std::string& directory) {
  if (directory.empty()) return false;
  const std::string folder = VariableOf(environment, kFolderVariable);
  if (!folder.empty()) return folder == directory;
  // One that was made anew has this alone (client/preload).
  const std::string library = directory + "/lib/" + kPreloadedLibrary;
  std::string all = ":" + VariableOf(environment, "LD_PRELOAD") + ":";
  std::replace(all.begin(), all.end(), ' ', ':');
  return all.find(":" + library + ":") != std::string::npos;
}

bool IsOurs(const std::string& process) {
  const std::string program = ReadLink(process + "/exe");
  return std::any_of(std::begin(kOurs), std::end(kOurs), [&](const char* name) {
    const std::string companion = FindCompanion(name);
    return !companion.empty() && program == companion;
  });
}

// How a person calls it: the file's name of what was started.
std::string ProgramIn(const std::string& process) {
  const std::string command = Contents(process + "/cmdline");
  std::string name = command.substr(0, command.find('\0'));
  if (const size_t slash = name.rfind('/'); slash != std::string::npos) name = name.substr(slash + 1);
  return Printable(name.empty() ? "?" : name);
}

}  // namespace

std::string NameOf(const CudaProcess& process) {
  return process.program + " (PID " + std::to_string(process.pid) + ")";
}

bool HasEnded(const CudaProcess& process) {
  if (!IsRunning(process.pid)) return true;
  const uint64_t now = ProgramMark(process.pid);
  return process.mark != 0 && now != 0 && now != process.mark;
}

bool IsEnding(const CudaProcess& process) {
  // The kernel leaves this signal among those that wait for the process, until its end.
  constexpr uint64_t kKill = 1 << (SIGKILL - 1);
  return HasEnded(process) || StatOf(process.pid).exits ||
         (strtoull(StatusField(process.pid, "ShdPnd").c_str(), nullptr, 16) & kKill) != 0;
}

bool EndsNow(const CudaProcess& process) {
  for (int waited = 0; !HasEnded(process); waited += kEndLookMs) {
    if (waited >= kEndMs) return false;
    usleep(kEndLookMs * 1000);
  }
  return true;
}

absl::Status CheckNotStopped(const CudaProcess& process) {
  for (int waited = 0; StateOf(process.pid) == 'T'; waited += kEndLookMs) {
    if (waited >= kStoppedMs) {
      return absl::FailedPreconditionError(
          absl::StrCat(NameOf(process), " is stopped by a signal and answers nobody; let it continue (kill -CONT ",
                       process.pid, "), and try again"));
    }
    usleep(kEndLookMs * 1000);
  }
  return absl::OkStatus();
}

std::string CommandNameOf(int pid) { return ProgramIn("/proc/" + std::to_string(pid)); }

bool HasProcess(const Job& job, int inner_pid, uint64_t mark) {
  const std::vector<int> pids = ProcessesOf(job);
  return std::any_of(pids.begin(), pids.end(), [&](int pid) {
    return InnerPid(pid) == inner_pid && !HasEnded({pid, inner_pid, "", mark});
  });
}

std::vector<int> StartedProcessesOf(const Job& job) {
  std::vector<int> pids = ProcessesOf(job);
  const auto entered = [&job](int pid) { return job.init_pid() > 0 && !DescendsFrom(pid, job.init_pid()); };
  pids.erase(std::remove_if(pids.begin(), pids.end(), entered), pids.end());
  return pids;
}

std::vector<CudaProcess> FindCudaProcesses(const Job& job, const std::string& directory) {
  std::vector<CudaProcess> found;
  const uint64_t own = PidNamespace(getpid());
  const bool isolated = job.init_pid() > 0 && job.pid_namespace() != own;
  if (isolated && !JobIsAlive(job)) return found;
  for (const int pid : AllProcesses()) {
    if (pid == job.init_pid()) continue;
    const std::string process = "/proc/" + std::to_string(pid);
    bool of_job = false;
    if (isolated) {
      // Copies of an image have one folder in their environments, so that does not tell. A namespace below the job's is
      // its own, too. This is done while the job stands still: most processes are told by their namespace alone.
      const uint64_t space = PidNamespace(pid);
      of_job = space == job.pid_namespace() || (space != own && DescendsFrom(pid, job.init_pid()));
    } else {
      const std::string environment = Contents(process + "/environ");
      of_job = NamesJob(environment, directory) || NamesJob(environment, job.directory());
    }
    if (!of_job || !IsRunning(pid) || IsOurs(process)) continue;
    const int inner = InnerPid(pid);
    // First: what is seen then is of this program, or the process is found to execute another one.
    const uint64_t mark = ProgramMark(pid);
    // One that a tool has left without a session has no rings, but an agent. The agent is asked last: who listens there
    // may be anybody, and one that never accepts has room for few connections.
    if (HasRings(process) || HasAgent(directory, inner)) found.push_back({pid, inner, ProgramIn(process), mark});
  }
  // The kernel gives a namespace's number to another one as soon as the job has ended.
  if (isolated && !JobIsAlive(job)) found.clear();
  std::sort(found.begin(), found.end(), [](const CudaProcess& a, const CudaProcess& b) { return a.pid < b.pid; });
  return found;
}

absl::StatusOr<FoundJob> FindJobOrProcesses(const std::string& name) {
  absl::StatusOr<FoundJob> named = FindJob(name);
  if (named.ok()) return named;
  std::string folder = Absolute(name);
  if (IsNumber(name)) folder = VariableOf(Contents("/proc/" + name + "/environ"), kFolderVariable);
  // What lies there decides which sockets the tools speak to.
  if (folder.empty() || folder[0] != '/' || access((folder + "/job.json").c_str(), F_OK) == 0) return named;
  if (!CheckFolder(folder, FolderUse::kLook).ok()) return named;
  Job job;
  job.set_directory(folder);
  const std::vector<CudaProcess> processes = FindCudaProcesses(job, folder);
  if (processes.empty()) return named;
  job.set_name(folder.substr(folder.rfind('/') + 1));
  job.set_gpu(-1);
  job.set_pid(processes[0].pid);
  job.set_inner_pid(processes[0].inner_pid);
  job.set_no_checkpoint("it was not started by cr-run");
  return FoundJob{folder, job};
}

}  // namespace cuda_remote::checkpoint
