// SPDX-License-Identifier: Apache-2.0
#include "host/peer.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>

#include "proto/base/status_macros.h"
#include "proto/errors/absl_status.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace cuda_remote::host {
namespace {

constexpr int kMostGroups = 65536;
// Where systemd has the processes of a user who is logged in, and what is made below it for jobs.
constexpr char kUserSlice[] = "user.slice/user-%u.slice", kLeaf[] = "/cuda-remote";
// What must be the same as cr-hostd's, and how a person calls it.
constexpr struct {
  const char *name, *called;
} kNamespaces[] = {{"mnt", "mount"}, {"pid", "PID"}, {"net", "network"},
                   {"user", "user"}, {"ipc", "IPC"}, {"uts", "UTS"}};

std::string OfPeer(const Peer& peer, const std::string& name) {
  return "/proc/" + std::to_string(peer.pid) + "/" + name;
}

bool IsSame(const std::string& path, const std::string& other) {
  struct stat facts, others;
  return stat(path.c_str(), &facts) == 0 && stat(other.c_str(), &others) == 0 && facts.st_dev == others.st_dev &&
         facts.st_ino == others.st_ino;
}

bool IsThere(const Peer& peer) {
  pollfd ended{peer.pidfd, POLLIN, 0};
  return poll(&ended, 1, 0) == 0;
}

// The line of a field in /proc/PID/status.
std::string StatusOf(const Peer& peer, const std::string& name) {
  std::ifstream status(OfPeer(peer, "status"));
  for (std::string line; std::getline(status, line);) {
    if (line.compare(0, name.size() + 1, name + ":") == 0) return line.substr(name.size() + 1);
  }
  return {};
}

// Whether the four numbers of Uid or Gid are all this one.
bool HasOnly(const std::string& numbers, uint64_t wanted) {
  std::istringstream words(numbers);
  size_t count = 0;
  for (uint64_t number; words >> number; ++count) {
    if (number != wanted) return false;
  }
  return count == 4;
}

struct Hierarchy {
  std::set<std::string> controllers;  // of version 1; of version 2: empty
  std::string root, place;            // which part of it is mounted, and where
};

std::vector<Hierarchy> Hierarchies() {
  std::vector<Hierarchy> found;
  std::ifstream mounts("/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    std::istringstream fields(line);
    std::string number, parent, device, root, place, word, kind, source, options;
    fields >> number >> parent >> device >> root >> place;
    while (fields >> word && word != "-") {
    }
    fields >> kind >> source >> options;
    if (kind != "cgroup" && kind != "cgroup2") continue;
    Hierarchy one{{}, root == "/" ? "" : root, place};
    std::istringstream list(kind == "cgroup" ? options : "");
    for (std::string option; std::getline(list, option, ',');) one.controllers.insert(option);
    found.push_back(std::move(one));
  }
  return found;
}

// A process without a controller of its own, such as in an own hierarchy of version 2 that is empty, has nothing to
// join.
absl::Status JoinControlGroups(const Peer& peer) {
  const std::vector<Hierarchy> hierarchies = Hierarchies();
  std::ifstream own("/proc/self/cgroup"), theirs(OfPeer(peer, "cgroup"));
  std::set<std::string> here;
  for (std::string line; std::getline(own, line);) here.insert(line);
  for (std::string line; std::getline(theirs, line);) {
    if (here.count(line)) continue;
    // NUMBER:CONTROLLERS:PATH
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string path = line.substr(second + 1);
    std::set<std::string> controllers;
    std::istringstream list(line.substr(first + 1, second - first - 1));
    for (std::string name; std::getline(list, name, ',');) controllers.insert(name);
    bool joined = false;
    for (const Hierarchy& one : hierarchies) {
      const bool is_it =
          controllers.empty() == one.controllers.empty() &&
          std::includes(one.controllers.begin(), one.controllers.end(), controllers.begin(), controllers.end());
      if (!is_it || path.compare(0, one.root.size(), one.root) != 0) continue;
      const int procs =
          open((one.place + path.substr(one.root.size()) + "/cgroup.procs").c_str(), O_WRONLY | O_CLOEXEC);
      joined = procs >= 0 && write(procs, "0", 1) == 1;
      if (procs >= 0) close(procs);
      if (joined) break;
    }
    if (joined) continue;
    return ErrnoStatus("cr-hostd cannot enter the control group " + path + " of the process that asks");
  }
  return absl::OkStatus();
}

// By name or number.
bool FindGroup(const std::string& name, gid_t* group) {
  if (const auto* const entry = getgrnam(name.c_str())) {
    *group = entry->gr_gid;
    return true;
  }
  char* end = nullptr;
  *group = gid_t(strtoul(name.c_str(), &end, 10));
  return isdigit(static_cast<unsigned char>(name[0])) && *end == '\0';
}

rlim_t LimitOf(const std::string& text) { return text[0] == 'u' ? RLIM_INFINITY : strtoull(text.c_str(), nullptr, 10); }

// Each line of /proc/PID/limits is about one limit, by its number; prlimit on another user's process needs more rights.
absl::Status TakeLimits(const Peer& peer) {
  constexpr size_t kSoft = 26, kHard = 47;
  std::ifstream lines(OfPeer(peer, "limits"));
  std::string line;
  std::getline(lines, line);
  for (int kind = 0; kind < RLIM_NLIMITS; ++kind) {
    rlimit limit, own;
    if (!std::getline(lines, line) || line.size() <= kHard || getrlimit(__rlimit_resource(kind), &own) != 0) {
      return absl::UnavailableError("the limits of the process that asks cannot be read");
    }
    limit.rlim_cur = LimitOf(line.substr(kSoft));
    limit.rlim_max = LimitOf(line.substr(kHard));
    if (setrlimit(__rlimit_resource(kind), &limit) == 0) continue;
    // In a container, cr-hostd may have less than the user.
    limit.rlim_max = std::min(limit.rlim_max, own.rlim_max);
    limit.rlim_cur = std::min(limit.rlim_cur, limit.rlim_max);
    if (setrlimit(__rlimit_resource(kind), &limit) == 0) continue;
    return ErrnoStatus("cr-hostd cannot take on the limits of the process that asks");
  }
  return absl::OkStatus();
}

absl::Status PeerHasEnded() { return absl::UnavailableError("the process that asks has ended"); }

}  // namespace

