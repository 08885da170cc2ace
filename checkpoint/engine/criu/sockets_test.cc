// SPDX-License-Identifier: Apache-2.0
// Sockets, their options and their queues: jobs that have them are saved by CRIU, ended and restored, twice, and find
// them as they were. What would be lost is refused. Needs root and a CRIU that works (tools/setup-criu).
//
// Each subject is a function that runs in the job. It makes its sockets, calls Pause, and looks at them again.

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <termios.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/engine/criu/criu.h"
#include "checkpoint/engine/criu/criu_engine.h"
#include "checkpoint/engine/criu/criu_image.h"
#include "checkpoint/engine/criu/criu_restore.h"
#include "checkpoint/engine/criu/socket_facts.h"
#include "checkpoint/engine/criu/socket_state.h"
#include "checkpoint/engine/criu/testing/saved_tree.h"
#include "checkpoint/job/isolation/isolate.h"
#include "checkpoint/job/job.h"
#include "proto/base/proc.h"
#include "proto/base/text.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr char kText[] = "text";

sockaddr_in Loopback(uint16_t port = 0) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

const sockaddr* Plain(const sockaddr_in* address) { return reinterpret_cast<const sockaddr*>(address); }

sockaddr_in Bound(int socket) {
  sockaddr_in address = Loopback();
  MUST(bind(socket, Plain(&address), sizeof(address)) == 0);
  socklen_t bytes = sizeof(address);
  MUST(getsockname(socket, reinterpret_cast<sockaddr*>(&address), &bytes) == 0);
  return address;
}

// Two ends of a TCP connection, and what listens.
struct Tcp {
  Tcp() {
    const sockaddr_in address = Bound(listener);
    MUST(listen(listener, 8) == 0 && connect(near, Plain(&address), sizeof(address)) == 0);
    far = accept(listener, nullptr, nullptr);
    MUST(far >= 0);
  }
  int listener = socket(AF_INET, SOCK_STREAM, 0), near = socket(AF_INET, SOCK_STREAM, 0), far = -1;
};

struct Pair {
  explicit Pair(int type) {
    int ends[2];
    MUST(socketpair(AF_UNIX, type, 0, ends) == 0);
    near = ends[0];
    far = ends[1];
  }
  int near, far;
};

// --- Options

// What CRIU itself saves, in other forms than numbers.
constexpr SocketOption kOthers[] = {{kLevelSocket, SO_SNDBUF, 4, "SO_SNDBUF"},
                                    {kLevelSocket, SO_RCVBUF, 4, "SO_RCVBUF"},
                                    {kLevelSocket, SO_LINGER, 8, "SO_LINGER"},
                                    {kLevelSocket, SO_RCVTIMEO, 16, "SO_RCVTIMEO"},
                                    {kLevelSocket, SO_SNDTIMEO, 16, "SO_SNDTIMEO"}};

// "none" if it has no such option.
std::string ValueOf(int socket, const SocketOption& option) {
  std::string value(4096, '\0');
  auto bytes = socklen_t(option.bytes);
  if (getsockopt(socket, option.level, option.option, value.data(), &bytes) != 0) return "none";
  value.resize(bytes);
  return value;
}

using Values = std::map<std::string, std::string>;

Values ValuesOf(int socket) {
  Values values;
  for (const SocketOption& option : kSocketOptions) values[option.name] = ValueOf(socket, option);
  for (const SocketOption& option : kOthers) values[option.name] = ValueOf(socket, option);
  return values;
}

// Gives each option another value if there is one, the `which`th that the kernel takes. Returns how many.
int ChangeOptions(int socket, int which) {
  constexpr int kNumbers[] = {1, 5, 7, 50, 1200, 70000, 0, 2, 3};
  int changed = 0;
  for (const SocketOption& option : kSocketOptions) {
    const std::string before = ValueOf(socket, option);
    if (option.level == kLevelTcp && option.option == 13) {
      setsockopt(socket, option.level, option.option, "reno", 4);
    } else if (option.level == kLevelIp && option.option == 4) {
      const char nothing[4] = {1, 1, 1, 0};  // three times "no operation", and the end
      setsockopt(socket, option.level, option.option, nothing, size_t(which + 1) * 4 > 4 ? 4 : 4);
    } else if (option.level == kLevelIp && option.option == 32) {
      const in_addr address = {htonl(INADDR_LOOPBACK)};
      setsockopt(socket, option.level, option.option, &address, sizeof(address));
    } else if (option.level == kLevelSocket && option.option == 44) {
      // It keeps all filters as they are.
      const int on = 1;
      if (which == 1) setsockopt(socket, option.level, option.option, &on, sizeof(on));
    } else if (option.option == 37 && option.level == kLevelSocket) {
      const int flags[2] = {which == 0 ? 0x18 : 0x10, 0};  // of received packets, by software
      setsockopt(socket, option.level, option.option, flags, sizeof(flags));
    } else if (option.bytes <= 8) {
      int left = which;
      for (const int64_t number : kNumbers) {
        const std::string now = ValueOf(socket, option);
        if (setsockopt(socket, option.level, option.option, &number, option.bytes) != 0) continue;
        if (ValueOf(socket, option) == before) continue;
        if (left-- == 0) break;
      }
    }
    if (ValueOf(socket, option) != before) ++changed;
  }
  const linger wait = {which, 5 + which};
  setsockopt(socket, SOL_SOCKET, SO_LINGER, &wait, sizeof(wait));
  const timeval limit = {12 + which, 0};
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  const int size = 300000 + which;
  setsockopt(socket, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof(size));
  return changed;
}

