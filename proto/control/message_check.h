// SPDX-License-Identifier: Apache-2.0
// Checksums of whole messages, for calls over TCP without TLS, where nothing else would notice a changed byte.
//
// A message's field `checksum` covers all other fields as they are serialized. Field numbers only ever grow, so a field
// that the receiver does not know yet stands behind those that it does, and the serialized bytes are the same on both
// sides. Thread-safe: no state.
#ifndef CUDA_REMOTE_PROTO_CONTROL_MESSAGE_CHECK_H_
#define CUDA_REMOTE_PROTO_CONTROL_MESSAGE_CHECK_H_

#include <cstdint>
#include <string>

#include "proto/base/hash.h"

namespace cuda_remote::control {

// A checksum's bytes: little-endian.
inline std::string ChecksumBytes(uint64_t hash) {
  std::string bytes(8, 0);
  for (char& byte : bytes) {
    byte = char(hash);
    hash >>= 8;
  }
  return bytes;
}

template <typename Message>
std::string MessageChecksum(Message message) {
  message.clear_checksum();
  return ChecksumBytes(Hash64Of(message.SerializeAsString()));
}

template <typename Message>
void AddChecksum(Message* message) {
  message->set_checksum(MessageChecksum(*message));
}

template <typename Message>
bool ChecksumIsRight(const Message& message) {
  return message.checksum() == MessageChecksum(message);
}

}  // namespace cuda_remote::control

#endif  // CUDA_REMOTE_PROTO_CONTROL_MESSAGE_CHECK_H_
