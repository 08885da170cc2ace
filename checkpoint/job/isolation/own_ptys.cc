// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/isolation/own_ptys.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "proto/errors/absl_status.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr char kFolder[] = "/dev/pts", kMaker[] = "/dev/ptmx", kOwnMaker[] = "/dev/pts/ptmx";

// The number in "/dev/pts/N"; -1: it is no such name.
int NumberOf(const std::string& name) {
  int number = -1;
  char more = 0;
  return sscanf(name.c_str(), "/dev/pts/%d%c", &number, &more) == 1 ? number : -1;
}

bool IsOnDevpts(const char* path) {
  struct statfs system;
  return statfs(path, &system) == 0 && system.f_type == DEVPTS_SUPER_MAGIC;
}

// Who may use a new pseudo-terminal, as on this machine; and everybody may make one.
std::string Options() {
  std::string options = "newinstance,ptmxmode=0666";
  std::ifstream mounts("/proc/self/mounts");
  for (std::string device, path, kind, given, rest; mounts >> device >> path >> kind >> given;
       std::getline(mounts, rest)) {
    if (path != kFolder) continue;
    options = "newinstance,ptmxmode=0666";
    std::istringstream words(given);
    for (std::string word; std::getline(words, word, ',');) {
      if (word.compare(0, 4, "gid=") == 0 || word.compare(0, 5, "mode=") == 0) options += "," + word;
    }
  }
  return options;
}

// Makes a pseudo-terminal with that number. -1: the job has one, or there can be none.
int Reserve(int number) {
  std::vector<int> lower;
  int found = -1;
  // The kernel gives the lowest number that is free.
  for (int given = -1; given < number;) {
    const int master = open(kMaker, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (master < 0 || ioctl(master, TIOCGPTN, &given) != 0) given = number + 1;
    if (given == number) found = master;
    if (master >= 0 && given != number) lower.push_back(master);
  }
  for (int master : lower) close(master);
  return found;
}

}  // namespace

std::vector<std::string> PtyNames(const std::vector<int>& descriptors) {
  std::vector<std::string> names;
  for (int fd : descriptors) {
    char name[64];
    const bool is_pty = ttyname_r(fd, name, sizeof(name)) == 0 && NumberOf(name) >= 0;
    if (is_pty && std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

absl::Status OwnPtys::Mount(const std::vector<std::string>& outside) {
  if (!IsOnDevpts(kFolder)) return absl::OkStatus();  // this machine has none
  for (const std::string& name : outside) {
    const int mount = open_tree(AT_FDCWD, name.c_str(), OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (mount >= 0) outside_.push_back({NumberOf(name), UniqueFd(mount)});
  }
  // /dev/ptmx belongs to what is mounted on "pts" beside it, unless it is mounted there itself.
  if (mount("devpts", kFolder, "devpts", MS_NOSUID | MS_NOEXEC, Options().c_str()) == 0) {
    struct stat maker, own;
    const bool other =
        IsOnDevpts(kMaker) && stat(kMaker, &maker) == 0 && stat(kOwnMaker, &own) == 0 && maker.st_dev != own.st_dev;
    if (!other || mount(kOwnMaker, kMaker, nullptr, MS_BIND, nullptr) == 0) return absl::OkStatus();
  }
  return ErrnoStatus(std::string("cannot mount ") + kFolder + " for the job");
}

void OwnPtys::ShowOutside() {
  for (const Outside& one : outside_) {
    UniqueFd place(Reserve(one.number));
    const std::string path = std::string(kFolder) + "/" + std::to_string(one.number);
    if (place.ok() && move_mount(one.mount.get(), "", AT_FDCWD, path.c_str(), MOVE_MOUNT_F_EMPTY_PATH) == 0)
      places_.push_back(std::move(place));
  }
  outside_.clear();
}

}  // namespace cuda_remote::checkpoint
