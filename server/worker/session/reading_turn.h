// SPDX-License-Identifier: Apache-2.0
// Whose turn it is to read the channel: the executor's, or that of the thread that watches it (executor.h).
//
// The executor takes and gives up its turn with every request, so for it this costs one locked instruction, a plain
// mutex two. The watcher hardly ever wants a turn, and never sleeps for one: it tries again later. So the executor,
// giving its turn up, has nobody to wake.
#ifndef CUDA_REMOTE_SERVER_WORKER_SESSION_READING_TURN_H_
#define CUDA_REMOTE_SERVER_WORKER_SESSION_READING_TURN_H_

#include <atomic>
#include <cstdint>

#include "proto/ring/futex.h"

namespace cuda_remote::server {

class ReadingTurn {
 public:
  // The executor's; waits while the watcher has it.
  void Take() {
    uint32_t whose = kNobody;
    while (!whose_.compare_exchange_strong(whose, kExecutor, std::memory_order_acquire, std::memory_order_relaxed)) {
      ring::FutexWait(&whose_, kWatcher, -1, false);
      whose = kNobody;
    }
  }
  void GiveUp() { whose_.store(kNobody, std::memory_order_release); }

  // The watcher's. False: the executor has it.
  bool TryTake() {
    uint32_t whose = kNobody;
    return whose_.compare_exchange_strong(whose, kWatcher, std::memory_order_acquire, std::memory_order_relaxed);
  }
  void GiveBack() {
    whose_.store(kNobody, std::memory_order_release);
    ring::FutexWake(&whose_, false);
  }

 private:
  static constexpr uint32_t kNobody = 0;
  static constexpr uint32_t kExecutor = 1;
  static constexpr uint32_t kWatcher = 2;

  std::atomic<uint32_t> whose_{kNobody};
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_SESSION_READING_TURN_H_
