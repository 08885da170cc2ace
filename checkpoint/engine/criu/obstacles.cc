// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/obstacles.h"

#include <dirent.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <linux/unix_diag.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <map>
#include <set>
#include <utility>

#include "checkpoint/engine/criu/connections.h"
#include "checkpoint/engine/criu/descriptors.h"
#include "checkpoint/engine/criu/losses.h"
#include "checkpoint/job/job.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr char kSocket[] = "socket:[", kPipe[] = "pipe:[";
constexpr char kAnonymous[] = "anon_inode:";
// CRIU restores it without EFD_SEMAPHORE.
constexpr char kEvent[] = "anon_inode:[eventfd]";
// Character devices that CRIU opens again: memory (null, zero, random, ...), terminals, and the tun device.
constexpr unsigned kMemoryMajor = 1, kTerminalMajor = 4, kConsoleMajor = 5, kMiscMajor = 10, kTunMinor = 200;
constexpr unsigned kFirstPseudoMajor = 136, kLastPseudoMajor = 143, kMinors = 256, kMakerMinor = 2;
// How long to wait for a CRIU whose tool was killed: 10 s.
constexpr int kMostCriuWaits = 200, kCriuWaitUs = 50000;
// Anonymous files that CRIU does not know, and what they are for.
const struct {
  const char* name;
  const char* what;
  const char* advice;
} kAnonymousFiles[] = {
    {"[io_uring]", "uses io_uring", "start the job without cr-run --io-uring, with a cr-run that knows this option"},
    {"[perf_event]", "measures with perf events", "end the measurement before the checkpoint"},
    {"bpf-", "has a BPF program or map open", "close it before the checkpoint"},
    {"kvm-", "runs a virtual machine", "end it before the checkpoint"},
    {"[landlock-ruleset]", "has a Landlock ruleset open", "close it before the checkpoint"},
};

// File systems that only the kernel mounts, of which CRIU knows nothing. /proc shows a file in one as "/NAME".
const struct {
  unsigned long type;  // as statfs has it
  const char* what;
  const char* advice;
} kKernelsOwn[] = {
    {0x19800202, "has a POSIX message queue open", "have the program use a pipe or a socket instead"},
    {0x5345434d, "has secret memory open (memfd_secret)", "have the program use other memory"},
};

// Programs that hold the other end of a session, or ask an agent.
constexpr const char* kOurPrograms[] = {"cr-server",     "cr-worker",  "cr-relay", "cr-nvml", "cr-run",
                                        "cr-checkpoint", "cr-migrate", "cr-trace", "cr-ps"};

struct UnixSocket {
  bool stream = false;  // or of packets: connected for good
  uint32_t peer = 0;    // inode; 0: not connected
  std::string name;
};

std::string ReadLink(const std::string& path) {
  char target[4096];
  const ssize_t length = readlink(path.c_str(), target, sizeof(target));
  return length > 0 ? std::string(target, size_t(length)) : std::string();
}

bool StartsWith(const std::string& text, const char* prefix) { return text.compare(0, strlen(prefix), prefix) == 0; }

std::string StatusField(int pid, const std::string& name) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.compare(0, name.size() + 1, name + ":") != 0) continue;
    const size_t at = line.find_first_not_of(" \t", name.size() + 1);
    return at == std::string::npos ? std::string() : line.substr(at);
  }
  return {};
}

// Whether the process is CRIU, which may have been started through a loader (ld.so .../criu dump).
bool IsCriu(const std::string& pid) {
  if (pid.empty() || pid == "0") return false;
  if (StatusField(atoi(pid.c_str()), "Name") == "criu") return true;
  std::ifstream command("/proc/" + pid + "/cmdline");
  for (std::string word; std::getline(command, word, '\0');) {
    if (word.substr(word.rfind('/') + 1) == "criu") return true;
  }
  return false;
}

