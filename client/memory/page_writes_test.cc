// SPDX-License-Identifier: Apache-2.0
#include "client/memory/page_writes.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/io_uring.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace cuda_remote::client {
namespace {

constexpr uint64_t kPage = PageWrites::kPage, kPages = 300;

using Runs = std::vector<std::pair<uint64_t, uint64_t>>;

std::set<uint64_t> PagesOf(const Runs& runs, uint64_t base) {
  std::set<uint64_t> pages;
  for (const auto& [begin, end] : runs) {
    for (uint64_t at = begin; at < end; at += kPage) pages.insert((at - base) / kPage);
  }
  return pages;
}

bool KernelCan() {
  utsname name;
  int major = 0, minor = 0;
  if (uname(&name) != 0 || sscanf(name.release, "%d.%d", &major, &minor) != 2) return false;
  constexpr int kUserModeOnly = 1;
  const int fd = int(syscall(SYS_userfaultfd, O_CLOEXEC | kUserModeOnly));
  if (fd >= 0) close(fd);
  return fd >= 0 && (major > 6 || (major == 6 && minor >= 7));
}

// Private anonymous memory, and a file in memory that is mapped shared.
class PageWritesTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (!KernelCan()) {
      EXPECT_FALSE(writes_.Watch(0x10000, kPage));
      GTEST_SKIP() << "needs Linux 6.7, and leave to use userfaultfd";
    }
    if (GetParam()) {
      file_ = memfd_create("test", MFD_CLOEXEC);
      ASSERT_EQ(ftruncate(file_, kPages * kPage), 0);
    }
    memory_ = static_cast<char*>(mmap(nullptr, kPages * kPage, PROT_READ | PROT_WRITE,
                                      GetParam() ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, file_, 0));
    ASSERT_NE(memory_, MAP_FAILED);
    ASSERT_TRUE(writes_.Watch(base(), kPages * kPage));
  }
  void TearDown() override {
    munmap(memory_, kPages * kPage);
    if (file_ >= 0) close(file_);
  }
  uint64_t base() const { return reinterpret_cast<uint64_t>(memory_); }
  std::set<uint64_t> Collect() {
    Runs runs;
    EXPECT_TRUE(writes_.Collect(base(), kPages * kPage, &runs));
    return PagesOf(runs, base());
  }

  int file_ = -1;
  char* memory_ = nullptr;
  PageWrites writes_;
};

TEST_P(PageWritesTest, WritesOfProgramAndKernel) {
  EXPECT_TRUE(Collect().empty());
  memory_[0] = 1;
  memory_[7 * kPage + 5] = 1;
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  ASSERT_EQ(write(ends[1], "abc", 3), 3);
  ASSERT_EQ(read(ends[0], memory_ + 9 * kPage - 1, 3), 3);
  close(ends[0]);
  close(ends[1]);
  EXPECT_EQ(Collect(), (std::set<uint64_t>{0, 7, 8, 9}));
  EXPECT_TRUE(Collect().empty());
  memory_[7 * kPage + 5] = 2;
  EXPECT_EQ(Collect(), std::set<uint64_t>{7});
}

TEST_P(PageWritesTest, EveryWriteIsSeen) {
  std::mt19937 numbers(1);
  for (int round = 0; round < 50; ++round) {
    std::set<uint64_t> written;
    for (int i = 0; i < 40; ++i) {
      const uint64_t page = numbers() % kPages;
      ++memory_[page * kPage + numbers() % kPage];
      written.insert(page);
    }
    const std::set<uint64_t> seen = Collect();
    for (const uint64_t page : written) EXPECT_TRUE(seen.count(page)) << page << " in round " << round;
  }
}

// What a thread writes while another one looks is seen then or the next time.
TEST_P(PageWritesTest, WritesMeanwhile) {
  std::vector<char> known(kPages);
  std::thread writer([this] {
    for (int i = 1; i < 100; ++i) {
      for (uint64_t page = 0; page < kPages; page += 3) memory_[page * kPage] = char(i);
    }
  });
  for (int i = 0; i < 200; ++i) {
    for (const uint64_t page : Collect()) known[page] = *static_cast<volatile char*>(memory_ + page * kPage);
  }
  writer.join();
  for (const uint64_t page : Collect()) known[page] = memory_[page * kPage];
  for (uint64_t page = 0; page < kPages; page += 3) EXPECT_EQ(known[page], 99) << page;
}

