// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/connections.h"

#include <arpa/inet.h>
#include <errno.h>
#include <gtest/gtest.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <sstream>

#include "checkpoint/engine/criu/criu_image.h"
#include "checkpoint/engine/criu/testing/files_image.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr char kTable[] =
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 100 1 0 100 0 0 10 0\n"
    "   1: 0100007F:1F90 0100007F:A028 01 00000000:00000000 00:00000000 00000000     0        0 101 1 0 20 4 30 10 -1\n"
    "   2: 0100007F:A028 0100007F:1F90 08 00000000:00000000 00:00000000 00000000     0        0 102 1 0 20 4 30 10 -1\n"
    "   3: 0200000A:A029 0700000A:01BB 01 00000000:00000000 00:00000000 00000000     0        0 103 1 0 20 4 30 10 -1\n"
    "   4: 0100007F:A030 0100007F:1F90 06 00000000:00000000 03:00000000 00000000     0        0 0 3 0\n"
    "   5: XYZ:1 0100007F:1F90 01 a b c d e 105\n"
    "   6: 0100007F:1F90\n"
    "\n";
constexpr char kTable6[] =
    "   0: 0000000000000000FFFF00000100007F:1F91 0000000000000000FFFF00000100007F:A040 01 0:0 0:0 0 0 0 201 1\n"
    "   1: B80D0120000000000000000001000000:A041 B80D0120000000000000000002000000:0016 02 0:0 0:0 0 0 0 202 1\n";

std::map<uint64_t, Connection> Parse(const char* text) {
  std::istringstream lines(text);
  return ParseProcTcp(lines);
}

// Two ends of a connection over the loopback interface.
struct Pair {
  Pair() {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    EXPECT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(listen(listener, 1), 0);
    EXPECT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length), 0);
    port = ntohs(address.sin_port);
    owners[0].Reset(first = socket(AF_INET, SOCK_STREAM, 0));
    EXPECT_EQ(connect(first, reinterpret_cast<sockaddr*>(&address), length), 0);
    owners[1].Reset(second = accept(listener, nullptr, nullptr));
    EXPECT_GE(second, 0);
    close(listener);
  }
  int first, second;
  uint16_t port;

 private:
  UniqueFd owners[2];
};

void Add(std::string* image, uint32_t protocol, uint32_t state, uint16_t from, uint16_t to) {
  std::string facts;
  protozero::pbf_writer socket(facts);
  socket.add_uint32(1, 5);
  socket.add_uint32(5, protocol);
  socket.add_uint32(6, state);
  socket.add_uint32(7, from);
  socket.add_uint32(8, to);
  socket.add_uint32(11, htonl(INADDR_LOOPBACK));
  socket.add_uint32(12, htonl(INADDR_LOOPBACK));
  AddFile(image, 4, 4, facts);
}

TEST(Connections, ReadsTheKernelsTables) {
  const std::map<uint64_t, Connection> found = Parse(kTable);
  ASSERT_EQ(found.size(), 3u) << "neither what listens nor what waits for its end";
  EXPECT_EQ(ToText(found.at(101)), "127.0.0.1:8080 -> 127.0.0.1:41000");
  EXPECT_EQ(ToText(found.at(102)), "127.0.0.1:41000 -> 127.0.0.1:8080");
  EXPECT_EQ(ToText(found.at(103)), "10.0.0.2:41001 -> 10.0.0.7:443");
  const std::map<uint64_t, Connection> six = Parse(kTable6);
  ASSERT_EQ(six.size(), 2u);
  EXPECT_EQ(ToText(six.at(201)), "127.0.0.1:8081 -> 127.0.0.1:41024");
  EXPECT_EQ(ToText(six.at(202)), "[2001:db8::1]:41025 -> [2001:db8::2]:22");
}

TEST(Connections, TellsThoseWithOthersApart) {
  std::vector<Connection> all;
  for (const auto& [inode, connection] : Parse(kTable)) all.push_back(connection);
  const std::vector<Connection> others = WithOthers(all);
  ASSERT_EQ(others.size(), 1u);
  EXPECT_EQ(others[0].remote.port, 443);
  all.erase(all.begin());
  EXPECT_EQ(WithOthers(all).size(), 2u) << "the other end of the second one is gone";
  // One end may see as IPv6 what is IPv4 for the other.
  const Connection mapped = Parse(kTable6).at(201);
  std::istringstream lines("   0: 0100007F:A040 0100007F:1F91 01 0:0 0:0 0 0 0 300 1\n");
  EXPECT_TRUE(WithOthers({mapped, ParseProcTcp(lines).at(300)}).empty());
}

TEST(Connections, FindsThoseOfAProcess) {
  const Pair pair;
  const std::vector<Connection> found = OpenConnections({getpid()});
  ASSERT_EQ(found.size(), 2u);
  EXPECT_TRUE(WithOthers(found).empty());
  EXPECT_TRUE(found[0].local.port == pair.port || found[1].local.port == pair.port);
  close(dup2(pair.first, 200));
  EXPECT_EQ(OpenConnections({getpid(), getpid()}).size(), 2u) << "each once";
  EXPECT_TRUE(OpenConnections({}).empty());
}

