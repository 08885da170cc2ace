// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/passing.h"

#include <arpa/inet.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <fstream>
#include <sstream>
#include <thread>

#include "checkpoint/engine/criu/connections.h"
#include "proto/base/clock.h"

namespace cuda_remote::checkpoint {
namespace {

using std::chrono::milliseconds;

// In all; of it, how long the processes run and stand still at a time; and how often to look.
constexpr milliseconds kLimit(10000), kRunning(100), kStandstill(500), kLook(1);

// The first packet of a connection, from another address than the job's `own` and the loopback interface's, is dropped.
std::vector<sock_filter> CallersFilter(const std::string& own) {
  constexpr uint32_t kFlags = 13, kSyn = 0x02, kAck = 0x10;  // in the TCP header, where the packet begins
  constexpr uint32_t kHeader = uint32_t(SKF_NET_OFF);        // IP's
  struct Caller {
    std::array<uint32_t, 4> address = {}, mask;
  };
  Caller job = {{}, {~0u, ~0u, ~0u, ~0u}}, loopback = job;
  const bool is_ipv6 = inet_pton(AF_INET6, own.c_str(), job.address.data()) == 1;
  const uint32_t version = is_ipv6 ? 6 : 4, words = is_ipv6 ? 4 : 1, from = kHeader + (is_ipv6 ? 8 : 12);
  if (is_ipv6) {
    loopback.address[3] = htonl(1);
  } else {
    inet_pton(AF_INET, own.c_str(), job.address.data());
    loopback.address[0] = htonl(INADDR_LOOPBACK & IN_CLASSA_NET);
    loopback.mask[0] = IN_CLASSA_NET;
  }
  const size_t accept = 6 + 2 * (3 * words + 1) + 1;
  const auto to_accept = [&](size_t at) { return static_cast<unsigned char>(accept - at - 1); };
  std::vector<sock_filter> filter = {
      BPF_STMT(BPF_LD | BPF_B | BPF_ABS, kFlags),
      BPF_STMT(BPF_ALU | BPF_AND | BPF_K, kSyn | kAck),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kSyn, 0, to_accept(2)),
      BPF_STMT(BPF_LD | BPF_B | BPF_ABS, kHeader),
      BPF_STMT(BPF_ALU | BPF_RSH | BPF_K, 4),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, version, 0, to_accept(5)),
  };
  for (const Caller& caller : {job, loopback}) {
    for (uint32_t i = 0; i < words; ++i) {
      const auto to_next = static_cast<unsigned char>(3 * (words - i - 1) + 1);
      filter.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, from + 4 * i));
      filter.push_back(BPF_STMT(BPF_ALU | BPF_AND | BPF_K, caller.mask[i]));
      filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ntohl(caller.address[i]), 0, to_next));
    }
    filter.push_back(BPF_STMT(BPF_JMP | BPF_JA, to_accept(filter.size())));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, 0));
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, 0xffffffff));
  return filter;
}

int OptionOf(int socket, int option) {
  int value = 0;
  socklen_t size = sizeof(value);
  return getsockopt(socket, SOL_SOCKET, option, &value, &size) == 0 ? value : -1;
}

// The states of a process's threads, a letter each.
std::string StatesOf(int pid) {
  std::string states;
  for (const int thread : ThreadsOf(pid)) {
    if (const char state = StateOf(thread)) states += state;
  }
  return states;
}

bool AllStand(const std::vector<int>& pids) {
  return std::all_of(pids.begin(), pids.end(),
                     [](int pid) { return StatesOf(pid).find_first_not_of("TZX") == std::string::npos; });
}

std::vector<std::string> PassingOf(const Job& job) {
  std::vector<std::string> found;
  for (const char* const table : {"tcp", "tcp6"}) {
    std::ifstream lines("/proc/" + std::to_string(job.init_pid()) + "/net/" + table);
    const std::vector<std::string> some = ParsePassing(lines);
    found.insert(found.end(), some.begin(), some.end());
  }
  return found;
}

}  // namespace

bool Becomes(const std::function<bool()>& condition, milliseconds limit) {
  const auto end = Now() + limit;
  while (!condition()) {
    if (Now() >= end) return false;
    std::this_thread::sleep_for(kLook);
  }
  return true;
}

