// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/isolation/network.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/if_ether.h>
#include <linux/if_link.h>
#include <linux/if_packet.h>
#include <linux/netlink.h>
#include <linux/pkt_sched.h>
#include <linux/rtnetlink.h>
#include <linux/veth.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <netinet/icmp6.h>
#include <netinet/if_ether.h>
#include <netinet/ip6.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "checkpoint/job/account.h"
#include "proto/base/clock.h"
#include "proto/base/hash.h"
#include "proto/base/status_macros.h"
#include "proto/base/text.h"
#include "proto/errors/absl_status.h"
#include "proto/errors/annotate.h"

namespace cuda_remote::checkpoint {
namespace {

using std::chrono::milliseconds;
using HardwareBytes = std::array<unsigned char, ETH_ALEN>;

constexpr auto& kName = kJobInterface;
// The same number everywhere, since programs may keep it; one that no interface of a small namespace gets by itself.
constexpr int kIndex = 1001;
constexpr int kLoopback = 1;
constexpr uint32_t kLeastHostBits = 2;
constexpr char kSilent[] = "blackhole";  // a queue that drops all that is sent; every kernel with queues has it
// Questions to a network whether somebody has an address: how many, and how long to wait for an answer to each.
constexpr int kQuestions = 3;
constexpr milliseconds kAnswer(100);
// The address of a job that has just ended, until the kernel has removed its interface.
constexpr milliseconds kRemoval(3000), kLook(50);
// Until the interface can send, and how often the neighbours are told; one such message may be lost.
constexpr milliseconds kReady(2000);
constexpr int kNotices = 3;
constexpr milliseconds kFlush(3000);

// Does `work` with this thread in the network namespace `fd`. False if it cannot be entered.
bool InNamespace(int fd, const std::function<void()>& work) {
  const UniqueFd own(open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
  if (own.get() < 0 || setns(fd, CLONE_NEWNET) != 0) return false;
  work();
  // A tool that went on in a job's network would do everything else there, too.
  if (setns(own.get(), CLONE_NEWNET) != 0) abort();
  return true;
}

// A message to the kernel (rtnetlink(7)).
class Message {
 public:
  Message(uint16_t type, uint16_t flags) : bytes_(NLMSG_HDRLEN, '\0') {
    header()->nlmsg_type = type;
    header()->nlmsg_flags = uint16_t(NLM_F_REQUEST | flags);
  }
  template <typename T>
  Message& Add(const T& part) {
    bytes_.append(reinterpret_cast<const char*>(&part), sizeof(part));
    bytes_.resize(NLMSG_ALIGN(bytes_.size()), '\0');
    return *this;
  }
  Message& Put(uint16_t kind, const void* value, size_t size) {
    const rtattr attribute = {uint16_t(RTA_LENGTH(size)), kind};
    Add(attribute);
    bytes_.append(static_cast<const char*>(value), size);
    bytes_.resize(NLMSG_ALIGN(bytes_.size()), '\0');
    return *this;
  }
  Message& Put(uint16_t kind, const std::string& text) { return Put(kind, text.c_str(), text.size() + 1); }
  Message& Put(uint16_t kind, uint32_t number) { return Put(kind, &number, sizeof(number)); }
  // What is put until End is inside of this attribute.
  size_t Begin(uint16_t kind) {
    const size_t at = bytes_.size();
    Put(kind, nullptr, 0);
    return at;
  }
  void End(size_t at) { reinterpret_cast<rtattr*>(&bytes_[at])->rta_len = uint16_t(bytes_.size() - at); }

  nlmsghdr* header() { return reinterpret_cast<nlmsghdr*>(&bytes_[0]); }
  const std::string& bytes() {
    header()->nlmsg_len = uint32_t(bytes_.size());
    return bytes_;
  }

 private:
  std::string bytes_;
};

// Calls `found` with each attribute of a message whose own part is a T.
template <typename T>
void ForEachAttribute(const nlmsghdr* message, const std::function<void(const rtattr*)>& found) {
  auto* attribute =
      reinterpret_cast<const rtattr*>(static_cast<const char*>(NLMSG_DATA(message)) + NLMSG_ALIGN(sizeof(T)));
  int left = int(message->nlmsg_len) - int(NLMSG_SPACE(sizeof(T)));
  for (; RTA_OK(attribute, left); attribute = RTA_NEXT(attribute, left)) found(attribute);
}

// The kernel's side of the network namespace in which it is made.
class Kernel {
 public:
  Kernel() : socket_(socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE)) {}

  // 0, or the number of the error.
  int Do(Message message) {
    message.header()->nlmsg_flags |= NLM_F_ACK;
    int result = EIO;
    const bool answered = Ask(&message, [&](const nlmsghdr* answer) {
      if (answer->nlmsg_type == NLMSG_ERROR) result = -static_cast<const nlmsgerr*>(NLMSG_DATA(answer))->error;
    });
    return answered ? result : errno;
  }

  // Calls `found` with each message of the list; false with errno if there is none.
  bool List(Message message, const std::function<void(const nlmsghdr*)>& found) {
    message.header()->nlmsg_flags |= NLM_F_DUMP;
    int failure = 0;
    const bool answered = Ask(&message, [&](const nlmsghdr* answer) {
      if (answer->nlmsg_type == NLMSG_ERROR) {
        failure = -static_cast<const nlmsgerr*>(NLMSG_DATA(answer))->error;
      } else {
        found(answer);
      }
    });
    if (failure != 0) errno = failure;
    return answered && failure == 0;
  }

 private:
  bool Ask(Message* message, const std::function<void(const nlmsghdr*)>& found) {
    message->header()->nlmsg_seq = ++sequence_;
    const std::string& bytes = message->bytes();
    if (send(socket_.get(), bytes.data(), bytes.size(), 0) != ssize_t(bytes.size())) return false;
    const bool list = (message->header()->nlmsg_flags & NLM_F_DUMP) == NLM_F_DUMP;
    alignas(nlmsghdr) char buffer[64 << 10];
    while (true) {
      const ssize_t got = recv(socket_.get(), buffer, sizeof(buffer), 0);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return false;
      size_t left = size_t(got);
      for (auto* one = reinterpret_cast<nlmsghdr*>(buffer); NLMSG_OK(one, left); one = NLMSG_NEXT(one, left)) {
        if (one->nlmsg_seq != sequence_) continue;
        if (one->nlmsg_type == NLMSG_DONE) return true;
        found(one);
        if (one->nlmsg_type == NLMSG_ERROR || !list) return true;
      }
    }
  }

  const UniqueFd socket_;
  uint32_t sequence_ = 0;
};

// Of IPv4 or IPv6, in network order.
struct Address {
  int family = AF_UNSPEC;  // AF_UNSPEC: it is none
  std::array<unsigned char, sizeof(in6_addr)> bytes = {};

