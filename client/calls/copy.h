// SPDX-License-Identifier: Apache-2.0
// Linear copies between host and device, in the pieces that the channel likes.
#ifndef CUDA_REMOTE_CLIENT_CALLS_COPY_H_
#define CUDA_REMOTE_CLIENT_CALLS_COPY_H_

#include <cuda.h>

#include <cstddef>

#include "client/core/call.h"

namespace cuda_remote::client {

// Both take a call that has entered. `stream` is from Call::StreamToWire. `blocking` says whether the driver call may
// return before the copy is done: a copy that must go through the channel's own buffers is finished with the host
// memory when these return, whatever it says.
CUresult CopyToDevice(Call& call, CUdeviceptr dst, const void* src, size_t bytes, uint64_t stream, bool blocking);
CUresult CopyToHost(Call& call, void* dst, CUdeviceptr src, size_t bytes, uint64_t stream, bool blocking);

// Waits until all work in `stream` before this moment is done.
CUresult WaitForStream(Call& call, uint64_t stream);

// Whether `address` lies in an allocation that ends before [address, address + bytes) does.
bool LeavesAllocation(Session& session, CUdeviceptr address, size_t bytes);

// Whether the application knows of no memory that holds all of [address, address + bytes), though it must: an
// allocation or pinned memory ends before, or the address is the GPU's (`of_gpu`), and one that only allocations have.
// Neighbouring mappings of the application's own count as one. The variables of modules may be unknown here: the server
// looks at those.
bool LeavesMemory(Session& session, uint64_t address, uint64_t bytes, bool of_gpu);

// Whether the server reaches all of [address, address + bytes); `*device` is then where.
bool IsSharedHostMemory(Session& session, const void* address, size_t bytes, uint64_t* device);

// Whether a driver call's stream is the legacy default one, which batches of copies are not for.
inline bool IsLegacyStream(CUstream stream, bool per_thread) {
  return stream == CU_STREAM_LEGACY || (!stream && !per_thread);
}

// Host memory is about to be read for a copy that stands behind a host function in a stream: that function may still
// have to write it. Waits for `stream` if any host function is outstanding.
CUresult SettleHostFunctions(Call& call, uint64_t stream);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CALLS_COPY_H_
