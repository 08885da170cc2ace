// SPDX-License-Identifier: Apache-2.0
// JIT options on the wire: numbers go as they are, log buffers become replies.
#ifndef CUDA_REMOTE_CLIENT_CALLS_JIT_OPTIONS_H_
#define CUDA_REMOTE_CLIENT_CALLS_JIT_OPTIONS_H_

#include <cuda.h>

#include <cstdint>
#include <string_view>
#include <vector>

namespace cuda_remote::client {

// Turns the caller's parallel arrays into wire values. CUDA_ERROR_INVALID_VALUE for missing arrays;
// CUDA_ERROR_NOT_SUPPORTED, with the reason logged under the call's `name`, for an option whose value is memory that we
// do not know how to send.
CUresult PackJitOptions(const char* name, unsigned count, const CUjit_option* options, void* const* values,
                        std::vector<uint32_t>* wire_options, std::vector<uint64_t>* wire_values);

// Puts what the driver wrote into the caller's array of values, and into the log buffers. `given` is that array as the
// caller filled it in, which says where the buffers are and how long; it may be `values` itself.
void UnpackJitOptions(unsigned count, const CUjit_option* options, void* const* given, void** values,
                      const std::vector<uint64_t>& wire_values, std::string_view info_log, std::string_view error_log);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CALLS_JIT_OPTIONS_H_