  size_t size() const { return family == AF_INET6 ? sizeof(in6_addr) : sizeof(in_addr); }
  uint32_t bits() const { return uint32_t(8 * size()); }
  bool operator==(const Address& other) const { return family == other.family && bytes == other.bytes; }
  bool bit(uint32_t index) const { return (bytes[index / 8] >> (7 - index % 8) & 1) != 0; }
};

uint32_t Number(const rtattr* attribute) {
  uint32_t number = 0;
  if (RTA_PAYLOAD(attribute) >= sizeof(number)) memcpy(&number, RTA_DATA(attribute), sizeof(number));
  return number;
}

std::string Text(const rtattr* attribute) {
  const auto* const text = static_cast<const char*>(RTA_DATA(attribute));
  return std::string(text, strnlen(text, RTA_PAYLOAD(attribute)));
}

Address Made(int family, const void* bytes) {
  Address made;
  made.family = family;
  memcpy(made.bytes.data(), bytes, made.size());
  return made;
}

Address AddressIn(int family, const rtattr* attribute) {
  Address address;
  address.family = family;
  if (RTA_PAYLOAD(attribute) != address.size()) return Address();
  return Made(family, RTA_DATA(attribute));
}

Address Parsed(const std::string& text) {
  Address parsed;
  const int family = text.find(':') == std::string::npos ? AF_INET : AF_INET6;
  if (inet_pton(family, text.c_str(), parsed.bytes.data()) == 1) parsed.family = family;
  return parsed;
}

std::string Written(const Address& address) {
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(address.family, address.bytes.data(), text, sizeof(text));
  return text;
}

bool IsInNetwork(const Address& address, const Address& network, uint32_t prefix) {
  if (address.family != network.family) return false;
  for (uint32_t i = 0; i < prefix; ++i) {
    if (address.bit(i) != network.bit(i)) return false;
  }
  return true;
}

// Whether all bits after the network's are so.
bool HostBitsAre(bool value, const Address& address, uint32_t prefix) {
  for (uint32_t i = prefix; i < address.bits(); ++i) {
    if (address.bit(i) != value) return false;
  }
  return true;
}

// The last address of the network, which all of IPv4 take for theirs.
Address Broadcast(Address address, uint32_t prefix) {
  for (uint32_t i = prefix; i < address.bits(); ++i) address.bytes[i / 8] |= static_cast<unsigned char>(0x80 >> i % 8);
  return address;
}

bool IsLinkLocal(const Address& address) {
  return address.family == AF_INET6 && address.bytes[0] == 0xfe && (address.bytes[1] & 0xc0) == 0x80;
}

// Of one interface: for others it is on all machines, or on none.
bool IsForMachines(const Address& address) {
  const unsigned char first = address.bytes[0];
  if (address.family == AF_INET) return first != 0 && first != 127 && first < 224;
  const Address mapped = Parsed("::ffff:0:0"), low = Parsed("::");
  return first != 0xff && !IsLinkLocal(address) && !IsInNetwork(address, mapped, 96) && !IsInNetwork(address, low, 96);
}

// An interface of this machine.
struct Interface {
  int index = 0;
  std::string name, kind;
  bool is_ethernet = false, is_up = false;
  uint32_t mtu = 0;
  int master = 0;  // index of the bridge that it is a port of
};

std::vector<Interface> ListInterfaces(Kernel* kernel) {
  std::vector<Interface> all;
  kernel->List(Message(RTM_GETLINK, 0).Add(ifinfomsg{}), [&](const nlmsghdr* message) {
    const auto* const facts = static_cast<const ifinfomsg*>(NLMSG_DATA(message));
    Interface one;
    one.index = facts->ifi_index;
    one.is_ethernet = facts->ifi_type == ARPHRD_ETHER;
    one.is_up = (facts->ifi_flags & IFF_UP) != 0;
    ForEachAttribute<ifinfomsg>(message, [&](const rtattr* attribute) {
      if (attribute->rta_type == IFLA_IFNAME) one.name = Text(attribute);
      if (attribute->rta_type == IFLA_MTU) one.mtu = Number(attribute);
      if (attribute->rta_type == IFLA_MASTER) one.master = int(Number(attribute));
      if (attribute->rta_type != IFLA_LINKINFO) return;
      auto* inner = static_cast<const rtattr*>(RTA_DATA(attribute));
      int left = int(RTA_PAYLOAD(attribute));
      for (; RTA_OK(inner, left); inner = RTA_NEXT(inner, left)) {
        if (inner->rta_type == IFLA_INFO_KIND) one.kind = Text(inner);
      }
    });
    all.push_back(std::move(one));
  });
  return all;
}

struct OwnAddress {
  int index = 0;
  Address address;
  uint32_t prefix = 0;
};

std::vector<OwnAddress> ListAddresses(int family, Kernel* kernel) {
  std::vector<OwnAddress> all;
  ifaddrmsg wanted = {};
  wanted.ifa_family = uint8_t(family);
  kernel->List(Message(RTM_GETADDR, 0).Add(wanted), [&](const nlmsghdr* message) {
    const auto* const facts = static_cast<const ifaddrmsg*>(NLMSG_DATA(message));
    if (facts->ifa_family != family) return;
    OwnAddress one;
    one.index = int(facts->ifa_index);
    one.prefix = facts->ifa_prefixlen;
    Address other;  // the other end's, where there is one; else the same, and of IPv6 the only one
    ForEachAttribute<ifaddrmsg>(message, [&](const rtattr* attribute) {
      if (attribute->rta_type == IFA_LOCAL) one.address = AddressIn(family, attribute);
      if (attribute->rta_type == IFA_ADDRESS) other = AddressIn(family, attribute);
    });
    if (one.address.family == AF_UNSPEC) one.address = other;
    all.push_back(one);
  });
  return all;
}

// By which machine others are reached through the interface.
Address GatewayOf(int family, int index, Kernel* kernel) {
  Address gateway;
  rtmsg wanted = {};
  wanted.rtm_family = uint8_t(family);
  kernel->List(Message(RTM_GETROUTE, 0).Add(wanted), [&](const nlmsghdr* message) {
    const auto* const facts = static_cast<const rtmsg*>(NLMSG_DATA(message));
    if (facts->rtm_family != family || facts->rtm_dst_len != 0 || facts->rtm_table != RT_TABLE_MAIN) return;
    Address by;
    int through = 0;
    ForEachAttribute<rtmsg>(message, [&](const rtattr* attribute) {
      if (attribute->rta_type == RTA_GATEWAY) by = AddressIn(family, attribute);
      if (attribute->rta_type == RTA_OIF) through = int(Number(attribute));
    });
    if (through == index && gateway.family == AF_UNSPEC) gateway = by;
  });
  return gateway;
}

// Where on this machine an address goes.
struct Place {
  Interface interface;
  uint32_t prefix = 0;
  Address gateway;
};

absl::StatusOr<Place> FindPlace(const JobNetwork& network) {
  const Address address = Parsed(network.address());
  const std::string example = address.family == AF_INET ? "/24" : "/64";
  Kernel kernel;
  const std::vector<Interface> interfaces = ListInterfaces(&kernel);
  const std::vector<OwnAddress> addresses = ListAddresses(address.family, &kernel);
  const auto with_index = [&](int index) {
    for (const Interface& one : interfaces) {
      if (one.index == index) return one;
    }
    return Interface();
  };
  for (const OwnAddress& own : addresses) {
    if (!(own.address == address)) continue;
    return absl::AlreadyExistsError(absl::StrCat("the address ", network.address(), " is this machine's own, on ",
                                                 with_index(own.index).name, "; a job needs one that nobody else has"));
  }
  Place place;
  for (const Interface& one : interfaces) {
    if (!network.interface().empty() && one.name == network.interface()) place.interface = one;
  }
  if (!network.interface().empty() && place.interface.index == 0) {
    return absl::NotFoundError(absl::StrCat("this machine has no interface ", network.interface(),
                                            " for the job's address ", network.address()));
  }
  for (const OwnAddress& own : addresses) {
    const Interface of = with_index(own.index);
    if (!IsInNetwork(address, own.address, own.prefix) || !of.is_ethernet) continue;
    if (!network.interface().empty() && of.index != place.interface.index) continue;
    if (own.prefix < place.prefix) continue;
    place.interface = of;
    place.prefix = own.prefix;
  }
  if (place.interface.index == 0) {
    return absl::NotFoundError(absl::StrCat("no interface of this machine is in the network of the job's address ",
                                            network.address(), "; name the one that it is to be on: --address ",
                                            network.address(), example, "@INTERFACE"));
  }
  if (network.prefix() != 0) place.prefix = network.prefix();
  const std::string& name = place.interface.name;
  if (place.prefix == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the interface ", name, " has no address in the network of ", network.address(),
                     "; say how many bits are the network's: --address ", network.address(), example, "@", name));
  }
  // The first address of a network is none of a machine's, nor is the last one with IPv4.
  if (place.prefix + kLeastHostBits > address.bits() || HostBitsAre(false, address, place.prefix) ||
      (address.family == AF_INET && HostBitsAre(true, address, place.prefix))) {
    return absl::InvalidArgumentError(
        absl::StrCat(network.address(), " cannot be a machine's address in a network of ", place.prefix, " bits"));
  }
  if (!place.interface.is_ethernet || !place.interface.is_up) {
    return absl::FailedPreconditionError(
        absl::StrCat("the interface ", name, place.interface.is_ethernet ? " is down" : " is not an Ethernet interface",
                     ", so no job can have an address there"));
  }
  if (place.interface.master != 0) {
    return absl::FailedPreconditionError(absl::StrCat("the interface ", name, " is a part of ",
                                                      with_index(place.interface.master).name,
                                                      "; name that one for the job's address"));
  }
  place.gateway = GatewayOf(address.family, place.interface.index, &kernel);
  const bool is_near = IsInNetwork(place.gateway, address, place.prefix) || IsLinkLocal(place.gateway);
  if (!is_near || place.gateway == address) place.gateway = Address();
  return place;
}

