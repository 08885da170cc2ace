// SPDX-License-Identifier: Apache-2.0
// Which allocation of managed or pinned memory lies where: pieces of segments. A segment is what the server maps
// (kOpManagedMap, kOpHostMap): a multiple of 2 MiB for one large allocation, or 2 MiB for small ones of the same
// device. Segments may begin at any page. Pure logic; not thread-safe.
#ifndef CUDA_REMOTE_CLIENT_MEMORY_SEGMENT_HEAP_H_
#define CUDA_REMOTE_CLIENT_MEMORY_SEGMENT_HEAP_H_

#include <cstdint>
#include <iterator>
#include <map>

namespace cuda_remote::client {

class SegmentHeap {
 public:
  static constexpr uint64_t kSegment = 2 << 20;
  static constexpr uint64_t kPage = 4096;
  // Smaller allocations share segments.
  static constexpr uint64_t kSmall = 1 << 20;

  struct Segment {
    uint64_t bytes = 0;
    int device = 0;
    uint64_t used = 0;  // bytes of small allocations; a large one's segment is all used
    bool small = false;
  };

  static bool IsSmall(uint64_t bytes) { return bytes < kSmall; }
  static uint64_t RoundUp(uint64_t bytes) {
    const uint64_t unit = IsSmall(bytes) ? kPage : kSegment;
    return (bytes + unit - 1) / unit * unit;
  }

  void Add(uint64_t address, uint64_t bytes, int device, bool small) {
    segments_[address] = {bytes, device, small ? 0 : bytes, small};
    if (small) free_[address] = bytes;
  }

  // A place for a small allocation of so many bytes, rounded up; 0: a segment must be added first.
  uint64_t Take(uint64_t bytes, int device) {
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->second < bytes) continue;
      Segment& segment = SegmentOf(it->first)->second;
      if (segment.device != device) continue;
      const uint64_t address = it->first, rest = it->second - bytes;
      free_.erase(it);
      if (rest != 0) free_[address + bytes] = rest;
      segment.used += bytes;
      return address;
    }
    return 0;
  }

  // Gives back what Take returned. Returns the segment's address if nothing of it is in use any more, else 0.
  uint64_t Give(uint64_t address, uint64_t bytes) {
    const auto segment = SegmentOf(address);
    const uint64_t begin = segment->first, end = begin + segment->second.bytes;
    segment->second.used -= bytes;
    auto next = free_.lower_bound(address);
    // Free parts of neighbouring segments stay apart.
    if (next != free_.end() && next->first == address + bytes && next->first != end) {
      bytes += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin() && address != begin) {
      const auto before = std::prev(next);
      if (before->first + before->second == address) {
        address = before->first;
        bytes += before->second;
        free_.erase(before);
      }
    }
    free_[address] = bytes;
    return segment->second.used == 0 ? begin : 0;
  }

  void Remove(uint64_t segment) {
    free_.erase(segment);
    segments_.erase(segment);
  }

  // The segment that begins at `address`; null if none does.
  Segment* At(uint64_t address) {
    const auto it = segments_.find(address);
    return it == segments_.end() ? nullptr : &it->second;
  }
  // The segment in which the address lies; null if it lies in none.
  const Segment* Holding(uint64_t address) const {
    const auto next = segments_.upper_bound(address);
    if (next == segments_.begin()) return nullptr;
    const auto it = std::prev(next);
    return address - it->first < it->second.bytes ? &it->second : nullptr;
  }
  const std::map<uint64_t, Segment>& segments() const { return segments_; }

 private:
  std::map<uint64_t, Segment>::iterator SegmentOf(uint64_t address) {
    return std::prev(segments_.upper_bound(address));
  }

  std::map<uint64_t, Segment> segments_;
  std::map<uint64_t, uint64_t> free_;  // parts of segments for small allocations: address -> bytes
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_MEMORY_SEGMENT_HEAP_H_
