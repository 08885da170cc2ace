// SPDX-License-Identifier: Apache-2.0
// Errors of the client library, which has no abseil. Code outside it has absl::Status (proto/errors converts).
//
// Part of the client library.
#ifndef CUDA_REMOTE_PROTO_BASE_STATUS_H_
#define CUDA_REMOTE_PROTO_BASE_STATUS_H_

#include <errno.h>

#include <optional>
#include <string>
#include <utility>

namespace cuda_remote {

// Success, or one sentence that says what happened, to what, and what to do. As absl::Status without codes.
class [[nodiscard]] Status {
 public:
  // Success.
  Status() = default;

  bool ok() const { return !message_; }
  // The sentence, without a full stop; empty for success.
  const std::string& message() const {
    static const std::string none;
    return message_ ? *message_ : none;
  }

 private:
  friend Status Error(std::string message);
  std::optional<std::string> message_;
};

inline Status OkStatus() { return {}; }

// A failure with this sentence.
inline Status Error(std::string message) {
  Status status;
  status.message_ = std::move(message);
  return status;
}

// "WHAT: " and what errno says.
Status ErrnoError(const std::string& what, int number = errno);

// A value, or why there is none. As absl::StatusOr; reading the value of a failure is a mistake of the caller's.
template <typename T>
class [[nodiscard]] StatusOr {
 public:
  StatusOr(T value) : value_(std::move(value)) {}  // NOLINT(google-explicit-constructor)
  // `status` must be a failure.
  StatusOr(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }

  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return *std::move(value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_BASE_STATUS_H_