// What is known of a reason; empty: nothing more.
std::string Hint(int failure) {
  if (failure == EPERM) return " (forbidden here, as by seccomp or a user namespace)";
  return failure == EOPNOTSUPP ? " (this kernel has no such interfaces)" : "";
}

absl::Status Failed(const std::string& what, int failure) {
  return AnnotateBehind(ErrnoStatus("the job cannot get its address: " + what, failure), Hint(failure));
}

// eth0, an end of a veth pair or a macvlan, in the namespace `fd`, made from outside. 0 or the number of the error.
int MakeInterface(const Place& place, int fd) {
  ifinfomsg inside = {};
  inside.ifi_index = kIndex;
  const bool is_bridge = place.interface.kind == "bridge";
  if (!is_bridge) {
    Message message(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL);
    message.Add(inside)
        .Put(IFLA_IFNAME, std::string(kName))
        .Put(IFLA_NET_NS_FD, uint32_t(fd))
        .Put(IFLA_LINK, uint32_t(place.interface.index));
    const size_t info = message.Begin(IFLA_LINKINFO);
    message.Put(IFLA_INFO_KIND, std::string("macvlan"));
    const size_t data = message.Begin(IFLA_INFO_DATA);
    message.Put(IFLA_MACVLAN_MODE, uint32_t(MACVLAN_MODE_BRIDGE));
    message.End(data);
    message.End(info);
    return Kernel().Do(std::move(message));
  }
  unsigned char outer_bytes[4];
  if (getrandom(outer_bytes, sizeof(outer_bytes), 0) != ssize_t(sizeof(outer_bytes))) return errno;
  const std::string outer = "cr" + HexBytes({reinterpret_cast<const char*>(outer_bytes), sizeof(outer_bytes)});
  // The kernel takes the number of the first one only, so that is the one inside.
  Message pair(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL);
  pair.Add(inside)
      .Put(IFLA_IFNAME, std::string(kName))
      .Put(IFLA_MTU, place.interface.mtu)
      .Put(IFLA_NET_NS_FD, uint32_t(fd));
  const size_t info = pair.Begin(IFLA_LINKINFO);
  pair.Put(IFLA_INFO_KIND, std::string("veth"));
  const size_t data = pair.Begin(IFLA_INFO_DATA);
  const size_t peer = pair.Begin(VETH_INFO_PEER);
  // A bridge takes the lowest hardware address of its parts, and is not to change its own: nobody would reach this
  // machine for seconds. Others have random addresses there, or such as begin with 0xfe.
  const HardwareBytes high = {0xfe, 0xff, outer_bytes[0], outer_bytes[1], outer_bytes[2], outer_bytes[3]};
  pair.Add(ifinfomsg{})
      .Put(IFLA_IFNAME, outer)
      .Put(IFLA_MTU, place.interface.mtu)
      .Put(IFLA_ADDRESS, high.data(), high.size());
  pair.End(peer);
  pair.End(data);
  pair.End(info);
  Kernel kernel;
  const int failure = kernel.Do(std::move(pair));
  if (failure != 0) return failure;
  ifinfomsg up = {};
  up.ifi_flags = up.ifi_change = IFF_UP;
  Message plug(RTM_NEWLINK, 0);
  plug.Add(up).Put(IFLA_IFNAME, outer).Put(IFLA_MASTER, uint32_t(place.interface.index));
  return kernel.Do(std::move(plug));
}

