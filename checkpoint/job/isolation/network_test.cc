// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/isolation/network.h"

#include <gtest/gtest.h>

namespace cuda_remote::checkpoint {
namespace {

TEST(Network, IsReadAndWritten) {
  for (const char* text : {"10.9.0.50", "10.9.0.50/24", "10.9.0.50@eth1", "10.9.0.50/24@br0"}) {
    const absl::StatusOr<JobNetwork> network = ParseNetwork(text);
    ASSERT_EQ(network.status(), absl::OkStatus());
    EXPECT_EQ(ToText(*network), text);
    EXPECT_EQ(network->address(), "10.9.0.50");
  }
}

TEST(Network, OfIpv6IsReadAndWritten) {
  for (const char* text : {"fd00:9::50", "fd00:9::50/64", "fd00:9::50@eth1", "fd00:9::50/120@br0"}) {
    const absl::StatusOr<JobNetwork> network = ParseNetwork(text);
    ASSERT_EQ(network.status(), absl::OkStatus());
    EXPECT_EQ(ToText(*network), text);
    EXPECT_EQ(network->address(), "fd00:9::50");
  }
}

TEST(Network, OtherTextsAreRefused) {
  for (const char* text : {"",
                           "10.9.0",
                           "10.9.0.50/",
                           "10.9.0.50/0",
                           "10.9.0.50/33",
                           "10.9.0.50/x",
                           "10.9.0.50@",
                           "10.9.0.50@sixteen-letters-",
                           "10.9.0.256",
                           "host",
                           "127.0.0.1",
                           "224.0.0.1",
                           "255.255.255.255",
                           "0.0.0.0",
                           "10.9.0.50/24/24",
                           "fd00:9::50/129",
                           "fd00:9::50/0",
                           "fd00:9:::50",
                           "[fd00:9::50]",
                           "fd00:9::50%eth0",
                           "::",
                           "::1",
                           "fe80::1",
                           "ff02::1",
                           "::ffff:10.9.0.50"}) {
    const absl::Status refused = ParseNetwork(text).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_NE(refused.message(), "") << text;
  }
}

TEST(Network, RulesAllowTheAddressesOfANetwork) {
  EXPECT_TRUE(RuleAllows("10.9.0.0/24", "10.9.0.50", "eth0"));
  EXPECT_TRUE(RuleAllows("10.9.0.0/24@eth0", "10.9.0.50", "eth0"));
  EXPECT_FALSE(RuleAllows("10.9.0.0/24@eth0", "10.9.0.50", "eth1"));
  EXPECT_FALSE(RuleAllows("10.9.0.0/24", "10.9.1.50", "eth0"));
  EXPECT_TRUE(RuleAllows("10.9.0.50/32", "10.9.0.50", "eth0"));
  EXPECT_FALSE(RuleAllows("10.9.0.50/32", "10.9.0.51", "eth0"));
  EXPECT_TRUE(RuleAllows("fd00:9::/64@eth0", "fd00:9:0::50", "eth0"));
  EXPECT_FALSE(RuleAllows("fd00:9::/64", "fd00:9:0:1::50", "eth0"));
  EXPECT_TRUE(RuleAllows("fd00:9::40/122", "fd00:9::7f", "eth0"));
  EXPECT_FALSE(RuleAllows("fd00:9::40/122", "fd00:9::80", "eth0"));
  EXPECT_FALSE(RuleAllows("10.9.0.0/8", "a09::50", "eth0"));  // the same first bits
}

TEST(Network, RulesAreNetworks) {
  EXPECT_EQ(CheckNetworkRule("10.9.0.0/24"), absl::OkStatus());
  EXPECT_EQ(CheckNetworkRule("10.9.0.0/24@br0"), absl::OkStatus());
  EXPECT_EQ(CheckNetworkRule("fd00:9::/64@br0"), absl::OkStatus());
  for (const char* rule : {"fd00:9::50/64", "fd00:9::", "10.9.0.50/24", "10.9.0.0", "10.9.0.0@br0", "all", ""}) {
    EXPECT_EQ(CheckNetworkRule(rule).code(), absl::StatusCode::kInvalidArgument) << rule;
  }
}

TEST(Network, HardwareAddressesDifferAsAddressesDo) {
  const std::array<unsigned char, 6> want = {0x02, 'C', 10, 9, 0, 50};
  EXPECT_EQ(HardwareAddress("10.9.0.50"), want);
  EXPECT_NE(HardwareAddress("10.9.0.51"), want);
  EXPECT_EQ(HardwareAddress("fd00:9::50"), HardwareAddress("fd00:9:0::50"));
  EXPECT_NE(HardwareAddress("fd00:9::50"), HardwareAddress("fd00:9::51"));
  EXPECT_NE(HardwareAddress("fd00:9::50"), HardwareAddress("fd00:a::50"));
}

TEST(Network, AnInterfaceThatIsNotThereIsNamed) {
  absl::StatusOr<JobNetwork> network = ParseNetwork("10.9.0.50/24@no-such-one");
  ASSERT_EQ(network.status(), absl::OkStatus());
  EXPECT_EQ(CheckNetwork(&*network, nullptr),
            absl::NotFoundError("this machine has no interface no-such-one for the job's address 10.9.0.50"));
}

}  // namespace
}  // namespace cuda_remote::checkpoint
