// SPDX-License-Identifier: Apache-2.0
#include "client/memory/shared_pages.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace cuda_remote::client {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kBytes = 64 * kPage;

// Private memory, and a file that it can be moved into, with the window that the server would see.
class SharedPagesTest : public testing::Test {
 protected:
  void SetUp() override {
    fd_ = memfd_create("shared_pages_test", MFD_CLOEXEC);
    ASSERT_GE(fd_, 0);
    ASSERT_EQ(ftruncate(fd_, kBytes), 0);
    window_ = static_cast<char*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0));
    ASSERT_NE(window_, MAP_FAILED);
    pages_ = static_cast<char*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    ASSERT_NE(pages_, MAP_FAILED);
  }
  void TearDown() override {
    munmap(pages_, kBytes);
    munmap(window_, kBytes);
    close(fd_);
  }
  uint64_t start() const { return reinterpret_cast<uint64_t>(pages_); }
  bool Move() { return MovePages(start(), kBytes, true, fd_, 0, window_); }
  bool MoveBack() { return MovePagesBack(start(), kBytes); }

  int fd_ = -1;
  char* window_ = nullptr;
  char* pages_ = nullptr;
};

TEST_F(SharedPagesTest, BothSidesSeeEachOthersWrites) {
  for (uint64_t i = 0; i < kBytes; ++i) pages_[i] = char(i * 7);
  ASSERT_TRUE(Move()) << "this test needs userfaultfd with faults of the kernel (root, or vm.unprivileged_userfaultfd)";
  for (uint64_t i = 0; i < kBytes; ++i) ASSERT_EQ(window_[i], char(i * 7)) << i;
  pages_[5] = 'a';
  EXPECT_EQ(window_[5], 'a');
  window_[kPage + 1] = 'b';
  EXPECT_EQ(pages_[kPage + 1], 'b');
  ASSERT_TRUE(MoveBack());
  EXPECT_EQ(pages_[5], 'a');
  EXPECT_EQ(pages_[kPage + 1], 'b');
  pages_[5] = 'c';
  EXPECT_EQ(window_[5], 'a') << "still shared";
  EXPECT_FALSE(MoveBack()) << "they are not moved";
}

// Threads count in the pages, one by plain stores and one by system calls, while the pages move to and fro: a write
// that went to the old pages would be missing.
TEST_F(SharedPagesTest, NoWriteIsLost) {
  std::atomic<bool> stop{false};
  auto* const counters = reinterpret_cast<volatile uint64_t*>(pages_);
  uint64_t expected[3] = {};
  std::vector<std::thread> writers;
  for (int which = 0; which < 2; ++which) {
    writers.emplace_back([&, which] {
      while (!stop.load(std::memory_order_relaxed)) {
        // Another page each time, in each of which a counter of this thread's.
        const uint64_t page = expected[which]++ % (kBytes / kPage);
        volatile uint64_t& counter = counters[page * (kPage / 8) + which];
        counter = counter + 1;
      }
    });
  }
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  writers.emplace_back([&] {
    for (uint64_t n = 1; !stop.load(std::memory_order_relaxed); ++n) {
      ASSERT_EQ(write(pipes[1], &n, sizeof n), ssize_t(sizeof n));
      ASSERT_EQ(read(pipes[0], pages_ + kBytes - 8, sizeof n), ssize_t(sizeof n)) << strerror(errno);
      uint64_t now;
      memcpy(&now, pages_ + kBytes - 8, sizeof now);
      ASSERT_EQ(now, n);
      expected[2] = n;
    }
  });
  for (int round = 0; round < 200; ++round) {
    EXPECT_TRUE(Move());
    EXPECT_TRUE(MoveBack());
  }
  stop = true;
  for (std::thread& writer : writers) writer.join();
  for (int which = 0; which < 2; ++which) {
    uint64_t sum = 0;
    for (uint64_t page = 0; page < kBytes / kPage; ++page) sum += counters[page * (kPage / 8) + which];
    EXPECT_EQ(sum, expected[which]);
    EXPECT_GT(sum, 0u);
  }
  EXPECT_GT(expected[2], 0u);
  close(pipes[0]);
  close(pipes[1]);
}

