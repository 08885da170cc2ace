// SPDX-License-Identifier: Apache-2.0
// A transaction over all processes of a job that have a GPU session: they are stopped at one moment, their sessions are
// in the tool's hands, and in the end all go on, or all are ended.
//
//     Begin --> held --Snapshot--> saved --Resume--> over
//                |  |                 |----End-----> over
//                |  `--Switch-------------------------> over      a move: each has another session
//                `-----Resume-------------------------> over
//
// However it ends, also by the destructor and by a failure of any step in any process, every process goes on with a
// session: those that have another one already get their old one back. Only End leaves them ended.
//
// So it is if this process is killed. Processes that have taken no part in a snapshot notice the end of their
// connection to the tool, and go on; after Release, a SessionGuard sees to it. A move is decided by one step of the
// caller's (`decide`): before it all processes go back to their old sessions, after it all go on with the others.
//
// The steps are the same whatever the processes and the engine are, so tests have them fail one by one
// (job_transaction_test.cc). Not thread-safe.
#ifndef CUDA_REMOTE_CHECKPOINT_TRANSACTION_JOB_TRANSACTION_H_
#define CUDA_REMOTE_CHECKPOINT_TRANSACTION_JOB_TRANSACTION_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/agent/lock.h"
#include "checkpoint/engine/snapshot_engine.h"

namespace cuda_remote::checkpoint {

// A process that takes part. It keeps track of the session that it has given up or got, so GiveBack and Unlock work in
// any state, and also when they are called again.
class JobProcess {
 public:
  virtual ~JobProcess() = default;
  // For messages: "python3 (PID 12)".
  virtual std::string Name() const = 0;
  // Whether it has ended. A step on such a process does not fail.
  virtual bool HasEnded() const = 0;
  // For LockAll.
  virtual agent::Lockable* lockable() = 0;

  // The tool takes over its session and its log.
  virtual absl::Status Take() = 0;
  // It closes its end of the session, for a snapshot. The tool keeps the session alive.
  virtual absl::Status Release() = 0;
  // It gets another session, prepared before, and stays stopped.
  virtual absl::Status Switch() = 0;
  // Fails if the session that it has got is not there any more.
  virtual absl::Status Confirm() = 0;
  // It has the session again that it had, and stays stopped.
  virtual absl::Status GiveBack() = 0;
  // Its calls go on.
  virtual absl::Status Unlock() = 0;
  // The process has ended: its session may end too.
  virtual void Abandon() = 0;
};

// Brings the processes back if this process is killed while it alone has their sessions.
class SessionGuard {
 public:
  virtual ~SessionGuard() = default;
  // Before the first Release. From its success until Drop, a kill of this process has the effect of Resume. `facts`,
  // `after`: of the Dump that follows.
  virtual absl::Status Keep(const std::string& facts, SnapshotEngine::After after) = 0;
  // The job is going to be ended: from now on a kill of this process has the effect of End.
  virtual void ToEnd() = 0;
  // All processes have their sessions again, or have ended.
  virtual void Drop() = 0;
};

// Where the processes come from.
class ProcessSource {
 public:
  virtual ~ProcessSource() = default;
  // The processes that have a session now. The source owns them; they are valid until the next Find. kAborted if one
  // has ended meanwhile: then try again.
  virtual absl::StatusOr<std::vector<JobProcess*>> Find() = 0;
  // Whether they are still the same.
  virtual bool AreAll() = 0;
  // From its success until EndPause no process can open a session.
  virtual absl::Status Pause(int timeout_ms) = 0;
  virtual void EndPause() = 0;
};

class JobTransaction {
 public:
  // All must outlive the transaction. `engine` and `guard` may be null if Snapshot will not be called.
  JobTransaction(const Job& job, ProcessSource* source, SnapshotEngine* engine, SessionGuard* guard)
      : job_(job), source_(source), engine_(engine), guard_(guard) {}
  ~JobTransaction();
  JobTransaction(const JobTransaction&) = delete;
  JobTransaction& operator=(const JobTransaction&) = delete;

  // Stops the CUDA calls of all processes, as LockAll does, keeps other processes from opening sessions, and takes all
  // sessions. If processes come or go meanwhile, it looks for them again. After a failure the job continues.
  absl::Status Begin(const agent::LockOptions& options);

  // The processes let go of their sessions, and the engine saves all of the job (SnapshotEngine::Dump).
  absl::Status Snapshot(const std::string& facts, const std::string& image, const std::string& work,
                        SnapshotEngine::After after);

  // All go on with the sessions that they had. A process that has ended is no failure; of several others that cannot go
  // on, the status names the first.
  absl::Status Resume();
  // All go on with other sessions, once `decide` has succeeded: that is one step, by which also processes whose tool is
  // killed find out where they are. On failure nobody goes on before the transaction ends, with the old ones.
  absl::Status Switch(const std::function<absl::Status()>& decide);
  // Ends the job after a Snapshot. False if that failed, and it stands still.
  bool End();

  // How long calls have been held back, in seconds.
  double HeldSeconds() const;

 private:
  enum class State { kRunning, kHeld, kSaved, kStopped, kOver };
  // Takes a step of all processes. *ended: one has ended meanwhile, which is no failure.
  absl::Status ForEach(const char* name, absl::Status (JobProcess::*step)(), bool* ended);
  // Whether one of them has ended, or does so in this moment.
  bool EndsNow(const std::vector<JobProcess*>& processes);

  const Job& job_;
  ProcessSource* const source_;
  SnapshotEngine* const engine_;
  SessionGuard* const guard_;
  agent::LockClock clock_ = agent::RealClock();
  State state_ = State::kRunning;
  std::vector<JobProcess*> processes_;
  int64_t closed_us_ = 0;
  std::string facts_;  // of the Snapshot
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_TRANSACTION_JOB_TRANSACTION_H_
