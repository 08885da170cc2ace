// SPDX-License-Identifier: Apache-2.0
// Which hosts are on a list, and how much strangers can write to the log.

#include <gtest/gtest.h>

#include <string>

#include "proto/base/clock.h"
#include "server/supervisor/address_list.h"
#include "server/supervisor/log_limit.h"

namespace cuda_remote::server {
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

}  // namespace
}  // namespace cuda_remote::server