TEST_F(SharedPagesTest, ForkedChildHasItsOwn) {
  strcpy(pages_, "parent");
  ASSERT_TRUE(Move());
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  const pid_t child = fork();
  if (child == 0) {
    char go;
    if (read(pipes[0], &go, 1) != 1) _exit(2);
    const bool right = strcmp(pages_, "parent") == 0;
    strcpy(pages_, "child");
    _exit(right ? 0 : 1);
  }
  strcpy(pages_, "later");
  ASSERT_EQ(write(pipes[1], "x", 1), 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_STREQ(pages_, "later");
  EXPECT_STREQ(window_, "later");
  EXPECT_TRUE(MoveBack());
  close(pipes[0]);
  close(pipes[1]);
}

// What is behind all of it, if it is of one kind.
PageBacking::Kind KindOf(uint64_t start, uint64_t bytes, int moved = -1) {
  const std::vector<PageBacking> found = FindBacking(start, bytes, moved);
  if (found.size() != 1) return PageBacking::kOther;
  EXPECT_EQ(found[0].start, start);
  EXPECT_EQ(found[0].bytes, bytes);
  return found[0].kind;
}

TEST_F(SharedPagesTest, TellsWhatIsBehindPages) {
  EXPECT_EQ(KindOf(start(), kBytes), PageBacking::kPrivate);
  EXPECT_EQ(KindOf(start() + kPage, kPage), PageBacking::kPrivate);

  const auto window = reinterpret_cast<uint64_t>(window_);
  const std::vector<PageBacking> file = FindBacking(window + 2 * kPage, 3 * kPage, -1);
  ASSERT_EQ(file.size(), 1u);
  ASSERT_EQ(file[0].kind, PageBacking::kFile);
  EXPECT_EQ(file[0].offset, 2 * kPage);
  window_[2 * kPage] = 'w';
  char byte = 0;
  EXPECT_EQ(pread(file[0].fd.get(), &byte, 1, off_t(file[0].offset)), 1);
  EXPECT_EQ(byte, 'w');
  EXPECT_EQ(KindOf(window, kPage, fd_), PageBacking::kMoved);

  // Beyond its end, of two kinds, read only, a stack's.
  munmap(pages_ + kBytes - kPage, kPage);
  EXPECT_TRUE(FindBacking(start(), kBytes, -1).empty());
  ASSERT_NE(mmap(pages_ + kPage, kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_, 0), MAP_FAILED);
  const std::vector<PageBacking> two = FindBacking(start(), 2 * kPage, -1);
  ASSERT_EQ(two.size(), 2u);
  EXPECT_EQ(two[0].kind, PageBacking::kPrivate);
  EXPECT_EQ(two[1].kind, PageBacking::kFile);
  EXPECT_EQ(two[1].start, start() + kPage);
  ASSERT_EQ(mprotect(pages_, kPage, PROT_READ), 0);
  EXPECT_FALSE(FindBacking(start(), kPage, -1)[0].writable);
  char here;
  EXPECT_EQ(KindOf(reinterpret_cast<uint64_t>(&here) / kPage * kPage, kPage), PageBacking::kOther);
  // Pieces of one file that do not follow one another in it.
  ASSERT_NE(mmap(pages_, kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_, kPage), MAP_FAILED);
  EXPECT_EQ(FindBacking(start(), 2 * kPage, -1).size(), 2u);
}

// Two registrations share a page: what one of them needs stays while the other's goes back.
TEST_F(SharedPagesTest, PartsGoBack) {
  strcpy(pages_ + 3 * kPage, "stays");
  strcpy(pages_, "goes");
  ASSERT_TRUE(Move());
  ASSERT_TRUE(MovePagesBack(start(), 3 * kPage));
  ASSERT_TRUE(MovePagesBack(start() + 4 * kPage, kBytes - 4 * kPage));
  pages_[0] = 'G';
  pages_[3 * kPage] = 'S';
  EXPECT_STREQ(window_, "goes");
  EXPECT_STREQ(window_ + 3 * kPage, "Stays");
  EXPECT_EQ(KindOf(start() + 3 * kPage, kPage, fd_), PageBacking::kMoved);
  EXPECT_FALSE(MovePagesBack(start(), kPage));
  EXPECT_TRUE(MovePagesBack(start() + 3 * kPage, kPage));
  EXPECT_STREQ(pages_ + 3 * kPage, "Stays");
}

TEST_F(SharedPagesTest, WhatIsReadOnlyStaysSo) {
  strcpy(pages_, "read only");
  ASSERT_EQ(mprotect(pages_, kBytes, PROT_READ), 0);
  ASSERT_TRUE(MovePages(start(), kBytes, false, fd_, 0, window_));
  EXPECT_STREQ(pages_, "read only");
  EXPECT_STREQ(window_, "read only");
  EXPECT_FALSE(FindBacking(start(), kBytes, -1)[0].writable);
  ASSERT_TRUE(MoveBack());
  EXPECT_EQ(KindOf(start(), kBytes), PageBacking::kPrivate);
  EXPECT_FALSE(FindBacking(start(), kBytes, -1)[0].writable);
  EXPECT_STREQ(pages_, "read only");
}

uint64_t LockedKilobytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.compare(0, 6, "VmLck:") == 0) return strtoull(line.c_str() + 6, nullptr, 10);
  }
  return 0;
}

