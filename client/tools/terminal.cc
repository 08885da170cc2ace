#include "client/tools/terminal.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

namespace cuda_remote::client::tools {
namespace {

// Until the other side is closed. A terminal writes each line's end as CR LF.
void Copy(int from, int to) {
  char in[4096];
  std::string out;
  bool held = false;  // a CR whose next byte has not come yet
  while (true) {
    const ssize_t got = read(from, in, sizeof(in));
    if (got < 0 && errno == EINTR) continue;
    out.clear();
    for (ssize_t i = 0; i < got; ++i) {
      if (held && in[i] != '\n') out += '\r';
      held = in[i] == '\r';
      if (!held) out += in[i];
    }
    if (got <= 0 && held) out += '\r';
    for (size_t done = 0; done < out.size();) {
      const ssize_t wrote = write(to, out.data() + done, out.size() - done);
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote <= 0) return;
      done += size_t(wrote);
    }
    if (got <= 0) return;
  }
}

}  // namespace

int OwnTerminal() {
  for (int fd : {0, 1, 2})
    if (isatty(fd)) return fd;
  return -1;
}

bool CopyTerminal(TerminalCopy* copy, std::string* error) {
  const int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  char name[64];
  if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0 || ptsname_r(master, name, sizeof(name)) != 0) {
    *error = std::string("cannot make a terminal for the job: ") + strerror(errno);
    if (master >= 0) close(master);
    return false;
  }
  copy->terminal = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
  fflush(nullptr);
  copy->copier = copy->terminal < 0 ? -1 : fork();
  if (copy->copier == 0) {
    close(copy->terminal);
    // The signals that cr-restart forwards are not for this process: it ends with the job.
    for (int signal_number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) signal(signal_number, SIG_IGN);
    Copy(master, 1);
    _exit(0);
  }
  const int failure = errno;
  close(master);
  if (copy->copier > 0) return true;
  *error = std::string("cannot make a terminal for the job: ") + strerror(failure);
  return false;
}

}  // namespace cuda_remote::client::tools
