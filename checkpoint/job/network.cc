// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/network.h"

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
#include <netinet/if_ether.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <optional>
#include <thread>

#include "checkpoint/job/account.h"

namespace cuda_remote::checkpoint {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using HardwareBytes = std::array<unsigned char, ETH_ALEN>;

constexpr auto& kName = kJobInterface;
// The same number everywhere, since programs may keep it; one that no interface of a small namespace gets by itself.
constexpr int kIndex = 1001;
constexpr int kLoopback = 1;
constexpr uint32_t kMostPrefix = 30;
constexpr char kSilent[] = "blackhole";  // a queue that drops all that is sent; every kernel with queues has it
// Questions to a network whether somebody has an address: how many, and how long to wait for an answer to each.
constexpr int kQuestions = 3;
constexpr milliseconds kAnswer(100);
// The address of a job that has just ended, until the kernel has removed its interface.
constexpr milliseconds kRemoval(3000), kLook(50);
// Until the interface can send, and how often the neighbours are told; one such message may be lost.
constexpr milliseconds kReady(2000);
constexpr int kNotices = 3;

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int Take() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }

 private:
  int fd_;
};

// Does `work` with this thread in the network namespace `fd`. False if it cannot be entered.
bool InNamespace(int fd, const std::function<void()>& work) {
  const Descriptor own(open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
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

  const Descriptor socket_;
  uint32_t sequence_ = 0;
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

// An address as a number in this machine's order; 0: it is none.
uint32_t Parsed(const std::string& address) {
  in_addr parsed = {};
  return inet_pton(AF_INET, address.c_str(), &parsed) == 1 ? ntohl(parsed.s_addr) : 0;
}

std::string Written(uint32_t address) {
  const in_addr parsed = {htonl(address)};
  char text[INET_ADDRSTRLEN] = "";
  inet_ntop(AF_INET, &parsed, text, sizeof(text));
  return text;
}

uint32_t Mask(uint32_t prefix) { return prefix == 0 ? 0 : ~0u << (32 - prefix); }

bool IsInNetwork(uint32_t address, uint32_t network, uint32_t prefix) {
  return ((address ^ network) & Mask(prefix)) == 0;
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
  uint32_t address = 0, prefix = 0;
};

std::vector<OwnAddress> ListAddresses(Kernel* kernel) {
  std::vector<OwnAddress> all;
  ifaddrmsg wanted = {};
  wanted.ifa_family = AF_INET;
  kernel->List(Message(RTM_GETADDR, 0).Add(wanted), [&](const nlmsghdr* message) {
    const auto* const facts = static_cast<const ifaddrmsg*>(NLMSG_DATA(message));
    if (facts->ifa_family != AF_INET) return;
    OwnAddress one;
    one.index = int(facts->ifa_index);
    one.prefix = facts->ifa_prefixlen;
    ForEachAttribute<ifaddrmsg>(message, [&](const rtattr* attribute) {
      if (attribute->rta_type == IFA_LOCAL) one.address = ntohl(Number(attribute));
    });
    all.push_back(one);
  });
  return all;
}

// By which machine others are reached through the interface; 0: none.
uint32_t GatewayOf(Kernel* kernel, int index) {
  uint32_t gateway = 0;
  rtmsg wanted = {};
  wanted.rtm_family = AF_INET;
  kernel->List(Message(RTM_GETROUTE, 0).Add(wanted), [&](const nlmsghdr* message) {
    const auto* const facts = static_cast<const rtmsg*>(NLMSG_DATA(message));
    if (facts->rtm_family != AF_INET || facts->rtm_dst_len != 0 || facts->rtm_table != RT_TABLE_MAIN) return;
    uint32_t by = 0;
    int through = 0;
    ForEachAttribute<rtmsg>(message, [&](const rtattr* attribute) {
      if (attribute->rta_type == RTA_GATEWAY) by = ntohl(Number(attribute));
      if (attribute->rta_type == RTA_OIF) through = int(Number(attribute));
    });
    if (through == index && gateway == 0) gateway = by;
  });
  return gateway;
}

// Where on this machine an address goes.
struct Place {
  Interface interface;
  uint32_t prefix = 0;
  uint32_t gateway = 0;
};

bool FindPlace(const JobNetwork& network, Place* place, std::string* error) {
  const uint32_t address = Parsed(network.address());
  Kernel kernel;
  const std::vector<Interface> interfaces = ListInterfaces(&kernel);
  const std::vector<OwnAddress> addresses = ListAddresses(&kernel);
  const auto with_index = [&](int index) {
    for (const Interface& one : interfaces) {
      if (one.index == index) return one;
    }
    return Interface();
  };
  for (const OwnAddress& own : addresses) {
    if (own.address != address) continue;
    *error = "the address " + network.address() + " is this machine's own, on " + with_index(own.index).name +
             "; a job needs one that nobody else has";
    return false;
  }
  place->interface = Interface();
  for (const Interface& one : interfaces) {
    if (!network.interface().empty() && one.name == network.interface()) place->interface = one;
  }
  if (!network.interface().empty() && place->interface.index == 0) {
    *error = "this machine has no interface " + network.interface() + " for the job's address " + network.address();
    return false;
  }
  for (const OwnAddress& own : addresses) {
    const Interface of = with_index(own.index);
    if (!IsInNetwork(address, own.address, own.prefix) || !of.is_ethernet) continue;
    if (!network.interface().empty() && of.index != place->interface.index) continue;
    if (own.prefix < place->prefix) continue;
    place->interface = of;
    place->prefix = own.prefix;
  }
  if (place->interface.index == 0) {
    *error = "no interface of this machine is in the network of the job's address " + network.address() +
             "; name the one that it is to be on: --address " + network.address() + "/24@INTERFACE";
    return false;
  }
  if (network.prefix() != 0) place->prefix = network.prefix();
  const std::string& name = place->interface.name;
  if (place->prefix == 0) {
    *error = "the interface " + name + " has no address in the network of " + network.address() +
             "; say how many bits are the network's: --address " + network.address() + "/24@" + name;
    return false;
  }
  const uint32_t hosts = ~Mask(place->prefix);
  if (place->prefix > kMostPrefix || (address & hosts) == 0 || (address & hosts) == hosts) {
    *error =
        network.address() + " cannot be a machine's address in a network of " + std::to_string(place->prefix) + " bits";
    return false;
  }
  if (!place->interface.is_ethernet || !place->interface.is_up) {
    *error = "the interface " + name + (place->interface.is_ethernet ? " is down" : " is no Ethernet interface") +
             ", so no job can have an address there";
    return false;
  }
  if (place->interface.master != 0) {
    *error = "the interface " + name + " is a part of " + with_index(place->interface.master).name +
             "; name that one for the job's address";
    return false;
  }
  place->gateway = GatewayOf(&kernel, place->interface.index);
  if (!IsInNetwork(place->gateway, address, place->prefix) || place->gateway == address) place->gateway = 0;
  return true;
}

std::string Reason(int failure) {
  std::string text = strerror(failure);
  if (failure == EPERM) text += " (forbidden here, as by seccomp or a user namespace)";
  if (failure == EOPNOTSUPP) text += " (this kernel has no such interfaces)";
  return text;
}

bool Failed(const std::string& what, int failure, std::string* error) {
  *error = "the job cannot get its address: " + what + ": " + Reason(failure);
  return false;
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
  char outer[IFNAMSIZ];
  snprintf(outer, sizeof(outer), "cr%02x%02x%02x%02x", outer_bytes[0], outer_bytes[1], outer_bytes[2], outer_bytes[3]);
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
  // A bridge takes the lowest hardware address of its parts, and is not to change its own.
  const HardwareBytes high = {0xfe, 'C', outer_bytes[0], outer_bytes[1], outer_bytes[2], outer_bytes[3]};
  pair.Add(ifinfomsg{})
      .Put(IFLA_IFNAME, std::string(outer))
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
  plug.Add(up).Put(IFLA_IFNAME, std::string(outer)).Put(IFLA_MASTER, uint32_t(place.interface.index));
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

bool IsReady(Kernel* kernel) {
  for (const Interface& one : ListInterfaces(kernel)) {
    if (one.index != kIndex) continue;
    ifreq request = {};
    memcpy(request.ifr_name, kName, sizeof(kName));
    const Descriptor any(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    return ioctl(any.get(), SIOCGIFFLAGS, &request) == 0 && (request.ifr_flags & IFF_RUNNING) != 0;
  }
  return false;
}

// Inside. Sends and receives ARP by eth0.
class Neighbours {
 public:
  Neighbours() : socket_(socket(AF_PACKET, SOCK_DGRAM | SOCK_CLOEXEC, htons(ETH_P_ARP))) {
    sockaddr_ll where = {};
    where.sll_family = AF_PACKET;
    where.sll_protocol = htons(ETH_P_ARP);
    where.sll_ifindex = kIndex;
    bound_ = bind(socket_.get(), reinterpret_cast<sockaddr*>(&where), sizeof(where)) == 0;
  }

  // `sender` 0: a question of somebody who has no address yet.
  bool Send(uint32_t sender, uint32_t target, const HardwareBytes& own) {
    ether_arp message = {};
    message.arp_hrd = htons(ARPHRD_ETHER);
    message.arp_pro = htons(ETH_P_IP);
    message.arp_hln = ETH_ALEN;
    message.arp_pln = sizeof(in_addr);
    message.arp_op = htons(ARPOP_REQUEST);
    memcpy(message.arp_sha, own.data(), ETH_ALEN);
    const uint32_t from = htonl(sender), to = htonl(target);
    memcpy(message.arp_spa, &from, sizeof(from));
    memcpy(message.arp_tpa, &to, sizeof(to));
    sockaddr_ll all = {};
    all.sll_family = AF_PACKET;
    all.sll_protocol = htons(ETH_P_ARP);
    all.sll_ifindex = kIndex;
    all.sll_halen = ETH_ALEN;
    memset(all.sll_addr, 0xff, ETH_ALEN);
    return bound_ && sendto(socket_.get(), &message, sizeof(message), 0, reinterpret_cast<sockaddr*>(&all),
                            sizeof(all)) == ssize_t(sizeof(message));
  }

  // Who says within the time that he has the address: a hardware address as text; empty: nobody.
  std::string WhoHas(uint32_t address, milliseconds limit) {
    const auto end = steady_clock::now() + limit;
    while (true) {
      const auto left = std::chrono::duration_cast<milliseconds>(end - steady_clock::now()).count();
      pollfd waiting = {socket_.get(), POLLIN, 0};
      if (left <= 0 || poll(&waiting, 1, int(left)) <= 0) return {};
      ether_arp message = {};
      uint32_t sender = 0;
      if (recv(socket_.get(), &message, sizeof(message), 0) != ssize_t(sizeof(message))) continue;
      memcpy(&sender, message.arp_spa, sizeof(sender));
      if (ntohl(sender) != address) continue;
      char text[3 * ETH_ALEN + 1];
      const unsigned char* const who = message.arp_sha;
      snprintf(text, sizeof(text), "%02x:%02x:%02x:%02x:%02x:%02x", who[0], who[1], who[2], who[3], who[4], who[5]);
      return text;
    }
  }

 private:
  const Descriptor socket_;
  bool bound_ = false;
};

HardwareBytes OwnHardwareAddress() {
  HardwareBytes own = {};
  ifreq request = {};
  memcpy(request.ifr_name, kName, sizeof(kName));
  const Descriptor any(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (ioctl(any.get(), SIOCGIFHWADDR, &request) == 0) memcpy(own.data(), request.ifr_hwaddr.sa_data, own.size());
  return own;
}

void AwaitReady(Kernel* kernel) {
  const auto end = steady_clock::now() + kReady;
  while (!IsReady(kernel) && steady_clock::now() < end) std::this_thread::sleep_for(milliseconds(5));
}

// Inside, with eth0 up and without an address.
bool IsFree(uint32_t address, Kernel* kernel, std::string* error) {
  AwaitReady(kernel);
  const HardwareBytes own = OwnHardwareAddress();
  Neighbours neighbours;
  const auto end = steady_clock::now() + kRemoval;
  for (int asked = 0; asked < kQuestions;) {
    if (!neighbours.Send(0, address, own)) return Failed("asking who has it", errno, error);
    const std::string who = neighbours.WhoHas(address, kAnswer);
    if (who.empty()) {
      ++asked;
    } else if (steady_clock::now() > end) {
      *error = "the address " + Written(address) + " is in use: the machine or job with the hardware address " + who +
               " answers for it; end that one first, or give the job another address";
      return false;
    } else {
      asked = 0;
      std::this_thread::sleep_for(kLook);
    }
  }
  return true;
}

bool SetUpInside(const JobNetwork& network, const Place& place, bool ask, Kernel* kernel, std::string* error) {
  // Its addresses would be others with each hardware address. A container may not let this be written, nor need it.
  const std::string setting = std::string("/proc/sys/net/ipv6/conf/") + kName + "/disable_ipv6";
  const Descriptor file(open(setting.c_str(), O_WRONLY | O_CLOEXEC));
  const ssize_t ignored = file.get() >= 0 ? write(file.get(), "1", 1) : 0;
  static_cast<void>(ignored);
  const uint32_t address = Parsed(network.address());
  int failure = kernel->Do(ChangeInterface(kLoopback, IFF_UP));
  if (failure != 0) return Failed("the loopback interface", failure, error);
  if (ask) {
    failure = kernel->Do(ChangeInterface(kIndex, IFF_UP));
    if (failure != 0) return Failed(kName, failure, error);
    if (!IsFree(address, kernel, error)) return false;
  }
  failure = Silence(kernel);
  if (failure != 0) return Failed("keeping it silent", failure, error);
  if (!ask) failure = kernel->Do(ChangeInterface(kIndex, IFF_UP));
  if (failure != 0) return Failed(kName, failure, error);
  ifaddrmsg which = {};
  which.ifa_family = AF_INET;
  which.ifa_prefixlen = uint8_t(place.prefix);
  which.ifa_index = kIndex;
  failure = kernel->Do(Message(RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL)
                           .Add(which)
                           .Put(IFA_LOCAL, htonl(address))
                           .Put(IFA_ADDRESS, htonl(address))
                           .Put(IFA_BROADCAST, htonl(address | ~Mask(place.prefix))));
  if (failure != 0) return Failed("the address", failure, error);
  if (place.gateway == 0) return true;
  rtmsg route = {};
  route.rtm_family = AF_INET;
  route.rtm_table = RT_TABLE_MAIN;
  route.rtm_protocol = RTPROT_STATIC;
  route.rtm_scope = RT_SCOPE_UNIVERSE;
  route.rtm_type = RTN_UNICAST;
  failure = kernel->Do(Message(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL)
                           .Add(route)
                           .Put(RTA_GATEWAY, htonl(place.gateway))
                           .Put(RTA_OIF, uint32_t(kIndex)));
  return failure == 0 || Failed("the default route", failure, error);
}

// Inside.
bool Connect(const std::string& text, Kernel* kernel, std::string* error) {
  const uint32_t address = Parsed(text);
  const HardwareBytes own = HardwareAddress(text);
  // One macvlan of the same hardware address may still be there, of a job that has just ended.
  const auto end = steady_clock::now() + kRemoval;
  int failure = 0;
  do {
    if (failure != 0) std::this_thread::sleep_for(kLook);
    failure = kernel->Do(ChangeInterface(kIndex, 0).Put(IFLA_ADDRESS, own.data(), own.size()));
  } while ((failure == EADDRINUSE || failure == EBUSY) && steady_clock::now() < end);
  if (failure != 0) return Failed("its hardware address", failure, error);
  failure = kernel->Do(QueueOf(RTM_DELQDISC, 0));
  // It was not silent.
  if (failure != 0 && failure != ENOENT && failure != EINVAL) return Failed("ending its silence", failure, error);
  AwaitReady(kernel);
  Neighbours neighbours;
  for (int i = 0; i < kNotices; ++i) neighbours.Send(address, address, own);
  return true;
}

// Does `work` in the network namespace of that process.
bool InNetworkOf(pid_t process, const std::function<bool(Kernel*)>& work, std::string* error) {
  const Descriptor theirs(open(("/proc/" + std::to_string(process) + "/ns/net").c_str(), O_RDONLY | O_CLOEXEC));
  bool ok = false;
  const auto inside = [&] {
    Kernel kernel;
    ok = work(&kernel);
  };
  if (theirs.get() >= 0 && InNamespace(theirs.get(), inside)) return ok;
  *error = std::string("cannot enter the job's network namespace: ") + strerror(errno);
  return false;
}

// "ADDRESS[/PREFIX][@INTERFACE]", of which the address can also be a network's.
bool Split(const std::string& text, JobNetwork* network) {
  const size_t at = text.find('@'), slash = text.find('/');
  const std::string numbers = text.substr(0, at);
  network->set_address(numbers.substr(0, slash));
  network->set_interface(at == std::string::npos ? "" : text.substr(at + 1));
  network->set_prefix(0);
  if (slash < at) {
    const std::string prefix = numbers.substr(slash + 1);
    if (prefix.empty() || prefix.size() > 2 || prefix.find_first_not_of("0123456789") != std::string::npos)
      return false;
    network->set_prefix(uint32_t(atoi(prefix.c_str())));
    if (network->prefix() == 0 || network->prefix() > 32) return false;
  }
  const bool named =
      at == std::string::npos || (!network->interface().empty() && network->interface().size() < IFNAMSIZ);
  return named && Parsed(network->address()) != 0;
}

}  // namespace

bool ParseNetwork(const std::string& text, JobNetwork* network, std::string* error) {
  if (!Split(text, network)) {
    *error = "\"" + text +
             "\" is no ADDRESS[/PREFIX][@INTERFACE], such as 10.9.0.50, 10.9.0.50/24 or "
             "10.9.0.50/24@eth1; a job's own address is one of IPv4";
    return false;
  }
  const uint32_t first = Parsed(network->address()) >> 24;
  if (first != 127 && first < 224) return true;
  *error = network->address() + " cannot be a machine's address in a network";
  return false;
}

std::string ToText(const JobNetwork& network) {
  return network.address() + (network.prefix() == 0 ? "" : "/" + std::to_string(network.prefix())) +
         (network.interface().empty() ? "" : "@" + network.interface());
}

bool CheckNetwork(JobNetwork* network, const std::vector<std::string>* allowed, std::string* error) {
  // It may come from an image, or from another machine.
  JobNetwork again;
  if (!ParseNetwork(ToText(*network), &again, error)) return false;
  Place place;
  if (!FindPlace(*network, &place, error)) return false;
  bool may = allowed == nullptr;
  for (size_t i = 0; allowed && i < allowed->size(); ++i) {
    may = may || RuleAllows((*allowed)[i], network->address(), place.interface.name);
  }
  if (!may) {
    *error = "the cr-hostd of this machine gives no job the address " + network->address() + " on " +
             place.interface.name + " (cr-hostd --allow-address)";
    return false;
  }
  const std::string missing = MissingCapability({{CAP_NET_ADMIN, "NET_ADMIN"}, {CAP_SYS_ADMIN, "SYS_ADMIN"}});
  if (!missing.empty()) {
    *error = "a job's own address needs root and " + missing;
    return false;
  }
  network->set_prefix(place.prefix);
  return true;
}

bool CheckNetworkRule(const std::string& rule, std::string* error) {
  JobNetwork network;
  if (Split(rule, &network) && network.prefix() != 0 && (Parsed(network.address()) & ~Mask(network.prefix())) == 0) {
    return true;
  }
  *error = "\"" + rule + "\" is no network, such as 10.9.0.0/24 or 10.9.0.0/24@eth1";
  return false;
}

bool RuleAllows(const std::string& rule, const std::string& address, const std::string& interface) {
  JobNetwork network;
  return Split(rule, &network) && network.prefix() != 0 &&
         IsInNetwork(Parsed(address), Parsed(network.address()), network.prefix()) &&
         (network.interface().empty() || network.interface() == interface);
}

std::array<unsigned char, 6> HardwareAddress(const std::string& address) {
  const uint32_t number = Parsed(address);
  // Of no maker, of one interface.
  return {0x02,
          'C',
          static_cast<unsigned char>(number >> 24),
          static_cast<unsigned char>(number >> 16),
          static_cast<unsigned char>(number >> 8),
          static_cast<unsigned char>(number)};
}

std::unique_ptr<NetworkNamespace> NetworkNamespace::Make(const JobNetwork& network, bool ask, std::string* error) {
  Place place;
  if (!FindPlace(network, &place, error)) return nullptr;
  const Descriptor own(open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
  if (own.get() < 0 || unshare(CLONE_NEWNET) != 0) {
    Failed("a network namespace", errno, error);
    return nullptr;
  }
  Descriptor fresh(open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
  if (setns(own.get(), CLONE_NEWNET) != 0) abort();
  if (fresh.get() < 0) {
    Failed("a network namespace", errno, error);
    return nullptr;
  }
  const int failure = MakeInterface(place, fresh.get());
  if (failure != 0) {
    Failed(place.interface.kind == "bridge" ? "a veth pair in the bridge " + place.interface.name
                                            : "a macvlan on " + place.interface.name,
           failure, error);
    return nullptr;
  }
  bool ok = false;
  const bool entered = InNamespace(fresh.get(), [&] {
    Kernel kernel;
    ok = SetUpInside(network, place, ask, &kernel, error);
  });
  if (!entered) Failed("entering its network namespace", errno, error);
  if (!entered || !ok) return nullptr;
  return std::unique_ptr<NetworkNamespace>(new NetworkNamespace(fresh.Take(), network.address()));
}

NetworkNamespace::~NetworkNamespace() { close(fd_); }

bool NetworkNamespace::Connect(std::string* error) {
  bool ok = false;
  const bool entered = InNamespace(fd_, [&] {
    Kernel kernel;
    ok = checkpoint::Connect(address_, &kernel, error);
  });
  return entered ? ok : Failed("entering its network namespace", errno, error);
}

void NetworkNamespace::Silence() {
  InNamespace(fd_, [] {
    Kernel kernel;
    checkpoint::Silence(&kernel);
  });
}

bool SilenceNetwork(pid_t init, std::string* error) {
  const auto silence = [&](Kernel* kernel) {
    const int failure = Silence(kernel);
    if (failure != 0) *error = std::string("the job's network cannot be kept silent: ") + strerror(failure);
    return failure == 0;
  };
  return InNetworkOf(init, silence, error);
}

bool ConnectNetwork(pid_t init, const JobNetwork& network, std::string* error) {
  return InNetworkOf(
      init, [&](Kernel* kernel) { return Connect(network.address(), kernel, error); }, error);
}

}  // namespace cuda_remote::checkpoint
