// SPDX-License-Identifier: Apache-2.0
// What the checkpoint agent and the tools speak about.
//
// This header is part of the client library: libc and libstdc++ only.
#ifndef CUDA_REMOTE_PROTO_AGENT_TYPES_H_
#define CUDA_REMOTE_PROTO_AGENT_TYPES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "proto/channel/channel_types.h"

namespace cuda_remote::agent {

// What the agent says about its process.
struct Info {
  uint32_t pid = 0;  // as the process itself sees it, in its own PID namespace
  std::string server;
  std::string job;
  uint64_t session = 0;
  bool shared_memory = false;
  std::string driver_settings;  // Hello's
  uint64_t log_records = 0;
  uint64_t log_bytes = 0;
  bool released = false;  // the process has no channel and waits for Give; filled in by the agent
};

// What a process is doing, as far as a lock has to know it.
struct Activity {
  // Nothing is going on, and nothing can begin: the gate is closed, no CUDA call is inside, and the GPU was idle when it
  // was asked after that. Stays so until a call is admitted or the gate is opened.
  bool quiet = false;
  bool capturing = false;  // a stream is being captured into a graph, which goes on only with the gate open
  bool answered = false;   // the GPU server has answered; else what it was asked is open still, and its figures are old
  uint64_t inside = 0;     // CUDA calls that have passed the gate and not returned
  uint64_t asking = 0;     // calls that wait at the gate and only ask for work or wait for it
  bool has_work = false;          // the server says that there is work, which need not be in a stream that still exists
  uint64_t busy_streams = 0;      // streams with work, as far as the server can tell
  uint64_t host_function_ms = 0;  // how long the host function that runs now has been running; 0: none
  uint64_t held_bytes = 0;        // device memory that the session holds
  // Other calls that wait at the gate, by their threads' contexts (0: none), and all contexts that have work.
  struct Context {
    uint64_t context = 0;
    uint64_t calls = 0;
    bool has_work = false;  // some stream of the context has work
    bool adding = false;    // a stream into which a call has put work since the gate closed has work
  };
  std::vector<Context> contexts;
};

// Which of the calls that wait at the gate is let in: the first that only asks, or the first other one of a context.
struct Admission {
  bool asks = true;
  uint64_t context = 0;
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
// In images of format version 1, whose jobs had one process with CUDA.
inline constexpr char kOnlySocketName[] = "agent.sock";

}  // namespace cuda_remote::agent

#endif  // CUDA_REMOTE_PROTO_AGENT_TYPES_H_
