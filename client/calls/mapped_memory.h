// SPDX-License-Identifier: Apache-2.0
// Host memory that kernels use: pinned memory, and the application's own pages that it registered.
//
// A server on this machine has pinned memory, and registered memory that it can share, at the program's addresses from
// the beginning. Everything else is mirrored from the moment on at which the application wants it
// (client/memory/managed_mirror.h): it asks for the device pointer, allocates or registers it as mapped, gives it to a
// kernel or a fill, or copies it in a graph. It has the same address there, too, unless the server has something else
// where the program has registered memory: then the GPU's address is another one, in the host arena.
#ifndef CUDA_REMOTE_CLIENT_CALLS_MAPPED_MEMORY_H_
#define CUDA_REMOTE_CLIENT_CALLS_MAPPED_MEMORY_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "client/core/call.h"
#include "client/core/session.h"

namespace cuda_remote::client {

// Has a server on this machine share registered memory: its pages are mapped there at the same addresses. `start` is
// where the registration begins, which exists. CUDA_SUCCESS also if its pages cannot be shared; other results are those
// of the server's driver. `call` has entered; its messages are left alone.
CUresult ShareRegistered(Call& call, uint64_t start);

// Makes pinned or registered memory such that the GPU reaches it, if it is not so already; all of the allocation or
// registration that `address` lies in. On success `*device` is where the GPU finds what is at `address`.
// CUDA_ERROR_INVALID_VALUE for other memory. `call` has entered; its messages are left alone.
CUresult MapForDevice(Call& call, uint64_t address, uint64_t* device);

// The same for all such memory whose addresses are among a kernel's parameters. `graph`: they go into one, which may
// run on another server later. Else memory that the server shares is left out: it has that anyway.
CUresult FindParameters(Call& call, const std::string& block, bool graph);
inline CUresult MapParameters(Call& call, const std::string& block, bool graph) {
  Session& session = call.session();
  graph = graph || session.graphs().captures().active();
  if (session.shared_memory() && !session.memory().uses_unshared() && !graph) return CUDA_SUCCESS;
  const bool none = session.memory().host_arena().fd() < 0 && !session.memory().uses_registered();
  return none ? CUDA_SUCCESS : FindParameters(call, block, graph);
}

// Ends it: `start` is where an allocation or registration begins, which still exists. Takes what the GPU has written
// first.
CUresult UnmapFromDevice(Call& call, uint64_t start);

// Where the application has the bytes of which the GPU's address may be another: `address` itself for most.
uint64_t HostAddressOf(Session& session, uint64_t address);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CALLS_MAPPED_MEMORY_H_
