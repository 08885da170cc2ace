// SPDX-License-Identifier: Apache-2.0
// Code outside the client library has absl::Status; what it shares with the client library gives a Status.
#ifndef CUDA_REMOTE_PROTO_ERRORS_ABSL_STATUS_H_
#define CUDA_REMOTE_PROTO_ERRORS_ABSL_STATUS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/base/status.h"

namespace cuda_remote {

// The same with abseil's type. Failures have no code there, so they get kUnknown.
inline absl::Status ToAbsl(const Status& status) {
  return status.ok() ? absl::OkStatus() : absl::UnknownError(status.message());
}

template <typename T>
absl::StatusOr<T> ToAbsl(StatusOr<T> value) {
  if (!value.ok()) return ToAbsl(value.status());
  return *std::move(value);
}

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_ERRORS_ABSL_STATUS_H_