Message ChangeInterface(int index, unsigned flags) {
  ifinfomsg which = {};
  which.ifi_index = index;
  which.ifi_flags = which.ifi_change = flags;
  return Message(RTM_NEWLINK, 0).Add(which);
}

Message QueueOf(uint16_t type, uint16_t flags) {
  tcmsg which = {};
  which.tcm_ifindex = kIndex;
  which.tcm_parent = TC_H_ROOT;
  return Message(type, flags).Add(which);
}

// Inside. Nothing that is sent leaves, and nothing that is sent to the job's hardware address comes in.
int Silence(Kernel* kernel) {
  HardwareBytes other;
  if (getrandom(other.data(), other.size(), 0) != ssize_t(other.size())) return errno;
  other[0] = 0x06;  // of no maker, of one interface, and no HardwareAddress
  const int failure =
      kernel->Do(QueueOf(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_REPLACE).Put(TCA_KIND, std::string(kSilent)));
  if (failure != 0) return failure;
  return kernel->Do(ChangeInterface(kIndex, 0).Put(IFLA_ADDRESS, other.data(), other.size()));
}

// Inside, after the last process: whether there are connections with something that the other end has not yet.
bool HasUnsent() {
  for (const char* list : {"/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"}) {
    std::ifstream file(list);
    std::string line, number, local, remote, state;
    while (std::getline(file, line)) {
      std::istringstream words(line);
      words >> number >> local >> remote >> state;
      // TCP_FIN_WAIT1, TCP_LAST_ACK, TCP_CLOSING: the end itself is not there yet.
      if (state == "04" || state == "09" || state == "0B") return true;
    }
  }
  return false;
}

