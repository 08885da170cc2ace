// SPDX-License-Identifier: Apache-2.0
#include "server/worker/memory/pending_frees.h"

namespace cuda_remote::server {

void PendingFrees::Collect(bool wait) {
  // What a stream has freed is free in the order of the frees, so one that is not yet speaks for those behind it; and
  // only so many are looked at, since this is done for every allocation.
  constexpr int kMostBusy = 32;
  uint64_t busy_stream = 0;
  uint64_t busy_context = 0;
  int busy = 0;
  for (auto it = all_.begin(); it != all_.end() && busy < kMostBusy;) {
    if (!wait && busy > 0 && it->stream == busy_stream && it->context.id == busy_context) {
      ++busy;
      ++it;
      continue;
    }
    if (MakeCurrent(driver_, it->context) != CUDA_SUCCESS) {
      ++it;
      continue;
    }
    const CUresult state = wait ? driver_.cuEventSynchronize(it->event) : driver_.cuEventQuery(it->event);
    if (state != CUDA_SUCCESS) {
      if (!wait) {
        busy_stream = it->stream;
        busy_context = it->context.id;
        ++busy;
      }
      ++it;
      continue;
    }
    driver_.cuEventDestroy_v2(it->event);
    arena_->Free(it->address);
    it = all_.erase(it);
  }
  contexts_.Restore();
}

void PendingFrees::ForgetContext(uint64_t id, std::vector<uint64_t>* memory) {
  for (auto it = all_.begin(); it != all_.end();) {
    if (it->context.id != id) {
      ++it;
      continue;
    }
    memory->push_back(it->address);
    it = all_.erase(it);
  }
}

}  // namespace cuda_remote::server
