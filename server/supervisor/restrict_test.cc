// SPDX-License-Identifier: Apache-2.0
// What a process can still do after it gave things up: each case is a child that does, then tries.

#include "server/supervisor/restrict.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>

namespace cuda_remote::server {
namespace {

Restrictions Worker() {
  Restrictions restrictions;
  restrictions.calls = ForbiddenCalls(/*network=*/false);
  return restrictions;
}

// The text that `look` returns in a child that has given up `restrictions`.
std::string After(const Restrictions& restrictions, const std::function<std::string()>& look) {
  int answer[2];
  EXPECT_EQ(pipe(answer), 0);
  const pid_t child = fork();
  if (child == 0) {
    const char* what = "";
    const int failure = GiveUp(restrictions, &what);
    const std::string text = failure ? std::string("cannot ") + what + ": " + strerror(failure) : look();
    _exit(write(answer[1], text.data(), text.size()) == ssize_t(text.size()) ? 0 : 1);
  }
  close(answer[1]);
  std::string text;
  char piece[512];
  for (ssize_t n; (n = read(answer[0], piece, sizeof(piece))) > 0;) text.append(piece, size_t(n));
  close(answer[0]);
  int status;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) text += "signal " + std::to_string(WTERMSIG(status));
  return text;
}

// The error that a call ends with; "" if it succeeds.
std::string Error(long result) { return result < 0 ? strerrorname_np(errno) : ""; }

std::string StatusLine(const std::string& name) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);) {
    if (line.compare(0, name.size() + 1, name + ":") == 0) return line.substr(line.find_last_of(" \t") + 1);
  }
  return "?";
}

TEST(Restrict, CapabilitiesAreGoneForGood) {
  const std::string none(16, '0');
  for (const char* set : {"CapEff", "CapPrm", "CapInh", "CapAmb"}) {
    EXPECT_EQ(After(Worker(), [set] { return StatusLine(set); }), none) << set;
  }
  if (geteuid() == 0) {
    EXPECT_EQ(After(Worker(), [] { return StatusLine("CapBnd"); }), none);
  }
  EXPECT_EQ(After(Worker(), [] { return StatusLine("NoNewPrivs"); }), "1");
  EXPECT_EQ(After(Worker(), [] { return StatusLine("Seccomp"); }), "2");
}

TEST(Restrict, WhatWorkersDoNotNeedFails) {
  const pid_t other = getpid();
  const struct {
    const char* name;
    std::function<long()> call;
    const char* error;
  } cases[] = {
      {"ptrace", [] { return ptrace(PTRACE_TRACEME, 0, nullptr, nullptr); }, "EPERM"},
      {"process_vm_readv", [&] { return syscall(SYS_process_vm_readv, other, nullptr, 0, nullptr, 0, 0); }, "EPERM"},
      {"kill", [&] { return kill(other, 0); }, "EPERM"},
      {"kill all", [] { return kill(-1, 0); }, "EPERM"},
      {"tgkill", [&] { return syscall(SYS_tgkill, other, other, 0); }, "EPERM"},
      {"prlimit", [&] { return prlimit(other, RLIMIT_CORE, nullptr, nullptr) ? -1 : 0; }, ""},
      {"mount", [] { return mount("none", "/mnt", "tmpfs", 0, nullptr); }, "EPERM"},
      {"unshare", [] { return unshare(CLONE_NEWUSER); }, "EPERM"},
      {"clone", [] { return syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0); }, "EPERM"},
      {"clone3", [] { return syscall(435, nullptr, 0); }, "ENOSYS"},
      {"bpf", [] { return syscall(SYS_bpf, 0, nullptr, 0); }, "EPERM"},
      {"perf_event_open", [] { return syscall(SYS_perf_event_open, nullptr, 0, 0, 0, 0); }, "EPERM"},
      {"init_module", [] { return syscall(SYS_init_module, nullptr, 0, nullptr); }, "EPERM"},
      {"kexec_load", [] { return syscall(SYS_kexec_load, 0, 0, nullptr, 0); }, "EPERM"},
      {"keyctl", [] { return syscall(SYS_keyctl, 0, 0, 0, 0, 0); }, "EPERM"},
      {"io_uring", [] { return syscall(425, 1, nullptr); }, "EPERM"},
      {"userfaultfd", [] { return syscall(SYS_userfaultfd, 1); }, "EPERM"},
      {"internet socket", [] { return socket(AF_INET, SOCK_STREAM, 0); }, "EAFNOSUPPORT"},
      {"packet socket", [] { return socket(AF_PACKET, SOCK_RAW, 0); }, "EAFNOSUPPORT"},
      {"typing", [] { return ioctl(0, TIOCSTI, "x"); }, "EPERM"},
      {"a call of the future", [] { return syscall(700); }, "ENOSYS"},
      {"x32", [] { return syscall(0x40000000 + SYS_getpid); }, "ENOSYS"},
  };
  for (const auto& one : cases) {
    if (one.error[0] == 0) continue;
    EXPECT_EQ(After(Worker(), [&] { return Error(one.call()); }), one.error) << one.name;
  }
  // Also what an exec would bring back: nothing. A program that belongs to root and has the set-user-ID bit is no help.
  EXPECT_EQ(After(Worker(), [&] { return Error(prlimit(other, RLIMIT_CORE, nullptr, nullptr)); }), "EPERM");
}

