// SPDX-License-Identifier: Apache-2.0
// What cr-server's command line and its configuration file say.
#ifndef CUDA_REMOTE_SERVER_SUPERVISOR_OPTIONS_H_
#define CUDA_REMOTE_SERVER_SUPERVISOR_OPTIONS_H_

#include <fcntl.h>
#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "proto/control/address_list.h"
#include "proto/control/credentials.h"
#include "server/supervisor/restrict.h"
#include "server/supervisor/tokens.h"

namespace cuda_remote::server {

// Who may do what, and how much: what SIGHUP reads anew. It counts for what begins afterwards.
struct Policy {
  std::set<std::string> operators;  // --operator: identities (identity.h) that see and end all sessions
  std::set<uid_t> users;            // --allow-user: local users who are served besides the server's own
  std::set<gid_t> groups;           // --allow-group
  control::AddressList insecure;    // --insecure-tcp: hosts that are served without TLS
  TokenNames tokens;                // --tokens
  uint64_t memory_limit = 0;        // device memory of one session; 0: no limit
  uint64_t user_memory_limit = 0;   // of all sessions of one identity other than the server's own user; 0: no limit
  int max_sessions = 128;           // 0: no limit
  int user_sessions = 64;           // of one identity other than the server's own user; 0: no limit
  int session_gpus = 0;             // GPUs that one session sees; 0: no limit
  int user_gpus = 0;                // that all sessions of one identity see, likewise; 0: no limit
  std::string log_level = "info";
};

struct Options {
  std::string directory;  // --dir
  std::string listen;     // --listen host:port; empty: Unix sockets only
  control::TlsFiles tls;  // --tls-cert, --tls-key, --tls-ca
  std::string metrics;    // --metrics host:port; empty: none
  std::string tokens;     // --tokens: file of the tokens that clients may show instead of a certificate
  int workers = 1;        // warm workers kept ready
  int gpu = -1;
  std::string driver;
  std::string worker;       // path of cr-worker
  std::string monitor;      // path of cr-nvml; empty: questions about the GPUs are refused
  int grace_seconds = 600;  // how long a session outlives its broken connection, if its client chooses no time
  int max_connections = 0;  // TCP connections at a time; 0: as the descriptor limit allows
  int ready_fd = -1;
  std::optional<Account> session_user;  // --session-user: runs the workers of foreign sessions
  bool serves_others = false;           // local users besides the server's own were admitted at the start
  bool restrict_workers = true;         // not --unrestricted
  bool give_userfaultfd = false;        // --userfaultfd
  bool random_addresses = false;        // --randomize-addresses
  Policy policy;
};

// /dev/userfaultfd, open; -1 and errno if it cannot be had.
inline int OpenFaultDevice() { return open("/dev/userfaultfd", O_RDWR | O_CLOEXEC); }

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_SUPERVISOR_OPTIONS_H_
