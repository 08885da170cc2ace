// SPDX-License-Identifier: Apache-2.0
// cr-migrate: moves a running job's GPU side to another server. See --help.

#include <stdio.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/job/caller.h"
#include "checkpoint/job/cuda_processes.h"
#include "checkpoint/job/job.h"
#include "checkpoint/job/own_job.h"
#include "checkpoint/transaction/move_job.h"
#include "programs/tools/background.h"
#include "programs/tools/foreground.h"
#include "programs/tools/through_hostd.h"
#include "programs/tools/tool_report.h"
#include "proto/base/text.h"
#include "proto/cli/help.h"
#include "proto/codec/json.h"

namespace cuda_remote::client::tools {

using namespace checkpoint;
namespace {

constexpr char kTool[] = "cr-migrate";

constexpr char kExamples[] = R"(
Examples:
  cr-migrate train --to gpu8:7070
  cr-migrate train --to unix:/run/user/1000/cuda-remote/session.sock --gpu 1
  cr-migrate train --to gpu8:7070 --map 2-3=gpu9:7070      ranks 2 and 3 to another server than the others
  cr-migrate train --map 0-1=gpu8:7070:0 --map 2-3=gpu8:7070:1        two ranks on each of two GPUs
  cr-migrate train --whole --to-host node8                 the processes move to node8, too

The processes stay where they are and run on; their CUDA calls wait while GPU memory is copied. If a server is on
another machine, most of the memory is copied before that. The GPU sessions of all processes move, or none does. A move
that fails, or is interrupted or killed, leaves the job on its old server. Needs no root.

With --whole, the processes and their memory go to another host, too. The job must have been started by an ordinary user
through cr-hostd, and cr-hostd must run on both hosts. A job whose GPU server is on the network keeps it. Another job
gets a GPU server of its own there, or the one of --to.

Ranks are those of mpirun, torchrun or srun; without one of these the processes are counted from 0. A process that sees
several GPUs needs as many at its place: its GPU 0 is the first of the list. Processes that share GPU memory need one
server.

Exit codes: 0 moved, 1 failed (the job continues where it was), 2 wrong use, 4 no such job.
)";

struct Options {
  std::string job;
  MoveJobOptions move;
  bool json = false, quiet = false;
};

void Tell(const Options& options, const MoveJobOutcome& outcome) {
  const CopiedBytes& copied = outcome.copied;
  if (options.json) {
    JsonWriter json(JsonWriter::kSpaced);
    json.BeginOutput();
    json.RealMember("seconds", outcome.seconds, 3);
    json.RealMember("paused_seconds", outcome.paused, 3);
    json.RealMember("ahead_seconds", outcome.ahead, 3);
    json.RealMember("look_seconds", outcome.look, 3);
    json.Member("objects_ahead", outcome.objects_ahead);
    json.RealMember("handing_over_seconds", outcome.handing_over, 3);
    json.RealMember("replaying_seconds", outcome.replaying, 3);
    json.RealMember("copying_seconds", outcome.copying, 3);
    json.Member("gpu_bytes", outcome.gpu_bytes);
    json.Key("before");
    json.Begin('{');
    json.RealMember("seconds", outcome.before.seconds, 3);
    json.Member("rounds", outcome.before.rounds);
    json.Member("copied_bytes", outcome.before.copied_bytes);
    json.Member("kept_bytes", copied.there);
    json.End('}');
    json.Member("copied_bytes", copied.copied);
    json.Member("handed_over_bytes", copied.handed_over);
    json.Member("direct_bytes", copied.direct);
    json.Member("objects", outcome.objects);
    json.End('}');
    puts(json.text().c_str());
    fflush(stdout);
  } else if (!options.quiet) {
    std::string how = ByteText(double(outcome.gpu_bytes));
    if (copied.handed_over != 0) how += ", " + ByteText(double(copied.handed_over)) + " of it handed over";
    if (copied.there != 0) how += ", " + ByteText(double(copied.there)) + " of it copied before";
    if (copied.direct != 0) how += ", " + ByteText(double(copied.direct)) + " of it copied without the host";
    fprintf(stderr, "%s: moved to %s in %.1f s (CUDA calls waited for %.1f s): GPU memory %s\n", kTool,
            outcome.servers.c_str(), outcome.seconds, outcome.paused, how.c_str());
  }
}

int Work(const Options& options, const std::function<bool()>& cancelled) {
  const OwnersRights rights(options.job);
  absl::StatusOr<FoundJob> found = FindJobOrProcesses(options.job);
  const absl::Status mine = found.ok() ? rights.Check(found->directory, &found->job) : found.status();
  if (!mine.ok()) {
    Say(kTool, mine);
    return kExitNoJob;
  }
  const auto& [directory, job] = *found;
  ToolReport report(kTool, options.quiet, /*times=*/false, cancelled);
  const absl::StatusOr<MoveJobOutcome> outcome = MoveJob(options.move, job, directory, &report);
  if (outcome.ok()) {
    Tell(options, *outcome);
    return 0;
  }
  Say(kTool, options.job + " was not moved: " + std::string(outcome.status().message()) +
                 (JobIsAlive(job) ? "; the job continues where it was" : ""));
  return kExitFailure;
}

int Main(int argc, char** argv) {
  Options options;
  int caller_fd = -1;
  bool whole = false;
  std::string to_host, output, error_output;
  std::vector<std::string> map;
  CLI::App app("Moves a running job's GPU side to another GPU server, or the whole job to another host.", kTool);
  SetUpProgram(&app);
  app.footer(std::string(kWhichJob) + kExamples);
  app.add_option("JOB", options.job, "which job")->required();
  app.add_option("--to", options.move.to, "the GPU server: unix:PATH or HOST:PORT")->type_name("ADDR");
  app.add_option("--gpu", options.move.gpu, "the only GPU that the job gets there (ordinal)")
      ->check(CLI::Range(0, 255));
  app.add_option("--map", map,
                 "send single processes elsewhere: RANK=SERVER[:GPU,...] or RANK=:GPU,...; RANK is a number, N-M or "
                 "pid:N. May be given several times")
      ->type_name("RANK=PLACE")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--timeout", options.move.timeout, "how long to wait for CUDA calls in progress")
      ->type_name("SECONDS")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 86400.0));
  app.add_flag(
      "--whole", whole,
      "move the job's processes too, with its private files, from this host's cr-hostd to the one of --to-host");
  app.add_option("--to-host", to_host, "with --whole: HOST or HOST:PORT of the other cr-hostd")->type_name("HOST");
  app.add_option("--output", output,
                 "with --whole: file on the other host to which the job's standard output is appended; needed if that "
                 "is a pipe")
      ->type_name("FILE");
  app.add_option("--error", error_output, "with --whole: the same for standard error; may be the same file")
      ->type_name("FILE");
  app.add_flag("--json", options.json, "print times and sizes as JSON");
  app.add_flag("--quiet", options.quiet, "print errors only");
  app.add_option("--caller", caller_fd, "used by cr-hostd")->group("");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
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
  absl::StatusOr<std::vector<PlacementRule>> rules = ParsePlacement(map);
  if (!rules.ok()) {
    Say(kTool, rules.status());
    return kExitUsage;
  }
  options.move.rules = *std::move(rules);
  if (options.move.to.empty() && map.empty()) {
    Say(kTool, "no server given: name it with --to unix:PATH or --to HOST:PORT, or with --map");
    return kExitUsage;
  }
  const auto caller = Caller::From(caller_fd);
  if (!caller.ok()) {
    Say(kTool, caller.status());
    return kExitFailure;
  }
  if (*caller) options.move.environment = &(*caller)->environment();
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
