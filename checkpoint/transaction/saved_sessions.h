// SPDX-License-Identifier: Apache-2.0
// The GPU's side of a saved job on its way back (restart_job.h): a session for each process, its objects, its memory.
//
// Processes are called by their numbers in the image.
#ifndef CUDA_REMOTE_CHECKPOINT_TRANSACTION_SAVED_SESSIONS_H_
#define CUDA_REMOTE_CHECKPOINT_TRANSACTION_SAVED_SESSIONS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/agent/agent_client.h"
#include "checkpoint/gpu/gpu_host.h"
#include "checkpoint/gpu/memory_transfer.h"
#include "checkpoint/gpu/placement.h"
#include "checkpoint/gpu/places.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/job.h"
#include "checkpoint/transaction/job_report.h"
#include "ckptfmt/image_reader.h"
#include "ckptfmt/types.h"
#include "proto/channel/client_channel.h"
#include "replay/log/log.h"

namespace cuda_remote::checkpoint {

// What a restart has read from an image.
struct SavedJob {
  std::unique_ptr<ckptfmt::ImageReader> image;
  Job job;
  std::vector<replay::Log> logs;  // of each process
};

// As messages call a saved process: "python3 (PID 12)".
std::string NameOf(const ckptfmt::ProcessInfo& process);

// The steps of a restart, in this order. Not thread-safe, but for Open.
class SavedSessions {
 public:
  // The sessions that no process has taken end, and so does what OpenHosts has started, unless it was taken.
  virtual ~SavedSessions() = default;

  // Where each process goes. Starts nothing. `saved` must outlive LetGo.
  virtual absl::Status Plan(const SavedJob& saved) = 0;
  // Opens the ways to the servers. `folder`, `account`: of GpuHostOptions.
  virtual absl::Status OpenHosts(const std::string& folder, const std::optional<Account>& account) = 0;
  // After that: the server for processes that begin to use CUDA later (CUDA_REMOTE_SERVER).
  virtual std::string server() const = 0;
  // Whether there is room at the places that were asked for.
  virtual absl::Status CheckPlaces() = 0;
  // Opens the session of a process and makes its objects. Call it for all at the same time, each in a thread: the
  // objects of one may be shared with another, and wait for it. `scope`: replay::ShareIn's.
  virtual absl::Status Open(size_t process, const std::string& scope) = 0;
  virtual absl::Status LoadMemory(size_t process, const Continue& go_on) = 0;
  // Gives a process, which was restored into the job in `directory`, its session. It stays stopped. One that does not
  // listen yet is waited for until `ended`.
  virtual absl::Status Give(size_t process, const std::string& directory, const std::function<bool()>& ended) = 0;
  // For cr-ps: when the job was saved, and the image's size.
  virtual void NoteSaved(size_t process, uint64_t unix_ms, uint64_t bytes) = 0;
  // Those that have got their sessions go on.
  virtual void Unlock() = 0;
  // Lets go of all sessions: those that no process has end.
  virtual void LetGo() = 0;
  // What OpenHosts has started, for as long as the job runs.
  virtual std::unique_ptr<GpuHosts> TakeHosts() = 0;
};

// Where the processes of a job go.
struct RestartPlaces {
  std::string server;                // of those that no rule names; empty: one of the job's own
  int gpu = -1;                      // the only GPU that they get there; -1: all
  std::vector<PlacementRule> rules;  // for the others
};

// On GPU servers.
class GpuSessions final : public SavedSessions {
 public:
  // `environment`: GpuHostOptions::environment. It and `report` outlive this.
  GpuSessions(RestartPlaces places, const std::vector<std::string>* environment, JobReport* report)
      : places_(std::move(places)), environment_(environment), report_(*report) {}

  absl::Status Plan(const SavedJob& saved) override;
  absl::Status OpenHosts(const std::string& folder, const std::optional<Account>& account) override;
  std::string server() const override { return first_->server(); }
  absl::Status CheckPlaces() override;
  absl::Status Open(size_t process, const std::string& scope) override;
  absl::Status LoadMemory(size_t process, const Continue& go_on) override;
  absl::Status Give(size_t process, const std::string& directory, const std::function<bool()>& ended) override;
  void NoteSaved(size_t process, uint64_t unix_ms, uint64_t bytes) override;
  void Unlock() override;
  void LetGo() override;
  std::unique_ptr<GpuHosts> TakeHosts() override { return std::move(hosts_); }

 private:
  const ckptfmt::ProcessInfo& Info(size_t process) const { return saved_->image->info().processes[process]; }

  const RestartPlaces places_;
  const std::vector<std::string>* const environment_;
  JobReport& report_;
  const SavedJob* saved_ = nullptr;
  std::optional<Account> account_;  // whose sessions they are
  std::unique_ptr<GpuHosts> hosts_;
  const GpuHost* first_ = nullptr;
  // Of each process.
  std::vector<Placed> placed_;
  std::vector<std::unique_ptr<ClientChannel>> channels_;
  std::vector<std::unique_ptr<agent::AgentClient>> agents_;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_TRANSACTION_SAVED_SESSIONS_H_
