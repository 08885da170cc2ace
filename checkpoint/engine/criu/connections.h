// SPDX-License-Identifier: Apache-2.0
// The TCP connections of a job, at a checkpoint. CRIU can save both ends of a connection that the job has with itself,
// and they work after a restart as before. A connection with somebody else has no second end in the image, and its
// bytes would not fit what the other has seen since: it can only be closed then.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CONNECTIONS_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CONNECTIONS_H_

#include <linux/filter.h>

#include <array>
#include <cstdint>
#include <functional>
#include <istream>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace cuda_remote::checkpoint {

struct Endpoint {
  // In network order, as the kernel has it; IPv4 mapped into IPv6, as one end may see the other.
  std::array<uint32_t, 4> address{};
  uint16_t port = 0;

  bool operator<(const Endpoint& other) const { return std::tie(address, port) < std::tie(other.address, other.port); }
};

struct Connection {
  Endpoint local, remote;
  // In an image: where the state is, one byte, and the local port, of so many bytes.
  size_t state_at = 0, port_at = 0, port_bytes = 0;
  uint32_t number = 0;  // in an image: the socket's

  bool operator<(const Connection& other) const {
    return std::tie(local, remote) < std::tie(other.local, other.remote);
  }
};

// As in "10.0.0.2:41000 -> 10.0.0.7:443", and one of the ends.
std::string ToText(const Endpoint& endpoint);
std::string ToText(const Connection& connection);

// A line of /proc/PID/net/tcp or tcp6.
struct TcpLine {
  // The kernel's numbers of a socket's state (include/net/tcp_states.h).
  enum State : uint32_t {
    kMade = 1,
    kBeingMade = 3,
    kEnds = 4,
    kTimeWait = 6,
    kClosed = 7,
    kEndsLast = 9,
    kListens = 10,
    kBothEnd = 11,
  };
  Connection connection;
  uint32_t state = 0;
  uint32_t unsent = 0;    // bytes that the other end has not acknowledged
  uint32_t received = 0;  // bytes that nobody has read; of one that listens: connections that nobody has accepted
  uint64_t inode = 0;     // 0: it is no process's
};
// False if the line is no such thing.
bool ParseTcpLine(const std::string& line, TcpLine* facts);

// What /proc/PID/net/tcp and tcp6 list, by the inode of the socket: connections of any state, but no sockets that
// listen, and none that are closed. Lines that are no such thing are left out.
std::map<uint64_t, Connection> ParseProcTcp(std::istream& lines);

// The connections that these processes, of one network namespace, have open; numbers as seen here.
std::vector<Connection> OpenConnections(const std::vector<int>& pids);

// Calls `use` with a duplicate of each socket that these processes have open, more than once if several have it. Needs
// root.
void ForEachSocketOf(const std::vector<int>& pids, const std::function<void(int socket)>& use);

// The filter of a socket (SO_ATTACH_FILTER); empty: it has none.
std::vector<sock_filter> FilterOf(int socket);

// Takes this filter from all sockets of these processes that have it. Needs root.
void DetachFilter(const std::vector<int>& pids, const std::vector<sock_filter>& filter);

// The connections in CRIU's files.img. False if `image` is not such a file. Any input is safe.
bool SavedConnections(std::string_view image, std::vector<Connection>* connections);

// Those whose other end is not among them.
std::vector<Connection> WithOthers(const std::vector<Connection>& connections);

// Has CRIU's image of a TCP stream (tcp-stream-*.img) say that all of its data was sent, which is sent again if the
// other end does not have it. CRIU sends what was not while the other end may not be there yet, which would be the
// connection's end. False if `image` is not such a file. Any input is safe.
bool CallAllSent(std::string* image);

// Makes these, of SavedConnections, closed sockets in the image, which CRIU then makes without an address.
void CloseSaved(const std::vector<Connection>& connections, std::string* image);

// Makes the connections of stopped processes usable again that a dump has left as CRIU needs them ("repair mode"), in
// which nothing is sent or received. To be called before they run on or end. `others_only`: those within the job stay
// as they are. Needs root.
void ResumeConnections(const std::vector<int>& pids, bool others_only);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CONNECTIONS_H_
