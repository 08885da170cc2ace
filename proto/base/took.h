// SPDX-License-Identifier: Apache-2.0
// For the time in which some functions still give a bool and a text.
//
// Part of the client library.
#ifndef CUDA_REMOTE_PROTO_BASE_TOOK_H_
#define CUDA_REMOTE_PROTO_BASE_TOOK_H_

#include <string>
#include <utility>

namespace cuda_remote {

// Whether `status` is a success; its sentence goes to *error if it is not.
template <typename AnyStatus>
bool Took(const AnyStatus& status, std::string* error) {
  if (!status.ok()) *error = std::string(status.message());
  return status.ok();
}

// The same, with the value going to *value.
template <typename AnyStatusOr, typename T>
bool Took(AnyStatusOr got, T* value, std::string* error) {
  if (!got.ok()) return Took(got.status(), error);
  *value = *std::move(got);
  return true;
}

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_BASE_TOOK_H_