bool IsReady(Kernel* kernel) {
  for (const Interface& one : ListInterfaces(kernel)) {
    if (one.index != kIndex) continue;
    ifreq request = {};
    memcpy(request.ifr_name, kName, sizeof(kName));
    const UniqueFd any(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    return ioctl(any.get(), SIOCGIFFLAGS, &request) == 0 && (request.ifr_flags & IFF_RUNNING) != 0;
  }
  return false;
}

// What ICMPv6 says of neighbours (RFC 4861), from its IPv6 header on. A question of somebody who has no address yet
// ends before the option.
struct NeighbourMessage {
  ip6_hdr ip;
  nd_neighbor_advert body;  // nd_neighbor_solicit is laid out in the same way
  nd_opt_hdr option;
  unsigned char hardware[ETH_ALEN];
};
static_assert(sizeof(NeighbourMessage) == 72 && sizeof(nd_neighbor_solicit) == sizeof(nd_neighbor_advert),
              "as it is sent");

// Over the message's part after the IPv6 header, with the addresses before it (RFC 4443).
uint16_t Checksum(const NeighbourMessage& message, size_t size) {
  const size_t length = size - sizeof(ip6_hdr);
  const auto* const bytes = reinterpret_cast<const unsigned char*>(&message.ip.ip6_src);
  uint32_t sum = uint32_t(length) + IPPROTO_ICMPV6;
  for (size_t i = 0; i < 2 * sizeof(in6_addr) + length; i += 2) sum += uint32_t(bytes[i] << 8 | bytes[i + 1]);
  while (sum >> 16 != 0) sum = (sum & 0xffff) + (sum >> 16);
  return htons(uint16_t(~sum));
}

// Inside. Asks by eth0 who has an address, and says so itself: by ARP, or for IPv6 by neighbour discovery.
class Neighbours {
 public:
  explicit Neighbours(const Address& address)
      : address_(address),
        protocol_(htons(address.family == AF_INET ? ETH_P_ARP : ETH_P_IPV6)),
        socket_(socket(AF_PACKET, SOCK_DGRAM | SOCK_CLOEXEC, protocol_)) {
    sockaddr_ll where = {};
    where.sll_family = AF_PACKET;
    where.sll_protocol = protocol_;
    where.sll_ifindex = kIndex;
    bound_ = bind(socket_.get(), reinterpret_cast<sockaddr*>(&where), sizeof(where)) == 0;
  }

  // As somebody who has no address yet.
  bool Ask(const HardwareBytes& own) { return address_.family == AF_INET ? SendArp(own, false) : SendNdp(own, false); }
  // That this interface has it.
  bool Tell(const HardwareBytes& own) { return address_.family == AF_INET ? SendArp(own, true) : SendNdp(own, true); }

  // Who says within the time that he has the address: a hardware address as text; empty: nobody.
  std::string WhoHas(milliseconds limit) {
    const auto end = Now() + limit;
    while (true) {
      const auto left = std::chrono::duration_cast<milliseconds>(end - Now()).count();
      pollfd waiting = {socket_.get(), POLLIN, 0};
      if (left <= 0 || poll(&waiting, 1, int(left)) <= 0) return {};
      union {
        ether_arp arp;
        NeighbourMessage ndp;
      } message = {};
      sockaddr_ll from = {};
      socklen_t size = sizeof(from);
      const ssize_t got =
          recvfrom(socket_.get(), &message, sizeof(message), 0, reinterpret_cast<sockaddr*>(&from), &size);
      const bool says = address_.family == AF_INET
                            ? got == ssize_t(sizeof(message.arp)) && Made(AF_INET, message.arp.arp_spa) == address_
                            : got >= ssize_t(sizeof(ip6_hdr) + sizeof(nd_neighbor_advert)) &&
                                  message.ndp.ip.ip6_nxt == IPPROTO_ICMPV6 &&
                                  message.ndp.body.nd_na_type == ND_NEIGHBOR_ADVERT &&
                                  Made(AF_INET6, &message.ndp.body.nd_na_target) == address_;
      if (!says) continue;
      return HexBytes({reinterpret_cast<const char*>(from.sll_addr), ETH_ALEN}, ":");
    }
  }

 private:
  bool SendArp(const HardwareBytes& own, bool has) {
    ether_arp message = {};
    message.arp_hrd = htons(ARPHRD_ETHER);
    message.arp_pro = htons(ETH_P_IP);
    message.arp_hln = ETH_ALEN;
    message.arp_pln = sizeof(in_addr);
    message.arp_op = htons(ARPOP_REQUEST);
    memcpy(message.arp_sha, own.data(), ETH_ALEN);
    if (has) memcpy(message.arp_spa, address_.bytes.data(), sizeof(message.arp_spa));
    memcpy(message.arp_tpa, address_.bytes.data(), sizeof(message.arp_tpa));
    return Send(&message, sizeof(message), {0xff, 0xff, 0xff, 0xff, 0xff, 0xff});
  }

  bool SendNdp(const HardwareBytes& own, bool has) {
    NeighbourMessage message = {};
    const size_t size = has ? sizeof(message) : offsetof(NeighbourMessage, option);
    message.ip.ip6_flow = htonl(6u << 28);
    message.ip.ip6_plen = htons(uint16_t(size - sizeof(message.ip)));
    message.ip.ip6_nxt = IPPROTO_ICMPV6;
    message.ip.ip6_hops = 255;  // or it is not believed
    memcpy(&message.body.nd_na_target, address_.bytes.data(), sizeof(in6_addr));
    message.body.nd_na_type = has ? ND_NEIGHBOR_ADVERT : ND_NEIGHBOR_SOLICIT;
    Address to = Parsed("ff02::1");  // all machines
    if (has) {
      memcpy(&message.ip.ip6_src, address_.bytes.data(), sizeof(in6_addr));
      message.body.nd_na_flags_reserved = ND_NA_FLAG_OVERRIDE;
      message.option = {ND_OPT_TARGET_LINKADDR, 1};
      memcpy(message.hardware, own.data(), ETH_ALEN);
    } else {
      to = Parsed("ff02::1:ff00:0");  // those whose address ends like this one
      std::copy(address_.bytes.end() - 3, address_.bytes.end(), to.bytes.end() - 3);
    }
    memcpy(&message.ip.ip6_dst, to.bytes.data(), sizeof(in6_addr));
    message.body.nd_na_cksum = Checksum(message, size);
    return Send(&message, size, {0x33, 0x33, to.bytes[12], to.bytes[13], to.bytes[14], to.bytes[15]});
  }

  bool Send(const void* message, size_t size, const HardwareBytes& to) {
    sockaddr_ll all = {};
    all.sll_family = AF_PACKET;
    all.sll_protocol = protocol_;
    all.sll_ifindex = kIndex;
    all.sll_halen = ETH_ALEN;
    memcpy(all.sll_addr, to.data(), to.size());
    return bound_ &&
           sendto(socket_.get(), message, size, 0, reinterpret_cast<sockaddr*>(&all), sizeof(all)) == ssize_t(size);
  }

  const Address address_;
  const uint16_t protocol_;
  const UniqueFd socket_;
  bool bound_ = false;
};

HardwareBytes OwnHardwareAddress() {
  HardwareBytes own = {};
  ifreq request = {};
  memcpy(request.ifr_name, kName, sizeof(kName));
  const UniqueFd any(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (ioctl(any.get(), SIOCGIFHWADDR, &request) == 0) memcpy(own.data(), request.ifr_hwaddr.sa_data, own.size());
  return own;
}

void AwaitReady(Kernel* kernel) {
  const auto end = Now() + kReady;
  while (!IsReady(kernel) && Now() < end) std::this_thread::sleep_for(milliseconds(5));
}

// Inside, with eth0 up and without an address.
absl::Status CheckFree(const Address& address, Kernel* kernel) {
  AwaitReady(kernel);
  const HardwareBytes own = OwnHardwareAddress();
  Neighbours neighbours(address);
  const auto end = Now() + kRemoval;
  for (int asked = 0; asked < kQuestions;) {
    if (!neighbours.Ask(own)) return Failed("asking who has it", errno);
    const std::string who = neighbours.WhoHas(kAnswer);
    if (who.empty()) {
      ++asked;
    } else if (Now() > end) {
      return absl::AlreadyExistsError(
          absl::StrCat("the address ", Written(address), " is in use: the machine or job with the hardware address ",
                       who, " answers for it; end that one first, or give the job another address"));
    } else {
      asked = 0;
      std::this_thread::sleep_for(kLook);
    }
  }
  return absl::OkStatus();
}

// A setting of eth0. A container may not let it be written, nor need it.
void SetForIpv6(const std::string& name, const std::string& value) {
  const std::string path = std::string("/proc/sys/net/ipv6/conf/") + kName + "/" + name;
  const UniqueFd file(open(path.c_str(), O_WRONLY | O_CLOEXEC));
  const ssize_t ignored = file.get() >= 0 ? write(file.get(), value.data(), value.size()) : 0;
  static_cast<void>(ignored);
}

// 0, or the number of the error.
int AddAddress(const Address& address, uint32_t prefix, Kernel* kernel) {
  ifaddrmsg which = {};
  which.ifa_family = uint8_t(address.family);
  which.ifa_prefixlen = uint8_t(prefix);
  which.ifa_flags = IFA_F_NODAD;  // of IPv6: the kernel need not ask, too
  which.ifa_index = kIndex;
  Message message(RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL);
  message.Add(which)
      .Put(IFA_LOCAL, address.bytes.data(), address.size())
      .Put(IFA_ADDRESS, address.bytes.data(), address.size());
  if (address.family == AF_INET) message.Put(IFA_BROADCAST, Broadcast(address, prefix).bytes.data(), address.size());
  return kernel->Do(std::move(message));
}

// What IPv6 needs besides on each interface. It follows from the hardware address, as where nobody sets another.
Address LinkLocal(const HardwareBytes& own) {
  Address address = Parsed("fe80::ff:fe00:0");
  std::copy(own.begin(), own.begin() + 3, address.bytes.begin() + 8);
  std::copy(own.begin() + 3, own.end(), address.bytes.begin() + 13);
  address.bytes[8] ^= 2;
  return address;
}

absl::Status SetUpInside(const JobNetwork& network, const Place& place, bool ask, Kernel* kernel) {
  const Address address = Parsed(network.address());
  const bool is_ipv6 = address.family == AF_INET6;
  // The kernel's own addresses, and those that a router gives, would be others with each hardware address.
  SetForIpv6("addr_gen_mode", "1");
  SetForIpv6("accept_ra", "0");
  SetForIpv6("disable_ipv6", is_ipv6 ? "0" : "1");
  int failure = kernel->Do(ChangeInterface(kLoopback, IFF_UP));
  if (failure != 0) return Failed("the loopback interface", failure);
  if (ask) {
    failure = kernel->Do(ChangeInterface(kIndex, IFF_UP));
    if (failure != 0) return Failed(kName, failure);
    CR_RETURN_IF_ERROR(CheckFree(address, kernel));
  }
  failure = Silence(kernel);
  if (failure != 0) return Failed("keeping it silent", failure);
  if (!ask) failure = kernel->Do(ChangeInterface(kIndex, IFF_UP));
  if (failure != 0) return Failed(kName, failure);
  failure = AddAddress(address, place.prefix, kernel);
  if (failure == 0 && is_ipv6) failure = AddAddress(LinkLocal(HardwareAddress(network.address())), 64, kernel);
  if (failure != 0) return Failed("the address", failure);
  if (place.gateway.family == AF_UNSPEC) return absl::OkStatus();
  rtmsg route = {};
  route.rtm_family = uint8_t(address.family);
  route.rtm_table = RT_TABLE_MAIN;
  route.rtm_protocol = RTPROT_STATIC;
  route.rtm_scope = RT_SCOPE_UNIVERSE;
  route.rtm_type = RTN_UNICAST;
  failure = kernel->Do(Message(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL)
                           .Add(route)
                           .Put(RTA_GATEWAY, place.gateway.bytes.data(), place.gateway.size())
                           .Put(RTA_OIF, uint32_t(kIndex)));
  return failure == 0 ? absl::OkStatus() : Failed("the default route", failure);
}

// Inside.
absl::Status Connect(const std::string& text, Kernel* kernel) {
  const HardwareBytes own = HardwareAddress(text);
  // One macvlan of the same hardware address may still be there, of a job that has just ended.
  const auto end = Now() + kRemoval;
  int failure = 0;
  do {
    if (failure != 0) std::this_thread::sleep_for(kLook);
    failure = kernel->Do(ChangeInterface(kIndex, 0).Put(IFLA_ADDRESS, own.data(), own.size()));
  } while ((failure == EADDRINUSE || failure == EBUSY) && Now() < end);
  if (failure != 0) return Failed("its hardware address", failure);
  failure = kernel->Do(QueueOf(RTM_DELQDISC, 0));
  // It was not silent.
  if (failure != 0 && failure != ENOENT && failure != EINVAL) return Failed("ending its silence", failure);
  AwaitReady(kernel);
  Neighbours neighbours(Parsed(text));
  for (int i = 0; i < kNotices; ++i) neighbours.Tell(own);
  return absl::OkStatus();
}

// Does `work` in the network namespace of that process.
absl::Status InNetworkOf(pid_t process, const std::function<absl::Status(Kernel*)>& work) {
  const UniqueFd theirs(open(("/proc/" + std::to_string(process) + "/ns/net").c_str(), O_RDONLY | O_CLOEXEC));
  absl::Status done;
  const auto inside = [&] {
    Kernel kernel;
    done = work(&kernel);
  };
  if (theirs.get() >= 0 && InNamespace(theirs.get(), inside)) return done;
  return ErrnoStatus("cannot enter the job's network namespace");
}

// Does `work` in the network namespace `fd`, which this process has made.
absl::Status Inside(int fd, const std::function<absl::Status(Kernel*)>& work) {
  absl::Status done;
  const bool entered = InNamespace(fd, [&] {
    Kernel kernel;
    done = work(&kernel);
  });
  return entered ? done : Failed("entering its network namespace", errno);
}

// "ADDRESS[/PREFIX][@INTERFACE]", of which the address can also be a network's.
bool Split(const std::string& text, JobNetwork* network) {
  const size_t at = text.find('@'), slash = text.find('/');
  const std::string numbers = text.substr(0, at);
  network->set_address(numbers.substr(0, slash));
  network->set_interface(at == std::string::npos ? "" : text.substr(at + 1));
  network->set_prefix(0);
  const Address address = Parsed(network->address());
  if (slash < at) {
    const std::string prefix = numbers.substr(slash + 1);
    if (prefix.empty() || prefix.size() > 3 || prefix.find_first_not_of("0123456789") != std::string::npos)
      return false;
    network->set_prefix(uint32_t(atoi(prefix.c_str())));
    if (network->prefix() == 0 || network->prefix() > address.bits()) return false;
  }
  const bool named =
      at == std::string::npos || (!network->interface().empty() && network->interface().size() < IFNAMSIZ);
  return named && address.family != AF_UNSPEC;
}

}  // namespace

absl::StatusOr<JobNetwork> ParseNetwork(const std::string& text) {
  JobNetwork network;
  if (!Split(text, &network)) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text,
                     "\" is not ADDRESS[/PREFIX][@INTERFACE], such as 10.9.0.50, 10.9.0.50/24@eth1 or "
                     "fd00:9::50/64"));
  }
  if (IsForMachines(Parsed(network.address()))) return network;
  return absl::InvalidArgumentError(absl::StrCat(network.address(), " cannot be a machine's address in a network"));
}

