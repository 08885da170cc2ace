// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/move_job.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "checkpoint/agent/agent_client.h"
#include "checkpoint/gpu/copy_ahead.h"
#include "checkpoint/gpu/gpu_host.h"
#include "checkpoint/gpu/modules.h"
#include "checkpoint/gpu/parallel.h"
#include "checkpoint/gpu/places.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/cuda_processes.h"
#include "checkpoint/job/job.h"
#include "checkpoint/job/job_claim.h"
#include "checkpoint/job/ranks.h"
#include "checkpoint/transaction/at_step.h"
#include "checkpoint/transaction/code_ahead.h"
#include "checkpoint/transaction/give_way.h"
#include "checkpoint/transaction/live_job.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/errors/annotate.h"
#include "proto/folder/this_job.h"
#include "replay/replayer/replayer.h"

namespace cuda_remote::checkpoint {
namespace {

// One process on its way.
struct Move {
  CudaProcess of;
  Placed to;
  LiveProcess* process = nullptr;
  std::unique_ptr<ClientChannel> channel;  // the new one
  const replay::Log* ahead = nullptr;      // whose code is there already
  std::unique_ptr<CopyAhead> copies;       // memory that is there already; null: none
  bool may_hand_over = true;               // its memory, without a copy
  SharedBlocks handed_over;
  bool replayed = false;
  bool anew = false;  // the session is of no use; another one may be
  MovedCode moved;    // once it is replayed
  std::vector<ckptfmt::Region> regions;
  absl::Status status;  // of a step that all take at the same time
};

// Ends the new session.
void Drop(Move* move) {
  move->copies.reset();
  move->channel.reset();
  move->ahead = nullptr;
}

absl::Status Of(const Move& move, size_t count, const absl::Status& status) {
  return AnnotateOneOf(count, move.to.name, status);
}

std::vector<Placed> PlacesOf(const std::vector<Move>& moves) {
  std::vector<Placed> places;
  for (const Move& move : moves) places.push_back(move.to);
  return places;
}

// Where each process goes.
absl::StatusOr<std::vector<Placed>> PlanMove(const MoveJobOptions& options, const std::vector<CudaProcess>& processes,
                                             GpuHosts* hosts) {
  std::vector<int> pids;
  for (const CudaProcess& process : processes) pids.push_back(process.pid);
  const std::vector<int> ranks = RanksOf(pids);
  std::vector<PlacedProcess> who;
  for (size_t i = 0; i < processes.size(); ++i) {
    who.push_back({uint32_t(processes[i].inner_pid), ranks[i], NameOf(processes[i])});
  }
  const Place otherwise = {options.to, options.gpu < 0 ? std::vector<int>() : std::vector<int>{options.gpu}};
  CR_ASSIGN_OR_RETURN(const std::vector<Place> places, PlaceProcesses(options.rules, otherwise, who));
  std::vector<Placed> placed;
  for (size_t i = 0; i < processes.size(); ++i) {
    if (places[i].server.empty()) {
      return absl::InvalidArgumentError(who[i].name +
                                        " has no server to go to: name one with --to, or in a --map of its own");
    }
    CR_ASSIGN_OR_RETURN(const GpuHost* const host, hosts->Open(places[i].server, -1));
    placed.push_back({who[i].name, places[i], host});
  }
  return placed;
}

// Opens the sessions of `processes` at their places, in this order. Those that are among *moves already are kept, and
// what else is there ends. `held`: null, or the processes, which are stopped: their agents listen to nobody else then.
// Without it, a process that has just ended gets no session.
absl::Status OpenSessions(const MoveJobOptions& options, const std::string& directory, const Job& job,
                          const std::vector<CudaProcess>& processes, const LiveJob* held, GpuHosts* hosts,
                          std::vector<Move>* moves) {
  CR_ASSIGN_OR_RETURN(const std::vector<Placed> placed, PlanMove(options, processes, hosts));
  std::vector<Move> matched(processes.size());
  for (size_t i = 0; i < processes.size(); ++i) {
    Move& move = matched[i];
    const auto found = std::find_if(moves->begin(), moves->end(), [&](const Move& old) {
      return old.of == processes[i] && old.to.host == placed[i].host && old.to.place == placed[i].place;
    });
    if (found != moves->end()) move = std::move(*found);
    move.of = processes[i];
    move.to = placed[i];
    if (!move.channel) {
      agent::Info info;
      if (held) {
        info = held->processes()[i]->info();
      } else {
        CR_RETURN_IF_ERROR(CheckNotStopped(move.of));
        const auto agent = agent::AgentClient::Connect(directory, uint32_t(move.of.inner_pid), NameOf(move.of));
        const auto asked = agent.ok() ? (*agent)->GetInfo() : agent.status();
        // It may have ended just now. If it has not, its session is opened when it is held.
        if (!asked.ok()) continue;
        info = *asked;
      }
      const ActAs user(AccountOf(job));  // whose session it is
      auto channel = OpenSession(move.to.host->socket_path(), uint32_t(move.of.inner_pid), move.of.program, job.name(),
                                 move.to.place.gpus, info.driver_settings);
      if (!channel.ok()) return Of(move, processes.size(), channel.status());
      move.channel = *std::move(channel);
    }
  }
  *moves = std::move(matched);
  return absl::OkStatus();
}

// Whether the GPUs of all places have room for more than the job's memory, or at least a lot, as far as their servers
// say. A job that runs on one of them must not miss what is made there ahead.
bool HasRoomToSpare(const std::vector<Move>& moves, uint64_t held) {
  constexpr uint64_t kSpare = uint64_t{256} << 20, kALot = uint64_t{4} << 30;
  return std::all_of(moves.begin(), moves.end(), [&](const Move& move) {
    uint64_t free = 0;
    const int gpu = move.to.place.gpus.empty() ? 0 : move.to.place.gpus[0];
    return !AskFreeMemory(move.to.host->server(), gpu, &free) || free >= std::min(held + kSpare, kALot);
  });
}

// Makes the code of all processes at their places while the job runs on.
void ReplayCodeAhead(const CodeAhead& code, std::vector<Move>* moves) {
  std::vector<Move*> with_code;
  for (Move& move : *moves) {
    move.ahead = code.Of(move.of);
    if (!move.channel) move.ahead = nullptr;
    if (move.ahead) with_code.push_back(&move);
  }
  const absl::Status done = AllAtOnce(with_code.size(), [&](size_t i) {
    Move& move = *with_code[i];
    if (!ReplayCode(*move.ahead, move.channel.get())) move.status = absl::InternalError("its session cannot be used");
  });
  // Then all of it is made in the pause.
  if (!done.ok()) {
    for (Move* move : with_code) move->ahead = nullptr;
  }
  for (Move& move : *moves) {
    if (!std::exchange(move.status, absl::OkStatus()).ok()) Drop(&move);
  }
}

// Requests to the process's present session; null if it cannot be reached, or has no new one.
std::unique_ptr<RunningProcess> Reach(const Move& move, const std::string& directory) {
  if (!move.channel) return nullptr;
  auto running = RunningProcess::Connect(move.of, directory);
  return running.ok() ? *std::move(running) : nullptr;
}

// Copies GPU memory to new sessions on other machines while the job runs on. Whatever goes wrong, less is there when
// the job stops.
void CopyBefore(const std::string& directory, JobReport* report, uint64_t held, SharedBuffers* shared, ChunkPool* pool,
                const std::function<bool()>& cancelled, std::vector<Move>* moves) {
  std::vector<Move*> far;
  for (Move& move : *moves) {
    const auto running = Reach(move, directory);
    if (running && CopyAhead::Helps(running->shared_memory(), *move.channel)) far.push_back(&move);
  }
  if (far.empty()) return;
  const auto progress = report->Begin("copying GPU memory while the job runs");
  // While the memory of others was copied, that of the first has changed.
  const int passes = far.size() > 1 ? 2 : 1;
  for (int pass = 0; pass < passes; ++pass) {
    for (size_t i = 0; i < far.size() && !cancelled(); ++i) {
      Move& move = *far[i];
      AtStep("copy GPU memory while the job runs", pass * far.size() + i, passes * far.size());
      const auto running = Reach(move, directory);
      if (!running) continue;
      if (!move.copies) move.copies = std::make_unique<CopyAhead>(move.channel.get(), pool);
      bool begun = false;
      const auto copied = [&] {
        if (!std::exchange(begun, true)) AtStep("copy the rest of it while the job runs", i, far.size());
        uint64_t bytes = 0;
        for (const Move* const one : far) bytes += one->copies ? one->copies->put_bytes() : 0;
        progress->Update(bytes, std::max(bytes, held));
      };
      move.copies->Run(running.get(), shared, copied, cancelled).IgnoreError();
      if (move.copies->is_lost()) Drop(&move);
    }
  }
}

// Sessions whose memory may be handed over make that ready while the job runs on.
void PrepareHandOvers(const std::string& directory, const std::vector<Move>& moves) {
  for (const Move& move : moves) {
    const auto running = Reach(move, directory);
    if (running && MayHandOver(*running, *move.channel)) PrepareHandOver(running.get());
  }
}

// Ends sessions with code that their processes do not have any more.
void DropOutdated(const LiveJob& live, std::vector<Move>* moves) {
  for (Move& move : *moves) {
    if (!move.ahead) continue;
    const auto& processes = live.processes();
    const auto found = std::find_if(processes.begin(), processes.end(),
                                    [&](const auto& process) { return process->process() == move.of; });
    if (found == processes.end() || !replay::HasCodeOf(*move.ahead, (*found)->log())) Drop(&move);
  }
}

// What has to go along. Fails if it cannot.
absl::Status Describe(const std::vector<uint64_t>& sessions, Move* move) {
  ckptfmt::ProcessInfo before, after;
  ClientChannel* const from = move->process->channel();
  CR_RETURN_IF_ERROR(Drain(from));
  CR_ASSIGN_OR_RETURN(move->regions, ListRegions(from, sessions));
  CR_RETURN_IF_ERROR(DescribeServer(from, &before));
  CR_RETURN_IF_ERROR(DescribeServer(move->channel.get(), &after));
  return CheckDevices(move->process->log(), before.devices, after.devices, ToText(move->to.place));
}

// Runs `work` for all moves that are not replayed yet, at the same time. It leaves its result in Move::status.
void ForEachOpen(std::vector<Move>* moves, const std::function<void(size_t, Move*)>& work) {
  std::vector<size_t> open;
  for (size_t i = 0; i < moves->size(); ++i) {
    if (!(*moves)[i].replayed) open.push_back(i);
  }
  const absl::Status done = AllAtOnce(open.size(), [&](size_t i) { work(open[i], &(*moves)[open[i]]); });
  if (done.ok()) return;
  for (const size_t i : open) (*moves)[i].status = done;
}

// The first failure that they have left.
absl::Status ResultOf(const std::vector<Move>& moves) {
  for (const Move& move : moves) CR_RETURN_IF_ERROR(Of(move, moves.size(), move.status));
  return absl::OkStatus();
}

// New sessions on the old ones' GPUs get their memory. Others drop what they need not have made ahead.
absl::Status HandOverAll(std::vector<Move>* moves) {
  ForEachOpen(moves, [](size_t, Move* move) {
    move->handed_over = SharedBlocks();
    if (move->copies) {
      const absl::Status dropped = move->copies->DropFreed(move->process->channel());
      // A new session that is lost is noticed in the replay.
      if (!dropped.ok() && !move->copies->is_lost()) move->status = dropped;
    }
    if (!move->may_hand_over || !move->status.ok()) return;
    auto handed_over = HandOver(move->process->channel(), move->channel.get());
    move->status = handed_over.status();
    if (handed_over.ok()) move->handed_over = *std::move(handed_over);
  });
  return ResultOf(*moves);
}

// Replays the log of one process in its new session.
absl::Status ReplayOne(const std::string& scope, bool memory_is_there, Move* move) {
  CR_RETURN_IF_ERROR(ReplayLog(move->process->log(), move->channel.get(), scope, move->ahead));
  if (memory_is_there) {
    CR_ASSIGN_OR_RETURN(move->handed_over, KeepHandedOver(move->channel.get()));
  }
  CR_ASSIGN_OR_RETURN(move->moved, FindMovedCode(move->channel.get(), move->regions));
  return absl::OkStatus();
}

// At the same time: the objects of one process may be shared with another, and wait for it. *again: sessions have ended
// in which code or memory that was made ahead, or memory that was handed over, is in the way; the others are done.
absl::Status ReplayAll(const std::string& scope, std::vector<Move>* moves, bool* again) {
  *again = false;
  std::vector<const replay::Log*> all;
  for (const Move& move : *moves) all.push_back(&move.process->log());
  const std::vector<Placed> placed = PlacesOf(*moves);
  CR_RETURN_IF_ERROR(CheckSharing(placed, all));
  ForEachOpen(moves, [&](size_t i, Move* move) {
    const bool handed_over = !move->handed_over.empty(), copies = move->copies && move->copies->begun();
    move->moved = MovedCode();
    move->handed_over = SharedBlocks();
    move->status = ReplayOne(scope, handed_over || copies, move);
    move->replayed = move->status.ok();
    const absl::Status in_place =
        move->replayed ? CheckVariables(move->channel.get(), move->regions) : absl::OkStatus();
    const bool elsewhere = !in_place.ok() || (move->replayed && !move->moved.empty());
    // In the log's own order it may come to lie where it was. Else memory has to be searched on its way.
    move->anew = move->ahead ? !move->replayed || elsewhere : (elsewhere && handed_over) || (!move->replayed && copies);
    if (move->anew && !move->ahead) move->may_hand_over = false;
    if (!in_place.ok() && !move->anew) move->status = in_place;
  });
  // Code is made ahead only of processes that share nothing. Of others, all are replayed together.
  const bool all_anew =
      std::any_of(moves->begin(), moves->end(), [](const Move& move) { return move.anew && !move.ahead; });
  for (Move& move : *moves) {
    if (!move.anew && !all_anew) continue;
    move.anew = move.replayed = false;
    move.status = absl::OkStatus();
    Drop(&move);
    *again = true;
  }
  return ResultOf(*moves);
}

// Finds out what the new sessions have of the old ones' memory.
absl::Status CompareAll(std::vector<Move>* moves) {
  std::vector<Move*> with_copies;
  for (Move& move : *moves) {
    if (move.copies) with_copies.push_back(&move);
  }
  CR_RETURN_IF_ERROR(AllAtOnce(with_copies.size(), [&](size_t i) {
    Move& move = *with_copies[i];
    move.status = move.copies->Compare(move.process->channel(), move.regions);
  }));
  return ResultOf(*moves);
}

// One move. Its steps are in the order in which they are declared.
class Moving {
 public:
  Moving(const MoveJobOptions& options, const Job& job, const std::string& directory, JobReport* report)
      : options_(options),
        job_(job),
        directory_(directory),
        report_(*report),
        hosts_({SocketFolder(directory), /*detached=*/true, AccountOf(job), options.environment}),
        code_(job, directory, claim_, &images_),
        live_(job, directory, claim_, &images_),
        transaction_(job_, &live_, /*engine=*/nullptr, /*guard=*/nullptr) {
    lock_.timeout_ms = int(options.timeout * 1000);
    lock_.cancelled = cancelled_;
  }

