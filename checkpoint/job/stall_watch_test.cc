// SPDX-License-Identifier: Apache-2.0
// Processes that are stopped, that wait, and that work.

#include "checkpoint/job/stall_watch.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

namespace cuda_remote::checkpoint {
namespace {

constexpr int64_t kNever = int64_t{1} << 40;

class StallWatchTest : public testing::Test {
 protected:
  ~StallWatchTest() override {
    if (child_ <= 0) return;
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }

  void Start(const std::function<void()>& body) {
    child_ = fork();
    if (child_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    body();
    _exit(0);
  }

  static void Sleep() {
    for (;;) pause();
  }

  void Stop() {
    int status = 0;
    EXPECT_EQ(kill(child_, SIGSTOP), 0);
    EXPECT_EQ(waitpid(child_, &status, WUNTRACED), child_);
  }

  pid_t child_ = 0;
};

TEST_F(StallWatchTest, SeesThatAProcessIsStopped) {
  Start(Sleep);
  Stop();
  StallWatch watch(child_);
  EXPECT_FALSE(watch.IsStalled({kNever, 0}));
  while (!watch.IsStalled({50, kNever})) usleep(1000);
}

TEST_F(StallWatchTest, SeesThatOneBelowItIsStopped) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  Start([&] {
    const pid_t below = fork();
    if (below == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      Sleep();
    }
    kill(below, SIGSTOP);
    int status = 0;
    waitpid(below, &status, WUNTRACED);
    const ssize_t ignored = write(ready[1], "x", 1);
    static_cast<void>(ignored);
    Sleep();
  });
  char byte;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  StallWatch watch(child_);
  while (!watch.IsStalled({50, kNever})) usleep(1000);
  close(ready[0]);
  close(ready[1]);
}

TEST_F(StallWatchTest, AProcessThatWaitsIsIdleAndNotStopped) {
  Start(Sleep);
  StallWatch watch(child_);
  watch.IsStalled();
  EXPECT_FALSE(watch.IsStalled({0, kNever}));
  while (!watch.IsStalled({kNever, 50})) usleep(1000);
}

// However slow this machine is: only what is done counts.
TEST_F(StallWatchTest, WorkIsProgress) {
  int go[2], done[2];
  ASSERT_EQ(pipe(go), 0);
  ASSERT_EQ(pipe(done), 0);
  Start([&] {
    char byte;
    while (read(go[0], &byte, 1) == 1 && write(done[1], &byte, 1) == 1) {
    }
  });
  StallWatch watch(child_);
  for (int i = 0; i < 5; ++i) {
    while (!watch.IsStalled({kNever, 20})) usleep(1000);
    char byte = 'x';
    ASSERT_EQ(write(go[1], &byte, 1), 1);
    ASSERT_EQ(read(done[0], &byte, 1), 1);
    EXPECT_FALSE(watch.IsStalled({kNever, 20}));
  }
  uint64_t elsewhere = 1;
  StallWatch with_more(child_, [&] { return elsewhere; });
  while (!with_more.IsStalled({kNever, 20})) usleep(1000);
  ++elsewhere;
  EXPECT_FALSE(with_more.IsStalled({kNever, 20}));
  for (const int fd : {go[0], go[1], done[0], done[1]}) close(fd);
}

TEST_F(StallWatchTest, AStoppedProcessIsEnded) {
  Start(Sleep);
  Stop();
  const int status = ReapWithoutStall(child_, {50, kNever});
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  Start([] { _exit(7); });
  EXPECT_EQ(WEXITSTATUS(ReapWithoutStall(child_)), 7);
  child_ = 0;
}

}  // namespace
}  // namespace cuda_remote::checkpoint
