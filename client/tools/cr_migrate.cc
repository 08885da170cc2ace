// SPDX-License-Identifier: Apache-2.0
// cr-migrate: moves a running job's GPU side to another server. See --help.

#include <stdio.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/agent/agent_client.h"
#include "checkpoint/gpu/copy_ahead.h"
#include "checkpoint/gpu/gpu_host.h"
#include "checkpoint/gpu/gpu_state.h"
#include "checkpoint/gpu/places.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/caller.h"
#include "checkpoint/job/job.h"
#include "checkpoint/job/job_claim.h"
#include "checkpoint/job/own_job.h"
#include "checkpoint/job/ranks.h"
#include "checkpoint/transaction/at_step.h"
#include "checkpoint/transaction/code_ahead.h"
#include "checkpoint/transaction/live_job.h"
#include "client/tools/background.h"
#include "client/tools/foreground.h"
#include "client/tools/progress.h"
#include "client/tools/through_hostd.h"
#include "proto/cli/wrong_use.h"
#include "proto/codec/json.h"
#include "proto/folder/this_job.h"
#include "proto/frame/version.h"
#include "replay/replayer/replayer.h"

namespace cuda_remote::client::tools {

using namespace checkpoint;
namespace {

using Clock = std::chrono::steady_clock;

constexpr char kTool[] = "cr-migrate";

constexpr char kExamples[] = R"(
Examples:
  cr-migrate train --to gpu8:7070
  cr-migrate train --to unix:/run/user/1000/cuda-remote/session.sock --gpu 1
  cr-migrate train --to gpu8:7070 --map 2-3=gpu9:7070      ranks 2 and 3 to another server than the others
  cr-migrate train --map 0-1=gpu8:7070:0 --map 2-3=gpu8:7070:1        two ranks on each of two GPUs

The processes stay where they are and run on; their CUDA calls wait while GPU memory is copied. If a server is on another
machine, most of it is copied before that. All of them move, or none. A migration that fails, or is interrupted or killed,
leaves the job on its old server. Needs no root.

Ranks are those of mpirun, torchrun or srun; without one of these the processes are counted from 0. A process that sees
several GPUs needs as many at its place: its GPU 0 is the first of the list. Processes that share GPU memory need one
server.

Exit codes: 0 moved, 1 failed (the job goes on where it was), 2 wrong use, 4 no such job.
)";

struct Options {
  std::string job, to;
  std::vector<PlacementRule> rules;
  int gpu = -1;
  double timeout = 60;
  bool json = false, quiet = false;
};

double Since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

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
bool Plan(const Options& options, const std::vector<CudaProcess>& processes, GpuHosts* hosts,
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
bool OpenSessions(const Options& options, const std::string& directory, const Job& job,
                  const std::vector<CudaProcess>& processes, const LiveJob* held, GpuHosts* hosts,
                  std::vector<Move>* moves, std::string* error) {
  std::vector<Placed> placed;
  if (!Plan(options, processes, hosts, &placed, error)) return false;
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
      if (!ReplayCode(*move.ahead, move.channel.get())) move.error = "its session is of no use";
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (Move& move : *moves) {
    if (!std::exchange(move.error, "").empty()) Drop(&move);
  }
}

// Copies GPU memory to new sessions on other machines while the job runs on. Whatever goes wrong, less is there when
// the job stops.
void CopyBefore(const std::string& directory, bool quiet, uint64_t held, SharedBuffers* shared, ChunkPool* pool,
                const std::function<bool()>& cancelled, std::vector<Move>* moves) {
  std::string ignored;
  std::vector<Move*> far;
  for (Move& move : *moves) {
    const auto running = move.channel ? RunningProcess::Connect(move.of, directory, &ignored) : nullptr;
    if (running && CopyAhead::Helps(running->shared_memory(), *move.channel)) far.push_back(&move);
  }
  if (far.empty()) return;
  Progress progress("copying GPU memory while the job runs", quiet);
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
        progress.Update(bytes, std::max(bytes, held));
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
    const bool elsewhere = move->replayed && !move->moved.empty();
    // In the log's own order it may come to lie where it was. Else memory has to be searched on its way.
    move->anew = move->ahead ? !move->replayed || elsewhere : (elsewhere && handed_over) || (!move->replayed && copies);
    if (move->anew && !move->ahead) move->may_hand_over = false;
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

bool Migrate(const Options& options, const std::string& directory, const Job& job,
             const std::function<bool()>& cancelled, std::string* error) {
  const Clock::time_point start = Clock::now();
  JobClaim claim;
  if (!claim.Take(directory, kTool, cancelled, error)) return false;
  // Everything that can go wrong early does so while the job still runs.
  GpuHosts hosts(SocketFolder(directory), /*detached=*/true, AccountOf(job));
  ChunkPool pool(Precopy::kSinkSlots * ChunkPool::kSlotBytes);  // outlives the moves
  std::vector<Move> moves;
  AtStep("open sessions");
  if (!options.to.empty() && !hosts.Open(options.to, -1, error)) return false;
  if (!OpenSessions(options, directory, job, FindCudaProcesses(job, directory), nullptr, &hosts, &moves, error)) {
    return false;
  }
  const std::unique_ptr<SharedBuffers> shared = SharedBuffers::Make();
  agent::LockOptions lock;
  lock.timeout_ms = int(options.timeout * 1000);
  lock.cancelled = cancelled;
  ImagesAhead images;
  AtStep("read module images");
  images.Read(job, directory);
  CodeAhead code(job, directory, claim, &images);
  const Clock::time_point ahead_begun = Clock::now();
  const uint64_t held_bytes = AskHeldBytes(job, directory);
  if (HasRoomToSpare(moves, held_bytes)) {
    if (!code.Look(lock, error)) return false;
    AtStep("replay code");
    ReplayCodeAhead(code, &moves);
    if (pool.ok()) CopyBefore(directory, options.quiet, held_bytes, shared.get(), &pool, cancelled, &moves);
    if (cancelled()) {
      *error = "interrupted";
      return false;
    }
  }
  AtStep("make handing over ready");
  PrepareHandOvers(directory, moves);
  const double ahead = Since(ahead_begun);
  LiveJob live(job, directory, claim, &images);
  JobTransaction transaction(job, &live, /*engine=*/nullptr, /*guard=*/nullptr);
  // Processes may have come and gone since.
  if (!transaction.Begin(lock, error)) return false;
  DropOutdated(live, &moves);
  std::vector<CudaProcess> held;
  for (const auto& process : live.processes()) held.push_back(process->process());
  if (!OpenSessions(options, directory, job, held, &live, &hosts, &moves, error)) return false;
  for (size_t i = 0; i < moves.size(); ++i) moves[i].process = live.processes()[i].get();
  uint64_t bytes = 0, done_before = 0, objects = 0, objects_ahead = 0;
  CopiedBytes copied;
  AtStep("list GPU memory");
  for (Move& move : moves) {
    const std::vector<uint64_t> beside = live.SessionsAt(move.process->info().server);
    if (!Describe(beside, &move, error)) return Of(move, moves.size(), error);
    for (const ckptfmt::Region& region : move.regions) bytes += region.bytes;
    objects += move.process->log().records();
  }
  AtStep("hand over GPU memory");
  const Clock::time_point hand_over_begun = Clock::now();
  if (!HandOverAll(&moves, error)) return false;
  const double handing_over = Since(hand_over_begun);
  if (!options.rules.empty()) {
    std::vector<std::vector<ckptfmt::Region>> regions;
    for (const Move& move : moves) {
      regions.emplace_back();
      for (const ckptfmt::Region& region : move.regions) {
        const bool there = move.handed_over.Have(region) || (move.copies && move.copies->Has(region));
        if (!there) regions.back().push_back(region);
      }
    }
    const ActAs user(AccountOf(job));
    if (!CheckRoom(PlacesOf(moves), regions, error)) return false;
  }
  // For processes that begin to use CUDA later.
  const GpuHost* const host = options.to.empty() ? moves.front().to.host : hosts.Open(options.to, -1, error);
  std::string scope = NewSharingScope();
  AtStep("replay");
  const Clock::time_point replay_begun = Clock::now();
  bool again = false;
  if (!ReplayAll(scope, &moves, &again, error)) return false;
  // Twice at most: without what was made ahead, and then without memory that was handed over.
  while (again) {
    // Sessions that end now may still answer for the same keys.
    if (std::none_of(moves.begin(), moves.end(), [](const Move& move) { return move.replayed; })) {
      scope = NewSharingScope();
    }
    if (!OpenSessions(options, directory, job, held, &live, &hosts, &moves, error) || !HandOverAll(&moves, error) ||
        !ReplayAll(scope, &moves, &again, error)) {
      return false;
    }
  }
  for (const Move& move : moves) objects_ahead += move.ahead ? replay::CodeRecords(*move.ahead) : 0;
  const double replaying = Since(replay_begun);
  const Clock::time_point copy_begun = Clock::now();
  AtStep("compare GPU memory");
  if (!CompareAll(&moves, error)) return false;
  PrecopyTimes before;
  {
    Progress progress("copying GPU memory", options.quiet);
    for (size_t i = 0; i < moves.size(); ++i) {
      Move& move = moves[i];
      AtStep("copy GPU memory", i, moves.size());
      bool begun = false;
      const auto go_on = [&](uint64_t done, uint64_t) {
        if (!std::exchange(begun, true)) AtStep("copy the rest of GPU memory", i, moves.size());
        progress.Update(done_before + done, bytes);
        return !cancelled();
      };
      SkipChunk is_there;
      if (move.copies)
        is_there = [&move](size_t region, uint64_t index) { return move.copies->IsThere(region, index); };
      if (!CopyMemory(move.process->channel(), move.regions, move.channel.get(), move.moved, move.handed_over, is_there,
                      shared.get(), go_on, &copied, error)) {
        return Of(move, moves.size(), error);
      }
      if (move.copies) before.Add(move.copies->times());
      for (const ckptfmt::Region& region : move.regions) done_before += region.bytes;
    }
  }
  const double copying = Since(copy_begun);
  for (const Move& move : moves) move.process->PrepareSwitch(move.channel.get(), move.to.host->server());
  // Processes that connect from now on belong to the others. Until the transaction has ended, none does.
  ServerChange change(directory);
  const auto decide = [&](std::string* problem) {
    return WriteJobServer(directory, host->server(), options.gpu, scope, problem);
  };
  if (!transaction.Switch(decide, error)) return false;
  change.Keep();
  const double stood = transaction.HeldSeconds(), took = Since(start);
  for (const Move& move : moves) {
    const ActAs user(AccountOf(job));
    TellSaved(move.to.host->server(), move.channel->welcome().session, job.saved_unix_ms(), job.saved_bytes());
  }
  std::string problem;
  // What this tool knows of it may not be all that its folder says.
  Job told;
  if (job.runner_pid() != 0 && ReadJob(directory, &told, &problem)) {
    told.set_server(options.to.empty() ? moves.front().to.place.server : options.to);
    told.set_gpu(options.gpu);
    if (!WriteJob(directory, told, &problem)) Say(kTool, problem);
  }
  if (options.json) {
    JsonWriter json(JsonWriter::kSpaced);
    json.Begin('{');
    json.RealMember("seconds", took, 3);
    json.RealMember("paused_seconds", stood, 3);
    json.RealMember("ahead_seconds", ahead, 3);
    json.RealMember("look_seconds", code.held_seconds(), 3);
    json.Member("objects_ahead", objects_ahead);
    json.RealMember("handing_over_seconds", handing_over, 3);
    json.RealMember("replaying_seconds", replaying, 3);
    json.RealMember("copying_seconds", copying, 3);
    json.Member("gpu_bytes", bytes);
    json.Key("before");
    json.Begin('{');
    json.RealMember("seconds", before.seconds, 3);
    json.Member("rounds", before.rounds);
    json.Member("copied_bytes", before.copied_bytes);
    json.Member("kept_bytes", copied.there);
    json.End('}');
    json.Member("copied_bytes", copied.copied);
    json.Member("handed_over_bytes", copied.handed_over);
    json.Member("direct_bytes", copied.direct);
    json.Member("objects", objects);
    json.End('}');
    puts(json.text().c_str());
    fflush(stdout);
  } else if (!options.quiet) {
    std::string how = Bytes(double(bytes));
    if (copied.handed_over != 0) how += ", " + Bytes(double(copied.handed_over)) + " of it handed over";
    if (copied.there != 0) how += ", " + Bytes(double(copied.there)) + " of it copied before";
    if (copied.direct != 0) how += ", " + Bytes(double(copied.direct)) + " of it copied without the host";
    fprintf(stderr, "%s: moved to %s in %.1f s (CUDA calls waited for %.1f s): GPU memory %s\n", kTool,
            (moves.empty() ? options.to : ServersOf(PlacesOf(moves))).c_str(), took, stood, how.c_str());
  }
  return true;
}

int Work(const Options& options, const std::function<bool()>& cancelled) {
  std::string directory, error;
  Job job;
  const OwnersRights rights(options.job);
  if (!FindJobOrProcesses(options.job, &directory, &job, &error) || !rights.Check(directory, &job, &error)) {
    Say(kTool, error);
    return kExitNoJob;
  }
  if (Migrate(options, directory, job, cancelled, &error)) return 0;
  Say(kTool, options.job + " was not moved: " + error + (JobIsAlive(job) ? "; the job goes on where it was" : ""));
  return kExitFailure;
}

int Main(int argc, char** argv) {
  Options options;
  int caller = -1;
  bool whole = false;
  std::string to_host, output, error_output;
  std::vector<std::string> map;
  CLI::App app("Moves a running job's GPU side to another GPU server, or the whole job to another host.", kTool);
  app.failure_message(WrongUse);
  app.footer(std::string(kWhichJob) + kExamples);
  app.set_version_flag("--version", VersionLine("cr-migrate"));
  app.add_option("JOB", options.job, "which job")->required();
  app.add_option("--to", options.to, "the GPU server: unix:PATH or HOST:PORT");
  app.add_option("--gpu", options.gpu, "the only GPU that the job gets there (ordinal)")->check(CLI::Range(0, 255));
  app.add_option("--map", map,
                 "RANK=SERVER[:GPU,...] or RANK=:GPU,...: where a process goes instead; RANK is a number, N-M or "
                 "pid:N. May be given several times")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--timeout", options.timeout, "seconds to wait for CUDA calls that are in progress")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 86400.0));
  app.add_flag("--whole", whole,
               "move the job's processes, too, with its private files, from this host's cr-hostd to that of --to-host");
  app.add_option("--to-host", to_host, "of --whole: HOST or HOST:PORT, where the other cr-hostd listens");
  app.add_option(
      "--output", output,
      "of --whole: a file there for the job's standard output, behind what it holds; needed if that is a pipe");
  app.add_option("--error", error_output, "of --whole: the same for its standard error; may be the same file");
  app.add_flag("--json", options.json, "print times and sizes as JSON");
  app.add_flag("--quiet", options.quiet, "print errors only");
  app.add_option("--caller", caller, "used by cr-hostd")->group("");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  std::string error;
  if (whole || app.count("--to-host") + app.count("--output") + app.count("--error") > 0) {
    if (!whole || to_host.empty() || !map.empty()) {
      Say(kTool, "a whole job is moved with --whole --to-host HOST, to one host, and not with --map");
      return kExitUsage;
    }
    const std::string name = JobOfHostd(options.job);
    if (name.empty()) {
      Say(kTool, "--whole moves a user's own job that cr-hostd has started, and " + options.job + " is none");
      return kExitNoJob;
    }
    host::Request request = host::RequestOf(app, "move");
    auto* const given = request.mutable_options();
    given->erase(
        std::remove_if(given->begin(), given->end(), [](const host::Option& one) { return one.name() == "whole"; }),
        given->end());
    for (host::Option& one : *given) {
      if (one.name() == "output" || one.name() == "error") one.set_value(Absolute(one.value()));
    }
    request.set_job(name);
    return ThroughHostd(kTool, std::move(request), kExitFailure);
  }
  if (!ParsePlacement(map, &options.rules, &error)) {
    Say(kTool, error);
    return kExitUsage;
  }
  if (options.to.empty() && map.empty()) {
    Say(kTool, "no server given: name it with --to unix:PATH or --to HOST:PORT, or with --map");
    return kExitUsage;
  }
  if (caller >= 0 && !Caller::Take(caller, &error)) {
    Say(kTool, error);
    return kExitFailure;
  }
  if (const std::string name = JobOfHostd(options.job); !name.empty()) {
    host::Request request = host::RequestOf(app, "migrate");
    request.set_job(name);
    return ThroughHostd(kTool, std::move(request), kExitFailure);
  }
  return RunInBackground([&](const Background& background) { return Work(options, background.cancelled); });
}

}  // namespace
}  // namespace cuda_remote::client::tools

int main(int argc, char** argv) {
  try {
    return cuda_remote::client::tools::Main(argc, argv);
  } catch (const std::exception& error) {
    fprintf(stderr, "cr-migrate: %s\n", error.what());
    return 1;
  }
}
