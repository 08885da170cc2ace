// SPDX-License-Identifier: Apache-2.0
// When the worker executed which request: for a client that asks for a timeline (OpTimeline). Off until then, and a
// request then costs one load more.
//
// Thread-safe: the executor and the threads that wait for the GPU record. Memory grows with what is recorded, up to the
// capacity that was asked for and kMaxEvents.
#ifndef CUDA_REMOTE_SERVER_WORKER_SESSION_TIMELINE_H_
#define CUDA_REMOTE_SERVER_WORKER_SESSION_TIMELINE_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "proto/threads/mutex.h"

namespace cuda_remote::server {

class Timeline {
 public:
  struct Event {
    uint64_t sequence;
    uint64_t start_ns;
    uint64_t duration_ns;
    uint32_t call;
    uint32_t result;
    uint32_t thread;
  };
  // Most events of one recording, whatever the client says: 40 MB.
  static constexpr uint64_t kMaxEvents = 1000000;

  bool on() const { return on_.load(std::memory_order_relaxed); }

  // Forgets everything and records up to `capacity` events from now on.
  void Begin(uint64_t capacity);
  void End() { on_.store(false); }

  // The request `sequence` was worked on in this thread from `start_ns` (NowNs) until now.
  void Add(uint64_t sequence, uint32_t call, uint32_t result, uint64_t start_ns);

  // At most `count` events from number `first` on.
  std::vector<Event> Read(uint64_t first, size_t count) const;
  uint64_t recorded() const;
  uint64_t dropped() const;

 private:
  std::atomic<bool> on_{false};
  mutable Mutex mutex_;
  std::vector<Event> events_ CR_GUARDED_BY(mutex_);
  uint64_t capacity_ CR_GUARDED_BY(mutex_) = 0;
  uint64_t dropped_ CR_GUARDED_BY(mutex_) = 0;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_SESSION_TIMELINE_H_