std::vector<std::string> ParsePassing(std::istream& lines) {
  std::vector<std::string> found;
  for (std::string line; std::getline(lines, line);) {
    TcpLine facts;
    if (!ParseTcpLine(line, &facts)) continue;
    const std::string ends = ToText(facts.connection);
    if (facts.state == TcpLine::kListens && facts.received > 0) {
      found.push_back("the program has not accepted a connection at " + ToText(facts.connection.local));
    } else if (facts.state == TcpLine::kBeingMade) {
      found.push_back("the connection " + ends + " is being made");
    } else if (facts.inode == 0 && (facts.state == TcpLine::kEnds || facts.state == TcpLine::kEndsLast ||
                                    facts.state == TcpLine::kBothEnd)) {
      found.push_back("the program has closed the connection " + ends + ", and the other end has not taken the last " +
                      std::to_string(facts.unsent) + " bytes yet");
    }
  }
  return found;
}

std::vector<std::string> MadeInConnect(const std::vector<int>& pids) {
  std::vector<std::string> found;
  for (const int pid : pids) {
    const std::string process = "/proc/" + std::to_string(pid);
    std::set<uint64_t> inodes;
    for (const int thread : ThreadsOf(pid)) {
      // "NUMBER 0xARGUMENT ..." of the call that the thread is in, or was in when it was stopped.
      std::ifstream in("/proc/" + std::to_string(thread) + "/syscall");
      long number = -1;
      std::string descriptor;
      if (!(in >> number >> descriptor) || number != SYS_connect) continue;
      const std::string file = process + "/fd/" + std::to_string(strtol(descriptor.c_str(), nullptr, 16));
      struct stat facts;
      if (stat(file.c_str(), &facts) == 0 && S_ISSOCK(facts.st_mode)) inodes.insert(facts.st_ino);
    }
    if (inodes.empty()) continue;
    for (const char* const table : {"/net/tcp", "/net/tcp6"}) {
      std::ifstream lines(process + table);
      for (std::string line; std::getline(lines, line);) {
        TcpLine facts;
        if (!ParseTcpLine(line, &facts) || facts.state != TcpLine::kMade || inodes.count(facts.inode) == 0) continue;
        const std::string text =
            "the program is about to learn that the connection " + ToText(facts.connection) + " is made";
        // The kernel may list one twice while others come and go.
        if (std::find(found.begin(), found.end(), text) == found.end()) found.push_back(text);
      }
    }
  }
  return found;
}

void KeepCallersOut(const Job& job) {
  std::vector<sock_filter> filter = CallersFilter(job.network().address());
  const sock_fprog program = {static_cast<unsigned short>(filter.size()), filter.data()};
  ForEachSocketOf(ProcessesOf(job), [&](int socket) {
    const bool listens = OptionOf(socket, SO_ACCEPTCONN) == 1 && OptionOf(socket, SO_PROTOCOL) == IPPROTO_TCP;
    if (listens && FilterOf(socket).empty())
      setsockopt(socket, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program));
  });
}

void LetCallersIn(const Job& job) {
  // One that was accepted meanwhile has inherited it.
  DetachFilter(ProcessesOf(job), CallersFilter(job.network().address()));
}

std::set<int> StoppedProcesses(const Job& job) {
  std::set<int> found;
  for (const int pid : ProcessesOf(job)) {
    if (StatesOf(pid).find('T') != std::string::npos) found.insert(InnerPid(pid));
  }
  return found;
}

absl::Status BringToStandstill(const Job& job, const std::function<void()>& stop, const std::function<void()>& run_on) {
  const auto end = Now() + kLimit;
  std::vector<std::string> passing;
  const auto none_passes = [&] {
    passing = PassingOf(job);
    return passing.empty();
  };
  while (true) {
    // Also where the job has begun to listen meanwhile.
    KeepCallersOut(job);
    // The processes accept what is there, and read what others have closed.
    Becomes(none_passes, kRunning);
    stop();
    const std::vector<int> pids = ProcessesOf(job);
    if (Becomes([&] { return AllStand(pids); }, kStandstill) && Becomes(none_passes, kStandstill)) {
      passing = MadeInConnect(pids);
      if (passing.empty()) return absl::OkStatus();
    }
    if (Now() >= end) break;
    run_on();
  }
  const std::string what =
      passing.empty()
          ? "the job's processes do not stop"
          : passing[0] + (passing.size() > 1 ? ", and " + std::to_string(passing.size() - 1) + " more" : "");
  return absl::UnavailableError(what + ", which cannot be saved; try again");
}

}  // namespace cuda_remote::checkpoint
