// A job that is locked, whose channel and log a tool holds. However this ends, the job gets a channel and goes on: the
// new one that Give was called with, else its old one. Only Abandon leaves it as it is.
//
// Not thread-safe. Functions return false and one sentence in *error.
#ifndef CUDA_REMOTE_CLIENT_TOOLS_HELD_JOB_H_
#define CUDA_REMOTE_CLIENT_TOOLS_HELD_JOB_H_

#include <functional>
#include <memory>
#include <string>

#include "client/agent/agent_client.h"
#include "client/tools/job_claim.h"
#include "proto/channel/client_channel.h"
#include "replay/log/log.h"

namespace cuda_remote::client::tools {

// What the job's agent says of it, without holding it up. False and *error if it has none.
bool AskJob(const std::string& directory, agent::Info* info, std::string* error);

// How much device memory the job's worker says that it holds now; 0 if it does not answer soon.
uint64_t AskHeldBytes(const std::string& directory);

class HeldJob {
 public:
  // Stops the CUDA calls of the job in `directory`, waiting up to lock_ms for those in progress and for the GPU, and
  // takes channel and log. Refuses, with the job going on, if the log has calls that cannot be replayed, and once
  // `cancelled` is true. The caller has the job's claim; a job whose session an earlier tool has lost (JobClaim::killed)
  // is told so, and its calls fail then.
  static std::unique_ptr<HeldJob> Take(const std::string& directory, const JobClaim& claim, int lock_ms,
                                       const std::function<bool()>& cancelled, std::string* error);
  ~HeldJob();
  HeldJob(const HeldJob&) = delete;
  HeldJob& operator=(const HeldJob&) = delete;

  // The job's channel, for the tool's own requests.
  ClientChannel* channel() { return channel_.get(); }
  const replay::Log& log() const { return log_; }
  const std::string& log_bytes() const { return log_bytes_; }
  const agent::Info& info() const { return info_; }
  uint64_t next_sequence() const { return taken_.next_sequence; }
  // For how many seconds calls have been held back.
  double HeldSeconds() const;

  // Makes the process ready for a snapshot: it closes its channel, and the connection to the tool.
  bool Release(std::string* error);
  // The job goes on with its old channel.
  bool GiveBack(std::string* error);
  // The job goes on with another channel, which is behind `server`. The tool keeps its own hold on it.
  bool Give(const ClientChannel& channel, const std::string& server, std::string* error);
  // The job has been ended: its session may end too.
  void Abandon();

 private:
  HeldJob() = default;
  bool GiveAndUnlock(const agent::Given& given, std::string* error);

  std::string directory_;
  std::unique_ptr<agent::AgentClient> agent_;
  agent::Info info_;
  agent::Taken taken_;
  std::unique_ptr<ClientChannel> channel_;
  std::string log_bytes_;
  replay::Log log_;
  int64_t closed_us_ = 0;
  bool done_ = false;
};

// Gives a job that was restored a channel, behind `server`. The job goes on when the caller calls Unlock of what this
// returns; null and *error if the job did not take it. A job that does not listen yet is waited for until `ended`.
std::unique_ptr<agent::AgentClient> GiveChannel(const std::string& directory, const ClientChannel& channel,
                                                const std::string& server, const std::function<bool()>& ended,
                                                std::string* error);

}  // namespace cuda_remote::client::tools

#endif  // CUDA_REMOTE_CLIENT_TOOLS_HELD_JOB_H_
