// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/isolation/terminal.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "proto/errors/absl_status.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr char kNoTerminal[] = "cannot make a terminal for the job";

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

absl::StatusOr<std::unique_ptr<JobTerminal>> JobTerminal::Open() {
  std::unique_ptr<JobTerminal> terminal(new JobTerminal);
  for (int fd : {0, 1, 2}) {
    if (isatty(fd)) terminal->streams_.push_back(fd);
  }
  // In a pipeline other programs use the terminal, whose keys and modes are theirs, too.
  if (!isatty(0) || !isatty(1)) return nullptr;
  // Fails without a terminal that controls this program.
  terminal->own_.Reset(open("/dev/tty", O_RDWR | O_NOCTTY | O_CLOEXEC));
  if (!terminal->own_.ok()) return nullptr;
  char name[64];
  terminal->master_.Reset(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK));
  const int master = terminal->master_.get();
  if (master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0 && ptsname_r(master, name, sizeof(name)) == 0) {
    terminal->job_end_.Reset(open(name, O_RDWR | O_NOCTTY));
  }
  if (!terminal->job_end_.ok() || tcgetattr(terminal->own_.get(), &terminal->before_) != 0) {
    return ErrnoStatus(kNoTerminal);
  }
  tcsetattr(terminal->job_end_.get(), TCSANOW, &terminal->before_);
  terminal->Resize();
  // What a job in the background writes is shown.
  signal(SIGTTOU, SIG_IGN);
  return terminal;
}

JobTerminal::~JobTerminal() {
  Release();
  signal(SIGTTOU, SIG_DFL);
}

void JobTerminal::CloseJobEnd() { job_end_.Close(); }

bool JobTerminal::InForeground() const { return tcgetpgrp(own_.get()) == getpgrp(); }

void JobTerminal::Resize() {
  winsize size;
  if (ioctl(own_.get(), TIOCGWINSZ, &size) == 0) ioctl(master_.get(), TIOCSWINSZ, &size);
}

void JobTerminal::Release() {
  // In the background the terminal is somebody else's, who has set it.
  if (raw_ && InForeground()) tcsetattr(own_.get(), TCSADRAIN, &before_);
  raw_ = false;
}

int JobTerminal::Ask(std::vector<pollfd>* waiting) {
  // How often to look whether a shell has put the job into the foreground: it says so in no other way.
  constexpr int kLookMs = 200;
  const bool foreground = InForeground();
  if (foreground && !raw_) {
    tcgetattr(own_.get(), &before_);
    termios raw = before_;
    cfmakeraw(&raw);
    tcsetattr(own_.get(), TCSADRAIN, &raw);
    Resize();
    raw_ = true;
  }
  if (!foreground) raw_ = false;
  const bool reads = foreground && !at_end_ && to_job_.empty();
  waiting->push_back({reads ? own_.get() : -1, POLLIN, 0});
  waiting->push_back({master_.get(), short(POLLIN | (to_job_.empty() ? 0 : POLLOUT)), 0});
  return foreground ? -1 : kLookMs;
}

void JobTerminal::Ready(const std::vector<pollfd>& waiting) {
  for (const pollfd& one : waiting) {
    if (one.fd == own_.get() && one.revents != 0) CopyIn();
    if (one.fd == master_.get() && (one.revents & POLLIN)) CopyOut();
  }
  while (!to_job_.empty()) {
    const ssize_t wrote = write(master_.get(), to_job_.data(), to_job_.size());
    if (wrote <= 0) break;
    to_job_.erase(0, size_t(wrote));
  }
}

void JobTerminal::CopyIn() {
  // A shell may have taken the terminal since Ask.
  if (!InForeground()) return;
  char keys[1024];
  const ssize_t got = read(own_.get(), keys, sizeof(keys));
  if (got > 0) {
    to_job_.append(keys, size_t(got));
  } else if (got == 0 || errno != EINTR) {
    at_end_ = true;
  }
}

void JobTerminal::CopyOut() {
  char in[4096];
  const ssize_t got = read(master_.get(), in, sizeof(in));
  std::string out = held_ ? "\r" : "";
  if (got > 0) out.append(in, size_t(got));
  // The job's terminal has written a line's end as CR LF; where this one is not raw, it does so itself.
  held_ = !raw_ && got > 0 && out.back() == '\r';
  if (held_) out.pop_back();
  for (size_t at; !raw_ && (at = out.find("\r\n")) != std::string::npos;) out.erase(at, 1);
  for (size_t done = 0; done < out.size();) {
    const ssize_t wrote = write(own_.get(), out.data() + done, out.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return;
    done += size_t(wrote);
  }
}

void JobTerminal::Drain() {
  pollfd waiting{master_.get(), POLLIN, 0};
  while (poll(&waiting, 1, 0) > 0 && (waiting.revents & POLLIN)) CopyOut();
}

absl::StatusOr<TerminalCopy> CopyTerminal() {
  TerminalCopy copy;
  const int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  char name[64];
  if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0 || ptsname_r(master, name, sizeof(name)) != 0) {
    const absl::Status failed = ErrnoStatus(kNoTerminal);
    if (master >= 0) close(master);
    return failed;
  }
  copy.terminal = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
  fflush(nullptr);
  copy.copier = copy.terminal < 0 ? -1 : fork();
  if (copy.copier == 0) {
    close(copy.terminal);
    // The signals that cr-restart forwards are not for this process: it ends with the job.
    for (int signal_number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) signal(signal_number, SIG_IGN);
    Copy(master, 1);
    _exit(0);
  }
  const int failure = errno;
  close(master);
  if (copy.copier > 0) return copy;
  if (copy.terminal >= 0) close(copy.terminal);
  return ErrnoStatus(kNoTerminal, failure);
}

}  // namespace cuda_remote::checkpoint
