// SPDX-License-Identifier: Apache-2.0
// The frame: what every channel, and the replay log, is made of.
//
// A frame is a fixed 32-byte header, then one protobuf message of the call that the header names, then an optional bulk
// payload (raw bytes that are not part of the message, such as the data of a memory copy). proto/WIRE.md is the
// specification. All integers are little-endian, which is the only byte order CUDA runs on; the static assertions below
// keep the struct and the specification equal.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_FRAME_FRAME_H_
#define CUDA_REMOTE_PROTO_FRAME_FRAME_H_

#include <cstdint>
#include <type_traits>

namespace cuda_remote {

// The version of frames, handshake and messages. A peer with another major version is refused by name.
inline constexpr uint32_t kWireVersion = 2;

// Longest message in bytes. Module images travel as payload, so messages are small; a kernel's parameters are at
// most 32764 bytes (CUDA's own limit).
inline constexpr uint32_t kMaxMessageBytes = 1u << 20;

// Longest payload in bytes. Larger data is cut into pieces by the sender (module images: see kFlagMorePayload).
inline constexpr uint32_t kMaxPayloadBytes = 1u << 20;

// Longest text in a handshake (proto/channel/handshake.proto).
inline constexpr uint32_t kMaxHandshakeString = 4096;

// Call ids are the vendor's numbers (below 0x10000, see proto/api/signatures.textproto); our own operations follow.
inline constexpr uint32_t kFirstOperation = 0x10000;

// Bits of FrameHeader::flags.
enum FrameFlags : uint32_t {
  // Server to client: answers the request with the same sequence number.
  kFlagReply = 1u << 0,
  // Client to server: nobody waits; no reply is sent. A failure becomes the session's pending error (see `aux`).
  kFlagNoReply = 1u << 1,
  // Client to server: this request is being replayed from the log. Results that the request names (addresses) must be
  // met exactly.
  kFlagReplay = 1u << 2,
  // Server to client, unasked: an event (device printf output, a host function to run). Its sequence number is 0 or
  // names what the client must acknowledge.
  kFlagEvent = 1u << 3,
  // The payload goes on in the next frame with the same sequence number and call; the message stands in the first.
  kFlagMorePayload = 1u << 4,
};

// Stands before each message. Never trusted: the receiver copies it out of shared memory first, then checks it.
struct FrameHeader {
  uint32_t message_bytes = 0;  // at most kMaxMessageBytes
  uint32_t payload_bytes = 0;  // at most kMaxPayloadBytes
  uint32_t call = 0;           // call id or operation
  uint32_t flags = 0;          // FrameFlags
  uint64_t sequence = 0;       // chosen by the client, rising, never 0 in a request; a reply repeats it
  // Request: slot of the context that is current in the calling thread (see VirtualHandle), 0 for none.
  // Reply: the CUresult of the call.
  uint32_t context_or_result = 0;
  // Request: 0. Reply: the first CUresult of a fire-and-forget call that failed since the last reply, else 0.
  uint32_t aux = 0;
};
static_assert(sizeof(FrameHeader) == 32 && std::is_trivially_copyable_v<FrameHeader>);

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_FRAME_FRAME_H_
