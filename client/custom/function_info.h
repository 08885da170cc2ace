// SPDX-License-Identifier: Apache-2.0
// What the client knows of functions and kernels: parameter layout and attributes, asked for once.
#ifndef CUDA_REMOTE_CLIENT_CUSTOM_FUNCTION_INFO_H_
#define CUDA_REMOTE_CLIENT_CUSTOM_FUNCTION_INFO_H_

#include <cuda.h>

#include <memory>

#include "client/session/call.h"
#include "client/session/objects.h"

namespace cuda_remote::client {

// The facts of a live CUfunction or CUkernel (the driver takes either in a launch). Asks the server the first time.
// CUDA_ERROR_INVALID_HANDLE for anything else. Borrows the function's context; a kernel, which has none, is looked at
// on `device` where the thread has none either.
CUresult FindFunctionInfo(Call& call, uint64_t function, std::shared_ptr<FunctionInfo>* info, int device = 0);

// The same for launches, without a lock if this thread has asked before. *info stays good until it asks for another
// one.
CUresult FindFunctionInfo(Call& call, uint64_t function, const FunctionInfo** info);

// The device of the context that the call is made in. Precondition: there is one.
const Device& CurrentDevice(Call& call);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CUSTOM_FUNCTION_INFO_H_
