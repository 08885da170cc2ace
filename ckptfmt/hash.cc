// SPDX-License-Identifier: Apache-2.0
#include "ckptfmt/hash.h"

#include <sys/random.h>

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

#include "ckptfmt/hash_avx2.h"

namespace cuda_remote::ckptfmt {
namespace {

bool HasAvx2() {
  static const bool has = __builtin_cpu_supports("avx2") != 0;
  return has;
}

XXH3_state_t* Of(void* state) { return static_cast<XXH3_state_t*>(state); }

}  // namespace

Hash HashOf(std::string_view bytes) {
  if (HasAvx2()) {
    Hash hash;
    avx2::Hash128(bytes.data(), bytes.size(), &hash.low, &hash.high);
    return hash;
  }
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return {hash.low64, hash.high64};
}

Hash KeyedHashOf(std::string_view bytes, std::string_view secret) {
  if (HasAvx2()) {
    Hash hash;
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

uint64_t BlockHashOf(std::string_view bytes) {
  return HasAvx2() ? avx2::Hash64(bytes.data(), bytes.size()) : XXH3_64bits(bytes.data(), bytes.size());
}

Hasher::Hasher() : state_(XXH3_createState(), [](void* state) { XXH3_freeState(Of(state)); }) { Reset(); }

void Hasher::Reset() {
  if (state_) XXH3_128bits_reset(Of(state_.get()));
}

void Hasher::Add(std::string_view bytes) {
  if (!state_) return;
  if (HasAvx2()) {
    avx2::Update128(state_.get(), bytes.data(), bytes.size());
  } else {
    XXH3_128bits_update(Of(state_.get()), bytes.data(), bytes.size());
  }
}

Hash Hasher::Get() const {
  if (!state_) return {};
  const XXH128_hash_t hash = XXH3_128bits_digest(Of(state_.get()));
  return {hash.low64, hash.high64};
}

}  // namespace cuda_remote::ckptfmt
