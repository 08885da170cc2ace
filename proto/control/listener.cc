// SPDX-License-Identifier: Apache-2.0
#include "proto/control/listener.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "proto/threads/mutex.h"

namespace cuda_remote::control {
namespace {

// How long nothing is accepted when there are no descriptors or no memory.
constexpr int kBackOffMs = 200;
// How often is looked which unproven connections the server has closed.
constexpr int kSweepMs = 500;
// How many connections are accepted before somebody else gets a turn.
constexpr int kMostAtOnce = 64;
// Unsent data of a dead peer; as gRPC does with its keep-alive time.
constexpr unsigned kUserTimeoutMs = 10000;

bool Splits(const std::string& address, std::string* host, std::string* port) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon + 1 == address.size()) return false;
  *host = address.substr(0, colon);
  *port = address.substr(colon + 1);
  if (port->find_first_not_of("0123456789") != std::string::npos || port->size() > 5 || std::stoi(*port) > 65535)
    return false;
  if (host->size() > 2 && host->front() == '[' && host->back() == ']') {
    *host = host->substr(1, host->size() - 2);
    return true;
  }
  return host->find(':') == std::string::npos;
}

int BoundPort(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  IpAddress ignored;
  uint16_t port = 0;
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  ReadSocketAddress(reinterpret_cast<sockaddr*>(&address), length, &ignored, &port);
  return port;
}

bool SameAddress(const addrinfo& a, const addrinfo& b) {
  return a.ai_addrlen == b.ai_addrlen && memcmp(a.ai_addr, b.ai_addr, a.ai_addrlen) == 0;
}

// -1 and errno on failure. `v6_only`: a socket for IPv6 does not take IPv4 along.
int OpenPort(const addrinfo& place, int port, bool v6_only) {
  const int fd = socket(place.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  const int on = 1, only = v6_only;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (place.ai_family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof(only));
  sockaddr_storage address{};
  memcpy(&address, place.ai_addr, place.ai_addrlen);
  if (place.ai_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&address)->sin6_port = htons(uint16_t(port));
  } else {
    reinterpret_cast<sockaddr_in*>(&address)->sin_port = htons(uint16_t(port));
  }
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), place.ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0) return fd;
  const int failure = errno;
  close(fd);
  errno = failure;
  return -1;
}

}  // namespace

Listener::~Listener() { Stop(); }

