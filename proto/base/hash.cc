// SPDX-License-Identifier: Apache-2.0
#include "proto/base/hash.h"

#include <sys/random.h>

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

#include "proto/base/hash_avx2.h"
#include "proto/base/text.h"

namespace cuda_remote {
namespace {

bool HasAvx2() {
  static const bool has = __builtin_cpu_supports("avx2") != 0;
  return has;
}

XXH3_state_t* Of(unsigned char* state) { return reinterpret_cast<XXH3_state_t*>(state); }
const XXH3_state_t* Of(const unsigned char* state) { return reinterpret_cast<const XXH3_state_t*>(state); }

}  // namespace

Hash128 HashOf(std::string_view bytes) {
  if (HasAvx2()) {
    Hash128 hash;
    avx2::Hash128(bytes.data(), bytes.size(), &hash.low, &hash.high);
    return hash;
  }
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return {hash.low64, hash.high64};
}

uint64_t Hash64Of(std::string_view bytes) {
  return HasAvx2() ? avx2::Hash64(bytes.data(), bytes.size()) : XXH3_64bits(bytes.data(), bytes.size());
}

Hash128 KeyedHashOf(std::string_view bytes, std::string_view secret) {
  if (HasAvx2()) {
    Hash128 hash;
    avx2::KeyedHash128(bytes.data(), bytes.size(), secret.data(), secret.size(), &hash.low, &hash.high);
    return hash;
  }
  const XXH128_hash_t hash = XXH3_128bits_withSecret(bytes.data(), bytes.size(), secret.data(), secret.size());
  return {hash.low64, hash.high64};
}

std::string NewSecret() {
  std::string secret(kSecretBytes, '\0');
  if (getrandom(secret.data(), secret.size(), 0) != ssize_t(secret.size())) secret.clear();
  return secret;
}

std::string ToBytes(const Hash128& hash) {
  std::string bytes;
  for (const uint64_t half : {hash.high, hash.low}) {
    for (int shift = 56; shift >= 0; shift -= 8) bytes += char(half >> shift);
  }
  return bytes;
}

std::string ToHex(const Hash128& hash) { return HexBytes(ToBytes(hash)); }

bool FromBytes(std::string_view bytes, Hash128* hash) {
  if (bytes.size() != 16) return false;
  uint64_t halves[2] = {};
  for (size_t i = 0; i < 16; ++i) halves[i / 8] = halves[i / 8] << 8 | uint8_t(bytes[i]);
  *hash = {halves[1], halves[0]};
  return true;
}

void Hasher::Reset() {
  static_assert(sizeof(XXH3_state_t) <= sizeof(state_) && alignof(XXH3_state_t) <= 64);
  XXH3_128bits_reset(Of(state_));
}

void Hasher::Add(std::string_view bytes) {
  if (HasAvx2()) {
    avx2::Update128(state_, bytes.data(), bytes.size());
  } else {
    XXH3_128bits_update(Of(state_), bytes.data(), bytes.size());
  }
}

Hash128 Hasher::Get() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(Of(state_));
  return {hash.low64, hash.high64};
}

// Both lengths have the same state (xxhash.h).
uint64_t Hasher::Get64() const { return XXH3_64bits_digest(Of(state_)); }

}  // namespace cuda_remote
