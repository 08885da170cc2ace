// SPDX-License-Identifier: Apache-2.0
// The application's own virtual memory: the addresses that it has reserved (cuMemAddressReserve), and what is mapped
// there (cuMemMap).
//
// Thread-safe; a lock of its own, under which nothing else is locked.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_CLIENT_MEMORY_VIRTUAL_MEMORY_MAP_H_
#define CUDA_REMOTE_CLIENT_MEMORY_VIRTUAL_MEMORY_MAP_H_

#include <cstdint>
#include <vector>

#include "client/memory/address_map.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::client {

class VirtualMemoryMap {
 public:
  struct Mapping {
    uint64_t start = 0;
    uint64_t bytes = 0;
    uint64_t memory = 0;  // virtual handle of the physical memory
  };

  void Reserve(uint64_t start, uint64_t bytes) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    reservations_.Insert(start, bytes, 0);
  }
  void Free(uint64_t start) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    reservations_.Erase(start);
  }
  // The start of the reservation that holds all of these addresses; 0: there is none.
  uint64_t ReservationOf(uint64_t address, uint64_t bytes) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    const auto* const found = reservations_.Find(address);
    return found && found->Contains(address, bytes) ? found->start : 0;
  }
  // The reservation in which an address lies; leaves the results alone if there is none.
  void FindReservation(uint64_t address, uint64_t* start, uint64_t* bytes) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    const auto* const found = reservations_.Find(address);
    if (!found) return;
    *start = found->start;
    *bytes = found->bytes;
  }

  void Map(const Mapping& mapping) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    mappings_.Insert(mapping.start, mapping.bytes, mapping.memory);
  }
  // The physical memory behind an address, by its virtual handle; 0: nothing is mapped there.
  uint64_t MemoryAt(uint64_t address) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    const auto* const found = mappings_.Find(address);
    return found ? found->value : 0;
  }
  // The mappings that begin in [start, start + bytes).
  std::vector<Mapping> In(uint64_t start, uint64_t bytes) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    return InLocked(start, bytes);
  }
  // The same, and they are gone.
  std::vector<Mapping> Unmap(uint64_t start, uint64_t bytes) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    const std::vector<Mapping> gone = InLocked(start, bytes);
    for (const Mapping& mapping : gone) mappings_.Erase(mapping.start);
    return gone;
  }

 private:
  std::vector<Mapping> InLocked(uint64_t start, uint64_t bytes) CR_REQUIRES(mutex_) {
    std::vector<Mapping> found;
    for (const auto& [at, mapping] : mappings_) {
      if (at >= start && at - start < bytes) found.push_back({at, mapping.bytes, mapping.value});
    }
    return found;
  }

  Mutex mutex_;
  AddressMap<int> reservations_ CR_GUARDED_BY(mutex_);
  AddressMap<uint64_t> mappings_ CR_GUARDED_BY(mutex_);  // with the physical memory's handle
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_MEMORY_VIRTUAL_MEMORY_MAP_H_
