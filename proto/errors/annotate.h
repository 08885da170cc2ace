// SPDX-License-Identifier: Apache-2.0
// For a caller that knows more of a failure than the function that failed: whom or what it was about.
#ifndef CUDA_REMOTE_PROTO_ERRORS_ANNOTATE_H_
#define CUDA_REMOTE_PROTO_ERRORS_ANNOTATE_H_

#include <string>

#include "absl/status/status.h"

namespace cuda_remote {

// The failure `status`, whose sentence now has `before` in front of it: Annotate("rank 1: ", status).
inline absl::Status Annotate(const std::string& before, const absl::Status& status) {
  return absl::Status(status.code(), before + std::string(status.message()));
}

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_ERRORS_ANNOTATE_H_
