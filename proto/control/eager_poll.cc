// SPDX-License-Identifier: Apache-2.0
#include "proto/control/eager_poll.h"

#include <sys/epoll.h>

#include <atomic>

#include "proto/base/clock.h"
#include "proto/ring/spin.h"

namespace cuda_remote::control {
namespace {

std::atomic<bool> g_eager{false};

int SpinThenSleep(int set, epoll_event* events, int most, int timeout_ms) {
  // A thread's own: one waits for a busy session, another for one that is quiet.
  static thread_local ring::SpinBudget budget;
  int found = 0;
  const auto look = [&] {
    found = epoll_pwait(set, events, most, 0, nullptr);
    return found != 0;  // an error too
  };
  if (budget.Spin(look)) return found;
  const int64_t start = NowNs();
  found = epoll_pwait(set, events, most, timeout_ms, nullptr);
  budget.Slept(NowNs() - start);
  return found;
}

}  // namespace

void PollEagerly() {
  // Where there is nothing to spin on, not even the first look is worth its system call.
  g_eager.store(ring::UsableProcessors() > 2, std::memory_order_relaxed);
}

}  // namespace cuda_remote::control

extern "C" __attribute__((visibility("default"))) int epoll_wait(int set, epoll_event* events, int most,
                                                                 int timeout_ms) {
  if (timeout_ms == 0 || !cuda_remote::control::g_eager.load(std::memory_order_relaxed))
    return epoll_pwait(set, events, most, timeout_ms, nullptr);
  return cuda_remote::control::SpinThenSleep(set, events, most, timeout_ms);
}
