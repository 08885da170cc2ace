// SPDX-License-Identifier: Apache-2.0
// A daemon's TCP port: accepts connections, and decides which of them gRPC, or another server, gets to see.
//
// gRPC takes what comes: it has no limits by host, and when the process has no descriptors left it stops listening for
// good, or spins. So the port is ours, and gRPC is handed connected sockets. What is decided here needs no byte from
// the client:
//   - a host that is not on the list (cr-server --insecure-tcp) is turned away;
//   - one host has at most kMostOfHost connections, of which kMostUnproven have not yet shown who they are, as far as
//     Proven is told. Strangers, hosts none of whose connections has ever been proven, have at most kMostUnprovenOfAll
//     of these together;
//   - all hosts together have a limit, too, which leaves descriptors for local clients and workers. Strangers cannot
//     fill the last part of it (kShareOfKnown): it is for known hosts, whose sessions may have to be resumed;
//   - who stays silent makes room. At a limit, the oldest unproven connection is closed of the host that has the most
//     of them, so that a newcomer is not locked out. A stranger never makes a known host's connection close;
//   - when there are no descriptors, nothing is accepted for a moment.
// How long a connection may stay without showing who it is, is the server's to enforce (SetServerArguments).
//
// Listen, then Start, then Stop, from one thread. Proven, Refused and SetAllowed: any thread.
#ifndef CUDA_REMOTE_PROTO_CONTROL_LISTENER_H_
#define CUDA_REMOTE_PROTO_CONTROL_LISTENER_H_

#include <sys/types.h>

#include <functional>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "proto/base/unique_fd.h"
#include "proto/control/address_list.h"
#include "proto/control/log_limit.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::control {

class Listener {
 public:
  static constexpr size_t kMostOfHost = 256;
  static constexpr size_t kMostUnproven = 32;  // of one host
  static constexpr size_t kMostUnprovenOfAll = 128;
  static constexpr size_t kShareOfKnown = 8;  // one in so many places
  static constexpr size_t kMostKnown = 4096;  // hosts that are remembered
  static constexpr unsigned kMostRefusals = 8;

  // A line for the daemon's log; `error`: something is wrong here, and not with a client. From the listener's thread.
  using Log = std::function<void(bool error, const std::string& line)>;
  explicit Listener(Log log) : log_(std::move(log)) {}
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
  // It was refused, as with a wrong token. After kMostRefusals its connection is closed, unless it was proven before.
  void Refused(const IpAddress& address, uint16_t port);

 private:
  struct Connection {
    int fd = -1;      // the server's, which closes it
    ino_t inode = 0;  // tells whether `fd` is still this connection: numbers are used again
    // As long as the connection is unproven: to close it by. The server may have closed `fd` already.
    UniqueFd own = UniqueFd();
    IpAddress address{};
    IpAddress host{};
    uint16_t port = 0;
    unsigned refusals = 0;
    bool proven() const { return !own.ok(); }
  };
  void Loop();
  void Accept(int listen_fd);
  // Why a connection from there is turned away; empty: it is not, and there is room for it. *closed: of which hosts
  // silent connections were closed for that.
  std::string MakeRoom(const IpAddress& address, std::vector<IpAddress>* closed) CR_REQUIRES(mutex_);
  // Closes an unproven connection. The server may be using its descriptor, and sees the end.
  static void Close(const Connection& connection);
  // Closes the oldest unproven connection of `host`, if not null; else of the host, not a known one, that has the most.
  // False if there is none.
  bool CloseSilent(const IpAddress* host, std::vector<IpAddress>* closed) CR_REQUIRES(mutex_);
  bool IsKnown(const IpAddress& host) const CR_REQUIRES(mutex_) { return known_.count(host) != 0; }
  // Forgets connections that are closed.
  void Sweep() CR_REQUIRES(mutex_);

  const Log log_;
  std::vector<int> listen_fds_;
  int port_ = 0;
  int wake_fd_ = -1;
  std::function<void(int)> hand_over_;
  size_t most_connections_ = 0;
  std::thread thread_;
  LogLimit refused_log_, closed_log_, failed_log_;  // the thread's

  Mutex mutex_;
  std::optional<AddressList> allowed_ CR_GUARDED_BY(mutex_);
  std::list<Connection> connections_ CR_GUARDED_BY(mutex_);  // the oldest first
  // Hosts of which a connection was proven, with a number that grows: when that was last.
  std::map<IpAddress, uint64_t> known_ CR_GUARDED_BY(mutex_);
  uint64_t proofs_ CR_GUARDED_BY(mutex_) = 0;
};

}  // namespace cuda_remote::control

#endif  // CUDA_REMOTE_PROTO_CONTROL_LISTENER_H_
