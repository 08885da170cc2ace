// SPDX-License-Identifier: Apache-2.0
#include "proto/base/hash_avx2.h"

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

namespace cuda_remote::avx2 {

void Hash128(const void* bytes, size_t size, uint64_t* low, uint64_t* high) {
  const XXH128_hash_t hash = XXH3_128bits(bytes, size);
  *low = hash.low64;
  *high = hash.high64;
}

void KeyedHash128(const void* bytes, size_t size, const void* secret, size_t secret_size, uint64_t* low,
                  uint64_t* high) {
  const XXH128_hash_t hash = XXH3_128bits_withSecret(bytes, size, secret, secret_size);
  *low = hash.low64;
  *high = hash.high64;
}

uint64_t Hash64(const void* bytes, size_t size) { return XXH3_64bits(bytes, size); }

void Update128(void* state, const void* bytes, size_t size) {
  XXH3_128bits_update(static_cast<XXH3_state_t*>(state), bytes, size);
}

}  // namespace cuda_remote::avx2
