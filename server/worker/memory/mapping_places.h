// SPDX-License-Identifier: Apache-2.0
// Gives the mappings of this process addresses of their own, away from the driver's blocks for variables and code.
//
// The driver places such a block where the address space has room when it needs one, in the region in which the kernel
// places all mappings. libcuda itself maps much memory there, from several threads and in an order that is not the same
// in every process, so a block could come to lie elsewhere after a restart. Therefore this library defines mmap, mmap64
// and munmap, and a program that contains and exports them places all mappings for which the caller gives no address:
// its own, and those of libraries that it loads, of which the driver is one. Reservations (PROT_NONE) are apart from
// other mappings: a driver makes fewer of them, in an order that the program's calls give, and what must keep its
// address lies in some, such as the handles of graphs that kernels launch.
//
// Placement is best-fit, and what is unmapped is used again, so the same calls give the same addresses. A caller who
// chooses the address, or wants large pages or the lowest 2 GiB, deals with the kernel. So does everybody where these
// addresses are used up.
//
// libc's own calls (stacks of threads, malloc's large blocks, shared objects that are loaded) do not come here.
#ifndef CUDA_REMOTE_SERVER_WORKER_MEMORY_MAPPING_PLACES_H_
#define CUDA_REMOTE_SERVER_WORKER_MEMORY_MAPPING_PLACES_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

#include "proto/threads/mutex.h"
#include "server/worker/memory/address_space.h"

namespace cuda_remote::server {

struct AddressRange {
  uint64_t begin;
  uint64_t bytes;
};

// Between the addresses that memory of jobs can have (docs/memory.md). They are below those that the kernel gives in
// any of its layouts, so that no program has memory of its own there.
inline constexpr AddressRange kMappingPlaces = {0x240000000000, uint64_t{1} << 42};
inline constexpr AddressRange kReservationPlaces = {0x280000000000, uint64_t{1} << 41};

// Where a process's mappings go. Thread-safe.
class MappingPlaces {
 public:
  MappingPlaces(AddressRange mappings, AddressRange reservations);

  // As mmap and munmap.
  void* Map(void* address, size_t bytes, int protection, int flags, int fd, off_t offset);
  int Unmap(void* address, size_t bytes);

 private:
  friend void KeepMappingsApart();
  struct Part {
    explicit Part(AddressRange range);
    const AddressRange range;
    Mutex mutex;
    AddressSpace free CR_GUARDED_BY(mutex);
  };
  static uint64_t Take(Part* part, size_t bytes);
  static void Give(Part* part, uint64_t address, uint64_t bytes);
  // Around fork, so that the child finds no mutex that a thread of the parent held.
  void LockAll() CR_UNGUARDED;
  void UnlockAll() CR_UNGUARDED;

  Part mappings_;
  Part reservations_;
};

// From now on mmap and munmap of this program place mappings so. Once, before the driver is loaded. A child made by
// fork does the same.
void KeepMappingsApart();

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MEMORY_MAPPING_PLACES_H_
