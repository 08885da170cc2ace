// SPDX-License-Identifier: Apache-2.0
// The worker's end of a session: requests in, replies and events out.
//
// Made from the client's connected socket; creates the shared memory and answers the Hello. One thread (the executor)
// calls Next; any thread may reply. A thread of the channel's own reads the socket: it takes descriptors that the
// client passes and notices when the client is gone.
//
// The client is hostile until proven otherwise: positions and headers are copied out of shared memory and checked,
// messages are copied before anybody parses them. Payloads are used in place and may change while they are read, so
// they are only to be copied from, or copied first and then parsed. A violation ends the session: Next returns false
// and end_reason says why.
//
// Thread-safe except Next and the payload calls (executor only). Nothing throws.
#ifndef CUDA_REMOTE_PROTO_CHANNEL_SERVER_CHANNEL_H_
#define CUDA_REMOTE_PROTO_CHANNEL_SERVER_CHANNEL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "proto/base/status.h"
#include "proto/base/unique_fd.h"
#include "proto/channel/channel_types.h"
#include "proto/frame/frame.h"

namespace cuda_remote {

// A request's payload. Valid until the next call of Next, or longer: see ServerChannel::Hold.
struct PayloadView {
  const char* data = nullptr;
  size_t bytes = 0;
  // False: the bytes lie in memory that the client can still write to; copy before parsing. True: assembled from
  // several frames in memory of the worker's own.
  bool is_private = false;
  std::string_view view() const { return {data, bytes}; }
};

class ServerChannel {
 public:
  // Sends `welcome` with the new shared memory's descriptor. Then calls `peer_gone` once, from the channel's thread,
  // when the client is gone or broke the protocol (not after Stop); may be null. It may end the process; it must not
  // destroy the channel.
  static StatusOr<std::unique_ptr<ServerChannel>> Create(UniqueFd client_socket, const Welcome& welcome,
                                                         std::function<void(const std::string& reason)> peer_gone);

  // Closes the socket: the client sees the end of the session. No other call may be inside.
  ~ServerChannel();

  ServerChannel(const ServerChannel&) = delete;
  ServerChannel& operator=(const ServerChannel&) = delete;

  // The next request, in the order in which the client sent them. Blocks; false when the session is over (client gone,
  // protocol error, Stop). The payload of the request before becomes invalid unless it was held.
  bool Next(FrameHeader* header, std::string* message, PayloadView* payload);

  // Whether Next would return at once with a request. Executor only.
  bool HasNext();

  // Keeps the payload that Next returned last valid until Release: for a thread that reads on while it is in use. Ring
  // space is taken back in order, so a long hold ends in a full ring. Hold: executor only. Release: any thread.
  uint64_t Hold();
  void Release(uint64_t hold);

  // Answers a request. The payload may be given in pieces, which are joined; above kMaxPayloadBytes it goes out in
  // several frames. Blocks while the reply ring is full. kClosed if the client is gone.
  ChannelStatus Reply(uint64_t sequence, uint32_t call, uint32_t result, uint32_t pending_error,
                      std::string_view message, const std::string_view* payload_pieces = nullptr,
                      size_t piece_count = 0);
  ChannelStatus Reply(uint64_t sequence, uint32_t call, uint32_t result, uint32_t pending_error,
                      std::string_view message, std::string_view payload) {
    return Reply(sequence, call, result, pending_error, message, &payload, 1);
  }

  // Device printf output: the client prints it before it delivers any reply that is sent after this. `operation` is
  // kOpStdout; `to_stderr` for what the driver prints there.
  ChannelStatus Output(uint32_t operation, std::string_view bytes, bool to_stderr = false);

  // An event for the client's callback thread. Blocks while the event ring is full: not for the executor if the client
  // might be waiting for it.
  ChannelStatus Event(uint32_t operation, uint64_t sequence, std::string_view message);

  // The descriptor that the client passed under `tag`; the caller owns it. -1 if none arrived in time.
  int TakeFd(uint64_t tag, int timeout_ms);

  // Makes Next return false, and Reply and Event return kClosed. Any thread, also a signal-free shutdown path.
  void Stop();

  // Tells the client why, then Stop. For a worker that ends the session by itself (memory limit, bad request).
  void End(const std::string& reason);

  // Why the session is over; empty while it lives.
  std::string end_reason() const;

 private:
  class Impl;
  explicit ServerChannel(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_CHANNEL_SERVER_CHANNEL_H_
