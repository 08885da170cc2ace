// SPDX-License-Identifier: Apache-2.0
// The one hash of bytes: XXH3, with 128 bits or 64. It names contents (the images of modules), finds damage (files of
// an image, replay logs, messages without TLS) and spreads names over numbers. It is no protection against somebody who
// forges contents. Images, logs and messages hold its values, so they never change. With AVX2 where the processor has
// it, which is more than twice as fast.
//
// Two chunks of an image count as equal only if KeyedHashOf is equal, too: anybody can make two chunks with the same
// XXH3-128, and whoever fills a job's memory could so have one chunk restored in the place of another. Nobody can for a
// secret that is random and stays in the image, readable by its owner only. The bound is in ckptfmt/FORMAT.md.
//
// What has another purpose and so is another function: proto/chunkhash, which GPUs compute at their memory's speed;
// driverabi::Md2, which the driver's own protocol asks for; and OpenSSL's SHA-256, alone or in an HMAC, for keys,
// tokens and signatures.
//
// Thread-safe, except for one Hasher. Part of the client library.
#ifndef CUDA_REMOTE_PROTO_BASE_HASH_H_
#define CUDA_REMOTE_PROTO_BASE_HASH_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace cuda_remote {

struct Hash128 {
  uint64_t low = 0;
  uint64_t high = 0;
};
inline bool operator==(const Hash128& a, const Hash128& b) { return a.low == b.low && a.high == b.high; }
inline bool operator!=(const Hash128& a, const Hash128& b) { return !(a == b); }
inline bool operator<(const Hash128& a, const Hash128& b) { return a.high != b.high ? a.high < b.high : a.low < b.low; }

// XXH3-128 and XXH3-64 with seed 0.
Hash128 HashOf(std::string_view bytes);
uint64_t Hash64Of(std::string_view bytes);

inline constexpr size_t kSecretBytes = 192;
// XXH3-128 with a secret of kSecretBytes in place of XXH3's own.
Hash128 KeyedHashOf(std::string_view bytes, std::string_view secret);
// From the kernel's random numbers; empty if there are none.
std::string NewSecret();

// The 16 bytes in the order in which they are printed, the high half first.
std::string ToBytes(const Hash128& hash);
// 32 lower-case hexadecimal digits, as xxh128sum prints it.
std::string ToHex(const Hash128& hash);
// False if `bytes` are not 16.
bool FromBytes(std::string_view bytes, Hash128* hash);

// The hash of bytes that come in pieces. It does not depend on where they are cut.
class Hasher {
 public:
  Hasher() { Reset(); }
  void Reset();
  void Add(std::string_view bytes);
  // HashOf and Hash64Of of all bytes since the last Reset.
  Hash128 Get() const;
  uint64_t Get64() const;

 private:
  alignas(64) unsigned char state_[640];  // xxHash's
};

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_BASE_HASH_H_
