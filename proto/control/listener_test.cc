// SPDX-License-Identifier: Apache-2.0
// Which hosts are on a list, how much strangers can write to the log, and that silent connections keep nobody out.

#include "proto/control/listener.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "proto/base/clock.h"
#include "proto/base/unique_fd.h"
#include "proto/control/address_list.h"
#include "proto/control/log_limit.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::control {
namespace {

bool Matches(const std::string& entry, const std::string& address) {
  AddressList list;
  IpAddress parsed;
  EXPECT_EQ(list.Add(entry), absl::OkStatus());
  EXPECT_TRUE(ParseIpAddress(address, &parsed)) << address;
  return list.Contains(parsed);
}

TEST(AddressList, MatchesWhatItNames) {
  EXPECT_TRUE(Matches("10.1.2.3", "10.1.2.3"));
  EXPECT_FALSE(Matches("10.1.2.3", "10.1.2.4"));
  EXPECT_TRUE(Matches("10.1.2.0/23", "10.1.3.255"));
  EXPECT_FALSE(Matches("10.1.2.0/23", "10.1.4.0"));
  EXPECT_TRUE(Matches("0.0.0.0/0", "200.1.1.1"));
  EXPECT_FALSE(Matches("0.0.0.0/0", "fd00::1"));
  EXPECT_TRUE(Matches("fd00::/8", "fdff::1"));
  EXPECT_FALSE(Matches("fd00::/8", "fe80::1"));
  EXPECT_TRUE(Matches("::/0", "10.1.1.1"));
  // An IPv4 client at a socket for both families.
  EXPECT_TRUE(Matches("10.1.2.0/24", "::ffff:10.1.2.9"));
  EXPECT_TRUE(Matches("::ffff:10.1.2.9", "10.1.2.9"));
}

TEST(AddressList, RefusesWhatIsNoAddress) {
  for (const char* text : {"", "gpu7", "10.1.2", "10.1.2.3/33", "10.1.2.3/", "10.1.2.3/x", "10.1.2.3/-1", "10.1.2.3/24",
                           "fd00::/129", "10.1.2.3:80", "[fd00::1]", " 10.1.2.3", "10.1.2.3 ", "1/1", "/8"}) {
    AddressList list;
    EXPECT_NE(list.Add(text).message(), "") << text;
    EXPECT_TRUE(list.empty());
  }
}

TEST(AddressList, HostsAreCountedByNetworkWhereTheOwnerChoosesTheRest) {
  const auto host = [](const char* text) {
    IpAddress address;
    EXPECT_TRUE(ParseIpAddress(text, &address));
    return IpAddressText(HostOf(address));
  };
  EXPECT_EQ(host("10.1.2.3"), "10.1.2.3");
  EXPECT_EQ(host("2001:db8:1:2:3:4:5:6"), host("2001:db8:1:2:ffff::1"));
  EXPECT_NE(host("2001:db8:1:2::1"), host("2001:db8:1:3::1"));
}

TEST(LogLimit, WritesFewLinesAndCountsTheRest) {
  LogLimit limit(3, std::chrono::seconds(5));
  const Moment start = Now();
  std::string more;
  int lines = 0;
  for (int i = 0; i < 100000; ++i) lines += limit.Allow(&more, start + std::chrono::microseconds(i));
  EXPECT_EQ(lines, 3);
  EXPECT_TRUE(limit.Allow(&more, start + std::chrono::seconds(6)));
  EXPECT_NE(more.find("99997"), std::string::npos) << more;
  EXPECT_FALSE(limit.Allow(&more, start + std::chrono::seconds(7)));
  EXPECT_TRUE(limit.Allow(&more, start + std::chrono::hours(7)));
  EXPECT_TRUE(limit.Allow(&more, start + std::chrono::hours(7)));
  EXPECT_TRUE(more.empty()) << more;
}

// Connections to a listener of this process, from addresses that all are this machine's.
class ListenerTest : public testing::Test {
 protected:
  struct Client {
    UniqueFd fd;
    IpAddress address{};
    uint16_t port = 0;

    // Whether the other side closes the connection within this time, -1: waits until it does.
    bool Ends(int wait_ms) const {
      pollfd waiting{fd.get(), POLLIN | POLLRDHUP, 0};
      return poll(&waiting, 1, wait_ms) == 1;
    }
    bool IsOpen() const { return !Ends(0); }
  };

  ~ListenerTest() override { listener_.Stop(); }

  void Start(size_t most = 400) {
    ASSERT_EQ(listener_.Listen("127.0.0.1:0"), absl::OkStatus());
    listener_.Start(most, [this](int fd) {
      MutexLock lock(&mutex_);
      served_.emplace_back(fd);
    });
  }

  static std::string Host(int number) { return "127.1.0." + std::to_string(number); }

