// SPDX-License-Identifier: Apache-2.0
#include "proto/base/short_waits.h"

#include <errno.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

namespace cuda_remote {
namespace {

constexpr long kPeriodNs = 1000000;
// Nobody else in these programs uses it.
constexpr int kSignal = SIGALRM;

void DoNothing(int) {}

bool Install() {
  struct sigaction action = {};
  action.sa_handler = DoNothing;  // without SA_RESTART
  return sigaction(kSignal, &action, nullptr) == 0;
}

}  // namespace

// The system calls themselves: before 2.34, glibc has these functions in a library of their own.
ShortWaits::ShortWaits() {
  static const bool installed = Install();
  if (!installed) return;
  sigevent event = {};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = kSignal;
  event.sigev_notify_thread_id = int(syscall(SYS_gettid));
  if (syscall(SYS_timer_create, CLOCK_MONOTONIC, &event, &timer_) != 0) {
    timer_ = -1;
    return;
  }
  const itimerspec period = {{0, kPeriodNs}, {0, kPeriodNs}};
  syscall(SYS_timer_settime, timer_, 0, &period, nullptr);
}

ShortWaits::~ShortWaits() {
  if (timer_ < 0) return;
  const int before = errno;
  syscall(SYS_timer_delete, timer_);
  errno = before;
}

void CloseWithoutWaiting(int fd) {
  const int before = errno;
  {
    const ShortWaits waits;
    close(fd);
  }
  errno = before;
}

}  // namespace cuda_remote
