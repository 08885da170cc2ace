// SPDX-License-Identifier: Apache-2.0
// What the checkpoint agent and the tools speak about, beside the messages of agent.proto.
//
// This header is part of the client library: libc and libstdc++ only.
#ifndef CUDA_REMOTE_PROTO_AGENT_TYPES_H_
#define CUDA_REMOTE_PROTO_AGENT_TYPES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "proto/agent/agent.gen.h"
#include "proto/channel/channel_types.h"

namespace cuda_remote::agent {

// The process's channel and replay log, handed to a tool. Plain values: whoever holds the descriptors closes them.
struct Taken {
  int log_fd = -1;  // the serialized log, from its start
  ChannelFds fds;
  uint64_t next_sequence = 0;
  Welcome welcome;
};

// A channel handed back to the process. Its receiver owns the descriptors, also on failure.
struct Given {
  ChannelFds fds;
  uint64_t next_sequence = 0;
  Welcome welcome;
  bool new_worker = false;  // the worker behind it has none of the process's shared memory yet
  std::string server;       // how the process can name its server from now on; empty: as before
};

// A request of a tool to the GPU server, beside the job's own calls.
struct SideRequest {
  uint32_t operation = 0;
  std::string message;
  size_t payload_bytes = 0;  // of the answer, at most
  // A descriptor for the server, which stays the caller's, and its tag; 0: there is none.
  uint64_t tag = 0;
  int fd = -1;
};
struct SideAnswer {
  uint32_t result = 0;
  std::string message;
  std::string payload;
};

// The name, in the job's folder, of the socket on which the agent of process `pid` listens; `pid` as the process itself
// knows it, so it is the same after a restart.
inline std::string SocketName(uint32_t pid) { return "agent-" + std::to_string(pid) + ".sock"; }

}  // namespace cuda_remote::agent

#endif  // CUDA_REMOTE_PROTO_AGENT_TYPES_H_
