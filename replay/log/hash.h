// SPDX-License-Identifier: Apache-2.0
// The 128-bit content hash of images, logs and checkpoint files: XXH3-128. It finds damage and equal contents; it is no
// protection against somebody who forges them.
//
// Part of the client library.
#ifndef CUDA_REMOTE_REPLAY_LOG_HASH_H_
#define CUDA_REMOTE_REPLAY_LOG_HASH_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace cuda_remote::replay {

struct Hash128 {
  uint64_t low = 0;
  uint64_t high = 0;
};
inline bool operator==(const Hash128& a, const Hash128& b) { return a.low == b.low && a.high == b.high; }
inline bool operator!=(const Hash128& a, const Hash128& b) { return !(a == b); }
inline bool operator<(const Hash128& a, const Hash128& b) { return a.high != b.high ? a.high < b.high : a.low < b.low; }

// XXH3-128 with seed 0 of `size` bytes at `data`.
Hash128 HashOf(const void* data, size_t size);
inline Hash128 HashOf(std::string_view bytes) { return HashOf(bytes.data(), bytes.size()); }

// 32 lower-case hexadecimal digits, the high half first, as xxh128sum prints it.
std::string ToHex(const Hash128& hash);

}  // namespace cuda_remote::replay

#endif  // CUDA_REMOTE_REPLAY_LOG_HASH_H_
