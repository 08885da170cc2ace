// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/save_job.h"

#include <errno.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/engine/testing/fake_engine.h"
#include "checkpoint/transaction/testing/fakes.h"

namespace cuda_remote::checkpoint {
namespace {

using testing::HasSubstr;
using testing::Not;

// The steps of a checkpoint, and of a part of one over several hosts.
const std::vector<Step> kOfOne = {IMAGE_BEGINS, IMAGE_COMPLETE};
const std::vector<Step> kOfHosts = {IMAGE_BEGINS, JOB_READY, JOB_LOCKED, JOB_STILL, JOB_DUMPED, IMAGE_COMPLETE};

constexpr char kInside[] = "/proc/self/fd/11", kImage[] = "/data/train.image";

std::string Told(const std::string& message) {
  const absl::Status told = OfImage(absl::ResourceExhaustedError(message), kInside, kImage, uint64_t{3} << 30, "/tmp");
  EXPECT_EQ(told.code(), absl::StatusCode::kResourceExhausted);
  return std::string(told.message());
}

TEST(OfImageTest, AFullDiskNamesTheImageAndTheRoom) {
  for (const int error : {ENOSPC, EDQUOT}) {
    const std::string told = Told(std::string("cannot write ") + kInside + "/pages-1.img: " + strerror(error));
    EXPECT_THAT(told, HasSubstr("cannot write /data/train.image/client/pages-1.img: "));
    EXPECT_THAT(told, Not(HasSubstr("/proc/self/fd")));
    EXPECT_THAT(told, HasSubstr("The image /data/train.image needs up to 3.0 GiB, and /tmp has "));
    EXPECT_THAT(told, HasSubstr(" free"));
  }
}

TEST(OfImageTest, OtherFailuresNameTheImageOnly) {
  EXPECT_EQ(Told(std::string("CRIU: cannot open ") + kInside + ": " + strerror(EACCES)),
            std::string("CRIU: cannot open /data/train.image/client: ") + strerror(EACCES));
  EXPECT_EQ(OfImage(absl::CancelledError("interrupted"), "", kImage, 0, "/tmp"), absl::CancelledError("interrupted"));
}

// A job without GPU memory, with an engine that saves nothing.
class SaveJobTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(mkdtemp(folder_.data()), nullptr);
    options_.image = folder_ + "/image";
    job_.set_pid(getpid());
    job_.set_directory(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  absl::Status Save() {
    outcome_ = {};
    engine_ = std::make_unique<FakeEngine>([](const std::string&) { return true; });
    auto keeper = SessionKeeper::Start(job_, folder_, "test", engine_.get(), STDERR_FILENO);
    if (!keeper.ok()) return keeper.status();
    return SaveJob(options_, job_, folder_, engine_.get(), keeper->get(), &report_, &outcome_);
  }
  bool HasImage() const { return std::filesystem::exists(options_.image); }

  std::string folder_ = "/tmp/saveXXXXXX";
  Job job_;
  SaveJobOptions options_;
  QuietReport report_;
  SaveJobOutcome outcome_;
  std::unique_ptr<FakeEngine> engine_;
};

TEST_F(SaveJobTest, WithoutHostdTheImageStaysWhereItIs) {
  ASSERT_EQ(Save(), absl::OkStatus());
  EXPECT_TRUE(HasImage());
  EXPECT_EQ(outcome_.image, options_.image);
}

TEST_F(SaveJobTest, StepsPassInOrder) {
  for (const bool stop : {false, true}) {
    for (const bool waits : {false, true}) {
      FakeGate gate;
      options_.gate = &gate;
      options_.stop = stop;
      options_.waits = waits;
      gate.on_step = [&](Step step) {
        EXPECT_EQ(engine_->stopped(), step == JOB_DUMPED || (stop && step == IMAGE_COMPLETE));
      };
      ASSERT_EQ(Save(), absl::OkStatus());
      EXPECT_EQ(gate.steps, waits ? kOfHosts : kOfOne);
      EXPECT_EQ(outcome_.image, FakeGate::kUsersImage);
      EXPECT_TRUE(HasImage());
      EXPECT_FALSE(engine_->stopped());
      EXPECT_EQ(engine_->ended(), stop);
    }
  }
}

TEST_F(SaveJobTest, AfterARefusalTheJobContinues) {
  options_.waits = true;
  for (const bool stop : {false, true}) {
    for (const Step step : kOfHosts) {
      FakeGate gate(step);
      options_.gate = &gate;
      options_.stop = stop;
      EXPECT_EQ(Save().message(), Step_Name(step) + " was refused");
      EXPECT_EQ(gate.steps.back(), step);
      EXPECT_FALSE(engine_->stopped() || engine_->ended()) << Step_Name(step);
      // One that the user could not get is cr-hostd's to remove.
      EXPECT_EQ(HasImage(), step == IMAGE_COMPLETE);
    }
    std::filesystem::remove_all(options_.image);
  }
}

}  // namespace
}  // namespace cuda_remote::checkpoint
