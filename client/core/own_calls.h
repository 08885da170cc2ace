// SPDX-License-Identifier: Apache-2.0
// Driver calls that Call and Session make for themselves. The bodies of such calls, which the application makes, lie
// above the session (client/calls), and use these too where there is more to them than the request.
#ifndef CUDA_REMOTE_CLIENT_CORE_OWN_CALLS_H_
#define CUDA_REMOTE_CLIENT_CORE_OWN_CALLS_H_

#include <cuda.h>

#include <cstdint>

namespace cuda_remote::client {

// Makes a stream in the thread's current context; `flags` are those of cuStreamCreate. *stream is its virtual handle,
// set on success only. Any thread, under none of the session's locks, as all of these.
CUresult CreateStream(unsigned flags, uint64_t* stream);

// Destroys such a stream, without waiting for its work.
CUresult DestroyStream(uint64_t stream);

// The context that belongs to a green context, in *context as a virtual handle; made when it is first asked for.
// CUDA_ERROR_INVALID_CONTEXT if there is no such green context.
CUresult ContextOfGreen(uint64_t green, uint64_t* context);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_OWN_CALLS_H_
