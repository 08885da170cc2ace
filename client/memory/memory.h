// SPDX-License-Identifier: Apache-2.0
// Memory of the application: what the session knows of it (known_memory.h), and the parts that give it out, share it
// with the server and keep both sides' bytes alike.
//
// Threads and locks: each part has its own, and says so. What a function here locks, it says.
#ifndef CUDA_REMOTE_CLIENT_MEMORY_MEMORY_H_
#define CUDA_REMOTE_CLIENT_MEMORY_MEMORY_H_

#include <vector>

#include "client/core/connection.h"
#include "client/core/recorded_objects.h"
#include "client/core/server_requests.h"
#include "client/core/settings.h"
#include "client/memory/freed_memory.h"
#include "client/memory/host_arena.h"
#include "client/memory/host_mappings.h"
#include "client/memory/known_memory.h"
#include "client/memory/managed_advice.h"
#include "client/memory/managed_home.h"
#include "client/memory/managed_mirror.h"
#include "client/memory/pinned_heap.h"
#include "client/memory/staging.h"
#include "client/memory/upload_limit.h"
#include "client/memory/virtual_memory_map.h"

namespace cuda_remote::client {

class Memory final : public KnownMemory {
 public:
  // All outlive this. None is used before the session is open.
  Memory(Connection* connection, ServerRequests* requests, const Settings* settings, RecordedObjects* objects)
      : requests_(requests),
        objects_(objects),
        host_mappings_(requests, connection, settings, &host_arena_, &managed_arena_),
        pinned_heap_(&host_arena_, &host_mappings_, requests),
        managed_home_({connection, requests, settings, &managed_arena_, &host_mappings_, &managed_mirror_}),
        staging_(&host_arena_, &host_mappings_) {}

  HostArena& host_arena() { return host_arena_; }
  // That of managed memory alone.
  HostArena& managed_arena() { return managed_arena_; }
  HostMappings& host_mappings() { return host_mappings_; }
  PinnedHeap& pinned_heap() { return pinned_heap_; }
  ManagedMirror& managed_mirror() { return managed_mirror_; }
  ManagedHome& managed_home() { return managed_home_; }
  ManagedAdvice& managed_advice() { return managed_advice_; }
  VirtualMemoryMap& virtual_memory() { return virtual_memory_; }
  Staging& staging() { return staging_; }
  UploadLimit& upload_limit() { return upload_limit_; }

  // Tells the server, in the order of their streams, of frees that it has not heard of: of these blocks, or of all that
  // are kept. Locks the session's objects and this.
  void GiveBack(const std::vector<FreedMemory::Block>& blocks);
  // Whether there were any.
  bool GiveBackFreed();

 private:
  ServerRequests* const requests_;
  RecordedObjects* const objects_;
  HostArena host_arena_;
  HostArena managed_arena_{HostArena::kManagedBase};
  HostMappings host_mappings_;
  PinnedHeap pinned_heap_;
  ManagedMirror managed_mirror_;
  ManagedHome managed_home_;
  ManagedAdvice managed_advice_;
  VirtualMemoryMap virtual_memory_;
  Staging staging_;
  UploadLimit upload_limit_;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_MEMORY_MEMORY_H_
