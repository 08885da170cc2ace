// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/descriptors.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "proto/base/proc.h"

namespace cuda_remote::checkpoint {

std::string FindUserOfFile(const std::function<bool(int pid)>& is_wanted,
                           const std::function<bool(const std::string& process, const std::string& number)>& is_it) {
  for (const int pid : AllProcesses()) {
    if (!is_wanted(pid)) continue;
    const std::string process = "/proc/" + std::to_string(pid);
    for (const int number : NumbersIn(pid, "fd")) {
      if (is_it(process, std::to_string(number))) return CommOf(pid) + " (PID " + std::to_string(pid) + ")";
    }
  }
  return {};
}

int DuplicateOf(int pid, int number) {
  const int process = int(syscall(SYS_pidfd_open, pid, 0));
  if (process < 0) return -1;
  const int duplicate = int(syscall(SYS_pidfd_getfd, process, number, 0));
  close(process);
  return duplicate;
}

}  // namespace cuda_remote::checkpoint
