// SPDX-License-Identifier: Apache-2.0
// Writing and reading tunnel messages (TunnelUp and TunnelDown of control.proto) as gRPC byte buffers, so that the
// frames go from the ring to the network without being copied.
//
// Both messages have the same shape, and so has the struct here: an integer, a text or bytes under each number.
// `frames` comes last. What arrives is not trusted; parsing allocates little and reads nothing beyond the message.
//
// Over TCP without TLS nothing else would notice a changed byte (TCP's own checksum has 16 bits, and a proxy on the way
// makes a new one). There messages are checked: `checksum`, in front of all other fields, is one of the rest.
//
// Thread-safe: no state.
#ifndef CUDA_REMOTE_PROTO_CONTROL_TUNNEL_MESSAGE_H_
#define CUDA_REMOTE_PROTO_CONTROL_TUNNEL_MESSAGE_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cuda_remote::control {

inline constexpr char kTunnelMethod[] = "/cuda_remote.control.Sessions/Tunnel";

// How many bytes of frames one message carries, unless a single frame is longer.
inline constexpr uint64_t kBatchBytes = 1u << 20;
// A batch stops growing at kBatchBytes, so it is at most this long.
inline constexpr uint64_t kMaxBatchBytes = 4u << 20;

struct TunnelMessage {
  std::string open;           // TunnelOpen or TunnelOpened
  uint64_t acknowledged = 0;  // reply ring (up) or request ring (down)
  uint64_t second = 0;        // event ring acknowledged (up) or which ring the frames are of (down)
  std::string end;            // close (up) or end (down)
  uint64_t position = 0;
  std::string lanes;  // how many messages each lane has been given so far
};

// `frames` may be empty (the field is left out then). The buffer refers to the slice's memory. `checked`: with a
// checksum.
grpc::ByteBuffer EncodeTunnelMessage(const TunnelMessage& message, const grpc::Slice* frames, bool checked = false);

// Whether a message that should have a checksum arrived as it was sent.
enum class Integrity { kIntact, kDamaged, kUnchecked };
Integrity CheckTunnelMessage(const grpc::ByteBuffer& buffer);

// The frames of a received message, still in the buffers that they arrived in.
class ReceivedFrames {
 public:
  uint64_t size() const { return size_; }
  // Copies bytes [from, size()) to `out`.
  void CopyTo(uint64_t from, char* out) const;

 private:
  friend bool DecodeTunnelMessage(const grpc::ByteBuffer&, TunnelMessage*, ReceivedFrames*);
  std::vector<grpc::Slice> slices_;
  size_t first_ = 0;  // slice and offset in it where the frames begin
  size_t offset_ = 0;
  uint64_t size_ = 0;
};

// False if the bytes are no tunnel message.
bool DecodeTunnelMessage(const grpc::ByteBuffer& buffer, TunnelMessage* message, ReceivedFrames* frames);

}  // namespace cuda_remote::control

#endif  // CUDA_REMOTE_PROTO_CONTROL_TUNNEL_MESSAGE_H_
