// SPDX-License-Identifier: Apache-2.0
#include "client/core/event_times.h"

#include "proto/base/clock.h"

namespace cuda_remote::client {

void EventTimes::ForgetNoted() {
  MutexLock lock(&mutex_);
  noted_.clear();
}

void EventTimes::Note(uint64_t event, double microseconds) {
  MutexLock lock(&mutex_);
  noted_[event] = microseconds;
}

void EventTimes::Moved(int64_t now_ns) {
  MutexLock lock(&mutex_);
  ages_.swap(noted_);
  former_moved_at_ns_ = moved_at_ns_;
  moved_at_ns_ = now_ns;
}

void EventTimes::MoveBack() {
  MutexLock lock(&mutex_);
  ages_.swap(noted_);
  moved_at_ns_ = former_moved_at_ns_;
}

bool EventTimes::Before(uint64_t event, double* microseconds) const {
  MutexLock lock(&mutex_);
  const auto it = ages_.find(event);
  if (it == ages_.end()) return false;
  *microseconds = -it->second;
  return true;
}

double EventTimes::At(int64_t now_ns) const {
  MutexLock lock(&mutex_);
  return double(now_ns - moved_at_ns_) / 1000;
}

double EventTimes::Now() const { return At(NowNs()); }

}  // namespace cuda_remote::client
