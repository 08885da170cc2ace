// SPDX-License-Identifier: Apache-2.0
// CRIU as a SnapshotEngine.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CRIU_ENGINE_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CRIU_ENGINE_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/engine/criu/criu.h"
#include "checkpoint/engine/criu/needs.h"
#include "checkpoint/engine/criu/page_receiver.h"
#include "checkpoint/engine/snapshot_engine.h"

namespace cuda_remote::checkpoint {

class CriuEngine final : public SnapshotEngine {
 public:
  std::string Name() const override { return "criu"; }
  EngineCapabilities Capabilities() const override;
  std::string Requirement() const override { return "CRIU (setup-criu finds or installs it)"; }
  std::vector<std::string> Environment() const override { return {"CUDA_REMOTE_CRIU"}; }
  void KeepLogs(const std::string& prefix) override { logs_ = prefix; }
  absl::Status CheckUsable() const override;
  std::string Version() const override;
  absl::Status PrepareStart(Plan* plan) override;
  absl::Status Describe(const Job& job, const SaveOptions& options, std::string* facts) override;
  uint64_t PreparedBytes(const Job& job) const override;
  void PrepareDump(const Job& job, uint64_t most_bytes) override;
  void OnStill(std::function<absl::Status()> still) override { still_ = std::move(still); }
  absl::Status Dump(const Job& job, const std::string& facts, const std::string& image, const std::string& work,
                    After after) override;
  bool FailurePasses() const override { return last_.failure_passes; }
  absl::Status FinishFiles() override;
  void AwaitDump(const Job& job, const std::string& work, After after) override;
  absl::Status ListNeeds(const Job& job, const std::string& facts, const std::string& image,
                         ckptfmt::Needs* needs) override;
  bool Resume(const Job& job, const std::string& facts) override;
  bool End(const Job& job, const std::string& facts) override;
  std::vector<std::string> MissingFeatures(const std::vector<std::string>& wanted, const Account& user) const override;
  absl::StatusOr<SavedSummary> Summarize(const std::string& facts) const override;
  absl::StatusOr<std::unique_ptr<SavedProcesses>> Open(const Job& job, const std::string& facts,
                                                       const std::string& image) override;
  // Has CRIU find out about this kernel once (criu_facts.h).
  std::shared_ptr<void> BeginUpkeep() override;

 private:
  std::string logs_;
  std::function<absl::Status()> still_;
  std::function<bool()> cancelled_;                 // of the Describe before a Dump
  std::unique_ptr<PageReceiver> prepared_, saved_;  // of the Dump that comes next, and of the last one
  std::vector<KeptFile> kept_;                      // of the last Dump, until they are copied
  DumpFacts last_;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CRIU_ENGINE_H_
