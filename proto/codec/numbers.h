// SPDX-License-Identifier: Apache-2.0
// Writing fields that are numbers, for generated code: several one after the other into a buffer of known size, which
// is appended to the message at once. Appending them one by one was a third of a kernel launch's instructions.
//
// The bytes are those of PutUint and its like in wire.h.
#ifndef CUDA_REMOTE_PROTO_CODEC_NUMBERS_H_
#define CUDA_REMOTE_PROTO_CODEC_NUMBERS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "proto/codec/wire.h"

namespace cuda_remote::wire {

// Room for up to kFields fields. Zero is the default and is not written.
template <size_t kFields>
class Numbers {
 public:
  void Uint(uint32_t field, uint64_t value) {
    if (value == 0) return;
    Varint(uint64_t(field) << 3 | kVarint);
    Varint(value);
  }
  void Int(uint32_t field, int64_t value) { Uint(field, uint64_t(value)); }
  void Float(uint32_t field, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    Fixed(field, kFixed32, bits);
  }
  void Double(uint32_t field, double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    Fixed(field, kFixed64, bits);
  }

  void AppendTo(std::string* out) const { out->append(buffer_, size_t(at_ - buffer_)); }

 private:
  // The longest tag and the longest number.
  static constexpr size_t kFieldBytes = 5 + 10;

  void Varint(uint64_t value) {
    char* at = at_;  // bytes that are written through at_ itself might change it, for all that the compiler knows
    if (value >> 49 != 0) {
      // Eight bytes or more, as handles have: eight groups of seven bits, spread to one for each byte. (Little-endian,
      // like all that goes over the wire as it lies in memory.)
      uint64_t low = (value & 0x0fffffff) | (value & 0x00fffffff0000000) << 4;
      low = (low & 0x00003fff00003fff) | (low & 0x0fffc0000fffc000) << 2;
      low = (low & 0x007f007f007f007f) | (low & 0x3f803f803f803f80) << 1;
      value >>= 56;
      low |= value != 0 ? 0x8080808080808080 : 0x0080808080808080;
      std::memcpy(at, &low, 8);
      at_ = at += 8;
      if (value == 0) return;
    }
    while (value >= 0x80) {
      *at++ = char(value | 0x80);
      value >>= 7;
    }
    *at++ = char(value);
    at_ = at;
  }
  template <typename Bits>
  void Fixed(uint32_t field, WireType type, Bits bits) {
    if (bits == 0) return;
    Varint(uint64_t(field) << 3 | type);
    std::memcpy(at_, &bits, sizeof(bits));
    at_ += sizeof(bits);
  }

  char buffer_[kFields * kFieldBytes];
  char* at_ = buffer_;
};

}  // namespace cuda_remote::wire

#endif  // CUDA_REMOTE_PROTO_CODEC_NUMBERS_H_
