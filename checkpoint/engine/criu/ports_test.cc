// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/ports.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <protozero/pbf_writer.hpp>
#include <string>
#include <vector>

#include "checkpoint/engine/criu/testing/files_image.h"

namespace cuda_remote::checkpoint {
namespace {

sockaddr_in Loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

TcpEnd AtLoopback(uint16_t port) { return {port, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1}}; }

// Whether a socket without SO_REUSEADDR can be bound.
bool CanBind(uint16_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = Loopback(port);
  const bool bound = bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  close(fd);
  return bound;
}

// A port that a connection held which has just ended, at the end that closed first.
uint16_t PortInTimeWait() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = Loopback(0);
  socklen_t length = sizeof address;
  EXPECT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(listen(listener, 1), 0);
  EXPECT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length), 0);
  const int near = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(connect(near, reinterpret_cast<sockaddr*>(&address), length), 0);
  const int far = accept(listener, nullptr, nullptr);
  close(far);
  char none;
  EXPECT_EQ(read(near, &none, 1), 0);
  close(near);
  close(listener);
  return ntohs(address.sin_port);
}

TEST(PortsTest, ConnectionsThatHaveEndedHereLetGoOfTheirPorts) {
  const uint16_t port = PortInTimeWait(), other = PortInTimeWait();
  ASSERT_FALSE(CanBind(port));
  ASSERT_FALSE(CanBind(other));
  EXPECT_TRUE(FreePorts({AtLoopback(port)}, [](const HeldPort&) { return false; }))
      << "needs CAP_NET_ADMIN and CONFIG_INET_DIAG_DESTROY";
  EXPECT_TRUE(CanBind(port));
  EXPECT_FALSE(CanBind(other)) << "that one was not asked for";
}

// A pair of sockets with a connection between them, and the port of the first.
struct Connection {
  int near = -1, far = -1;
  uint16_t port = 0;
};

Connection MakeConnection() {
  Connection made;
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = Loopback(0);
  socklen_t length = sizeof address;
  EXPECT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(listen(listener, 1), 0);
  EXPECT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length), 0);
  made.near = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(connect(made.near, reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(getsockname(made.near, reinterpret_cast<sockaddr*>(&address), &length), 0);
  made.far = accept(listener, nullptr, nullptr);
  made.port = ntohs(address.sin_port);
  close(listener);
  return made;
}

TEST(PortsTest, WaitsForAnotherProgramAndNamesIt) {
  const Connection connection = MakeConnection();
  int asked = 0;
  EXPECT_TRUE(FreePorts({AtLoopback(connection.port)}, [&](const HeldPort& held) {
    EXPECT_EQ(held.port, connection.port);
    if (++asked < 3) {
      EXPECT_FALSE(held.ended);
      EXPECT_NE(held.holder.find("(PID " + std::to_string(getpid()) + ")"), std::string::npos) << held.holder;
      char byte = 1;
      EXPECT_EQ(send(connection.near, &byte, 1, 0), 1) << "the connection must be left alone";
      EXPECT_EQ(read(connection.far, &byte, 1), 1);
      return true;
    }
    close(connection.near);
    close(connection.far);
    return asked < 10;
  }));
  EXPECT_EQ(asked, 3);
  EXPECT_TRUE(CanBind(connection.port));
}

TEST(PortsTest, AConnectionThatTheOtherSideHasNotEndedIsWaitedFor) {
  // FIN_WAIT2: nobody has the near socket any more, but the far one may still be read.
  const Connection connection = MakeConnection();
  EXPECT_EQ(write(connection.near, "last words", 10), 10);
  close(connection.near);
  ASSERT_FALSE(CanBind(connection.port));
  int asked = 0;
  EXPECT_TRUE(FreePorts({AtLoopback(connection.port)}, [&](const HeldPort& held) {
    EXPECT_TRUE(held.ended);
    if (++asked < 2) return true;
    char words[16];
    EXPECT_EQ(read(connection.far, words, sizeof words), 10);
    close(connection.far);
    return asked < 10;
  }));
  EXPECT_EQ(asked, 2);
  EXPECT_TRUE(CanBind(connection.port));
}

TEST(PortsTest, AConnectionThatNobodyHasAcceptedIsNotTakenAway) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = Loopback(0);
  socklen_t length = sizeof address;
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length), 0);
  const int near = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(connect(near, reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_FALSE(FreePorts({AtLoopback(ntohs(address.sin_port))}, [](const HeldPort& held) {
    EXPECT_FALSE(held.ended);
    return false;
  }));
  EXPECT_EQ(send(near, "x", 1, MSG_NOSIGNAL), 1);
  const int far = accept(listener, nullptr, nullptr);
  char byte;
  EXPECT_EQ(read(far, &byte, 1), 1);
  close(far);
  close(near);
  close(listener);
}

TEST(PortsTest, OtherAddressesAndNoPortsDoNotCount) {
  const Connection connection = MakeConnection();
  const auto fail = [](const HeldPort&) { return false; };
  TcpEnd other = AtLoopback(connection.port);
  other.address[15] = 2;
  EXPECT_TRUE(FreePorts({other}, fail));
  EXPECT_TRUE(FreePorts({}, fail));
  EXPECT_FALSE(FreePorts({{connection.port, {}}}, fail)) << "all addresses";
  close(connection.near);
  close(connection.far);
}

TEST(PortsTest, ReadsThePortsOfAnImage) {
  const auto socket_entry = [](uint32_t protocol, uint32_t family, uint32_t port, std::vector<uint32_t> address) {
    std::string message;
    protozero::pbf_writer facts(message);
    facts.add_uint32(1, 9);
    facts.add_uint32(3, family);
    facts.add_uint32(5, protocol);
    facts.add_uint32(6, 10);
    facts.add_uint32(7, port);
    for (const uint32_t word : address) facts.add_uint32(11, word);
    return message;
  };
  const uint32_t loopback = htonl(INADDR_LOOPBACK);
  std::string image = EmptyFilesImage();
  AddFile(&image, 4, 4, socket_entry(IPPROTO_TCP, AF_INET, 8080, {0}));
  AddFile(&image, 4, 4, socket_entry(IPPROTO_UDP, AF_INET, 53, {0}));
  AddFile(&image, 4, 4, socket_entry(IPPROTO_TCP, AF_INET, 0, {0}));
  AddFile(&image, 4, 4, socket_entry(IPPROTO_TCP, AF_INET, 70000, {0}));
  AddFile(&image, 4, 4, socket_entry(IPPROTO_TCP, AF_INET, 29511, {loopback}));
  AddFile(&image, 4, 4, socket_entry(IPPROTO_TCP, AF_INET6, 29512, {0, 0, htonl(0xffff), loopback}));
  AddFile(&image, 4, 4, socket_entry(IPPROTO_TCP, AF_INET6, 29513, {}));
  std::set<TcpEnd> ends;
  ASSERT_TRUE(SavedPorts(image, &ends));
  EXPECT_EQ(ends, (std::set<TcpEnd>{{8080, {}}, AtLoopback(29511), AtLoopback(29512), {29513, {}}}));
  EXPECT_FALSE(SavedPorts("no image", &ends));
}

}  // namespace
}  // namespace cuda_remote::checkpoint
