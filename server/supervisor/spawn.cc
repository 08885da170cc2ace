// SPDX-License-Identifier: Apache-2.0
#include "server/supervisor/spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "absl/status/status.h"
#include "proto/base/proc.h"
#include "proto/errors/absl_status.h"
#include "server/worker_link/worker_link.h"

namespace cuda_remote::server {

namespace {

// What a child that could not become the program says of itself. The text is in both processes.
struct Failure {
  int error;
  const char* what;
};

}  // namespace

absl::StatusOr<pid_t> SpawnWorker(const std::vector<std::string>& command, int link, const Restrictions& restrictions) {
  std::vector<char*> arguments;
  for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  // Closes when exec succeeds; carries a Failure if it does not.
  int report[2];
  if (pipe2(report, O_CLOEXEC) != 0) return ErrnoStatus("pipe");
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    // Only async-signal-safe calls from here on: other threads of the parent may have held any lock.
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(0);
    const int null = open("/dev/null", O_RDONLY);
    if (null > 0) dup2(null, 0);
    dup2(2, 1);
    // The report pipe must not sit where the link goes.
    const int out = fcntl(report[1], F_DUPFD_CLOEXEC, kWorkerLinkFd + 1);
    if (link == kWorkerLinkFd) {
      fcntl(link, F_SETFD, 0);
    } else {
      dup2(link, kWorkerLinkFd);
    }
    // Whatever a library forgot to mark.
    syscall(SYS_close_range, kWorkerLinkFd + 1, ~0u, 4 /* CLOSE_RANGE_CLOEXEC */);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    signal(SIGPIPE, SIG_DFL);
    Failure failure{0, "execute it"};
    failure.error = GiveUp(restrictions, &failure.what);
    if (failure.error == 0) {
      failure.what = "execute it";
      execv(arguments[0], arguments.data());
      failure.error = errno;
    }
    if (write(out, &failure, sizeof(failure)) < 0) _exit(126);
    _exit(127);
  }
  const int fork_errno = errno;
  close(report[1]);
  if (pid < 0) {
    close(report[0]);
    return ErrnoStatus("fork", fork_errno);
  }
  Failure failure{};
  const ssize_t got = read(report[0], &failure, sizeof(failure));
  close(report[0]);
  if (got == ssize_t(sizeof(failure))) {
    std::string error = command[0] + ": cannot " + failure.what + ": " + strerror(failure.error);
    if (failure.error == EACCES) {
      error += "; workers have no privileges, so they must be able to read their files" +
               (restrictions.account ? " as user " + restrictions.account->name : std::string());
    }
    return absl::FailedPreconditionError(error);  // the event loop reaps it
  }
  return pid;
}

std::string FindCompanion(const std::string& program, const std::vector<std::string>& places) {
  for (const std::string& place : places) {
    const std::string candidate = OwnFolder() + place + program;
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return "";
}

}  // namespace cuda_remote::server
