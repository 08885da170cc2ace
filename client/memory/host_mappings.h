// SPDX-License-Identifier: Apache-2.0
// Host memory that the server has too: mapped at the same address, or as bytes of its own.
//
// Threads and locks: as for server_requests.h, but for the functions that are const: these only look.
#ifndef CUDA_REMOTE_CLIENT_MEMORY_HOST_MAPPINGS_H_
#define CUDA_REMOTE_CLIENT_MEMORY_HOST_MAPPINGS_H_

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "client/core/connection.h"
#include "client/core/server_requests.h"
#include "client/core/settings.h"
#include "client/memory/host_arena.h"
#include "client/memory/known_memory.h"
#include "client/memory/managed_mirror.h"
#include "client/memory/shared_pages.h"

namespace cuda_remote::client {

class HostMappings {
 public:
  // All outlive this.
  HostMappings(ServerRequests* requests, const Connection* connection, const Settings* settings, HostArena* arena,
               HostArena* managed_arena)
      : requests_(requests),
        connection_(connection),
        settings_(settings),
        arena_(arena),
        managed_arena_(managed_arena) {}

  bool shared_memory() const { return connection_->shared_memory(); }

  // Makes a piece of the host arena known to the server (its address space and its GPU), and takes it back. Pinned
  // memory: only with shared memory. Managed memory: without shared memory the server has bytes of its own there, zero
  // at first, which ManagedMirror then mirrors.
  CUresult Map(uint64_t address, uint64_t bytes, unsigned flags);
  CUresult MapManaged(uint64_t address, uint64_t bytes, int device);
  CUresult Unmap(uint64_t address);
  // Memory of the server's own at these addresses of the arena, whole pages; zero at first. Also with shared memory.
  CUresult MapOwn(uint64_t address, uint64_t bytes);

  // Memory that the program has registered, at its own addresses. Two registrations may lie on the same page, so pages
  // are mapped and unmapped apart from what is registered there: `pages` are those that no other registration has
  // there. CUDA_ERROR_ALREADY_MAPPED, and nothing has changed, if the server has no room for them at these addresses;
  // other errors are those of its driver's registration.
  struct Pages {
    uint64_t start;
    uint64_t bytes;  // may be 0
  };
  // A server on this machine maps the same pages: `pieces` are what is behind them.
  CUresult RegisterShared(uint64_t start, uint64_t bytes, unsigned flags, const std::vector<PageBacking>& pieces);
  // Memory of the server's own.
  CUresult RegisterOwn(uint64_t start, uint64_t bytes, const Pages& pages);
  // Waits for the GPU, as natively.
  CUresult Unregister(uint64_t start, const Pages& pages);
  // The pages of a registration but for those at either end on which another one lies, too, that `counts`.
  using Ranges = AddressMap<HostRange>;
  static Pages PagesOf(Ranges* ranges, uint64_t start, uint64_t bytes,
                       const std::function<bool(const Ranges::Range&)>& counts);
  // Whether the server has registered memory at the program's own addresses.
  bool IsRegistered(const Ranges::Range& range) const {
    const bool at_its_own = !range.value.on_device || range.value.device == range.start;
    return range.value.registered && !range.value.alias_of && at_its_own && IsReachable(range.value);
  }

  // Whether the server has bytes of its own for this memory, which ManagedMirror mirrors; and whether it reaches
  // it at all, which is at range.device if it is on_device, and at the same address else.
  bool IsMirrored(const HostRange& range) const { return range.on_device && !(shared_memory() && range.shared); }
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
    // Pages of the program's own, and what is registered on them.
    bool pages = false;
    uint64_t registered = 0, registered_bytes = 0;
  };
  CUresult Ask(const Mapping& mapping);

  ServerRequests* const requests_;
  const Connection* const connection_;
  const Settings* const settings_;
  HostArena* const arena_;
  HostArena* const managed_arena_;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_MEMORY_HOST_MAPPINGS_H_