// All Unix sockets of this network namespace, by inode. Empty if the kernel does not say.
std::map<uint32_t, UnixSocket> UnixSockets() {
  std::map<uint32_t, UnixSocket> sockets;
  const int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
  if (fd < 0) return sockets;
  struct {
    nlmsghdr header;
    unix_diag_req request;
  } question = {};
  question.header.nlmsg_len = sizeof(question);
  question.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  question.header.nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP;
  question.request.sdiag_family = AF_UNIX;
  question.request.udiag_states = ~0u;
  question.request.udiag_show = UDIAG_SHOW_NAME | UDIAG_SHOW_PEER;
  std::vector<char> buffer(64 << 10);
  bool more = send(fd, &question, sizeof(question), 0) == ssize_t(sizeof(question));
  while (more) {
    const ssize_t bytes = recv(fd, buffer.data(), buffer.size(), 0);
    if (bytes <= 0) break;
    auto left = size_t(bytes);
    for (auto* header = reinterpret_cast<nlmsghdr*>(buffer.data()); NLMSG_OK(header, left);
         header = NLMSG_NEXT(header, left)) {
      if (header->nlmsg_type != SOCK_DIAG_BY_FAMILY) {
        more = false;
        break;
      }
      const auto* const facts = static_cast<unix_diag_msg*>(NLMSG_DATA(header));
      UnixSocket& one = sockets[facts->udiag_ino];
      one.stream = facts->udiag_type != SOCK_DGRAM;
      int rest = int(header->nlmsg_len - NLMSG_LENGTH(sizeof(*facts)));
      const char* at = reinterpret_cast<const char*>(facts + 1);
      // Attributes: length and type, 2 bytes each, and the value, padded to 4.
      while (rest >= 4) {
        uint16_t length, type;
        memcpy(&length, at, 2);
        memcpy(&type, at + 2, 2);
        if (length < 4 || length > rest) break;
        if (type == UNIX_DIAG_PEER && length >= 8) memcpy(&one.peer, at + 4, 4);
        if (type == UNIX_DIAG_NAME) one.name.assign(at + 4, size_t(length) - 4);
        const int step = (length + 3) / 4 * 4;
        at += step;
        rest -= step;
      }
      while (!one.name.empty() && one.name.back() == '\0') one.name.pop_back();
    }
  }
  close(fd);
  return sockets;
}

// The process that has this socket, for the message; empty if that cannot be found.
std::string OwnerOf(uint32_t inode, int* pid) {
  const std::string wanted = kSocket + std::to_string(inode) + "]";
  std::string found;
  DIR* const processes = opendir("/proc");
  while (const dirent* const process = processes && found.empty() ? readdir(processes) : nullptr) {
    if (atoi(process->d_name) <= 0) continue;
    const std::string folder = std::string("/proc/") + process->d_name + "/fd";
    DIR* const list = opendir(folder.c_str());
    while (const dirent* const entry = list && found.empty() ? readdir(list) : nullptr) {
      if (ReadLink(folder + "/" + entry->d_name) == wanted)
        found = StatusField(*pid = atoi(process->d_name), "Name") + " (PID " + process->d_name + ")";
    }
    if (list) closedir(list);
  }
  if (processes) closedir(processes);
  return found;
}

// The sockets that a session, a relay and an agent have.
bool IsOurs(const std::string& socket) {
  const std::string leaf = socket.substr(socket.rfind('/') + 1);
  const bool known = leaf == "session.sock" || StartsWith(leaf, "relay") || StartsWith(leaf, "agent");
  return !socket.empty() && socket[0] == '/' && known && leaf.size() > 5 && leaf.substr(leaf.size() - 5) == ".sock";
}

bool IsOurProgram(int pid) {
  if (pid == 0) return false;
  const std::string program = ReadLink("/proc/" + std::to_string(pid) + "/exe");
  const std::string leaf = program.substr(program.rfind('/') + 1);
  for (const char* name : kOurPrograms) {
    if (leaf == name) return true;
  }
  return false;
}

struct Found {
  Obstacle obstacle;
  uint64_t inode = 0;  // of a socket

  bool operator==(const Found& other) const {
    return obstacle.pid == other.obstacle.pid && obstacle.what == other.obstacle.what && inode == other.inode;
  }
};

class Search {
 public:
  explicit Search(std::vector<int> pids) : pids_(std::move(pids)), sockets_(UnixSockets()) {}

  std::vector<Found> Run() {
    for (const int pid : pids_) {
      ForEachFile(pid, [&](const std::string& path, const std::string& target) {
        if (StartsWith(target, kSocket)) inside_.insert(InodeIn(target));
        if (StartsWith(target, "/dev/")) NoteTerminal(pid, path);
      });
    }
    for (const int pid : pids_) {
      LookAtProcess(pid);
      ForEachFile(pid, [&](const std::string& path, const std::string& target) { LookAtFile(pid, path, target); });
    }
    return std::move(found_);
  }

 private:
  template <typename Function>
  static void ForEachFile(int pid, Function function) {
    const std::string folder = "/proc/" + std::to_string(pid) + "/fd";
    DIR* const list = opendir(folder.c_str());
    while (const dirent* const entry = list ? readdir(list) : nullptr) {
      if (entry->d_name[0] == '.') continue;
      const std::string path = folder + "/" + entry->d_name;
      const std::string target = ReadLink(path);
      if (!target.empty()) function(path, target);
    }
    if (list) closedir(list);
  }