TEST_P(PageWritesTest, OtherMemoryInItsPlace) {
  ASSERT_EQ(mmap(memory_ + kPage, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0),
            memory_ + kPage);
  Runs runs;
  EXPECT_FALSE(writes_.Collect(base(), kPages * kPage, &runs));
}

TEST_P(PageWritesTest, ClosedAndAgain) {
  writes_.Close();
  memory_[0] = 1;
  Runs runs;
  EXPECT_FALSE(writes_.Collect(base(), kPages * kPage, &runs));
  ASSERT_TRUE(writes_.Watch(base(), kPages * kPage));
  EXPECT_TRUE(Collect().empty());
  memory_[kPage] = 1;
  EXPECT_EQ(Collect(), std::set<uint64_t>{1});
}

// Why memory must not be watched into which a transfer may be on its way: the kernel has looked up its pages when it
// began, and what comes later is not reported. Here that is a read into a registered buffer of an io_uring.
TEST_P(PageWritesTest, TransfersAreNotReportedWhenTheyEnd) {
  io_uring_params facts = {};
  const int ring = int(syscall(SYS_io_uring_setup, 1, &facts));
  if (ring < 0) GTEST_SKIP() << "there is no io_uring";
  iovec buffer = {memory_, kPages * kPage};
  ASSERT_EQ(syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &buffer, 1), 0);
  EXPECT_EQ(Collect().size(), kPages);
  EXPECT_TRUE(Collect().empty());

  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  ASSERT_EQ(write(ends[1], "late", 4), 4);
  void* const queue = mmap(nullptr, facts.sq_off.array + sizeof(unsigned), PROT_READ | PROT_WRITE, MAP_SHARED, ring,
                           IORING_OFF_SQ_RING);
  void* const entries = mmap(nullptr, sizeof(io_uring_sqe), PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
  ASSERT_TRUE(queue != MAP_FAILED && entries != MAP_FAILED);
  io_uring_sqe& entry = *static_cast<io_uring_sqe*>(entries);
  entry = {};
  entry.opcode = IORING_OP_READ_FIXED;
  entry.fd = ends[0];
  entry.off = ~uint64_t{0};
  entry.addr = base() + 5 * kPage;
  entry.len = 4;
  __atomic_store_n(reinterpret_cast<unsigned*>(static_cast<char*>(queue) + facts.sq_off.tail), 1, __ATOMIC_RELEASE);
  ASSERT_EQ(syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, nullptr, 0), 1);
  EXPECT_EQ(memcmp(memory_ + 5 * kPage, "late", 4), 0);
  EXPECT_TRUE(Collect().empty());

  munmap(queue, facts.sq_off.array + sizeof(unsigned));
  munmap(entries, sizeof(io_uring_sqe));
  for (const int fd : {ends[0], ends[1], ring}) close(fd);
}

// A child's memory is not watched, and its descriptors of the same numbers are its own.
TEST_P(PageWritesTest, ChildByFork) {
  const pid_t child = fork();
  if (child == 0) {
    const int file = open("/dev/null", O_RDONLY);
    Runs runs;
    bool ok = !writes_.Collect(base(), kPages * kPage, &runs) && !writes_.Watch(base(), kPages * kPage);
    writes_.Unwatch(base(), kPages * kPage);
    writes_.Close();
    ok = ok && fcntl(file, F_GETFD) >= 0;
    memory_[3 * kPage] = 9;
    _exit(ok ? 0 : 1);
  }
  int status = 1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  // The parent goes on, with pages that the two shared until now.
  memory_[kPage] = 1;
  EXPECT_EQ(Collect(), std::set<uint64_t>{1});
  EXPECT_EQ(memory_[3 * kPage], GetParam() ? 9 : 0);
}

INSTANTIATE_TEST_SUITE_P(Kinds, PageWritesTest, testing::Bool());

}  // namespace
}  // namespace cuda_remote::client
