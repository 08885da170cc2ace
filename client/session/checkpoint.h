// SPDX-License-Identifier: Apache-2.0
// Checkpoint, restart and migration of this process: what the agent's requests do (see client/agent/agent.h).
//
// Runs on the agent's thread, but for NoteLeft. From Settle to Unlock no driver call is inside the library, no host
// function runs and the GPU is idle, so nothing there races with the application. Before that, Close, Look and Admit do
// not wait for either.
#ifndef CUDA_REMOTE_CLIENT_SESSION_CHECKPOINT_H_
#define CUDA_REMOTE_CLIENT_SESSION_CHECKPOINT_H_

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "client/agent/agent.h"
#include "client/session/added_work.h"
#include "proto/base/hash.h"
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
  bool Close(std::string* error) override;
  bool Look(agent::Activity* activity, std::string* error) override;
  bool Admit(const agent::Admission& which) override;
  bool Settle(int timeout_ms, const std::function<bool()>& gone, bool* settled, std::string* error) override;
  void SettleMove() override;
  void Unlock() override;
  bool GiveImages(uint64_t* number, int* fd, std::string* error) override;
  bool Take(uint64_t images, agent::Taken* taken, std::string* error) override;
  void Release() override;
  void Abandon() override;
  bool Give(agent::Given given, std::string* error) override;
  bool Ask(const agent::SideRequest& request, char* out, uint64_t* sequence, std::string* error) override;
  bool Answer(uint64_t sequence, int timeout_ms, bool* answered, agent::SideAnswer* answer, size_t* bytes,
              std::string* error) override;
  void EndAsking(const std::vector<uint64_t>& open) override;
  bool BeginTrace(uint64_t events, double max_seconds, std::string* error) override;
  bool EndTrace(int timeline_fd, int table_fd, bool json, std::string* error) override;
  bool TraceTotals(int table_fd, bool json, std::string* error) override;

 private:
  // Null: the process has none.
  ClientChannel* channel() const;
  // Tells another server of the host arena and of managed memory, after a move.
  bool ShareHostArena(std::string* error);
  // Makes again what the tool's replay left out because it needs this process's pinned memory.
  bool ReplayRest(std::string* error);
  void GoBack();
  // Where the server's functions lie whose addresses variables hold; `use` gets all of it, in pieces of whole modules.
  CUresult AskCode(const std::function<void(const wire::OpCodeWords_Reply&)>& use);
  // Puts that into the log, for a replay.
  bool NoteCode(std::string* error);
  // After a replay: false if this process's memory holds the address of a function that lies elsewhere now.
  bool FindOldCode(std::string* error);
  // The same for managed memory: that it is there, and then what is in it.
  bool MapManaged(std::string* error);
  bool MoveManaged(std::string* error);
  // Notes when the events of the log completed, for after a move to another server. Failure is not an error: elapsed
  // times that begin before the move are then refused, not wrong.
  void NoteEventTimes();
  // Waits until the GPU is idle and all device output has arrived.
  bool DrainUntil(int64_t deadline_ns, const std::function<bool()>& gone, std::string* error);
  // Whether a context's GPU had work when the server answered last.
  bool HasWork(uint64_t context) const;
  void ForgetQuestion();
  // Both set *error and return false.
  bool ServerWentAway(ChannelStatus status, std::string* error);
  static bool WorkFailed(CUresult result, std::string* error);

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

#endif  // CUDA_REMOTE_CLIENT_SESSION_CHECKPOINT_H_
