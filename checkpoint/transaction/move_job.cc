// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/move_job.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "checkpoint/agent/agent_client.h"
#include "checkpoint/gpu/copy_ahead.h"
#include "checkpoint/gpu/gpu_host.h"
#include "checkpoint/gpu/modules.h"
#include "checkpoint/gpu/places.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/cuda_processes.h"
#include "checkpoint/job/job.h"
#include "checkpoint/job/job_claim.h"
#include "checkpoint/job/ranks.h"
#include "checkpoint/transaction/at_step.h"
#include "checkpoint/transaction/code_ahead.h"
#include "checkpoint/transaction/live_job.h"
#include "proto/base/clock.h"
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
  std::string error;
};

// Ends the new session.
void Drop(Move* move) {
  move->copies.reset();
  move->channel.reset();
  move->ahead = nullptr;
}

// Says which process it was about, of several. False.
bool Of(const Move& move, size_t count, std::string* error) {
  if (count > 1) *error = move.to.name + ": " + *error;
  return false;
}

std::vector<Placed> PlacesOf(const std::vector<Move>& moves) {
  std::vector<Placed> places;
  for (const Move& move : moves) places.push_back(move.to);
  return places;
}

// Where each process goes.
bool PlanMove(const MoveJobOptions& options, const std::vector<CudaProcess>& processes, GpuHosts* hosts,
              std::vector<Placed>* placed, std::string* error) {
  std::vector<int> pids;
  for (const CudaProcess& process : processes) pids.push_back(process.pid);
  const std::vector<int> ranks = RanksOf(pids);
  std::vector<PlacedProcess> who;
  for (size_t i = 0; i < processes.size(); ++i) {
    who.push_back({uint32_t(processes[i].inner_pid), ranks[i], NameOf(processes[i])});
  }
  std::vector<Place> places;
  const Place otherwise = {options.to, options.gpu < 0 ? std::vector<int>() : std::vector<int>{options.gpu}};
  if (!PlaceProcesses(options.rules, otherwise, who, &places, error)) return false;
  for (size_t i = 0; i < processes.size(); ++i) {
    if (places[i].server.empty()) {
      *error = who[i].name + " has no server to go to: name one with --to, or in a --map of its own";
      return false;
    }
    const GpuHost* const host = hosts->Open(places[i].server, -1, error);
    if (!host) return false;
    placed->push_back({who[i].name, places[i], host});
  }
  return true;
}