std::string ToText(const JobNetwork& network) {
  return network.address() + (network.prefix() == 0 ? "" : "/" + std::to_string(network.prefix())) +
         (network.interface().empty() ? "" : "@" + network.interface());
}

absl::Status CheckNetwork(JobNetwork* network, const std::vector<std::string>* allowed) {
  // It may come from an image, or from another machine.
  CR_RETURN_IF_ERROR(ParseNetwork(ToText(*network)).status());
  CR_ASSIGN_OR_RETURN(const Place place, FindPlace(*network));
  bool may = allowed == nullptr;
  for (size_t i = 0; allowed && i < allowed->size(); ++i) {
    may = may || RuleAllows((*allowed)[i], network->address(), place.interface.name);
  }
  if (!may) {
    return absl::PermissionDeniedError(absl::StrCat("the cr-hostd of this machine gives no job the address ",
                                                    network->address(), " on ", place.interface.name,
                                                    " (cr-hostd --allow-address)"));
  }
  const std::string missing = MissingCapability({{CAP_NET_ADMIN, "NET_ADMIN"}, {CAP_SYS_ADMIN, "SYS_ADMIN"}});
  if (!missing.empty()) {
    return absl::PermissionDeniedError(absl::StrCat("a job's own address needs root and ", missing));
  }
  network->set_prefix(place.prefix);
  return absl::OkStatus();
}

