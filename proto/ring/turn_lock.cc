// SPDX-License-Identifier: Apache-2.0
#include "proto/ring/turn_lock.h"

#include <algorithm>

#include "proto/ring/futex.h"
#include "proto/ring/spin.h"

namespace cuda_remote::ring {
namespace {

// About a microsecond, at 10 to 40 ns for a pause.
constexpr int kLooks = 40;

// How many threads may look at the same time. With few processors the holder needs the one that a looking thread has.
uint32_t MostLooking() {
  const int processors = UsableProcessors();
  return processors <= 2 ? 0 : uint32_t(std::max(1, processors / 4));
}

}  // namespace

bool TurnLock::LockWithin(int looks, uint32_t mine) {
  for (int i = 0; i < looks; ++i) {
    uint32_t state = state_.load(std::memory_order_relaxed);
    if (!(state & kLocked) && state_.compare_exchange_weak(state, (state | kLocked) & ~mine, std::memory_order_acquire,
                                                           std::memory_order_relaxed)) {
      return true;
    }
    CpuPause();
  }
  return false;
}

void TurnLock::LockSlowly() {
  const uint32_t most = MostLooking();
  if (looking_.load(std::memory_order_relaxed) < most) {
    looking_.fetch_add(1, std::memory_order_relaxed);
    const bool locked = LockWithin(kLooks, 0);
    looking_.fetch_sub(1, std::memory_order_relaxed);
    if (locked) return;
  }
  uint32_t mine = 0;
  while (true) {
    // Either the lock, or a place among the sleepers, in one step: whoever unlocks after that sees the sleeper.
    uint32_t state = state_.load(std::memory_order_relaxed);
    while (true) {
      const bool free = !(state & kLocked);
      const uint32_t next = (free ? state | kLocked : state + kSleeper) & ~mine;
      if (!state_.compare_exchange_weak(state, next, std::memory_order_acquire, std::memory_order_relaxed)) continue;
      if (free) return;
      break;
    }
    while (true) {
      uint32_t calls = calls_.load(std::memory_order_relaxed);
      if (calls == 0) {
        FutexWait(&calls_, 0, -1, false);
      } else if (calls_.compare_exchange_weak(calls, calls - 1, std::memory_order_acquire, std::memory_order_relaxed)) {
        break;
      }
    }
    mine = kWoken;
    if (most != 0 && LockWithin(kLooks, mine)) return;
  }
}

void TurnLock::WakeOne(uint32_t state) {
  // If somebody has locked meanwhile, or woken a sleeper, it is theirs to do.
  while (state >= kSleeper && !(state & (kLocked | kWoken))) {
    if (!state_.compare_exchange_weak(state, (state - kSleeper) | kWoken, std::memory_order_relaxed)) continue;
    calls_.fetch_add(1, std::memory_order_release);
    FutexWake(&calls_, false, 1);
    return;
  }
}

}  // namespace cuda_remote::ring
