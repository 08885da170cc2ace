// SPDX-License-Identifier: Apache-2.0
// Bounded, adaptive spinning: how long to look again and again before going to sleep.
//
// Spinning pays if the other side runs on another processor and answers within microseconds. So each waiting place
// keeps a budget that grows when spinning met the event and shrinks when it did not, and on a machine with one or two
// usable processors, where the spinner would take the time that the other side needs, there is next to none.
//
// Not thread-safe: one SpinBudget for each waiting place (a data race on the budget would only cost time, so callers
// that share one use it under their own lock or role).
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_RING_SPIN_H_
#define CUDA_REMOTE_PROTO_RING_SPIN_H_

#include <sched.h>

#include <atomic>
#include <cstdint>

#include "proto/base/clock.h"

namespace cuda_remote::ring {

inline void CpuPause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// From here on a machine has processors to spare.
inline constexpr int kManyProcessors = 8;

// Processors that this process may run on.
inline int UsableProcessors() {
  static const int count = [] {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
    return CPU_COUNT(&set);
  }();
  return count;
}

class SpinBudget {
 public:
  explicit SpinBudget(int64_t max_ns = DefaultMaxNs())
      : max_ns_(UsableProcessors() <= 2 ? 0 : max_ns), budget_ns_(max_ns) {}

  // A round trip through a relay takes about 100 us, and each of the four places on its way that sleeps adds the time
  // that a processor takes to wake. Machines with many processors can afford to look that long.
  static int64_t DefaultMaxNs() { return UsableProcessors() >= kManyProcessors ? 200000 : 50000; }

  // Another limit. Any thread.
  void SetMax(int64_t max_ns) {
    if (UsableProcessors() > 2) max_ns_.store(max_ns, std::memory_order_relaxed);
  }

  // Looks until `ready()` is true or the budget is used up; returns the last answer.
  template <typename Ready>
  bool Spin(Ready ready) {
    if (ready()) return true;
    const int64_t max_ns = max_ns_.load(std::memory_order_relaxed);
    spent_ns_ = 0;
    if (max_ns == 0) return false;
    if (budget_ns_ > max_ns) budget_ns_ = max_ns;
    int64_t start = 0;
    while (true) {
      for (int i = 0; i < 32; ++i) {
        CpuPause();
        if (ready()) {
          budget_ns_ = budget_ns_ * 2 < max_ns ? budget_ns_ * 2 : max_ns;
          return true;
        }
      }
      const int64_t now = NowNs();
      if (start == 0) start = now;
      if (now - start >= budget_ns_) {
        spent_ns_ = now - start;
        budget_ns_ = budget_ns_ / 2 > kMinNs ? budget_ns_ / 2 : kMinNs;
        return false;
      }
    }
  }

  // The sleep that followed a Spin in vain took this long, the waking included. If looking on would have met the event,
  // the budget is too small, and would stay so: it grows only where spinning succeeds.
  void Slept(int64_t ns) {
    const int64_t max_ns = max_ns_.load(std::memory_order_relaxed);
    if (spent_ns_ + ns < max_ns) budget_ns_ = max_ns;
  }

 private:
  static constexpr int64_t kMinNs = 2000;
  std::atomic<int64_t> max_ns_;
  int64_t budget_ns_;
  int64_t spent_ns_ = 0;  // by the last Spin, in vain
};

}  // namespace cuda_remote::ring

#endif  // CUDA_REMOTE_PROTO_RING_SPIN_H_
