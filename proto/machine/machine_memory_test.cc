// SPDX-License-Identifier: Apache-2.0
#include "proto/machine/machine_memory.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace cuda_remote {
namespace {

TEST(MachineMemoryTest, IsReadFromTheSystem) {
  EXPECT_EQ(AvailableIn("MemTotal:  100 kB\nMemAvailable:    50 kB\n"), 50 * 1024u);
  EXPECT_EQ(AvailableIn("MemTotal:  100 kB\n"), UINT64_MAX);
  EXPECT_EQ(AvailableIn(""), UINT64_MAX);
  EXPECT_EQ(AvailableIn("MemAvailable:"), UINT64_MAX);
  EXPECT_GT(AvailableMemory(), 0u);
  EXPECT_LT(AvailableMemory(), uint64_t{1} << 50);
}

class Group {
 public:
  Group() {
    const char* const base = getenv("TEST_TMPDIR");
    path_ = std::string(base ? base : "/tmp") + "/group-XXXXXX";
    if (!mkdtemp(path_.data())) abort();
    std::filesystem::create_directories(path_ + "/a/b");
  }
  ~Group() { std::filesystem::remove_all(path_); }
  void Write(const std::string& name, const std::string& text) { std::ofstream(path_ + "/" + name) << text; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(MachineMemoryTest, TheTightestGroupCounts) {
  Group group;
  EXPECT_EQ(LeftInGroup(group.path() + "/a/b", group.path(), false), UINT64_MAX) << "no files, no limit";
  group.Write("a/b/memory.max", "max\n");
  EXPECT_EQ(LeftInGroup(group.path() + "/a/b", group.path(), false), UINT64_MAX);
  group.Write("a/b/memory.max", "1000\n");
  group.Write("a/b/memory.current", "400\n");
  EXPECT_EQ(LeftInGroup(group.path() + "/a/b", group.path(), false), 600u);
  group.Write("a/b/memory.stat", "anon 10\ninactive_file 150\nactive_file 3\n");
  EXPECT_EQ(LeftInGroup(group.path() + "/a/b", group.path(), false), 750u);
  group.Write("a/memory.max", "500\n");
  group.Write("a/memory.current", "450\n");
  EXPECT_EQ(LeftInGroup(group.path() + "/a/b", group.path(), false), 50u);
  group.Write("a/memory.current", "501\n");
  EXPECT_EQ(LeftInGroup(group.path() + "/a/b", group.path(), false), 0u) << "over its limit";
  EXPECT_EQ(LeftInGroup(group.path(), group.path(), false), UINT64_MAX);
}

TEST(MachineMemoryTest, OldGroupsToo) {
  Group group;
  group.Write("a/memory.limit_in_bytes", "9223372036854771712\n");
  group.Write("a/memory.usage_in_bytes", "5\n");
  EXPECT_EQ(LeftInGroup(group.path() + "/a", group.path(), true), UINT64_MAX);
  group.Write("a/memory.limit_in_bytes", "100\n");
  group.Write("a/memory.usage_in_bytes", "70\n");
  group.Write("a/memory.stat", "inactive_file 1\ntotal_inactive_file 20\n");
  EXPECT_EQ(LeftInGroup(group.path() + "/a", group.path(), true), 50u);
}

}  // namespace
}  // namespace cuda_remote
