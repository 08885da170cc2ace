// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/criu_sockets.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <linux/tcp.h>
#include <linux/unix_diag.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "checkpoint/engine/criu/losses.h"
#include "checkpoint/engine/criu/socket_facts.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr int kMostLookedAhead = 1000;

// Groups of which some socket of this network is a member.
struct Group {
  int interface;
  char name[kInterfaceBytes];
  sockaddr_storage address;
};
struct {
  bool read = false;
  size_t count = 0;
  Group groups[256];
} g_groups;

// Sockets that are noted. When it is full, some are noted more than once.
uint64_t g_noted[1 << 14];

int g_facts = -1;
// Empty packets that were looked at already, and come next.
struct {
  int fd = -1, empty = 0;
} g_ahead;

__attribute__((constructor)) void OpenFacts() {
  const char* const folder = getenv(kSocketFactsVariable);
  if (folder != nullptr)
    g_facts = openat(atoi(folder), kSocketFactsName, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
}

long Get(int fd, int level, int option, void* value, socklen_t* bytes) {
  return syscall(SYS_getsockopt, fd, level, option, value, bytes);
}

int NumberOf(int fd, int option) {
  int value = 0;
  socklen_t bytes = sizeof(value);
  return Get(fd, SOL_SOCKET, option, &value, &bytes) == 0 ? value : -1;
}

uint64_t InodeOf(int fd) {
  struct stat facts;
  return fstat(fd, &facts) == 0 ? facts.st_ino : 0;
}

// Facts that are not written yet, all of one socket.
class Notes {
 public:
  void Begin(uint64_t inode) { inode_ = inode; }
  void Add(SocketFact::Kind kind, int level, int option, const void* value, uint32_t bytes) {
    if (used_ + sizeof(SocketFact) + bytes > sizeof(text_)) Write();
    const SocketFact fact = {inode_, kind, level, option, bytes};
    memcpy(text_ + used_, &fact, sizeof(fact));
    memcpy(text_ + used_ + sizeof(fact), value, bytes);
    used_ += sizeof(fact) + bytes;
  }
  // False if anything could not be written, ever.
  bool Write() {
    for (size_t at = 0; ok_ && at < used_;) {
      const ssize_t written = write(g_facts, text_ + at, used_ - at);
      ok_ = written > 0 || (written < 0 && errno == EINTR);
      if (written > 0) at += size_t(written);
    }
    used_ = 0;
    return ok_;
  }

 private:
  uint64_t inode_ = 0;
  size_t used_ = 0;
  bool ok_ = true;
  char text_[32 << 10];
} g_notes;

bool NoteLoss(int fd, const Loss& loss) {
  char text[512];
  const int bytes = snprintf(text, sizeof(text), "%s\n%s", loss.what, loss.advice);
  g_notes.Begin(InodeOf(fd));
  g_notes.Add(SocketFact::kLoss, 0, 0, text, uint32_t(bytes));
  return g_notes.Write();
}

bool Hexadecimal(const char* text, uint8_t* bytes, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    unsigned byte;
    if (sscanf(text + 2 * i, "%2x", &byte) != 1) return false;
    bytes[i] = uint8_t(byte);
  }
  return true;
}

void AddGroup(int interface, const char* name, const sockaddr_storage& address) {
  if (g_groups.count >= sizeof(g_groups.groups) / sizeof(Group)) return;
  Group& group = g_groups.groups[g_groups.count++];
  group.interface = interface;
  snprintf(group.name, sizeof(group.name), "%s", name);
  group.address = address;
}

// /proc/net/igmp: a line for each interface ("2 eth0 : 1 V3"), behind it one for each group ("\t\t\t0100E0EF 1 0:..."),
// in the order of its bytes in memory. /proc/net/igmp6: "2 eth0 ff02... 1 0000000C 0".
void ReadGroups() {
  g_groups.read = true;
  g_groups.count = 0;
  char line[256], name[kInterfaceBytes] = "", group[64];
  int interface = 0;
  FILE* file = fopen("/proc/self/net/igmp", "re");
  while (file != nullptr && fgets(line, sizeof(line), file) != nullptr) {
    if (line[0] != '\t') {
      if (sscanf(line, "%d %15s", &interface, name) != 2) interface = 0;
      continue;
    }
    sockaddr_storage address = {};
    auto* const ipv4 = reinterpret_cast<sockaddr_in*>(&address);
    ipv4->sin_family = AF_INET;
    unsigned bits;
    if (interface == 0 || sscanf(line, " %8x", &bits) != 1) continue;
    ipv4->sin_addr.s_addr = bits;
    AddGroup(interface, name, address);
  }
  if (file != nullptr) fclose(file);
  file = fopen("/proc/self/net/igmp6", "re");
  while (file != nullptr && fgets(line, sizeof(line), file) != nullptr) {
    sockaddr_storage address = {};
    auto* const ipv6 = reinterpret_cast<sockaddr_in6*>(&address);
    ipv6->sin6_family = AF_INET6;
    if (sscanf(line, "%d %15s %63s", &interface, name, group) == 3 && strlen(group) == 32 &&
        Hexadecimal(group, ipv6->sin6_addr.s6_addr, sizeof(ipv6->sin6_addr.s6_addr))) {
      AddGroup(interface, name, address);
    }
  }
  if (file != nullptr) fclose(file);
}

