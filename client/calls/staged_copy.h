// SPDX-License-Identifier: Apache-2.0
// Large linear copies of pageable memory by way of buffers that the server shares (client/memory/staging.h).
#ifndef CUDA_REMOTE_CLIENT_CALLS_STAGED_COPY_H_
#define CUDA_REMOTE_CLIENT_CALLS_STAGED_COPY_H_

#include <cuda.h>

#include <cstddef>

#include "client/core/call.h"

namespace cuda_remote::client {

// Both take a call that has entered, and return true if they have done the copy (or failed at it: *result says), false
// if it must go through the channel. They return when the GPU has done it. `stream` is from Call::StreamToWire.
bool StagedCopyToHost(Call& call, void* dst, CUdeviceptr src, size_t bytes, uint64_t stream, CUresult* result);
bool StagedCopyToDevice(Call& call, CUdeviceptr dst, const void* src, size_t bytes, uint64_t stream, CUresult* result);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CALLS_STAGED_COPY_H_
