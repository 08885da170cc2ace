// SPDX-License-Identifier: Apache-2.0
#include "server/worker/memory/address_space.h"

#include <algorithm>
#include <iterator>

namespace cuda_remote::server {

void AddressSpace::Insert(uint64_t address, uint64_t bytes) {
  free_[address] = bytes;
  by_size_.emplace(bytes, address);
  free_bytes_ += bytes;
}

void AddressSpace::Erase(std::map<uint64_t, uint64_t>::iterator part) {
  by_size_.erase({part->second, part->first});
  free_bytes_ -= part->second;
  free_.erase(part);
}

uint64_t AddressSpace::Take(uint64_t bytes, uint64_t alignment) {
  if (bytes == 0 || bytes > UINT64_MAX - unit_) return 0;
  bytes = RoundUp(bytes);
  if (alignment < unit_) alignment = unit_;
  for (auto it = by_size_.lower_bound({bytes, 0}); it != by_size_.end(); ++it) {
    const uint64_t start = it->second;
    const uint64_t aligned = (start + alignment - 1) & ~(alignment - 1);
    if (aligned < start || aligned - start > it->first - bytes) continue;
    TakeAt(aligned, bytes);
    return aligned;
  }
  return 0;
}

bool AddressSpace::TakeAt(uint64_t address, uint64_t bytes) {
  if (bytes == 0 || bytes > UINT64_MAX - unit_ || address % unit_ != 0) return false;
  bytes = RoundUp(bytes);
  auto part = free_.upper_bound(address);
  if (part == free_.begin()) return false;
  --part;
  const uint64_t start = part->first;
  const uint64_t length = part->second;
  const uint64_t before = address - start;
  if (before >= length || length - before < bytes) return false;
  Erase(part);
  if (before != 0) Insert(start, before);
  if (length - before != bytes) Insert(address + bytes, length - before - bytes);
  return true;
}

void AddressSpace::Give(uint64_t address, uint64_t bytes) {
  bytes = RoundUp(bytes);
  auto next = free_.lower_bound(address);
  if (next != free_.begin() && MayMergeAt(address)) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == address) {
      address = previous->first;
      bytes += previous->second;
      Erase(previous);
    }
  }
  if (next != free_.end() && next->first == address + bytes && MayMergeAt(next->first)) {
    bytes += next->second;
    Erase(next);
  }
  Insert(address, bytes);
}

void AddressSpace::GiveRest(uint64_t address, uint64_t bytes) {
  const uint64_t end = address + RoundUp(bytes);
  while (address < end) {
    const auto next = free_.upper_bound(address);
    if (next != free_.begin()) {
      const auto part = std::prev(next);
      if (part->second > address - part->first) {
        address = part->first + part->second;
        continue;
      }
    }
    const uint64_t stop = next == free_.end() ? end : std::min(end, next->first);
    Give(address, stop - address);
    address = stop;
  }
}

}  // namespace cuda_remote::server
