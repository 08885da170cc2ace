// SPDX-License-Identifier: Apache-2.0
#include "proto/base/hash_avx2.h"

#include <immintrin.h>

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

namespace cuda_remote::avx2 {
namespace {

// Clears the upper halves of the vector registers at the end of a function. While they are in use, SSE instructions are
// several times slower on many processors, and the caller may be the application. GCC 12 does not see to it here.
struct ClearsUpperHalves {
  ~ClearsUpperHalves() { _mm256_zeroupper(); }
};

}  // namespace

void Hash128(const void* bytes, size_t size, uint64_t* low, uint64_t* high) {
  const ClearsUpperHalves at_end;
  const XXH128_hash_t hash = XXH3_128bits(bytes, size);
  *low = hash.low64;
  *high = hash.high64;
}

void KeyedHash128(const void* bytes, size_t size, const void* secret, size_t secret_size, uint64_t* low,
                  uint64_t* high) {
  const ClearsUpperHalves at_end;
  const XXH128_hash_t hash = XXH3_128bits_withSecret(bytes, size, secret, secret_size);
  *low = hash.low64;
  *high = hash.high64;
}

uint64_t Hash64(const void* bytes, size_t size) {
  const ClearsUpperHalves at_end;
  return XXH3_64bits(bytes, size);
}

void Update128(void* state, const void* bytes, size_t size) {
  const ClearsUpperHalves at_end;
  XXH3_128bits_update(static_cast<XXH3_state_t*>(state), bytes, size);
}

}  // namespace cuda_remote::avx2
