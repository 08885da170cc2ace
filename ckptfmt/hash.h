// Checksums of an image's files: XXH3-128, and XXH3-64 for blocks of a file. They find damage, not forgery.
#ifndef CUDA_REMOTE_CKPTFMT_HASH_H_
#define CUDA_REMOTE_CKPTFMT_HASH_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

namespace cuda_remote::ckptfmt {

struct Hash {
  uint64_t low = 0;
  uint64_t high = 0;
};
inline bool operator==(const Hash& a, const Hash& b) { return a.low == b.low && a.high == b.high; }
inline bool operator!=(const Hash& a, const Hash& b) { return !(a == b); }

struct HashHash {
  size_t operator()(const Hash& hash) const { return size_t(hash.low); }
};

inline Hash HashOf(std::string_view bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return {hash.low64, hash.high64};
}
inline uint64_t BlockHashOf(std::string_view bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

// The 16 bytes in the order in which they are printed.
inline std::string ToBytes(const Hash& hash) {
  std::string bytes;
  for (const uint64_t half : {hash.high, hash.low}) {
    for (int shift = 56; shift >= 0; shift -= 8) bytes += char(half >> shift);
  }
  return bytes;
}

inline std::string ToHex(const Hash& hash) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char c : ToBytes(hash)) {
    text += kDigits[uint8_t(c) >> 4];
    text += kDigits[uint8_t(c) & 15];
  }
  return text;
}

// False if `bytes` are not 16.
inline bool FromBytes(std::string_view bytes, Hash* hash) {
  if (bytes.size() != 16) return false;
  uint64_t halves[2] = {};
  for (size_t i = 0; i < 16; ++i) halves[i / 8] = halves[i / 8] << 8 | uint8_t(bytes[i]);
  *hash = {halves[1], halves[0]};
  return true;
}

// The hash of bytes that come in pieces.
class Hasher {
 public:
  Hasher() : state_(XXH3_createState(), &XXH3_freeState) { Reset(); }
  void Reset() {
    if (state_) XXH3_128bits_reset(state_.get());
  }
  void Add(std::string_view bytes) {
    if (state_) XXH3_128bits_update(state_.get(), bytes.data(), bytes.size());
  }
  Hash Get() const {
    if (!state_) return {};
    const XXH128_hash_t hash = XXH3_128bits_digest(state_.get());
    return {hash.low64, hash.high64};
  }

 private:
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state_;
};

}  // namespace cuda_remote::ckptfmt

#endif  // CUDA_REMOTE_CKPTFMT_HASH_H_
