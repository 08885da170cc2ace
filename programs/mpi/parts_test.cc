// SPDX-License-Identifier: Apache-2.0
#include "programs/mpi/parts.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

namespace cuda_remote::client::mpi {
namespace {

TEST(Parts, AreRead) {
  absl::StatusOr<Part> part = ParsePart("node7=10.9.0.50");
  ASSERT_TRUE(part.ok()) << part.status();
  EXPECT_EQ(part->host, "node7");
  EXPECT_EQ(part->address, "10.9.0.50");
  EXPECT_EQ(part->ranks, 1);
  part = ParsePart("node8=10.9.0.51/24@eth1:4");
  ASSERT_TRUE(part.ok()) << part.status();
  EXPECT_EQ(part->host, "node8");
  EXPECT_EQ(part->address, "10.9.0.51/24@eth1");
  EXPECT_EQ(part->ip, "10.9.0.51");
  EXPECT_EQ(part->ranks, 4);
  for (const char* wrong : {"", "node7", "=10.9.0.50", "node7=", "node7=10.9.0", "node7=10.9.0.50:0",
                            "node7=10.9.0.50:", "node7=10.9.0.50:x", "node7=10.9.0.50:1000000",
                            "-oProxyCommand=10.9.0.50", "node7=127.0.0.1"}) {
    EXPECT_FALSE(ParsePart(wrong).ok()) << wrong;
  }
  for (const char* ipv6 : {"node7=fd00:9::50", "node7=fd00:9::50:4", "node7=fd00:9::50/64@eth1:4"}) {
    const std::string error(ParsePart(ipv6).status().message());
    EXPECT_NE(error.find("of IPv4 only"), std::string::npos) << error;
  }
}

TEST(Parts, AreListedForEachMpirun) {
  const std::vector<Part> parts = {ParsePart("a=10.9.0.50/24:2").value(), ParsePart("b=10.9.0.51").value()};
  EXPECT_EQ(OpenMpiHosts(parts), "10.9.0.50 slots=2\n10.9.0.51 slots=1\n");
  EXPECT_EQ(HydraHosts(parts), "10.9.0.50:2\n10.9.0.51:1\n");
}

TEST(Quoted, IsOneWordForAShell) {
  for (const std::string word : {"a b", "it's", "$(false) `x` \"y\" \\", "", "a\nb"}) {
    FILE* const shell = popen(("printf %s " + Quoted(word)).c_str(), "r");
    std::string said;
    for (int c; (c = fgetc(shell)) != EOF;) said += char(c);
    EXPECT_EQ(pclose(shell), 0);
    EXPECT_EQ(said, word);
  }
}

TEST(Launches, AreLeftAndTaken) {
  EXPECT_FALSE(ParseLaunch({"-x"}).ok());
  EXPECT_FALSE(ParseLaunch({"-x", "10.9.0.51"}).ok());
  const absl::StatusOr<Launch> launch = ParseLaunch({"-x", "10.9.0.51", " orted -mca a", "\"b\""});
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ(launch->ip, "10.9.0.51");
  EXPECT_EQ(launch->command, " orted -mca a \"b\"");
  char folder[] = "/tmp/cr-parts-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const absl::Status written = WriteLaunch(folder, *launch);
  ASSERT_TRUE(written.ok()) << written;
  const std::vector<Launch> all = TakeLaunches(folder);
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].ip, launch->ip);
  EXPECT_EQ(all[0].command, launch->command);
  EXPECT_TRUE(TakeLaunches(folder).empty());
  EXPECT_EQ(rmdir(folder), 0);
  const std::string error(WriteLaunch(folder, *launch).message());
  EXPECT_NE(error.find(folder), std::string::npos) << error;
}

}  // namespace
}  // namespace cuda_remote::client::mpi
