// SPDX-License-Identifier: Apache-2.0
// cr-migrate: moves a running job's GPU side to another server. See --help.

#include <stdio.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/gpu/gpu_host.h"
#include "checkpoint/gpu/gpu_state.h"
#include "checkpoint/gpu/modules.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/job.h"
#include "checkpoint/job/job_claim.h"
#include "checkpoint/transaction/at_step.h"
#include "checkpoint/transaction/live_job.h"
#include "client/tools/background.h"
#include "client/tools/foreground.h"
#include "client/tools/progress.h"
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

The processes stay where they are and run on; their CUDA calls wait while GPU memory is copied. All of them move, or none. A
migration that fails, or is interrupted or killed, leaves the job on its old server. Needs no root.

Exit codes: 0 moved, 1 failed (the job goes on where it was), 2 wrong use, 4 no such job.
)";

struct Options {
  std::string job, to;
  int gpu = -1;
  double timeout = 60;
  bool json = false, quiet = false;
};

double Since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// One process on its way.
struct Move {
  CudaProcess of;
  LiveProcess* process = nullptr;
  std::unique_ptr<ClientChannel> channel;  // the new one
  std::vector<ckptfmt::Region> regions;
  std::string error;
};

// Says which process it was about, of several. False.
bool Of(const Move& move, size_t count, std::string* error) {
  if (count > 1) *error = NameOf(move.of) + ": " + *error;
  return false;
}

bool OpenOne(const Options& options, const Job& job, const GpuHost& host, const CudaProcess& process,
             std::vector<Move>* moves, std::string* error) {
  moves->emplace_back();
  Move& move = moves->back();
  move.of = process;
  const ActAs user(AccountOf(job));  // whose session it is
  move.channel =
      OpenSession(host.socket_path(), uint32_t(process.inner_pid), process.program, job.name(), options.gpu, error);
  return move.channel != nullptr;
}

bool OpenSessions(const Options& options, const Job& job, const GpuHost& host,
                  const std::vector<CudaProcess>& processes, std::vector<Move>* moves, std::string* error) {
  return std::all_of(processes.begin(), processes.end(), [&](const CudaProcess& process) {
    return OpenOne(options, job, host, process, moves, error);
  });
}

// Brings the sessions into the order of the processes that are held; opens those that are missing and ends what is too
// much.
bool MatchSessions(const Options& options, const Job& job, const GpuHost& host, LiveJob& live, std::vector<Move>* moves,
                   std::string* error) {
  std::vector<Move> matched;
  for (const auto& process : live.processes()) {
    const auto found = std::find_if(moves->begin(), moves->end(),
                                    [&](const Move& move) { return move.channel && move.of == process->process(); });
    if (found != moves->end()) {
      matched.push_back(std::move(*found));
    } else if (!OpenOne(options, job, host, process->process(), &matched, error)) {
      return false;
    }
    matched.back().process = process.get();
  }
  *moves = std::move(matched);
  return true;
}

// What has to go along, and whether it can.
bool Describe(const Options& options, const std::vector<uint64_t>& sessions, Move* move, std::string* error) {
  ckptfmt::ProcessInfo before, after;
  ClientChannel* const from = move->process->channel();
  if (!Drain(from, error) || !ListRegions(from, &move->regions, error, sessions) ||
      !DescribeServer(from, &before, error) || !DescribeServer(move->channel.get(), &after, error)) {
    return false;
  }
  if (after.devices.size() < before.devices.size()) {
    *error = "the job sees " + std::to_string(before.devices.size()) + " GPUs; " + options.to + " has " +
             std::to_string(after.devices.size());
    return false;
  }
  return CheckModules(move->process->log(), before.devices, after.devices, error);
}

