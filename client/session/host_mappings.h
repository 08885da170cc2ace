// SPDX-License-Identifier: Apache-2.0
// Host memory that the server has too: mapped at the same address, or as bytes of its own.
//
// Threads and locks: as for server_requests.h, but for the functions that are const: these only look.
#ifndef CUDA_REMOTE_CLIENT_SESSION_HOST_MAPPINGS_H_
#define CUDA_REMOTE_CLIENT_SESSION_HOST_MAPPINGS_H_

#include <cuda.h>

#include <cstdint>

#include "client/session/connection.h"
#include "client/session/host_arena.h"
#include "client/session/known_memory.h"
#include "client/session/managed_home.h"
#include "client/session/managed_mirror.h"
#include "client/session/server_requests.h"
#include "client/session/settings.h"

namespace cuda_remote::client {

class HostMappings {
 public:
  // All outlive this.
  HostMappings(ServerRequests* requests, const Connection* connection, const Settings* settings, HostArena* arena,
               ManagedHome* managed_home)
      : requests_(requests), connection_(connection), settings_(settings), arena_(arena), managed_home_(managed_home) {}

  // Makes a piece of the host arena known to the server (its address space and its GPU), and takes it back. Pinned
  // memory: only with shared memory. Managed memory: without shared memory the server has bytes of its own there, zero
  // at first, which ManagedMirror then mirrors.
  CUresult Map(uint64_t address, uint64_t bytes, unsigned flags);
  CUresult MapManaged(uint64_t address, uint64_t bytes, int device);
  CUresult Unmap(uint64_t address);
  // Memory of the server's own at these addresses of the arena, whole pages; zero at first. Also with shared memory.
  CUresult MapOwn(uint64_t address, uint64_t bytes);
  // Has a server on this machine map registered pages that can be shared (range.sharing is not kNone) at range.device.
  // `start` and `bytes` are the registration's.
  CUresult MapRegistered(uint64_t start, uint64_t bytes, const HostRange& range);

  // Whether the server has bytes of its own for this memory, which ManagedMirror mirrors; and whether it reaches
  // it at all, which is at range.device if it is on_device, and at the same address else.
  bool IsMirrored(const HostRange& range) const {
    const bool can_share = !range.registered || range.sharing != HostRange::kNone;
    return range.on_device && !(shared_memory() && can_share);
  }
  bool IsReachable(const HostRange& range) const { return (range.shared && shared_memory()) || range.on_device; }
  // For mirrored memory of `bytes` at `start`: who writes to it here.
  ManagedMirror::Writers WritersOf(uint64_t start, uint64_t bytes, const HostRange& range) const;

 private:
  // What the server is asked for. `fd` is the file to map at `offset`, -1: bytes of the server's own.
  struct Mapping {
    uint64_t address, bytes;  // whole pages
    int fd;
    uint64_t offset;
    unsigned flags;
    bool managed;
    int device;
  };
  CUresult Ask(const Mapping& mapping);
  bool shared_memory() const { return connection_->channel().welcome().shared_memory; }

  ServerRequests* const requests_;
  const Connection* const connection_;
  const Settings* const settings_;
  HostArena* const arena_;
  ManagedHome* const managed_home_;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_SESSION_HOST_MAPPINGS_H_
