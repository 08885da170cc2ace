// SPDX-License-Identifier: Apache-2.0
// When events completed, also across moves: elapsed times between events of an earlier server and of this one.
//
// Before a possible move the checkpoint notes how long ago each event completed. The session's time line begins at the
// last move: events of the server before lie before its zero.
//
// Thread-safe; each function takes the lock for a look-up only.
#ifndef CUDA_REMOTE_CLIENT_CORE_EVENT_TIMES_H_
#define CUDA_REMOTE_CLIENT_CORE_EVENT_TIMES_H_

#include <cstdint>
#include <unordered_map>

#include "proto/threads/mutex.h"

namespace cuda_remote::client {

class EventTimes {
 public:
  // Forgets what was noted for a move that has not happened.
  void ForgetNoted() CR_EXCLUDES(mutex_);
  // The event completed so many microseconds ago, counted from now.
  void Note(uint64_t event, double microseconds) CR_EXCLUDES(mutex_);

  // The session goes on with another server: what was noted are the times before the move, which is `now_ns`
  // (CLOCK_MONOTONIC).
  void Moved(int64_t now_ns) CR_EXCLUDES(mutex_);
  // The last Moved did not happen after all.
  void MoveBack() CR_EXCLUDES(mutex_);

  // Where an event that completed on an earlier server lies on the time line, in microseconds (negative). False if the
  // event is not known from there.
  bool Before(uint64_t event, double* microseconds) const CR_EXCLUDES(mutex_);
  // The moment `now_ns` (CLOCK_MONOTONIC) on the time line, in microseconds; and this moment.
  double At(int64_t now_ns) const CR_EXCLUDES(mutex_);
  double Now() const CR_EXCLUDES(mutex_);

 private:
  mutable Mutex mutex_;
  // Microseconds before the last move at which events completed; and the same for a move that has not happened yet.
  std::unordered_map<uint64_t, double> ages_ CR_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, double> noted_ CR_GUARDED_BY(mutex_);
  int64_t moved_at_ns_ CR_GUARDED_BY(mutex_) = 0;
  int64_t former_moved_at_ns_ CR_GUARDED_BY(mutex_) = 0;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_EVENT_TIMES_H_
