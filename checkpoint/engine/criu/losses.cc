// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/losses.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

namespace cuda_remote::checkpoint {
namespace {

constexpr int kClosed = 7, kTcpUlp = 31, kUdpCork = 1, kPassPidfd = 76, kUdpLite = 136;
// Options of a Unix socket with which what it receives has control messages.
constexpr int kMessageOptions[] = {SO_PASSCRED, SO_PASSSEC, SO_TIMESTAMP, SO_TIMESTAMPNS, kPassPidfd};
constexpr char kClose[] = "close it before the checkpoint";

struct Family {
  int number;
  Loss loss;
};
// Sockets of which CRIU knows nothing.
constexpr Family kFamilies[] = {
    {AF_KEY, {"has a socket for IPsec keys (AF_KEY)", kClose}},
    {AF_RDS, {"has an RDS socket (AF_RDS)", kClose}},
    {AF_CAN, {"has a CAN socket (AF_CAN)", kClose}},
    {AF_TIPC, {"has a TIPC socket (AF_TIPC)", kClose}},
    {AF_BLUETOOTH, {"has a Bluetooth socket (AF_BLUETOOTH)", kClose}},
    {AF_ALG, {"has a socket of the kernel's cryptography (AF_ALG)", kClose}},
    {AF_VSOCK, {"has a socket to a virtual machine or its host (AF_VSOCK)", kClose}},
    {43, {"has an SMC socket (AF_SMC)", "have the program use TCP instead"}},
    {44, {"has an XDP socket (AF_XDP)", kClose}},
};
constexpr Loss kOtherFamily = {
    "has a socket of a family that is none of AF_UNIX, AF_INET, AF_INET6, AF_NETLINK and AF_PACKET", kClose};
constexpr Loss kOtherProtocol = {"has an Internet socket of a protocol that is none of TCP, UDP, UDP-Lite and ICMP",
                                 "have the program use TCP or UDP instead"};
constexpr Loss kOtherType = {"has an Internet socket of a type that is none of SOCK_STREAM, SOCK_DGRAM and SOCK_RAW",
                             "have the program use one of these types"};
constexpr Loss kCorked = {"has a UDP socket with UDP_CORK",
                          "have the program send the datagram and clear the option before the checkpoint"};
constexpr Loss kLayered = {"has a TCP connection on which the kernel works itself, as kernel TLS (TCP_ULP)",
                           "have the program use TLS without the kernel"};
constexpr Loss kFailed = {"has a TCP socket whose connect() has failed, and has not asked for the error (SO_ERROR)",
                          "have the program ask for it before the checkpoint, or close the socket"};
constexpr Loss kUrgent = {"has a connection with an urgent byte (MSG_OOB) that nobody has read",
                          "have the program read it before the checkpoint"};
constexpr Loss kBehindUrgent = {
    "has a TCP connection with unread data at or behind the place of an urgent byte (MSG_OOB)",
    "have the program read the data before the checkpoint"};
constexpr Loss kProgram = {
    "has a socket with a BPF program attached to it (SO_ATTACH_BPF)",
    "have the program use a classic filter (SO_ATTACH_FILTER), or detach it before the checkpoint"};
constexpr Loss kMessages = {
    "has a Unix socket with SO_PASSCRED, or another option that adds control messages, and unread data",
    "have the program read the data before the checkpoint"};
constexpr Loss kAnswers = {"has a netlink socket with unread data", "have the program read it before the checkpoint"};
constexpr Loss kGroups = {"has a netlink socket in a group above 32, or in a group without an address of its own",
                          "close it before the checkpoint, or bind it to an address"};
constexpr Loss kPackets = {"has a pipe with O_DIRECT, whose packets would become one stream",
                           "have the program use a pipe without O_DIRECT, or a Unix socket of type SOCK_SEQPACKET"};
constexpr Loss kTerminal = {"has a pseudo-terminal with unread data that is not in raw mode",
                            "have the program read it before the checkpoint, or try again"};

int OptionOf(int fd, int level, int option) {
  int value = 0;
  socklen_t bytes = sizeof(value);
  return getsockopt(fd, level, option, &value, &bytes) == 0 ? value : 0;
}

bool Polls(int fd, short events) {
  pollfd waiting = {fd, events, 0};
  return poll(&waiting, 1, 0) == 1 && (waiting.revents & events) != 0;
}

// Bytes that can be read.
int Readable(int fd) {
  int bytes = 0;
  return ioctl(fd, FIONREAD, &bytes) == 0 ? bytes : 0;
}

// Whether a TCP socket has an error, and was never connected: that of a connect() that did not wait.
bool HasFailed(int fd) {
  tcp_info facts = {};
  socklen_t bytes = sizeof(facts);
  if (!Polls(fd, POLLERR) || getsockopt(fd, IPPROTO_TCP, TCP_INFO, &facts, &bytes) != 0) return false;
  // The end of a queue of errors is an error, too, but not for a socket without a connection.
  return facts.tcpi_state == kClosed && facts.tcpi_bytes_acked == 0 && facts.tcpi_bytes_received == 0;
}

const Loss* LossOfInternetSocket(int fd, int type) {
  const int protocol = OptionOf(fd, SOL_SOCKET, SO_PROTOCOL);
  if (type == SOCK_RAW) return nullptr;
  if (type != SOCK_STREAM && type != SOCK_DGRAM) return &kOtherType;
  switch (protocol) {
    case IPPROTO_UDP:
    case kUdpLite:
      return OptionOf(fd, IPPROTO_UDP, kUdpCork) != 0 ? &kCorked : nullptr;
    case IPPROTO_ICMP:
    case IPPROTO_ICMPV6:
      return nullptr;
    case IPPROTO_TCP:
      break;
    default:
      return &kOtherProtocol;
  }
  char layer[16] = "";
  socklen_t bytes = sizeof(layer);
  if (getsockopt(fd, IPPROTO_TCP, kTcpUlp, layer, &bytes) == 0 && bytes > 0 && layer[0] != '\0') return &kLayered;
  if (HasFailed(fd)) return &kFailed;
  if (Polls(fd, POLLPRI)) return &kUrgent;
  int at_mark = 0;
  return ioctl(fd, SIOCATMARK, &at_mark) == 0 && at_mark != 0 ? &kBehindUrgent : nullptr;
}

const Loss* LossOfUnixSocket(int fd, int type) {
  if (Polls(fd, POLLPRI)) return &kUrgent;
  if (OptionOf(fd, SOL_SOCKET, SO_ACCEPTCONN) != 0) return nullptr;
  // The end of a connection can be read, too. A datagram may be empty.
  const bool unread = type == SOCK_DGRAM ? Polls(fd, POLLIN) : Readable(fd) > 0;
  if (!unread) return nullptr;
  for (const int option : kMessageOptions) {
    if (OptionOf(fd, SOL_SOCKET, option) != 0) return &kMessages;
  }
  return nullptr;
}

const Loss* LossOfNetlinkSocket(int fd) {
  if (Polls(fd, POLLIN)) return &kAnswers;
  uint32_t groups[32] = {};  // a bit each
  socklen_t bytes = sizeof(groups);
  sockaddr_nl address = {};
  socklen_t length = sizeof(address);
  if (getsockopt(fd, SOL_NETLINK, NETLINK_LIST_MEMBERSHIPS, groups, &bytes) != 0) return nullptr;
  bool any = groups[0] != 0;
  for (unsigned i = 1; i < sizeof(groups) / sizeof(groups[0]); ++i) {
    if (groups[i] != 0) return &kGroups;
  }
  const bool named = getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 && address.nl_pid != 0;
  return any && !named ? &kGroups : nullptr;
}

// Whether a terminal changes what comes to this end. CRIU writes unread data to the other end once more.
bool Changes(int fd) {
  termios settings;
  unsigned index = 0;
  int packets = 0;
  if (tcgetattr(fd, &settings) != 0) return true;
  const bool is_window = ioctl(fd, TIOCGPTN, &index) == 0;
  if (is_window) return (settings.c_oflag & OPOST) != 0 || (ioctl(fd, TIOCGPKT, &packets) == 0 && packets != 0);
  return (settings.c_lflag & (ICANON | ECHO | ECHONL | ISIG)) != 0 ||
         (settings.c_iflag & (ICRNL | INLCR | IGNCR | ISTRIP | IUCLC | IXON | PARMRK)) != 0;
}

const Loss* LossOfSocket(int fd) {
  const int family = OptionOf(fd, SOL_SOCKET, SO_DOMAIN), type = OptionOf(fd, SOL_SOCKET, SO_TYPE);
  socklen_t instructions = 0;
  // The kernel shows no program that was not attached as a list of instructions.
  if (getsockopt(fd, SOL_SOCKET, SO_GET_FILTER, nullptr, &instructions) != 0 && errno == EACCES) return &kProgram;
  switch (family) {
    case AF_UNIX:
      return LossOfUnixSocket(fd, type);
    case AF_INET:
    case AF_INET6:
      return LossOfInternetSocket(fd, type);
    case AF_NETLINK:
      return LossOfNetlinkSocket(fd);
    case AF_PACKET:
      return nullptr;
    default:
      for (const Family& known : kFamilies) {
        if (known.number == family) return &known.loss;
      }
      return &kOtherFamily;
  }
}

}  // namespace

const Loss* LossOf(int fd) {
  struct stat facts;
  if (fstat(fd, &facts) != 0) return nullptr;
  if (S_ISSOCK(facts.st_mode)) return LossOfSocket(fd);
  if (S_ISFIFO(facts.st_mode)) {
    const int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && (flags & O_PATH) == 0 && (flags & O_DIRECT) != 0 ? &kPackets : nullptr;
  }
  if (S_ISCHR(facts.st_mode) && isatty(fd) != 0 && Readable(fd) > 0 && Changes(fd)) return &kTerminal;
  return nullptr;
}

const Loss* LossBehindUrgent(int fd, unsigned received, bool ended) {
  const unsigned readable = unsigned(Readable(fd));
  return readable + (ended ? 1 : 0) < received ? &kBehindUrgent : nullptr;
}

}  // namespace cuda_remote::checkpoint