TEST_F(SharedPagesTest, LockedPagesStayLocked) {
  ASSERT_EQ(mlock(pages_, kBytes), 0);
  const uint64_t locked = LockedKilobytes();
  ASSERT_GE(locked, kBytes / 1024);
  ASSERT_TRUE(Move());
  EXPECT_EQ(LockedKilobytes(), locked);
  ASSERT_TRUE(MoveBack());
  EXPECT_EQ(LockedKilobytes(), locked);
  ASSERT_EQ(munlock(pages_, kBytes), 0);
  ASSERT_TRUE(Move());
  EXPECT_EQ(LockedKilobytes(), locked - kBytes / 1024);
  ASSERT_TRUE(MoveBack());
}

// The thread that moves pages writes to its stack meanwhile. It would wait for itself.
TEST_F(SharedPagesTest, AThreadDoesNotMoveItsOwnStack) {
  std::thread([this] {
    char local[3 * kPage];
    const uint64_t begin = reinterpret_cast<uint64_t>(local) / kPage * kPage;
    strcpy(local, "on the stack");
    EXPECT_FALSE(MovePages(begin, 4 * kPage, true, fd_, 0, window_));
    EXPECT_STREQ(local, "on the stack");
  }).join();
}

// Shared memory whose name is gone, as NCCL's is once every rank has it.
TEST_F(SharedPagesTest, FilesWithoutANameAreFound) {
  const std::string name = "/dev/shm/shared_pages_test_" + std::to_string(getpid());
  const int fd = open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(ftruncate(fd, kPage), 0);
  void* const mapped = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  close(fd);
  unlink(name.c_str());
  const std::vector<PageBacking> found = FindBacking(reinterpret_cast<uint64_t>(mapped), kPage, -1);
  ASSERT_EQ(found.size(), 1u);
  ASSERT_EQ(found[0].kind, PageBacking::kFile) << "needs CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN";
  strcpy(static_cast<char*>(mapped), "here");
  char there[5] = "";
  EXPECT_EQ(pread(found[0].fd.get(), there, 5, 0), 5);
  EXPECT_STREQ(there, "here");
  munmap(mapped, kPage);
}

// What the write stop cannot hold: memory that somebody else watches.
TEST_F(SharedPagesTest, RefusesWhatItCannotStop) {
  ASSERT_EQ(mprotect(pages_, kPage, PROT_NONE), 0);
  EXPECT_FALSE(Move());
  ASSERT_EQ(mprotect(pages_, kPage, PROT_READ | PROT_WRITE), 0);
  pages_[0] = 1;
  window_[0] = 2;
  EXPECT_EQ(pages_[0], 1);
}

}  // namespace
}  // namespace cuda_remote::client
