// SPDX-License-Identifier: Apache-2.0
// What the client knows to be done, so that asking for it again needs no round trip.
//
// An event is asked for far more often than it is recorded, and a stream is waited for that has long been idle. Once
// the server has said that an event or a stream is done, it stays done until the client itself sends something that
// changes that. So there are counters of such sendings, called stamps here: the answer "done" is kept with the stamp
// from before the question (Object::done_at), and holds for as long as the stamp is the same. "Not done" is never kept.
//
// Counters move after a request has been put into the channel, or in the same step, and before the driver call returns.
// Then an answer that was asked for before the request never counts for it: either it was asked with the old stamp, or
// the counter had moved, and the request stood in the channel, before the question did.
//
// Thread-safe, without locks.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_CLIENT_CORE_COMPLETION_H_
#define CUDA_REMOTE_CLIENT_CORE_COMPLETION_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "proto/frame/handle.h"

namespace cuda_remote::client {

class Completions {
 public:
  // Changes whenever `event` may have been recorded. Events may share a counter, which costs a question at most.
  uint64_t EventStamp(uint64_t event) const {
    // Both counters only rise, so the sum is the same only if both are.
    return any_event_.load(std::memory_order_acquire) + Counter(event).load(std::memory_order_acquire);
  }
  // Changes whenever any stream may have got something to do.
  // `last_marked`: the channel's, which is the number of the last such request that was sent in the ordinary way.
  uint64_t WorkStamp(uint64_t last_marked) const { return last_marked + work_.load(std::memory_order_acquire); }

  // `event` was recorded by a request that is in the channel now.
  void EventRecorded(uint64_t event) { Counter(event).fetch_add(1, std::memory_order_acq_rel); }
  // A request is in the channel that may record any event (a graph's launch).
  void SomeEventsRecorded() { any_event_.fetch_add(1, std::memory_order_acq_rel); }
  // A request is in the channel, unmarked, that may give a stream something to do.
  void WorkSent() { work_.fetch_add(1, std::memory_order_acq_rel); }
  // Another server, whose channel may number its requests in another way: nothing is known, and no stamp comes again.
  void ForgetAll() {
    SomeEventsRecorded();
    work_.fetch_add(kOtherServer, std::memory_order_acq_rel);
  }

 private:
  static constexpr size_t kCounters = 1024;
  // More than the requests of any session.
  static constexpr uint64_t kOtherServer = uint64_t(1) << 44;
  // Events that were made one after the other, maybe for different threads, do not share a cache line.
  static size_t IndexOf(uint64_t event) { return SlotOf(event) * 129 % kCounters; }
  const std::atomic<uint64_t>& Counter(uint64_t event) const { return recorded_[IndexOf(event)]; }
  std::atomic<uint64_t>& Counter(uint64_t event) { return recorded_[IndexOf(event)]; }

  std::atomic<uint64_t> work_{0};
  std::atomic<uint64_t> any_event_{0};
  alignas(64) std::atomic<uint64_t> recorded_[kCounters] = {};
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_COMPLETION_H_
