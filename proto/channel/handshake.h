// SPDX-License-Identifier: Apache-2.0
// The packets of a session socket. handshake.proto has their types and messages.
//
// The session socket is a Unix SOCK_SEQPACKET connection; it carries a few small packets and stays open as the sign
// that both sides live. Every packet is an 8-byte head (magic, type) and a protobuf message:
//
//     client -> server   kHello    Hello
//     server -> client   kWelcome  Welcome                 + the rings' descriptor (unless refused)
//     client -> server   kFd       Tag                     + one descriptor
//     server -> client   kEnd      End (why the session is over); the socket is closed after it
//
// A connection may carry one question instead, which needs no session (proto/nvml/query.h):
//
//     client -> server   kQuery    Question
//     server -> client   kAnswer   Answer; the socket is closed after it
//
// or a call of the Control service (proto/control/control.proto):
//
//     client -> server   kControlCall     ControlCall
//     server -> client   kControlAnswer   ControlAnswer; the socket is closed after it
//
// or a request for the right to watch memory (cr-server --userfaultfd), with no message:
//
//     client -> server   kFaultDevice
//     server -> client   kFaultDevice     + /dev/userfaultfd, if the server gives it away; the socket is closed after
//     it
//
// Functions here never throw; whatever the peer sends is checked. Thread-safe: no state.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_CHANNEL_HANDSHAKE_H_
#define CUDA_REMOTE_PROTO_CHANNEL_HANDSHAKE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "proto/base/status.h"
#include "proto/base/unique_fd.h"
#include "proto/channel/channel_types.h"

namespace cuda_remote {

inline constexpr uint32_t kPacketMagic = 0x50524355;  // "UCRP"
inline constexpr size_t kMaxPacketBytes = 64u << 10;

struct Packet {
  PacketType type = PacketType::kEnd;
  std::string body;
  UniqueFd fd;  // that came with it, or none
};

// For the one field of these messages.
void EncodeTag(uint64_t tag, std::string* out);
bool DecodeTag(std::string_view bytes, uint64_t* tag);
void EncodeEnd(std::string_view reason, std::string* out);
bool DecodeEnd(std::string_view bytes, std::string* reason);

// Takes a packet apart; false if it is none.
bool ParsePacket(std::string_view bytes, PacketType* type, std::string_view* body);

// Empty if a client of this version may be served, else the sentence that refuses it. `who` refuses it.
std::string CheckWireVersion(uint32_t version, const char* who = "this server");

// Sends one packet, with `fd` unless that is -1; the caller keeps `fd`. kClosed if the peer is gone; never raises
// SIGPIPE.
ChannelStatus SendPacket(int socket, PacketType type, std::string_view body, int fd);

// Receives one packet; timeout_ms < 0: no limit. kProtocolError for anything that is not a packet (too long, several
// descriptors, wrong magic); descriptors that came with it are closed then. Without `may_have_fd`, one is too many, and
// the kernel drops it without giving it to this process.
ChannelStatus ReceivePacket(int socket, Packet* packet, int timeout_ms, bool may_have_fd = true);

// The session socket of the server at `address`, if that is "unix:PATH" of the socket or of cr-server's folder. None if
// it is another address (HOST:PORT).
std::optional<std::string> SocketPathOf(const std::string& address);

// How long to wait for a listener that is not trusted, or may be stopped.
inline constexpr int kMostConnectMs = 1000;

// A connection to the socket at `path`. *failure, unless null: the value of errno if that fails. If the listener's
// queue is full, this waits up to timeout_ms for a place (< 0: no limit), and then fails with EAGAIN.
StatusOr<UniqueFd> ConnectUnix(const std::string& path, int* failure = nullptr, int timeout_ms = -1);
// The same, to a GPU server: one that runs as root or as this user, since the program's data goes there.
StatusOr<UniqueFd> ConnectServer(const std::string& path);
// A listening socket at `path`, made with mode 0600; an old socket that nobody listens on is replaced. Fails also if a
// live server has it.
StatusOr<UniqueFd> ListenUnix(const std::string& path);
// The user at the other end; false if that cannot be told.
bool PeerUser(int socket, uint32_t* uid, uint32_t* pid);
// A connected pair of session sockets, close-on-exec.
bool SocketPair(int sockets[2]);

// Client's half of the handshake on a connected socket: sends Hello, waits for Welcome and gives the rings' descriptor.
// *welcome is filled in as far as known, also on failure.
StatusOr<UniqueFd> ClientHandshake(int socket, const Hello& hello, int timeout_ms, Welcome* welcome);

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_CHANNEL_HANDSHAKE_H_
