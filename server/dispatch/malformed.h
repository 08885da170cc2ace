// SPDX-License-Identifier: Apache-2.0
// The result of a handler that was given a request no correct client sends.
#ifndef CUDA_REMOTE_SERVER_DISPATCH_MALFORMED_H_
#define CUDA_REMOTE_SERVER_DISPATCH_MALFORMED_H_

#include <cuda.h>

namespace cuda_remote::server {

// Outside the driver's range of results: the executor must not send it but end the session.
inline constexpr CUresult kMalformedRequest = static_cast<CUresult>(0x7fff0001);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_DISPATCH_MALFORMED_H_
