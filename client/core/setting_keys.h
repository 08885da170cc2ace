// SPDX-License-Identifier: Apache-2.0
// The keys under which the log keeps the last modification of each kind (Call::Modified).
#ifndef CUDA_REMOTE_CLIENT_CORE_SETTING_KEYS_H_
#define CUDA_REMOTE_CLIENT_CORE_SETTING_KEYS_H_

#include <atomic>
#include <cstdint>

namespace cuda_remote::client {

// The key that tells modifications of one object by one call apart.
inline uint64_t Key(uint64_t a) { return a; }
inline uint64_t Key(uint64_t a, uint64_t b) { return a * 0x9E3779B97F4A7C15u + b; }

// The key of a call that sets something for each place of a list (CUmemAccessDesc): which places those are. Two calls
// whose lists overlap in part are both recorded, in their order, so that the later one counts for what is in both.
template <typename Descriptor>
uint64_t PlacesKey(const Descriptor* list, uint64_t count) {
  uint64_t key = count;
  for (uint64_t i = 0; i < count; ++i)
    key = Key(key, Key(uint64_t(list[i].location.type), uint64_t(list[i].location.id)));
  return key;
}

// For modifications of which every single one counts.
inline uint64_t UniqueKey() {
  static std::atomic<uint64_t> next{uint64_t(1) << 63};
  return next.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_SETTING_KEYS_H_
