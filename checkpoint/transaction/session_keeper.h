// SPDX-License-Identifier: Apache-2.0
// Gives a job its GPU sessions back if the tool that has them is killed.
//
// While an engine saves a job's processes, these hold no connection, so only the tool has their sessions: without it
// the server would end them. So a second process, the keeper, holds duplicates of the descriptors meanwhile. It reads
// from a socket pair that nobody else can reach. If the socket ends before the tool says that all is well, it waits
// until the engine has come to its end, has the processes run on, gives each that has no session its own, and lets them
// go on. Meanwhile it holds a lock, so that the next tool waits for it (checkpoint/job/job_claim.h).
//
// The program in whose foreground the job runs holds duplicates, too (session_holder.h), for the case that the keeper
// is killed as well.
//
// The keeper is made before the tool needs memory or threads: it is small, and stays when the kernel ends a tool for
// its size. It has a session, a process group, a name and a command line of its own, and ignores SIGTERM.
#ifndef CUDA_REMOTE_CHECKPOINT_TRANSACTION_SESSION_KEEPER_H_
#define CUDA_REMOTE_CHECKPOINT_TRANSACTION_SESSION_KEEPER_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/engine/snapshot_engine.h"
#include "checkpoint/transaction/job_transaction.h"
#include "checkpoint/transaction/live_job.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::checkpoint {

class SessionKeeper final : public SessionGuard {
 public:
  // Starts the keeper, for the job in `directory`. Call it from a single-threaded program. `tool`: for messages, which
  // go to `messages`. The keeper has nothing else of this program's open: who waits for the program's end does not wait
  // for the keeper's. It uses a copy of `engine`.
  static absl::StatusOr<std::unique_ptr<SessionKeeper>> Start(const Job& job, const std::string& directory,
                                                              const char* tool, SnapshotEngine* engine, int messages);
  // The keeper has ended then.
  ~SessionKeeper() override;

  // Whose sessions Keep keeps; outlives that until Drop.
  void Watch(const LiveJob* live) { live_ = live; }

  // SessionGuard.
  absl::Status Keep(const std::string& facts, SnapshotEngine::After after) override;
  void ToEnd() override;
  void Drop() override;

 private:
  SessionKeeper(std::string directory, UniqueFd socket, pid_t process)
      : directory_(std::move(directory)), socket_(std::move(socket)), process_(process) {}

  const std::string directory_;
  UniqueFd socket_;
  const pid_t process_;
  const LiveJob* live_ = nullptr;
  UniqueFd holder_;  // a connection to the job's SessionHolder, while that keeps the sessions, too
  bool keeps_ = false;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_TRANSACTION_SESSION_KEEPER_H_
