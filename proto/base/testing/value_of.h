// SPDX-License-Identifier: Apache-2.0
// For tests of functions that give a StatusOr or an absl::StatusOr.
#ifndef CUDA_REMOTE_PROTO_BASE_TESTING_VALUE_OF_H_
#define CUDA_REMOTE_PROTO_BASE_TESTING_VALUE_OF_H_

#include <stdexcept>
#include <string>
#include <utility>

namespace cuda_remote {

// The value of `got`. Without one the test fails, with the failure's sentence.
template <typename AnyStatusOr>
auto ValueOf(AnyStatusOr got) {
  if (!got.ok()) throw std::runtime_error(std::string(got.status().message()));
  return *std::move(got);
}

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_BASE_TESTING_VALUE_OF_H_