absl::Status FindPeer(int socket, Peer* peer) {
  ucred facts = {};
  socklen_t size = sizeof(facts);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &facts, &size) != 0) {
    return ErrnoStatus("the kernel does not say who asks");
  }
  peer->pid = facts.pid;
  peer->account.user = facts.uid;
  peer->account.group = facts.gid;
  peer->account.groups.resize(kMostGroups);
  size = socklen_t(kMostGroups * sizeof(gid_t));
  if (getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, peer->account.groups.data(), &size) != 0) {
    return ErrnoStatus("the kernel does not say which groups the user has");
  }
  peer->account.groups.resize(size / sizeof(gid_t));
  std::sort(peer->account.groups.begin(), peer->account.groups.end());
  if (facts.uid == 0) return absl::FailedPreconditionError("root needs no cr-hostd: start the tool without it");
  size = sizeof(peer->pidfd);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &peer->pidfd, &size) != 0) {
    peer->pidfd = int(syscall(SYS_pidfd_open, peer->pid, 0));
  }
  if (peer->pidfd < 0) return PeerHasEnded();
  fcntl(peer->pidfd, F_SETFD, FD_CLOEXEC);
  for (const auto& one : kNamespaces) {
    const std::string name = std::string("ns/") + one.name;
    if (IsSame(OfPeer(*peer, name), "/proc/self/" + name)) continue;
    return absl::FailedPreconditionError(
        std::string("this process is in another ") + one.called +
        " namespace than cr-hostd, as in a container or in a job of cr-run; use the tools outside of it, or start "
        "a cr-hostd in the same container");
  }
  if (!IsSame(OfPeer(*peer, "root"), "/proc/self/root")) {
    return absl::FailedPreconditionError(
        "this process has another root folder than cr-hostd; use the tools outside of it");
  }
  const std::string seccomp = StatusOf(*peer, "Seccomp"), privileges = StatusOf(*peer, "NoNewPrivs");
  if (!HasOnly(StatusOf(*peer, "Uid"), facts.uid) || !HasOnly(StatusOf(*peer, "Gid"), facts.gid)) {
    return absl::PermissionDeniedError(
        "this process has the rights of more than one user or group; cr-hostd works for plain processes only");
  }
  if (atoi(seccomp.c_str()) != 0) {
    return absl::FailedPreconditionError(
        "this process has a seccomp filter, which a job of cr-hostd would not have; use the tools outside of it, or "
        "start the container without a filter (--security-opt seccomp=unconfined)");
  }
  peer->no_new_privileges = atoi(privileges.c_str()) != 0;
  // All of this was about that process, and not about another one with its number.
  if (!seccomp.empty() && !privileges.empty() && IsThere(*peer)) return absl::OkStatus();
  return PeerHasEnded();
}