absl::Status CheckNetworkRule(const std::string& rule) {
  JobNetwork network;
  if (Split(rule, &network) && network.prefix() != 0 &&
      HostBitsAre(false, Parsed(network.address()), network.prefix())) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", rule, "\" is not a network, such as 10.9.0.0/24, 10.9.0.0/24@eth1 or fd00:9::/64"));
}

bool RuleAllows(const std::string& rule, const std::string& address, const std::string& interface) {
  JobNetwork network;
  return Split(rule, &network) && network.prefix() != 0 &&
         IsInNetwork(Parsed(address), Parsed(network.address()), network.prefix()) &&
         (network.interface().empty() || network.interface() == interface);
}

std::array<unsigned char, 6> HardwareAddress(const std::string& text) {
  const Address address = Parsed(text);
  std::array<unsigned char, 4> end = {address.bytes[0], address.bytes[1], address.bytes[2], address.bytes[3]};
  if (address.family == AF_INET6) {
    const uint64_t hash = Hash64Of({reinterpret_cast<const char*>(address.bytes.data()), address.bytes.size()});
    for (int i = 0; i < 4; ++i) end[size_t(i)] = static_cast<unsigned char>(hash >> (24 - 8 * i));
  }
  // Of no maker, of one interface.
  const unsigned char kind = address.family == AF_INET ? 'C' : '6';
  return {0x02, kind, end[0], end[1], end[2], end[3]};
}