// Opens the sessions of `processes` at their places, in this order. Those that are among *moves already are kept, and
// what else is there ends. `held`: null, or the processes, which are stopped: their agents listen to nobody else then.
// Without it, a process that has just ended gets no session.
bool OpenSessions(const MoveJobOptions& options, const std::string& directory, const Job& job,
                  const std::vector<CudaProcess>& processes, const LiveJob* held, GpuHosts* hosts,
                  std::vector<Move>* moves, std::string* error) {
  std::vector<Placed> placed;
  if (!PlanMove(options, processes, hosts, &placed, error)) return false;
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
        std::string ignored;
        const auto agent =
            agent::AgentClient::Connect(directory, uint32_t(move.of.inner_pid), NameOf(move.of), &ignored);
        // It may have ended just now. If it has not, its session is opened when it is held.
        if (!agent || !agent->GetInfo(&info, &ignored)) continue;
      }
      const ActAs user(AccountOf(job));  // whose session it is
      move.channel = OpenSession(move.to.host->socket_path(), uint32_t(move.of.inner_pid), move.of.program, job.name(),
                                 move.to.place.gpus, info.driver_settings, info.address_layout, error);
    }
    if (!move.channel) return Of(move, processes.size(), error);
  }
  *moves = std::move(matched);
  return true;
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
  std::vector<std::thread> threads;
  for (Move& move : *moves) {
    move.ahead = code.Of(move.of);
    if (!move.channel) move.ahead = nullptr;
    if (!move.ahead) continue;
    threads.emplace_back([&move] {
      if (!ReplayCode(*move.ahead, move.channel.get())) move.error = "its session cannot be used";
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (Move& move : *moves) {
    if (!std::exchange(move.error, "").empty()) Drop(&move);
  }
}

// Copies GPU memory to new sessions on other machines while the job runs on. Whatever goes wrong, less is there when
// the job stops.
void CopyBefore(const std::string& directory, JobReport* report, uint64_t held, SharedBuffers* shared, ChunkPool* pool,
                const std::function<bool()>& cancelled, std::vector<Move>* moves) {
  std::string ignored;
  std::vector<Move*> far;
  for (Move& move : *moves) {
    const auto running = move.channel ? RunningProcess::Connect(move.of, directory, &ignored) : nullptr;
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
      const auto running = move.channel ? RunningProcess::Connect(move.of, directory, &ignored) : nullptr;
      if (!running) continue;
      if (!move.copies) move.copies = std::make_unique<CopyAhead>(move.channel.get(), pool);
      bool begun = false;
      const auto copied = [&] {
        if (!std::exchange(begun, true)) AtStep("copy the rest of it while the job runs", i, far.size());
        uint64_t bytes = 0;
        for (const Move* const one : far) bytes += one->copies ? one->copies->put_bytes() : 0;
        progress->Update(bytes, std::max(bytes, held));
      };
      move.copies->Run(running.get(), shared, copied, cancelled, &ignored);
      if (move.copies->is_lost()) Drop(&move);
    }
  }
}

// Sessions whose memory may be handed over make that ready while the job runs on.
void PrepareHandOvers(const std::string& directory, const std::vector<Move>& moves) {
  for (const Move& move : moves) {
    std::string ignored;
    const auto running = move.channel ? RunningProcess::Connect(move.of, directory, &ignored) : nullptr;
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

// What has to go along, and whether it can.
bool Describe(const std::vector<uint64_t>& sessions, Move* move, std::string* error) {
  ckptfmt::ProcessInfo before, after;
  ClientChannel* const from = move->process->channel();
  if (!Drain(from, error) || !ListRegions(from, &move->regions, error, sessions) ||
      !DescribeServer(from, &before, error) || !DescribeServer(move->channel.get(), &after, error)) {
    return false;
  }
  return CheckDevices(move->process->log(), before.devices, after.devices, ToText(move->to.place), error);
}

// Runs `work` for all moves that are not replayed yet, at the same time. It leaves its error in Move::error.
void ForEachOpen(std::vector<Move>* moves, const std::function<void(size_t, Move*)>& work) {
  std::vector<std::thread> threads;
  for (size_t i = 0; i < moves->size(); ++i) {
    if ((*moves)[i].replayed) continue;
    threads.emplace_back([&, i] { work(i, &(*moves)[i]); });
  }
  for (std::thread& thread : threads) thread.join();
}

bool NoErrors(const std::vector<Move>& moves, std::string* error) {
  for (const Move& move : moves) {
    if (move.error.empty()) continue;
    *error = move.error;
    return Of(move, moves.size(), error);
  }
  return true;
}

// New sessions on the old ones' GPUs get their memory. Others drop what they need not have made ahead.
bool HandOverAll(std::vector<Move>* moves, std::string* error) {
  ForEachOpen(moves, [](size_t, Move* move) {
    move->handed_over = SharedBlocks();
    std::string why;
    // A new session that is lost is noticed in the replay.
    if (move->copies && !move->copies->DropFreed(move->process->channel(), &why) && !move->copies->is_lost()) {
      move->error = why;
    }
    if (!move->may_hand_over || !move->error.empty()) return;
    if (!HandOver(move->process->channel(), move->channel.get(), &move->handed_over, &why)) move->error = why;
  });
  return NoErrors(*moves, error);
}

// At the same time: the objects of one process may be shared with another, and wait for it. *again: sessions have ended
// in which code or memory that was made ahead, or memory that was handed over, is in the way; the others are done.
bool ReplayAll(const std::string& scope, std::vector<Move>* moves, bool* again, std::string* error) {
  *again = false;
  std::vector<const replay::Log*> all;
  for (const Move& move : *moves) all.push_back(&move.process->log());
  const std::vector<Placed> placed = PlacesOf(*moves);
  if (!CheckSharing(placed, all, error)) return false;
  const std::vector<std::vector<std::string>> ownerless = OwnerlessAt(placed, all);
  ForEachOpen(moves, [&](size_t i, Move* move) {
    const bool handed_over = !move->handed_over.empty(), copies = move->copies && move->copies->begun();
    move->moved = MovedCode();
    move->handed_over = SharedBlocks();
    move->replayed =
        ReplayLog(move->process->log(), move->channel.get(), &move->error, scope, ownerless[i], move->ahead) &&
        (!(handed_over || copies) || KeepHandedOver(move->channel.get(), &move->handed_over, &move->error)) &&
        FindMovedCode(move->channel.get(), move->regions, &move->moved, &move->error);
    std::string variable;
    const bool in_place = !move->replayed || CheckVariables(move->channel.get(), move->regions, &variable);
    const bool elsewhere = !in_place || (move->replayed && !move->moved.empty());
    // In the log's own order it may come to lie where it was. Else memory has to be searched on its way.
    move->anew = move->ahead ? !move->replayed || elsewhere : (elsewhere && handed_over) || (!move->replayed && copies);
    if (move->anew && !move->ahead) move->may_hand_over = false;
    if (!in_place && !move->anew) move->error = variable;
  });
  // Code is made ahead only of processes that share nothing. Of others, all are replayed together.
  const bool all_anew =
      std::any_of(moves->begin(), moves->end(), [](const Move& move) { return move.anew && !move.ahead; });
  for (Move& move : *moves) {
    if (!move.anew && !all_anew) continue;
    move.anew = move.replayed = false;
    move.error.clear();
    Drop(&move);
    *again = true;
  }
  return NoErrors(*moves, error);
}

// Finds out what the new sessions have of the old ones' memory.
bool CompareAll(std::vector<Move>* moves, std::string* error) {
  std::vector<std::thread> threads;
  for (Move& move : *moves) {
    if (!move.copies) continue;
    threads.emplace_back([&move] {
      std::string why;
      if (!move.copies->Compare(move.process->channel(), move.regions, &why)) move.error = why;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return NoErrors(*moves, error);
}

// One move. Its steps are in the order in which they are declared.
class Moving {
 public:
  Moving(const MoveJobOptions& options, const Job& job, const std::string& directory, JobReport* report,
         MoveJobOutcome* outcome)
      : options_(options),
        job_(job),
        directory_(directory),
        report_(*report),
        outcome_(outcome),
        hosts_(SocketFolder(directory), /*detached=*/true, AccountOf(job)),
        code_(job, directory, claim_, &images_),
        live_(job, directory, claim_, &images_),
        transaction_(job_, &live_, /*engine=*/nullptr, /*guard=*/nullptr) {
    lock_.timeout_ms = int(options.timeout * 1000);
    lock_.cancelled = cancelled_;
  }

  bool Run(std::string* error);

 private:
  // While the job runs: everything that can go wrong early does so here.
  bool Open(std::string* error);
  bool MakeAhead(std::string* error);
  // In the pause.
  bool Hold(std::string* error);
  bool ListMemory(std::string* error);
  bool HandOverMemory(std::string* error);
  bool CheckPlaces(std::string* error);
  bool Replay(std::string* error);
  bool Copy(std::string* error);
  bool CopyOne(size_t index, JobReport::LongStep* progress, uint64_t before, std::string* error);
  bool Switch(std::string* error);
  // Behind it.
  void NoteMoved();

  bool OpenSessionsOf(const std::vector<CudaProcess>& processes, const LiveJob* held, std::string* error) {
    return OpenSessions(options_, directory_, job_, processes, held, &hosts_, &moves_, error);
  }

  const MoveJobOptions& options_;
  const Job& job_;
  const std::string& directory_;
  JobReport& report_;
  MoveJobOutcome* const outcome_;
  const std::function<bool()> cancelled_ = [this] { return report_.Cancelled(); };
  const Moment start_ = Now();

  // In the order in which they were made; they go in the opposite one.
  JobClaim claim_;
  GpuHosts hosts_;
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

bool Moving::Run(std::string* error) {
  if (!Open(error) || !MakeAhead(error) || !Hold(error) || !ListMemory(error) || !HandOverMemory(error) ||
      !CheckPlaces(error) || !Replay(error) || !Copy(error) || !Switch(error)) {
    return false;
  }
  outcome_->paused = transaction_.HeldSeconds();
  outcome_->seconds = SecondsSince(start_);
  outcome_->servers = moves_.empty() ? options_.to : ServersOf(PlacesOf(moves_));
  NoteMoved();
  return true;
}

bool Moving::Open(std::string* error) {
  if (!claim_.Take(directory_, report_.Tool(), cancelled_, error)) return false;
  AtStep("open sessions");
  if (!options_.to.empty() && !hosts_.Open(options_.to, -1, error)) return false;
  if (!OpenSessionsOf(FindCudaProcesses(job_, directory_), nullptr, error)) return false;
  if (moves_.empty() && !JobIsAlive(job_)) {
    *error = "the job has ended";
    return false;
  }
  shared_ = SharedBuffers::Make();
  return true;
}

bool Moving::MakeAhead(std::string* error) {
  AtStep("read module images");
  images_.Read(job_, directory_);
  const Moment begun = Now();
  const uint64_t held_bytes = AskHeldBytes(job_, directory_);
  if (HasRoomToSpare(moves_, held_bytes)) {
    if (!code_.Look(lock_, error)) return false;
    AtStep("replay code");
    ReplayCodeAhead(code_, &moves_);
    if (pool_.ok()) CopyBefore(directory_, &report_, held_bytes, shared_.get(), &pool_, cancelled_, &moves_);
    if (cancelled_()) {
      *error = "interrupted";
      return false;
    }
  }
  AtStep("make handing over ready");
  PrepareHandOvers(directory_, moves_);
  outcome_->ahead = SecondsSince(begun);
  outcome_->look = code_.held_seconds();
  return true;
}

bool Moving::Hold(std::string* error) {
  // Processes may have come and gone since.
  if (!transaction_.Begin(lock_, error)) return false;
  DropOutdated(live_, &moves_);
  for (const auto& process : live_.processes()) held_.push_back(process->process());
  if (!OpenSessionsOf(held_, &live_, error)) return false;
  for (size_t i = 0; i < moves_.size(); ++i) moves_[i].process = live_.processes()[i].get();
  return true;
}

bool Moving::ListMemory(std::string* error) {
  AtStep("list GPU memory");
  for (Move& move : moves_) {
    const std::vector<uint64_t> beside = live_.SessionsAt(move.process->info().server);
    if (!Describe(beside, &move, error)) return Of(move, moves_.size(), error);
    for (const ckptfmt::Region& region : move.regions) outcome_->gpu_bytes += region.bytes;
    outcome_->objects += move.process->log().records();
  }
  return true;
}

bool Moving::HandOverMemory(std::string* error) {
  AtStep("hand over GPU memory");
  const Moment begun = Now();
  if (!HandOverAll(&moves_, error)) return false;
  outcome_->handing_over = SecondsSince(begun);
  return true;
}

// Whether there is room for the memory that is not there yet, if processes were mapped.
bool Moving::CheckPlaces(std::string* error) {
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
    if (!CheckRoom(PlacesOf(moves_), regions, error)) return false;
  }
  host_ = options_.to.empty() ? moves_.front().to.host : hosts_.Open(options_.to, -1, error);
  return host_ != nullptr;
}

bool Moving::Replay(std::string* error) {
  scope_ = NewSharingScope();
  AtStep("replay");
  const Moment begun = Now();
  bool again = false;
  if (!ReplayAll(scope_, &moves_, &again, error)) return false;
  // Twice at most: without what was made ahead, and then without memory that was handed over.
  while (again) {
    // Sessions that end now may still answer for the same keys.
    if (std::none_of(moves_.begin(), moves_.end(), [](const Move& move) { return move.replayed; })) {
      scope_ = NewSharingScope();
    }
    if (!OpenSessionsOf(held_, &live_, error) || !HandOverAll(&moves_, error) ||
        !ReplayAll(scope_, &moves_, &again, error)) {
      return false;
    }
  }
  for (const Move& move : moves_) outcome_->objects_ahead += move.ahead ? replay::CodeRecords(*move.ahead) : 0;
  outcome_->replaying = SecondsSince(begun);
  return true;
}

bool Moving::Copy(std::string* error) {
  const Moment begun = Now();
  AtStep("compare GPU memory");
  if (!CompareAll(&moves_, error)) return false;
  {
    const auto progress = report_.Begin("copying GPU memory");
    uint64_t before = 0;
    for (size_t i = 0; i < moves_.size(); ++i) {
      if (!CopyOne(i, progress.get(), before, error)) return Of(moves_[i], moves_.size(), error);
      for (const ckptfmt::Region& region : moves_[i].regions) before += region.bytes;
    }
  }
  outcome_->copying = SecondsSince(begun);
  return true;
}

bool Moving::CopyOne(size_t index, JobReport::LongStep* progress, uint64_t before, std::string* error) {
  Move& move = moves_[index];
  AtStep("copy GPU memory", index, moves_.size());
  bool begun = false;
  const auto go_on = [&](uint64_t done, uint64_t) {
    if (!std::exchange(begun, true)) AtStep("copy the rest of GPU memory", index, moves_.size());
    progress->Update(before + done, outcome_->gpu_bytes);
    return !cancelled_();
  };
  SkipChunk is_there;
  if (move.copies) {
    is_there = [&move](size_t region, uint64_t chunk) { return move.copies->IsThere(region, chunk); };
  }
  if (!CopyMemory(move.process->channel(), move.regions, move.channel.get(), move.moved, move.handed_over, is_there,
                  shared_.get(), go_on, &outcome_->copied, error)) {
    return false;
  }
  if (move.copies) outcome_->before.Add(move.copies->times());
  return true;
}

bool Moving::Switch(std::string* error) {
  for (const Move& move : moves_) move.process->PrepareSwitch(move.channel.get(), move.to.host->server());
  // Processes that connect from now on belong to the others. Until the transaction has ended, none does.
  ServerChange change(directory_);
  const auto decide = [&](std::string* problem) {
    return WriteJobServer(directory_, host_->server(), options_.gpu, scope_, problem);
  };
  if (!transaction_.Switch(decide, error)) return false;
  change.Keep();
  return true;
}

void Moving::NoteMoved() {
  for (const Move& move : moves_) {
    const ActAs user(AccountOf(job_));
    TellSaved(move.to.host->server(), move.channel->welcome().session, job_.saved_unix_ms(), job_.saved_bytes());
  }
  // What this tool knows of it may not be all that its folder says.
  Job told;
  std::string problem;
  if (job_.runner_pid() == 0 || !ReadJob(directory_, &told, &problem)) return;
  told.set_server(options_.to.empty() ? moves_.front().to.place.server : options_.to);
  told.set_gpu(options_.gpu);
  if (!WriteJob(directory_, told, &problem)) report_.Say(problem);
}

}  // namespace

bool MoveJob(const MoveJobOptions& options, const Job& job, const std::string& directory, JobReport* report,
             MoveJobOutcome* outcome, std::string* error) {
  return Moving(options, job, directory, report, outcome).Run(error);
}

}  // namespace cuda_remote::checkpoint
