// What the client knows of functions and kernels: parameter layout and attributes, asked for once.
#ifndef CUDA_REMOTE_CLIENT_CUSTOM_FUNCTION_INFO_H_
#define CUDA_REMOTE_CLIENT_CUSTOM_FUNCTION_INFO_H_

#include <cuda.h>

#include <memory>

#include "client/session/call.h"
#include "client/session/objects.h"

namespace cuda_remote::client {

// The facts of a live CUfunction or CUkernel (the driver takes either in a launch). Asks the server the first time.
// CUDA_ERROR_INVALID_HANDLE for anything else.
CUresult FindFunctionInfo(Call& call, uint64_t function, std::shared_ptr<FunctionInfo>* info);

// The device of the calling thread's current context. Precondition: call.Enter() found one.
const Device& CurrentDevice(Call& call);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CUSTOM_FUNCTION_INFO_H_