  absl::StatusOr<MoveJobOutcome> Run();

 private:
  // While the job runs: everything that can go wrong early does so here.
  absl::Status Open();
  absl::Status MakeAhead();
  // In the pause.
  absl::Status Hold();
  absl::Status ListMemory();
  absl::Status HandOverMemory();
  absl::Status CheckPlaces();
  absl::Status Replay();
  absl::Status Copy();
  absl::Status CopyOne(size_t index, JobReport::LongStep* progress, uint64_t before);
  absl::Status Switch();
  // Behind it.
  void NoteMoved();

  absl::Status OpenSessionsOf(const std::vector<CudaProcess>& processes, const LiveJob* held) {
    return OpenSessions(options_, directory_, job_, processes, held, &hosts_, &moves_);
  }

  const MoveJobOptions& options_;
  const Job& job_;
  const std::string& directory_;
  JobReport& report_;
  MoveJobOutcome outcome_;
  const std::function<bool()> cancelled_ = [this] { return report_.Cancelled(); };
  const Moment start_ = Now();

  // In the order in which they were made; they go in the opposite one.
  JobClaim claim_;
  GpuHosts hosts_;
  GiveWay give_way_;
  ChunkPool pool_{Precopy::kSinkSlots * ChunkPool::kSlotBytes};  // outlives the moves
  std::vector<Move> moves_;
  std::unique_ptr<SharedBuffers> shared_;
  agent::LockOptions lock_;
  ImagesAhead images_;
  CodeAhead code_;
  LiveJob live_;
  JobTransaction transaction_;
  std::vector<CudaProcess> held_;
  const GpuHost* host_ = nullptr;  // of processes that begin to use CUDA later
  std::string scope_;              // in which the new sessions share
};

absl::StatusOr<MoveJobOutcome> Moving::Run() {
  CR_RETURN_IF_ERROR(Open());
  CR_RETURN_IF_ERROR(MakeAhead());
  CR_RETURN_IF_ERROR(Hold());
  CR_RETURN_IF_ERROR(ListMemory());
  CR_RETURN_IF_ERROR(HandOverMemory());
  CR_RETURN_IF_ERROR(CheckPlaces());
  CR_RETURN_IF_ERROR(Replay());
  CR_RETURN_IF_ERROR(Copy());
  CR_RETURN_IF_ERROR(Switch());
  outcome_.paused = transaction_.HeldSeconds();
  outcome_.seconds = SecondsSince(start_);
  outcome_.servers = moves_.empty() ? options_.to : ServersOf(PlacesOf(moves_));
  NoteMoved();
  return outcome_;
}

absl::Status Moving::Open() {
  CR_RETURN_IF_ERROR(claim_.Take(directory_, report_.Tool(), cancelled_));
  AtStep("open sessions");
  if (!options_.to.empty()) CR_RETURN_IF_ERROR(hosts_.Open(options_.to, -1).status());
  CR_RETURN_IF_ERROR(OpenSessionsOf(FindCudaProcesses(job_, directory_), nullptr));
  if (moves_.empty() && !JobIsAlive(job_)) return absl::FailedPreconditionError("the job has ended");
  shared_ = SharedBuffers::Make();
  return absl::OkStatus();
}

absl::Status Moving::MakeAhead() {
  AtStep("read module images");
  give_way_.Begin(hosts_.Started());
  images_.Read(job_, directory_);
  give_way_.End();
  const Moment begun = Now();
  const uint64_t held_bytes = AskHeldBytes(job_, directory_);
  if (HasRoomToSpare(moves_, held_bytes)) {
    CR_RETURN_IF_ERROR(code_.Look(lock_));
    // The job runs again. Nobody but this tool knows its relays before the move is decided.
    give_way_.Begin();
    AtStep("replay code");
    ReplayCodeAhead(code_, &moves_);
    if (pool_.ok()) CopyBefore(directory_, &report_, held_bytes, shared_.get(), &pool_, cancelled_, &moves_);
    if (cancelled_()) return absl::CancelledError("interrupted");
  }
  AtStep("make handing over ready");
  PrepareHandOvers(directory_, moves_);
  give_way_.End();
  outcome_.ahead = SecondsSince(begun);
  outcome_.look = code_.held_seconds();
  return absl::OkStatus();
}

absl::Status Moving::Hold() {
  // Processes may have come and gone since.
  CR_RETURN_IF_ERROR(transaction_.Begin(lock_));
  DropOutdated(live_, &moves_);
  for (const auto& process : live_.processes()) held_.push_back(process->process());
  CR_RETURN_IF_ERROR(OpenSessionsOf(held_, &live_));
  for (size_t i = 0; i < moves_.size(); ++i) moves_[i].process = live_.processes()[i].get();
  return absl::OkStatus();
}

absl::Status Moving::ListMemory() {
  AtStep("list GPU memory");
  for (Move& move : moves_) {
    const std::vector<uint64_t> beside = live_.SessionsAt(move.process->info().server);
    CR_RETURN_IF_ERROR(Of(move, moves_.size(), Describe(beside, &move)));
    for (const ckptfmt::Region& region : move.regions) outcome_.gpu_bytes += region.bytes;
    outcome_.objects += move.process->log().records();
  }
  return absl::OkStatus();
}

absl::Status Moving::HandOverMemory() {
  AtStep("hand over GPU memory");
  const Moment begun = Now();
  CR_RETURN_IF_ERROR(HandOverAll(&moves_));
  outcome_.handing_over = SecondsSince(begun);
  return absl::OkStatus();
}

// Whether there is room for the memory that is not there yet, if processes were mapped.
absl::Status Moving::CheckPlaces() {
  if (!options_.rules.empty()) {
    std::vector<std::vector<ckptfmt::Region>> regions;
    for (const Move& move : moves_) {
      regions.emplace_back();
      for (const ckptfmt::Region& region : move.regions) {
        const bool there = move.handed_over.Have(region) || (move.copies && move.copies->Has(region));
        if (!there) regions.back().push_back(region);
      }
    }
    const ActAs user(AccountOf(job_));
    CR_RETURN_IF_ERROR(CheckRoom(PlacesOf(moves_), regions));
  }
  if (options_.to.empty()) {
    host_ = moves_.front().to.host;
  } else {
    CR_ASSIGN_OR_RETURN(host_, hosts_.Open(options_.to, -1));
  }
  return absl::OkStatus();
}

absl::Status Moving::Replay() {
  scope_ = NewSharingScope();
  AtStep("replay");
  const Moment begun = Now();
  bool again = false;
  CR_RETURN_IF_ERROR(ReplayAll(scope_, &moves_, &again));
  // Twice at most: without what was made ahead, and then without memory that was handed over.
  while (again) {
    // Sessions that end now may still answer for the same keys.
    if (std::none_of(moves_.begin(), moves_.end(), [](const Move& move) { return move.replayed; })) {
      scope_ = NewSharingScope();
    }
    CR_RETURN_IF_ERROR(OpenSessionsOf(held_, &live_));
    CR_RETURN_IF_ERROR(HandOverAll(&moves_));
    CR_RETURN_IF_ERROR(ReplayAll(scope_, &moves_, &again));
  }
  for (const Move& move : moves_) outcome_.objects_ahead += move.ahead ? replay::CodeRecords(*move.ahead) : 0;
  outcome_.replaying = SecondsSince(begun);
  return absl::OkStatus();
}

absl::Status Moving::Copy() {
  const Moment begun = Now();
  AtStep("compare GPU memory");
  CR_RETURN_IF_ERROR(CompareAll(&moves_));
  {
    const auto progress = report_.Begin("copying GPU memory");
    uint64_t before = 0;
    for (size_t i = 0; i < moves_.size(); ++i) {
      CR_RETURN_IF_ERROR(Of(moves_[i], moves_.size(), CopyOne(i, progress.get(), before)));
      for (const ckptfmt::Region& region : moves_[i].regions) before += region.bytes;
    }
  }
  outcome_.copying = SecondsSince(begun);
  return absl::OkStatus();
}

absl::Status Moving::CopyOne(size_t index, JobReport::LongStep* progress, uint64_t before) {
  Move& move = moves_[index];
  AtStep("copy GPU memory", index, moves_.size());
  bool begun = false;
  const auto go_on = [&](uint64_t done, uint64_t) {
    if (!std::exchange(begun, true)) AtStep("copy the rest of GPU memory", index, moves_.size());
    progress->Update(before + done, outcome_.gpu_bytes);
    return !cancelled_();
  };
  SkipChunk is_there;
  if (move.copies) {
    is_there = [&move](size_t region, uint64_t chunk) { return move.copies->IsThere(region, chunk); };
  }
  CR_RETURN_IF_ERROR(CopyMemory(move.process->channel(), move.regions, move.channel.get(), move.moved, move.handed_over,
                                is_there, shared_.get(), go_on, &outcome_.copied));
  if (move.copies) outcome_.before.Add(move.copies->times());
  return absl::OkStatus();
}

absl::Status Moving::Switch() {
  for (const Move& move : moves_) move.process->PrepareSwitch(move.channel.get(), move.to.host->server());
  // From now on the job may use the relays, so none of their threads may still give way.
  give_way_.End();
  // Processes that connect from now on belong to the others. Until the transaction has ended, none does.
  ServerChange change(directory_);
  const auto decide = [&] {
    std::vector<std::string> from;
    for (const Move& move : moves_) from.push_back(move.process->server());
    CR_RETURN_IF_ERROR(WriteJobServer(directory_, host_->server(), options_.gpu, scope_));
    // Before the old sessions end, so that their servers can log why.
    for (size_t i = 0; i < moves_.size(); ++i) {
      const Move& move = moves_[i];
      const ActAs user(AccountOf(job_));
      TellMoved(from[i], move.process->info().session,
                move.to.place.server.empty() ? options_.to : move.to.place.server);
    }
    return absl::OkStatus();
  };
  CR_RETURN_IF_ERROR(transaction_.Switch(decide));
  change.Keep();
  return absl::OkStatus();
}

void Moving::NoteMoved() {
  for (const Move& move : moves_) {
    const ActAs user(AccountOf(job_));
    TellSaved(move.to.host->server(), move.channel->welcome().session, job_.saved_unix_ms(), job_.saved_bytes());
  }
  // What this tool knows of it may not be all that its folder says.
  if (job_.runner_pid() == 0) return;
  absl::StatusOr<Job> told = ReadJob(directory_);
  if (!told.ok() || !IsSameRun(*told, job_)) return;
  told->set_server(options_.to.empty() ? moves_.front().to.place.server : options_.to);
  told->set_gpu(options_.gpu);
  const absl::Status written = WriteJob(directory_, *told);
  if (!written.ok()) report_.Say(std::string(written.message()));
}

}  // namespace

absl::StatusOr<MoveJobOutcome> MoveJob(const MoveJobOptions& options, const Job& job, const std::string& directory,
                                       JobReport* report) {
  return Moving(options, job, directory, report).Run();
}

}  // namespace cuda_remote::checkpoint
