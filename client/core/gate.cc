// SPDX-License-Identifier: Apache-2.0
#include "client/core/gate.h"

#include "proto/base/clock.h"
#include "proto/ring/futex.h"

namespace cuda_remote::client {

// Not one moment's picture, and need not be: whoever enters a lane that was seen empty finds the gate closed.
uint64_t Gate::inside() const {
  uint64_t inside = 0;
  for (const Lane& lane : lanes_) inside += lane.inside.load(std::memory_order_seq_cst);
  return inside;
}

uint64_t Gate::AwaitEmpty(int timeout_ms) {
  const int64_t deadline = NowMs() + timeout_ms;
  while (true) {
    const uint32_t left_before = left_.load(std::memory_order_seq_cst);
    const uint64_t now_inside = inside();
    const int64_t left = deadline - NowMs();
    if (now_inside == 0 || left <= 0) return now_inside;
    ring::FutexWait(&left_, left_before, int(left), false);
  }
}

void Gate::ForEachHeld(const std::function<void(const Held&)>& each) {
  MutexLock lock(&mutex_);
  for (const Waiter* waiter = first_; waiter; waiter = waiter->next) each(waiter->held);
}

bool Gate::Admit(const std::function<bool(const Held&)>& chosen) {
  MutexLock lock(&mutex_);
  Waiter* before = nullptr;
  Waiter* waiter = first_;
  while (waiter && !chosen(waiter->held)) {
    before = waiter;
    waiter = waiter->next;
  }
  if (!waiter) return false;
  (before ? before->next : first_) = waiter->next;
  if (last_ == waiter) last_ = before;
  lanes_[waiter->lane].inside.fetch_add(1, std::memory_order_seq_cst);
  End(waiter, kAdmitted);
  return true;
}

void Gate::Open() {
  MutexLock lock(&mutex_);
  closed_.store(0, std::memory_order_seq_cst);
  for (Waiter* waiter = first_; waiter;) {
    Waiter* const next = waiter->next;
    End(waiter, kLookAgain);
    waiter = next;
  }
  first_ = last_ = nullptr;
}

bool Gate::WaitTurn(unsigned lane, const Held& held) {
  Waiter waiter{held, lane, nullptr, {kWaits}};
  {
    MutexLock lock(&mutex_);
    if (!closed_.load(std::memory_order_seq_cst)) return false;
    (last_ ? last_->next : first_) = &waiter;
    last_ = &waiter;
  }
  uint32_t state;
  while ((state = waiter.state.load(std::memory_order_acquire)) == kWaits) {
    ring::FutexWait(&waiter.state, kWaits, -1, false);
  }
  return state == kAdmitted;
}

void Gate::End(Waiter* waiter, uint32_t state) {
  // From the store on the waiter may be gone; waking nobody at its address does no harm.
  std::atomic<uint32_t>* const word = &waiter->state;
  word->store(state, std::memory_order_release);
  ring::FutexWake(word, false);
}

void Gate::WakeCloser() {
  left_.fetch_add(1, std::memory_order_seq_cst);
  ring::FutexWake(&left_, false);
}

}  // namespace cuda_remote::client
