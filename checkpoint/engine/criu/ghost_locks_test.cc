// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/ghost_locks.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <atomic>
#include <filesystem>
#include <thread>

#include "checkpoint/engine/criu/testing/files_image.h"

namespace cuda_remote::checkpoint {
namespace {

void Add(std::string* image, uint32_t id, const std::string& name) {
  std::string facts;
  protozero::pbf_writer regular(facts);
  regular.add_uint32(1, id);
  regular.add_string(6, name);
  AddFile(image, 1, 3, facts);
}

TEST(GhostsIn, NamesDeletedFilesOnly) {
  std::string files = EmptyFilesImage(), remaps = EmptyRemapsImage();
  Add(&files, 1, "/dev/shm/a");
  Add(&files, 2, "/dev/shm/b");
  Add(&files, 3, "/tmp/c");
  AddRemap(&remaps, 1, 1, kGhostRemap);
  AddRemap(&remaps, 2, 3, kLinkedRemap);
  AddRemap(&remaps, 3, 2, kGhostRemap);
  AddRemap(&remaps, 9, 3, kGhostRemap);
  EXPECT_EQ(GhostsIn(files, remaps), (std::vector<std::string>{"/dev/shm/a", "/tmp/c"}));
  EXPECT_TRUE(GhostsIn(files, "").empty());
  EXPECT_TRUE(GhostsIn("nothing", "nothing").empty());
}

class GhostLocksTest : public testing::Test {
 protected:
  GhostLocksTest() {
    char name[] = "/tmp/ghost-locks-XXXXXX";
    top_ = mkdtemp(name);
  }
  ~GhostLocksTest() override { std::filesystem::remove_all(top_); }
  std::string Folder() const { return top_ + "/locks"; }

  std::string top_;
};

TEST_F(GhostLocksTest, RestoresOfTheSameNameWaitForEachOther) {
  GhostLocks first(Folder()), second(Folder());
  ASSERT_EQ(first.Take({top_ + "/a", top_ + "/b"}, nullptr), absl::OkStatus());
  std::atomic<int> asked{0};
  std::atomic<bool> taken{false};
  absl::Status status;
  std::thread other([&] {
    const auto count = [&] { return ++asked < 0; };
    status = second.Take({top_ + "/b", top_ + "/c"}, count);
    taken = status.ok();
  });
  while (asked < 3) std::this_thread::yield();
  EXPECT_FALSE(taken);
  first.Release();
  other.join();
  EXPECT_TRUE(taken) << status.message();
}

TEST_F(GhostLocksTest, AWaitCanBeCancelled) {
  GhostLocks first(Folder()), second(Folder());
  ASSERT_EQ(first.Take({top_ + "/a"}, nullptr), absl::OkStatus());
  EXPECT_EQ(second.Take({top_ + "/a"}, [] { return true; }), absl::CancelledError("interrupted"));
}

TEST_F(GhostLocksTest, WithoutGhostsThereIsNoLock) {
  GhostLocks locks(Folder());
  ASSERT_EQ(locks.Take({}, nullptr), absl::OkStatus());
  EXPECT_FALSE(std::filesystem::exists(Folder()));
}

}  // namespace
}  // namespace cuda_remote::checkpoint
