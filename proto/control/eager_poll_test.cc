// SPDX-License-Identifier: Apache-2.0
// The epoll_wait that this program brings along: it is the one that libgrpc finds, it finds what there is, and waiting
// for nothing costs next to nothing.

#include "proto/control/eager_poll.h"

#include <dlfcn.h>
#include <errno.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>

#include "proto/base/clock.h"

namespace cuda_remote::control {
namespace {

class EagerPoll : public testing::Test {
 protected:
  void SetUp() override {
    PollEagerly();
    set_ = epoll_create1(EPOLL_CLOEXEC);
    fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = 77;
    ASSERT_EQ(epoll_ctl(set_, EPOLL_CTL_ADD, fd_, &event), 0);
  }
  void TearDown() override {
    close(fd_);
    close(set_);
  }
  void Ring() {
    const uint64_t one = 1;
    ASSERT_EQ(write(fd_, &one, sizeof(one)), ssize_t(sizeof(one)));
  }
  static double ThreadSeconds() { return double(ThreadTimeNs()) * 1e-9; }

  int set_ = -1, fd_ = -1;
  epoll_event event_{};
};

TEST_F(EagerPoll, IsWhatLibrariesFind) {
  ASSERT_FALSE(grpc::Version().empty());  // libgrpc is there
  void* const found = dlsym(RTLD_DEFAULT, "epoll_wait");
  Dl_info where;
  ASSERT_NE(dladdr(found, &where), 0);
  EXPECT_EQ(std::string(where.dli_fname).find("libc.so"), std::string::npos) << where.dli_fname;
}

TEST_F(EagerPoll, FindsWhatIsThereAndWhatComes) {
  EXPECT_EQ(epoll_wait(set_, &event_, 1, 0), 0);
  Ring();
  for (int timeout : {0, 1000, -1}) {
    event_ = epoll_event{};
    ASSERT_EQ(epoll_wait(set_, &event_, 1, timeout), 1);
    EXPECT_EQ(event_.data.u64, 77u);
  }
  uint64_t count;
  ASSERT_EQ(read(fd_, &count, sizeof(count)), ssize_t(sizeof(count)));
  // Soon enough to be met by looking, and so late that the thread sleeps.
  for (int delay_us : {10, 30000}) {
    std::thread other([&] {
      usleep(useconds_t(delay_us));
      Ring();
    });
    ASSERT_EQ(epoll_wait(set_, &event_, 1, -1), 1);
    other.join();
    ASSERT_EQ(read(fd_, &count, sizeof(count)), ssize_t(sizeof(count)));
  }
  EXPECT_EQ(epoll_wait(-1, &event_, 1, 1000), -1);
  EXPECT_EQ(errno, EBADF);
}

TEST_F(EagerPoll, WaitingForNothingCostsNothing) {
  const auto start = Now();
  const double before = ThreadSeconds();
  for (int i = 0; i < 10; ++i) EXPECT_EQ(epoll_wait(set_, &event_, 1, 50), 0);
  EXPECT_GE(Now() - start, std::chrono::milliseconds(490));
  EXPECT_LT(ThreadSeconds() - before, 0.02);
}

}  // namespace
}  // namespace cuda_remote::control
