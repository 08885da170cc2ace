// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/descriptors.h"

#include <dirent.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>

namespace cuda_remote::checkpoint {

std::string FindUserOfFile(const std::function<bool(int pid)>& is_wanted,
                           const std::function<bool(const std::string& process, const std::string& number)>& is_it) {
  std::string found;
  DIR* const processes = opendir("/proc");
  while (const dirent* const one = processes && found.empty() ? readdir(processes) : nullptr) {
    const int pid = atoi(one->d_name);
    if (pid <= 0 || !is_wanted(pid)) continue;
    const std::string process = "/proc/" + std::to_string(pid);
    DIR* const list = opendir((process + "/fd").c_str());
    while (const dirent* const entry = list && found.empty() ? readdir(list) : nullptr) {
      if (entry->d_name[0] == '.' || !is_it(process, entry->d_name)) continue;
      std::ifstream name(process + "/comm");
      std::getline(name, found);
      found += " (PID " + std::to_string(pid) + ")";
    }
    if (list) closedir(list);
  }
  if (processes) closedir(processes);
  return found;
}

int DuplicateOf(int pid, int number) {
  const int process = int(syscall(SYS_pidfd_open, pid, 0));
  if (process < 0) return -1;
  const int duplicate = int(syscall(SYS_pidfd_getfd, process, number, 0));
  close(process);
  return duplicate;
}

}  // namespace cuda_remote::checkpoint
