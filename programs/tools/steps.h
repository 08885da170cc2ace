// SPDX-License-Identifier: Apache-2.0
// How long each step of a tool took, for --times.
#ifndef CUDA_REMOTE_PROGRAMS_TOOLS_STEPS_H_
#define CUDA_REMOTE_PROGRAMS_TOOLS_STEPS_H_

#include <stdio.h>

#include <chrono>
#include <string>

#include "proto/base/clock.h"

namespace cuda_remote::client::tools {

// Says on stderr how long each step took, if that was asked for. Not thread-safe.
class Steps {
 public:
  Steps(const char* tool, bool tell) : tool_(tool), tell_(tell) {}

  // The step that has just ended; it began when the one before ended, or with this object.
  void Done(const char* step) {
    const Moment now = Now();
    if (tell_) fprintf(stderr, "%s: %7.3f s  %s\n", tool_, std::chrono::duration<double>(now - last_).count(), step);
    last_ = now;
  }

  // A part of the step that has just ended.
  void Part(double seconds, const std::string& what) const {
    if (tell_) fprintf(stderr, "%s: %7.3f s      %s\n", tool_, seconds, what.c_str());
  }

 private:
  const char* const tool_;
  const bool tell_;
  Moment last_ = Now();
};

}  // namespace cuda_remote::client::tools

#endif  // CUDA_REMOTE_PROGRAMS_TOOLS_STEPS_H_
