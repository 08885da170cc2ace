// SPDX-License-Identifier: Apache-2.0
// A job's GPU sessions in a process that has them in case a tool is killed: what the tool sends, and giving it back.
// Both ends of it are on one machine and of one version.
#ifndef CUDA_REMOTE_CHECKPOINT_TRANSACTION_KEPT_SESSIONS_H_
#define CUDA_REMOTE_CHECKPOINT_TRANSACTION_KEPT_SESSIONS_H_

#include <string>
#include <vector>

#include "checkpoint/engine/snapshot_engine.h"
#include "checkpoint/transaction/live_job.h"
#include "proto/agent/message.h"

namespace cuda_remote::checkpoint {

class KeptSessions {
 public:
  // The tool's side. Sends the sessions of all processes, and waits until the other side has them, so many milliseconds
  // at most. `holder`: -1, or a connection to a SessionHolder that the other side has, too, until it is done. False if
  // it does not have them.
  static bool Send(int socket, const LiveJob& live, const std::string& facts, SnapshotEngine::After after, int holder,
                   int most_ms);
  // The engine has begun to end the job.
  static void SendToEnd(int socket);
  // The sessions are no longer needed.
  static void SendDrop(int socket);

  KeptSessions() = default;
  ~KeptSessions() { Drop(); }
  KeptSessions(const KeptSessions&) = delete;
  KeptSessions& operator=(const KeptSessions&) = delete;

  // Takes a message of the tool's. When all is there, `claim` is asked whether it may be kept.
  template <typename Claim>
  void Serve(int socket, agent::Message* message, const Claim& claim) {
    if (Take(message)) Answer(socket, armed_ = claim());
  }
  // Whether the sessions must not be lost.
  bool armed() const { return armed_; }
  // The connection to the holder; -1: there is none.
  int holder() const { return holder_; }
  void Drop();

  // The tool is gone. Waits until the engine has come to its end. Then it ends the job, if the engine had begun to, or
  // has its processes run on, and gives each that has no session its own. True if they go on.
  bool GiveBack(const Job& job, const std::string& directory, const char* tool, SnapshotEngine* engine) const;

 private:
  struct Kept {
    CudaProcess process;
    std::string name;
    agent::Given session;
  };

  // True: it was the last one.
  bool Take(agent::Message* message);
  static void Answer(int socket, bool ok);
  bool GiveAll(const Job& job, const std::string& directory, const char* tool) const;

  Kept next_;
  std::vector<Kept> kept_;
  std::string facts_;
  int holder_ = -1;
  bool armed_ = false, stopped_ = false, to_end_ = false;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_TRANSACTION_KEPT_SESSIONS_H_
