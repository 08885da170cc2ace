// SPDX-License-Identifier: Apache-2.0
// Who takes part in a checkpoint or a restart beside the tool, for tests: the person who waits, and cr-hostd.
#ifndef CUDA_REMOTE_CHECKPOINT_TRANSACTION_TESTING_FAKES_H_
#define CUDA_REMOTE_CHECKPOINT_TRANSACTION_TESTING_FAKES_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/job/step_gate.h"
#include "checkpoint/transaction/job_report.h"

namespace cuda_remote::checkpoint {

class QuietReport final : public JobReport {
 public:
  const char* Tool() const override { return "test"; }
  void Say(const std::string& text) override { said += text + "\n"; }
  std::unique_ptr<LongStep> Begin(const std::string&) override {
    class Nothing final : public LongStep {
      void Update(uint64_t, uint64_t) override {}
    };
    return std::make_unique<Nothing>();
  }
  void Done(const char*) override {}
  bool Cancelled() override { return false; }

  std::string said;
};

// Notes the steps, and refuses one of them.
class FakeGate final : public StepGate {
 public:
  explicit FakeGate(Step refused = STEP_UNKNOWN) : refused_(refused) {}

  absl::StatusOr<std::string> Pass(Step step) override {
    steps.push_back(step);
    if (on_step) on_step(step);
    if (step == refused_) return absl::FailedPreconditionError(Step_Name(step) + " was refused");
    return step == IMAGE_BEGINS ? kUsersImage : "";
  }

  static constexpr char kUsersImage[] = "/home/anna/train.image";
  std::vector<Step> steps;
  std::function<void(Step)> on_step;

 private:
  const Step refused_;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_TRANSACTION_TESTING_FAKES_H_
