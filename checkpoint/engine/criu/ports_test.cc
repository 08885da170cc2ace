// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/ports.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <protozero/pbf_writer.hpp>
#include <string>

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
  EXPECT_TRUE(FreePorts({port}, [](uint16_t) { return false; })) << "needs CAP_NET_ADMIN and CONFIG_INET_DIAG_DESTROY";
  EXPECT_TRUE(CanBind(port));
  EXPECT_FALSE(CanBind(other)) << "that one was not asked for";
}

TEST(PortsTest, PortsInUseAreLeftAlone) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = Loopback(0);
  socklen_t length = sizeof address;
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length), 0);
  EXPECT_TRUE(FreePorts({ntohs(address.sin_port)}, [](uint16_t) { return false; }));
  const int near = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(connect(near, reinterpret_cast<sockaddr*>(&address), length), 0);
  close(near);
  close(listener);
  EXPECT_TRUE(FreePorts({}, [](uint16_t) { return false; }));
}

TEST(PortsTest, ReadsThePortsOfAnImage) {
  const auto socket_entry = [](uint32_t protocol, uint32_t port) {
    std::string message;
    protozero::pbf_writer facts(message);
    facts.add_uint32(1, 9);
    facts.add_uint32(5, protocol);
    facts.add_uint32(6, 10);
    facts.add_uint32(7, port);
    return message;
  };
  std::string image = EmptyFilesImage();
  AddFile(&image, 4, 4, socket_entry(IPPROTO_TCP, 8080));
  AddFile(&image, 4, 4, socket_entry(IPPROTO_UDP, 53));
  AddFile(&image, 4, 4, socket_entry(IPPROTO_TCP, 0));
  AddFile(&image, 4, 4, socket_entry(IPPROTO_TCP, 70000));
  AddFile(&image, 4, 4, socket_entry(IPPROTO_TCP, 29511));
  std::set<uint16_t> ports;
  ASSERT_TRUE(SavedPorts(image, &ports));
  EXPECT_EQ(ports, (std::set<uint16_t>{8080, 29511}));
  EXPECT_FALSE(SavedPorts("no image", &ports));
}

}  // namespace
}  // namespace cuda_remote::checkpoint
