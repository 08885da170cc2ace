// SPDX-License-Identifier: Apache-2.0
// Limits of questions and answers (query.proto).
#ifndef CUDA_REMOTE_PROTO_NVML_LIMITS_H_
#define CUDA_REMOTE_PROTO_NVML_LIMITS_H_

#include <cstddef>

namespace cuda_remote::nvml {

inline constexpr size_t kMaxNameBytes = 80;
inline constexpr size_t kMaxInputBytes = 16u << 10;
inline constexpr size_t kMaxOutputBytes = 32u << 10;
inline constexpr size_t kMaxErrorBytes = 1024;

}  // namespace cuda_remote::nvml

#endif  // CUDA_REMOTE_PROTO_NVML_LIMITS_H_