void Options() {
  std::vector<std::pair<std::string, int>> sockets;
  int changed = 0;
  for (const int which : {-1, 0, 1}) {
    const Tcp tcp;
    const Pair stream(SOCK_STREAM), datagrams(SOCK_DGRAM);
    const int bound = socket(AF_INET, SOCK_DGRAM, 0);
    Bound(bound);
    const std::pair<const char*, int> some[] = {
        {"listening", tcp.listener},
        {"connecting", tcp.near},
        {"accepted", tcp.far},
        {"closed", socket(AF_INET, SOCK_STREAM, 0)},
        {"TCP of IPv6", socket(AF_INET6, SOCK_STREAM, 0)},
        {"UDP", bound},
        {"UDP of IPv6", socket(AF_INET6, SOCK_DGRAM, 0)},
        {"UDP-Lite", socket(AF_INET, SOCK_DGRAM, 136)},
        {"raw", socket(AF_INET, SOCK_RAW, IPPROTO_ICMP)},
        {"raw of IPv6", socket(AF_INET6, SOCK_RAW, IPPROTO_ICMPV6)},
        {"Unix stream", stream.near},
        {"Unix datagrams", datagrams.near},
        {"netlink", socket(AF_NETLINK, SOCK_RAW, 0)},
    };
    for (const auto& [name, socket] : some) {
      if (socket < 0) continue;  // this kernel, or this container, has none
      if (which >= 0) changed += ChangeOptions(socket, which);
      sockets.emplace_back(std::string(name) + " " + std::to_string(which), socket);
    }
  }
  MUST(changed > 300);
  std::vector<Values> before;
  for (const auto& [name, socket] : sockets) before.push_back(ValuesOf(socket));
  Pause();
  std::string lost;
  for (size_t i = 0; i < sockets.size(); ++i) {
    const Values now = ValuesOf(sockets[i].second);
    for (const auto& [name, value] : before[i]) {
      // Of connections these are the kernel's own.
      const bool tcp = sockets[i].first.find("connecting") == 0 || sockets[i].first.find("accepted") == 0;
      if (tcp && (name == "TCP_MAXSEG" || name == "IP_MULTICAST_TTL")) continue;
      if (now.at(name) != value)
        lost += sockets[i].first + "." + name + ": " + HexBytes(value) + " -> " + HexBytes(now.at(name)) + "\n";
    }
  }
  if (!lost.empty()) Fail(__LINE__, lost);
}

// --- Multicast groups

struct Member {
  int socket;
  int level;
  sockaddr_storage group;

  std::string Filter() const {
    std::string value(GROUP_FILTER_SIZE(8), '\0');
    auto* const filter = reinterpret_cast<group_filter*>(value.data());
    filter->gf_interface = if_nametoindex("lo");
    filter->gf_group = group;
    filter->gf_numsrc = 8;
    auto bytes = socklen_t(value.size());
    if (getsockopt(socket, level, MCAST_MSFILTER, filter, &bytes) != 0) return "none";
    return std::to_string(filter->gf_fmode) + " " + std::to_string(filter->gf_numsrc);
  }
  bool Hears() const {
    const int sender = ::socket(group.ss_family, SOCK_DGRAM, 0), interface = int(if_nametoindex("lo"));
    ip_mreqn way = {};
    way.imr_ifindex = interface;
    if (level == IPPROTO_IP) MUST(setsockopt(sender, IPPROTO_IP, IP_MULTICAST_IF, &way, sizeof(way)) == 0);
    if (level == IPPROTO_IPV6)
      MUST(setsockopt(sender, IPPROTO_IPV6, IPV6_MULTICAST_IF, &interface, sizeof(interface)) == 0);
    sockaddr_storage name = {};
    socklen_t bytes = sizeof(name);
    MUST(getsockname(socket, reinterpret_cast<sockaddr*>(&name), &bytes) == 0);
    sockaddr_storage to = group;
    reinterpret_cast<sockaddr_in*>(&to)->sin_port = reinterpret_cast<sockaddr_in*>(&name)->sin_port;
    const ssize_t sent = sendto(sender, "m", 1, 0, reinterpret_cast<sockaddr*>(&to), bytes);
    close(sender);
    // It is there at once, on the loopback interface.
    char text[4];
    return sent == 1 && recv(socket, text, sizeof(text), MSG_DONTWAIT) == 1;
  }
};

sockaddr_storage Ipv4Group(const char* text) {
  sockaddr_storage address = {};
  auto* const ipv4 = reinterpret_cast<sockaddr_in*>(&address);
  ipv4->sin_family = AF_INET;
  MUST(inet_pton(AF_INET, text, &ipv4->sin_addr) == 1);
  return address;
}

void Memberships() {
  std::vector<Member> members;
  const uint32_t interface = if_nametoindex("lo");
  const auto add = [&](int level, const sockaddr_storage& group) -> int {
    const int one = socket(group.ss_family, SOCK_DGRAM, 0);
    sockaddr_storage any = {};
    any.ss_family = group.ss_family;
    const socklen_t bytes = level == IPPROTO_IP ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    MUST(bind(one, reinterpret_cast<sockaddr*>(&any), bytes) == 0);
    members.push_back({one, level, group});
    return one;
  };
  const auto join = [&](int one, int level, const sockaddr_storage& group) {
    group_req wanted = {};
    wanted.gr_interface = interface;
    wanted.gr_group = group;
    MUST(setsockopt(one, level, MCAST_JOIN_GROUP, &wanted, sizeof(wanted)) == 0);
  };
  const auto source = [&](int one, int option, const sockaddr_storage& group, const char* from) {
    group_source_req wanted = {};
    wanted.gsr_interface = interface;
    wanted.gsr_group = group;
    wanted.gsr_source = Ipv4Group(from);
    MUST(setsockopt(one, IPPROTO_IP, option, &wanted, sizeof(wanted)) == 0);
  };
  const sockaddr_storage first = Ipv4Group("239.7.7.7"), second = Ipv4Group("232.1.2.3");
  const int plain = add(IPPROTO_IP, first);
  join(plain, IPPROTO_IP, first);
  join(plain, IPPROTO_IP, second);
  members.push_back({plain, IPPROTO_IP, second});
  const int without = add(IPPROTO_IP, first);
  join(without, IPPROTO_IP, first);
  source(without, MCAST_BLOCK_SOURCE, first, "127.0.0.77");
  source(without, MCAST_BLOCK_SOURCE, first, "127.0.0.78");
  const int only = add(IPPROTO_IP, second);
  source(only, MCAST_JOIN_SOURCE_GROUP, second, "127.0.0.1");
  if (const int ipv6 = socket(AF_INET6, SOCK_DGRAM, 0); ipv6 >= 0) {
    sockaddr_storage group = {};
    auto* const address = reinterpret_cast<sockaddr_in6*>(&group);
    address->sin6_family = AF_INET6;
    MUST(inet_pton(AF_INET6, "ff11::7:7", &address->sin6_addr) == 1);
    group_req wanted = {};
    wanted.gr_interface = interface;
    wanted.gr_group = group;
    // A container may have none on this interface.
    if (setsockopt(ipv6, IPPROTO_IPV6, MCAST_JOIN_GROUP, &wanted, sizeof(wanted)) == 0)
      join(add(IPPROTO_IPV6, group), IPPROTO_IPV6, group);
    close(ipv6);
  }
  std::vector<std::pair<std::string, bool>> before;
  before.reserve(members.size());
  for (const Member& member : members) before.emplace_back(member.Filter(), member.Hears());
  MUST(before[0].first == "0 0" && before[0].second && before[2].first == "0 2" && before[3].first == "1 1");
  Pause();
  for (size_t i = 0; i < members.size(); ++i) {
    if (std::make_pair(members[i].Filter(), members[i].Hears()) != before[i])
      Fail(__LINE__, "member " + std::to_string(i) + ": " + before[i].first + " -> " + members[i].Filter());
  }
}

