// SPDX-License-Identifier: Apache-2.0
#include "client/memory/transfers.h"

#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <functional>
#include <string>

#include "gtest/gtest.h"
#include "proto/base/clock.h"

namespace cuda_remote::client {
namespace {

using Runs = RecentPages::Runs;

// Closes what `open` returns; false if it could not be opened.
bool PossibleWith(const std::function<int()>& open, bool* possible) {
  const int fd = open();
  if (fd < 0) return false;
  *possible = TransfersPossible();
  close(fd);
  return true;
}

TEST(TransfersTest, WhatProgramsHaveOpen) {
  bool possible = false;
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  for (const auto& open_one : std::initializer_list<std::function<int()>>{
           [] { return open("/dev/null", O_RDWR); },
           [] { return open("/dev/urandom", O_RDONLY); },
           [] { return open("/proc/self/exe", O_RDONLY); },
           [] { return memfd_create("file", 0); },
           [] { return eventfd(0, 0); },
           [] { return epoll_create1(0); },
           [] { return socket(AF_INET, SOCK_STREAM, 0); },
           [] { return socket(AF_UNIX, SOCK_DGRAM, 0); },
       }) {
    ASSERT_TRUE(PossibleWith(open_one, &possible));
    EXPECT_FALSE(possible);
  }
  close(ends[0]);
  close(ends[1]);
}

TEST(TransfersTest, FilesThatAreReadDirectly) {
  bool possible = false;
  const std::string path = testing::TempDir() + "/direct";
  if (!PossibleWith([&] { return open(path.c_str(), O_RDWR | O_CREAT | O_DIRECT, 0600); }, &possible)) {
    // A file system without it: the flag is what counts.
    const int fd = open(path.c_str(), O_RDWR | O_CREAT, 0600);
    ASSERT_GE(fd, 0);
    if (fcntl(fd, F_SETFL, O_DIRECT) != 0) GTEST_SKIP() << "no file system with O_DIRECT";
    possible = TransfersPossible();
    close(fd);
  }
  EXPECT_TRUE(possible);
  EXPECT_FALSE(TransfersPossible());
}

TEST(TransfersTest, Rings) {
  bool possible = false;
  if (!PossibleWith(
          [] {
            io_uring_params facts = {};
            return int(syscall(SYS_io_uring_setup, 1, &facts));
          },
          &possible)) {
    GTEST_SKIP() << "there is no io_uring";
  }
  EXPECT_TRUE(possible);
  EXPECT_FALSE(TransfersPossible());
}

TEST(TransfersTest, SocketsOfUnknownFamilies) {
  bool possible = false;
  if (!PossibleWith([] { return socket(AF_PACKET, SOCK_DGRAM, 0); }, &possible)) GTEST_SKIP() << "needs CAP_NET_RAW";
  EXPECT_TRUE(possible);
}

TEST(RecentPagesTest, PagesComeAgainForAWhile) {
  constexpr uint64_t kPage = RecentPages::kPage, kBase = 40 * kPage;
  const auto at = [](uint64_t first, uint64_t last) {
    return std::pair<uint64_t, uint64_t>(kBase + first * kPage, kBase + last * kPage);
  };
  RecentPages recent(kBase, 200 * kPage);
  Moment now = Now();
  EXPECT_EQ(recent.Add({at(3, 5), at(199, 200)}, now), (Runs{at(3, 5), at(199, 200)}));
  now += RecentPages::kKept / 2;
  EXPECT_EQ(recent.Add({at(5, 6), at(63, 65)}, now), (Runs{at(3, 6), at(63, 65), at(199, 200)}));
  // However late somebody looks, it is once more.
  now += 10 * RecentPages::kKept;
  EXPECT_EQ(recent.Add({at(7, 8)}, now), (Runs{at(3, 6), at(7, 8), at(63, 65), at(199, 200)}));
  now += RecentPages::kKept;
  const Runs later = recent.Add({}, now);
  EXPECT_TRUE(std::find(later.begin(), later.end(), at(7, 8)) != later.end());
  now += RecentPages::kKept;
  recent.Add({}, now);
  now += RecentPages::kKept;
  EXPECT_TRUE(recent.Add({}, now).empty());
}

}  // namespace
}  // namespace cuda_remote::client
