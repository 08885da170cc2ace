#include "client/tools/cuda_processes.h"

#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>

#include "client/tools/job.h"
#include "proto/codec/text.h"

namespace cuda_remote::client::tools {
namespace {

// A session's rings, as proto/ring names them.
constexpr char kRings[] = "/memfd:cuda-remote-ring";
// Our own programs that have rings mapped, and may have the job's environment: a tool has, where the user has set
// CUDA_REMOTE_JOB_DIR for his shell.
constexpr const char* kOurs[] = {"cr-server", "cr-worker",     "cr-relay",   "cr-nvml", "cr-run",
                                 "cr-restart", "cr-checkpoint", "cr-migrate"};

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

bool HasRings(const std::string& process) {
  std::ifstream maps(process + "/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find(kRings) != std::string::npos) return true;
  }
  return false;
}

bool HasVariable(const std::string& environment, const std::string& variable) {
  return environment.compare(0, variable.size() + 1, variable + '\0') == 0 ||
         environment.find('\0' + variable + '\0') != std::string::npos;
}

bool IsOurs(const std::string& process) {
  char path[4096];
  const ssize_t length = readlink((process + "/exe").c_str(), path, sizeof(path));
  if (length <= 0) return false;
  const std::string program(path, size_t(length));
  return std::any_of(std::begin(kOurs), std::end(kOurs), [&](const char* name) {
    const std::string companion = FindCompanion(name);
    return !companion.empty() && program == companion;
  });
}

// How a person calls it: the file's name of what was started.
std::string ProgramOf(const std::string& process) {
  const std::string command = ReadAll(process + "/cmdline");
  std::string name = command.substr(0, command.find('\0'));
  if (const size_t slash = name.rfind('/'); slash != std::string::npos) name = name.substr(slash + 1);
  return Printable(name.empty() ? "?" : name);
}

}  // namespace

std::vector<CudaProcess> FindCudaProcesses(const Job& job, const std::string& directory) {
  std::vector<CudaProcess> found;
  const uint64_t space = job.init_pid() > 0 && job.pid_namespace() != PidNamespace(getpid()) ? job.pid_namespace() : 0;
  const std::string variable = "CUDA_REMOTE_JOB_DIR=";
  DIR* const proc = opendir("/proc");
  if (!proc) return found;
  while (const dirent* const entry = readdir(proc)) {
    const int pid = atoi(entry->d_name);
    if (pid <= 0) continue;
    const std::string process = "/proc/" + std::to_string(pid);
    bool of_job = space != 0 && PidNamespace(pid) == space;
    if (!of_job) {
      const std::string environment = ReadAll(process + "/environ");
      of_job = HasVariable(environment, variable + directory) ||
               (!job.directory().empty() && space == 0 && HasVariable(environment, variable + job.directory()));
    }
    if (of_job && HasRings(process) && !IsOurs(process)) found.push_back({pid, ProgramOf(process)});
  }
  closedir(proc);
  std::sort(found.begin(), found.end(), [](const CudaProcess& a, const CudaProcess& b) { return a.pid < b.pid; });
  return found;
}

bool CheckOneCudaProcess(const Job& job, const std::string& directory, const char* what, std::string* error) {
  const std::vector<CudaProcess> processes = FindCudaProcesses(job, directory);
  if (processes.size() <= 1) return true;
  std::string names;
  for (const CudaProcess& process : processes) {
    names += (names.empty() ? "" : ", ") + process.program + " (PID " + std::to_string(process.pid) + ")";
  }
  *error = "the job has " + std::to_string(processes.size()) + " processes that use CUDA, and only a job with one can be " +
           what + ": " + names;
  return false;
}

}  // namespace cuda_remote::client::tools
