// SPDX-License-Identifier: Apache-2.0
// Address ranges by start, without overlap: which allocation does a pointer lie in?
//
// Not thread-safe: the lock of what it is a part of guards it.
#ifndef CUDA_REMOTE_CLIENT_MEMORY_ADDRESS_MAP_H_
#define CUDA_REMOTE_CLIENT_MEMORY_ADDRESS_MAP_H_

#include <cstddef>
#include <cstdint>
#include <map>

namespace cuda_remote::client {

template <typename T>
class AddressMap {
 public:
  struct Range {
    uint64_t start;
    uint64_t bytes;
    T value;
    bool Contains(uint64_t address, uint64_t length) const {
      return address >= start && length <= bytes && address - start <= bytes - length;
    }
  };

  void Insert(uint64_t start, uint64_t bytes, T value) { ranges_[start] = Range{start, bytes, std::move(value)}; }
  bool Erase(uint64_t start) { return ranges_.erase(start) != 0; }

  // The range that `address` lies in, null if none. Valid until the next change of the map.
  Range* Find(uint64_t address) {
    auto it = ranges_.upper_bound(address);
    if (it == ranges_.begin()) return nullptr;
    --it;
    // A zero-sized range still owns its start.
    const Range& range = it->second;
    return address - range.start < range.bytes || address == range.start ? &it->second : nullptr;
  }

  // The first range that has a byte of [start, start + bytes), null if none. `bytes` > 0, and they do not wrap around.
  Range* FindIn(uint64_t start, uint64_t bytes) {
    if (Range* const there = Find(start)) return there;
    const auto next = ranges_.upper_bound(start);
    return next != ranges_.end() && next->second.start - start < bytes ? &next->second : nullptr;
  }

  // The range that begins exactly at `start`.
  Range* At(uint64_t start) {
    auto it = ranges_.find(start);
    return it == ranges_.end() ? nullptr : &it->second;
  }

  auto begin() { return ranges_.begin(); }
  auto end() { return ranges_.end(); }
  size_t size() const { return ranges_.size(); }

 private:
  std::map<uint64_t, Range> ranges_;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_MEMORY_ADDRESS_MAP_H_
