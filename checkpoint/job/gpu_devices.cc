// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/gpu_devices.h"

#include <dirent.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>

#include "proto/base/clock.h"
#include "proto/base/proc.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr char kFolder[] = "/dev";
constexpr char kPrefix[] = "nvidia";
// The number that Linux has given NVIDIA's devices.
constexpr unsigned kMajor = 195;
constexpr int kLookMs = 250;

bool IsGpuDevice(const std::string& path, dev_t device) {
  return major(device) == kMajor || path.compare(0, 11, "/dev/nvidia") == 0;
}

// The first of NVIDIA's devices that the process has open; empty if it has none.
std::string DeviceOf(int pid) {
  const std::string folder = "/proc/" + std::to_string(pid) + "/fd";
  DIR* const list = opendir(folder.c_str());
  std::string found;
  while (const dirent* const entry = list && found.empty() ? readdir(list) : nullptr) {
    struct stat facts;
    if (fstatat(dirfd(list), entry->d_name, &facts, 0) != 0 || !S_ISCHR(facts.st_mode)) continue;
    char target[256];
    const ssize_t length = readlinkat(dirfd(list), entry->d_name, target, sizeof(target));
    const std::string path = length > 0 ? std::string(target, size_t(length)) : "";
    if (IsGpuDevice(path, facts.st_rdev)) found = path;
  }
  if (list) closedir(list);
  return found;
}

}  // namespace

std::vector<DeviceUser> DeviceUsersOf(const Job& job) { return DeviceUsersOf(job, ProcessesOf(job)); }

std::vector<DeviceUser> DeviceUsersOf(const Job& job, std::vector<int> pids) {
  std::vector<DeviceUser> users;
  const std::vector<int> outlived = OutlivedProcessesOf(job);
  pids.insert(pids.end(), outlived.begin(), outlived.end());
  for (int pid : pids) {
    const std::string device = DeviceOf(pid);
    if (!device.empty()) users.push_back({pid, CommOf(pid), device});
  }
  return users;
}

std::string ToText(const DeviceUser& user) {
  return "process " + std::to_string(user.pid) + " (" + user.program + ") uses this machine's own GPU (" + user.device +
         "), past cuda-remote: it does not load the libcuda.so.1 that cr-run gives it";
}

DeviceWatch::DeviceWatch(const char* tool, const Job& job) : tool_(tool), job_(job) {
  DIR* const list = opendir(kFolder);
  while (const dirent* const entry = list ? readdir(list) : nullptr) {
    if (strncmp(entry->d_name, kPrefix, sizeof(kPrefix) - 1) != 0) continue;
    const std::string path = std::string(kFolder) + "/" + entry->d_name;
    struct stat facts;
    if (stat(path.c_str(), &facts) != 0 || !S_ISCHR(facts.st_mode)) continue;
    if (!events_.ok()) events_.Reset(inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
    if (events_.ok()) inotify_add_watch(events_.get(), path.c_str(), IN_OPEN);
  }
  if (list) closedir(list);
}

int DeviceWatch::Ask(std::vector<pollfd>* waiting) const {
  // A server on this machine opens the devices all the time: events wait until the next look.
  if (look_at_ms_ > 0) return int(std::max<int64_t>(0, look_at_ms_ - NowMs()));
  if (events_.ok()) waiting->push_back({events_.get(), POLLIN, 0});
  return -1;
}

void DeviceWatch::Look() {
  char buffer[4096];
  if (look_at_ms_ == 0) {
    while (events_.ok() && read(events_.get(), buffer, sizeof(buffer)) > 0) look_at_ms_ = NowMs() + kLookMs;
    return;
  }
  if (NowMs() < look_at_ms_) return;
  look_at_ms_ = 0;
  for (const DeviceUser& user : DeviceUsersOf(job_)) {
    if (!told_.insert(user.pid).second) continue;
    fprintf(stderr, "%s: %s; the job cannot be checkpointed while it does\n", tool_, ToText(user).c_str());
  }
}

}  // namespace cuda_remote::checkpoint
