// SPDX-License-Identifier: Apache-2.0
// Pinned host memory that the server can see: one memfd, mapped at the same fixed addresses in client and worker.
//
// cuMemHostAlloc takes page-granular pieces of the arena. Because the worker maps the same file at the same address and
// registers it with the driver, a copy from or to pinned memory needs only addresses on the wire, runs at the GPU's
// full speed, and a kernel may use the host pointer itself, as natively. Without shared memory (a remote server) the
// same pieces are ordinary memory.
//
// Thread-safe. The memfd and its mapping are part of a snapshot of the process; after a restart the client sends the
// same memfd to the new worker.
#ifndef CUDA_REMOTE_CLIENT_MEMORY_HOST_ARENA_H_
#define CUDA_REMOTE_CLIENT_MEMORY_HOST_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <map>

#include "proto/driverabi/job_addresses.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::client {

class HostArena {
 public:
  // Where the arena begins.
  static constexpr uint64_t kBase = driverabi::kHostBase;
  // The upper half is for managed memory whose home is the GPU, with a file of its own (managed_home.h).
  static constexpr uint64_t kManagedBase = driverabi::kManagedBase;
  // Most memory of either kind that one process can have.
  static constexpr uint64_t kMaxBytes = driverabi::kHostBytes;
  static constexpr uint64_t kPage = 4096;

  // `base`: kBase or kManagedBase.
  explicit HostArena(uint64_t base = kBase) : base_(base) {}

  // Zeroed memory of at least `bytes`, page-aligned; null if there is none left. Much of it is refused if the machine
  // does not have that much to give: a server pins it, which takes all pages at once. `replaces`: other memory goes as
  // this is filled, so the machine need not have more.
  void* Allocate(size_t bytes, bool replaces = false);
  // A child made by fork will not have the pages: as natively, it has no managed memory. Allocate does so for all of
  // the managed arena. The mapping stays so, across checkpoints and restarts too.
  static void KeepFromChildren(void* memory, size_t bytes);
  // Gives back what Allocate returned. The pages are released at once.
  void Free(void* address, size_t bytes);

  // The file behind the arena, -1 before the first allocation.
  int fd() const { return fd_; }
  // Offset of an arena address in that file.
  static uint64_t OffsetOf(uint64_t address) { return address - (address < kManagedBase ? kBase : kManagedBase); }
  static uint64_t PageOf(uint64_t address) { return address & ~(kPage - 1); }
  // Whether it is an address of managed memory's own arena, or of either.
  static bool IsManaged(uint64_t address) { return address >= kManagedBase && Contains(address); }
  static bool Contains(uint64_t address) { return address >= kBase && address < kManagedBase + kMaxBytes; }
  static uint64_t RoundUp(uint64_t bytes) { return (bytes + kPage - 1) & ~(kPage - 1); }

 private:
  const uint64_t base_;
  Mutex mutex_;
  int fd_ = -1;
  uint64_t end_ CR_GUARDED_BY(mutex_) = 0;                   // bytes of the file in use, and its size
  std::map<uint64_t, uint64_t> free_ CR_GUARDED_BY(mutex_);  // offset -> bytes, never adjacent
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_MEMORY_HOST_ARENA_H_
