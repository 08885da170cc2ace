// SPDX-License-Identifier: Apache-2.0
// Where memory is to be that host and GPU use in turn.
//
// In device memory each turn copies it to the device and back. If the host's pages are registered at its address
// instead, kernels reach them over the bus and nothing is copied, which takes less time if they use little of it. Which
// is less depends on the kernels, so both are tried and timed. A turn here is from when the host has handed the memory
// over until it has it again, without what the host does with it.
//
// Who would notice without it: a program in which host and kernels use short memory in turn, such as the row "host and
// kernel in turn, 64 KB" of the bench's stage `managed`. On the device alone it took 1.45 to 2.6 times as long as
// natively, and 1.13 to 1.19 times with this (docs/gpu-results.md).
//
// Not thread-safe.
#ifndef CUDA_REMOTE_SERVER_WORKER_MEMORY_MANAGED_TURNS_H_
#define CUDA_REMOTE_SERVER_WORKER_MEMORY_MANAGED_TURNS_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace cuda_remote::server {

class ManagedTurns {
 public:
  // Turns whose median counts.
  static constexpr size_t kTurns = 16;
  // Turns before the first ones that count: the file is not registered yet, and much else is new.
  static constexpr uint64_t kFirst = 20;
  // How many turns pass between two trials. It doubles with each one that fails: the first ones may, on a machine whose
  // speed changes.
  static constexpr uint64_t kShortestPause = 32, kLongestPause = 1 << 20;
  // A turn on the host that takes so many times as long as on the device is much too long; so many in a row are enough.
  static constexpr uint64_t kMuchLonger = 4, kMuchTooLong = 2;
  // Turns with more work are worth no trial. So much more work than in any of the last turns, and the host does not use
  // the memory in turn any more.
  static constexpr uint64_t kMostWork = 8, kMoreWork = 2;

  // `restless`, for tests: the place changes every few turns, however long they take.
  explicit ManagedTurns(bool restless = false) : restless_(restless), pause_(restless ? 0 : kFirst) {}

  // The host has handed the memory over to a GPU that had nothing to do, and has it again; times in any unit.
  void HandedOver(uint64_t now) {
    begin_ = now;
    has_begun_ = true;
  }
  void CameBack(uint64_t now) {
    EndWork();
    if (!std::exchange(has_begun_, false)) return;
    if (pause_ != 0) {
      --pause_;
      return;
    }
    const uint64_t time = now - begin_;
    slow_ = on_host_ && !restless_ && time > kMuchLonger * on_device_ ? slow_ + 1 : 0;
    if (slow_ == kMuchTooLong) return Fail();
    times_[count_++] = time;
    if (count_ < (restless_ ? 2 : kTurns)) return;
    std::nth_element(times_.begin(), times_.begin() + kTurns / 2, times_.end());
    Judge(times_[kTurns / 2]);
    count_ = 0;
    last_work_ = std::exchange(most_work_, 0);
  }
  // The host uses it in another way, of which the time says nothing.
  void Interrupt() {
    EndWork();
    has_begun_ = false;
  }
  // It comes back after a wait of which the time is not known.
  void ComesLater() {
    if (restless_) return CameBack(0);
    Interrupt();
  }

  // The place that it is to have, from the next time on at which it is handed over.
  bool wants_host() const { return wants_host_; }
  // It is there, or cannot be.
  void Moved(bool on_host) {
    if (on_host != wants_host_) Fail();
    on_host_ = on_host;
    trial_ = on_host;
    count_ = slow_ = postponed_ = 0;
  }

  // Work begins that may use it, which is on the host. Whether the host does not use it in turn any more. Then it is
  // to leave, when nothing uses it: HostIsAway; or the answer changes after much more work: Postpone.
  bool Work() {
    ++work_;
    return is_unused();
  }
  bool is_unused() const { return work_ > std::max({last_work_, most_work_, postponed_}) + kMoreWork; }
  void HostIsAway() { Fail(); }
  void Postpone() {
    postponed_ = 8 * work_;
    next_pause_ = kLongestPause;
  }

 private:
  void EndWork() {
    most_work_ = std::max(most_work_, work_);
    work_ = 0;
  }
  void Judge(uint64_t median) {
    if (restless_) {
      wants_host_ = !on_host_;
    } else if (!on_host_) {
      on_device_ = median;
      wants_host_ = most_work_ <= kMostWork;
    } else if (median > on_device_ + (trial_ ? 0 : on_device_ / 8)) {
      Fail();
    } else if (trial_) {
      trial_ = false;
      next_pause_ = kShortestPause;
    }
  }
  void Fail() {
    wants_host_ = false;
    count_ = slow_ = 0;
    pause_ = restless_ ? 0 : next_pause_;
    next_pause_ = std::min(next_pause_ * 2, kLongestPause);
  }

  bool restless_;
  std::array<uint64_t, kTurns> times_ = {};
  size_t count_ = 0;
  uint64_t begin_ = 0, on_device_ = 0, slow_ = 0;
  // Since the host used it; at most in one of these turns; the same of the turns that counted last.
  uint64_t work_ = 0, most_work_ = 0, last_work_ = 0, postponed_ = 0;
  uint64_t pause_, next_pause_ = kShortestPause;
  bool has_begun_ = false, on_host_ = false, wants_host_ = false, trial_ = false;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MEMORY_MANAGED_TURNS_H_
