// SPDX-License-Identifier: Apache-2.0
// Holds a job's GPU sessions in the program in whose foreground the job runs (cr-run, cr-restart), while a tool has
// them: for the case that the tool and its keeper (session_keeper.h) are both killed. This program lives as long as the
// job, so the sessions are never lost with the job still there, and go when the job goes. Nobody else can have them: no
// token, and no word to the server.
//
// It listens on a socket in the job's folder, which only this user (root) may use. A connection that ends before the
// tool or its keeper have said that all is well means that both are gone: then a child of this program gives the
// sessions back, as the keeper would. If that child is killed, another one does it. Meanwhile the next tool waits
// (checkpoint/job/job_claim.h).
//
// For single-threaded programs.
#ifndef CUDA_REMOTE_CHECKPOINT_TRANSACTION_SESSION_HOLDER_H_
#define CUDA_REMOTE_CHECKPOINT_TRANSACTION_SESSION_HOLDER_H_

#include <poll.h>
#include <sys/types.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/engine/snapshot_engine.h"
#include "checkpoint/job/job_claim.h"
#include "checkpoint/transaction/kept_sessions.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::checkpoint {

class SessionHolder {
 public:
  // For the job in `directory`. `tool`: for messages. `engine` outlives this.
  static absl::StatusOr<std::unique_ptr<SessionHolder>> Open(const Job& job, const std::string& directory,
                                                             const char* tool, SnapshotEngine* engine);
  ~SessionHolder();

  // As in Beside: what to wait for, what has come, and a child that has ended.
  void Ask(std::vector<pollfd>* waiting) const;
  void Ready(const std::vector<pollfd>& waiting);
  void Ended(pid_t child, int status);

 private:
  SessionHolder(const Job& job, std::string directory, const char* tool, SnapshotEngine* engine, UniqueFd listener)
      : job_(job), directory_(std::move(directory)), tool_(tool), engine_(engine), listener_(std::move(listener)) {}
  void Accept();
  void Read();
  void StartGiver();
  void Finish();

  const Job job_;
  const std::string directory_;
  const char* const tool_;
  SnapshotEngine* const engine_;
  const UniqueFd listener_;
  KeeperClaim claim_{KeeperClaim::Whose::kHolder};
  KeptSessions sessions_;
  UniqueFd tool_socket_;  // one at a time: tools exclude each other
  pid_t giver_ = 0;
  int givers_ = 0;
};

// A tool's connection to the holder of the job in `directory`; none if there is no holder.
UniqueFd ConnectToHolder(const std::string& directory);

// The socket's name in the job's folder.
inline constexpr char kHolderName[] = "holder.sock";

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_TRANSACTION_SESSION_HOLDER_H_
