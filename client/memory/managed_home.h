// SPDX-License-Identifier: Apache-2.0
// Managed memory on the GPU: what is allocated where (segment_heap.h), in which file (host_arena.h), and who has which
// page (managed_pages.h). docs/memory.md describes it.
//
// Memory has a home on the GPU only where the kernel lets this process watch its own pages (page_faults.h), and all of
// the session's GPUs reach each other's memory. Allocate says when it cannot be had,
// and the caller has other memory for such programs. A job that moves to a server that cannot goes on with host memory
// at the same addresses.
//
// Thread-safe. Takes no lock of the tables (README, "Locks"). Waits for the server, so calls hold none of them.
#ifndef CUDA_REMOTE_CLIENT_MEMORY_MANAGED_HOME_H_
#define CUDA_REMOTE_CLIENT_MEMORY_MANAGED_HOME_H_

#include <cuda.h>

#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <vector>

#include "client/core/connection.h"
#include "client/core/server_requests.h"
#include "client/core/settings.h"
#include "client/memory/host_arena.h"
#include "client/memory/host_mappings.h"
#include "client/memory/managed_mirror.h"
#include "client/memory/managed_pages.h"
#include "client/memory/segment_heap.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::client {

class ManagedHome {
 public:
  // What it needs of the session; all outlive it.
  struct Parts {
    Connection* connection;
    ServerRequests* requests;
    const Settings* settings;
    HostArena* arena;  // for managed memory alone
    HostMappings* mappings;
    ManagedMirror* mirror;
  };
  explicit ManagedHome(const Parts& parts) : parts_(parts), arena_(*parts.arena) {}

  // Zeroed memory. CUDA_ERROR_NOT_SUPPORTED: not with this server, this kernel or these rights.
  CUresult Allocate(uint64_t bytes, int device, uint64_t* address);
  // Waits for the GPU, as natively. `bytes` as in Allocate.
  CUresult Free(uint64_t address, uint64_t bytes);

  ManagedPages& pages() { return pages_; }

  // Gives back what is kept although it is free. Whether there was any.
  bool DropKept();
  // For a checkpoint or a move: from now on this process has all contents, and they are ordinary memory.
  CUresult Settle();
  // Another server takes over, after Settle: makes it have the memory. On failure all is as before; `undo` goes back to
  // the former server, if something else failed.
  CUresult MoveTo();
  void MoveBack();
  // There is no way back to the former server.
  void ForgetFormer();
  // What that server has bytes of its own for, which ManagedMirror is to mirror.
  std::vector<ManagedMirror::Place> Mirrored();

 private:
  enum class Place { kUnknown, kGpu, kHost };
  // Freed segments that stay for a while: how much in all, and the longest.
  static constexpr uint64_t kMostKept = uint64_t{256} << 20;
  static constexpr uint64_t kLongestKept = uint64_t{64} << 20;
  struct Kept {
    uint64_t address;
    uint64_t bytes;
    int device;
  };

  bool OnGpuLocked() CR_REQUIRES(mutex_);
  CUresult MapOnServer(uint64_t address, uint64_t bytes, int device);
  CUresult UnmapOnServer(uint64_t address, uint32_t action);
  CUresult AddSegmentLocked(uint64_t bytes, int device, bool small, uint64_t* address) CR_REQUIRES(mutex_);
  CUresult TakeSegmentLocked(uint64_t bytes, int device, bool small, uint64_t* address) CR_REQUIRES(mutex_);
  CUresult RemoveSegmentLocked(uint64_t address) CR_REQUIRES(mutex_);
  bool DropKeptLocked() CR_REQUIRES(mutex_);
  void MoveBackLocked() CR_REQUIRES(mutex_);

  const Parts parts_;
  HostArena& arena_;
  Mutex mutex_;
  Place place_ CR_GUARDED_BY(mutex_) = Place::kUnknown;
  // Of the former server, while there is a way back to it.
  bool moved_ CR_GUARDED_BY(mutex_) = false;
  Place place_before_ CR_GUARDED_BY(mutex_) = Place::kUnknown;
  bool carried_before_ CR_GUARDED_BY(mutex_) = false;
  SegmentHeap heap_ CR_GUARDED_BY(mutex_);
  ManagedPages pages_;
  std::list<Kept> kept_ CR_GUARDED_BY(mutex_);  // oldest first
  uint64_t kept_bytes_ CR_GUARDED_BY(mutex_) = 0;
  // A segment for small allocations that has none, and stays; 0: there is none.
  uint64_t empty_ CR_GUARDED_BY(mutex_) = 0;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_MEMORY_MANAGED_HOME_H_
