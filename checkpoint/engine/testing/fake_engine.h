// SPDX-License-Identifier: Apache-2.0
// A SnapshotEngine for tests: it saves nothing, and notes what state the processes are in. Each of its steps can be
// made to fail. What it restores is one process of this machine that does nothing.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_TESTING_FAKE_ENGINE_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_TESTING_FAKE_ENGINE_H_

#include <sys/types.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/engine/snapshot_engine.h"
#include "proto/base/status_macros.h"

namespace cuda_remote::checkpoint {

class FakeEngine final : public SnapshotEngine {
 public:
  // `step` is asked before each step, by its name; false lets it fail. `on_dump`: what a snapshot meets.
  explicit FakeEngine(std::function<bool(const std::string&)> step, std::function<void()> on_dump = nullptr)
      : step_(std::move(step)), on_dump_(std::move(on_dump)) {}

  std::string Name() const override { return "fake"; }
  EngineCapabilities Capabilities() const override { return {}; }
  std::string Requirement() const override { return "nothing"; }
  std::vector<std::string> Environment() const override { return {}; }
  void KeepLogs(const std::string&) override {}
  absl::Status CheckUsable() const override { return Step("usable"); }
  std::string Version() const override { return {}; }
  absl::Status PrepareStart(Plan* plan) override {
    prepared_.push_back(*plan);
    return Step("prepare start");
  }
  absl::Status Describe(const Job&, const SaveOptions&, std::string* facts) override {
    *facts = "facts";
    return Step("describe");
  }
  void OnStill(std::function<absl::Status()> still) override { still_ = std::move(still); }
  absl::Status Dump(const Job&, const std::string&, const std::string&, const std::string&, After after) override {
    CR_RETURN_IF_ERROR(Step("dump"));
    if (still_) CR_RETURN_IF_ERROR(still_());
    if (on_dump_) on_dump_();
    stopped_ = after == After::kStop;
    return absl::OkStatus();
  }
  void AwaitDump(const Job&, const std::string&, After) override {}
  absl::Status ListNeeds(const Job&, const std::string&, const std::string&, ckptfmt::Needs*) override {
    return Step("needs");
  }
  bool Resume(const Job&, const std::string&) override {
    if (!step_("resume")) return false;
    stopped_ = false;
    return true;
  }
  bool End(const Job&, const std::string&) override {
    if (!step_("end")) return false;
    stopped_ = false;
    ended_ = true;
    return true;
  }
  absl::StatusOr<SavedSummary> Summarize(const std::string&) const override { return SavedSummary(); }
  // This must outlive the result.
  absl::StatusOr<std::unique_ptr<SavedProcesses>> Open(const Job&, const std::string&, const std::string&) override {
    CR_RETURN_IF_ERROR(Step("open"));
    return std::make_unique<Saved>(this);
  }

  // The plans of PrepareStart.
  const std::vector<Plan>& prepared() const { return prepared_; }

  // The processes stand still, or were ended.
  bool stopped() const { return stopped_; }
  bool ended() const { return ended_; }

  // Of restores: those that have begun and are not over, and the processes that have come of them.
  int restoring() const { return restoring_; }
  const std::vector<pid_t>& restored() const { return restored_; }
  // SavedProcesses::ChangesFiles.
  void set_changes_files(bool changes) { changes_files_ = changes; }

 private:
  class Restore final : public ProcessRestore {
   public:
    explicit Restore(FakeEngine* engine) : engine_(engine) { ++engine_->restoring_; }
    ~Restore() override { --engine_->restoring_; }
    absl::Status AwaitHeld() override { return engine_->Step("hold"); }
    absl::StatusOr<Isolated> Finish() override {
      CR_RETURN_IF_ERROR(engine_->Step("finish"));
      const pid_t child = fork();
      if (child == 0) {
        while (true) pause();
      }
      Isolated isolated;
      isolated.init = isolated.pid = isolated.inner_pid = child;
      engine_->restored_.push_back(child);
      return isolated;
    }

   private:
    FakeEngine* const engine_;
  };

  class Saved final : public SavedProcesses {
   public:
    explicit Saved(FakeEngine* engine) : engine_(engine) {}
    absl::Status Check(const RestoreOptions&) override { return engine_->Step("check"); }
    bool ChangesFiles() const override { return engine_->changes_files_; }
    absl::StatusOr<std::unique_ptr<ProcessRestore>> Begin(const std::string&, std::vector<Mount>, int) override {
      CR_RETURN_IF_ERROR(engine_->Step("begin"));
      return std::make_unique<Restore>(engine_);
    }

   private:
    FakeEngine* const engine_;
  };

  absl::Status Step(const std::string& name) const {
    if (step_(name)) return absl::OkStatus();
    return absl::FailedPreconditionError(name + " was made to fail");
  }

  const std::function<bool(const std::string&)> step_;
  const std::function<void()> on_dump_;
  std::function<absl::Status()> still_;
  bool stopped_ = false, ended_ = false, changes_files_ = false;
  std::vector<Plan> prepared_;
  int restoring_ = 0;
  std::vector<pid_t> restored_;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_TESTING_FAKE_ENGINE_H_
