// SPDX-License-Identifier: Apache-2.0
// What the session's device addresses mean: allocations, mappings of the application's own, module variables. Also says
// which copies a client may ask for. Not thread-safe: the executor's own.
#ifndef CUDA_REMOTE_SERVER_WORKER_MEMORY_DEVICE_RANGES_H_
#define CUDA_REMOTE_SERVER_WORKER_MEMORY_DEVICE_RANGES_H_

#include <cstdint>
#include <map>

namespace cuda_remote::server {

struct DeviceRange {
  enum Kind { kAllocation, kStreamOrdered, kMapped, kSymbol, kManaged, kImported };
  uint64_t bytes = 0;
  Kind kind = kAllocation;
  int device = 0;
  uint64_t context = 0;  // virtual handle
  uint64_t owner = 0;    // symbol: its module or library; mapping: the physical memory
  uint64_t offset = 0;   // mapping: in the physical memory
  uint64_t pool = 0;     // stream-ordered: the driver's pool that was asked for, if one was
  bool managed = false;  // kManaged, or a __managed__ variable: this process may touch it too
};

class DeviceRanges {
 public:
  void Insert(uint64_t address, const DeviceRange& range) { ranges_[address] = range; }
  void Erase(uint64_t address) { ranges_.erase(address); }

  // The range that begins at `address`; null if none does.
  const DeviceRange* At(uint64_t address) const {
    const auto it = ranges_.find(address);
    return it == ranges_.end() ? nullptr : &it->second;
  }

  // The range that `address` lies in; null if none.
  const DeviceRange* Find(uint64_t address) const {
    auto it = ranges_.upper_bound(address);
    if (it == ranges_.begin()) return nullptr;
    --it;
    return address - it->first < it->second.bytes ? &it->second : nullptr;
  }

  // Whether [address, address + bytes) lies in one range. Adjacent mappings of the application's own count as one, as
  // for the driver.
  bool Contains(uint64_t address, uint64_t bytes) const {
    auto it = ranges_.upper_bound(address);
    if (it == ranges_.begin()) return false;
    --it;
    if (address - it->first >= it->second.bytes) return false;
    uint64_t left = it->second.bytes - (address - it->first);
    while (left < bytes && it->second.kind == DeviceRange::kMapped) {
      const uint64_t end = it->first + it->second.bytes;
      if (++it == ranges_.end() || it->first != end || it->second.kind != DeviceRange::kMapped) return false;
      left += it->second.bytes;
    }
    return bytes <= left;
  }

  const std::map<uint64_t, DeviceRange>& all() const { return ranges_; }

 private:
  std::map<uint64_t, DeviceRange> ranges_;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MEMORY_DEVICE_RANGES_H_
