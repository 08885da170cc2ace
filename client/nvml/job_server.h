// SPDX-License-Identifier: Apache-2.0
// Which server the job of this process uses now, and how a question goes there.
//
// A running job can be moved and a saved one restarted elsewhere; the environment then still names the first server. So
// the tools keep a file `gpu-server` in the job's folder (its first two lines: the address, the ordinal of the only GPU
// or -1), and it goes before CUDA_REMOTE_SERVER and CUDA_REMOTE_GPU.
//
// While a question is open, `connect.lock` in that folder is held (shared); cr-checkpoint holds it exclusively while
// the process is snapshotted, so that no snapshot meets a connection. Between questions nothing is open.
#ifndef CUDA_REMOTE_CLIENT_NVML_JOB_SERVER_H_
#define CUDA_REMOTE_CLIENT_NVML_JOB_SERVER_H_

#include <cstdint>
#include <string>

#include "proto/base/status.h"
#include "proto/nvml/query.h"

namespace cuda_remote::client {

struct JobServer {
  std::string address;  // "unix:PATH" or "host:port"; empty: none
  int32_t gpu = -1;
  std::string folder;    // the job's; empty: none
  std::string identity;  // differs if the server may be another one
  bool operator==(const JobServer& other) const { return identity == other.identity; }
};

// Reads files and environment anew each time.
JobServer FindJobServer();

// Asks, and waits for the answer. One at a time in a process: the caller sees to it. Fails if there is no answer.
// `relay`: the socket of a relay started for "host:port" before, kept by the caller.
StatusOr<nvml::Answer> AskServer(const JobServer& server, const nvml::Question& question, std::string* relay);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_NVML_JOB_SERVER_H_
