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
#ifndef CUDA_REMOTE_CLIENT_CORE_MANAGED_HOME_H_
#define CUDA_REMOTE_CLIENT_CORE_MANAGED_HOME_H_

#include <cuda.h>

#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <vector>

#include "client/memory/host_arena.h"
#include "client/memory/managed_mirror.h"
#include "client/memory/managed_pages.h"
#include "client/memory/segment_heap.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::client {

class Session;

class ManagedHome {
 public:
  // Zeroed memory. CUDA_ERROR_NOT_SUPPORTED: not with this server, this kernel or these rights.
  CUresult Allocate(Session* session, uint64_t bytes, int device, uint64_t* address);
  // Waits for the GPU, as natively. `bytes` as in Allocate.
  CUresult Free(Session* session, uint64_t address, uint64_t bytes);
  // Whether it is of Allocate.
  static bool Contains(uint64_t address) { return address >= HostArena::kManagedBase && HostArena::Contains(address); }

  ManagedPages& pages() { return pages_; }
  int file() const { return arena_.fd(); }

  // Gives back what is kept although it is free. Whether there was any.
  bool DropKept(Session* session);
  // For a checkpoint or a move: from now on this process has all contents, and they are ordinary memory.
  CUresult Settle(Session* session);
  // Another server takes over, after Settle: makes it have the memory. On failure all is as before; `undo` goes back to
  // the former server, if something else failed.
  CUresult MoveTo(Session* session);
  void MoveBack();
  // There is no way back to the former server.
  void ForgetFormer();
  // What that server has bytes of its own for, which ManagedMirror is to mirror.
  std::vector<ManagedMirror::Place> Mirrored(Session* session);

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

  bool OnGpuLocked(Session* session) CR_REQUIRES(mutex_);
  CUresult MapOnServer(Session* session, uint64_t address, uint64_t bytes, int device);
  CUresult UnmapOnServer(Session* session, uint64_t address, uint32_t action);
  CUresult AddSegmentLocked(Session* session, uint64_t bytes, int device, bool small, uint64_t* address)
      CR_REQUIRES(mutex_);
  CUresult TakeSegmentLocked(Session* session, uint64_t bytes, int device, bool small, uint64_t* address)
      CR_REQUIRES(mutex_);
  CUresult RemoveSegmentLocked(Session* session, uint64_t address) CR_REQUIRES(mutex_);
  bool DropKeptLocked(Session* session) CR_REQUIRES(mutex_);
  void MoveBackLocked() CR_REQUIRES(mutex_);

  Mutex mutex_;
  Place place_ CR_GUARDED_BY(mutex_) = Place::kUnknown;
  // Of the former server, while there is a way back to it.
  bool moved_ CR_GUARDED_BY(mutex_) = false;
  Place place_before_ CR_GUARDED_BY(mutex_) = Place::kUnknown;
  bool carried_before_ CR_GUARDED_BY(mutex_) = false;
  HostArena arena_{HostArena::kManagedBase};
  SegmentHeap heap_ CR_GUARDED_BY(mutex_);
  ManagedPages pages_;
  std::list<Kept> kept_ CR_GUARDED_BY(mutex_);  // oldest first
  uint64_t kept_bytes_ CR_GUARDED_BY(mutex_) = 0;
  // A segment for small allocations that has none, and stays; 0: there is none.
  uint64_t empty_ CR_GUARDED_BY(mutex_) = 0;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_MANAGED_HOME_H_