// At the same time: the objects of one process may be shared with another, and wait for it.
bool ReplayAll(const std::string& scope, std::vector<Move>* moves, std::string* error) {
  std::vector<const replay::Log*> all;
  for (const Move& move : *moves) all.push_back(&move.process->log());
  const std::vector<std::string> ownerless = replay::Ownerless(all);
  std::vector<std::thread> threads;
  for (Move& move : *moves) {
    threads.emplace_back([&] {
      if (ReplayLog(move.process->log(), move.channel.get(), &move.error, scope, ownerless)) move.error.clear();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Move& move : *moves) {
    if (move.error.empty()) continue;
    *error = move.error;
    return Of(move, moves->size(), error);
  }
  return true;
}

bool Migrate(const Options& options, const std::string& directory, Job* job, const std::function<bool()>& cancelled,
             std::string* error) {
  const Clock::time_point start = Clock::now();
  JobClaim claim;
  if (!claim.Take(directory, kTool, cancelled, error)) return false;
  // Everything that can go wrong early does so while the job still runs.
  const std::unique_ptr<GpuHost> host =
      GpuHost::Open(options.to, options.gpu, SocketFolder(directory), /*detached=*/true, AccountOf(*job), error);
  if (!host) return false;
  std::vector<Move> moves;
  AtStep("open sessions");
  if (!OpenSessions(options, *job, *host, FindCudaProcesses(*job, directory), &moves, error)) return false;
  LiveJob live(*job, directory, claim);
  JobTransaction transaction(*job, &live, /*engine=*/nullptr);
  agent::LockOptions lock;
  lock.timeout_ms = int(options.timeout * 1000);
  lock.cancelled = cancelled;
  // Processes may have come and gone since.
  if (!transaction.Begin(lock, error) || !MatchSessions(options, *job, *host, live, &moves, error)) return false;
  uint64_t bytes = 0, done_before = 0, objects = 0;
  AtStep("list GPU memory");
  for (Move& move : moves) {
    if (!Describe(options, live.Sessions(), &move, error)) return Of(move, moves.size(), error);
    for (const ckptfmt::Region& region : move.regions) bytes += region.bytes;
    objects += move.process->log().records();
  }
  const std::string scope = NewSharingScope();
  AtStep("replay");
  if (!ReplayAll(scope, &moves, error)) return false;
  {
    Progress progress("copying GPU memory", options.quiet);
    for (size_t i = 0; i < moves.size(); ++i) {
      Move& move = moves[i];
      AtStep("copy GPU memory", i, moves.size());
      const auto go_on = [&](uint64_t done, uint64_t) {
        progress.Update(done_before + done, bytes);
        return !cancelled();
      };
      if (!CopyMemory(move.process->channel(), move.regions, move.channel.get(), go_on, error)) {
        return Of(move, moves.size(), error);
      }
      for (const ckptfmt::Region& region : move.regions) done_before += region.bytes;
    }
  }
  for (const Move& move : moves) move.process->PrepareSwitch(move.channel.get(), host->server());
  // Processes that connect from now on belong to the others. Until the transaction has ended, none does.
  ServerChange change(directory);
  if (!WriteJobServer(directory, host->server(), options.gpu, scope, error) || !transaction.Switch(error)) return false;
  change.Keep();
  const double stood = transaction.HeldSeconds(), took = Since(start);
  for (const Move& move : moves) {
    const ActAs user(AccountOf(*job));
    TellSaved(host->server(), move.channel->welcome().session, job->saved_unix_ms(), job->saved_bytes());
  }
  std::string problem;
  job->set_server(options.to);
  job->set_gpu(options.gpu);
  if (job->runner_pid() != 0 && !WriteJob(directory, *job, &problem)) Say(kTool, problem);
  if (options.json) {
    JsonWriter json(JsonWriter::kSpaced);
    json.Begin('{');
    json.RealMember("seconds", took, 3);
    json.RealMember("paused_seconds", stood, 3);
    json.Member("gpu_bytes", bytes);
    json.Member("objects", objects);
    json.End('}');
    puts(json.text().c_str());
    fflush(stdout);
  } else if (!options.quiet) {
    fprintf(stderr, "%s: moved to %s in %.1f s (CUDA calls waited for %.1f s): GPU memory %s\n", kTool,
            options.to.c_str(), took, stood, Bytes(double(bytes)).c_str());
  }
  return true;
}

int Work(const Options& options, const std::function<bool()>& cancelled) {
  std::string directory, error;
  Job job;
  if (!FindJobOrProcesses(options.job, &directory, &job, &error)) {
    Say(kTool, error);
    return kExitNoJob;
  }
  if (Migrate(options, directory, &job, cancelled, &error)) return 0;
  Say(kTool, options.job + " was not moved: " + error + (JobIsAlive(job) ? "; the job goes on where it was" : ""));
  return kExitFailure;
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Moves a running job's GPU side to another GPU server.", kTool);
  app.footer(std::string(kWhichJob) + kExamples);
  app.set_version_flag("--version", VersionLine("cr-migrate"));
  app.add_option("JOB", options.job, "which job")->required();
  app.add_option("--to", options.to, "the GPU server: unix:PATH or HOST:PORT")->required();
  app.add_option("--gpu", options.gpu, "the only GPU that the job gets there (ordinal)")->check(CLI::Range(0, 255));
  app.add_option("--timeout", options.timeout, "seconds to wait for CUDA calls that are in progress")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 86400.0));
  app.add_flag("--json", options.json, "print times and sizes as JSON");
  app.add_flag("--quiet", options.quiet, "print errors only");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (options.to.empty()) {
    Say(kTool, "where to? (--to)");
    return kExitUsage;
  }
  return RunInBackground([&](const std::function<bool()>& cancelled) { return Work(options, cancelled); });
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
