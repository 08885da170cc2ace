// What cr-server's command line says.
#ifndef CUDA_REMOTE_SERVER_SUPERVISOR_OPTIONS_H_
#define CUDA_REMOTE_SERVER_SUPERVISOR_OPTIONS_H_

#include <cstdint>
#include <string>

#include "proto/control/credentials.h"

namespace cuda_remote::server {

struct Options {
  std::string directory;  // --dir
  std::string listen;     // --listen host:port; empty: Unix sockets only
  control::TlsFiles tls;  // --tls-cert, --tls-key, --tls-ca
  bool insecure_tcp = false;
  int workers = 1;  // warm workers kept ready
  int gpu = -1;
  std::string driver;
  std::string worker;  // path of cr-worker
  std::string monitor;  // path of cr-nvml; empty: questions about the GPUs are refused
  uint64_t memory_limit = 0;
  int max_sessions = 0;    // 0: no limit
  int grace_seconds = 60;  // how long a session outlives its broken connection
  std::string log_level = "info";
  int ready_fd = -1;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_SUPERVISOR_OPTIONS_H_
