// SPDX-License-Identifier: Apache-2.0
// The processes of a running job, for a JobTransaction: found in /proc, stopped through their agents.
//
// Not thread-safe, but the channels of different processes may be used by different threads.
#ifndef CUDA_REMOTE_CHECKPOINT_TRANSACTION_LIVE_JOB_H_
#define CUDA_REMOTE_CHECKPOINT_TRANSACTION_LIVE_JOB_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/agent/agent_client.h"
#include "checkpoint/gpu/side_requests.h"
#include "checkpoint/job/cuda_processes.h"
#include "checkpoint/job/job.h"
#include "checkpoint/job/job_claim.h"
#include "checkpoint/transaction/job_transaction.h"
#include "proto/channel/client_channel.h"
#include "replay/log/log.h"

namespace cuda_remote::checkpoint {

// How much device memory the workers of the job's processes say that they hold now; nothing counts for one that does
// not answer soon.
uint64_t AskHeldBytes(const Job& job, const std::string& directory);

// Requests beside the calls of a running process, through its agent. When it goes, the server lets go of what they
// made it map. Others cannot reach the agent meanwhile.
class RunningProcess final : public SideRequests {
 public:
  // Fails if the process cannot be reached, or its library does not know such requests.
  static absl::StatusOr<std::unique_ptr<RunningProcess>> Connect(const CudaProcess& process,
                                                                 const std::string& directory);
  // The number of its session.
  uint64_t session() const { return info_.session; }

  // SideRequests.
  bool shared_memory() const override { return info_.shared_memory; }
  absl::StatusOr<uint64_t> Begin(const agent::SideRequest& request) override;
  absl::StatusOr<agent::SideAnswer> Wait(uint64_t number) override;

 private:
  RunningProcess(std::unique_ptr<agent::AgentClient> agent, agent::Info info)
      : agent_(std::move(agent)), info_(std::move(info)) {}
  std::unique_ptr<agent::AgentClient> agent_;
  agent::Info info_;
};

// The module images of the processes' logs, read while the job runs: they are most of a log, and never change.
class ImagesAhead {
 public:
  struct OfOne {
    uint64_t number = 0;  // for the process's agent
    replay::Images images;
  };

  // Reads those of all processes. Nothing is known of a process whose agent does not answer.
  void Read(const Job& job, const std::string& directory);
  // Of one process; null if nothing is known.
  const OfOne* Find(const CudaProcess& process) const;

 private:
  std::vector<std::pair<CudaProcess, OfOne>> known_;
};

class LiveProcess final : public JobProcess {
 public:
  // `images`: of this process, or null; must outlive it.
  LiveProcess(CudaProcess process, std::string directory, std::unique_ptr<agent::AgentClient> agent, agent::Info info,
              const ImagesAhead::OfOne* images)
      : process_(std::move(process)),
        directory_(std::move(directory)),
        agent_(std::move(agent)),
        info_(info),
        images_(images) {}

  // JobProcess. Take refuses if the log has calls that cannot be replayed.
  std::string Name() const override { return NameOf(process_); }
  bool HasEnded() const override { return checkpoint::IsEnding(process_); }
  agent::Lockable* lockable() override { return agent_.get(); }
  absl::Status Take() override;
  absl::Status Release() override;
  absl::Status Switch() override;
  absl::Status Confirm() override;
  absl::Status GiveBack() override;
  absl::Status Unlock() override;
  void Abandon() override;

  const CudaProcess& process() const { return process_; }
  const agent::Info& info() const { return info_; }
  // Of its session, as the process names it.
  std::string server() const { return info_.server.empty() ? GpuServerOf(directory_) : info_.server; }
  // After Take: the process's channel, for the tool's own requests; its log; the number of its next call.
  ClientChannel* channel() { return channel_.get(); }
  const replay::Log& log() const { return log_; }
  uint64_t next_sequence() const { return taken_.next_sequence; }
  // What GiveBack gives to a process without a session: its own one. The caller owns the descriptors.
  agent::Given Former() const;

  // For Switch: the other channel, which is behind `server`. The tool keeps its own hold on it.
  void PrepareSwitch(const ClientChannel* channel, const std::string& server);

 private:
  // What the process has: its channel (the tool has a copy, once it is taken), none, or one that the tool gave it.
  enum class State { kLocked, kTaken, kReleased, kGivenOld, kGivenNew, kRunning };

  const CudaProcess process_;
  const std::string directory_;
  State state_ = State::kLocked;
  std::unique_ptr<agent::AgentClient> agent_;
  agent::Info info_;
  agent::Taken taken_;
  std::unique_ptr<ClientChannel> channel_;
  const ClientChannel* new_channel_ = nullptr;
  std::string new_server_;
  const ImagesAhead::OfOne* const images_;
  replay::Log log_;
};

class LiveJob final : public ProcessSource {
 public:
  // The caller has the job's claim, which outlives this: a process whose session an earlier tool has lost
  // (JobClaim::killed) is told so, and its calls fail then. `images` may be null, and outlives this.
  LiveJob(const Job& job, std::string directory, const JobClaim& claim, const ImagesAhead* images)
      : job_(job), directory_(std::move(directory)), claim_(claim), images_(images) {}

  // ProcessSource.
  absl::StatusOr<std::vector<JobProcess*>> Find() override;
  bool AreAll() override;
  absl::Status Pause(int timeout_ms) override;
  void EndPause() override { pause_.Release(); }

  // By their numbers.
  const std::vector<std::unique_ptr<LiveProcess>>& processes() const { return processes_; }
  // The numbers of those that are at `server` (agent::Info); others' numbers may be the same.
  std::vector<uint64_t> SessionsAt(const std::string& server) const;

 private:
  const Job& job_;
  const std::string directory_;
  const JobClaim& claim_;
  const ImagesAhead* const images_;
  ConnectionPause pause_;
  std::vector<std::unique_ptr<LiveProcess>> processes_;
};

// Gives a process that was restored a channel, behind `server`. It goes on when the caller calls Unlock of what this
// returns. Fails if the process did not take it. One that does not listen yet is waited for until `ended`.
absl::StatusOr<std::unique_ptr<agent::AgentClient>> GiveChannel(const std::string& directory, uint32_t pid,
                                                                const std::string& name, const ClientChannel& channel,
                                                                const std::string& server,
                                                                const std::function<bool()>& ended);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_TRANSACTION_LIVE_JOB_H_
