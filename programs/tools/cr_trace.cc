// SPDX-License-Identifier: Apache-2.0
// cr-trace: records a running job's CUDA calls for some seconds. See --help.

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/agent/agent_client.h"
#include "checkpoint/job/cuda_processes.h"
#include "checkpoint/job/job.h"
#include "checkpoint/job/job_claim.h"
#include "checkpoint/job/own_job.h"
#include "programs/tools/foreground.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/base/unique_fd.h"
#include "proto/cli/help.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::client::tools {

using namespace checkpoint;
namespace {

constexpr char kTool[] = "cr-trace";
constexpr std::chrono::milliseconds kLookAgain(100);

constexpr char kExamples[] = R"(
Examples:
  cr-trace train                              the table of five seconds of calls
  cr-trace train --seconds 2 -o two.json      and the timeline, to be opened in ui.perfetto.dev
  cr-trace train --totals                     all calls so far, of a job started with CUDA_REMOTE_TRACE

The table has one line for each driver function that was called: how often, how many calls failed, bytes to and from the
server, and the time in the caller. The timeline shows each call by thread and each request in the server's worker.

Exit codes: 0 recorded, 1 failed (the job continues), 2 wrong use, 4 no such job.
)";

struct Options {
  std::string job, output;
  double seconds = 5, wait = 600;
  uint64_t events = 1000000;
  int pid = 0;
  bool totals = false, json = false;
};

// Prints what the job wrote into `fd`.
absl::Status Show(int fd) {
  char bytes[65536];
  off_t at = 0;
  while (true) {
    const ssize_t got = pread(fd, bytes, sizeof(bytes), at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      return ErrnoStatus("reading the table");
    }
    if (got == 0) break;
    fwrite(bytes, 1, size_t(got), stdout);
    at += got;
  }
  fflush(stdout);
  return absl::OkStatus();
}

// A file for the timeline that appears under its name only when it is whole.
class NewFile {
 public:
  ~NewFile() {
    if (!temporary_.empty()) unlink(temporary_.c_str());
  }
  absl::Status Open(const std::string& path) {
    path_ = path;
    const std::string name = path + "." + std::to_string(getpid()) + ".new";
    fd_.Reset(path.empty() ? memfd_create("cr-trace", MFD_CLOEXEC)
                           : open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!fd_.ok()) return ErrnoStatus("cannot write " + path);
    if (!path.empty()) temporary_ = name;
    return absl::OkStatus();
  }
  absl::Status Commit() {
    if (temporary_.empty()) return absl::OkStatus();
    if (rename(temporary_.c_str(), path_.c_str()) != 0) return ErrnoStatus("cannot write " + path_);
    temporary_.clear();
    return absl::OkStatus();
  }
  int fd() const { return fd_.get(); }

 private:
  std::string path_, temporary_;
  UniqueFd fd_;
};

// The process to record: the one that was named, or the first.
absl::StatusOr<CudaProcess> FindProcess(const Options& options, const Job& job, const std::string& directory) {
  for (const CudaProcess& process : FindCudaProcesses(job, directory)) {
    if (options.pid != 0 && options.pid != process.pid && options.pid != process.inner_pid) continue;
    return process;
  }
  return absl::NotFoundError(options.pid != 0
                                 ? "the job has no process " + std::to_string(options.pid) + " that uses CUDA"
                                 : "no process of the job uses CUDA (yet)");
}

// Waits until no tool works on the job, such as cr-checkpoint --every; says once for which one.
absl::Status LookWhenFree(const std::string& directory, double limit, std::optional<JobLook>* look) {
  const Moment start = Now();
  for (bool said = false;; said = true) {
    look->emplace();
    absl::Status taken = (*look)->Take(directory);
    if (taken.ok() || (*look)->tool().empty() || SecondsSince(start) >= limit) return taken;
    if (!said) Say(kTool, "waiting for " + (*look)->tool() + ", which works on this job");
    look->reset();
    std::this_thread::sleep_for(kLookAgain);
  }
}

