// SPDX-License-Identifier: Apache-2.0
// For calls that are answered in the client: they have no message of their own.
#ifndef CUDA_REMOTE_CLIENT_CUSTOM_CALL_NAMES_H_
#define CUDA_REMOTE_CLIENT_CUSTOM_CALL_NAMES_H_

#include <cstdint>

namespace cuda_remote::client {

// The call id of a CallInfo whose call is never sent.
inline constexpr uint32_t kLocalCall = 0;

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CUSTOM_CALL_NAMES_H_
