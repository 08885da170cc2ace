// SPDX-License-Identifier: Apache-2.0
// With a real CRIU, and with /run replaced by a folder of the test's own, in mount namespaces of the test's own.

#include "checkpoint/engine/criu/criu_facts.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <iterator>
#include <string>

#include "checkpoint/engine/criu/criu.h"

namespace cuda_remote::checkpoint {
namespace {

std::string Contents(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Runs `body` in a process with mounts of its own. False if an expectation failed there.
bool WithOwnMounts(const std::function<void()>& body) {
  fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    EXPECT_EQ(unshare(CLONE_NEWNS), 0);
    EXPECT_EQ(mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr), 0);
    if (!testing::Test::HasFailure()) body();
    fflush(nullptr);
    _exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = -1;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// What a CRIU that starts here says of its file.
bool CriuLoadsFacts(const std::string& criu) {
  FILE* const out = popen((criu + " check -v4 2>&1").c_str(), "r");
  std::string text;
  char line[512];
  while (fgets(line, sizeof(line), out)) text += line;
  pclose(out);
  return text.find("Loaded kdat cache") != std::string::npos;
}

class CriuFactsTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(geteuid(), 0u) << "this test mounts: run it as root";
    const absl::StatusOr<std::string> criu = FindCriu();
    ASSERT_EQ(criu.status(), absl::OkStatus());
    criu_ = *criu;
    // Not in /tmp, which may be a tmpfs.
    char name[] = "/var/tmp/criu-facts-test-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    folder_ = name;
  }
  void TearDown() override { ASSERT_EQ(system(("rm -rf " + folder_).c_str()), 0); }

  std::string criu_, folder_;
};

TEST_F(CriuFactsTest, MadeOnceAndShownInANamespace) {
  EXPECT_TRUE(WithOwnMounts([&] {
    ASSERT_EQ(mount(folder_.c_str(), "/run", nullptr, MS_BIND, nullptr), 0);
    const std::string path = CriuFactsPath(criu_);
    ASSERT_NE(path, "");
    EXPECT_EQ(path.compare(0, 5, "/run/"), 0) << path;
    ShowCriuFacts(path);
    EXPECT_NE(access("/run/criu.kdat", F_OK), 0) << "there is nothing to show yet";
    // Of another boot, say.
    std::ofstream("/run/criu-facts-old") << "old";
    EXPECT_FALSE(CriuLoadsFacts(criu_));
    { const CriuFacts facts; }
    struct stat first, second, place;
    ASSERT_EQ(stat(path.c_str(), &first), 0);
    EXPECT_GT(first.st_size, 0);
    EXPECT_EQ(first.st_mode & 0777, 0600u);
    EXPECT_NE(access("/run/criu-facts-old", F_OK), 0);
    { const CriuFacts facts; }
    ASSERT_EQ(stat(path.c_str(), &second), 0);
    EXPECT_EQ(first.st_ino, second.st_ino);
    EXPECT_TRUE(WithOwnMounts([&] {
      ShowCriuFacts(path);
      EXPECT_EQ(Contents("/run/criu.kdat"), Contents(path));
      EXPECT_TRUE(CriuLoadsFacts(criu_));
      ShowCriuFacts(path);  // once is enough
      EXPECT_EQ(umount("/run/criu.kdat"), 0);
      EXPECT_NE(umount("/run/criu.kdat"), 0);
    }));
    // What is seen outside is no file that a CRIU would take for its own.
    ASSERT_EQ(stat("/run/criu.kdat", &place), 0);
    EXPECT_EQ(place.st_size, 0);
    EXPECT_FALSE(CriuLoadsFacts(criu_));
  }));
}

TEST_F(CriuFactsTest, OthersFilesAreNotShown) {
  EXPECT_TRUE(WithOwnMounts([&] {
    ASSERT_EQ(mount(folder_.c_str(), "/run", nullptr, MS_BIND, nullptr), 0);
    const std::string path = CriuFactsPath(criu_);
    std::ofstream(path) << "from somebody else";
    ASSERT_EQ(chown(path.c_str(), 12345, 12345), 0);
    ShowCriuFacts(path);
    EXPECT_NE(access("/run/criu.kdat", F_OK), 0);
  }));
}

TEST_F(CriuFactsTest, CriuKeepsThemItself) {
  EXPECT_TRUE(WithOwnMounts([&] {
    ASSERT_EQ(mount("tmpfs", "/run", "tmpfs", 0, nullptr), 0);
    EXPECT_EQ(CriuFactsPath(criu_), "");
    { const CriuFacts facts; }
    struct stat first, second;
    ASSERT_EQ(stat("/run/criu.kdat", &first), 0);
    EXPECT_TRUE(CriuLoadsFacts(criu_));
    { const CriuFacts facts; }
    ASSERT_EQ(stat("/run/criu.kdat", &second), 0);
    EXPECT_EQ(first.st_ino, second.st_ino);
  }));
}

}  // namespace
}  // namespace cuda_remote::checkpoint
