// SPDX-License-Identifier: Apache-2.0
// cr-restart: brings a saved job back. See --help.

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/engine/engines.h"
#include "checkpoint/job/caller.h"
#include "checkpoint/job/isolation/isolate.h"
#include "checkpoint/job/job.h"
#include "checkpoint/transaction/restart_job.h"
#include "checkpoint/transaction/saved_sessions.h"
#include "checkpoint/transaction/seen_gpus.h"
#include "host/client.h"
#include "host/report.pb.h"
#include "programs/tools/engine_help.h"
#include "programs/tools/foreground.h"
#include "programs/tools/output_options.h"
#include "programs/tools/through_hostd.h"
#include "programs/tools/tool_report.h"
#include "proto/base/descriptor_limit.h"
#include "proto/cli/help.h"

namespace cuda_remote::client::tools {

using namespace checkpoint;
namespace {

constexpr char kTool[] = "cr-restart";

constexpr char kExamples[] = R"(
Examples:
  cr-restart /data/train.image                        a GPU server of its own, on this machine
  cr-restart /data/train.image --server gpu8:7070
  cr-restart /data/train                              the newest image that cr-checkpoint --keep has put there
  cr-restart /data/train/image-000007                 this one
  cr-restart /data/train.image --server unix:/run/user/1000/cuda-remote/session.sock --gpu 1
  cr-restart /data/train.image --server gpu8:7070 --map 2-3=gpu9:7070   ranks 2 and 3 on another server than the others
  cr-restart /data/train.image --map 0-1=:0 --map 2-3=:1                two ranks on each of two GPUs of this machine
  cr-restart /data/train --hosts node1,node2          all parts of a job on several hosts, or none

Every byte of the image is compared with its checksum before a process of the job runs. The job then runs in the
foreground, as under cr-run: signals go to it, and its output goes where it went before if that was a file (--output
names another one), and to this program's output if it was a pipe or a terminal. The files that the job has open must
exist at their old paths, with their old sizes (see --cut-back, --cut). No other job may be writing to them. A restart
that fails leaves the image as it is and can be tried again. The image must belong to root or to this user, and nobody
else may be able to write to it (see --trust-owner).

Ranks are those of mpirun, torchrun or srun; without one of these the processes are counted from 0, as cr-inspect shows
them. A process that saw several GPUs needs as many at its place: its GPU 0 is the first of the list. Processes that
share GPU memory need one server.

With --hosts, cr-restart ends when all parts run.

Exit codes: the job's own; 128 + N if signal N ended it; 121 stopped by cr-checkpoint --stop; 125 the restart failed.
--hosts: 0 all parts run; 125 no part does.
)";

constexpr char kWithoutRoot[] =
    "Where cr-hostd runs, ordinary users restart the images that it has made of their own jobs, without being root.";

int Fail(const std::string& text) {
  Say(kTool, text);
  return kExitFailed;
}

int Fail(const absl::Status& failure) {
  Say(kTool, failure);
  return kExitFailed;
}

struct Options {
  RestartJobOptions restart;
  std::string hosts;
  bool quiet = false, times = false, describe_gpus = false;
};

int Run(const Options& options) {
  // A file that the limit of file sizes does not allow is an error like a full disk. Restored processes have their own.
  signal(SIGXFSZ, SIG_IGN);
  RaiseDescriptorLimit();
  ToolReport report(kTool, options.quiet, options.times, Interrupted);
  const Caller* const caller = options.restart.caller;
  GpuSessions sessions(options.restart.places, caller ? &caller->environment() : nullptr, &report);
  RestartJob restart(options.restart, EngineOf, &sessions, &report);
  if (const absl::Status status = restart.Run(); !status.ok()) return Fail(status);
  const int code = FinishJob(kTool, restart.isolated(), restart.directory(), restart.job(), restart.TakeTerminal(),
                             sessions.TakeHosts(), restart.engine());
  restart.Clean(EndedByItself(code));
  return code;
}

// For cr-hostd: writes HostGpus to standard output.
int DescribeGpus(const RestartJobOptions& options) {
  if (!options.caller || options.directory.empty()) return Fail("--describe-gpus is for cr-hostd");
  const auto seen = FindSeenGpus(options.places.server, options.places.gpu, options.directory, *options.caller);
  if (!seen.ok()) return Fail(seen.status());
  host::HostGpus found;
  for (const ckptfmt::DeviceFacts& device : *seen) {
    host::HostGpu* const gpu = found.add_gpus();
    gpu->set_name(device.name);
    gpu->set_uuid(device.uuid);
    gpu->set_compute_major(device.compute_major);
    gpu->set_compute_minor(device.compute_minor);
    gpu->set_total_memory(device.total_memory);
  }
  return found.SerializeToFileDescriptor(STDOUT_FILENO) ? 0 : Fail(std::string("cannot write: ") + strerror(errno));
}

int Main(int argc, char** argv) {
  Options options;
  int caller_fd = -1;
  std::vector<std::string> map;
  CLI::App app("Brings a saved job back, on this machine and any GPU server.", kTool);
  SetUpProgram(&app);
  app.footer(NeedsText(*NewEngine(), kWithoutRoot) + kExamples);
  CLI::Option* const image =
      app.add_option("DIR", options.restart.image, "the image, or a folder of images, of which the newest is taken");
  app.add_option("--server", options.restart.places.server,
                 "the GPU server: unix:PATH or HOST:PORT (default: $CUDA_REMOTE_SERVER, else one of the job's own)")
      ->type_name("ADDR");
  app.add_option("--gpu", options.restart.places.gpu, "the only GPU that the job gets (ordinal)")
      ->check(CLI::Range(0, 255));
  app.add_option("--map", map,
                 "send single processes elsewhere: RANK=SERVER[:GPU,...] or RANK=:GPU,...; RANK is a number, N-M or "
                 "pid:N. May be given several times")
      ->type_name("RANK=PLACE")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--job-dir", options.restart.directory,
                 "the job's folder (default: the one that it had); where cr-hostd does the restart, a name for it")
      ->type_name("DIR");
  AddOutputOptions(&app, &options.restart.outputs);
  app.add_flag("--cut-back", options.restart.cut_back,
               "cut the files that the job had by --output and --error back to their length at the checkpoint; the job "
               "writes the rest again");
  app.add_option("--cut", options.restart.cut,
                 "cut this file, which the job has open for writing, back to its length at the checkpoint, no matter "
                 "which process has written to it. May be given several times")
      ->type_name("FILE")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_flag("--trust-owner", options.restart.trust_owner,
               "also accept an image that another user owns or may write to: that user can make the job do anything");
  app.add_flag("--times", options.times, "print the duration of each step");
  app.add_option("--hosts", options.hosts,
                 "HOST,HOST,...: restart all parts of a job on these hosts, or none, through their cr-hostds: "
                 "DIR/member-N on the Nth host, or the newest complete set in DIR (cr-checkpoint --hosts --keep). "
                 "HOST/NAME: the part gets this name on that host. --output and --error then name files for streams "
                 "that were pipes or terminals (default: /dev/null), with %n for N")
      ->type_name("HOST,...");
  app.add_flag("--quiet", options.quiet, "print errors only");
  app.add_option("--caller", caller_fd, "used by cr-hostd")->group("");
  app.add_flag("--describe-gpus", options.describe_gpus, "used by cr-hostd")->group("");
  // Options that may be given several times leave the last word to DIR only because it is required.
  image->required(std::none_of(argv, argv + argc, [](const char* word) { return !strcmp(word, "--describe-gpus"); }));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitFailed;
  }
  const char* const server = getenv("CUDA_REMOTE_SERVER");
  if (options.restart.places.server.empty() && server) options.restart.places.server = server;
  absl::StatusOr<std::vector<PlacementRule>> rules = ParsePlacement(map);
  if (!rules.ok()) return Fail(rules.status());
  options.restart.places.rules = *std::move(rules);
  const auto caller = Caller::From(caller_fd);
  if (!caller.ok()) return Fail(caller.status());
  options.restart.caller = caller->get();
  if (options.describe_gpus) return DescribeGpus(options.restart);
  if (!options.hosts.empty()) {
    if (!options.restart.directory.empty() || options.times) return Fail("--hosts excludes --job-dir and --times");
    host::Request request = host::RequestOf(app, "regroup");
    for (host::Option& option : *request.mutable_options()) {
      if (option.name() == "output" || option.name() == "error" || option.name() == "cut") {
        option.set_value(Absolute(option.value()));
      }
    }
    if (app.count("--server") == 0 && server) host::AddOption("server", server, &request);
    request.set_image(Absolute(options.restart.image));
    return ThroughHostd(kTool, std::move(request), kExitFailed);
  }
  if (NewEngine()->Capabilities().needs_root && geteuid() != 0) {
    const auto hostd = host::Hostd::Connect();
    if (!hostd.ok()) return Fail(hostd.status());
    if (*hostd) {
      host::Request request = host::RequestOf(app, "restart");
      if (app.count("--server") == 0 && server) host::AddOption("server", server, &request);
      request.set_image(Absolute(options.restart.image));
      if (!options.restart.directory.empty() && !NameOfHostdFolder(options.restart.directory, request.mutable_job())) {
        return Fail("--job-dir " + options.restart.directory +
                    ": cr-hostd makes the folders of jobs itself; give the name of one, "
                    "without slashes");
      }
      return (*hostd)->Run(kTool, std::move(request), kExitFailed);
    }
  }
  return Run(options);
}

}  // namespace
}  // namespace cuda_remote::client::tools

int main(int argc, char** argv) {
  try {
    return cuda_remote::client::tools::Main(argc, argv);
  } catch (const std::exception& error) {
    fprintf(stderr, "cr-restart: %s\n", error.what());
    return 125;
  }
}