  void Add(int pid, const std::string& what, const std::string& advice, uint64_t inode = 0) {
    found_.push_back({{pid, StatusField(pid, "Name"), what, advice}, inode});
  }

  void LookAtProcess(int pid) {
    const std::vector<int> threads = StateOf(pid) == 'Z' ? ThreadsOf(pid) : std::vector<int>();
    if (std::any_of(threads.begin(), threads.end(), IsRunning)) {
      Add(pid, "has ended its main thread while other threads run",
          "have main() wait for the threads, with pthread_join instead of pthread_exit");
    }
    std::string tracer = StatusField(pid, "TracerPid");
    // When a tool is killed, its CRIU goes on, and lets go of the processes after a while.
    for (; criu_waits_ < kMostCriuWaits && IsCriu(tracer); ++criu_waits_) {
      usleep(kCriuWaitUs);
      tracer = StatusField(pid, "TracerPid");
    }
    if (IsCriu(tracer)) {
      Add(pid, "is still being saved by CRIU (PID " + tracer + ") of another checkpoint", "wait for its end");
    } else if (!tracer.empty() && tracer != "0") {
      const std::string name = StatusField(atoi(tracer.c_str()), "Name");
      Add(pid, "is traced by " + (name.empty() ? "another program" : name + " (PID " + tracer + ")"),
          "detach the debugger or tracer");
    }
  }

  static uint32_t InodeIn(const std::string& socket) {
    return uint32_t(strtoul(socket.c_str() + strlen(kSocket), nullptr, 10));
  }
  static int NumberOf(const std::string& path) { return atoi(path.c_str() + path.rfind('/') + 1); }

  // The number of a pseudo-terminal of which a descriptor is an end; -1: it is none. *side: 0 is a window's end.
  static int TerminalOf(int pid, const std::string& path, int* side) {
    struct stat facts;
    if (stat(path.c_str(), &facts) != 0 || !S_ISCHR(facts.st_mode)) return -1;
    const unsigned kind = major(facts.st_rdev), number = minor(facts.st_rdev);
    *side = 1;
    if (kind >= kFirstPseudoMajor && kind <= kLastPseudoMajor)
      return int((kind - kFirstPseudoMajor) * kMinors + number);
    if (kind != kConsoleMajor || number != kMakerMinor) return -1;
    *side = 0;
    const UniqueFd end(DuplicateOf(pid, NumberOf(path)));
    unsigned index = 0;
    return end.ok() && ioctl(end.get(), TIOCGPTN, &index) == 0 ? int(index) : -1;
  }
  void NoteTerminal(int pid, const std::string& path) {
    int side = 0;
    if (const int number = TerminalOf(pid, path, &side); number >= 0) terminals_[number].insert(side);
  }

  void LookForLoss(int pid, const std::string& path, uint32_t inode) {
    const UniqueFd duplicate(DuplicateOf(pid, NumberOf(path)));
    if (!duplicate.ok()) return;
    const Loss* loss = LossOf(duplicate.get());
    if (!loss && inode != 0) {
      const auto& lines = TcpLines();
      const auto line = lines.find(inode);
      if (line != lines.end() && line->second.received > 0 && line->second.state != TcpLine::kListens)
        loss = LossBehindUrgent(duplicate.get(), line->second.received, line->second.state != TcpLine::kMade);
    }
    if (loss) Add(pid, loss->what, loss->advice, inode);
  }

  // What the first process's network has, by inode.
  const std::map<uint64_t, TcpLine>& TcpLines() {
    if (tcp_read_) return tcp_;
    tcp_read_ = true;
    for (const char* const table : {"tcp", "tcp6"}) {
      std::ifstream lines("/proc/" + std::to_string(pids_[0]) + "/net/" + table);
      TcpLine facts;
      for (std::string line; std::getline(lines, line);) {
        if (ParseTcpLine(line, &facts) && facts.inode != 0) tcp_[facts.inode] = facts;
      }
    }
    return tcp_;
  }

