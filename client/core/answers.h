// SPDX-License-Identifier: Apache-2.0
// Answers that stay true, so that the same question needs no round trip.
//
// Frameworks ask the same things before every launch: a limit, how many blocks of a kernel fit. Such an answer holds
// until one of the objects in the question dies or a setting is changed, which only this process does; either forgets
// all answers. A question is the request's bytes; what "yes" and no more would answer has an empty answer (launches
// that the driver has accepted once, client/calls/launch.cc).
//
// Thread-safe. This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_CLIENT_CORE_ANSWERS_H_
#define CUDA_REMOTE_CLIENT_CORE_ANSWERS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "proto/frame/handle.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::client {

// Whether questions whose answers are kept name objects of this kind, so that the death of one matters.
inline bool AnswersName(Kind kind) {
  return kind == Kind::kContext || kind == Kind::kStream || kind == Kind::kModule || kind == Kind::kLibrary ||
         kind == Kind::kFunction || kind == Kind::kKernel;
}

class Answers {
 public:
  // To be taken before a question is asked: what is forgotten meanwhile must not come back with its answer.
  uint64_t stamp() const { return stamp_.load(std::memory_order_acquire); }

  // Whether the answer is known; *answer is it then. `answer` may be null.
  bool Find(const std::string& question, std::string* answer) const {
    MutexLock lock(&mutex_);
    const auto found = answers_.find(question);
    if (found == answers_.end()) return false;
    if (answer) *answer = found->second;
    return true;
  }

  // Keeps an answer to a question that was asked at `stamp`.
  void Keep(uint64_t stamp, const std::string& question, const std::string& answer) {
    MutexLock lock(&mutex_);
    if (stamp != stamp_.load(std::memory_order_relaxed)) return;
    // A program that never asks the same twice must not grow for it.
    if (answers_.size() >= kMost) answers_.clear();
    answers_[question] = answer;
  }

  // After an object died or a setting was changed, by a request that has been answered; and when a call failed: the
  // context may be broken, and then every question has another answer.
  void Forget() {
    MutexLock lock(&mutex_);
    stamp_.fetch_add(1, std::memory_order_acq_rel);
    if (!answers_.empty()) answers_.clear();
  }

 private:
  static constexpr size_t kMost = 16384;

  mutable Mutex mutex_;
  std::atomic<uint64_t> stamp_{0};
  std::unordered_map<std::string, std::string> answers_ CR_GUARDED_BY(mutex_);
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_ANSWERS_H_