absl::StatusOr<std::unique_ptr<NetworkNamespace>> NetworkNamespace::Make(const JobNetwork& network, bool ask) {
  CR_ASSIGN_OR_RETURN(const Place place, FindPlace(network));
  const UniqueFd own(open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
  if (own.get() < 0 || unshare(CLONE_NEWNET) != 0) return Failed("a network namespace", errno);
  UniqueFd fresh(open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
  if (setns(own.get(), CLONE_NEWNET) != 0) abort();
  if (fresh.get() < 0) return Failed("a network namespace", errno);
  const int failure = MakeInterface(place, fresh.get());
  if (failure != 0) {
    return Failed(place.interface.kind == "bridge" ? "a veth pair in the bridge " + place.interface.name
                                                   : "a macvlan on " + place.interface.name,
                  failure);
  }
  CR_RETURN_IF_ERROR(Inside(fresh.get(), [&](Kernel* kernel) { return SetUpInside(network, place, ask, kernel); }));
  return std::unique_ptr<NetworkNamespace>(new NetworkNamespace(fresh.Release(), network.address()));
}

absl::Status NetworkNamespace::Connect() {
  return Inside(fd_.get(), [&](Kernel* kernel) { return checkpoint::Connect(address_, kernel); });
}

void NetworkNamespace::Silence() {
  InNamespace(fd_.get(), [] {
    Kernel kernel;
    checkpoint::Silence(&kernel);
  });
}

void NetworkNamespace::Leave(bool flush) {
  InNamespace(fd_.get(), [flush] {
    const auto limit = Now() + kFlush;
    while (flush && HasUnsent() && Now() < limit) std::this_thread::sleep_for(kLook);
    Kernel kernel;
    checkpoint::Silence(&kernel);
  });
}

absl::Status SilenceNetwork(pid_t init) {
  return InNetworkOf(init, [](Kernel* kernel) {
    const int failure = Silence(kernel);
    return failure == 0 ? absl::OkStatus() : ErrnoStatus("the job's network cannot be kept silent", failure);
  });
}

absl::Status ConnectNetwork(pid_t init, const JobNetwork& network) {
  return InNetworkOf(init, [&](Kernel* kernel) { return Connect(network.address(), kernel); });
}

}  // namespace cuda_remote::checkpoint
