// SPDX-License-Identifier: Apache-2.0
// A tool's connection to the agent of one process of a job. Blocking; not thread-safe.
#ifndef CUDA_REMOTE_CHECKPOINT_AGENT_AGENT_CLIENT_H_
#define CUDA_REMOTE_CHECKPOINT_AGENT_AGENT_CLIENT_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/agent/lock.h"
#include "proto/agent/types.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::agent {

struct Message;

// LockAll (lock.h) locks one or several of these. With its end the connection is closed, and a job that is locked and
// was not released continues.
class AgentClient final : public Lockable {
 public:
  // Connects to the agent of process `pid` (as that process knows itself) of the job in `directory`. `name`: how
  // messages call the process. Fails if nobody is there.
  static absl::StatusOr<std::unique_ptr<AgentClient>> Connect(const std::string& directory, uint32_t pid,
                                                              const std::string& name);

  AgentClient(const AgentClient&) = delete;
  AgentClient& operator=(const AgentClient&) = delete;

  absl::StatusOr<Info> GetInfo();
  // Lockable.
  std::string Name() const override { return name_; }
  absl::Status Close() override;
  absl::StatusOr<Activity> Look() override;
  absl::StatusOr<bool> Admit(const Admission& which) override;
  absl::StatusOr<bool> Settle(int timeout_ms) override;
  void Open() override;
  // Returns once the agent has answered; it lets calls in right after that.
  absl::Status Unlock();
  // While the job runs: the module images of its log (replay::WriteImages), and a number for Take.
  absl::Status AskImages(uint64_t* number, UniqueFd* fd);
  // The caller owns the descriptors in the result. `images`: AskImages's number, or 0.
  absl::StatusOr<Taken> Take(uint64_t images);
  // On success both ends close the connection; connect again to give the process a channel.
  absl::Status Release();
  // The caller keeps the descriptors in `given`.
  absl::Status Give(const Given& given);
  // For a released process whose channel is lost: its calls fail from now on, instead of waiting.
  absl::Status Abandon();
  // A request to the GPU server beside the job's calls, while it runs: its number, for Answer.
  absl::StatusOr<uint64_t> Ask(const SideRequest& request);
  // The answer to a request; nothing if it was not there in time (20 ms at most).
  absl::StatusOr<std::optional<SideAnswer>> Answer(uint64_t sequence, int timeout_ms);
  // Begins to record calls: at most `events` of them, for at most `milliseconds`. Another connection may end it.
  absl::Status BeginTrace(uint64_t events, uint64_t milliseconds);
  // Ends the recording. The process writes the timeline and the table of calls to the descriptors, which the caller
  // keeps.
  absl::Status EndTrace(int timeline_fd, int table_fd, bool json);
  // The table of all calls so far, of a job that was started with CUDA_REMOTE_TRACE.
  absl::Status TraceTotals(int table_fd, bool json);

 private:
  AgentClient(UniqueFd socket, const std::string& name) : socket_(std::move(socket)), name_(name) {}
  // The answer to a request.
  absl::StatusOr<Message> Call(const Message& request, int timeout_ms);
  absl::StatusOr<bool> AskYesNo(const Message& request, int timeout_ms);

  UniqueFd socket_;
  const std::string name_;
};

}  // namespace cuda_remote::agent

#endif  // CUDA_REMOTE_CHECKPOINT_AGENT_AGENT_CLIENT_H_
