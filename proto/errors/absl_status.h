// SPDX-License-Identifier: Apache-2.0
// Code outside the client library has absl::Status; what it shares with the client library gives a Status.
//
// Thread-safe; no state.
#ifndef CUDA_REMOTE_PROTO_ERRORS_ABSL_STATUS_H_
#define CUDA_REMOTE_PROTO_ERRORS_ABSL_STATUS_H_

#include <errno.h>
#include <string.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "proto/base/status.h"

namespace cuda_remote {

// The same as abseil's type. A Status has no code, so failures get kUnknown.
inline absl::Status ToAbsl(const Status& status) {
  return status.ok() ? absl::OkStatus() : absl::UnknownError(status.message());
}

template <typename T>
absl::StatusOr<T> ToAbsl(StatusOr<T> value) {
  if (!value.ok()) return ToAbsl(value.status());
  return *std::move(value);
}

// "WHAT: " and what errno says, with a code that fits. Always a failure; absl::ErrnoToStatus gives a success for errno
// 0, which it may be where a call has done less than it was to do.
inline absl::Status ErrnoStatus(const std::string& what, int number = errno) {
  const absl::StatusCode code = absl::ErrnoToStatusCode(number);
  return absl::Status(code == absl::StatusCode::kOk ? absl::StatusCode::kUnknown : code,
                      absl::StrCat(what, ": ", strerror(number)));
}

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_ERRORS_ABSL_STATUS_H_
