// SPDX-License-Identifier: Apache-2.0
#include "server/worker/session/timeline.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "proto/base/clock.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::server {

void Timeline::Begin(uint64_t capacity) {
  MutexLock lock(&mutex_);
  events_.clear();
  events_.shrink_to_fit();
  capacity_ = std::min(capacity, kMaxEvents);
  dropped_ = 0;
  on_.store(true);
}

void Timeline::Add(uint64_t sequence, uint32_t call, uint32_t result, uint64_t start_ns) {
  static thread_local const uint32_t thread = uint32_t(syscall(SYS_gettid));
  const Event event{sequence, start_ns, uint64_t(NowNs()) - start_ns, call, result, thread};
  MutexLock lock(&mutex_);
  if (events_.size() < capacity_) {
    events_.push_back(event);
  } else {
    ++dropped_;
  }
}

std::vector<Timeline::Event> Timeline::Read(uint64_t first, size_t count) const {
  MutexLock lock(&mutex_);
  if (first >= events_.size()) return {};
  const auto begin = events_.begin() + ptrdiff_t(first);
  return std::vector<Event>(begin, begin + ptrdiff_t(std::min<uint64_t>(count, events_.size() - first)));
}

uint64_t Timeline::recorded() const {
  MutexLock lock(&mutex_);
  return events_.size();
}

uint64_t Timeline::dropped() const {
  MutexLock lock(&mutex_);
  return dropped_;
}

}  // namespace cuda_remote::server
