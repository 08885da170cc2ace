// SPDX-License-Identifier: Apache-2.0
// Streams into which calls have put work since the gate closed, as far as that is not known to be done.
//
// Thread-safe: calls that leave a closed gate add to it, and the agent's thread asks.
#ifndef CUDA_REMOTE_CLIENT_CORE_ADDED_WORK_H_
#define CUDA_REMOTE_CLIENT_CORE_ADDED_WORK_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "proto/frame/handle.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::client {

class AddedWork {
 public:
  // `stream` as on the wire, made or named in `context`. A default stream counts as its context.
  void Add(uint64_t stream, uint64_t context) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    added_.emplace(KindOf(stream) == Kind::kStream ? stream : context, context);
  }
  // The gate closes.
  void Clear() CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    added_.clear();
  }
  // Of all streams, only these have work.
  void KeepBusy(const std::vector<uint64_t>& busy) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    for (auto it = added_.begin(); it != added_.end();) {
      it = std::find(busy.begin(), busy.end(), it->first) != busy.end() ? std::next(it) : added_.erase(it);
    }
  }
  // Whether a stream of the context is among them.
  bool In(uint64_t context) const CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    return std::any_of(added_.begin(), added_.end(), [&](const auto& one) { return one.second == context; });
  }

 private:
  mutable Mutex mutex_;
  std::map<uint64_t, uint64_t> added_ CR_GUARDED_BY(mutex_);  // stream (or context): context
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_ADDED_WORK_H_
