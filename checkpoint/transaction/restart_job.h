// SPDX-License-Identifier: Apache-2.0
// Brings a saved job back: the work of cr-restart. checkpoint/README.md has its steps.
//
// However a restart ends, either the job runs with all of its processes, or nothing is left of it but the image, which
// is as it was, so that the restart can be tried again.
#ifndef CUDA_REMOTE_CHECKPOINT_TRANSACTION_RESTART_JOB_H_
#define CUDA_REMOTE_CHECKPOINT_TRANSACTION_RESTART_JOB_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/engine/snapshot_engine.h"
#include "checkpoint/gpu/gpu_host.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/caller.h"
#include "checkpoint/job/isolation/isolate.h"
#include "checkpoint/job/isolation/network.h"
#include "checkpoint/job/isolation/terminal.h"
#include "checkpoint/job/job.h"
#include "checkpoint/job/job_claim.h"
#include "checkpoint/job/outputs.h"
#include "checkpoint/transaction/job_report.h"
#include "checkpoint/transaction/saved_sessions.h"

namespace cuda_remote::checkpoint {

struct RestartJobOptions {
  std::string image;         // its folder, or one of images, of which the newest is taken
  bool trust_owner = false;  // also if another user owns the image or may write it
  RestartPlaces places;
  std::string directory;  // the job's folder; empty: the one that it had
  OutputOptions outputs;
  bool cut_back = false;           // RestoreOptions::cut_back
  std::vector<std::string> cut;    // RestoreOptions::cut
  const Caller* caller = nullptr;  // null: a person has started the tool
};

// One restart. Not thread-safe.
class RestartJob {
 public:
  // As EngineOf in engines.h.
  using FindEngine = std::function<std::unique_ptr<SnapshotEngine>(const ckptfmt::ImageInfo&, std::string* facts)>;

  // All pointers must outlive this.
  RestartJob(const RestartJobOptions& options, FindEngine find_engine, SavedSessions* sessions, JobReport* report)
      : options_(options), find_engine_(std::move(find_engine)), sessions_(*sessions), report_(*report) {}
  // Unless Run has succeeded, nothing is left of the restored job.
  ~RestartJob();
  RestartJob(const RestartJob&) = delete;
  RestartJob& operator=(const RestartJob&) = delete;

  // Call it from a single-threaded program. When it succeeds, the job runs.
  absl::Status Run();

  // After that.
  const Isolated& isolated() const { return isolated_; }
  const std::string& directory() const { return directory_; }
  const Job& job() const { return saved_.job; }
  SnapshotEngine* engine() { return engine_.get(); }
  std::unique_ptr<JobTerminal> TakeTerminal() { return restore_->TakeTerminal(); }
  // The job has ended: waits until what it has written last is there, takes its address away, and removes its folders.
  // `by_itself`: it was neither killed nor stopped, and what it has sent last still goes out.
  void Clean(bool by_itself);

 private:
  // All of it. After a failure there may be something to undo.
  absl::Status TakeSteps();
  // Before anything is started, in this order.
  absl::Status ReadImage();
  absl::Status ReadLogs();
  absl::Status OpenEngine();
  absl::Status CheckJob();
  absl::Status CheckFiles();
  absl::Status LockOutputs();
  absl::Status ChooseFolder();
  absl::Status MakeFolder();
  absl::Status MakeNetwork();
  // Processes and sessions come back, and stand still.
  absl::Status Restore();
  absl::Status BeginProcesses();
  absl::Status LoadGpus();
  absl::Status OpenSessions(const std::string& scope);
  absl::Status LoadMemory();
  absl::Status FinishProcesses();
  // The processes take their sessions and go on.
  absl::Status GoOn();
  absl::StatusOr<bool> GiveSessions();
  void DescribeJob();
  // Ends all of it.
  void Undo();
  void MarkFolder();
  void RemoveFolders();

  // `status`, of a step of one process. A failure says which process it was, of several.
  absl::Status Of(size_t process, const absl::Status& status) const;
  // A part of a job on several hosts: all run, or none.
  bool is_part() const { return caller_ && caller_->waits(); }

  const RestartJobOptions options_;
  const FindEngine find_engine_;
  SavedSessions& sessions_;
  JobReport& report_;
  const Caller* const caller_ = options_.caller;

  SavedJob saved_;
  std::vector<uint64_t> marks_;  // CudaProcess::mark of each process; 0: not known
  std::unique_ptr<SnapshotEngine> engine_;
  std::string facts_;  // the engine's
  std::unique_ptr<SavedProcesses> processes_;
  std::optional<Account> account_;   // whom the job runs as
  std::optional<Account> shown_to_;  // whose own the folder is that the job knows
  Outputs outputs_;
  std::string directory_;
  std::string marker_;  // says that the folder which the job knows is needed
  bool has_folder_ = false, done_ = false;
  std::vector<Mount> mounts_;
  JobClaim claim_;  // until the job continues
  std::unique_ptr<NetworkNamespace> network_;
  std::unique_ptr<ProcessRestore> restore_;
  bool restored_ = false;
  Isolated isolated_;
  std::shared_ptr<void> upkeep_;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_TRANSACTION_RESTART_JOB_H_
