// SPDX-License-Identifier: Apache-2.0
// What the supervisor knows, as messages of proto/control/control.proto.
//
// Thread-safe: no state.
#ifndef CUDA_REMOTE_SERVER_SUPERVISOR_CONTROL_MESSAGES_H_
#define CUDA_REMOTE_SERVER_SUPERVISOR_CONTROL_MESSAGES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "proto/control/control.pb.h"
#include "server/supervisor/supervisor.h"

namespace cuda_remote::server {

void ToMessage(const ServerFacts& facts, control::ServerInfo* out);

// Adds the sessions with numbers above `after`, in their order, as long as the message has at most `most_bytes`, but
// always one. If there are more, it says so.
void AddSessions(const std::vector<SessionInfo>& sessions, uint64_t after, size_t most_bytes,
                 control::ListSessionsReply* out);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_SUPERVISOR_CONTROL_MESSAGES_H_
