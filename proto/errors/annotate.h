// SPDX-License-Identifier: Apache-2.0
// For a caller that knows more of a failure than the function that failed: whom or what it was about.
#ifndef CUDA_REMOTE_PROTO_ERRORS_ANNOTATE_H_
#define CUDA_REMOTE_PROTO_ERRORS_ANNOTATE_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"

namespace cuda_remote {

// `status`, whose sentence now has `before` in front of it: Annotate("rank 1: ", status). Success stays success.
inline absl::Status Annotate(const std::string& before, const absl::Status& status) {
  return absl::Status(status.code(), before + std::string(status.message()));
}

// `status`, whose sentence now has `behind` after it. Success stays success.
inline absl::Status AnnotateBehind(const absl::Status& status, const std::string& behind) {
  return absl::Status(status.code(), std::string(status.message()) + behind);
}

// `status`, of a step of one of `count` processes. If there are several, a failure's sentence begins with `name`.
inline absl::Status AnnotateOneOf(size_t count, const std::string& name, const absl::Status& status) {
  return count > 1 ? Annotate(name + ": ", status) : status;
}

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_ERRORS_ANNOTATE_H_