absl::Status JoinPeer(const Peer& peer, bool limits) {
  CR_RETURN_IF_ERROR(JoinControlGroups(peer));
  if (limits) CR_RETURN_IF_ERROR(TakeLimits(peer));
  errno = 0;
  const int nice = getpriority(PRIO_PROCESS, id_t(peer.pid));
  if (errno == 0) setpriority(PRIO_PROCESS, 0, nice);
  cpu_set_t processors;
  if (sched_getaffinity(peer.pid, sizeof(processors), &processors) == 0) {
    sched_setaffinity(0, sizeof(processors), &processors);
  }
  if (peer.no_new_privileges && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return ErrnoStatus("no-new-privileges");
  return IsThere(peer) ? absl::OkStatus() : PeerHasEnded();
}

absl::Status JoinUserControlGroup(const checkpoint::Account& account, const std::string& path) {
  std::string group = path.empty() ? kUserSlice : path;
  for (size_t at; (at = group.find("%u")) != std::string::npos;) group.replace(at, 2, std::to_string(account.user));
  bool joined = false;
  for (const Hierarchy& one : Hierarchies()) {
    const std::string folder = one.place + "/" + group;
    struct stat facts;
    if (stat(folder.c_str(), &facts) != 0 || !S_ISDIR(facts.st_mode)) continue;
    // One with groups below it can have no processes of its own.
    const std::string leaf = folder + (one.controllers.empty() ? kLeaf : "");
    if (mkdir(leaf.c_str(), 0755) == 0 || errno == EEXIST) {
      const int procs = open((leaf + "/cgroup.procs").c_str(), O_WRONLY | O_CLOEXEC);
      const bool done = procs >= 0 && write(procs, "0", 1) == 1;
      if (procs >= 0) close(procs);
      if (done) {
        joined = true;
        continue;
      }
    }
    return ErrnoStatus("cr-hostd cannot enter the control group " + leaf);
  }
  if (joined || path.empty()) return absl::OkStatus();
  return absl::NotFoundError("there is no control group " + group + " for " + NameOf(account) +
                             " on this host (cr-hostd --user-cgroup)");
}

absl::Status CheckOperatorRule(const std::string& rule) {
  gid_t group;
  if (rule.empty() || rule[0] != '@') return checkpoint::FindAccount(rule).status();
  if (FindGroup(rule.substr(1), &group)) return absl::OkStatus();
  return absl::NotFoundError("there is no group " + rule.substr(1) + " on this machine");
}

bool IsOperator(const std::vector<std::string>& rules, const checkpoint::Account& account) {
  return std::any_of(rules.begin(), rules.end(), [&](const std::string& rule) {
    gid_t group;
    if (rule[0] != '@') {
      const auto user = checkpoint::FindAccount(rule);
      return user.ok() && user->user == account.user;
    }
    return FindGroup(rule.substr(1), &group) &&
           (group == account.group || std::count(account.groups.begin(), account.groups.end(), group) != 0);
  });
}

}  // namespace cuda_remote::host
