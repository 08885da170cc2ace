// SPDX-License-Identifier: Apache-2.0
// Memory for gRPC's receive buffers, in processes that carry tunnels.
//
// gRPC allocates each megabyte that it receives and frees it a moment later. By default the C library gives such memory
// back to the system at once, so that every byte costs its share of a page fault and of a page's clearing, which was a
// third of a tunnel's time. Not part of the client library: there the heap is the application's own.
#ifndef CUDA_REMOTE_PROTO_CONTROL_BUFFER_MEMORY_H_
#define CUDA_REMOTE_PROTO_CONTROL_BUFFER_MEMORY_H_

#include <malloc.h>

namespace cuda_remote::control {

// Keeps freed memory for the next allocation, up to some hundred MiB. Call it first in main; cannot fail.
inline void KeepBufferMemory() {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most that glibc takes
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
}

}  // namespace cuda_remote::control

#endif  // CUDA_REMOTE_PROTO_CONTROL_BUFFER_MEMORY_H_
