// SPDX-License-Identifier: Apache-2.0
// Messages between the agent and a tool: one SOCK_SEQPACKET packet each, a fixed head, a
// body (agent.proto), and descriptors.
//
// What a peer sends is checked, though both are of the same user: an old tool must get an error, not a crash.
//
// Part of the client library. No state; thread-safe; nothing throws beyond std::bad_alloc.
#ifndef CUDA_REMOTE_PROTO_AGENT_MESSAGE_H_
#define CUDA_REMOTE_PROTO_AGENT_MESSAGE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "proto/agent/types.h"

namespace cuda_remote::agent {

inline constexpr uint32_t kMagic = 0x41524355;  // "UCRA"
inline constexpr uint32_t kVersion = 2;
inline constexpr size_t kMaxMessageBytes = 32u << 10;
inline constexpr size_t kMaxFds = 3;
// Most requests of a tool that are open at one time (kAsk).
inline constexpr size_t kMostAsked = 64;
// Answers to them that are longer come in a file.
inline constexpr size_t kMaxInlineAnswer = 16u << 10;
// Most calls that a tool may ask to be recorded.
inline constexpr uint64_t kMaxTraceEvents = 100000000;

struct Message {
  Type type = Type::kError;
  std::string body;
  std::vector<int> fds;  // the receiver owns them
};

// kNoDescriptors: the message had descriptors, and this process cannot have so many more.
enum class ReceiveStatus { kOk, kClosed, kTimeout, kMalformed, kOtherVersion, kNoDescriptors };

// Sends one message; the caller keeps the descriptors. False if the peer is gone.
bool SendMessage(int socket, const Message& message);

// Receives one. Descriptors of a malformed message are closed.
ReceiveStatus ReceiveMessage(int socket, int timeout_ms, Message* message);

// Descriptors travel beside the body: of Taken log, socket, ring; of Given socket, ring.
void EncodeTaken(const Taken& taken, Message* message);
bool DecodeTaken(const Message& message, Taken* taken);
void EncodeGiven(const Given& given, Message* message);
bool DecodeGiven(const Message& message, Given* given);

}  // namespace cuda_remote::agent

#endif  // CUDA_REMOTE_PROTO_AGENT_MESSAGE_H_