absl::Status Listener::Listen(const std::string& address) {
  std::string host, port;
  if (!Splits(address, &host, &port)) {
    return absl::InvalidArgumentError("--listen " + address +
                                      " is not HOST:PORT, such as 0.0.0.0:7070, gpu7:7070 or [::]:7070");
  }
  addrinfo wanted{};
  wanted.ai_family = AF_UNSPEC;
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = AI_PASSIVE;
  addrinfo* places = nullptr;
  if (const int failure = getaddrinfo(host.empty() ? nullptr : host.c_str(), port.c_str(), &wanted, &places)) {
    return absl::FailedPreconditionError("cannot listen on " + address + ": " + gai_strerror(failure) +
                                         "; HOST must be an address of this machine");
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> freed(places, freeaddrinfo);
  int failure = 0;
  port_ = std::stoi(port);
  bool has_v4 = false;
  for (const addrinfo* place = places; place; place = place->ai_next) has_v4 |= place->ai_family == AF_INET;
  for (const addrinfo* place = places; place; place = place->ai_next) {
    // A name may have the same address twice, as localhost in some /etc/hosts.
    const addrinfo* same = places;
    while (same != place && !SameAddress(*same, *place)) same = same->ai_next;
    if (same != place) continue;
    const int fd = OpenPort(*place, port_, has_v4);
    if (fd >= 0) {
      listen_fds_.push_back(fd);
      port_ = BoundPort(fd);
    } else if (failure == 0 || errno == EADDRINUSE) {
      failure = errno;
    }
  }
  // A name may stand for an address family that this machine does not have, but a port that is taken is an error.
  if (!listen_fds_.empty() && failure != EADDRINUSE && failure != EACCES) return absl::OkStatus();
  for (int fd : listen_fds_) close(fd);
  listen_fds_.clear();
  const char* const help = failure == EADDRINUSE
                               ? "; another process has this port: choose another one, or end that process"
                           : failure == EADDRNOTAVAIL ? "; HOST must be an address of this machine"
                           : failure == EACCES        ? "; ports below 1024 need privileges"
                                                      : "";
  return absl::FailedPreconditionError("cannot listen on " + address + ": " + strerror(failure) + help);
}

void Listener::SetAllowed(std::optional<AddressList> allowed) {
  MutexLock lock(&mutex_);
  allowed_ = std::move(allowed);
}

void Listener::Start(size_t most_connections, std::function<void(int)> hand_over) {
  most_connections_ = most_connections;
  hand_over_ = std::move(hand_over);
  wake_fd_ = eventfd(0, EFD_CLOEXEC);
  thread_ = std::thread([this] { Loop(); });
}

void Listener::Stop() {
  const uint64_t one = 1;
  if (thread_.joinable() && write(wake_fd_, &one, sizeof(one)) == sizeof(one)) thread_.join();
  for (int fd : listen_fds_) close(fd);
  listen_fds_.clear();
  if (wake_fd_ >= 0) close(wake_fd_);
  wake_fd_ = -1;
}

void Listener::Proven(const IpAddress& address, uint16_t port) {
  MutexLock lock(&mutex_);
  for (Connection& connection : connections_) {
    if (connection.port == port && connection.address == address) connection.own.Close();
  }
  known_[HostOf(address)] = ++proofs_;
  if (known_.size() <= kMostKnown) return;
  // The host that has shown nothing for the longest time, unless it is still connected.
  auto oldest = known_.end();
  for (auto host = known_.begin(); host != known_.end(); ++host) {
    const bool connected = std::any_of(connections_.begin(), connections_.end(), [&](const Connection& connection) {
      return connection.proven() && connection.host == host->first;
    });
    if (!connected && (oldest == known_.end() || host->second < oldest->second)) oldest = host;
  }
  if (oldest != known_.end()) known_.erase(oldest);
}

void Listener::Refused(const IpAddress& address, uint16_t port) {
  MutexLock lock(&mutex_);
  const auto is_this = [&](const Connection& connection) {
    return connection.port == port && connection.address == address && !connection.proven();
  };
  const auto found = std::find_if(connections_.begin(), connections_.end(), is_this);
  if (found == connections_.end() || ++found->refusals < kMostRefusals) return;
  Close(*found);
  connections_.erase(found);
}

void Listener::Close(const Connection& connection) {
  const linger none{1, 0};  // a reset
  setsockopt(connection.own.get(), SOL_SOCKET, SO_LINGER, &none, sizeof(none));
  shutdown(connection.own.get(), SHUT_RDWR);
}

void Listener::Sweep() {
  connections_.remove_if([](const Connection& connection) {
    struct stat facts;
    return fstat(connection.fd, &facts) != 0 || facts.st_ino != connection.inode;
  });
}

bool Listener::CloseSilent(const IpAddress* host, std::vector<IpAddress>* closed) {
  std::map<IpAddress, size_t> counts;
  for (const Connection& connection : connections_) {
    if (connection.proven() || (host ? connection.host != *host : IsKnown(connection.host))) continue;
    ++counts[connection.host];
  }
  size_t most = 0;
  for (const auto& [one, count] : counts) most = std::max(most, count);
  for (auto connection = connections_.begin(); most > 0 && connection != connections_.end(); ++connection) {
    const auto found = counts.find(connection->host);
    if (connection->proven() || found == counts.end() || found->second != most) continue;
    Close(*connection);
    closed->push_back(connection->address);
    connections_.erase(connection);
    return true;
  }
  return false;
}

std::string Listener::MakeRoom(const IpAddress& address, std::vector<IpAddress>* closed) {
  if (allowed_ && !allowed_->Contains(address)) return "it is not on the list of --insecure-tcp";
  const IpAddress host = HostOf(address);
  const bool known = IsKnown(host);
  const size_t places = known ? most_connections_ : most_connections_ - most_connections_ / kShareOfKnown;
  for (bool swept = false;; swept = true) {
    size_t of_host = 0, unproven_of_host = 0, unproven_strangers = 0;
    for (const Connection& connection : connections_) {
      const bool same = connection.host == host;
      of_host += same;
      unproven_strangers += !connection.proven() && !IsKnown(connection.host);
      unproven_of_host += same && !connection.proven();
    }
    const bool host_is_full = unproven_of_host >= kMostUnproven || of_host >= kMostOfHost;
    const bool all_full = (!known && unproven_strangers >= kMostUnprovenOfAll) || connections_.size() >= places;
    if (!host_is_full && !all_full) return "";
    if (!swept) {
      Sweep();  // some may be closed by now
    } else if (!CloseSilent(host_is_full ? &host : nullptr, closed)) {
      return host_is_full ? "that host has " + std::to_string(kMostOfHost) + " connections already"
                          : "there are " + std::to_string(connections_.size()) + " connections already";
    }
  }
}

void Listener::Accept(int listen_fd) {
  for (int i = 0; i < kMostAtOnce; ++i) {
    sockaddr_storage from{};
    socklen_t length = sizeof(from);
    const int fd = accept4(listen_fd, reinterpret_cast<sockaddr*>(&from), &length, SOCK_CLOEXEC | SOCK_NONBLOCK);
    std::string more;
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN) return;
      const int failure = errno;
      if (failed_log_.Allow(&more)) log_(true, std::string("cannot accept a connection: ") + strerror(failure) + more);
      // The connection stays where it is; to look again at once would only take the processor.
      pollfd waiting{wake_fd_, POLLIN, 0};
      poll(&waiting, 1, kBackOffMs);
      return;
    }
    Connection connection;
    struct stat facts;
    std::string why;
    std::vector<IpAddress> closed;
    const bool known =
        ReadSocketAddress(reinterpret_cast<sockaddr*>(&from), length, &connection.address, &connection.port) &&
        fstat(fd, &facts) == 0;
    const IpAddress address = connection.address;
    if (!known) why = "its address is not known";
    if (why.empty()) {
      MutexLock lock(&mutex_);
      why = MakeRoom(address, &closed);
      if (why.empty()) {
        connection.own.Reset(fcntl(fd, F_DUPFD_CLOEXEC, 0));
        if (!connection.own.ok()) why = strerror(errno);
      }
      if (why.empty()) {
        connection.fd = fd;
        connection.inode = facts.st_ino;
        connection.host = HostOf(address);
        connections_.push_back(std::move(connection));
      }
    }
    for (const IpAddress& one : closed) {
      if (closed_log_.Allow(&more)) {
        log_(false, "closed a connection from " + IpAddressText(one) +
                        " to make room: it and others have not shown who they are" + more);
      }
    }
    if (!why.empty()) {
      if (refused_log_.Allow(&more))
        log_(false, "turned away a connection from " + IpAddressText(address) + ": " + why + more);
      // A reset: the port does not keep the connection's number for minutes.
      const linger none{1, 0};
      setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof(none));
      close(fd);
      continue;
    }
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUserTimeoutMs, sizeof(kUserTimeoutMs));
    hand_over_(fd);
  }
}

void Listener::Loop() {
  std::vector<pollfd> waiting = {{wake_fd_, POLLIN, 0}};
  for (int fd : listen_fds_) waiting.push_back({fd, POLLIN, 0});
  while (true) {
    bool silent = false;
    {
      MutexLock lock(&mutex_);
      for (const Connection& connection : connections_) silent |= !connection.proven();
    }
    const int count = poll(waiting.data(), waiting.size(), silent ? kSweepMs : -1);
    if (count < 0 && errno != EINTR) {
      log_(true, std::string("the server stops listening on its TCP port: poll: ") + strerror(errno));
      return;
    }
    if (count <= 0) {
      // What the server has closed, the client sees when `own` is closed, too.
      MutexLock lock(&mutex_);
      Sweep();
      continue;
    }
    if (waiting[0].revents) return;
    for (size_t i = 1; i < waiting.size(); ++i) {
      if (waiting[i].revents) Accept(waiting[i].fd);
    }
  }
}

}  // namespace cuda_remote::control
