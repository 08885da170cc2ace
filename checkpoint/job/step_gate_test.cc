// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/step_gate.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::checkpoint {
namespace {

std::atomic<int> g_signals{0};

// A tool's gate, with the test in the place of cr-hostd. An answer may be there before the tool asks.
class HostdGateTest : public testing::Test {
 protected:
  void SetUp() override {
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    gate_ = std::make_unique<HostdGate>(ends[0]);
    hostd_.Reset(ends[1]);
  }

  // The step that the tool has announced.
  Step Announced() {
    char bytes[64];
    const ssize_t got = recv(hostd_.get(), bytes, sizeof(bytes), 0);
    StepAnnouncement announced;
    EXPECT_TRUE(got > 0 && announced.ParseFromArray(bytes, int(got)));
    return announced.step();
  }
  void Send(const std::string& bytes) {
    EXPECT_EQ(send(hostd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), ssize_t(bytes.size()));
  }
  void Answer(bool done, const std::string& text, bool interrupted = false) {
    StepAnswer answer;
    answer.set_done(done);
    answer.set_text(text);
    answer.set_interrupted(interrupted);
    Send(answer.SerializeAsString());
  }
  std::string Passed(Step step) {
    const absl::StatusOr<std::string> answer = gate_->Pass(step);
    return answer.ok() ? *answer : answer.status().ToString();
  }
  void ExpectGone() { EXPECT_TRUE(absl::IsUnavailable(gate_->Pass(JOB_STILL).status())); }

  std::unique_ptr<HostdGate> gate_;
  UniqueFd hostd_;
};

TEST_F(HostdGateTest, EachStepHasItsAnswer) {
  // A path may have any bytes, and a long text comes as a whole.
  const std::string image = "/data/\xff\xfe/" + std::string(50000, 'x');
  Answer(true, image);
  Answer(true, "");
  EXPECT_EQ(Passed(IMAGE_BEGINS), image);
  EXPECT_EQ(Passed(IMAGE_COMPLETE), "");
  EXPECT_EQ(Announced(), IMAGE_BEGINS);
  EXPECT_EQ(Announced(), IMAGE_COMPLETE);
}

TEST_F(HostdGateTest, AnInterruptionIsNoFailure) {
  Answer(false, "interrupted", true);
  EXPECT_EQ(gate_->Pass(IMAGE_BEGINS).status(), absl::CancelledError("interrupted"));
}

TEST_F(HostdGateTest, ARefusalSaysWhy) {
  Answer(false, "the disk is full");
  EXPECT_EQ(gate_->Pass(IMAGE_COMPLETE).status(), absl::FailedPreconditionError("the disk is full"));
  Answer(false, "");
  ExpectGone();
}

TEST_F(HostdGateTest, WhatIsNoAnswerIsNone) {
  for (const char* bytes : {"+", "\xff\xff\xff", "\x12\x7fshort"}) {
    Send(bytes);
    ExpectGone();
  }
  Answer(true, "");
  EXPECT_TRUE(gate_->Pass(JOB_DUMPED).ok());
}

TEST_F(HostdGateTest, HostdHasEnded) {
  hostd_.Close();
  ExpectGone();
  ExpectGone();
}

TEST_F(HostdGateTest, HostdEndsBeforeItAnswers) {
  std::thread hostd([this] {
    EXPECT_EQ(Announced(), JOB_STILL);
    hostd_.Close();
  });
  ExpectGone();
  hostd.join();
}

TEST_F(HostdGateTest, ASignalDoesNotEndTheWait) {
  struct sigaction action = {};
  action.sa_handler = [](int) { ++g_signals; };
  ASSERT_EQ(sigaction(SIGUSR1, &action, nullptr), 0);
  std::thread hostd([this, tool = pthread_self()] {
    EXPECT_EQ(Announced(), JOB_READY);
    for (int i = 0; i < 20; ++i) {
      pthread_kill(tool, SIGUSR1);
      usleep(2000);
    }
    Answer(true, "go");
  });
  EXPECT_EQ(Passed(JOB_READY), "go");
  hostd.join();
  EXPECT_GT(g_signals, 0);
}

TEST_F(HostdGateTest, WithoutASocketAllStepsPass) {
  gate_ = std::make_unique<HostdGate>(-1);
  EXPECT_EQ(Passed(IMAGE_BEGINS), "");
  EXPECT_EQ(Passed(IMAGE_USED), "");
}

}  // namespace
}  // namespace cuda_remote::checkpoint
