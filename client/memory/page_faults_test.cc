// SPDX-License-Identifier: Apache-2.0
#include "client/memory/page_faults.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "proto/base/proc.h"

namespace cuda_remote::client {
namespace {

constexpr uint64_t kPage = PageFaults::kPage, kPages = 16;

// A mapping that is watched, with a thread that gives what is asked for. Needs root, as the tests of snapshots do.
class PageFaultsTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(PageFaults::Supported());
    file_ = memfd_create("test", MFD_CLOEXEC);
    ASSERT_EQ(ftruncate(file_, kPages * kPage), 0);
    memory_ = static_cast<char*>(mmap(nullptr, kPages * kPage, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0));
    for (uint64_t page = 0; page < kPages; page += 2) memory_[page * kPage] = char(page + 1);
    ASSERT_TRUE(faults_.Open());
    ASSERT_TRUE(faults_.Register(Address(0), kPages * kPage));
    PageFaults::Unmap(Address(0), kPages * kPage);
    server_ = std::thread([this] {
      PageFaults::Fault fault;
      while (faults_.Next(&fault)) {
        log_.push_back(fault);
        if (fault.protect) {
          faults_.Unprotect(fault.page, kPage);
          continue;
        }
        // A page that the file does not have cannot be mapped.
        if (faults_.Map(fault.page, kPage, true)) continue;
        ++holes_;
        ASSERT_EQ(fallocate(file_, FALLOC_FL_KEEP_SIZE, off_t(fault.page - Address(0)), kPage), 0);
        ASSERT_TRUE(faults_.Map(fault.page, kPage, true));
      }
    });
  }
  void TearDown() override {
    Stop();
    munmap(memory_, kPages * kPage);
    close(file_);
  }
  void Stop() {
    if (!server_.joinable()) return;
    faults_.Interrupt();
    server_.join();
    faults_.Unregister(Address(0), kPages * kPage);
    faults_.Close();
  }
  uint64_t Address(uint64_t page) const { return reinterpret_cast<uint64_t>(memory_) + page * kPage; }

  PageFaults faults_;
  std::thread server_;
  std::vector<PageFaults::Fault> log_;
  int holes_ = 0;
  int file_ = -1;
  char* memory_ = nullptr;
};

TEST_F(PageFaultsTest, AccessesAndWritesAreReportedOnceEach) {
  volatile char* const memory = memory_;
  EXPECT_EQ(memory[2 * kPage], 3);
  EXPECT_EQ(memory[2 * kPage + 5], 0);
  EXPECT_EQ(memory[3 * kPage], 0);  // the file does not have it
  memory[2 * kPage] = 9;
  memory[2 * kPage + 1] = 9;
  Stop();
  ASSERT_EQ(log_.size(), 3u);
  EXPECT_EQ(holes_, 1);
  EXPECT_EQ(log_[0].page, Address(2));
  EXPECT_FALSE(log_[0].protect || log_[0].is_write);
  EXPECT_EQ(log_[1].page, Address(3));
  EXPECT_EQ(log_[2].page, Address(2));
  EXPECT_TRUE(log_[2].protect && log_[2].is_write);
  // Ordinary memory again.
  EXPECT_EQ(memory[2 * kPage], 9);
  memory[8 * kPage] = 4;
}

TEST_F(PageFaultsTest, SystemCallsWaitLikeTheProgram) {
  int both[2];
  ASSERT_EQ(pipe(both), 0);
  ASSERT_EQ(write(both[1], memory_ + 4 * kPage, 2 * kPage), ssize_t(2 * kPage));
  ASSERT_EQ(read(both[0], memory_ + 6 * kPage + 100, 2 * kPage), ssize_t(2 * kPage));
  volatile char* const memory = memory_;
  EXPECT_EQ(memory[6 * kPage + 100], 5);
  close(both[0]);
  close(both[1]);
}

TEST_F(PageFaultsTest, WhatIsMappedAlreadyStays) {
  volatile char* const memory = memory_;
  memory[kPage] = 7;
  // Mapped and written; the others are not there yet.
  ASSERT_EQ(fallocate(file_, FALLOC_FL_KEEP_SIZE, 0, kPages * kPage), 0);
  EXPECT_TRUE(faults_.Map(Address(0), kPages * kPage, false));
  const size_t before = log_.size();
  memory[kPage] = 8;
  memory[4 * kPage] = 8;
  EXPECT_EQ(log_.size(), before);
}

bool HasUserfaultfd() {
  for (int fd = 0; fd < 100; ++fd) {
    if (ReadLink("/proc/self/fd/" + std::to_string(fd)).find("userfaultfd") != std::string::npos) return true;
  }
  return false;
}

// It would keep the pages watched when the parent has ended that, and CRIU could not dump the child.
TEST_F(PageFaultsTest, AChildDoesNotKeepItOpen) {
  EXPECT_TRUE(HasUserfaultfd());
  const pid_t child = fork();
  if (child == 0) _exit(HasUserfaultfd() ? 1 : 0);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  Stop();
  EXPECT_FALSE(HasUserfaultfd());
}

// Of an ordinary user: whether it does what page_faults.h says; else the number of what does not.
int TriesProgramsOwn() {
  if (setgid(65534) != 0 || setuid(65534) != 0) return 1;
  if (PageFaults::Supported() || !PageFaults::Supported(nullptr, PageFaults::Accesses::kProgram)) return 2;
  const int file = memfd_create("test", MFD_CLOEXEC);
  if (ftruncate(file, 2 * kPage) != 0) return 3;
  char* const memory = static_cast<char*>(mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  memory[0] = memory[kPage] = 7;
  PageFaults faults(nullptr, PageFaults::Accesses::kProgram);
  const uint64_t address = reinterpret_cast<uint64_t>(memory);
  if (!faults.Open() || !faults.Register(address, 2 * kPage)) return 4;
  PageFaults::Unmap(address, 2 * kPage);
  int reports = 0;
  std::thread server([&] {
    for (PageFaults::Fault fault; faults.Next(&fault); ++reports) {
      if (fault.protect) {
        faults.Unprotect(fault.page, kPage);
      } else {
        faults.Map(fault.page, kPage, true);
      }
    }
  });
  int both[2], code = 0;
  volatile char* const program = memory;
  if (program[0] != 7) code = 5;
  if (pipe(both) != 0 || write(both[1], "abcd", 4) != 4) code = 6;
  // Neither into a page that is protected, nor out of one that is not there; and nothing is lost.
  if (read(both[0], memory, 4) != -1 || errno != EFAULT) code = 7;
  if (write(both[1], memory + kPage, 4) != -1 || errno != EFAULT) code = 8;
  program[0] = 8;
  if (read(both[0], memory, 4) != 4 || memcmp(memory, "abcd", 4) != 0) code = 9;
  faults.Interrupt();
  server.join();
  return code != 0 ? code : reports == 2 ? 0 : 10;
}

TEST(PageFaultsOfUserTest, TheProgramsOwnAccessesAreReportedWithoutAnyRights) {
  const pid_t child = fork();
  if (child == 0) _exit(TriesProgramsOwn());
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "step " << WEXITSTATUS(status) << "; 2: vm.unprivileged_userfaultfd must be 0";
}

}  // namespace
}  // namespace cuda_remote::client
