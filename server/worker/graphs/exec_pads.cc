// SPDX-License-Identifier: Apache-2.0
#include "server/worker/graphs/exec_pads.h"

#include <algorithm>
#include <iterator>

namespace cuda_remote::server {
namespace {

// What the driver reserves for handles: another one that is farther away will not lead to the right one.
constexpr uint64_t kReserved = 64 << 20;

bool IsNear(uint64_t a, uint64_t b) { return std::max(a, b) - std::min(a, b) < kReserved; }

}  // namespace

uint64_t ExecPads::MakeAt(uint64_t wanted, uint64_t context, const std::function<uint64_t()>& make,
                          const Destroy& destroy) {
  if (const auto pad = pads_.find(wanted); pad != pads_.end()) {
    destroy(pad->first);
    pads_.erase(pad);
  }
  uint64_t handle = make();
  while (handle != 0 && handle != wanted && IsNear(handle, wanted) && pads_.size() < kMost) {
    pads_[handle] = context;
    handle = make();
  }
  // The replay has failed: nobody needs them.
  if (handle != wanted) Clear(destroy);
  return handle;
}

void ExecPads::Clear(const Destroy& destroy) {
  for (const auto& [handle, context] : pads_) destroy(handle);
  pads_.clear();
}

void ExecPads::Forget(uint64_t context) {
  for (auto it = pads_.begin(); it != pads_.end();) it = it->second == context ? pads_.erase(it) : std::next(it);
}

}  // namespace cuda_remote::server
