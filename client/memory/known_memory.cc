// SPDX-License-Identifier: Apache-2.0
#include "client/memory/known_memory.h"

namespace cuda_remote::client {

void KnownMemory::EraseDeviceRangeLocked(uint64_t address) {
  const auto* const range = device_ranges_.At(address);
  if (!range) return;
  const DeviceRange::Source source = range->value.source;
  if (source == DeviceRange::kStreamOrdered || source == DeviceRange::kPoolImported) {
    pools_.Freed({range->value.device, range->value.pool}, range->bytes);
  }
  device_ranges_.Erase(address);
}

void KnownMemory::Forget(uint64_t address) {
  WriterLock lock(&mutex_);
  if (!freed_.empty()) freed_.Forget(address);
  EraseDeviceRangeLocked(address);
}

}  // namespace cuda_remote::client
