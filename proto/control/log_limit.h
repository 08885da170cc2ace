// SPDX-License-Identifier: Apache-2.0
// Bounds how many log lines one kind of event can cause: what strangers can trigger must not fill the log.
//
// Not thread-safe.
#ifndef CUDA_REMOTE_PROTO_CONTROL_LOG_LIMIT_H_
#define CUDA_REMOTE_PROTO_CONTROL_LOG_LIMIT_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>

#include "proto/base/clock.h"

namespace cuda_remote::control {

class LogLimit {
 public:
  // `burst` lines at once, then one for each `period`.
  explicit LogLimit(unsigned burst = 5, Moment::duration period = std::chrono::seconds(5))
      : burst_(burst), left_(burst), period_(period) {}

  // Whether a line may be written now. *more: what to put behind it, about lines that were left out; often empty.
  bool Allow(std::string* more, Moment now = Now()) {
    more->clear();
    if (now - filled_ >= period_) {
      const auto periods = (now - filled_) / period_;
      left_ = periods >= burst_ ? burst_ : std::min<unsigned>(burst_, left_ + unsigned(periods));
      filled_ = now;
    }
    if (left_ == 0) {
      ++left_out_;
      return false;
    }
    --left_;
    if (left_out_ > 0) *more = " (and " + std::to_string(left_out_) + " more like this that were not logged)";
    left_out_ = 0;
    return true;
  }

 private:
  const unsigned burst_;
  unsigned left_;
  const Moment::duration period_;
  Moment filled_{};
  uint64_t left_out_ = 0;
};

}  // namespace cuda_remote::control

#endif  // CUDA_REMOTE_PROTO_CONTROL_LOG_LIMIT_H_
