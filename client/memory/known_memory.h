// SPDX-License-Identifier: Apache-2.0
// The memory that the application knows of: which addresses are device memory, and which pinned or registered host
// memory; what it has freed in a stream, kept for that stream's next allocation; and what was taken from which pool.
//
// These share one lock, because a look-up or a change needs several of them in one step. An address may be of the
// device or of the host. A stream-ordered allocation and free moves a block between the freed memory and the ranges,
// and counts it in its pool. What the log records of memory is in recorded_objects.h.
//
// Threads: any. Functions that end in Locked, and those that return a table, need mutex(). The others take it
// themselves, or need none, as they say.
//
// Lock order: after recorded_objects.h, since the end of an object (a context) is the end of memory. A thread that
// holds mutex() may take those that the README names after it, and takes no other lock under it. It holds mutex() for
// look-ups only, and never while it waits for the server. (The exceptions are in checkpoint.cc, while no call is
// inside.)
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_CLIENT_MEMORY_KNOWN_MEMORY_H_
#define CUDA_REMOTE_CLIENT_MEMORY_KNOWN_MEMORY_H_

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "client/core/recorded_objects.h"
#include "client/memory/address_map.h"
#include "client/memory/freed_memory.h"
#include "client/memory/pool_accounts.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::client {

// Which devices have access to memory that the application has mapped itself, a bit for each.
struct MappedAccess {
  uint64_t read = 0;
  uint64_t write = 0;
  void Set(int device, unsigned flags) {
    const uint64_t bit = Bit(device);
    read = flags & CU_MEM_ACCESS_FLAGS_PROT_READ ? read | bit : read & ~bit;
    write = flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? write | bit : write & ~bit;
  }
  // CUmemAccess_flags of one device.
  unsigned Of(int device) const {
    const uint64_t bit = Bit(device);
    return write & bit  ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
           : read & bit ? CU_MEM_ACCESS_FLAGS_PROT_READ
                        : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  }

 private:
  static uint64_t Bit(int device) { return device >= 0 && device < 64 ? uint64_t{1} << device : 0; }
};

// Device memory that the application knows of.
struct DeviceRange {
  enum Source : uint8_t { kAllocation, kStreamOrdered, kGlobal, kMapped, kManaged, kImported, kPoolImported, kGraph };
  Source source = kAllocation;
  int device = 0;
  uint64_t context = 0;       // virtual handle
  uint64_t buffer_id = 0;     // CU_POINTER_ATTRIBUTE_BUFFER_ID
  uint64_t pool = 0;          // stream-ordered, or imported from a pool: virtual handle, 0 for the device's default
  bool managed = false;       // kManaged, or a __managed__ variable: the host uses it too
  bool sync_memops = false;   // CU_POINTER_ATTRIBUTE_SYNC_MEMOPS; of managed memory 1 unless the application sets it
  unsigned handle_types = 0;  // kMapped: CUmemAllocationHandleType that the memory can be exported as
  MappedAccess access;        // kMapped
};

// Pinned host memory.
struct HostRange {
  bool registered = false;  // cuMemHostRegister: the application's own pages
  // With shared memory the server has it at the same address: it lies in the host arena, or its pages are those of a
  // file (client/memory/shared_pages.h).
  bool shared = false;
  bool on_device = false;  // the application uses it from kernels: the GPU reaches it at `device`
  uint64_t device = 0;     // the same address, but for registered memory for which the server has no room there
  uint64_t alias_of = 0;   // these are addresses of the GPU's for registered pages, which begin here
  unsigned flags = 0;
  uint64_t context = 0;  // virtual handle
  int ordinal = 0;       // its device
  uint64_t buffer_id = 0;
  bool sync_memops = false;  // CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, as the application has set it
};

class KnownMemory {
 public:
  SharedMutex& mutex() CR_RETURNS(mutex_) { return mutex_; }

  // Under mutex(), shared to look at them.
  AddressMap<DeviceRange>& device_ranges() CR_REQUIRES_SHARED(mutex_) { return device_ranges_; }
  AddressMap<HostRange>& host_ranges() CR_REQUIRES_SHARED(mutex_) { return host_ranges_; }
  FreedMemory& freed() CR_REQUIRES_SHARED(mutex_) { return freed_; }
  PoolAccounts& pools() CR_REQUIRES_SHARED(mutex_) { return pools_; }

  // For a new range's buffer_id.
  uint64_t NextBufferIdLocked() CR_REQUIRES(mutex_) { return next_buffer_id_++; }
  // The application gets memory of a pool: adds the range, and counts it in the pool.
  void InsertPoolMemoryLocked(uint64_t address, uint64_t bytes, const DeviceRange& range) CR_REQUIRES(mutex_) {
    device_ranges_.Insert(address, bytes, range);
    pools_.Allocated({range.device, range.pool}, bytes);
  }
  // Device memory leaves its hands, of a pool or not. Does nothing where no range begins.
  void EraseDeviceRangeLocked(uint64_t address) CR_REQUIRES(mutex_);

  // The server has dropped this memory, with its context or its module, or the application has freed it.
  void Forget(uint64_t address) CR_EXCLUDES(mutex_);
  // The pool's handle is dead.
  void PoolDestroyed(uint64_t pool) CR_EXCLUDES(mutex_) {
    WriterLock lock(&mutex_);
    pools_.Destroyed(pool);
  }
  // Takes out all that is kept of what the application has freed.
  std::vector<FreedMemory::Block> TakeFreed() CR_EXCLUDES(mutex_) {
    WriterLock lock(&mutex_);
    return freed_.TakeAll();
  }
  // The host has waited for a stream, an event or a context: pools let go of what they keep. Takes the lock if there is
  // anything to do.
  void NoteWaited() CR_EXCLUDES(mutex_) {
    if (!PoolsMaySynchronize()) return;
    WriterLock lock(&mutex_);
    pools_.Synchronized();
  }

  // Whether there has ever been managed memory: what every copy asks first. Without the lock.
  bool uses_managed() const { return uses_managed_.load(std::memory_order_relaxed); }
  void set_uses_managed() { uses_managed_.store(true, std::memory_order_relaxed); }
  // The same of registered memory, and of such that a server on this machine does not share.
  bool uses_registered() const { return uses_registered_.load(std::memory_order_relaxed); }
  bool uses_unshared() const { return uses_unshared_.load(std::memory_order_relaxed); }
  void NoteRegistered(bool shared) {
    uses_registered_.store(true, std::memory_order_relaxed);
    if (!shared) uses_unshared_.store(true, std::memory_order_relaxed);
  }

 private:
  // An atomic flag.
  bool PoolsMaySynchronize() const CR_UNGUARDED { return pools_.MaySynchronize(); }

  // The lock's line changes hands all the time. What the look-ups without it read lies on others.
  alignas(64) SharedMutex mutex_ CR_ACQUIRED_AFTER(&RecordedObjects::mutex_);
  alignas(64) PoolAccounts pools_ CR_GUARDED_BY(mutex_);
  std::atomic<bool> uses_managed_{false}, uses_registered_{false}, uses_unshared_{false};
  AddressMap<DeviceRange> device_ranges_ CR_GUARDED_BY(mutex_);
  AddressMap<HostRange> host_ranges_ CR_GUARDED_BY(mutex_);
  FreedMemory freed_ CR_GUARDED_BY(mutex_);
  uint64_t next_buffer_id_ CR_GUARDED_BY(mutex_) = 1;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_MEMORY_KNOWN_MEMORY_H_
