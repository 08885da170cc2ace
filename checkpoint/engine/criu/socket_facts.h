// SPDX-License-Identifier: Apache-2.0
// What the library in CRIU notes of sockets and terminals while a job is saved, and CRIU does not: socket options, and
// memberships of multicast groups. The notes are a file in the image. And what it does to a connection while the job is
// restored. Constants only: the library has nothing but the C library.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_SOCKET_FACTS_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_SOCKET_FACTS_H_

#include <linux/filter.h>

#include <cstddef>
#include <cstdint>

namespace cuda_remote::checkpoint {

// The environment variable with CRIU's descriptor of the image's folder.
inline constexpr char kSocketFactsVariable[] = "CUDA_REMOTE_SOCKET_FACTS";
// The file in it: facts, each with its value behind it.
inline constexpr char kSocketFactsName[] = "socket-facts";

struct SocketFact {
  enum Kind : uint32_t {
    kOption = 1,      // value: as getsockopt has it
    kMembership = 2,  // value: a name of kInterfaceBytes, and a group_filter
    kAddress = 4,     // of a raw socket; value: a sockaddr. Option 0: its own, 1: the other end's
    kLoss = 3,        // value: a text. The state of the socket or terminal would be lost, so there is no image.
  };
  uint64_t inode;  // the socket's
  uint32_t kind;
  int32_t level, option;
  uint32_t bytes;  // of the value
};
static_assert(sizeof(SocketFact) == 24, "it is in images");

inline constexpr size_t kInterfaceBytes = 16;  // IFNAMSIZ
inline constexpr size_t kMostSources = 64;     // of a membership; more than the kernel allows by default

struct SocketOption {
  int level, option;
  uint32_t bytes;  // at most
  const char* name;
};

// Drops what would end a TCP connection at once (RST). A socket that CRIU restores has it until all are there: what the
// kernel sends for it, or CRIU in its name, may come to where the other end is not yet.
inline constexpr sock_filter kNoReset[] = {
    BPF_STMT(BPF_LD | BPF_B | BPF_ABS, 13),            // the flags in TCP's header, where the packet begins
    BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, 0x04, 0, 1),  // RST
    BPF_STMT(BPF_RET | BPF_K, 0),
    BPF_STMT(BPF_RET | BPF_K, 0xffffffff),
};

// Levels of options.
inline constexpr int kLevelIp = 0, kLevelSocket = 1, kLevelTcp = 6, kLevelUdp = 17, kLevelIpv6 = 41,
                     kLevelUdpLite = 136, kLevelNetlink = 270;
// Of a connected socket this is not what the program has set, which is this at most.
inline constexpr int kTcpMaxSeg = 2, kMostMaxSeg = 32767;
// Sockets of streams have it, and do not let it be set.
inline constexpr int kIpMulticastTtl = 33;
// An old value of this is one that cannot be set: -1 stands for it.
inline constexpr int kTxRehash = 74;

