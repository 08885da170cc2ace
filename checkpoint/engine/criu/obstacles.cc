// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/obstacles.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <linux/unix_diag.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "checkpoint/engine/criu/connections.h"
#include "checkpoint/engine/criu/descriptors.h"
#include "checkpoint/engine/criu/losses.h"
#include "checkpoint/engine/criu/proc_paths.h"
#include "checkpoint/job/job.h"
#include "proto/base/mappings.h"
#include "proto/base/proc.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr char kSocket[] = "socket:[", kPipe[] = "pipe:[";
constexpr char kAnonymous[] = "anon_inode:";
constexpr char kFaults[] = "[userfaultfd]";
// The client library, which has one of these, too.
constexpr char kClient[] = "/libcuda-remote.so";
// Of a descriptor of a thread (PIDFD_THREAD), in the flags that /proc shows.
constexpr unsigned long kOfThread = O_EXCL;
// Character devices that CRIU opens again: memory (null, zero, random, ...), terminals, and the tun device.
constexpr unsigned kMemoryMajor = 1, kTerminalMajor = 4, kConsoleMajor = 5, kMiscMajor = 10, kTunMinor = 200;
constexpr unsigned kFirstPseudoMajor = 136, kLastPseudoMajor = 143, kMinors = 256, kMakerMinor = 2;
// How long to wait for a CRIU whose tool was killed: 10 s.
constexpr int kMostCriuWaits = 200, kCriuWaitUs = 50000;
// How often to look for data that a process cannot read, and how long after each other.
constexpr int kUrgentLooks = 6, kUrgentLookUs = 3000;
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
    {kFaults, "has a userfaultfd open", "close it before the checkpoint"},
};
// Those that it knows.
constexpr const char* kSaved[] = {"[eventfd]", "[eventpoll]", "[fanotify]", "fanotify", "[inotify]",
                                  "inotify",   "[pidfd]",     "[signalfd]", "[timerfd]"};

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

// Of kcmp(2).
constexpr int kSameFile = 0, kSameAsWatched = 7;
struct WatchedFile {
  unsigned epoll, number, which;  // of several under this number
};

struct UnixSocket {
  bool stream = false;  // or of packets: connected for good
  uint32_t peer = 0;    // inode; 0: not connected
  std::string name;
};

