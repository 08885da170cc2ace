// What the checkpoint agent and the tools speak about.
//
// This header is part of the client library: libc and libstdc++ only.
#ifndef CUDA_REMOTE_CLIENT_AGENT_TYPES_H_
#define CUDA_REMOTE_CLIENT_AGENT_TYPES_H_

#include <cstdint>
#include <string>

#include "proto/channel/channel_types.h"

namespace cuda_remote::client::agent {

// What the agent says about its process.
struct Info {
  uint32_t pid = 0;  // as the process itself sees it, in its own PID namespace
  std::string server;
  std::string job;
  uint64_t session = 0;
  bool shared_memory = false;
  uint64_t log_records = 0;
  uint64_t log_bytes = 0;
  bool released = false;  // the process has no channel and waits for Give; filled in by the agent
};

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

// The socket's name in the job's folder.
inline constexpr char kSocketName[] = "agent.sock";

}  // namespace cuda_remote::client::agent

#endif  // CUDA_REMOTE_CLIENT_AGENT_TYPES_H_
