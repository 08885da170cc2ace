// cr-migrate: moves a running job's GPU side to another server. See --help.

#include <stdio.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <string>

#include "client/tools/background.h"
#include "client/tools/cuda_processes.h"
#include "client/tools/foreground.h"
#include "client/tools/gpu_host.h"
#include "client/tools/gpu_state.h"
#include "client/tools/held_job.h"
#include "client/tools/job.h"
#include "client/tools/job_claim.h"
#include "client/tools/modules.h"
#include "client/tools/progress.h"
#include "proto/codec/json.h"
#include "proto/frame/version.h"

namespace cuda_remote::client::tools {
namespace {

using Clock = std::chrono::steady_clock;

constexpr char kTool[] = "cr-migrate";

constexpr char kExamples[] = R"(
Examples:
  cr-migrate train --to gpu8:7070
  cr-migrate train --to unix:/run/user/1000/cuda-remote/session.sock --gpu 1

The program itself stays where it is and runs on; its CUDA calls wait while its GPU memory is copied. A migration that
fails, or is interrupted or killed, leaves the job on its old server. Needs no root.

Exit codes: 0 moved, 1 failed (the job goes on where it was), 2 wrong use, 4 no such job.
)";

struct Options {
  std::string job, to;
  int gpu = -1;
  double timeout = 60;
  bool json = false, quiet = false;
};

double Since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

bool Migrate(const Options& options, const std::string& directory, Job* job, const std::function<bool()>& cancelled,
             std::string* error) {
  const Clock::time_point start = Clock::now();
  JobClaim claim;
  if (!claim.Take(directory, kTool, cancelled, error) || !CheckOneCudaProcess(*job, directory, "moved", error)) {
    return false;
  }
  // Everything that can go wrong early does so while the job still runs.
  const std::unique_ptr<GpuHost> host = GpuHost::Open(options.to, options.gpu, directory, /*detached=*/true, error);
  if (!host) return false;
  const std::string program = job->command_size() > 0 ? job->command(0) : "";
  const std::unique_ptr<ClientChannel> channel =
      OpenSession(host->socket_path(), OwnPid(*job), program, job->name(), options.gpu, error);
  if (!channel) return false;
  const std::unique_ptr<HeldJob> held = HeldJob::Take(directory, claim, int(options.timeout * 1000), cancelled, error);
  // Once more: another process may have begun to use CUDA since.
  if (!held || !CheckOneCudaProcess(*job, directory, "moved", error)) return false;
  std::vector<ckptfmt::Region> regions;
  ckptfmt::ImageInfo before, after;
  if (!Drain(held->channel(), error) || !ListRegions(held->channel(), &regions, error) ||
      !DescribeServer(held->channel(), &before, error) || !DescribeServer(channel.get(), &after, error)) {
    return false;
  }
  if (after.devices.size() < before.devices.size()) {
    *error = "the job sees " + std::to_string(before.devices.size()) + " GPUs; " + options.to + " has " +
             std::to_string(after.devices.size());
    return false;
  }
  if (!CheckModules(held->log(), before.devices, after.devices, error)) return false;
  if (!ReplayLog(held->log(), channel.get(), error)) return false;
  uint64_t bytes = 0;
  {
    Progress progress("copying GPU memory", options.quiet);
    const auto go_on = [&](uint64_t done, uint64_t total) {
      progress.Update(done, total);
      bytes = total;
      return !cancelled();
    };
    if (!CopyMemory(held->channel(), regions, channel.get(), go_on, error)) return false;
  }
  if (!held->Give(*channel, host->server(), error)) return false;
  const double stood = held->HeldSeconds(), took = Since(start);
  TellSaved(host->server(), channel->welcome().session, job->saved_unix_ms(), job->saved_bytes());
  std::string problem;
  if (!WriteGpuServer(directory, host->server(), options.gpu, &problem)) Say(kTool, problem);
  job->set_server(options.to);
  job->set_gpu(options.gpu);
  if (!WriteJob(directory, *job, &problem)) Say(kTool, problem);
  if (options.json) {
    JsonWriter json(JsonWriter::kSpaced);
    json.Begin('{');
    json.RealMember("seconds", took, 3);
    json.RealMember("paused_seconds", stood, 3);
    json.Member("gpu_bytes", bytes);
    json.Member("objects", held->log().records());
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
  if (!FindJob(options.job, &directory, &job, &error)) {
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