bool StartsWith(const std::string& text, const char* prefix) { return text.compare(0, strlen(prefix), prefix) == 0; }

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
  return FindUserOfFile([](int) { return true; },
                        [&](const std::string& process, const std::string& number) {
                          if (ReadLink(process + "/fd/" + number) != wanted) return false;
                          *pid = atoi(process.c_str() + strlen("/proc/"));
                          return true;
                        });
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
  Search(std::vector<int> pids, bool held) : pids_(std::move(pids)), held_(held), sockets_(UnixSockets()) {}

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
    // The process runs and may read between two looks: what it cannot read stays there at each of them.
    for (int i = 0; inode != 0 && i < kUrgentLooks && (i == 0 || loss); ++i) {
      if (i > 0) {
        usleep(kUrgentLookUs);
        tcp_read_ = false;
      } else if (loss) {
        break;
      }
      loss = LossAtMark(duplicate.get(), inode);
    }
    if (loss) Add(pid, loss->what, loss->advice, inode);
  }

  // Data of this TCP connection that the process cannot read, at this look.
  const Loss* LossAtMark(int fd, uint32_t inode) {
    const auto& lines = TcpLines();
    const auto line = lines.find(inode);
    if (line == lines.end() || line->second.received == 0 || line->second.state == TcpLine::kListens) return nullptr;
    return LossBehindUrgent(fd, line->second.received, line->second.state != TcpLine::kMade);
  }

  // What the first process's network has, by inode.
  const std::map<uint64_t, TcpLine>& TcpLines() {
    if (tcp_read_) return tcp_;
    tcp_read_ = true;
    tcp_.clear();
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
    if (stat(path.c_str(), &facts) == 0) LookAtOwner(pid, atoi(path.c_str() + path.rfind('/') + 1), facts);
    if (StartsWith(target, kSocket)) {
      LookAtSocket(pid, InodeIn(target));
      LookForLoss(pid, path, InodeIn(target));
    } else if (StartsWith(target, kPipe)) {
      LookForLoss(pid, path, 0);
    } else if (StartsWith(target, "/dev/") && terminals_[TerminalOf(pid, path, &side)].size() == 2) {
      // With one end outside, what a person has typed is no loss.
      LookForLoss(pid, path, 0);
    } else if (StartsWith(target, kAnonymous)) {
      LookAtAnonymous(pid, atoi(path.c_str() + path.rfind('/') + 1), target.substr(strlen(kAnonymous)));
    } else if (IsGoneInRestore(target)) {
      Add(pid, "has " + target + " open", "close it before the checkpoint, and open it again after");
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

  // `name`: such as "[eventfd]".
  void LookAtAnonymous(int pid, int number, const std::string& name) {
    for (const auto& known : kAnonymousFiles) {
      if (!StartsWith(name, known.name)) continue;
      if (name != kFaults || held_ || !HasClient(pid)) Add(pid, known.what, known.advice);
      return;
    }
    if (std::none_of(std::begin(kSaved), std::end(kSaved), [&](const char* saved) { return name == saved; })) {
      Add(pid, "has " + name + " open", "close it before the checkpoint");
    } else if (name == "[eventfd]") {
      // CRIU restores it without EFD_SEMAPHORE.
      if (atoi(FactOf(pid, number, "eventfd-semaphore").c_str()) != 0)
        Add(pid, "has an eventfd with EFD_SEMAPHORE", "have the program use a semaphore or a pipe instead");
      // And only the lower half of its count.
      if (strtoull(FactOf(pid, number, "eventfd-count").c_str(), nullptr, 16) > UINT32_MAX)
        Add(pid, "has an eventfd with a count above 4294967295", "have the program read it before the checkpoint");
    } else if (name == "[timerfd]") {
      const int clock = atoi(FactOf(pid, number, "clockid").c_str());
      if (clock == CLOCK_REALTIME_ALARM || clock == CLOCK_BOOTTIME_ALARM)
        Add(pid, "has a timerfd that wakes the machine", "have the program use CLOCK_REALTIME or CLOCK_BOOTTIME");
    } else if (name == "[pidfd]") {
      LookAtProcessDescriptor(pid, number);
    } else if (name == "[eventpoll]") {
      LookAtEpoll(pid, number);
    } else if (name.find("notify") != std::string::npos) {
      LookAtWatches(pid, number, name);
    }
  }

  void LookAtWatches(int pid, int number, const std::string& name) {
    if (HasUnread(pid, number))
      Add(pid, "has file events (" + name + ") that it has not read", "have it read them, or close their descriptor");
    std::ifstream facts("/proc/" + std::to_string(pid) + "/fdinfo/" + std::to_string(number));
    for (std::string line; std::getline(facts, line);) {
      unsigned mask = 0;
      if (sscanf(line.c_str(), "inotify wd:%*x ino:%*x sdev:%*x mask:%x", &mask) != 1 || (mask & IN_ONESHOT) == 0)
        continue;
      // CRIU restores it as one that stays.
      Add(pid, "watches a file for one event (IN_ONESHOT)", "have the program remove the watch itself after the event");
      return;
    }
  }

  void LookAtProcessDescriptor(int pid, int number) {
    if ((strtoul(FactOf(pid, number, "flags").c_str(), nullptr, 8) & kOfThread) != 0) {
      Add(pid, "has a descriptor of a thread (PIDFD_THREAD)", "close it before the checkpoint");
      return;
    }
    // As this process numbers it. Of one that has ended, and was waited for: -1.
    const int other = atoi(FactOf(pid, number, "Pid").c_str());
    const auto is_inside = [this](int one) { return std::find(pids_.begin(), pids_.end(), one) != pids_.end(); };
    if (other <= 0 || is_inside(other) || is_inside(ParentOf(other))) return;
    Add(pid,
        "has a descriptor of " + StatusField(other, "Name") + " (PID " + std::to_string(other) +
            "), which is not of the job",
        "close it before the checkpoint");
  }

  // CRIU looks for the files that an epoll watches among those of the first process that has it.
  void LookAtEpoll(int pid, int number) {
    if (FindsWatched(pid, number)) return;
    for (int above = ParentOf(pid); std::find(pids_.begin(), pids_.end(), above) != pids_.end();
         above = ParentOf(above)) {
      if (syscall(SYS_kcmp, pid, above, kSameFile, number, number) == 0 && FindsWatched(above, number)) return;
    }
    Add(pid, "has an epoll that watches a file which the process has closed, or has never had open",
        "close the epoll before the checkpoint; a child that has inherited one can close it, and make its own");
  }

  static bool FindsWatched(int pid, int epoll) {
    std::map<int, unsigned> seen;  // how often a number was watched
    std::ifstream facts("/proc/" + std::to_string(pid) + "/fdinfo/" + std::to_string(epoll));
    for (std::string line; std::getline(facts, line);) {
      int number = 0;
      if (sscanf(line.c_str(), "tfd: %d", &number) != 1) continue;
      const WatchedFile watched{unsigned(epoll), unsigned(number), seen[number]++};
      bool found = false;
      ForEachFile(pid, [&](const std::string& path, const std::string&) {
        const int own = atoi(path.c_str() + path.rfind('/') + 1);
        // Any answer but that it is another one: CRIU finds out.
        found = found || syscall(SYS_kcmp, pid, pid, kSameAsWatched, own, &watched) <= 0;
      });
      if (!found) return false;
    }
    return true;
  }

  // Does `use` with a duplicate of a process's descriptor, if this process may have one.
  template <typename Use>
  static void WithDuplicate(int pid, int number, const Use& use) {
    const UniqueFd process(int(syscall(SYS_pidfd_open, pid, 0)));
    const UniqueFd duplicate(process.ok() ? int(syscall(SYS_pidfd_getfd, process.get(), number, 0)) : -1);
    if (duplicate.ok()) use(duplicate.get());
  }

  static bool HasUnread(int pid, int number) {
    int bytes = 0;
    WithDuplicate(pid, number, [&bytes](int fd) {
      if (ioctl(fd, FIONREAD, &bytes) != 0) bytes = 0;
    });
    return bytes > 0;
  }

  // CRIU sets owners again before it makes the threads beside the first one.
  void LookAtOwner(int pid, int number, const struct stat& facts) {
    const bool is_told = (strtoul(FactOf(pid, number, "flags").c_str(), nullptr, 8) & O_ASYNC) != 0;
    // A duplicate of a plain file would be flushed at its end.
    if (S_ISREG(facts.st_mode) && !is_told && FactOf(pid, number, "lock").find("LEASE") == std::string::npos) return;
    f_owner_ex owner = {};
    WithDuplicate(pid, number, [&owner](int fd) {
      if (fcntl(fd, F_GETOWN_EX, &owner) != 0) owner = {};
    });
    if (owner.pid <= 0 || owner.type == F_OWNER_PGRP ||
        StatusNumbers(owner.pid, "Tgid", 10) == std::vector<uint64_t>{uint64_t(owner.pid)}) {
      return;
    }
    Add(pid,
        "has descriptor " + std::to_string(number) + ", of which a thread is told by signals (F_SETOWN_EX, F_SETLEASE)",
        "have the whole process be told, or its first thread");
  }

  static bool HasClient(int pid) {
    bool found = false;
    ForEachMapping("/proc/" + std::to_string(pid), [&](const Mapping& mapping) {
      found = mapping.name.find(kClient) != std::string::npos;
      return !found;
    });
    return found;
  }

  // What /proc says of a descriptor under this name; empty if it says nothing.
  static std::string FactOf(int pid, int number, const std::string& name) {
    std::ifstream facts("/proc/" + std::to_string(pid) + "/fdinfo/" + std::to_string(number));
    for (std::string line; std::getline(facts, line);) {
      if (line.compare(0, name.size() + 1, name + ":") == 0) return line.substr(name.size() + 1);
    }
    return {};
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
  const bool held_;
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

std::vector<Obstacle> FindObstacles(const std::function<std::vector<int>()>& list, bool held) {
  const std::vector<Found> before = Search(list(), held).Run();
  if (before.empty()) return {};
  usleep(kLookAgainUs);
  std::set<std::pair<int, std::string>> said;  // each kind once for a process
  std::vector<Obstacle> found;
  for (Found& now : Search(list(), held).Run()) {
    if (std::find(before.begin(), before.end(), now) == before.end()) continue;
    if (said.insert({now.obstacle.pid, now.obstacle.what}).second) found.push_back(std::move(now.obstacle));
  }
  return found;
}

}  // namespace cuda_remote::checkpoint