void NoteMemberships(int fd) {
  if (!g_groups.read) ReadGroups();
  struct {
    char name[kInterfaceBytes];
    char filter[GROUP_FILTER_SIZE(kMostSources)];
  } value;
  for (size_t i = 0; i < g_groups.count; ++i) {
    const Group& group = g_groups.groups[i];
    auto* const filter = reinterpret_cast<group_filter*>(value.filter);
    memset(&value, 0, sizeof(value));
    memcpy(value.name, group.name, sizeof(value.name));
    filter->gf_interface = uint32_t(group.interface);
    filter->gf_group = group.address;
    filter->gf_numsrc = kMostSources;
    socklen_t bytes = sizeof(value.filter);
    const int level = group.address.ss_family == AF_INET ? kLevelIp : kLevelIpv6;
    // It fails if this socket is no member.
    if (Get(fd, level, MCAST_MSFILTER, filter, &bytes) != 0) continue;
    if (filter->gf_numsrc > kMostSources) filter->gf_numsrc = kMostSources;
    g_notes.Add(SocketFact::kMembership, level, MCAST_MSFILTER, &value,
                uint32_t(kInterfaceBytes + GROUP_FILTER_SIZE(filter->gf_numsrc)));
  }
}

// CRIU knows the address of a raw socket by its port, and it has none.
void NoteAddresses(int fd) {
  sockaddr_storage address = {};
  auto* const name = reinterpret_cast<sockaddr*>(&address);
  socklen_t bytes = sizeof(address);
  if (getsockname(fd, name, &bytes) == 0) g_notes.Add(SocketFact::kAddress, 0, 0, &address, bytes);
  bytes = sizeof(address);
  if (getpeername(fd, name, &bytes) == 0) g_notes.Add(SocketFact::kAddress, 0, 1, &address, bytes);
}

bool HasLevel(int level, int family, int protocol) {
  const bool internet = family == AF_INET || family == AF_INET6;
  switch (level) {
    case kLevelSocket:
      return true;
    case kLevelIp:
      return internet;
    case kLevelIpv6:
      return family == AF_INET6;
    case kLevelNetlink:
      return family == AF_NETLINK;
    case kLevelUdp:
      return internet && (protocol == IPPROTO_UDP || protocol == IPPROTO_UDPLITE);
    default:
      return internet && level == protocol;
  }
}

bool IsNoted(uint64_t inode) {
  constexpr size_t kPlaces = sizeof(g_noted) / sizeof(g_noted[0]), kTries = 32;
  for (size_t i = 0; i < kTries; ++i) {
    uint64_t& place = g_noted[(inode * 0x9e3779b97f4a7c15u + i) % kPlaces];
    if (place == inode) return true;
    if (place != 0) continue;
    place = inode;
    return false;
  }
  return false;
}

bool IsUnixOfPackets(int fd, int* type) {
  if (NumberOf(fd, SO_DOMAIN) != AF_UNIX) return false;
  *type = NumberOf(fd, SO_TYPE);
  return *type == SOCK_DGRAM || *type == SOCK_SEQPACKET;
}

// Whether nothing of a packet is there to be read any more, or the other end has closed the connection. Else a result
// of 0 is an empty packet. Counts those behind it in g_ahead, since the kernel shows each of them once.
bool IsEnd(int fd, int type) {
  pollfd waiting = {fd, POLLRDHUP, 0};
  if (type == SOCK_DGRAM || poll(&waiting, 1, 0) != 1 || (waiting.revents & POLLRDHUP) == 0) return false;
  for (int empty = 0; empty < kMostLookedAhead; ++empty) {
    msghdr look = {};
    if (syscall(SYS_recvmsg, fd, &look, MSG_DONTWAIT | MSG_PEEK) < 0 || (look.msg_flags & MSG_TRUNC) != 0) {
      g_ahead.fd = fd;
      g_ahead.empty = empty;
      return false;
    }
  }
  return true;
}

bool NoteNewSocket(int fd) {
  const uint64_t inode = InodeOf(fd);
  if (IsNoted(inode)) return true;
  const int family = NumberOf(fd, SO_DOMAIN), protocol = NumberOf(fd, SO_PROTOCOL);
  if (const Loss* const loss = LossOf(fd); loss != nullptr && !NoteLoss(fd, *loss)) return false;
  g_notes.Begin(inode);
  for (const SocketOption& option : kSocketOptions) {
    char value[2048];
    socklen_t bytes = option.bytes;
    if (!HasLevel(option.level, family, protocol)) continue;
    if (Get(fd, option.level, option.option, value, &bytes) == 0)
      g_notes.Add(SocketFact::kOption, option.level, option.option, value, bytes);
  }
  if (family == AF_INET || family == AF_INET6) {
    NoteMemberships(fd);
    if (NumberOf(fd, SO_TYPE) == SOCK_RAW) NoteAddresses(fd);
  }
  return g_notes.Write();
}

