// SPDX-License-Identifier: Apache-2.0
// What workers of one server send each other to share memory, events and pools (server/worker/session/ipc.h): sequenced
// packets, one question and one reply for each connection. Both ends are the same program.
#ifndef CUDA_REMOTE_SERVER_WORKER_SESSION_IPC_MESSAGES_H_
#define CUDA_REMOTE_SERVER_WORKER_SESSION_IPC_MESSAGES_H_

#include <cstddef>
#include <cstdint>

#include "server/worker/session/ipc.h"

namespace cuda_remote::server {

inline constexpr char kIpcMagic[8] = {'C', 'R', 'I', 'P', 'C', '2', 0, 0};
inline constexpr size_t kIpcRandomBytes = 16;

// A key: magic, kind, zeros up to 16, home, secret, zeros.
struct IpcKey {
  char magic[8];
  uint8_t kind;
  char zero[7];
  char home[kIpcRandomBytes];
  char secret[kIpcRandomBytes];
  char reserved[16];
};
static_assert(sizeof(IpcKey) == kIpcKeyBytes);

struct IpcQuestion {
  char magic[8];
  char secret[kIpcRandomBytes];
  char group[kIpcRandomBytes];
  IpcPeer peer;
  uint8_t kind;
};

struct IpcReply {
  char magic[8];
  uint32_t found;
  uint32_t has_fd;
  IpcPeer peer;
  IpcFacts facts;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_SESSION_IPC_MESSAGES_H_
