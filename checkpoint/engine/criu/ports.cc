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

#include <vector>

#include "checkpoint/engine/criu/criu_image.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr int kPollUs = 200000;
// The kernel's number of the state (include/net/tcp_states.h).
constexpr uint32_t kTimeWait = 6;

// sock_diag(7): questions about sockets of this network namespace, and their end.
class SocketDiagnosis {
 public:
  SocketDiagnosis() : socket_(socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG)) {}
  ~SocketDiagnosis() {
    if (socket_ >= 0) close(socket_);
  }

  // The connections of this family that have ended and still have their port.
  bool Ended(uint8_t family, std::vector<inet_diag_msg>* found) {
    inet_diag_req_v2 request = {};
    request.sdiag_family = family;
    request.sdiag_protocol = IPPROTO_TCP;
    request.idiag_states = 1u << kTimeWait;
    if (!Send(SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, request)) return false;
    alignas(nlmsghdr) char buffer[32 << 10];
    while (true) {
      const ssize_t got = recv(socket_, buffer, sizeof buffer, 0);
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
    request.idiag_states = 1u << kTimeWait;
    request.id = connection.id;
    char answer[1024];
    if (Send(SOCK_DESTROY, NLM_F_REQUEST | NLM_F_ACK, request)) recv(socket_, answer, sizeof answer, 0);
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
    return send(socket_, &message, sizeof message, 0) == ssize_t(sizeof message);
  }

  const int socket_;
};

// Both ends at one address, so on one machine.
bool WasLocal(const inet_diag_msg& connection) {
  const size_t bytes = connection.idiag_family == AF_INET ? 4 : 16;
  if (memcmp(connection.id.idiag_src, connection.id.idiag_dst, bytes) == 0) return true;
  // All of 127.0.0.0/8 is the loopback interface.
  const int last = connection.idiag_family == AF_INET ? 0 : 3;
  const bool mapped = last == 0 || (connection.id.idiag_src[0] == 0 && connection.id.idiag_src[1] == 0 &&
                                    connection.id.idiag_src[2] == htonl(0xffff));
  return mapped && ntohl(connection.id.idiag_src[last]) >> 24 == 127 && ntohl(connection.id.idiag_dst[last]) >> 24 == 127;
}

}  // namespace

bool SavedPorts(std::string_view image, std::set<uint16_t>* ports) {
  using protozero::pbf_wire_type;
  using protozero::tag_and_type;
  ports->clear();
  // An InetSkEntry (CRIU's images/sk-inet.proto).
  return ReadFilesImage(image, FileKind::kInternetSocket, [&](protozero::pbf_reader facts) {
    uint32_t protocol = 0, port = 0;
    while (facts.next()) {
      switch (facts.tag_and_type()) {
        case tag_and_type(5, pbf_wire_type::varint):
          protocol = facts.get_uint32();
          break;
        case tag_and_type(7, pbf_wire_type::varint):
          port = facts.get_uint32();
          break;
        default:
          facts.skip();
      }
    }
    if (protocol == IPPROTO_TCP && port != 0 && port <= UINT16_MAX) ports->insert(uint16_t(port));
  });
}

bool FreePorts(const std::set<uint16_t>& ports, const std::function<bool(uint16_t port)>& waiting) {
  if (ports.empty()) return true;
  SocketDiagnosis diagnosis;
  const auto ended = [&](std::vector<inet_diag_msg>* holding) {
    holding->clear();
    std::vector<inet_diag_msg> all;
    if (!diagnosis.Ended(AF_INET, &all) || !diagnosis.Ended(AF_INET6, &all)) return false;
    for (const inet_diag_msg& connection : all) {
      if (ports.count(ntohs(connection.id.idiag_sport))) holding->push_back(connection);
    }
    return true;
  };
  std::vector<inet_diag_msg> holding;
  if (!ended(&holding)) return false;
  for (const inet_diag_msg& connection : holding) {
    if (WasLocal(connection)) diagnosis.Forget(connection);
  }
  while (ended(&holding)) {
    if (holding.empty()) return true;
    if (!waiting(ntohs(holding.front().id.idiag_sport))) return false;
    usleep(kPollUs);
  }
  return false;
}

}  // namespace cuda_remote::checkpoint
