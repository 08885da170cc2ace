// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/ghost_locks.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <atomic>
#include <filesystem>
#include <protozero/pbf_writer.hpp>
#include <thread>

namespace cuda_remote::checkpoint {
namespace {

using protozero::pbf_writer;

constexpr uint32_t kMagic = 0x54564319, kFiles = 0x56303138, kRemaps = 0x59133954;

std::string Word(uint32_t word) { return std::string(reinterpret_cast<const char*>(&word), sizeof(word)); }
std::string Entry(const std::string& bytes) { return Word(uint32_t(bytes.size())) + bytes; }

std::string File(uint32_t id, const std::string& name) {
  std::string regular, file;
  pbf_writer facts(regular);
  facts.add_uint32(1, id);
  facts.add_string(6, name);
  pbf_writer entry(file);
  entry.add_uint32(1, 1);
  entry.add_uint32(2, id);
  entry.add_message(3, regular);
  return Entry(file);
}

std::string Remap(uint32_t file, uint32_t type) {
  std::string bytes;
  pbf_writer remap(bytes);
  remap.add_uint32(1, file);
  remap.add_uint32(2, 1);
  remap.add_uint32(3, type);
  return Entry(bytes);
}

TEST(GhostsIn, NamesDeletedFilesOnly) {
  const std::string files =
      Word(kMagic) + Word(kFiles) + File(1, "/dev/shm/a") + File(2, "/dev/shm/b") + File(3, "/tmp/c");
  const std::string remaps = Word(kMagic) + Word(kRemaps) + Remap(1, 1) + Remap(2, 0) + Remap(3, 1) + Remap(9, 1);
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
