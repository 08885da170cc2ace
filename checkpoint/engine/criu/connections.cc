// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/connections.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <set>
#include <sstream>

#include "checkpoint/engine/criu/criu_image.h"
#include "checkpoint/engine/criu/descriptors.h"
#include "proto/base/proc.h"

namespace cuda_remote::checkpoint {
namespace {

bool IsConnection(uint32_t state) {
  return state != TcpLine::kTimeWait && state != TcpLine::kClosed && state != TcpLine::kListens;
}

Endpoint FromWords(const std::vector<uint32_t>& words, uint16_t port) {
  Endpoint endpoint;
  endpoint.port = port;
  if (words.size() == 4) {
    std::copy(words.begin(), words.end(), endpoint.address.begin());
  } else if (words.size() == 1) {
    endpoint.address = {0, 0, htonl(0xffff), words[0]};
  }
  return endpoint;
}

// An address and a port as in /proc/net/tcp: "0100007F:1F90".
bool ParseEndpoint(const std::string& text, Endpoint* endpoint) {
  const size_t colon = text.find(':');
  if ((colon != 8 && colon != 32) || text.find_first_not_of("0123456789ABCDEFabcdef:") != std::string::npos)
    return false;
  std::vector<uint32_t> words;
  for (size_t at = 0; at < colon; at += 8) words.push_back(uint32_t(strtoul(text.substr(at, 8).c_str(), nullptr, 16)));
  *endpoint = FromWords(words, uint16_t(strtoul(text.c_str() + colon + 1, nullptr, 16)));
  return true;
}

// Calls `socket` with each descriptor of these processes that is a socket, and its inode.
void ForEachSocket(const std::vector<int>& pids, const std::function<void(int pid, int fd, uint64_t inode)>& socket) {
  for (int pid : pids) {
    const std::string folder = "/proc/" + std::to_string(pid) + "/fd/";
    for (const int number : cuda_remote::NumbersIn(pid, "fd")) {
      unsigned long long inode;
      const std::string target = ReadLink(folder + std::to_string(number));
      if (sscanf(target.c_str(), "socket:[%llu]", &inode) == 1) socket(pid, number, inode);
    }
  }
}

// Whether a process's socket may be one of TCP: the kernel names a socket's protocol, as lsof shows it.
bool MayBeTcp(int pid, int number) {
  char name[32] = "";
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(number);
  // With the zero at its end.
  const ssize_t bytes = getxattr(path.c_str(), "system.sockprotoname", name, sizeof(name) - 1);
  // Also "TCPv6", and "MPTCP", whose connections are in the tables of TCP, too.
  return bytes < 0 || strstr(name, "TCP") != nullptr;
}

// All that this process's network has.
std::map<uint64_t, Connection> ConnectionsSeenBy(int pid) {
  std::map<uint64_t, Connection> found;
  for (const char* table : {"tcp", "tcp6"}) {
    std::ifstream lines("/proc/" + std::to_string(pid) + "/net/" + table);
    found.merge(ParseProcTcp(lines));
  }
  return found;
}

// An integer in as many bytes as before: all but the last say that there are more.
void PutZero(size_t at, size_t bytes, std::string* image) {
  for (size_t i = 0; i < bytes; ++i) (*image)[at + i] = i + 1 < bytes ? '\x80' : '\0';
}

}  // namespace

std::string ToText(const Endpoint& endpoint) {
  char text[INET6_ADDRSTRLEN] = "?";
  const bool mapped = endpoint.address[0] == 0 && endpoint.address[1] == 0 && endpoint.address[2] == htonl(0xffff);
  if (mapped) {
    inet_ntop(AF_INET, &endpoint.address[3], text, sizeof(text));
  } else {
    inet_ntop(AF_INET6, endpoint.address.data(), text, sizeof(text));
  }
  return (mapped ? std::string(text) : "[" + std::string(text) + "]") + ":" + std::to_string(endpoint.port);
}

std::string ToText(const Connection& connection) {
  return ToText(connection.local) + " -> " + ToText(connection.remote);
}

bool ParseTcpLine(const std::string& line, TcpLine* facts) {
  // Number, the two ends, state, queues, timer, retransmissions, user, timeout, inode.
  std::istringstream fields(line);
  std::string number, local, remote, state, queues, word;
  fields >> number >> local >> remote >> state >> queues;
  for (int i = 0; i < 4; ++i) fields >> word;
  unsigned long long inode = 0;
  if (!(fields >> inode) || !ParseEndpoint(local, &facts->connection.local) ||
      !ParseEndpoint(remote, &facts->connection.remote) ||
      sscanf(queues.c_str(), "%x:%x", &facts->unsent, &facts->received) != 2) {
    return false;
  }
  facts->state = uint32_t(strtoul(state.c_str(), nullptr, 16));
  facts->inode = inode;
  return true;
}

std::map<uint64_t, Connection> ParseProcTcp(std::istream& lines) {
  std::map<uint64_t, Connection> found;
  TcpLine facts;
  for (std::string line; std::getline(lines, line);) {
    if (ParseTcpLine(line, &facts) && facts.inode != 0 && IsConnection(facts.state))
      found[facts.inode] = facts.connection;
  }
  return found;
}

std::vector<Connection> OpenConnections(const std::vector<int>& pids) {
  std::set<uint64_t> known;
  std::vector<uint64_t> sockets;  // each once, also if several processes have inherited it
  ForEachSocket(pids, [&](int pid, int number, uint64_t inode) {
    if (known.insert(inode).second && MayBeTcp(pid, number)) sockets.push_back(inode);
  });
  std::vector<Connection> found;
  // The kernel takes milliseconds for this, also if there are few, and most jobs have none.
  if (sockets.empty()) return found;
  const std::map<uint64_t, Connection> all = ConnectionsSeenBy(pids[0]);
  for (const uint64_t socket : sockets) {
    if (const auto connection = all.find(socket); connection != all.end()) found.push_back(connection->second);
  }
  return found;
}

bool CallAllSent(std::string* image) {
  using protozero::pbf_wire_type;
  using protozero::tag_and_type;
  size_t at = 0, bytes = 0;
  const bool known = ReadStreamImage(*image, [&](protozero::pbf_reader facts) {
    // A TcpStreamEntry (CRIU's images/tcp-stream.proto); what was not sent yet is a length.
    while (facts.next()) {
      if (facts.tag_and_type() == tag_and_type(12, pbf_wire_type::varint)) {
        at = size_t(facts.data().data() - image->data());
        facts.skip();
        bytes = size_t(facts.data().data() - image->data()) - at;
      } else {
        facts.skip();
      }
    }
  });
  PutZero(at, bytes, image);
  return known;
}

bool SavedConnections(std::string_view image, std::vector<Connection>* connections) {
  using protozero::pbf_wire_type;
  using protozero::tag_and_type;
  connections->clear();
  // An InetSkEntry (CRIU's images/sk-inet.proto).
  return ReadFilesImage(image, FileKind::kInternetSocket, [&](protozero::pbf_reader facts) {
    uint32_t protocol = 0, state = 0, ports[2] = {};
    std::vector<uint32_t> addresses[2];
    Connection connection;
    const auto here = [&] { return size_t(facts.data().data() - image.data()); };
    while (facts.next()) {
      switch (facts.tag_and_type()) {
        case tag_and_type(1, pbf_wire_type::varint):
          connection.number = facts.get_uint32();
          break;
        case tag_and_type(5, pbf_wire_type::varint):
          protocol = facts.get_uint32();
          break;
        case tag_and_type(6, pbf_wire_type::varint):
          connection.state_at = here();
          state = facts.get_uint32();
          break;
        case tag_and_type(7, pbf_wire_type::varint):
          connection.port_at = here();
          ports[0] = facts.get_uint32();
          connection.port_bytes = here() - connection.port_at;
          break;
        case tag_and_type(8, pbf_wire_type::varint):
          ports[1] = facts.get_uint32();
          break;
        case tag_and_type(11, pbf_wire_type::varint):
          addresses[0].push_back(facts.get_uint32());
          break;
        case tag_and_type(12, pbf_wire_type::varint):
          addresses[1].push_back(facts.get_uint32());
          break;
        default:
          facts.skip();
      }
    }
    if (protocol != IPPROTO_TCP || !IsConnection(state)) return;
    connection.local = FromWords(addresses[0], uint16_t(ports[0]));
    connection.remote = FromWords(addresses[1], uint16_t(ports[1]));
    connections->push_back(connection);
  });
}

void CloseSaved(const std::vector<Connection>& connections, std::string* image) {
  for (const Connection& connection : connections) {
    (*image)[connection.state_at] = char(TcpLine::kClosed);
    PutZero(connection.port_at, connection.port_bytes, image);
  }
}

std::vector<Connection> WithOthers(const std::vector<Connection>& connections) {
  const std::set<Connection> all(connections.begin(), connections.end());
  std::vector<Connection> found;
  for (const Connection& connection : connections) {
    Connection other_end;
    other_end.local = connection.remote;
    other_end.remote = connection.local;
    if (!all.count(other_end)) found.push_back(connection);
  }
  return found;
}

void ForEachSocketOf(const std::vector<int>& pids, const std::function<void(int socket)>& use) {
  ForEachSocket(pids, [&](int pid, int number, uint64_t) {
    const int socket = DuplicateOf(pid, number);
    if (socket < 0) return;
    use(socket);
    close(socket);
  });
}

std::vector<sock_filter> FilterOf(int socket) {
  socklen_t count = 0;  // of instructions, here
  if (getsockopt(socket, SOL_SOCKET, SO_GET_FILTER, nullptr, &count) != 0) return {};
  std::vector<sock_filter> filter(count);
  if (count > 0 && getsockopt(socket, SOL_SOCKET, SO_GET_FILTER, filter.data(), &count) != 0) filter.clear();
  return filter;
}

void DetachFilter(const std::vector<int>& pids, const std::vector<sock_filter>& filter) {
  ForEachSocketOf(pids, [&](int socket) {
    const std::vector<sock_filter> its = FilterOf(socket);
    const bool same =
        its.size() == filter.size() && memcmp(its.data(), filter.data(), its.size() * sizeof(sock_filter)) == 0;
    const int none = 0;
    if (same) setsockopt(socket, SOL_SOCKET, SO_DETACH_FILTER, &none, sizeof(none));
  });
}

void ResumeConnections(const std::vector<int>& pids, bool others_only) {
  if (pids.empty()) return;
  const std::map<uint64_t, Connection> all = ConnectionsSeenBy(pids[0]);
  const std::vector<Connection> others = WithOthers(OpenConnections(pids));
  const std::set<Connection> chosen(others.begin(), others.end());
  ForEachSocket(pids, [&](int pid, int number, uint64_t inode) {
    const auto connection = all.find(inode);
    if (others_only && (connection == all.end() || !chosen.count(connection->second))) return;
    const int socket = DuplicateOf(pid, number);
    if (socket < 0) return;
    // Also of one that has come to its end, and is in no table any more.
    int repaired = 0;
    socklen_t size = sizeof(repaired);
    const int off = 0;
    if (getsockopt(socket, IPPROTO_TCP, TCP_REPAIR, &repaired, &size) == 0 && repaired == 1)
      setsockopt(socket, IPPROTO_TCP, TCP_REPAIR, &off, sizeof(off));
    close(socket);
  });
}

}  // namespace cuda_remote::checkpoint
