// SPDX-License-Identifier: Apache-2.0
// Limits of what cr-server hands to cr-nvml (ask.proto).
#ifndef CUDA_REMOTE_SERVER_NVML_LIMITS_H_
#define CUDA_REMOTE_SERVER_NVML_LIMITS_H_

#include <cstddef>

namespace cuda_remote::server {

inline constexpr size_t kMaxAskedSessions = 256;
inline constexpr size_t kMaxAskedProgram = 80;

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_NVML_LIMITS_H_