// --- Addresses

std::string AddressOf(int socket, decltype(getsockname)* get) {
  sockaddr_storage address = {};
  socklen_t bytes = sizeof(address);
  if (get(socket, reinterpret_cast<sockaddr*>(&address), &bytes) != 0) return strerror(errno);
  return std::string(reinterpret_cast<const char*>(&address), bytes);
}

void Addresses() {
  std::vector<int> all;
  for (const int type : {SOCK_RAW, SOCK_DGRAM}) {
    for (const bool connected : {false, true}) {
      all.push_back(socket(AF_INET, type, type == SOCK_RAW ? IPPROTO_ICMP : 0));
      sockaddr_in address = Loopback();
      MUST(bind(all.back(), Plain(&address), sizeof(address)) == 0);
      address = Loopback(9);
      if (connected) MUST(connect(all.back(), Plain(&address), sizeof(address)) == 0);
      all.push_back(socket(AF_INET, type, type == SOCK_RAW ? IPPROTO_ICMP : 0));
    }
  }
  std::vector<std::pair<std::string, std::string>> before;
  for (const int one : all) before.emplace_back(AddressOf(one, getsockname), AddressOf(one, getpeername));
  Pause();
  for (size_t i = 0; i < all.size(); ++i) {
    if (AddressOf(all[i], getsockname) != before[i].first || AddressOf(all[i], getpeername) != before[i].second)
      Fail(__LINE__, "socket " + std::to_string(i));
  }
}

// --- Queues

void Send(int socket, const std::string& text, int file = -1) {
  msghdr message = {};
  iovec part = {const_cast<char*>(text.data()), text.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (file >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &file, sizeof(file));
  }
  MUST(sendmsg(socket, &message, 0) == ssize_t(text.size()));
}

