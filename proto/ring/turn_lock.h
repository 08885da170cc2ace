// SPDX-License-Identifier: Apache-2.0
// The lock of threads that put frames into one ring, held for about a hundred nanoseconds each time.
//
// A plain mutex makes two system calls and two changes of thread out of nearly each of these when many threads want it:
// whoever unlocks wakes a sleeper, which finds the lock taken again by a thread that was running anyway. Here somebody
// who finds the lock taken looks for about a microsecond first, a few threads at a time; and while one sleeper has been
// woken and has not had its turn yet, nobody wakes another. So about as many threads stay awake as get something done,
// and each goes on for a while. A thread that holds the lock for long (the ring is full) leaves the others asleep.
//
// Not fair: a sleeper has its turn once it is awake and meets the lock free, as with a plain mutex.
//
//     state:   bit 0 locked | bit 1 a woken sleeper is on its way | from bit 2 on: number of sleepers
//
// Usable with std::lock_guard and std::unique_lock. Not recursive. Not across processes.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_RING_TURN_LOCK_H_
#define CUDA_REMOTE_PROTO_RING_TURN_LOCK_H_

#include <atomic>
#include <cstdint>

namespace cuda_remote::ring {

class TurnLock {
 public:
  TurnLock() = default;
  TurnLock(const TurnLock&) = delete;
  TurnLock& operator=(const TurnLock&) = delete;

  void lock() {
    if (!try_lock()) LockSlowly();
  }

  bool try_lock() {
    uint32_t state = state_.load(std::memory_order_relaxed);
    return !(state & kLocked) &&
           state_.compare_exchange_strong(state, state | kLocked, std::memory_order_acquire, std::memory_order_relaxed);
  }

  void unlock() {
    const uint32_t state = state_.fetch_sub(kLocked, std::memory_order_release) - kLocked;
    if (state >= kSleeper && !(state & kWoken)) WakeOne(state);
  }

 private:
  static constexpr uint32_t kLocked = 1;
  static constexpr uint32_t kWoken = 2;
  static constexpr uint32_t kSleeper = 4;

  void LockSlowly();
  void WakeOne(uint32_t state);
  // Looks for the lock for a moment. `mine`: kWoken, if this thread is the woken one, else 0.
  bool LockWithin(int looks, uint32_t mine);

  std::atomic<uint32_t> state_{0};
  std::atomic<uint32_t> looking_{0};  // threads that look before they sleep
  std::atomic<uint32_t> calls_{0};    // to sleepers, not yet taken; a futex word
};

}  // namespace cuda_remote::ring

#endif  // CUDA_REMOTE_PROTO_RING_TURN_LOCK_H_
