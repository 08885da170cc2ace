// SPDX-License-Identifier: Apache-2.0
// A tool's connection to the agent of one process of a job. Blocking; not thread-safe. Functions that fail return false
// and one sentence for a person in *error.
#ifndef CUDA_REMOTE_CHECKPOINT_AGENT_AGENT_CLIENT_H_
#define CUDA_REMOTE_CHECKPOINT_AGENT_AGENT_CLIENT_H_

#include <memory>
#include <string>

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
  // messages call the process. Null and *error if nobody is there.
  static std::unique_ptr<AgentClient> Connect(const std::string& directory, uint32_t pid, const std::string& name,
                                              std::string* error);

  AgentClient(const AgentClient&) = delete;
  AgentClient& operator=(const AgentClient&) = delete;

  bool GetInfo(Info* info, std::string* error);
  // Lockable.
  std::string Name() const override { return name_; }
  CloseResult Close(std::string* error) override;
  bool Look(Activity* activity, std::string* error) override;
  bool Admit(const Admission& which, bool* admitted, std::string* error) override;
  bool Settle(int timeout_ms, bool* settled, std::string* error) override;
  bool LockOld(int timeout_ms, std::string* error) override;
  void Open() override;
  // True once the agent has answered; it lets calls in right after that.
  bool Unlock(std::string* error);
  // While the job runs: the module images of its log (replay::WriteImages) and a number for Take. The caller owns *fd.
  bool AskImages(uint64_t* number, int* fd, std::string* error);
  // The caller owns the descriptors in *taken. `images`: AskImages's number, or 0; older libraries send all images.
  bool Take(uint64_t images, Taken* taken, std::string* error);
  // On success both ends close the connection; connect again to give the process a channel.
  bool Release(std::string* error);
  // The caller keeps the descriptors in `given`.
  bool Give(const Given& given, std::string* error);
  // For a released process whose channel is lost: its calls fail from now on, instead of waiting.
  bool Abandon(std::string* error);
  // A request to the GPU server beside the job's calls, while it runs, and its answer: *answered is false if that was
  // not there in time (20 ms at most). *old, if not null: the job's library knows no such requests.
  bool Ask(const SideRequest& request, uint64_t* sequence, std::string* error, bool* old = nullptr);
  bool Answer(uint64_t sequence, int timeout_ms, bool* answered, SideAnswer* answer, std::string* error);
  // Begins to record calls: at most `events` of them, for at most `milliseconds`. Another connection may end it.
  bool BeginTrace(uint64_t events, uint64_t milliseconds, std::string* error);
  // Ends the recording. The process writes the timeline and the table of calls to the descriptors, which the caller
  // keeps.
  bool EndTrace(int timeline_fd, int table_fd, bool json, std::string* error);
  // The table of all calls so far, of a job that was started with CUDA_REMOTE_TRACE.
  bool TraceTotals(int table_fd, bool json, std::string* error);

 private:
  AgentClient(int socket, const std::string& name) : socket_(socket), name_(name) {}
  bool Call(const Message& request, int timeout_ms, Message* reply, std::string* error);
  bool AskYesNo(const Message& request, int timeout_ms, bool* yes, std::string* error);

  UniqueFd socket_;
  const std::string name_;
};

}  // namespace cuda_remote::agent

#endif  // CUDA_REMOTE_CHECKPOINT_AGENT_AGENT_CLIENT_H_
