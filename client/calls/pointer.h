// SPDX-License-Identifier: Apache-2.0
// Is this pointer on the GPU? For the calls that take pointers of either kind.
#ifndef CUDA_REMOTE_CLIENT_CALLS_POINTER_H_
#define CUDA_REMOTE_CLIENT_CALLS_POINTER_H_

#include <cstdint>

namespace cuda_remote::client {

class Session;

// Whether `address` lies in device memory that the client knows of: an allocation or a module's variable.
bool IsDevicePointer(Session& session, uint64_t address);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CALLS_POINTER_H_
