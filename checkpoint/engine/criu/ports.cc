// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/ports.h"

#include <arpa/inet.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <vector>

#include "checkpoint/engine/criu/criu_image.h"
#include "checkpoint/engine/criu/descriptors.h"
#include "proto/base/proc.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr int kPollUs = 200000;
// The kernel's numbers of states (include/net/tcp_states.h), as bits.
constexpr uint32_t kTimeWait = 1u << 6;
// A process has closed its end: FIN_WAIT1, FIN_WAIT2, TIME_WAIT, LAST_ACK, CLOSING.
constexpr uint32_t kClosed = 1u << 4 | 1u << 5 | kTimeWait | 1u << 9 | 1u << 11;
// The socket has a port: all but CLOSE (7) and NEW_SYN_RECV (12), which belongs to a listening socket.
constexpr uint32_t kWithPort = 0xffe & ~(1u << 7);

// sock_diag(7): questions about sockets of this network namespace, and their end.
class SocketDiagnosis {
 public:
  SocketDiagnosis() : socket_(socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG)) {}

  // Adds the sockets of this family that have a port.
  bool WithPort(uint8_t family, std::vector<inet_diag_msg>* found) {
    inet_diag_req_v2 request = {};
    request.sdiag_family = family;
    request.sdiag_protocol = IPPROTO_TCP;
    request.idiag_states = kWithPort;
    if (!Send(SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, request)) return false;
    alignas(nlmsghdr) char buffer[32 << 10];
    while (true) {
      const ssize_t got = recv(socket_.get(), buffer, sizeof buffer, 0);
      if (got <= 0) return false;
      size_t left = size_t(got);
      for (auto* header = reinterpret_cast<nlmsghdr*>(buffer); NLMSG_OK(header, left);
           header = NLMSG_NEXT(header, left)) {
        if (header->nlmsg_type == NLMSG_DONE) return true;
        if (header->nlmsg_type == NLMSG_ERROR || header->nlmsg_len < NLMSG_LENGTH(sizeof(inet_diag_msg))) return false;
        found->push_back(*static_cast<const inet_diag_msg*>(NLMSG_DATA(header)));
      }
    }
  }

  // Has the kernel forget it. Whether that worked is seen by asking again.
  void Forget(const inet_diag_msg& connection) {
    inet_diag_req_v2 request = {};
    request.sdiag_family = connection.idiag_family;
    request.sdiag_protocol = IPPROTO_TCP;
    request.idiag_states = kTimeWait;
    request.id = connection.id;
    char answer[1024];
    if (Send(SOCK_DESTROY, NLM_F_REQUEST | NLM_F_ACK, request)) recv(socket_.get(), answer, sizeof answer, 0);
  }

 private:
  bool Send(uint16_t type, uint16_t flags, const inet_diag_req_v2& request) {
    struct {
      nlmsghdr header;
      inet_diag_req_v2 request;
    } message = {};
    message.header.nlmsg_len = sizeof message;
    message.header.nlmsg_type = type;
    message.header.nlmsg_flags = flags;
    message.request = request;
    return send(socket_.get(), &message, sizeof message, 0) == ssize_t(sizeof message);
  }

  const UniqueFd socket_;
};

using Address = std::array<uint8_t, 16>;

Address MakeAddress(int family, const uint32_t* words) {
  Address address = {};
  if (family == AF_INET6) {
    memcpy(address.data(), words, sizeof address);
  } else if (words[0] != 0) {
    address[10] = address[11] = 0xff;
    memcpy(address.data() + 12, words, 4);
  }
  return address;
}

bool IsMapped(const Address& address) {
  return std::all_of(address.begin(), address.begin() + 10, [](uint8_t byte) { return byte == 0; }) &&
         address[10] == 0xff && address[11] == 0xff;
}

// No process has the socket any more, but the kernel still has the connection. (A connection that a process has not
// accepted yet belongs to nobody either, but its state is another.)
bool HasEnded(const inet_diag_msg& socket) {
  return socket.idiag_inode == 0 && (1u << socket.idiag_state & kClosed) != 0;
}

