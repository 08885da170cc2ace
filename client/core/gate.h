// SPDX-License-Identifier: Apache-2.0
// The admission gate: every driver call passes it, and a checkpoint closes it.
//
// Open, it costs two atomic additions a call, to a counter that few other threads use: there are kLanes of them, and
// each thread keeps to one (ThreadState::lane). Closed, new calls wait in the kernel, in the order in which they came;
// the calls that are inside finish. While it is closed, calls that wait can be let in one by one: the GPU's work may
// depend on what the application does next. A thread that is already inside (a call made by another call's body) never
// enters twice: Call keeps a depth for each thread.
//
// Nothing here allocates, so a process that is snapshotted while threads wait at the gate resumes correctly: their
// futex wait is restarted and they look again.
#ifndef CUDA_REMOTE_CLIENT_CORE_GATE_H_
#define CUDA_REMOTE_CLIENT_CORE_GATE_H_

#include <atomic>
#include <cstdint>
#include <functional>

#include "proto/threads/mutex.h"

namespace cuda_remote::client {

class Gate {
 public:
  static constexpr unsigned kLanes = 64;

  // A call that waits at the closed gate.
  struct Held {
    bool asks = true;      // it only asks about work or waits for it, and adds none
    uint64_t context = 0;  // the thread's current context, a virtual handle; 0: none
  };

  // Passes if the gate is open. Leave takes the same lane; any number below kLanes.
  bool TryEnter(unsigned lane) {
    lanes_[lane].inside.fetch_add(1, std::memory_order_seq_cst);
    if (!closed_.load(std::memory_order_seq_cst)) return true;
    Leave(lane);
    return false;
  }

  // Passes, after a wait if the gate is closed.
  void Enter(unsigned lane = 0) { Enter(lane, Held()); }
  void Enter(unsigned lane, const Held& held) {
    while (!TryEnter(lane)) {
      if (WaitTurn(lane, held)) return;
    }
  }

  void Leave(unsigned lane = 0) {
    lanes_[lane].inside.fetch_sub(1, std::memory_order_seq_cst);
    if (closed_.load(std::memory_order_seq_cst)) WakeCloser();
  }

  // Lets no new call in. Calls that are inside go on.
  void Close() { closed_.store(1, std::memory_order_seq_cst); }
  // Waits until no call is inside, or `timeout_ms` have passed. Returns how many are. Of a closed gate.
  uint64_t AwaitEmpty(int timeout_ms);
  uint64_t inside() const;

  // Calls `each` for the calls that wait, the first one first. `each` must not use the gate.
  void ForEachHeld(const std::function<void(const Held&)>& each);
  // Lets the first call that waits and that `chosen` is true for into the closed gate. False if there is none.
  bool Admit(const std::function<bool(const Held&)>& chosen);

  void Open();

  bool closed() const { return closed_.load(std::memory_order_acquire); }

 private:
  struct alignas(64) Lane {
    std::atomic<uint32_t> inside{0};
  };
  // On the stack of the thread that waits.
  struct Waiter {
    Held held;
    unsigned lane;
    Waiter* next;
    std::atomic<uint32_t> state;  // a futex word
  };
  static constexpr uint32_t kWaits = 0, kLookAgain = 1, kAdmitted = 2;

  // True: the call was admitted, and counts as inside already. False: the gate was opened.
  bool WaitTurn(unsigned lane, const Held& held);
  void WakeCloser();
  static void End(Waiter* waiter, uint32_t state);

  // Both are futex words.
  std::atomic<uint32_t> closed_{0};
  std::atomic<uint32_t> left_{0};  // changes when a call leaves a closed gate
  Lane lanes_[kLanes];
  Mutex mutex_;  // guards the list, and opening
  Waiter* first_ CR_GUARDED_BY(mutex_) = nullptr;
  Waiter* last_ CR_GUARDED_BY(mutex_) = nullptr;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_GATE_H_
