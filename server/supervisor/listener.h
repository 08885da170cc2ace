// SPDX-License-Identifier: Apache-2.0
// The TCP port: accepts connections, and decides which of them gRPC gets to see.
//
// gRPC takes what comes: it has no limits by host, and when the process has no descriptors left it stops or spins. So
// the port is ours, and gRPC is handed connected sockets. What is decided here needs no byte from the client:
//   - a host that is not on the list (--insecure-tcp) is turned away;
//   - one host has at most kMostOfHost connections, of which kMostUnproven have not yet shown who they are, as far as
//     Proven is told; all hosts together have a limit, too, which leaves descriptors for local clients and workers;
//   - when there are no descriptors, nothing is accepted for a moment.
// How long a connection may stay without showing who it is, is gRPC's to enforce (SetServerArguments).
//
// Listen, then Start, then Stop, from one thread. Proven and SetAllowed: any thread.
#ifndef CUDA_REMOTE_SERVER_SUPERVISOR_LISTENER_H_
#define CUDA_REMOTE_SERVER_SUPERVISOR_LISTENER_H_

#include <sys/types.h>

#include <functional>
#include <list>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "proto/threads/mutex.h"
#include "server/supervisor/address_list.h"
#include "server/supervisor/log_limit.h"

namespace cuda_remote::server {

class Listener {
 public:
  static constexpr size_t kMostOfHost = 256;
  static constexpr size_t kMostUnproven = 32;  // of one host
  static constexpr size_t kMostUnprovenOfAll = 128;

  Listener() = default;
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // HOST:PORT, an IPv6 address in brackets; no host: all addresses; port 0: any free one.
  absl::Status Listen(const std::string& address);
  int port() const { return port_; }

  // Nothing: every host may connect.
  void SetAllowed(std::optional<AddressList> allowed);
  // `hand_over` gets each connection that is served, and owns it; from a thread of the listener's own.
  void Start(size_t most_connections, std::function<void(int)> hand_over);
  void Stop();

  // The client at this address (host and port) has shown who it is.
  void Proven(const IpAddress& address, uint16_t port);

 private:
  struct Connection {
    int fd;
    ino_t inode;  // tells whether `fd` is still this connection: gRPC closes it, and numbers are used again
    IpAddress address;
    IpAddress host;
    uint16_t port;
    bool proven;
  };
  void Loop();
  void Accept(int listen_fd);
  // Why a connection from there is turned away; empty: it is not.
  std::string Refusal(const IpAddress& address) CR_REQUIRES(mutex_);
  // Forgets connections that are closed.
  void Sweep() CR_REQUIRES(mutex_);

  std::vector<int> listen_fds_;
  int port_ = 0;
  int wake_fd_ = -1;
  std::function<void(int)> hand_over_;
  size_t most_connections_ = 0;
  std::thread thread_;
  LogLimit refused_log_, failed_log_;  // the thread's

  Mutex mutex_;
  std::optional<AddressList> allowed_ CR_GUARDED_BY(mutex_);
  std::list<Connection> connections_ CR_GUARDED_BY(mutex_);
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_SUPERVISOR_LISTENER_H_
