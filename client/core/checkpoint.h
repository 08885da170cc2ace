// SPDX-License-Identifier: Apache-2.0
// Checkpoint, restart and migration of this process: what the agent's requests do (see client/agent/agent.h).
//
// Runs on the agent's thread, but for NoteLeft. From Settle to Unlock no driver call is inside the library, no host
// function runs and the GPU is idle, so nothing there races with the application. Before that, Close, Look and Admit do
// not wait for either.
#ifndef CUDA_REMOTE_CLIENT_CORE_CHECKPOINT_H_
#define CUDA_REMOTE_CLIENT_CORE_CHECKPOINT_H_

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "client/agent/agent.h"
#include "client/core/added_work.h"
#include "client/memory/host_mappings.h"
#include "proto/base/hash.h"
#include "proto/base/status.h"
#include "proto/base/unique_fd.h"
#include "proto/channel/client_channel.h"

namespace cuda_remote::wire {
struct OpCodeWords_Reply;
}  // namespace cuda_remote::wire

namespace cuda_remote::client {

class Session;

class Checkpoint final : public agent::AgentHost {
 public:
  explicit Checkpoint(Session* session) : session_(session) {}

  // A call leaves the closed gate that may have put work into `stream` (as on the wire), in `context`. Any thread.
  void NoteLeft(uint64_t stream, uint64_t context) { added_.Add(stream, context); }

  // agent::AgentHost.
  agent::Info GetInfo() override;
  Status Close() override;
  StatusOr<agent::Activity> Look() override;
  bool Admit(const agent::Admission& which) override;
  StatusOr<bool> Settle(int timeout_ms, const std::function<bool()>& gone) override;
  void SettleMove() override;
  void Unlock() override;
  StatusOr<UniqueFd> GiveImages(uint64_t* number) override;
  StatusOr<agent::Taken> Take(uint64_t images) override;
  void Release() override;
  void Abandon() override;
  Status Give(agent::Given given) override;
  StatusOr<uint64_t> Ask(const agent::SideRequest& request, char* out) override;
  Status Answer(uint64_t sequence, int timeout_ms, bool* answered, agent::SideAnswer* answer, size_t* bytes) override;
  void EndAsking(const std::vector<uint64_t>& open) override;
  Status BeginTrace(uint64_t events, double max_seconds) override;
  Status EndTrace(int timeline_fd, int table_fd, bool json) override;
  Status TraceTotals(int table_fd, bool json) override;

 private:
  // Null: the process has none.
  ClientChannel* channel() const;
  // Gives another server, whose channel this process has now, what only the process knows of.
  Status MoveToNewServer();
  // Tells it of the host arena and of managed memory.
  Status ShareHostArena();
  HostMappings::Pages NewPagesOf(uint64_t start, uint64_t bytes);
  // Makes again what the tool's replay left out because it needs this process's pinned memory.
  Status ReplayRest();
  void GoBack();
  // Where the server's functions lie whose addresses variables hold; `use` gets all of it, in pieces of whole modules.
  CUresult AskCode(const std::function<void(const wire::OpCodeWords_Reply&)>& use);
  // Puts that into the log, for a replay.
  Status NoteCode();
  // After a replay: fails if this process's memory holds the address of a function that lies elsewhere now.
  Status FindOldCode();
  // The same for managed memory: that it is there, and then what is in it.
  Status MapManaged();
  Status MoveManaged();
  // Notes when the events of the log completed, for after a move to another server, and which were last recorded in a
  // capture. Failure is not an error: elapsed times that begin before the move are then refused, not wrong.
  void NoteEvents();
  // Notes in the log whether an event of this context was last recorded in a capture.
  void NoteCaptured(uint64_t context, uint64_t event, bool captured);
  // Waits until the GPU is idle and all device output has arrived.
  Status DrainUntil(int64_t deadline_ns, const std::function<bool()>& gone);
  // Whether a context's GPU had work when the server answered last.
  bool HasWork(uint64_t context) const;
  void ForgetQuestion();
  // The failures that these are.
  Status ServerWentAway(ChannelStatus status);
  static Status WorkFailed(CUresult result);

  Session* const session_;
  AddedWork added_;
  bool taken_ = false;  // a tool uses the channel
  // What a tool has got already of the log; 0: nothing.
  uint64_t given_images_number_ = 0;
  std::set<Hash128> given_images_;
  // The question about work that the server has not answered (0: none), whether the job was quiet when it was asked,
  // and how many calls had been admitted; how many have been since the gate closed; and the streams and their contexts
  // that had work at the last answer.
  uint64_t question_ = 0;
  bool question_quiet_ = false;
  uint64_t question_admissions_ = 0;
  uint64_t admissions_ = 0;
  std::vector<uint64_t> busy_streams_, busy_contexts_;
  // Since a Give of another server's channel, until calls go on: there is a way back to the server before.
  bool given_new_ = false;
  std::unique_ptr<ClientChannel> former_channel_;  // null after a restart
  std::string former_scope_;                       // the job's sharing scope at that Give
  std::string former_server_;
  // Memory that a tool has the server map: what is mapped, and by sequence number what is asked for and not answered.
  std::set<uint64_t> side_maps_;
  std::map<uint64_t, uint64_t> side_mapping_;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_CHECKPOINT_H_
