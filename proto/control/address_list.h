// SPDX-License-Identifier: Apache-2.0
// Lists of network addresses: which hosts --insecure-tcp admits, and which host a connection counts for.
//
// Thread-safe: no state. Nothing here throws but std::bad_alloc.
#ifndef CUDA_REMOTE_PROTO_CONTROL_ADDRESS_LIST_H_
#define CUDA_REMOTE_PROTO_CONTROL_ADDRESS_LIST_H_

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace cuda_remote::control {

// An IP address: 16 bytes, with IPv4 addresses in their IPv6 form (::ffff:a.b.c.d).
using IpAddress = std::array<uint8_t, 16>;

// False if it is no numeric IPv4 or IPv6 address. Names of hosts are not looked up.
bool ParseIpAddress(std::string_view text, IpAddress* address);
bool ReadSocketAddress(const sockaddr* from, socklen_t length, IpAddress* address, uint16_t* port);
// gRPC's name of a client that it serves (ServerContext::peer). False if that is no TCP connection's.
bool ReadPeer(std::string_view name, IpAddress* address, uint16_t* port);
std::string IpAddressText(const IpAddress& address);

// What counts as one host for limits: an IPv4 address, or the /64 network of an IPv6 address, whose lower half its
// owner chooses freely.
IpAddress HostOf(const IpAddress& address);

class AddressList {
 public:
  // Adds "10.1.2.3", "10.1.2.0/24" or "fd00::/8". Fails if it is none of these.
  absl::Status Add(std::string_view text);
  bool Contains(const IpAddress& address) const;
  bool empty() const { return ranges_.empty(); }
  bool operator==(const AddressList& other) const { return ranges_ == other.ranges_; }

 private:
  struct Range {
    IpAddress first;
    unsigned bits;
    bool operator==(const Range& other) const { return first == other.first && bits == other.bits; }
  };
  std::vector<Range> ranges_;
};

}  // namespace cuda_remote::control

#endif  // CUDA_REMOTE_PROTO_CONTROL_ADDRESS_LIST_H_
