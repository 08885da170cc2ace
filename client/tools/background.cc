// SPDX-License-Identifier: Apache-2.0
#include "client/tools/background.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

namespace cuda_remote::client::tools {
namespace {

volatile sig_atomic_t g_interrupts = 0;

bool PeerClosed(int fd) {
  pollfd waiting{fd, POLLIN, 0};
  return poll(&waiting, 1, 0) > 0;
}

}  // namespace

int RunInBackground(const std::function<int(const std::function<bool()>& cancelled)>& work) {
  int alive[2], result[2];
  if (pipe2(alive, O_CLOEXEC) != 0 || pipe2(result, O_CLOEXEC) != 0) {
    fprintf(stderr, "pipe: %s\n", strerror(errno));
    return 1;
  }
  fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) {
    fprintf(stderr, "fork: %s\n", strerror(errno));
    return 1;
  }
  if (child == 0) {
    setsid();
    if (fork() != 0) _exit(0);
    close(alive[1]);
    close(result[0]);
    signal(SIGPIPE, SIG_IGN);
    const int code = work([&] { return PeerClosed(alive[0]); });
    fflush(nullptr);
    const ssize_t ignored = write(result[1], &code, sizeof(code));
    _exit(ignored == sizeof(code) ? code : 1);
  }
  close(alive[0]);
  close(result[1]);
  while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  struct sigaction action {};
  action.sa_handler = [](int) { g_interrupts = g_interrupts + 1; };
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) sigaction(signal, &action, nullptr);
  int code = 1;
  bool told = false;
  while (true) {
    const ssize_t got = read(result[0], &code, sizeof(code));
    if (got == ssize_t(sizeof(code))) return code;
    if (got >= 0 || errno != EINTR) break;
    if (!told) close(alive[1]);  // the work sees it
    told = true;
    if (g_interrupts > 1) return 130;
  }
  fprintf(stderr, "the process that did the work has died\n");
  return 1;
}

}  // namespace cuda_remote::client::tools
