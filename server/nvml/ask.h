// SPDX-License-Identifier: Apache-2.0
// What cr-server hands to cr-nvml with each question: the question as it came, where it came from, and the sessions,
// which only the supervisor knows. Packets of the link between them (server/worker_link has the same form):
//
//     supervisor -> cr-nvml   kAsk     Ask, with the asking client's socket; cr-nvml answers there
//     cr-nvml -> supervisor   kAsked   one Ask is done
//
// No CUDA in here. Malformed packets are refused. Thread-safe: no state.
#ifndef CUDA_REMOTE_SERVER_NVML_ASK_H_
#define CUDA_REMOTE_SERVER_NVML_ASK_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cuda_remote::server {

// More are not passed on; the packet has an end.
inline constexpr size_t kMaxAskedSessions = 256;
inline constexpr size_t kMaxAskedProgram = 80;

struct AskedSession {
  uint32_t pid = 0;                    // of the client, on its host
  uint32_t worker_pid = 0;             // 0: waits for a worker
  int32_t gpu = 0;                     // the one that its worker was warm on
  std::string program;                 // its end, if it is long
  std::vector<uint64_t> device_bytes;  // on each GPU
  bool hidden = false;                 // somebody else's than who asks: its memory counts, nothing else is told
};

struct Ask {
  std::string question;  // nvml::Question as it came, not looked at
  bool remote = false;   // from another host
  std::vector<AskedSession> sessions;
  std::vector<uint64_t> gpus;  // those that the asking process sees, where it has not named one; empty: all
};

void EncodeAsk(const Ask& ask, std::string* out);
bool DecodeAsk(std::string_view bytes, Ask* ask);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_NVML_ASK_H_
