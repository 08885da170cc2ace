// SPDX-License-Identifier: Apache-2.0
// The TCP ports that a saved job needs free at its restart.
//
// When a connection ends, the kernel keeps its port for a minute (TIME_WAIT), so that packets of the old connection do
// not reach a new one. A job that is stopped and restarted at once would find ports of its own taken in that way, and a
// socket that was made without SO_REUSEADDR cannot be bound then. Where both ends were on this machine no packet is on
// its way any more, and the kernel is asked to let go of the port; for others the restart waits. The ports of a stopped
// job are free for everybody: the kernel may have given one to another program's connection, which may end soon.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_PORTS_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_PORTS_H_

#include <array>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>

namespace cuda_remote::checkpoint {

// A local end of a TCP socket. Addresses as in IPv6, those of IPv4 in its form for them (::ffff:a.b.c.d); zeros stand
// for all addresses of the machine.
struct TcpEnd {
  uint16_t port = 0;
  std::array<uint8_t, 16> address = {};

  bool operator<(const TcpEnd& other) const { return std::tie(port, address) < std::tie(other.port, other.address); }
  bool operator==(const TcpEnd& other) const { return std::tie(port, address) == std::tie(other.port, other.address); }

  // Whether both cannot be had at once, unless both have SO_REUSEADDR and neither listens.
  bool Excludes(const TcpEnd& other) const;
};

// A socket that has a port of the job.
struct HeldPort {
  uint16_t port = 0;
  // The connection has ended, and no process has the socket any more.
  bool ended = false;
  // The process that has it: "PROGRAM (PID n)". Empty if it has ended, or if that is not to be found out.
  std::string holder;
};

// The local ends of the TCP sockets in CRIU's files.img. False if `image` is not such a file. Any input is safe.
bool SavedPorts(std::string_view image, std::set<TcpEnd>* ends);

// Returns true once no socket of this network namespace excludes one of the ends. Connections that have ended on this
// machine are taken away from the kernel, which needs CAP_NET_ADMIN. While there are others, `waiting` is called with
// one of them, again and again; false from it ends the wait, and so does a kernel that cannot be asked: false then.
bool FreePorts(const std::set<TcpEnd>& ends, const std::function<bool(const HeldPort& held)>& waiting);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_PORTS_H_
