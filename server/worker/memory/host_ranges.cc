// SPDX-License-Identifier: Apache-2.0
#include "server/worker/memory/host_ranges.h"

#include <algorithm>
#include <iterator>

#include "proto/logging/log.h"

namespace cuda_remote::server {

bool HostRanges::Owns(uint64_t address, uint64_t bytes) const {
  auto it = all_.upper_bound(address);
  if (it == all_.begin()) return false;
  --it;
  const uint64_t offset = address - it->first;
  return offset < it->second.bytes && bytes <= it->second.bytes - offset;
}

bool HostRanges::Overlaps(uint64_t address, uint64_t bytes) const {
  const auto next = all_.lower_bound(address + bytes);
  if (bytes == 0 || next == all_.begin()) return false;
  const auto last = std::prev(next);
  return last->first + last->second.bytes > address;
}

CUresult HostRanges::Register(uint64_t address, const HostRange& range) {
  unsigned flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
  if (range.of_pages) flags |= range.flags & CU_MEMHOSTREGISTER_READ_ONLY;
  return driver_.cuMemHostRegister_v2(reinterpret_cast<void*>(address), range.bytes, flags);
}

void HostRanges::RegisterAll(ContextRef context) {
  if (context.id == 0) return;
  for (auto& [address, range] : all_) {
    if (range.registered_in != 0) continue;
    const CUresult result = Register(address, range);
    // Portable: where another context had it registered and is gone, this one still has it.
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) {
      range.registered_in = context.id;
    } else {
      logging::Warn("cannot register {} pinned bytes: CUDA error {}", range.bytes, int(result));
    }
  }
}

bool HostRanges::AllRegistered() const {
  return std::none_of(all_.begin(), all_.end(), [](const auto& range) { return range.second.registered_in == 0; });
}

void HostRanges::ForgetContext(uint64_t id) {
  for (auto& [address, range] : all_) {
    if (range.registered_in == id) range.registered_in = 0;
  }
}

}  // namespace cuda_remote::server