// All options whose value can be read and set again, by Linux's numbers, which are the same on all machines with these
// instruction sets. In the order in which they are set: some change others that come later.
inline constexpr SocketOption kSocketOptions[] = {
    {kLevelIp, 1, 4, "IP_TOS"},
    {kLevelIp, 2, 4, "IP_TTL"},
    {kLevelIp, 3, 4, "IP_HDRINCL"},
    {kLevelIp, 4, 40, "IP_OPTIONS"},
    {kLevelIp, 6, 4, "IP_RECVOPTS"},
    {kLevelIp, 7, 4, "IP_RETOPTS"},
    {kLevelIp, 8, 4, "IP_PKTINFO"},
    {kLevelIp, 10, 4, "IP_MTU_DISCOVER"},
    {kLevelIp, 11, 4, "IP_RECVERR"},
    {kLevelIp, 12, 4, "IP_RECVTTL"},
    {kLevelIp, 13, 4, "IP_RECVTOS"},
    {kLevelIp, 15, 4, "IP_FREEBIND"},
    {kLevelIp, 18, 4, "IP_PASSSEC"},
    {kLevelIp, 19, 4, "IP_TRANSPARENT"},
    {kLevelIp, 20, 4, "IP_RECVORIGDSTADDR"},
    {kLevelIp, 21, 4, "IP_MINTTL"},
    {kLevelIp, 22, 4, "IP_NODEFRAG"},
    {kLevelIp, 23, 4, "IP_CHECKSUM"},
    {kLevelIp, 24, 4, "IP_BIND_ADDRESS_NO_PORT"},
    {kLevelIp, 25, 4, "IP_RECVFRAGSIZE"},
    {kLevelIp, 26, 4, "IP_RECVERR_RFC4884"},
    {kLevelIp, 32, 4, "IP_MULTICAST_IF"},
    {kLevelIp, kIpMulticastTtl, 4, "IP_MULTICAST_TTL"},
    {kLevelIp, 34, 4, "IP_MULTICAST_LOOP"},
    {kLevelIp, 49, 4, "IP_MULTICAST_ALL"},
    {kLevelIp, 50, 4, "IP_UNICAST_IF"},
    {kLevelIp, 51, 4, "IP_LOCAL_PORT_RANGE"},
    {kLevelIpv6, 2, 4, "IPV6_2292PKTINFO"},
    {kLevelIpv6, 3, 4, "IPV6_2292HOPOPTS"},
    {kLevelIpv6, 4, 4, "IPV6_2292DSTOPTS"},
    {kLevelIpv6, 5, 4, "IPV6_2292RTHDR"},
    {kLevelIpv6, 7, 4, "IPV6_CHECKSUM"},
    {kLevelIpv6, 8, 4, "IPV6_2292HOPLIMIT"},
    {kLevelIpv6, 11, 4, "IPV6_FLOWINFO"},
    {kLevelIpv6, 16, 4, "IPV6_UNICAST_HOPS"},
    {kLevelIpv6, 17, 4, "IPV6_MULTICAST_IF"},
    {kLevelIpv6, 18, 4, "IPV6_MULTICAST_HOPS"},
    {kLevelIpv6, 19, 4, "IPV6_MULTICAST_LOOP"},
    {kLevelIpv6, 23, 4, "IPV6_MTU_DISCOVER"},
    {kLevelIpv6, 25, 4, "IPV6_RECVERR"},
    {kLevelIpv6, 29, 4, "IPV6_MULTICAST_ALL"},
    {kLevelIpv6, 31, 4, "IPV6_RECVERR_RFC4884"},
    {kLevelIpv6, 33, 4, "IPV6_FLOWINFO_SEND"},
    {kLevelIpv6, 36, 4, "IPV6_HDRINCL"},
    {kLevelIpv6, 49, 4, "IPV6_RECVPKTINFO"},
    {kLevelIpv6, 51, 4, "IPV6_RECVHOPLIMIT"},
    {kLevelIpv6, 53, 4, "IPV6_RECVHOPOPTS"},
    {kLevelIpv6, 54, 2048, "IPV6_HOPOPTS"},
    {kLevelIpv6, 55, 2048, "IPV6_RTHDRDSTOPTS"},
    {kLevelIpv6, 56, 4, "IPV6_RECVRTHDR"},
    {kLevelIpv6, 57, 2048, "IPV6_RTHDR"},
    {kLevelIpv6, 58, 4, "IPV6_RECVDSTOPTS"},
    {kLevelIpv6, 59, 2048, "IPV6_DSTOPTS"},
    {kLevelIpv6, 60, 4, "IPV6_RECVPATHMTU"},
    {kLevelIpv6, 62, 4, "IPV6_DONTFRAG"},
    {kLevelIpv6, 66, 4, "IPV6_RECVTCLASS"},
    {kLevelIpv6, 67, 4, "IPV6_TCLASS"},
    {kLevelIpv6, 70, 4, "IPV6_AUTOFLOWLABEL"},
    {kLevelIpv6, 72, 4, "IPV6_ADDR_PREFERENCES"},
    {kLevelIpv6, 73, 4, "IPV6_MINHOPCOUNT"},
    {kLevelIpv6, 74, 4, "IPV6_RECVORIGDSTADDR"},
    {kLevelIpv6, 75, 4, "IPV6_TRANSPARENT"},
    {kLevelIpv6, 76, 4, "IPV6_UNICAST_IF"},
    {kLevelIpv6, 77, 4, "IPV6_RECVFRAGSIZE"},
    {kLevelIpv6, 78, 4, "IPV6_FREEBIND"},
    {kLevelTcp, 1, 4, "TCP_NODELAY"},
    {kLevelTcp, kTcpMaxSeg, 4, "TCP_MAXSEG"},
    {kLevelTcp, 3, 4, "TCP_CORK"},
    {kLevelTcp, 4, 4, "TCP_KEEPIDLE"},
    {kLevelTcp, 5, 4, "TCP_KEEPINTVL"},
    {kLevelTcp, 6, 4, "TCP_KEEPCNT"},
    {kLevelTcp, 7, 4, "TCP_SYNCNT"},
    {kLevelTcp, 8, 4, "TCP_LINGER2"},
    {kLevelTcp, 9, 4, "TCP_DEFER_ACCEPT"},
    {kLevelTcp, 10, 4, "TCP_WINDOW_CLAMP"},
    {kLevelTcp, 13, 16, "TCP_CONGESTION"},
    {kLevelTcp, 16, 4, "TCP_THIN_LINEAR_TIMEOUTS"},
    {kLevelTcp, 18, 4, "TCP_USER_TIMEOUT"},
    {kLevelTcp, 23, 4, "TCP_FASTOPEN"},
    {kLevelTcp, 25, 4, "TCP_NOTSENT_LOWAT"},
    {kLevelTcp, 27, 4, "TCP_SAVE_SYN"},
    {kLevelTcp, 30, 4, "TCP_FASTOPEN_CONNECT"},
    {kLevelTcp, 34, 4, "TCP_FASTOPEN_NO_COOKIE"},
    {kLevelTcp, 36, 4, "TCP_INQ"},
    {kLevelTcp, 37, 4, "TCP_TX_DELAY"},
    {kLevelTcp, 44, 4, "TCP_RTO_MAX_MS"},
    {kLevelTcp, 45, 4, "TCP_RTO_MIN_US"},
    {kLevelTcp, 46, 4, "TCP_DELACK_MAX_US"},
    {kLevelUdp, 100, 4, "UDP_ENCAP"},
    {kLevelUdp, 101, 4, "UDP_NO_CHECK6_TX"},
    {kLevelUdp, 102, 4, "UDP_NO_CHECK6_RX"},
    {kLevelUdp, 103, 4, "UDP_SEGMENT"},
    {kLevelUdp, 104, 4, "UDP_GRO"},
    {kLevelUdpLite, 10, 4, "UDPLITE_SEND_CSCOV"},
    {kLevelUdpLite, 11, 4, "UDPLITE_RECV_CSCOV"},
    {kLevelNetlink, 3, 4, "NETLINK_PKTINFO"},
    {kLevelNetlink, 4, 4, "NETLINK_BROADCAST_ERROR"},
    {kLevelNetlink, 5, 4, "NETLINK_NO_ENOBUFS"},
    {kLevelNetlink, 8, 4, "NETLINK_LISTEN_ALL_NSID"},
    {kLevelNetlink, 10, 4, "NETLINK_CAP_ACK"},
    {kLevelNetlink, 11, 4, "NETLINK_EXT_ACK"},
    {kLevelNetlink, 12, 4, "NETLINK_GET_STRICT_CHK"},
    {kLevelSocket, 1, 4, "SO_DEBUG"},
    {kLevelSocket, 2, 4, "SO_REUSEADDR"},
    {kLevelSocket, 5, 4, "SO_DONTROUTE"},
    {kLevelSocket, 6, 4, "SO_BROADCAST"},
    {kLevelSocket, 9, 4, "SO_KEEPALIVE"},
    {kLevelSocket, 10, 4, "SO_OOBINLINE"},
    {kLevelSocket, 11, 4, "SO_NO_CHECK"},
    {kLevelSocket, 12, 4, "SO_PRIORITY"},
    {kLevelSocket, 15, 4, "SO_REUSEPORT"},
    {kLevelSocket, 16, 4, "SO_PASSCRED"},
    {kLevelSocket, 18, 4, "SO_RCVLOWAT"},
    {kLevelSocket, 29, 4, "SO_TIMESTAMP_OLD"},
    {kLevelSocket, 34, 4, "SO_PASSSEC"},
    {kLevelSocket, 35, 4, "SO_TIMESTAMPNS_OLD"},
    {kLevelSocket, 36, 4, "SO_MARK"},
    {kLevelSocket, 37, 8, "SO_TIMESTAMPING_OLD"},
    {kLevelSocket, 40, 4, "SO_RXQ_OVFL"},
    {kLevelSocket, 41, 4, "SO_WIFI_STATUS"},
    {kLevelSocket, 42, 4, "SO_PEEK_OFF"},
    {kLevelSocket, 43, 4, "SO_NOFCS"},
    {kLevelSocket, 45, 4, "SO_SELECT_ERR_QUEUE"},
    {kLevelSocket, 46, 4, "SO_BUSY_POLL"},
    {kLevelSocket, 47, 8, "SO_MAX_PACING_RATE"},
    {kLevelSocket, 49, 4, "SO_INCOMING_CPU"},
    {kLevelSocket, 60, 4, "SO_ZEROCOPY"},
    {kLevelSocket, 61, 8, "SO_TXTIME"},
    {kLevelSocket, 63, 4, "SO_TIMESTAMP_NEW"},
    {kLevelSocket, 64, 4, "SO_TIMESTAMPNS_NEW"},
    {kLevelSocket, 65, 8, "SO_TIMESTAMPING_NEW"},
    {kLevelSocket, 69, 4, "SO_PREFER_BUSY_POLL"},
    {kLevelSocket, 70, 4, "SO_BUSY_POLL_BUDGET"},
    {kLevelSocket, 72, 4, "SO_BUF_LOCK"},
    {kLevelSocket, 73, 4, "SO_RESERVE_MEM"},
    {kLevelSocket, kTxRehash, 4, "SO_TXREHASH"},
    {kLevelSocket, 75, 4, "SO_RCVMARK"},
    {kLevelSocket, 76, 4, "SO_PASSPIDFD"},
    {kLevelSocket, 82, 4, "SO_RCVPRIORITY"},
    {kLevelSocket, 83, 4, "SO_PASSRIGHTS"},
    {kLevelSocket, 44, 4, "SO_LOCK_FILTER"},
};

// What a datagram without contents is in CRIU's file until the dump is over: CRIU takes one for the end of a queue.
inline constexpr char kEmptyDatagram[] = "\x9d\x1c\x52\xe7 cuda-remote: empty \x07\xa8\x3b\xf1";
inline constexpr size_t kEmptyDatagramBytes = sizeof(kEmptyDatagram) - 1;

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_SOCKET_FACTS_H_
