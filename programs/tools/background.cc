// SPDX-License-Identifier: Apache-2.0
#include "programs/tools/background.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/base/descriptor_limit.h"

namespace cuda_remote::client::tools {
namespace {

volatile sig_atomic_t g_interrupts = 0;

bool PeerClosed(int fd) {
  pollfd waiting{fd, POLLIN, 0};
  return poll(&waiting, 1, 0) > 0;
}

// Copies what there is. False at its end.
bool CopyMessages(int from) {
  char text[4096];
  const ssize_t got = read(from, text, sizeof(text));
  if (got > 0) fwrite(text, 1, size_t(got), stderr);
  return got > 0 || (got < 0 && errno == EINTR);
}

}  // namespace

int RunInBackground(const std::function<int(const Background&)>& work) {
  int alive[2], result[2], messages[2];
  if (pipe2(alive, O_CLOEXEC) != 0 || pipe2(result, O_CLOEXEC) != 0 || pipe2(messages, O_CLOEXEC) != 0) {
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
    close(messages[0]);
    signal(SIGPIPE, SIG_IGN);
    // A file that the limit of file sizes does not allow is an error like a full disk.
    signal(SIGXFSZ, SIG_IGN);
    RaiseDescriptorLimit();
    const int code = work({[&] { return PeerClosed(alive[0]); }, messages[1]});
    fflush(nullptr);
    const ssize_t ignored = write(result[1], &code, sizeof(code));
    _exit(ignored == sizeof(code) ? code : 1);
  }
  close(alive[0]);
  close(result[1]);
  close(messages[1]);
  while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  struct sigaction action {};
  action.sa_handler = [](int) { g_interrupts = g_interrupts + 1; };
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) sigaction(signal, &action, nullptr);
  int code = -1;
  bool told = false;
  // The work's end is the end of `result`, a helper's that of `messages`.
  pollfd waiting[2] = {{result[0], POLLIN, 0}, {messages[0], POLLIN, 0}};
  while (waiting[0].fd >= 0 || waiting[1].fd >= 0) {
    if (poll(waiting, 2, -1) < 0 && errno == EINTR) {
      if (!told) close(alive[1]);  // the work sees it
      told = true;
      if (g_interrupts > 1) return 130;
      continue;
    }
    if (waiting[1].fd >= 0 && waiting[1].revents != 0) {
      if (!CopyMessages(messages[0])) waiting[1].fd = -1;
    } else if (waiting[0].fd >= 0 && waiting[0].revents != 0) {
      if (read(result[0], &code, sizeof(code)) == ssize_t(sizeof(code))) return code;
      waiting[0].fd = -1;
    }
  }
  fprintf(stderr, "the process that did the work has died\n");
  return 1;
}

}  // namespace cuda_remote::client::tools