absl::Status Record(const Options& options, const Job& found, const std::string& directory) {
  NewFile timeline, table;
  CR_RETURN_IF_ERROR(timeline.Open(options.output));
  CR_RETURN_IF_ERROR(table.Open(""));
  std::optional<JobLook> look;
  CR_RETURN_IF_ERROR(LookWhenFree(directory, options.wait, &look));
  CR_ASSIGN_OR_RETURN(const CudaProcess process, FindProcess(options, found, directory));
  const auto connect = [&] {
    return agent::AgentClient::Connect(directory, uint32_t(process.inner_pid), NameOf(process));
  };
  const auto show = [&] {
    // The table has the number by which the process knows itself, and cr-ps another one.
    if (!options.json && process.pid != process.inner_pid)
      printf("%s on this machine is process %d in the job\n", NameOf(process).c_str(), process.inner_pid);
    return Show(table.fd());
  };
  CR_RETURN_IF_ERROR(CheckNotStopped(process));
  CR_ASSIGN_OR_RETURN(std::unique_ptr<agent::AgentClient> job, connect());
  if (options.totals) {
    CR_RETURN_IF_ERROR(job->TraceTotals(table.fd(), options.json));
    return show();
  }
  // A little longer than it is waited for; should this tool die, the job records no longer than that.
  const uint64_t milliseconds = uint64_t(std::ceil(options.seconds * 1000)) + 2000;
  CR_RETURN_IF_ERROR(job->BeginTrace(options.events, milliseconds));
  // Other tools may come meanwhile.
  job.reset();
  look.reset();
  std::this_thread::sleep_for(std::chrono::duration<double>(options.seconds));
  bool is_claimed = false;
  const auto end = [&]() -> absl::Status {
    JobLook last;
    const absl::Status taken = last.Take(directory);
    is_claimed = !taken.ok();
    CR_RETURN_IF_ERROR(taken);
    CR_ASSIGN_OR_RETURN(const auto again, connect());
    return again->EndTrace(timeline.fd(), table.fd(), options.json);
  };
  absl::Status ended = end();
  // A checkpoint may be in progress, for as long as it takes.
  for (int retry = 0; !ended.ok() && retry < 20 && !HasEnded(process); retry += !is_claimed) {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    ended = end();
  }
  if (!ended.ok() && HasEnded(process)) return absl::UnavailableError(NameOf(process) + " has ended");
  CR_RETURN_IF_ERROR(ended);
  CR_RETURN_IF_ERROR(show());
  return timeline.Commit();
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Records a running job's CUDA calls for some seconds.", kTool);
  SetUpProgram(&app);
  app.footer(std::string(kWhichJob) + kExamples);
  app.add_option("JOB", options.job, "which job")->required();
  app.add_option("--pid", options.pid, "which process of the job (default: the first one that uses CUDA)")
      ->type_name("PID");
  app.add_option("-s,--seconds", options.seconds, "for how long")
      ->type_name("SECONDS")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 86400.0));
  app.add_option("--wait", options.wait, "how long to wait for a tool that works on the job, such as cr-checkpoint")
      ->type_name("SECONDS")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 86400.0));
  app.add_option("-o,--output", options.output, "the timeline's file (Chrome's JSON, for ui.perfetto.dev)")
      ->type_name("FILE");
  app.add_option("--events", options.events, "maximum number of calls, and of requests, in the timeline")
      ->capture_default_str()
      ->check(CLI::Range(uint64_t(1), uint64_t(100000000)));
  app.add_flag("--totals", options.totals, "record nothing; print the table of all calls so far");
  app.add_flag("--json", options.json, "print the table as JSON");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (options.totals && !options.output.empty()) {
    Say(kTool, "--totals writes no timeline; omit --output");
    return kExitUsage;
  }
  const OwnersRights rights(options.job);
  absl::StatusOr<FoundJob> found = FindJobOrProcesses(options.job);
  const absl::Status mine = found.ok() ? rights.Check(found->directory, &found->job) : found.status();
  if (!mine.ok()) {
    Say(kTool, mine);
    return kExitNoJob;
  }
  const absl::Status recorded = Record(options, found->job, found->directory);
  if (recorded.ok()) return 0;
  Say(kTool, options.job + " was not traced: " + std::string(recorded.message()));
  return kExitFailure;
}

}  // namespace
}  // namespace cuda_remote::client::tools

int main(int argc, char** argv) {
  try {
    return cuda_remote::client::tools::Main(argc, argv);
  } catch (const std::exception& error) {
    fprintf(stderr, "cr-trace: %s\n", error.what());
    return 1;
  }
}
