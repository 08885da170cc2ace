// SPDX-License-Identifier: Apache-2.0
#include "programs/slurm/child.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "checkpoint/job/isolation/isolate.h"

namespace cuda_remote::client::slurm {
namespace {

constexpr int kExitNotStarted = 125;
constexpr int kLooksPerSecond = 50;

}  // namespace

pid_t StartChild(const std::vector<std::string>& command, int signal_with_parent, int input, int output) {
  std::vector<char*> words;
  for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  fflush(nullptr);
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) return 0;
  if (child > 0) {
    setpgid(child, child);
    return child;
  }
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, signal_with_parent);
  if (getppid() != parent) _exit(kExitNotStarted);
  if ((input >= 0 && dup2(input, STDIN_FILENO) < 0) || (output >= 0 && dup2(output, STDOUT_FILENO) < 0)) {
    _exit(kExitNotStarted);
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  execvp(words[0], words.data());
  fprintf(stderr, "cr-slurm-run: cannot start %s: %s\n", words[0], strerror(errno));
  _exit(kExitNotStarted);
}

std::string OutputOf(const std::vector<std::string>& command, int* code) {
  *code = kExitNotStarted;
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return "";
  const pid_t child = StartChild(command, SIGTERM, -1, ends[1]);
  close(ends[1]);
  std::string text;
  char bytes[4096];
  for (ssize_t got; child != 0 && (got = read(ends[0], bytes, sizeof(bytes))) != 0;) {
    if (got > 0) text.append(bytes, size_t(got));
    if (got < 0 && errno != EINTR) break;
  }
  close(ends[0]);
  int status = 0;
  if (child != 0 && waitpid(child, &status, 0) == child) *code = checkpoint::ExitCode(status);
  return text;
}

int EndChild(pid_t child, int seconds) {
  int status = 0;
  for (int i = 0; i < seconds * kLooksPerSecond; ++i) {
    if (waitpid(child, &status, WNOHANG) != 0) return status;
    usleep(1000000 / kLooksPerSecond);
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return status;
}

}  // namespace cuda_remote::client::slurm
