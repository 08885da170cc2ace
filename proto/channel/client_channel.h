// SPDX-License-Identifier: Apache-2.0
// The client's end of a session: requests out, replies and events in.
//
// All threads of a process share one channel. Requests enter the ring under one short lock, so the order in the ring is
// the order of the calls. Threads that wait for replies share the work: one of them takes the reader role, reads
// whatever arrives, puts payloads straight into their destinations and wakes the owners; when its own reply is there,
// it leaves the role to another waiter. Who waits with a limit (WaitFor) never has the role for longer than it takes to
// read what is there. A thread that finds the request ring full reads replies meanwhile, so the two
// directions cannot lock each other up.
//
// The server's bytes are never trusted: positions and headers are copied out of shared memory and checked, messages are
// copied before anybody parses them. A violation ends the session (kProtocolError).
//
// Thread-safe, except ReadEvent (one thread at a time) and the destructor (no call may be inside). A child made by fork
// has no channel: its copies of the descriptors are closed at once and the shared memory is not mapped there; it must
// not use the object. Nothing throws; nothing ends the process; no signal is raised. Idle costs nothing: there is no
// thread here.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_CHANNEL_CLIENT_CHANNEL_H_
#define CUDA_REMOTE_PROTO_CHANNEL_CLIENT_CHANNEL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "proto/base/status.h"
#include "proto/channel/channel_types.h"
#include "proto/frame/frame.h"

namespace cuda_remote {

class ClientChannel {
 public:
  // Opens a session with the cr-server or cr-relay that listens on `unix_path`. Blocks until a worker has answered,
  // which takes seconds if none is warm (limit: 60 s). *welcome is filled in as far as it is known, also on failure.
  static StatusOr<std::unique_ptr<ClientChannel>> Connect(const std::string& unix_path, const Hello& hello,
                                                          Welcome* welcome);

  // Continues a session that another process, or this one, held before. Takes the descriptors over, also on failure.
  // Requests go on with `next_sequence`; replies to requests of the former holder are dropped.
  static StatusOr<std::unique_ptr<ClientChannel>> Adopt(ChannelFds fds, uint64_t next_sequence, const Welcome& welcome);

  // Lets go: unmaps and closes. The session lives on if another process holds its descriptors (DupFds), else the server
  // ends it.
  ~ClientChannel();

  ClientChannel(const ClientChannel&) = delete;
  ClientChannel& operator=(const ClientChannel&) = delete;

  // Sends a request that nobody waits for: kFlagNoReply and the sequence number are filled in. Blocks while the ring is
  // full. A payload above kMaxPayloadBytes goes out in several frames, which stay together. `sequence`, if not null:
  // the request's number. `mark`: last_marked() tells of it. `quiet`: nothing is gained by its being executed at once;
  // the server has it within microseconds, or with the next request that is not quiet, which costs less.
  ChannelStatus Send(FrameHeader header, std::string_view message, std::string_view payload,
                     uint64_t* sequence = nullptr, bool mark = false, bool quiet = false);

  // Sends a request that is answered; returns its sequence number, 0 on failure. The reply's payload is written to
  // payload_out, which must stay valid until Wait returns; a longer payload than payload_out_bytes is a protocol error.
  // Every Begin needs one Wait. `mark`: as in Send.
  uint64_t Begin(FrameHeader header, std::string_view message, std::string_view payload, void* payload_out,
                 size_t payload_out_bytes, bool mark = false);

  // Waits for the reply to Begin's request. `reply->message` keeps its storage from call to call.
  ChannelStatus Wait(uint64_t sequence, Reply* reply);

  // For those who must not wait for long, such as the checkpoint agent: the three functions never wait longer than they
  // are told, whatever the server and other threads do. TryBegin: as Begin for a request without a payload; 0 and
  // kTimeout in *status if the ring has no room or another thread is in the middle of a request. WaitFor: kTimeout
  // leaves the request open. Every TryBegin needs one WaitFor that ends otherwise, or Abandon, after which the reply is
  // dropped when it comes.
  uint64_t TryBegin(FrameHeader header, std::string_view message, int timeout_ms, ChannelStatus* status);
  ChannelStatus WaitFor(uint64_t sequence, int timeout_ms, Reply* reply);
  void Abandon(uint64_t sequence);

  // Begin and Wait.
  ChannelStatus Call(FrameHeader header, std::string_view message, std::string_view payload, void* payload_out,
                     size_t payload_out_bytes, Reply* reply);

  // Passes a descriptor to the server under a tag that a later request names. kProtocolError without shared memory. The
  // caller keeps `fd`.
  ChannelStatus SendFd(uint64_t tag, int fd);

  // Reads the next event (a host function to run). kTimeout after timeout_ms; a negative one means no limit.
  ChannelStatus ReadEvent(FrameHeader* header, std::string* message, int timeout_ms);

  // Lets a ReadEvent that waits return soon. Any thread.
  void InterruptEvents();

  // Duplicates of the channel's descriptors, close-on-exec; the caller owns them. {-1, -1} on failure.
  ChannelFds DupFds() const;
  // The sequence number that the next request gets.
  uint64_t next_sequence() const;
  // The number of the last request that was sent with `mark`; of a channel without one, less than its first number, but
  // not less than what a former holder with the same numbers was told. It changes as the request enters the ring: what
  // is sent by somebody who has seen the new number comes after the request.
  uint64_t last_marked() const;
  // Whether a request of this length can be sent at all. Send and Begin fail for one that cannot.
  bool Fits(size_t message_bytes, size_t payload_bytes) const {
    return (message_bytes <= kFitsAlways && payload_bytes <= kMaxTotalPayloadBytes) ||
           FitsHere(message_bytes, payload_bytes);
  }
  // False once the peer is known to be gone or the session has failed.
  bool alive() const;
  // Why the session ended, in the server's words if it said so; empty while it lives.
  std::string end_reason() const;
  const Welcome& welcome() const;

  // Whether a thread that waits for a reply may look for it for as long as the native driver would, which is until it
  // is there: up to 10 ms here, if that was long enough before and the machine has processors to spare. Otherwise it
  // sleeps soon, and waking takes a while. Any thread.
  void SetEager(bool eager);

  // Where device printf output goes; called by whichever thread reads, before the reply of the call that flushed it is
  // delivered. Default: it is dropped. Set it before the first request.
  void SetStdoutSink(void (*sink)(const char* bytes, size_t count));
  // The same for what the driver prints to standard error: the texts of device assertions.
  void SetStderrSink(void (*sink)(const char* bytes, size_t count));

 private:
  // A message of this length fits into the smallest ring (ring::kMinCapacity).
  static constexpr size_t kFitsAlways = 8 << 10;
  bool FitsHere(size_t message_bytes, size_t payload_bytes) const;
  class Impl;
  explicit ClientChannel(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_CHANNEL_CLIENT_CHANNEL_H_