// The kernel reports of a queue of packets how long its first one is, or all are. CRIU looks into no queue of length 0,
// and there may be empty ones. So no queue has that length.
void LengthenQueues(char* answers, size_t bytes) {
  constexpr uint8_t kListens = 10;
  for (auto* header = reinterpret_cast<nlmsghdr*>(answers); NLMSG_OK(header, bytes);
       header = NLMSG_NEXT(header, bytes)) {
    if (header->nlmsg_type != SOCK_DIAG_BY_FAMILY || header->nlmsg_len < NLMSG_LENGTH(sizeof(unix_diag_msg))) continue;
    auto* const facts = static_cast<unix_diag_msg*>(NLMSG_DATA(header));
    const bool packets = facts->udiag_type == SOCK_DGRAM || facts->udiag_type == SOCK_SEQPACKET;
    if (facts->udiag_family != AF_UNIX || !packets || facts->udiag_state == kListens) continue;
    char* at = reinterpret_cast<char*>(facts + 1);
    char* const end = reinterpret_cast<char*>(header) + header->nlmsg_len;
    for (nlattr attribute; at + sizeof(attribute) <= end; at += NLA_ALIGN(attribute.nla_len)) {
      memcpy(&attribute, at, sizeof(attribute));
      if (attribute.nla_len < sizeof(attribute) || attribute.nla_len > end - at) break;
      unix_diag_rqlen lengths;
      if (attribute.nla_type != UNIX_DIAG_RQLEN || attribute.nla_len < sizeof(attribute) + sizeof(lengths)) continue;
      memcpy(&lengths, at + sizeof(attribute), sizeof(lengths));
      if (lengths.udiag_rqueue == 0) lengths.udiag_rqueue = 1;
      memcpy(at + sizeof(attribute), &lengths, sizeof(lengths));
    }
  }
}

}  // namespace

bool NoteSocket(int fd) {
  // What this calls asks for a socket's family, too.
  static bool busy = false;
  if (g_facts < 0 || busy) return true;
  busy = true;
  const bool noted = NoteNewSocket(fd);
  busy = false;
  return noted;
}

bool HoldsBackTerminal(int fd) {
  if (g_facts < 0) return false;
  struct stat facts;
  if (fstat(fd, &facts) != 0 || !S_ISCHR(facts.st_mode) || isatty(fd) == 0) return false;
  const Loss* const loss = LossOf(fd);
  if (loss != nullptr) NoteLoss(fd, *loss);
  return loss != nullptr;
}

ssize_t ReceiveForCriu(int fd, msghdr* message, int flags) {
  if (g_facts >= 0 && flags == 0 && message->msg_iovlen == 1 && message->msg_namelen == sizeof(sockaddr_nl)) {
    const ssize_t got = syscall(SYS_recvmsg, fd, message, flags);
    const auto* const sender = static_cast<const sockaddr*>(message->msg_name);
    if (got > 0 && sender != nullptr && sender->sa_family == AF_NETLINK)
      LengthenQueues(static_cast<char*>(message->msg_iov[0].iov_base), size_t(got));
    return got;
  }
  int type = 0;
  const bool looks = g_facts >= 0 && (flags & MSG_PEEK) != 0 && message->msg_iovlen == 1 &&
                     message->msg_iov[0].iov_len >= kEmptyDatagramBytes;
  ssize_t got = 0;
  if (looks && g_ahead.fd == fd && g_ahead.empty > 0) {
    --g_ahead.empty;
    message->msg_flags = 0;
    message->msg_controllen = 0;
  } else {
    got = syscall(SYS_recvmsg, fd, message, flags);
    if (!looks || got < 0) return got;
    if (got > 0 || !IsUnixOfPackets(fd, &type) || IsEnd(fd, type)) return got;
  }
  memcpy(message->msg_iov[0].iov_base, kEmptyDatagram, kEmptyDatagramBytes);
  return ssize_t(kEmptyDatagramBytes);
}

void KeepResetsOut(int fd) {
  constexpr uint8_t kClosed = 7;
  tcp_info facts = {};
  socklen_t bytes = sizeof(facts);
  // While a job is saved, its sockets are connected already.
  if (Get(fd, IPPROTO_TCP, TCP_INFO, &facts, &bytes) != 0 || facts.tcpi_state != kClosed) return;
  sock_fprog program = {sizeof(kNoReset) / sizeof(kNoReset[0]), const_cast<sock_filter*>(kNoReset)};
  setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program));
}

}  // namespace cuda_remote::checkpoint