  // A connection from `host`, once the listener has served it or turned it away.
  Client Connect(const std::string& host) {
    Client client;
    client.fd.Reset(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in from{}, to{};
    from.sin_family = to.sin_family = AF_INET;
    to.sin_port = htons(uint16_t(listener_.port()));
    inet_pton(AF_INET, host.c_str(), &from.sin_addr);
    inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
    const size_t before = Served();
    EXPECT_EQ(bind(client.fd.get(), reinterpret_cast<sockaddr*>(&from), sizeof(from)), 0);
    EXPECT_EQ(connect(client.fd.get(), reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
    socklen_t length = sizeof(from);
    EXPECT_EQ(getsockname(client.fd.get(), reinterpret_cast<sockaddr*>(&from), &length), 0);
    EXPECT_TRUE(ReadSocketAddress(reinterpret_cast<sockaddr*>(&from), length, &client.address, &client.port));
    while (Served() == before && !client.Ends(1)) {
    }
    return client;
  }

  std::vector<Client> Flood(const std::string& host, size_t count) {
    std::vector<Client> clients;
    for (size_t i = 0; i < count; ++i) clients.push_back(Connect(host));
    return clients;
  }

  Client Prove(const std::string& host) {
    Client client = Connect(host);
    listener_.Proven(client.address, client.port);
    return client;
  }

  static size_t Open(const std::vector<Client>& clients) {
    size_t open = 0;
    for (const Client& client : clients) open += client.IsOpen();
    return open;
  }

  size_t Served() {
    MutexLock lock(&mutex_);
    return served_.size();
  }

  std::atomic<int> lines_{0};
  Listener listener_{[this](bool, const std::string&) { ++lines_; }};
  Mutex mutex_;
  std::vector<UniqueFd> served_ CR_GUARDED_BY(mutex_);
};

// What locked every newcomer out of cr-server: 128 silent connections from 4 addresses.
TEST_F(ListenerTest, SilentConnectionsOfFewHostsLockNobodyOut) {
  Start();
  std::vector<std::vector<Client>> silent;
  for (int host = 1; host <= 4; ++host) silent.push_back(Flood(Host(host), Listener::kMostUnproven));
  std::vector<Client> newcomers;
  for (int host = 10; host < 40; ++host) newcomers.push_back(Connect(Host(host)));
  EXPECT_EQ(Open(newcomers), newcomers.size());
  // Each newcomer took the place of the oldest of the host that had the most.
  size_t open = 0;
  for (const std::vector<Client>& clients : silent) {
    EXPECT_TRUE(clients.front().Ends(-1));
    EXPECT_TRUE(clients.back().IsOpen());
    open += Open(clients);
  }
  EXPECT_EQ(open + newcomers.size(), Listener::kMostUnprovenOfAll);
  EXPECT_GT(lines_, 0);
  EXPECT_LT(lines_, 20);
}

TEST_F(ListenerTest, AHostsNewestConnectionsReplaceItsOldest) {
  Start();
  const Client other = Connect(Host(2));
  const std::vector<Client> clients = Flood(Host(1), 3 * Listener::kMostUnproven);
  const size_t closed = clients.size() - Listener::kMostUnproven;
  for (size_t i = 0; i < closed; ++i) EXPECT_TRUE(clients[i].Ends(-1)) << i;
  EXPECT_EQ(Open(clients), Listener::kMostUnproven);
  EXPECT_TRUE(other.IsOpen());
}

TEST_F(ListenerTest, StrangersCloseNothingOfAProvenHost) {
  Start();
  const Client session = Prove(Host(1));
  const std::vector<Client> next = Flood(Host(1), 3);  // of a resumed session, on their way to be proven
  std::vector<std::vector<Client>> strangers;
  for (int host = 2; host <= 11; ++host) strangers.push_back(Flood(Host(host), Listener::kMostUnproven));
  EXPECT_TRUE(session.IsOpen());
  EXPECT_EQ(Open(next), next.size());
}

// A session whose connection breaks finds a place, however many strangers are there.
TEST_F(ListenerTest, PlacesAreKeptForProvenHosts) {
  constexpr size_t kFew = 40, kOfStrangers = kFew - kFew / Listener::kShareOfKnown;
  Start(kFew);
  const Client session = Prove(Host(1));
  // As many sessions of other hosts as there may be, each a stranger when it came.
  std::vector<Client> others;
  for (int host = 2; others.size() + 1 < kOfStrangers; ++host) others.push_back(Prove(Host(host)));
  EXPECT_FALSE(Connect(Host(200)).IsOpen());
  EXPECT_TRUE(Connect(Host(1)).IsOpen());
  EXPECT_EQ(Open(others), others.size());
}

TEST_F(ListenerTest, WhoIsRefusedAgainAndAgainIsLeft) {
  Start();
  const Client client = Connect(Host(1)), other = Connect(Host(1)), known = Prove(Host(2));
  for (unsigned i = 1; i < Listener::kMostRefusals; ++i) {
    listener_.Refused(client.address, client.port);
    listener_.Refused(known.address, known.port);
  }
  EXPECT_TRUE(client.IsOpen());
  listener_.Refused(client.address, client.port);
  listener_.Refused(known.address, known.port);
  EXPECT_TRUE(client.Ends(-1));
  EXPECT_TRUE(other.IsOpen() && known.IsOpen());
}

// A connection that the server closes is closed for the client, although the listener has had it, too.
TEST_F(ListenerTest, WhatTheServerClosesIsClosed) {
  Start();
  const Client client = Connect(Host(1));
  {
    MutexLock lock(&mutex_);
    served_.pop_back();
  }
  EXPECT_TRUE(client.Ends(-1));
}

}  // namespace
}  // namespace cuda_remote::control