  void LookAtFile(int pid, const std::string& path, const std::string& target) {
    struct stat facts;
    int side = 0;
    if (StartsWith(target, kSocket)) {
      LookAtSocket(pid, InodeIn(target));
      LookForLoss(pid, path, InodeIn(target));
    } else if (StartsWith(target, kPipe)) {
      LookForLoss(pid, path, 0);
    } else if (StartsWith(target, "/dev/") && terminals_[TerminalOf(pid, path, &side)].size() == 2) {
      // With one end outside, what a person has typed is no loss.
      LookForLoss(pid, path, 0);
    } else if (StartsWith(target, kAnonymous)) {
      for (const auto& known : kAnonymousFiles) {
        if (StartsWith(target.substr(strlen(kAnonymous)), known.name)) Add(pid, known.what, known.advice);
      }
      if (target == kEvent && IsSemaphore(pid, path.substr(path.rfind('/') + 1)))
        Add(pid, "has an eventfd with EFD_SEMAPHORE", "have the program use a semaphore or a pipe instead");
    } else if (target.rfind('/') == 0 && stat(path.c_str(), &facts) == 0 && S_ISREG(facts.st_mode)) {
      struct statfs system;
      if (statfs(path.c_str(), &system) != 0) return;
      for (const auto& known : kKernelsOwn) {
        if (static_cast<unsigned long>(system.f_type) == known.type) Add(pid, known.what, known.advice);
      }
    } else if (stat(path.c_str(), &facts) == 0 && (S_ISCHR(facts.st_mode) || S_ISBLK(facts.st_mode))) {
      if (!IsKnownDevice(facts))
        Add(pid, "has the device " + target + " open", "close it before the checkpoint, or run without it");
    }
  }

  static bool IsSemaphore(int pid, const std::string& number) {
    std::ifstream facts("/proc/" + std::to_string(pid) + "/fdinfo/" + number);
    const std::string wanted = "eventfd-semaphore:";
    for (std::string line; std::getline(facts, line);) {
      if (line.compare(0, wanted.size(), wanted) == 0) return atoi(line.c_str() + wanted.size()) != 0;
    }
    return false;
  }

  static bool IsKnownDevice(const struct stat& facts) {
    const unsigned kind = major(facts.st_rdev);
    return S_ISCHR(facts.st_mode) && (kind == kMemoryMajor || kind == kTerminalMajor || kind == kConsoleMajor ||
                                      (kind >= kFirstPseudoMajor && kind <= kLastPseudoMajor) ||
                                      (kind == kMiscMajor && minor(facts.st_rdev) == kTunMinor));
  }

  void LookAtSocket(int pid, uint32_t inode) {
    const auto socket = sockets_.find(inode);
    if (socket == sockets_.end() || !socket->second.stream || socket->second.peer == 0) return;
    const uint32_t peer = socket->second.peer;
    if (inside_.count(peer) != 0) return;
    const auto other = sockets_.find(peer);
    const std::string name = other == sockets_.end() ? std::string() : other->second.name;
    if (IsOurs(name) || IsOurs(socket->second.name)) return;
    int other_pid = 0;
    const std::string owner = OwnerOf(peer, &other_pid);
    // One that is no process's lies in the queue of another socket, as a rule of the job's own. Else CRIU refuses.
    if (owner.empty() || IsOurProgram(other_pid)) return;
    Add(pid,
        "has a connection to " + owner + ", which is not of the job" +
            (name.empty() || name[0] != '/' ? "" : ", at " + name),
        "close the connection before the checkpoint, or start the other program in the same job", inode);
  }

  const std::vector<int> pids_;
  const std::map<uint32_t, UnixSocket> sockets_;
  std::set<uint32_t> inside_;               // the job's sockets
  std::map<int, std::set<int>> terminals_;  // the ends of pseudo-terminals that the job has
  bool tcp_read_ = false;
  std::map<uint64_t, TcpLine> tcp_;
  int criu_waits_ = 0;
  std::vector<Found> found_;
};

}  // namespace

std::string ToText(const Obstacle& obstacle) {
  return obstacle.program + " (PID " + std::to_string(obstacle.pid) + ") " + obstacle.what +
         ", which cannot be saved; " + obstacle.advice;
}

std::vector<Obstacle> FindObstacles(const std::function<std::vector<int>()>& list) {
  const std::vector<Found> before = Search(list()).Run();
  if (before.empty()) return {};
  usleep(kLookAgainUs);
  std::set<std::pair<int, std::string>> said;  // each kind once for a process
  std::vector<Obstacle> found;
  for (Found& now : Search(list()).Run()) {
    if (std::find(before.begin(), before.end(), now) == before.end()) continue;
    if (said.insert({now.obstacle.pid, now.obstacle.what}).second) found.push_back(std::move(now.obstacle));
  }
  return found;
}

}  // namespace cuda_remote::checkpoint