// Both ends at one address, so on one machine, and nothing is on its way between them.
bool IsOver(const inet_diag_msg& socket) {
  if (!HasEnded(socket) || 1u << socket.idiag_state != kTimeWait) return false;
  const Address near = MakeAddress(socket.idiag_family, socket.id.idiag_src);
  const Address far = MakeAddress(socket.idiag_family, socket.id.idiag_dst);
  // All of 127.0.0.0/8 is the loopback interface.
  return near == far || (IsMapped(near) && IsMapped(far) && near[12] == 127 && far[12] == 127);
}

std::string HolderOf(uint32_t inode) {
  const std::string wanted = "socket:[" + std::to_string(inode) + "]";
  return FindUserOfFile([](int) { return true; },
                        [&](const std::string& process, const std::string& number) {
                          return ReadLink(process + "/fd/" + number) == wanted;
                        });
}

}  // namespace

bool TcpEnd::Excludes(const TcpEnd& other) const {
  return port == other.port && (address == other.address || address == Address{} || other.address == Address{});
}

bool SavedPorts(std::string_view image, std::set<TcpEnd>* ends) {
  using protozero::pbf_wire_type;
  using protozero::tag_and_type;
  ends->clear();
  // An InetSkEntry (CRIU's images/sk-inet.proto).
  return ReadFilesImage(image, FileKind::kInternetSocket, [&](protozero::pbf_reader facts) {
    uint32_t protocol = 0, port = 0, family = 0;
    std::vector<uint32_t> words;
    while (facts.next()) {
      switch (facts.tag_and_type()) {
        case tag_and_type(3, pbf_wire_type::varint):
          family = facts.get_uint32();
          break;
        case tag_and_type(5, pbf_wire_type::varint):
          protocol = facts.get_uint32();
          break;
        case tag_and_type(7, pbf_wire_type::varint):
          port = facts.get_uint32();
          break;
        case tag_and_type(11, pbf_wire_type::varint):
          words.push_back(facts.get_uint32());
          break;
        default:
          facts.skip();
      }
    }
    if (protocol != IPPROTO_TCP || port == 0 || port > UINT16_MAX) return;
    words.resize(4);
    ends->insert({uint16_t(port), MakeAddress(int(family), words.data())});
  });
}

bool FreePorts(const std::set<TcpEnd>& ends, const std::function<bool(const HeldPort& held)>& waiting) {
  if (ends.empty()) return true;
  SocketDiagnosis diagnosis;
  const auto find = [&](std::vector<inet_diag_msg>* holding) {
    holding->clear();
    std::vector<inet_diag_msg> all;
    if (!diagnosis.WithPort(AF_INET, &all) || !diagnosis.WithPort(AF_INET6, &all)) return false;
    for (const inet_diag_msg& socket : all) {
      const TcpEnd end = {ntohs(socket.id.idiag_sport), MakeAddress(socket.idiag_family, socket.id.idiag_src)};
      if (std::any_of(ends.begin(), ends.end(), [&](const TcpEnd& one) { return one.Excludes(end); })) {
        holding->push_back(socket);
      }
    }
    return true;
  };
  std::vector<inet_diag_msg> holding;
  std::map<uint32_t, std::string> holders;  // by inode: all processes are looked at once for each
  while (find(&holding)) {
    bool forgot = false;
    for (const inet_diag_msg& socket : holding) {
      if (!IsOver(socket)) continue;
      diagnosis.Forget(socket);
      forgot = true;
    }
    if (forgot && !find(&holding)) return false;
    if (holding.empty()) return true;
    const inet_diag_msg& one = holding.front();
    HeldPort held = {ntohs(one.id.idiag_sport), HasEnded(one), ""};
    if (!held.ended) {
      const auto [holder, is_new] = holders.try_emplace(one.idiag_inode);
      if (is_new) holder->second = HolderOf(one.idiag_inode);
      held.holder = holder->second;
    }
    if (!waiting(held)) return false;
    usleep(kPollUs);
  }
  return false;
}

}  // namespace cuda_remote::checkpoint
