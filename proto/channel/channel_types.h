// SPDX-License-Identifier: Apache-2.0
// What both ends of a channel speak about: statuses, the messages of handshake.proto, and the file descriptors that a
// channel consists of.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_CHANNEL_CHANNEL_TYPES_H_
#define CUDA_REMOTE_PROTO_CHANNEL_CHANNEL_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "proto/channel/handshake.gen.h"
#include "proto/frame/frame.h"

namespace cuda_remote {

enum class ChannelStatus {
  kOk,
  kClosed,         // the peer is gone, or ended the session
  kProtocolError,  // the peer wrote something that no correct peer writes; the session is over
  kTooLarge,       // the caller's message or payload is beyond the limits; nothing was sent
  kTimeout,
  kSystemError,  // out of memory, or a system call failed
};

// "closed", "protocol error", ...: for messages to a person.
const char* ChannelStatusName(ChannelStatus status);

// The answer to a request.
struct Reply {
  uint32_t result = 0;         // the CUresult of the call
  uint32_t pending_error = 0;  // first failure of a fire-and-forget call since the last reply, else 0
  std::string message;
  uint64_t payload_bytes = 0;  // how many bytes arrived in the destination that Begin was given
};

// In `aux` of an output frame: the bytes are for standard error; anything else: for standard output.
inline constexpr uint32_t kOutputToStderr = 2;

// What a channel consists of, to hand it to another process. -1: none. Plain values: whoever holds them closes them.
struct ChannelFds {
  int socket = -1;
  int ring = -1;
};

// Longest payload of one request or reply; above kMaxPayloadBytes it travels in several frames.
inline constexpr uint64_t kMaxTotalPayloadBytes = uint64_t{2} << 30;

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_CHANNEL_CHANNEL_TYPES_H_
