// SPDX-License-Identifier: Apache-2.0
// What the client knows of functions and kernels: parameter layout and attributes, asked for once.
#ifndef CUDA_REMOTE_CLIENT_CALLS_FUNCTION_INFO_H_
#define CUDA_REMOTE_CLIENT_CALLS_FUNCTION_INFO_H_

#include <cuda.h>

#include <memory>
#include <string>

#include "client/core/call.h"
#include "client/core/objects.h"

namespace cuda_remote::client {

// The facts of a live CUfunction or CUkernel (the driver takes either in a launch). Asks the server the first time.
// CUDA_ERROR_INVALID_HANDLE for anything else. Borrows the function's context. A kernel is of no context, and has
// attributes on each device: `device` says whose are wanted, -1 that any will do.
CUresult FindFunctionInfo(Call& call, uint64_t function, std::shared_ptr<FunctionInfo>* info, int device = -1);

// Keeps the facts of a function or kernel under a key of other_infos, and drops old ones when there are too many. Under
// RecordedObjects::mutex().
void KeepOtherInfo(Object* object, const std::string& key, std::shared_ptr<FunctionInfo> info);

// The same for launches, without a lock if this thread has asked before. *info stays good until it asks for another
// one.
CUresult FindFunctionInfo(Call& call, uint64_t function, const FunctionInfo** info);

// The device of the context that the call is made in. Precondition: there is one.
const Device& CurrentDevice(Call& call);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CALLS_FUNCTION_INFO_H_
