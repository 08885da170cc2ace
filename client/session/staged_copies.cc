// SPDX-License-Identifier: Apache-2.0
#include "client/session/staged_copies.h"

#include <cstring>

namespace cuda_remote::client {

void StagedCopy::Run(void* data) {
  const StagedCopy* const copy = static_cast<const StagedCopy*>(data);
  for (size_t z = 0; z < copy->depth; ++z) {
    for (size_t y = 0; y < copy->height; ++y) {
      memmove(copy->to.address + z * copy->to.slice + y * copy->to.pitch,
              copy->from.address + z * copy->from.slice + y * copy->from.pitch, copy->width);
    }
  }
}

StagedCopy* StagedCopies::Take(size_t bytes) {
  MutexLock lock(&mutex_);
  size_t best = free_.size();
  for (size_t i = 0; i < free_.size(); ++i) {
    if (free_[i]->capacity >= bytes && (best == free_.size() || free_[i]->capacity < free_[best]->capacity)) best = i;
  }
  if (best == free_.size()) return nullptr;
  StagedCopy* const found = free_[best];
  free_.erase(free_.begin() + long(best));
  return found;
}

void StagedCopies::Give(const std::vector<StagedCopy*>& pieces) {
  MutexLock lock(&mutex_);
  free_.insert(free_.end(), pieces.begin(), pieces.end());
}

}  // namespace cuda_remote::client
