// SPDX-License-Identifier: Apache-2.0
#include "proto/driverabi/md2.h"

#include <cstring>

namespace cuda_remote::driverabi {
namespace {

constexpr size_t kBlock = 16;

// RFC 1319, section 3.2: a permutation of 0..255 made from the digits of pi.
constexpr uint8_t kPi[256] = {
    41,  46,  67,  201, 162, 216, 124, 1,   61,  54,  84,  161, 236, 240, 6,   19,  98,  167, 5,   243, 192, 199,
    115, 140, 152, 147, 43,  217, 188, 76,  130, 202, 30,  155, 87,  60,  253, 212, 224, 22,  103, 66,  111, 24,
    138, 23,  229, 18,  190, 78,  196, 214, 218, 158, 222, 73,  160, 251, 245, 142, 187, 47,  238, 122, 169, 104,
    121, 145, 21,  178, 7,   63,  148, 194, 16,  137, 11,  34,  95,  33,  128, 127, 93,  154, 90,  144, 50,  39,
    53,  62,  204, 231, 191, 247, 151, 3,   255, 25,  48,  179, 72,  165, 181, 209, 215, 94,  146, 42,  172, 86,
    170, 198, 79,  184, 56,  210, 150, 164, 125, 182, 118, 252, 107, 226, 156, 116, 4,   241, 69,  157, 112, 89,
    100, 113, 135, 32,  134, 91,  207, 101, 230, 45,  168, 2,   27,  96,  37,  173, 174, 176, 185, 246, 28,  70,
    97,  105, 52,  64,  126, 15,  85,  71,  163, 35,  221, 81,  175, 58,  195, 92,  249, 206, 186, 197, 234, 38,
    44,  83,  13,  110, 133, 40,  132, 9,   211, 223, 205, 244, 65,  129, 77,  82,  106, 220, 55,  200, 108, 193,
    171, 250, 36,  225, 123, 8,   12,  189, 177, 74,  120, 136, 149, 139, 227, 99,  232, 109, 233, 203, 213, 254,
    59,  0,   29,  57,  242, 239, 183, 14,  102, 88,  208, 228, 166, 119, 114, 248, 235, 117, 75,  10,  49,  68,
    80,  180, 143, 237, 31,  26,  219, 153, 141, 51,  159, 17,  131, 20};

class Hasher {
 public:
  void Add(std::string_view bytes) {
    for (const char byte : bytes) {
      block_[used_++] = uint8_t(byte);
      if (used_ == kBlock) Flush();
    }
  }

  Md2Digest Finish() {
    // Padding: as many bytes as are missing to a block, each of that value; then the checksum as a block of its own.
    const uint8_t missing = uint8_t(kBlock - used_);
    while (used_ < kBlock) block_[used_++] = missing;
    Flush();
    std::memcpy(block_, checksum_, kBlock);
    Transform();
    Md2Digest digest;
    std::memcpy(digest.data(), state_, kBlock);
    return digest;
  }

 private:
  void Flush() {
    uint8_t last = checksum_[kBlock - 1];
    for (size_t i = 0; i < kBlock; ++i) last = checksum_[i] ^= kPi[block_[i] ^ last];
    Transform();
    used_ = 0;
  }

  void Transform() {
    for (size_t i = 0; i < kBlock; ++i) {
      state_[kBlock + i] = block_[i];
      state_[2 * kBlock + i] = uint8_t(block_[i] ^ state_[i]);
    }
    unsigned t = 0;
    for (unsigned round = 0; round < 18; ++round) {
      for (uint8_t& byte : state_) t = byte ^= kPi[t];
      t = (t + round) & 0xFF;
    }
  }

  uint8_t state_[3 * kBlock] = {};
  uint8_t checksum_[kBlock] = {};
  uint8_t block_[kBlock] = {};
  size_t used_ = 0;
};

}  // namespace

Md2Digest Md2(std::string_view bytes) {
  Hasher hasher;
  hasher.Add(bytes);
  return hasher.Finish();
}

Md2Digest HmacMd2(std::string_view key, std::string_view message) {
  char inner[kBlock], outer[kBlock];
  for (size_t i = 0; i < kBlock; ++i) {
    const char byte = i < key.size() ? key[i] : 0;
    inner[i] = char(byte ^ 0x36);
    outer[i] = char(byte ^ 0x5C);
  }
  Hasher first;
  first.Add({inner, kBlock});
  first.Add(message);
  const Md2Digest digest = first.Finish();
  Hasher second;
  second.Add({outer, kBlock});
  second.Add({reinterpret_cast<const char*>(digest.data()), digest.size()});
  return second.Finish();
}

}  // namespace cuda_remote::driverabi
