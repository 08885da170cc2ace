// SPDX-License-Identifier: Apache-2.0
// Where memory is to be that host and GPU use in turn.
//
// In device memory each turn copies it to the device and back. If the host's pages are registered at its address
// instead, kernels reach them over the bus and nothing is copied, which takes less time if they use little of it. Which
// is less depends on the kernels, so both are tried and timed. A turn here is from when the host has handed the memory
// over until it has it again, without what the host does with it.
//
// Not thread-safe.
#ifndef CUDA_REMOTE_SERVER_WORKER_MANAGED_TURNS_H_
#define CUDA_REMOTE_SERVER_WORKER_MANAGED_TURNS_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

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
  // So much work in a row without the host, and the memory is not used in turn any more.
  static constexpr uint64_t kWithoutHost = 64;

  // `restless`, for tests: the place changes every few turns, however long they take.
  explicit ManagedTurns(bool restless = false) : restless_(restless), pause_(restless ? 0 : kFirst) {}

  // The host has handed the memory over to a GPU that had nothing to do, and has it again; times in any unit.
  void HandedOver(uint64_t now) {
    begin_ = now;
    has_begun_ = true;
    work_ = 0;
  }
  void CameBack(uint64_t now) {
    work_ = 0;
    if (!has_begun_) return;
    has_begun_ = false;
    if (pause_ != 0) {
      --pause_;
      return;
    }
    times_[count_++] = now - begin_;
    if (count_ < (restless_ ? 2 : kTurns)) return;
    count_ = 0;
    if (restless_) {
      wants_host_ = !on_host_;
      return;
    }
    std::nth_element(times_.begin(), times_.begin() + kTurns / 2, times_.end());
    Judge(times_[kTurns / 2]);
  }
  // The host uses it in another way, of which the time says nothing.
  void Interrupt() {
    has_begun_ = false;
    work_ = 0;
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
    count_ = 0;
  }

  // Work begins that may use it. Returns how often that was since the host used it.
  uint64_t Work() { return ++work_; }
  uint64_t work() const { return work_; }
  // The host does not use it any more.
  void HostIsAway() {
    wants_host_ = false;
    pause_ = restless_ ? 0 : kShortestPause;
  }

 private:
  void Judge(uint64_t median) {
    if (!on_host_) {
      on_device_ = median;
      wants_host_ = true;
    } else if (median > on_device_ + (trial_ ? 0 : on_device_ / 8)) {
      Fail();
    } else if (trial_) {
      trial_ = false;
      next_pause_ = kShortestPause;
    }
  }
  void Fail() {
    wants_host_ = false;
    pause_ = restless_ ? 0 : next_pause_;
    next_pause_ = std::min(next_pause_ * 2, kLongestPause);
  }

  bool restless_;
  std::array<uint64_t, kTurns> times_ = {};
  size_t count_ = 0;
  uint64_t begin_ = 0, on_device_ = 0, work_ = 0;
  uint64_t pause_, next_pause_ = kShortestPause;
  bool has_begun_ = false, on_host_ = false, wants_host_ = false, trial_ = false;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MANAGED_TURNS_H_