// What listens with MPTCP, as Go's servers do, has connections in the tables of TCP, also with peers that do not know
// it.
TEST(Connections, FindsThoseOfMptcp) {
  constexpr int kMptcp = 262;
  const UniqueFd listener(socket(AF_INET, SOCK_STREAM, kMptcp));
  if (!listener.ok()) GTEST_SKIP() << "this kernel has no MPTCP: " << strerror(errno);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  sockaddr* const place = reinterpret_cast<sockaddr*>(&address);
  ASSERT_EQ(bind(listener.get(), place, size), 0);
  ASSERT_EQ(listen(listener.get(), 1), 0);
  ASSERT_EQ(getsockname(listener.get(), place, &size), 0);
  const UniqueFd caller(socket(AF_INET, SOCK_STREAM, 0));
  ASSERT_EQ(connect(caller.get(), place, size), 0);
  const UniqueFd accepted(accept(listener.get(), nullptr, nullptr));
  ASSERT_TRUE(accepted.ok());
  EXPECT_EQ(OpenConnections({getpid()}).size(), 2u);
}

TEST(Connections, ReadsCriusImage) {
  std::string image = EmptyFilesImage();
  Add(&image, IPPROTO_TCP, 1, 8080, 41000);
  Add(&image, IPPROTO_TCP, 1, 41000, 8080);
  Add(&image, IPPROTO_TCP, 10, 8080, 0);
  Add(&image, IPPROTO_TCP, 7, 8080, 41001);
  Add(&image, IPPROTO_UDP, 1, 53, 41002);
  Add(&image, IPPROTO_TCP, 1, 41003, 443);
  std::vector<Connection> found;
  ASSERT_TRUE(SavedConnections(image, &found));
  ASSERT_EQ(found.size(), 3u);
  const std::vector<Connection> others = WithOthers(found);
  ASSERT_EQ(others.size(), 1u);
  EXPECT_EQ(ToText(others[0]), "127.0.0.1:41003 -> 127.0.0.1:443");
  // Closed, without an address, and nothing else has changed.
  std::string closed = image;
  CloseSaved(others, &closed);
  ASSERT_TRUE(SavedConnections(closed, &found));
  EXPECT_EQ(found.size(), 2u);
  EXPECT_TRUE(WithOthers(found).empty());
  std::vector<std::pair<uint32_t, uint32_t>> seen;
  ASSERT_TRUE(ReadFilesImage(closed, FileKind::kInternetSocket, [&](protozero::pbf_reader socket) {
    uint32_t state = 0, port = 0;
    while (socket.next()) {
      if (socket.tag() == 6) {
        state = socket.get_uint32();
      } else if (socket.tag() == 7) {
        port = socket.get_uint32();
      } else {
        socket.skip();
      }
    }
    seen.emplace_back(state, port);
  }));
  EXPECT_EQ(seen, (decltype(seen){{1, 8080}, {1, 41000}, {10, 8080}, {7, 8080}, {1, 53}, {7, 0}}));
  // Nothing that is damaged is more than refused.
  for (size_t bytes = 0; bytes < image.size(); ++bytes) SavedConnections(image.substr(0, bytes), &found);
  for (size_t at = 0; at < image.size(); ++at) {
    std::string damaged = image;
    damaged[at] = char(damaged[at] ^ 0xff);
    SavedConnections(damaged, &found);
  }
  EXPECT_FALSE(SavedConnections("", &found));
}

TEST(Connections, CallsAllDataSent) {
  std::string facts;
  protozero::pbf_writer stream(facts);
  stream.add_uint32(3, 300);
  stream.add_uint32(12, 300);
  stream.add_uint32(13, 7);
  const uint32_t head[3] = {0x54564319, 0x51465506, uint32_t(facts.size())};
  const std::string image =
      std::string(reinterpret_cast<const char*>(head), sizeof(head)) + facts + std::string(300, 'd');
  std::string settled = image;
  ASSERT_TRUE(CallAllSent(&settled));
  std::vector<uint32_t> values;
  ASSERT_TRUE(ReadStreamImage(settled, [&](protozero::pbf_reader read) {
    while (read.next()) values.push_back(read.get_uint32());
  }));
  EXPECT_EQ(values, (std::vector<uint32_t>{300, 0, 7}));
  EXPECT_EQ(settled.size(), image.size());
  EXPECT_EQ(settled.substr(settled.size() - 300), std::string(300, 'd'));
  for (size_t bytes = 0; bytes < image.size() - 300; ++bytes) {
    std::string cut = image.substr(0, bytes);
    EXPECT_FALSE(CallAllSent(&cut)) << bytes;
  }
}

TEST(Connections, GoOnAfterARepair) {
  ASSERT_EQ(geteuid(), 0u) << "a connection is only repaired by root";
  const Pair pair;
  const int on = 1;
  for (int end : {pair.first, pair.second}) {
    ASSERT_EQ(setsockopt(end, IPPROTO_TCP, TCP_REPAIR, &on, sizeof(on)), 0) << strerror(errno);
  }
  ResumeConnections({getpid()}, true);
  for (int end : {pair.first, pair.second}) {
    int repair = 0;
    socklen_t length = sizeof(repair);
    ASSERT_EQ(getsockopt(end, IPPROTO_TCP, TCP_REPAIR, &repair, &length), 0);
    EXPECT_EQ(repair, 1) << "both ends are this process's";
  }
  ResumeConnections({getpid()}, false);
  ASSERT_EQ(send(pair.first, "abc", 3, MSG_NOSIGNAL), 3);
  pollfd waiting{pair.second, POLLIN, 0};
  ASSERT_EQ(poll(&waiting, 1, 10000), 1);
  char text[4] = {};
  EXPECT_EQ(recv(pair.second, text, sizeof(text), 0), 3);
  EXPECT_STREQ(text, "abc");
}

}  // namespace
}  // namespace cuda_remote::checkpoint