// Which must be there, with a file or without.
std::string Receive(int socket, int* file = nullptr) {
  msghdr message = {};
  std::string text(4096, '\0');
  iovec part = {text.data(), text.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t got = recvmsg(socket, &message, MSG_DONTWAIT);
  MUST(got >= 0);
  text.resize(size_t(got));
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  MUST((header != nullptr) == (file != nullptr));
  if (file) memcpy(file, CMSG_DATA(header), sizeof(*file));
  return text;
}

bool IsEmpty(int socket) {
  char byte;
  return recv(socket, &byte, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN;
}

void EmptyDatagrams() {
  const std::vector<std::string> queues[] = {
      {"", "one", "", "", "two", ""}, {""}, {"one", ""}, {std::string(3000, 'x')}};
  std::vector<Pair> pairs;
  for (const int type : {SOCK_DGRAM, SOCK_SEQPACKET}) {
    for (const auto& queue : queues) {
      pairs.emplace_back(type);
      for (const std::string& text : queue) Send(pairs.back().far, text);
    }
  }
  // Its other end sends no more.
  const Pair ended(SOCK_SEQPACKET);
  for (const char* const text : {"one", "", "", "two"}) Send(ended.far, text);
  MUST(shutdown(ended.far, SHUT_WR) == 0);
  const Pair with_file(SOCK_DGRAM);
  const int memory = memfd_create("file", 0);
  MUST(write(memory, kText, 4) == 4);
  Send(with_file.far, "", memory);
  Send(with_file.far, "two");
  close(memory);
  Pause();
  size_t at = 0;
  for (int type = 0; type < 2; ++type) {
    for (const auto& queue : queues) {
      for (const std::string& text : queue) MUST(Receive(pairs[at].near) == text);
      MUST(IsEmpty(pairs[at].near));
      ++at;
    }
  }
  for (const char* const text : {"one", "", "", "two"}) MUST(Receive(ended.near) == text);
  int file = -1;
  char text[5] = "";
  MUST(Receive(with_file.near, &file).empty() && Receive(with_file.near) == "two" && IsEmpty(with_file.near));
  MUST(pread(file, text, 4, 0) == 4 && strcmp(text, kText) == 0);
}

// What is nowhere but in a queue: ends of pairs, one with something in its own queue, both ends of a pair, one of TCP,
// and one that listens. A timerfd that is open, too.
void SocketsInQueues() {
  const Pair carrier(SOCK_STREAM), carried(SOCK_STREAM), datagrams(SOCK_DGRAM), both(SOCK_STREAM);
  const Tcp tcp;
  const int memory = memfd_create("file", 0), timer = timerfd_create(CLOCK_MONOTONIC, 0);
  const itimerspec later = {{0, 0}, {3600, 0}};
  MUST(write(memory, kText, 4) == 4 && timerfd_settime(timer, 0, &later, nullptr) == 0);
  Send(carried.near, "deeper", memory);
  const int sent[] = {carried.far, datagrams.far, both.near, both.far, tcp.far, tcp.listener, timer};
  for (const int file : sent) Send(carrier.far, "f", file);
  for (const int file : {carried.far, datagrams.far, both.near, both.far, tcp.listener, memory}) close(file);
  Pause();
  int files[7];
  for (int& file : files) MUST(Receive(carrier.near, &file) == "f");
  int deeper = -1;
  char text[5] = "";
  MUST(Receive(files[0], &deeper) == "deeper" && pread(deeper, text, 4, 0) == 4 && strcmp(text, kText) == 0);
  Send(carried.near, "unix");
  Send(datagrams.near, "datagram");
  Send(files[2], "both");
  MUST(Receive(files[0]) == "unix" && Receive(files[1]) == "datagram" && Receive(files[3]) == "both");
  Send(tcp.near, "over");
  MUST(recv(files[4], text, 4, MSG_WAITALL) == 4 && strcmp(text, "over") == 0);
  sockaddr_in address = {};
  socklen_t bytes = sizeof(address);
  MUST(getsockname(files[5], reinterpret_cast<sockaddr*>(&address), &bytes) == 0);
  const int again = socket(AF_INET, SOCK_STREAM, 0);
  MUST(connect(again, Plain(&address), sizeof(address)) == 0 && accept(files[5], nullptr, nullptr) >= 0);
  itimerspec left = {};
  MUST(timerfd_gettime(files[6], &left) == 0 && left.it_value.tv_sec > 3000 && left.it_value.tv_sec <= 3600);
}

// --- Owners, pipes and half-closed connections

// Who gets the signals of a descriptor, and which.
std::string OwnerOf(int fd) {
  f_owner_ex owner = {};
  MUST(fcntl(fd, F_GETOWN_EX, &owner) == 0);
  const int flags = fcntl(fd, F_GETFL), signal = fcntl(fd, F_GETSIG);
  return std::to_string(owner.type) + " " + std::to_string(owner.pid) + " " + std::to_string(signal) + " " +
         std::to_string(flags & (O_ASYNC | O_NONBLOCK));
}

void Owners() {
  const f_owner_ex owners[] = {
      {F_OWNER_PID, 0}, {F_OWNER_PID, getpid()}, {F_OWNER_TID, pid_t(syscall(SYS_gettid))}, {F_OWNER_PGRP, getpgrp()}};
  std::vector<int> all;
  for (const int number : {SIGIO, SIGUSR1, SIGRTMIN + 1}) signal(number, SIG_IGN);
  for (const f_owner_ex& owner : owners) {
    for (const int signal : {0, SIGUSR1, SIGRTMIN + 1}) {
      for (const int flags : {0, O_ASYNC, O_NONBLOCK, O_ASYNC | O_NONBLOCK}) {
        int ends[2];
        MUST(pipe(ends) == 0);
        const Pair pair(SOCK_DGRAM);
        for (const int fd :
             {ends[0], ends[1], pair.near, socket(AF_INET, SOCK_DGRAM, 0), socket(AF_INET, SOCK_STREAM, 0)}) {
          if (owner.pid != 0) MUST(fcntl(fd, F_SETOWN_EX, &owner) == 0);
          MUST(fcntl(fd, F_SETSIG, signal) == 0 && fcntl(fd, F_SETFL, flags) == 0);
          all.push_back(fd);
        }
      }
    }
  }
  std::vector<std::string> before;
  before.reserve(all.size());
  for (const int fd : all) before.push_back(OwnerOf(fd));
  Pause();
  for (size_t i = 0; i < all.size(); ++i) {
    if (OwnerOf(all[i]) != before[i])
      Fail(__LINE__, "descriptor " + std::to_string(i) + ": " + before[i] + " -> " + OwnerOf(all[i]));
  }
}

void Pipes() {
  struct One {
    int from, to, size;
    std::string text;
  };
  std::vector<One> all;
  for (const bool named : {false, true}) {
    for (const int size : {4096, 65536, 1 << 20}) {
      for (const size_t bytes : {size_t{0}, size_t{1}, size_t(size) / 2, size_t(size)}) {
        int ends[2];
        if (named) {
          const std::string path = g_folder + "/fifo" + std::to_string(all.size());
          MUST(mkfifo(path.c_str(), 0600) == 0);
          ends[0] = open(path.c_str(), O_RDONLY | O_NONBLOCK);
          ends[1] = open(path.c_str(), O_WRONLY);
          MUST(ends[0] >= 0 && ends[1] >= 0);
        } else {
          MUST(pipe2(ends, O_NONBLOCK) == 0);
        }
        MUST(fcntl(ends[0], F_SETPIPE_SZ, size) == size);
        std::string text(bytes, '\0');
        for (size_t i = 0; i < bytes; ++i) text[i] = char(i * 7 + i / 251);
        MUST(write(ends[1], text.data(), bytes) == ssize_t(bytes));
        all.push_back({ends[0], ends[1], size, text});
      }
    }
  }
  // Nobody reads it any more, and nobody writes.
  int unread[2], ended[2];
  MUST(pipe(unread) == 0 && pipe(ended) == 0 && write(ended[1], "last", 4) == 4);
  close(unread[0]);
  close(ended[1]);
  Pause();
  std::string text(1 << 20, '\0');
  for (const One& one : all) {
    MUST(fcntl(one.from, F_GETPIPE_SZ) == one.size && fcntl(one.to, F_GETPIPE_SZ) == one.size);
    for (size_t at = 0; at < one.text.size();) {
      const ssize_t got = read(one.from, text.data() + at, text.size() - at);
      MUST(got > 0);
      at += size_t(got);
    }
    MUST(text.compare(0, one.text.size(), one.text) == 0);
    MUST(read(one.from, text.data(), 1) == -1 && errno == EAGAIN && write(one.to, "x", 1) == 1);
  }
  signal(SIGPIPE, SIG_IGN);
  MUST(write(unread[1], "x", 1) == -1 && errno == EPIPE);
  MUST(read(ended[0], text.data(), 9) == 4 && read(ended[0], text.data(), 9) == 0);
}

// What can be read of a socket, to its end or until there is nothing more.
std::string Drain(int socket) {
  std::string all;
  char text[4096];
  for (ssize_t got; (got = recv(socket, text, sizeof(text), MSG_DONTWAIT)) != -1;) {
    if (got == 0) return all + "(end)";
    all.append(text, size_t(got));
  }
  return all + (errno == EAGAIN ? "" : "(" + std::string(strerror(errno)) + ")");
}

std::string Sends(int socket) { return send(socket, "x", 1, MSG_NOSIGNAL | MSG_DONTWAIT) == 1 ? "sends" : "fails"; }

void HalfClosed() {
  signal(SIGPIPE, SIG_IGN);
  struct One {
    std::string name;
    int near, far;
  };
  const auto make = [] {
    std::vector<One> all;
    for (const int near : {-1, int(SHUT_RD), int(SHUT_WR), int(SHUT_RDWR)}) {
      for (const int far : {-1, int(SHUT_RD), int(SHUT_WR), int(SHUT_RDWR)}) {
        const Tcp tcp;
        const Pair stream(SOCK_STREAM), packets(SOCK_SEQPACKET), datagrams(SOCK_DGRAM);
        const One kinds[] = {{"TCP", tcp.near, tcp.far},
                             {"stream", stream.near, stream.far},
                             {"packets", packets.near, packets.far},
                             {"datagrams", datagrams.near, datagrams.far}};
        close(tcp.listener);
        for (const One& one : kinds) {
          MUST(send(one.near, "to far", 6, 0) == 6 && send(one.far, "to near", 7, 0) == 7);
          if (near >= 0) MUST(shutdown(one.near, near) == 0);
          // What TCP's other end has closed already is not connected any more.
          if (far >= 0) MUST(shutdown(one.far, far) == 0 || errno == ENOTCONN);
          all.push_back({one.name + " " + std::to_string(near) + " " + std::to_string(far), one.near, one.far});
        }
      }
    }
    return all;
  };
  const auto look = [](const One& one) {
    std::string text = Drain(one.near) + " " + Drain(one.far);
    text += " " + Sends(one.near) + " " + Sends(one.far);
    return text;
  };
  const std::vector<One> all = make(), same = make();
  std::vector<std::string> expected;
  expected.reserve(same.size());
  for (const One& one : same) expected.push_back(look(one));
  Pause();
  std::string lost;
  for (size_t i = 0; i < all.size(); ++i) {
    if (const std::string now = look(all[i]); now != expected[i])
      lost += all[i].name + ": " + expected[i] + " -> " + now + "\n";
  }
  if (!lost.empty()) Fail(__LINE__, lost);
}

// So many that the first ends are restored long before their other ends are.
void ManyHalfClosed() {
  constexpr int kMany = 3000;
  const rlimit files = {3 * kMany, 3 * kMany};
  MUST(setrlimit(RLIMIT_NOFILE, &files) == 0);
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  const sockaddr_in address = Bound(listener);
  MUST(listen(listener, 64) == 0);
  std::vector<int> near(kMany), far(kMany);
  for (int i = 0; i < kMany; ++i) {
    near[i] = socket(AF_INET, SOCK_STREAM, 0);
    MUST(connect(near[i], Plain(&address), sizeof(address)) == 0);
    const int end = accept(listener, nullptr, nullptr);
    far[i] = fcntl(end, F_DUPFD, 2 * kMany);
    MUST(far[i] >= 0 && close(end) == 0 && shutdown(far[i], SHUT_WR) == 0);
  }
  close(listener);
  // What this one has to send waits for room at its other end.
  constexpr int kFull = 1;
  const std::string block(1 << 16, 'y');
  std::string sent;
  for (ssize_t bytes; (bytes = send(near[kFull], block.data(), block.size(), MSG_DONTWAIT)) > 0;)
    sent.append(size_t(bytes), 'y');
  Pause();
  for (int i = 0; i < kMany; ++i) {
    MUST(Drain(near[i]) == "(end)" && (i == kFull || Sends(near[i]) == "sends"));
    // What protected it while it was restored is gone.
    socklen_t instructions = 0;
    MUST(getsockopt(near[i], SOL_SOCKET, SO_GET_FILTER, nullptr, &instructions) == 0 && instructions == 0);
  }
  for (int i = 0; i < kMany; ++i) {
    std::string text(i == kFull ? sent.size() : 1, '?');
    MUST(recv(far[i], &text[0], text.size(), MSG_WAITALL) == ssize_t(text.size()) && text == (i == kFull ? sent : "x"));
  }
  // A connection that its other end gives up is reset, as ever.
  const linger at_once = {1, 0};
  MUST(setsockopt(far[0], SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once)) == 0 && close(far[0]) == 0);
  MUST(send(near[0], "x", 1, MSG_NOSIGNAL) == -1);
}

// Offsets for looking at queues, and how many connections may wait to be accepted.
void Places() {
  const Pair stream(SOCK_STREAM), datagrams(SOCK_DGRAM);
  Send(stream.far, "0123456789");
  for (const char* const text : {"one", "two", "three"}) Send(datagrams.far, text);
  const int offset = 4;
  for (const int socket : {stream.near, datagrams.near})
    MUST(setsockopt(socket, SOL_SOCKET, SO_PEEK_OFF, &offset, sizeof(offset)) == 0);
  std::vector<int> listeners;
  const auto backlog = [](int socket) {
    tcp_info facts = {};
    socklen_t bytes = sizeof(facts);
    MUST(getsockopt(socket, IPPROTO_TCP, TCP_INFO, &facts, &bytes) == 0);
    return facts.tcpi_sacked;
  };
  for (const unsigned most : {0u, 1u, 5u, 128u}) {
    listeners.push_back(socket(AF_INET, SOCK_STREAM, 0));
    Bound(listeners.back());
    MUST(listen(listeners.back(), int(most)) == 0 && backlog(listeners.back()) == most);
  }
  Pause();
  char text[16] = "";
  MUST(recv(stream.near, text, 3, MSG_PEEK) == 3 && strcmp(text, "456") == 0);
  MUST(recv(datagrams.near, text, 16, MSG_PEEK) == 2 && memcmp(text, "wo", 2) == 0);
  MUST(recv(datagrams.near, text, 16, 0) == 3 && memcmp(text, "one", 3) == 0);
  MUST(backlog(listeners[0]) == 0 && backlog(listeners[1]) == 1 && backlog(listeners[2]) == 5 &&
       backlog(listeners[3]) == 128);
}

// --- What is refused

void LeaveTimerInQueue() {
  const Pair pair(SOCK_STREAM);
  const int timer = timerfd_create(CLOCK_MONOTONIC, 0);
  Send(pair.far, "t", timer);
  close(timer);
  Pause();
  int file = -1;
  MUST(Receive(pair.near, &file) == "t");
}

// A socket that is nowhere else, and whose other end is closed.
void LeaveClosedInQueue() {
  const Pair pair(SOCK_STREAM), inner(SOCK_STREAM);
  Send(inner.far, "m");
  Send(pair.far, "s", inner.near);
  close(inner.near);
  close(inner.far);
  Pause();
  int file = -1;
  MUST(Receive(pair.near, &file) == "s" && Receive(file) == "m");
}

void LeaveUnconnectedInQueue() {
  const Pair pair(SOCK_STREAM);
  const int one = socket(AF_UNIX, SOCK_DGRAM, 0);
  Send(pair.far, "s", one);
  close(one);
  Pause();
  int file = -1;
  MUST(Receive(pair.near, &file) == "s");
}

void LeaveUrgentByte() {
  const Tcp tcp;
  MUST(send(tcp.near, "abc", 3, 0) == 3 && send(tcp.near, "!", 1, MSG_OOB) == 1);
  Pause();
  char byte = 0;
  MUST(recv(tcp.far, &byte, 1, MSG_OOB) == 1 && byte == '!');
}

void LeaveDataBehindUrgentByte() {
  const Tcp tcp;
  MUST(send(tcp.near, "abc", 3, 0) == 3 && send(tcp.near, "!", 1, MSG_OOB) == 1 && send(tcp.near, "def", 3, 0) == 3);
  char text[4] = "";
  MUST(recv(tcp.far, text, 1, MSG_OOB) == 1);
  Pause();
  MUST(recv(tcp.far, text, 3, 0) == 3 && strcmp(text, "abc") == 0);
  MUST(recv(tcp.far, text, 3, MSG_WAITALL) == 3 && strcmp(text, "def") == 0);
}

void LeaveUnixUrgentByte() {
  const Pair pair(SOCK_STREAM);
  MUST(send(pair.far, "!", 1, MSG_OOB) == 1);
  Pause();
  char byte = 0;
  MUST(recv(pair.near, &byte, 1, MSG_OOB) == 1 && byte == '!');
}

// An end of a new pseudo-terminal for each side.
void LeaveTerminalData(bool typed) {
  const int window = posix_openpt(O_RDWR | O_NOCTTY);
  MUST(window >= 0 && grantpt(window) == 0 && unlockpt(window) == 0);
  const int program = open(ptsname(window), O_RDWR | O_NOCTTY);
  MUST(program >= 0 && write(typed ? window : program, "line\n", 5) == 5);
  int bytes = 0;
  for (int i = 0; i < 1000 && bytes == 0; ++i) {
    MUST(ioctl(typed ? program : window, FIONREAD, &bytes) == 0);
    usleep(1000);
  }
  Pause();
  char text[16] = "";
  // "\r\n" where the terminal shows it.
  MUST(read(typed ? program : window, text, sizeof(text) - 1) == (typed ? 5 : 6) && strncmp(text, "line", 4) == 0);
}

// With nothing that changes what goes through it.
void RawTerminal() {
  const int window = posix_openpt(O_RDWR | O_NOCTTY);
  MUST(window >= 0 && grantpt(window) == 0 && unlockpt(window) == 0);
  const int program = open(ptsname(window), O_RDWR | O_NOCTTY);
  termios settings;
  MUST(program >= 0 && tcgetattr(program, &settings) == 0);
  cfmakeraw(&settings);
  MUST(tcsetattr(program, TCSANOW, &settings) == 0);
  MUST(write(window, "typed\n\x03", 7) == 7 && write(program, "shown\r\n\n", 8) == 8);
  Pause();
  char text[16] = "";
  MUST(read(program, text, sizeof(text)) == 7 && memcmp(text, "typed\n\x03", 7) == 0);
  MUST(read(window, text, sizeof(text)) == 8 && memcmp(text, "shown\r\n\n", 8) == 0);
}

void LeavePackets() {
  int ends[2];
  MUST(pipe2(ends, O_DIRECT) == 0);
  Pause();
}

void LeaveNetlinkAnswer() {
  const int netlink = socket(AF_NETLINK, SOCK_RAW, 0 /* NETLINK_ROUTE */);
  struct {
    uint32_t length = 20;
    uint16_t type = 18 /* RTM_GETLINK */, flags = 0x301;
    uint32_t number = 0, port = 0;
    uint8_t family = 0, unused[3] = {};
  } question;
  MUST(send(netlink, &question, sizeof(question), 0) == ssize_t(sizeof(question)));
  Pause();
}

void LeaveCredentials() {
  const Pair pair(SOCK_STREAM);
  const int on = 1;
  MUST(setsockopt(pair.near, SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) == 0);
  Send(pair.far, "text");
  Pause();
}

void LeaveCork() {
  const int one = socket(AF_INET, SOCK_DGRAM, 0), on = 1;
  MUST(setsockopt(one, IPPROTO_UDP, 1 /* UDP_CORK */, &on, sizeof(on)) == 0);
  Pause();
}

sockaddr_un UnixName(const char* name = "listener") {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  snprintf(address.sun_path, sizeof(address.sun_path), "%s/%s", g_folder.c_str(), name);
  return address;
}

// One that nobody accepts meanwhile comes back, unless it has sent data or is closed.
void LeaveUnaccepted(bool sends, bool ends) {
  const sockaddr_un address = UnixName();
  const int listener = socket(AF_UNIX, SOCK_STREAM, 0), near = socket(AF_UNIX, SOCK_STREAM, 0);
  MUST(bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 && listen(listener, 4) == 0);
  MUST(connect(near, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  if (sends) Send(near, "early");
  if (ends) close(near);
  Pause();
  const int far = accept(listener, nullptr, nullptr);
  MUST(far >= 0);
  if (sends) MUST(Receive(far) == "early");
  if (ends) return;
  Send(near, "late");
  MUST(Receive(far) == "late");
}

void LeaveFailedConnect() {
  const int closed = socket(AF_INET, SOCK_STREAM, 0), near = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  const sockaddr_in address = Bound(closed);
  close(closed);
  MUST(connect(near, Plain(&address), sizeof(address)) == -1 && errno == EINPROGRESS);
  pollfd waiting = {near, POLLOUT, 0};
  MUST(poll(&waiting, 1, -1) == 1);
  Pause();
  int error = 0;
  socklen_t bytes = sizeof(error);
  MUST(getsockopt(near, SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 && error == ECONNREFUSED);
}

void LeaveOtherFamily() {
  if (socket(AF_VSOCK, SOCK_STREAM, 0) < 0 && socket(AF_ALG, SOCK_SEQPACKET, 0) < 0) Touch("none");
  Pause();
}

const std::map<std::string, void (*)()> kSubjects = {
    {"Options", Options},
    {"Memberships", Memberships},
    {"Addresses", Addresses},
    {"EmptyDatagrams", EmptyDatagrams},
    {"SocketsInQueues", SocketsInQueues},
    {"Owners", Owners},
    {"Pipes", Pipes},
    {"HalfClosed", HalfClosed},
    {"ManyHalfClosed", ManyHalfClosed},
    {"Places", Places},
    {"TimerInQueue", LeaveTimerInQueue},
    {"ClosedInQueue", LeaveClosedInQueue},
    {"UnconnectedInQueue", LeaveUnconnectedInQueue},
    {"UrgentByte", LeaveUrgentByte},
    {"BehindUrgentByte", LeaveDataBehindUrgentByte},
    {"UnixUrgentByte", LeaveUnixUrgentByte},
    {"TypedLine", [] { LeaveTerminalData(true); }},
    {"ShownLine", [] { LeaveTerminalData(false); }},
    {"RawTerminal", RawTerminal},
    {"Packets", LeavePackets},
    {"NetlinkAnswer", LeaveNetlinkAnswer},
    {"Credentials", LeaveCredentials},
    {"Cork", LeaveCork},
    {"FailedConnect", LeaveFailedConnect},
    {"OtherFamily", LeaveOtherFamily},
    {"Unaccepted", [] { LeaveUnaccepted(false, false); }},
    {"UnacceptedWithData", [] { LeaveUnaccepted(true, false); }},
    {"UnacceptedAndClosed", [] { LeaveUnaccepted(false, true); }},
};

class SocketsTest : public SavedTree {
 protected:
  void SetUp() override {
    SavedTree::SetUp();
    job_.set_directory(g_folder + "/job");
  }

  void Use(const Isolated& isolated) {
    isolated_ = isolated;
    job_.set_inner_pid(isolated.inner_pid);
    job_.set_init_pid(isolated.init);
    job_.set_pid(isolated.pid);
    job_.set_pid_namespace(PidNamespace(isolated.init));
  }

  void StartQuietly(const std::string& name) {
    const std::string self = ReadLink("/proc/self/exe");
    Plan plan;
    ASSERT_EQ(CriuEngine().PrepareStart(&plan), absl::OkStatus());
    // Its streams are nothing that a restart would have to give it again.
    plan.command = {
        "/bin/sh", "-c",
        "exec </dev/null >" + g_folder + "/out 2>&1; exec " + self + " " + kSubject + " " + name + " " + g_folder};
    plan.environment = {std::string("PATH=") + getenv("PATH")};
    int code;
    const absl::StatusOr<Isolated> isolated = StartIsolated(plan, &code);
    ASSERT_TRUE(isolated.ok()) << isolated.status().message();
    Use(*isolated);
    for (int i = 0; i < 1000 && !Exists(g_folder + "/ready") && !Exists(g_folder + "/failed"); ++i) usleep(10000);
    ASSERT_TRUE(Exists(g_folder + "/ready")) << Contents(g_folder + "/failed");
  }

  // What the dump says, after the look at the processes; or, if `look_only`, what that says.
  std::string SaveOrSay(bool stop, bool look_only = false) {
    const absl::Status looked = DescribeProcesses(job_, /*close_tcp=*/false, &facts_);
    if (!looked.ok() || look_only) return std::string(looked.message());
    PageReceiver pages(SavedBytes(job_));
    const absl::Status dumped =
        DumpProcesses(job_, facts_, g_folder + "/image", g_folder + "/job", stop, nullptr, &pages, &found_);
    return std::string((dumped.ok() ? pages.Finish() : dumped).message());
  }

  void Restore() override {
    CriuRestore restore(job_, facts_, g_folder + "/job", {}, {}, {}, -1,
                        [](const std::string& text) { ADD_FAILURE() << text; });
    ASSERT_EQ(restore.Begin(g_folder + "/image"), absl::OkStatus());
    ASSERT_EQ(restore.AwaitHeld(), absl::OkStatus());
    const absl::StatusOr<Isolated> isolated = restore.Finish();
    ASSERT_TRUE(isolated.ok()) << isolated.status().message();
    Use(*isolated);
  }

  void SaveAndRestore(const std::string& name) {
    ASSERT_NO_FATAL_FAILURE(StartQuietly(name));
    for (int i = 0; i < 2; ++i) {
      ASSERT_EQ(SaveOrSay(true), "");
      ASSERT_NO_FATAL_FAILURE(Kill());
      ASSERT_NO_FATAL_FAILURE(Restore());
      if (i == 0) EmptyImage();
    }
    Finish();
  }

  // A job that has this is refused, with these words, and goes on as if nothing had been.
  void IsRefused(const std::string& name, const std::string& words, bool look_only = true) {
    ASSERT_NO_FATAL_FAILURE(StartQuietly(name));
    none_ = Exists(g_folder + "/none");
    if (!none_) {
      const std::string said = SaveOrSay(true, look_only);
      EXPECT_NE(said.find("(PID " + std::to_string(job_.pid()) + ") has " + words), std::string::npos) << said;
      EXPECT_NE(said.find("which cannot be saved; "), std::string::npos) << said;
    }
    Finish();
  }

  bool none_ = false;  // the kernel has no such thing
};

TEST_F(SocketsTest, Options) { SaveAndRestore("Options"); }
TEST_F(SocketsTest, Memberships) { SaveAndRestore("Memberships"); }
TEST_F(SocketsTest, Addresses) { SaveAndRestore("Addresses"); }
TEST_F(SocketsTest, EmptyDatagrams) { SaveAndRestore("EmptyDatagrams"); }
TEST_F(SocketsTest, SocketsInQueues) { SaveAndRestore("SocketsInQueues"); }
TEST_F(SocketsTest, Owners) { SaveAndRestore("Owners"); }
TEST_F(SocketsTest, Pipes) { SaveAndRestore("Pipes"); }
TEST_F(SocketsTest, HalfClosed) { SaveAndRestore("HalfClosed"); }
TEST_F(SocketsTest, ManyHalfClosed) { SaveAndRestore("ManyHalfClosed"); }
TEST_F(SocketsTest, Places) { SaveAndRestore("Places"); }
TEST_F(SocketsTest, RawTerminal) { SaveAndRestore("RawTerminal"); }

// Only what stands still shows all of a queue.
TEST_F(SocketsTest, TimerInAQueueIsRefused) {
  IsRefused("TimerInQueue", "a Unix socket in whose queue is a timerfd", /*look_only=*/false);
}
TEST_F(SocketsTest, ClosedSocketInAQueueIsRefused) {
  IsRefused("ClosedInQueue", "a Unix socket in whose queue is a socket whose other end is closed",
            /*look_only=*/false);
}
TEST_F(SocketsTest, UnconnectedSocketInAQueueIsRefused) {
  IsRefused("UnconnectedInQueue", "a Unix socket in whose queue is a datagram socket", /*look_only=*/false);
}
TEST_F(SocketsTest, UrgentByteIsRefused) {
  IsRefused("UrgentByte", "a connection with an urgent byte (MSG_OOB) that nobody has read");
}
TEST_F(SocketsTest, DataBehindAnUrgentByteIsRefused) {
  IsRefused("BehindUrgentByte", "a TCP connection with unread data at or behind the place of an urgent byte");
}
TEST_F(SocketsTest, UrgentByteOfAUnixSocketIsRefused) {
  IsRefused("UnixUrgentByte", "a connection with an urgent byte (MSG_OOB) that nobody has read");
}
TEST_F(SocketsTest, TypedLineIsRefused) { IsRefused("TypedLine", "a pseudo-terminal with unread data"); }
TEST_F(SocketsTest, ShownLineIsRefused) { IsRefused("ShownLine", "a pseudo-terminal with unread data"); }
TEST_F(SocketsTest, PacketPipeIsRefused) { IsRefused("Packets", "a pipe with O_DIRECT"); }
TEST_F(SocketsTest, NetlinkAnswerIsRefused) { IsRefused("NetlinkAnswer", "a netlink socket with unread data"); }
TEST_F(SocketsTest, CredentialsAreRefused) { IsRefused("Credentials", "a Unix socket with SO_PASSCRED"); }
TEST_F(SocketsTest, CorkIsRefused) { IsRefused("Cork", "a UDP socket with UDP_CORK"); }
TEST_F(SocketsTest, FailedConnectIsRefused) { IsRefused("FailedConnect", "a TCP socket whose connect() has failed"); }
TEST_F(SocketsTest, OtherFamilyIsRefused) {
  IsRefused("OtherFamily", "a socket ");
  if (none_) GTEST_SKIP() << "this kernel, or this container, has neither AF_VSOCK nor AF_ALG";
}
TEST_F(SocketsTest, ConnectionsThatAreNotAccepted) { SaveAndRestore("Unaccepted"); }
// CRIU refuses these itself, and does not name the process.
TEST_F(SocketsTest, ConnectionThatIsNotAcceptedAndHasDataIsRefused) {
  IsRefused("UnacceptedWithData", "sent data through a Unix socket", /*look_only=*/false);
}
TEST_F(SocketsTest, ConnectionThatIsNotAcceptedAndClosedIsRefused) {
  IsRefused("UnacceptedAndClosed", "a Unix socket with a connection that it has not accepted", /*look_only=*/false);
}

// What the job's processes left meanwhile is in no image: CRIU would take it out of a terminal's queue, and write it
// back changed.
TEST_F(SocketsTest, TerminalIsNotTouched) {
  ASSERT_NO_FATAL_FAILURE(StartQuietly("ShownLine"));
  // As if the line had come after the look.
  ASSERT_NE(SaveOrSay(true, /*look_only=*/true), "");
  PageReceiver pages(SavedBytes(job_));
  facts_.clear_stdio();
  const absl::Status dumped =
      DumpProcesses(job_, facts_, g_folder + "/image", g_folder + "/job", true, nullptr, &pages, &found_);
  EXPECT_NE(dumped.message().find(") has a pseudo-terminal with unread data"), std::string::npos) << dumped.message();
  EXPECT_TRUE(found_.failure_passes);
  Finish();
}

TEST(SocketFacts, AnyInputIsSafe) {
  std::map<uint64_t, std::vector<NotedFact>> facts;
  EXPECT_TRUE(ParseSocketFacts("", &facts));
  SocketFact fact = {7, SocketFact::kOption, 1, 2, 4};
  std::string file(reinterpret_cast<const char*>(&fact), sizeof(fact));
  EXPECT_FALSE(ParseSocketFacts(file, &facts));
  EXPECT_TRUE(ParseSocketFacts(file + "abcd", &facts));
  EXPECT_EQ(facts.at(7).back().value, "abcd");
  for (size_t bytes = 1; bytes < sizeof(fact); ++bytes) EXPECT_FALSE(ParseSocketFacts(file.substr(0, bytes), &facts));
}

// A number below 128, as CRIU's files have one.
std::string Number(int field, int number) { return {char(field << 3), char(number)}; }
std::string Framed(const std::string& entry) {
  const auto bytes = uint32_t(entry.size());
  return std::string(reinterpret_cast<const char*>(&bytes), sizeof(bytes)) + entry;
}
std::string Begin(uint32_t kind) {
  const uint32_t magic[2] = {0x54564319, kind};
  return std::string(reinterpret_cast<const char*>(magic), sizeof(magic));
}

TEST(CriuImages, MessagesOfQueues) {
  const std::string rights = std::string("\x22\x06", 2) + Number(1, 1) + Number(2, 30) + Number(2, 31);
  const std::string begin = Begin(0x56264026), first = Framed(Number(1, 5) + Number(2, 3) + rights) + "one",
                    second = Framed(Number(1, 6) + Number(2, 4)), third = Framed(Number(1, 6) + Number(2, 3)) + "two";
  std::string image = begin + first + second + "mark" + third;
  std::vector<std::pair<uint32_t, std::vector<uint64_t>>> messages;
  const auto add = [&](uint32_t socket, const std::vector<uint64_t>& files) { messages.emplace_back(socket, files); };
  ASSERT_TRUE(ReadMessages(image, add));
  const std::vector<std::pair<uint32_t, std::vector<uint64_t>>> expected = {{5, {30, 31}}, {6, {}}, {6, {}}};
  EXPECT_EQ(messages, expected);
  ASSERT_TRUE(EmptyMessages(&image, "mark"));
  EXPECT_EQ(image, begin + first + Framed(Number(1, 6) + Number(2, 0)) + third);
  ASSERT_TRUE(EmptyMessages(&image, "mark"));
  for (size_t bytes = 0; bytes < image.size(); ++bytes) {
    std::string part = image.substr(0, bytes);
    const bool read = EmptyMessages(&part, "mark");
    EXPECT_TRUE(read || part == image.substr(0, bytes));
    ReadMessages(part, add);
  }
}

TEST(CriuImages, DescriptorsOfProcesses) {
  const std::string entry = Number(1, 30) + Number(2, 1) + Number(3, 5) + Number(4, 7);
  std::map<int, uint32_t> files;
  ASSERT_TRUE(ReadDescriptors(Begin(0x56213732) + Framed(entry), &files));
  EXPECT_EQ(files, (std::map<int, uint32_t>{{7, 30}}));
  uint32_t table = 0;
  ASSERT_TRUE(ReadDescriptorTable(Begin(0x54432030) + Framed(Number(1, 1) + Number(2, 9)), &table));
  EXPECT_EQ(table, 9u);
  EXPECT_FALSE(ReadDescriptorTable(Begin(0x54432030), &table));
  EXPECT_FALSE(ReadDescriptors(Begin(0x54432030) + Framed(entry), &files));
}

}  // namespace
}  // namespace cuda_remote::checkpoint

int main(int argc, char** argv) {
  return cuda_remote::checkpoint::RunTestsOrSubject(argc, argv, cuda_remote::checkpoint::kSubjects);
}
