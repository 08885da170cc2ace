// SPDX-License-Identifier: Apache-2.0
// What the application has advised about managed memory (cuMemAdvise, prefetches), page by page, as
// cuMemRangeGetAttribute answers it. What follows from it is in managed_pages.h.
//
// Thread-safe; a lock of its own, under which nothing else is locked: neither `change` nor `look` below may lock
// anything.
#ifndef CUDA_REMOTE_CLIENT_MEMORY_MANAGED_ADVICE_H_
#define CUDA_REMOTE_CLIENT_MEMORY_MANAGED_ADVICE_H_

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>

#include "proto/threads/mutex.h"

namespace cuda_remote::client {

struct Advice {
  // CU_MEM_LOCATION_TYPE_INVALID: none.
  struct Place {
    int type = CU_MEM_LOCATION_TYPE_INVALID;
    int id = 0;
    bool operator==(const Place& other) const { return type == other.type && id == other.id; }
  };
  bool read_mostly = false;
  Place preferred;
  Place last_prefetch;
  std::set<int> accessed_by;  // devices; CU_DEVICE_CPU for the host
  // Whether the host is going to use the memory a lot.
  bool IsForHost() const {
    return accessed_by.count(CU_DEVICE_CPU) != 0 ||
           (preferred.type != CU_MEM_LOCATION_TYPE_INVALID && preferred.type != CU_MEM_LOCATION_TYPE_DEVICE);
  }
};

class ManagedAdvice {
 public:
  // Changes the advice of all pages of [address, address + bytes).
  template <typename Change>
  void Update(uint64_t address, uint64_t bytes, const Change& change) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    const uint64_t start = address & ~(kPage - 1);
    const uint64_t end = (address + bytes + kPage - 1) & ~(kPage - 1);
    SplitLocked(start);
    SplitLocked(end);
    // What has no entry yet gets one, piece by piece between those that are there.
    for (uint64_t at = start; at < end;) {
      auto it = pieces_.lower_bound(at);
      if (it == pieces_.end() || it->first > at) {
        const uint64_t next = it == pieces_.end() ? end : std::min(end, it->first);
        it = pieces_.emplace(at, Piece{next, Advice()}).first;
      }
      change(it->second.advice);
      at = it->second.end;
    }
  }

  // Calls look(begin, end, advice) for every piece of the range, with default advice for pages of which nothing is
  // known.
  template <typename Look>
  void VisitPieces(uint64_t address, uint64_t bytes, const Look& look) const CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    const uint64_t end = address + bytes;
    for (uint64_t at = address; at < end;) {
      auto it = pieces_.upper_bound(at);
      const bool known = it != pieces_.begin() && std::prev(it)->second.end > at;
      uint64_t next = it == pieces_.end() ? end : it->first;
      if (known) next = std::prev(it)->second.end;
      next = std::min(next, end);
      look(at, next, known ? std::prev(it)->second.advice : Advice());
      at = next;
    }
  }
  // The same with look(advice).
  template <typename Look>
  void Visit(uint64_t address, uint64_t bytes, const Look& look) const {
    VisitPieces(address, bytes, [&look](uint64_t, uint64_t, const Advice& advice) { look(advice); });
  }

  // The memory is gone.
  void Forget(uint64_t address, uint64_t bytes) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    const uint64_t end = (address + bytes + kPage - 1) & ~(kPage - 1);
    SplitLocked(address);
    SplitLocked(end);
    pieces_.erase(pieces_.lower_bound(address), pieces_.lower_bound(end));
  }

 private:
  static constexpr uint64_t kPage = 4096;
  struct Piece {
    uint64_t end;
    Advice advice;
  };

  void SplitLocked(uint64_t at) CR_REQUIRES(mutex_) {
    auto it = pieces_.upper_bound(at);
    if (it == pieces_.begin()) return;
    --it;
    if (it->first == at || it->second.end <= at) return;
    pieces_.emplace(at, Piece{it->second.end, it->second.advice});
    it->second.end = at;
  }

  mutable Mutex mutex_;
  std::map<uint64_t, Piece> pieces_ CR_GUARDED_BY(mutex_);
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_MEMORY_MANAGED_ADVICE_H_
