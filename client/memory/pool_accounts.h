// SPDX-License-Identifier: Apache-2.0
// What the application has taken from which memory pool, and which pool is a device's current one.
//
// The memory of pools comes from the server's arena and not from the driver's pools, so their figures are kept here:
// they are the process's, and stay right over a restart and a move. Memory that the session keeps after a free
// (freed_memory.h) is not used, as the application sees it.
//
// Not thread-safe, but for MaySynchronize: part of KnownMemory, under its lock.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_CLIENT_MEMORY_POOL_ACCOUNTS_H_
#define CUDA_REMOTE_CLIENT_MEMORY_POOL_ACCOUNTS_H_

#include <atomic>
#include <cstdint>
#include <unordered_map>

#include "proto/driverabi/pool_figures.h"

namespace cuda_remote::client {

class PoolAccounts {
 public:
  // Where an allocation comes from: a device, and a pool's virtual handle; 0 is the device's default pool, whether it
  // has a handle or not.
  struct Place {
    int device = 0;
    uint64_t pool = 0;
  };

  // A pool that the application made or imported, and one that turned out to be a device's default.
  void Created(uint64_t pool, int device) { devices_[pool] = {device, pool}; }
  void IsDefault(uint64_t pool, int device) { devices_[pool] = {device, 0}; }
  // The handle is dead. Allocations may outlive their pool; nobody can ask for its figures.
  void Destroyed(uint64_t pool) {
    last_ = nullptr;
    devices_.erase(pool);
    figures_.erase(pool);
    for (auto it = current_.begin(); it != current_.end();) it = it->second == pool ? current_.erase(it) : ++it;
    NoteIdle();
  }

  // From now on allocations on the device that name no pool come from this one.
  void SetCurrent(int device, uint64_t pool) {
    const uint64_t place = PlaceOf(pool, device).pool;
    if (place) {
      current_[device] = place;
    } else {
      current_.erase(device);
    }
  }

  // What `pool` stands for; 0: the current one of `device`.
  Place PlaceOf(uint64_t pool, int device) const {
    if (pool == 0) {
      if (current_.empty()) return {device, 0};
      const auto it = current_.find(device);
      return {device, it == current_.end() ? 0 : it->second};
    }
    const auto it = devices_.find(pool);
    return it == devices_.end() ? Place{device, pool} : it->second;
  }

  driverabi::PoolFigures& FiguresOf(const Place& place) {
    const uint64_t key = KeyOf(place);
    if (!last_ || last_key_ != key) {
      last_ = &figures_[key];
      last_key_ = key;
    }
    return *last_;
  }
  void Allocated(const Place& place, uint64_t bytes) { FiguresOf(place).Allocated(bytes); }
  void Freed(const Place& place, uint64_t bytes) {
    if (place.pool && !devices_.count(place.pool)) return;
    driverabi::PoolFigures& figures = FiguresOf(place);
    figures.Freed(bytes);
    if (figures.releasable()) may_synchronize_.store(true, std::memory_order_relaxed);
  }

  // Whether Synchronized has something to do. Any thread, without the lock.
  bool MaySynchronize() const { return may_synchronize_.load(std::memory_order_relaxed); }
  // The host has waited for a stream, an event or a context.
  void Synchronized() {
    for (auto& [key, figures] : figures_) figures.Synchronized();
    may_synchronize_.store(false, std::memory_order_relaxed);
  }
  // After a change of a pool's threshold.
  void NoteIdle() {
    bool any = false;
    for (const auto& [key, figures] : figures_) any = any || figures.releasable();
    may_synchronize_.store(any, std::memory_order_relaxed);
  }

  // What the device's pools keep for later allocations.
  uint64_t IdleOn(int device) const {
    uint64_t bytes = 0;
    for (const auto& [key, figures] : figures_) {
      const auto it = devices_.find(key);
      if (it == devices_.end() ? key == uint64_t(device) : it->second.device == device) bytes += figures.idle();
    }
    return bytes;
  }

 private:
  // Handles are far above the numbers of devices.
  static uint64_t KeyOf(const Place& place) { return place.pool ? place.pool : uint64_t(place.device); }

  std::unordered_map<uint64_t, Place> devices_;  // by handle; the pool is 0 for a device's default
  std::unordered_map<int, uint64_t> current_;    // by device; only where it is not the default
  std::unordered_map<uint64_t, driverabi::PoolFigures> figures_;
  driverabi::PoolFigures* last_ = nullptr;  // of figures_: most programs use one pool
  uint64_t last_key_ = 0;
  std::atomic<bool> may_synchronize_{false};
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_MEMORY_POOL_ACCOUNTS_H_
