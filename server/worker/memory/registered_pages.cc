// SPDX-License-Identifier: Apache-2.0
#include "server/worker/memory/registered_pages.h"

#include <sys/auxv.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>

#include "proto/driverabi/job_addresses.h"

namespace cuda_remote::server {
namespace {

// How much the heap may grow.
constexpr uint64_t kHeapRoom = 64 << 20;
constexpr uint64_t kPage = 4096;
constexpr uint64_t kLowest = 1 << 16;
// Programs whose addresses are randomised have their mappings below (the kernel's mmap_base leaves room for the
// randomised stack).
constexpr uint64_t kTop = uint64_t{1} << 47, kTopBytes = uint64_t{16} << 30;

bool Overlap(uint64_t address, uint64_t bytes, uint64_t begin, uint64_t length) {
  return address < begin + length && begin < address + bytes;
}

}  // namespace

bool RegisteredPages::MayLieAt(uint64_t address, uint64_t bytes) {
  if (address < kLowest || bytes > kTop || address > kTop - kTopBytes - bytes) return false;
  // The program's first page has its headers. The heap follows the program.
  const uint64_t program = getauxval(AT_PHDR) & ~(kPage - 1);
  const uint64_t heap_end = std::max(program, reinterpret_cast<uint64_t>(sbrk(0))) + kHeapRoom;
  // From the host arena to the program's reservations, and with it the places of this process's own mappings.
  constexpr uint64_t kJobs = driverabi::kReservationBase + driverabi::kReservationBytes - driverabi::kHostBase;
  const Range taken[] = {{driverabi::kHostBase, kJobs},
                         {driverabi::kArenaBase, driverabi::kArenaBytes},
                         {driverabi::kSnapshotBase, driverabi::kSnapshotBytes},
                         {program, heap_end - program}};
  return std::none_of(std::begin(taken), std::end(taken),
                      [&](const Range& range) { return Overlap(address, bytes, range.address, range.bytes); });
}

bool RegisteredPages::Hold(uint64_t start, uint64_t bytes, bool* own) const {
  const uint64_t first = start & ~(kPage - 1), end = start + bytes;
  auto it = pages_.upper_bound(first);
  if (it == pages_.begin()) return false;
  --it;
  *own = it->second.own;
  for (uint64_t at = first; at < end; ++it) {
    if (it == pages_.end() || it->first > at || it->first + it->second.bytes <= at || it->second.own != *own)
      return false;
    at = it->first + it->second.bytes;
  }
  return true;
}

std::vector<RegisteredPages::Range> RegisteredPages::Take(uint64_t address, uint64_t bytes, uint64_t* own_bytes) {
  std::vector<Range> taken;
  *own_bytes = 0;
  const uint64_t end = address + bytes;
  auto it = pages_.upper_bound(address);
  if (it != pages_.begin()) --it;
  while (it != pages_.end() && it->first < end) {
    const uint64_t begins = it->first, ends = begins + it->second.bytes;
    const Pages pages = it->second;
    const uint64_t from = std::max(begins, address), to = std::min(ends, end);
    if (from >= to) {
      ++it;
      continue;
    }
    it = pages_.erase(it);
    if (begins < from) pages_[begins] = {from - begins, pages.own};
    if (to < ends) pages_[to] = {ends - to, pages.own};
    taken.push_back({from, to - from});
    if (pages.own) *own_bytes += to - from;
  }
  return taken;
}

}  // namespace cuda_remote::server
