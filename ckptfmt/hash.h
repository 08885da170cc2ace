// SPDX-License-Identifier: Apache-2.0
// Checksums of an image's files: XXH3-128, and XXH3-64 for blocks of a file. They find damage, not forgery. With AVX2
// where the processor has it, which is more than twice as fast.
//
// Two chunks count as equal only if KeyedHashOf is equal, too: anybody can make two chunks with the same XXH3-128, and
// whoever fills a job's memory could so have one chunk restored in the place of another. Nobody can for a secret that
// is random and stays in the image, readable by its owner only. The bound is in FORMAT.md.
#ifndef CUDA_REMOTE_CKPTFMT_HASH_H_
#define CUDA_REMOTE_CKPTFMT_HASH_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

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

Hash HashOf(std::string_view bytes);
uint64_t BlockHashOf(std::string_view bytes);

inline constexpr size_t kSecretBytes = 192;
// XXH3-128 with a secret of kSecretBytes in place of XXH3's own.
Hash KeyedHashOf(std::string_view bytes, std::string_view secret);
// From the kernel's random numbers; empty if there are none.
std::string NewSecret();

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
  Hasher();
  void Reset();
  void Add(std::string_view bytes);
  Hash Get() const;

 private:
  std::unique_ptr<void, void (*)(void*)> state_;  // xxHash's; null if there is no memory
};

}  // namespace cuda_remote::ckptfmt

#endif  // CUDA_REMOTE_CKPTFMT_HASH_H_