TEST(Restrict, WhatDriversDoWorks) {
  EXPECT_EQ(After(Worker(),
                  [] {
                    int value = 0;
                    std::thread([&value] { value = 1; }).join();
                    return std::to_string(value);
                  }),
            "1");
  EXPECT_EQ(After(Worker(), [] { return Error(socket(AF_UNIX, SOCK_SEQPACKET, 0)); }), "");
  EXPECT_EQ(After(Worker(), [] { return Error(memfd_create("x", 0)); }), "");
  EXPECT_EQ(After(Worker(), [] { return Error(personality(0xffffffff)); }), "");
  EXPECT_EQ(After(Worker(), [] { return Error(kill(getpid(), 0)) + Error(raise(0)); }), "");
  EXPECT_EQ(After(Worker(),
                  [] {
                    void* const code = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                    return Error(mprotect(code, 4096, PROT_READ | PROT_EXEC));
                  }),
            "");
  EXPECT_EQ(After(Worker(),
                  [] {
                    const pid_t child = fork();
                    if (child == 0) execl("/bin/true", "true", nullptr);
                    int status = -1;
                    waitpid(child, &status, 0);
                    return std::to_string(status);
                  }),
            "0");
  // Nicer than the test itself, which may have been started with nice(1).
  EXPECT_EQ(After(Worker(),
                  [] {
                    const int nicer = getpriority(PRIO_PROCESS, 0) + 1;
                    return Error(setpriority(PRIO_PROCESS, 0, nicer)) + Error(open("/dev/null", O_RDWR));
                  }),
            "");
}

TEST(Restrict, CannotReadFilesOfTheServer) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  char secret[] = "/tmp/cr-restrict-XXXXXX";
  const int fd = mkstemp(secret);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(fchmod(fd, 0600), 0);
  Restrictions guest = Worker();
  guest.account = *FindAccount("nobody");
  EXPECT_EQ(After(guest, [&] { return Error(open(secret, O_RDONLY)); }), "EACCES");
  EXPECT_EQ(After(guest, [&] { return Error(setuid(0)); }), "EPERM");
  EXPECT_EQ(
      After(guest, [] { return std::to_string(getuid() == geteuid() && geteuid() != 0 && getgroups(0, nullptr) < 2); }),
      "1");
  // Root without capabilities does not get past permissions either.
  ASSERT_EQ(fchown(fd, 65534, 65534), 0);
  EXPECT_EQ(After(Worker(), [&] { return Error(open(secret, O_RDONLY)); }), "EACCES");
  close(fd);
  unlink(secret);
}

TEST(Restrict, TheServerKeepsWhatItNeeds) {
  const auto server = [](const std::function<std::string()>& look) {
    Restrictions nothing;
    nothing.drop_capabilities = false;
    return After(nothing, [&] {
      const absl::Status restricted = RestrictServer();
      return restricted.ok() ? look() : std::string(restricted.message());
    });
  };
  EXPECT_EQ(server([] { return Error(socket(AF_INET, SOCK_STREAM, 0)); }), "");
  EXPECT_EQ(server([] { return Error(ptrace(PTRACE_TRACEME, 0, nullptr, nullptr)); }), "EPERM");
  EXPECT_EQ(server([] { return Error(mount("none", "/mnt", "tmpfs", 0, nullptr)); }), "EPERM");
  if (geteuid() == 0) {
    const uint64_t kept =
        1 << CAP_SETUID | 1 << CAP_SETGID | 1 << CAP_SETPCAP | 1 << CAP_KILL | 1 << CAP_NET_BIND_SERVICE;
    EXPECT_EQ(std::stoull(server([] { return StatusLine("CapEff"); }), nullptr, 16) & ~kept, 0u);
    // A worker of it has nothing.
    EXPECT_EQ(server([] { return After(Worker(), [] { return StatusLine("CapBnd"); }); }), std::string(16, '0'));
  }
}

TEST(Restrict, AccountsAreFoundByNameAndNumber) {
  EXPECT_EQ(FindAccount("0")->name, "root");
  const Account account = *FindAccount("4000000");
  EXPECT_EQ(account.uid, 4000000u);
  EXPECT_EQ(account.gid, 4000000u);
  EXPECT_TRUE(account.groups.empty());
  EXPECT_EQ(FindAccount("no-such-user").status(), absl::NotFoundError("there is no user no-such-user on this machine"));
  EXPECT_FALSE(FindAccount("").ok());
}

}  // namespace
}  // namespace cuda_remote::server
