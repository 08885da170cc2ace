// SPDX-License-Identifier: Apache-2.0
// Messages between the agent and a tool: one SOCK_SEQPACKET packet each, a fixed head, fields, and descriptors.
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
inline constexpr uint32_t kVersion = 1;
inline constexpr size_t kMaxMessageBytes = 32u << 10;
inline constexpr size_t kMaxFds = 3;
// Contexts of one Activity; calls of others are found when these have none left.
inline constexpr size_t kMaxContexts = 256;
// An agent's error for a type that it does not know; a tool then knows that the library is older than itself.
inline constexpr char kUnknownRequest[] = "the job's client library does not know this request";
// Most requests of a tool that are open at one time (kAsk).
inline constexpr size_t kMostAsked = 64;
// Answers to them that are longer come in a file.
inline constexpr size_t kMaxInlineAnswer = 16u << 10;
// Most calls that a tool may ask to be recorded.
inline constexpr uint64_t kMaxTraceEvents = 100000000;

enum class Type : uint32_t {
  kInfo = 1,
  kLock = 2,  // older client libraries only
  kUnlock = 3,
  kTake = 4,
  kRelease = 5,
  kGive = 6,
  kBeginTrace = 7,
  kEndTrace = 8,
  kTraceTotals = 9,
  kClose = 10,
  kLook = 11,
  kAdmit = 12,
  kSettle = 13,
  kAbandon = 14,
  kAsk = 15,
  kAnswer = 16,
  // Answers.
  kOk = 64,
  kError = 65,
};

struct Message {
  Type type = Type::kError;
  std::string body;
  std::vector<int> fds;  // the receiver owns them
};

enum class ReceiveStatus { kOk, kClosed, kTimeout, kMalformed, kOtherVersion };

// Sends one message; the caller keeps the descriptors. False if the peer is gone.
bool SendMessage(int socket, const Message& message);

// Receives one. Descriptors of a malformed message are closed.
ReceiveStatus ReceiveMessage(int socket, int timeout_ms, Message* message);

// Fields, one after another: numbers as 8 little-endian bytes, strings as a number and the bytes.
class FieldWriter {
 public:
  explicit FieldWriter(std::string* out) : out_(out) {}
  FieldWriter& Number(uint64_t value);
  FieldWriter& Text(std::string_view value);

 private:
  std::string* const out_;
};

class FieldReader {
 public:
  explicit FieldReader(std::string_view in) : in_(in) {}
  uint64_t Number();
  std::string Text();
  // Everything was there and nothing is left.
  bool done() const { return ok_ && in_.empty(); }

 private:
  std::string_view in_;
  bool ok_ = true;
};

void EncodeActivity(const Activity& activity, std::string* body);
bool DecodeActivity(std::string_view body, Activity* activity);
void EncodeInfo(const Info& info, std::string* body);
bool DecodeInfo(std::string_view body, Info* info);
// Descriptors travel beside the body: of Taken log, socket, ring; of Given socket, ring.
void EncodeTaken(const Taken& taken, Message* message);
bool DecodeTaken(const Message& message, Taken* taken);
void EncodeGiven(const Given& given, Message* message);
bool DecodeGiven(const Message& message, Given* given);

}  // namespace cuda_remote::agent

#endif  // CUDA_REMOTE_PROTO_AGENT_MESSAGE_H_
