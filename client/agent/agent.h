// SPDX-License-Identifier: Apache-2.0
// The checkpoint agent: a thread in the application that lets tools of the same user stop its CUDA calls, take its
// channel and replay log, and give it another channel. README.md has the protocol.
//
// States and what ends them:
//
//     running --Close--> closed --Settle--> locked --Take--> taken --Release--> released --Give--> locked
//                                                              `----------------Give------------^
//     closed, locked, taken --Unlock--> running
//
// In `closed` the gate holds new CUDA calls back while the work that was begun ends; the tool looks at what is going
// on, admits single calls that the work may depend on, and settles when nothing goes on (client/agent/lock.h). The
// agent itself never waits for the GPU or the program, so it always notices at once when the tool is gone.
//
// A tool that disappears in `closed`, `locked` or `taken` leaves the process running with the channel that it had. If
// it has given another worker's channel and not unlocked yet, the host finds out whether the job's move was decided
// (SettleMove): all of its processes move, or none. In `released`
// the agent holds no connection and the process no channel, so that the process can be snapshotted; the tool connects
// again, to this process or to its restored copy, and gives it a channel. Only Give ends that state, or Abandon when
// there is no channel any more.
//
// One tool at a time: another one is told so and sent away. The thread blocks all signals, sleeps in poll, and holds no
// lock while it sleeps. It survives a snapshot of the process: a listening socket that was restored works on, and one
// whose path has disappeared is made again within seconds.
//
// Part of the client library: no libprotobuf, no abseil, no logging; nothing throws.
#ifndef CUDA_REMOTE_CLIENT_AGENT_AGENT_H_
#define CUDA_REMOTE_CLIENT_AGENT_AGENT_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "proto/agent/types.h"
#include "proto/base/status.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::agent {

// What the agent serves: the session. All calls come from the agent's thread.
class AgentHost {
 public:
  virtual ~AgentHost() = default;
  virtual Info GetInfo() = 0;
  // Lets no new CUDA call in. Also in `locked`, which it undoes. Does not wait.
  virtual Status Close() = 0;
  // What is going on. Waits a few milliseconds for the GPU server's answer. Also while running. On failure the GPU or
  // the server has failed.
  virtual StatusOr<Activity> Look() = 0;
  // Lets one call into the closed gate. False if none of this kind waits.
  virtual bool Admit(const Admission& which) = 0;
  // After a Look that said `quiet`: settles what only this side knows of, and locks. False if something goes on after
  // all. Waits for `timeout_ms` at most, and only as long as `gone` is false.
  virtual StatusOr<bool> Settle(int timeout_ms, const std::function<bool()>& gone) = 0;
  // The tool has gone, and Unlock follows. If it has given another worker's channel, and the move of the job has not
  // been decided, the process gets the channel back that it had.
  virtual void SettleMove() = 0;
  // Lets calls in again. Also after a Take that led nowhere: the process goes on with the channel that it has.
  virtual void Unlock() = 0;
  // While the job runs: the module images of the log (replay::WriteImages) as a file, and a number for Take.
  virtual StatusOr<UniqueFd> GiveImages(uint64_t* number) = 0;
  // Hands out duplicates of the channel's descriptors, and the log. The caller owns what it gets. `images`: the log
  // without the images of the last GiveImages, if that gave this number.
  virtual StatusOr<Taken> Take(uint64_t images) = 0;
  // Closes the process's own channel.
  virtual void Release() = 0;
  // The session whose channel Release closed is gone for good: calls fail from now on.
  virtual void Abandon() = 0;
  // Makes `given` the process's channel; it owns the descriptors. On failure the process has the channel it had.
  virtual Status Give(Given given) = 0;
  // While the job runs: sends a request of a tool's beside its calls, and gives its number. The answer's payload goes
  // to `out`, until Answer has said `answered` or failed. Waits if the channel is full.
  virtual StatusOr<uint64_t> Ask(const SideRequest& request, char* out) = 0;
  // *bytes: of the payload.
  virtual Status Answer(uint64_t sequence, int timeout_ms, bool* answered, SideAnswer* answer, size_t* bytes) = 0;
  // The tool asks no more: what its requests have made at the server goes. `open`: have no answer, and none is waited
  // for; `out` of these must stay for as long as the channel does.
  virtual void EndAsking(const std::vector<uint64_t>& open) = 0;
  // Records calls: see client/trace/control.h. The descriptors stay the caller's.
  virtual Status BeginTrace(uint64_t events, double max_seconds) = 0;
  virtual Status EndTrace(int timeline_fd, int table_fd, bool json) = 0;
  virtual Status TraceTotals(int table_fd, bool json) = 0;
};

class Agent {
 public:
  // Listens on the socket SocketName (proto/agent/types.h) in `directory` and serves `host`, which must outlive the
  // agent. Makes the folder (mode 0700) if it is missing. Fails for instance if another process of the job is there
  // already.
  static StatusOr<std::unique_ptr<Agent>> Start(const std::string& directory, AgentHost* host);

  // Ends the thread; a lock that a tool holds is released first.
  virtual ~Agent() = default;

 protected:
  Agent() = default;
};

}  // namespace cuda_remote::agent

#endif  // CUDA_REMOTE_CLIENT_AGENT_AGENT_H_
