// SPDX-License-Identifier: Apache-2.0
// cr-checkpoint: saves a running job. See --help.

#include <stdio.h>
#include <string.h>
#include <time.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/engine/engines.h"
#include "checkpoint/job/caller.h"
#include "checkpoint/job/job.h"
#include "checkpoint/job/own_job.h"
#include "checkpoint/transaction/save_job.h"
#include "checkpoint/transaction/session_keeper.h"
#include "programs/tools/background.h"
#include "programs/tools/engine_help.h"
#include "programs/tools/foreground.h"
#include "programs/tools/steps.h"
#include "programs/tools/through_hostd.h"
#include "programs/tools/tool_report.h"
#include "proto/base/clock.h"
#include "proto/base/text.h"
#include "proto/cli/help.h"
#include "proto/codec/json.h"

namespace cuda_remote::client::tools {

using namespace checkpoint;
namespace {

constexpr char kTool[] = "cr-checkpoint";
// Besides those of job.h.
constexpr int kExitInterrupted = 3;
// Of one checkpoint, where what keeps it from being made passes.
constexpr int kMostTries = 3;
constexpr std::chrono::milliseconds kBetweenTries(50);

constexpr char kExamples[] = R"(
Examples:
  cr-checkpoint train /data/train.image                  saves the job; it continues
  cr-checkpoint --stop train /data/train.image           saves it and ends it; later: cr-restart /data/train.image
  cr-checkpoint --every 10m train /data/train.image      repeatedly; each complete image replaces the one before
  cr-checkpoint --every 10m --keep 3 train /data/train   repeatedly; the last three images stay and share equal data
  cr-checkpoint --hosts node1,node2 train /data/train    a job on two hosts; later: cr-restart --hosts
  cr-checkpoint --hosts node1,node2 --every 10m --keep 3 train /data/train   repeatedly; the last three sets stay

Before the pause, while the job runs, the tool copies GPU memory to host memory and skips memory that the job keeps
writing to. In the pause it copies the rest and saves the processes. After the pause the tool hashes, compresses and
writes the copies while the job runs. This needs as much host memory as the job has GPU memory (limit: --pool). If there
is less, the rest is written during the pause. With --stop the job does not continue, and a small pool is enough. A
checkpoint that fails, or is interrupted or killed, leaves the job running and no new image.

With --keep N, DIR holds the last N images of the job (image-000001, ...). GPU memory that an earlier image has is not
written again. cr-restart DIR takes the newest image, cr-restart DIR/image-000007 this one; cr-inspect DIR lists them.

With --hosts and --keep, DIR holds sets: DIR/image-N/member-M is the image of the Mth host. Old sets are removed only
after a new one is complete on all hosts. cr-restart DIR --hosts takes the newest complete set.

With --every, the tool reports a checkpoint that fails with the time, keeps the last image, and tries again after the
interval.

Exit codes: 0 saved (--every: the job has ended, and was saved at least once), 1 failed (--every: the job has ended and
was never saved), 2 wrong use, 3 interrupted (the job continues; with --every the last image stays), 4 no such job.
)";

constexpr char kWithoutRoot[] =
    "Where cr-hostd runs, ordinary users save the jobs that their own cr-run has started, without being root.\n"
    "Where it does not run, root saves jobs that users have started with cr-run --plain.";

struct Options {
  std::string job, hosts, user;
  SaveJobOptions save;
  bool json = false, quiet = false, times = false;
  double every = 0;  // seconds; 0: once
};

// As the person knows the job: cr-hostd says its folder, which ends with its name.
std::string NameFor(const Options& options) {
  return options.save.gate ? options.job.substr(options.job.rfind('/') + 1) : options.job;
}

void TellTransfer(const TransferTimes& times, const Steps& steps) {
  const auto count = [](uint64_t chunks, uint64_t bytes) {
    return std::to_string(chunks) + " chunks, " + ByteText(double(bytes));
  };
  steps.Part(times.slots, "for room in host memory (this and what follows: of " + std::to_string(times.threads) +
                              " threads together; " + std::to_string(times.page_faults) + " page faults)");
  steps.Part(times.requests, "sending requests for " + std::to_string(times.regions) + " regions");
  steps.Part(times.channel, "waiting for " + count(times.channel_chunks, times.channel_bytes) + " through the channel");
  steps.Part(times.copies, "waiting for " + count(times.shared_chunks, times.shared_bytes) + " through shared buffers");
  steps.Part(times.emptying, "copying out of shared buffers");
  steps.Part(times.using_, "handing chunks to the image");
  if (times.longest > 0) steps.Part(times.longest, "the longest wait, for " + times.longest_chunk);
}

// Says how reading GPU memory went, too.
class SaveReport final : public ToolReport {
 public:
  SaveReport(const Options& options, const SaveJobOutcome* outcome, std::function<bool()> cancelled)
      : ToolReport(kTool, options.quiet, options.times, std::move(cancelled)), outcome_(*outcome) {}

  void Done(const char* step) override {
    ToolReport::Done(step);
    if (strcmp(step, kStepReading) != 0) return;
    const SaveTimes& saving = outcome_.saving;
    if (saving.hashing > 0) {
      steps().Part(saving.hashing, "of it, hashing on the GPU: earlier images have " +
                                       ByteText(double(saving.unread_bytes)) + ", and " +
                                       ByteText(double(outcome_.precopy.kept_bytes)) + " of " +
                                       ByteText(double(outcome_.precopy.copied_bytes)) + " copied before are right");
    }
    steps().Part(saving.taking, "of it, copying " + ByteText(double(outcome_.behind_bytes)) + " inside the GPU");
    steps().Part(saving.attaching, "of it, letting the GPU server map the buffers");
    TellTransfer(saving.reading, steps());
    steps().Part(saving.detaching, "of it, taking the buffers back");
  }

 private:
  const SaveJobOutcome& outcome_;
};

// One checkpoint. If it fails, there is no image, and the job continues.
absl::Status Checkpoint(const Options& options, const std::string& directory, const Job& job, SessionKeeper* keeper,
                        const std::function<bool()>& cancelled, SaveJobOutcome* outcome) {
  for (int tries = 1;; ++tries) {
    *outcome = {};
    SaveReport report(options, outcome, cancelled);
    const std::unique_ptr<SnapshotEngine> engine = NewEngine();
    absl::Status saved = SaveJob(options.save, job, directory, engine.get(), keeper, &report, outcome);
    // A cr-hostd follows one try.
    if (saved.ok() || !engine->FailurePasses() || tries == kMostTries || options.save.gate || cancelled()) return saved;
    std::this_thread::sleep_for(kBetweenTries);
  }
}

// A moment as people write it, here.
std::string TimeText(std::chrono::system_clock::time_point moment) {
  const time_t seconds = std::chrono::system_clock::to_time_t(moment);
  tm parts{};
  char text[32];
  if (!localtime_r(&seconds, &parts) || strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &parts) == 0) return "?";
  return text;
}

void Tell(const Options& options, const SaveJobOutcome& outcome) {
  const ckptfmt::ImageSizes& sizes = outcome.sizes;
  const TransferTimes& reading = outcome.saving.reading;
  if (options.json) {
    JsonWriter json(JsonWriter::kSpaced);
    json.BeginOutput();
    json.Member("image", outcome.image);
    json.RealMember("seconds", outcome.seconds, 3);
    json.RealMember("paused_seconds", outcome.paused, 3);
    json.RealMember("preparing_seconds", outcome.preparing, 3);
    json.RealMember("reading_seconds", outcome.reading, 3);
    json.RealMember("dumping_seconds", outcome.dumping, 3);
    json.Member("prepared_bytes", outcome.prepared_bytes);
    json.Member("gpu_bytes", sizes.region_bytes);
    json.Member("client_bytes", sizes.client_bytes);
    json.Member("total_bytes", sizes.total_bytes);
    json.Member("linked_bytes", sizes.linked_bytes);
    json.Member("unread_bytes", outcome.saving.unread_bytes);
    json.RealMember("hashing_seconds", outcome.saving.hashing, 3);
    json.Key("before");
    json.Begin('{');
    json.RealMember("seconds", outcome.precopy.seconds, 3);
    json.Member("rounds", outcome.precopy.rounds);
    json.Member("copied_bytes", outcome.precopy.copied_bytes);
    json.Member("kept_bytes", outcome.precopy.kept_bytes);
    json.End('}');
    json.Key("behind");
    json.Begin('{');
    json.RealMember("taking_seconds", outcome.saving.taking, 3);
    json.Member("bytes", outcome.behind_bytes);
    json.RealMember("seconds", outcome.behind, 3);
    json.End('}');
    json.Key("reading");
    json.Begin('{');
    json.RealMember("attaching_seconds", outcome.saving.attaching, 3);
    json.RealMember("detaching_seconds", outcome.saving.detaching, 3);
    json.Member("threads", uint64_t(reading.threads));
    json.Member("regions", reading.regions);
    json.Member("page_faults", reading.page_faults);
    json.Member("channel_chunks", reading.channel_chunks);
    json.Member("channel_bytes", reading.channel_bytes);
    json.Member("shared_chunks", reading.shared_chunks);
    json.Member("shared_bytes", reading.shared_bytes);
    json.RealMember("slot_seconds", reading.slots, 3);
    json.RealMember("request_seconds", reading.requests, 3);
    json.RealMember("channel_seconds", reading.channel, 3);
    json.RealMember("copy_seconds", reading.copies, 3);
    json.RealMember("emptying_seconds", reading.emptying, 3);
    json.RealMember("using_seconds", reading.using_, 3);
    json.RealMember("longest_seconds", reading.longest, 3);
    json.End('}');
    json.End('}');
    puts(json.text().c_str());
  } else if (!options.quiet) {
    const std::string time = options.every > 0 ? TimeText(WallNow()) + ": " : std::string();
    const std::string shared = sizes.linked_bytes > 0
                                   ? ", of which earlier images have " + ByteText(double(sizes.linked_bytes))
                                   : std::string();
    fprintf(stderr,
            "%s: %s%s in %.1f s (the job stood still for %.1f s): GPU memory %s, processes %s, on the disk %s%s\n",
            kTool, time.c_str(), outcome.image.c_str(), outcome.seconds, outcome.paused,
            ByteText(double(sizes.region_bytes)).c_str(), ByteText(double(sizes.client_bytes)).c_str(),
            ByteText(double(sizes.total_bytes)).c_str(), shared.c_str());
  }
  fflush(stdout);
}

// --every: what goes wrong once is said, and tried again at the next time.
int Repeat(const Options& options, const std::string& directory, const Job& job, SessionKeeper* keeper,
           const std::function<bool()>& cancelled) {
  using std::chrono::milliseconds, std::chrono::system_clock;
  const milliseconds interval(int64_t(options.every * 1000));
  // What is wrong for good.
  if (const absl::Status usable = NewEngine()->CheckUsable(); !usable.ok()) {
    Say(kTool, usable);
    return kExitFailure;
  }
  std::string saved, last;  // when the last image was complete, and where it is
  const auto ended = [&] {
    if (saved.empty()) Say(kTool, "the job has ended, and there is no image of it from this run");
    return saved.empty() ? kExitFailure : 0;
  };
  while (true) {
    SaveJobOutcome outcome;
    const absl::Status status = Checkpoint(options, directory, job, keeper, cancelled, &outcome);
    const Moment next = Now() + interval;
    const system_clock::time_point now = WallNow();
    if (status.ok()) {
      saved = TimeText(now);
      last = outcome.image;
      Tell(options, outcome);
    } else if (!JobIsAlive(job)) {
      return ended();
    } else if (!cancelled()) {
      Say(kTool,
          TimeText(now) + ": no checkpoint of " + NameFor(options) + ": " + std::string(status.message()) +
              "; the job continues. " +
              (saved.empty() ? "There is no image from this run yet" : last + " is still the image of " + saved) +
              "; the next try is at " + TimeText(now + interval));
    }
    do {
      if (!JobIsAlive(job)) return ended();
      if (cancelled()) return kExitInterrupted;
      std::this_thread::sleep_for(std::min<Moment::duration>(milliseconds(100), interval));
    } while (Now() < next);
  }
}

int Work(const Options& options, const Background& background) {
  const std::function<bool()>& cancelled = background.cancelled;
  const OwnersRights rights(options.job);
  absl::StatusOr<FoundJob> found = FindJob(options.job);
  const absl::Status mine = found.ok() ? rights.Check(found->directory, &found->job) : found.status();
  if (!mine.ok()) {
    Say(kTool, mine);
    return kExitNoJob;
  }
  const auto& [directory, job] = *found;
  const std::unique_ptr<SnapshotEngine> made = NewEngine();
  SnapshotEngine& engine = *made;
  const auto started = SessionKeeper::Start(job, directory, kTool, &engine, background.helper_messages);
  if (!started.ok()) {
    Say(kTool, started.status());
    return kExitFailure;
  }
  SessionKeeper* const keeper = started->get();
  if (options.every <= 0) {
    SaveJobOutcome outcome;
    const absl::Status status = Checkpoint(options, directory, job, keeper, cancelled, &outcome);
    if (!status.ok()) {
      const char* const state = JobIsAlive(job) ? "; the job continues" : "";
      Say(kTool, "no checkpoint of " + NameFor(options) + ": " + std::string(status.message()) + state);
      // cr-hostd may hear of an interruption before this program does.
      return cancelled() || absl::IsCancelled(status) ? kExitInterrupted : kExitFailure;
    }
    Tell(options, outcome);
    return 0;
  }
  return Repeat(options, directory, job, keeper, cancelled);
}

int Main(int argc, char** argv) {
  Options options;
  int caller_fd = -1;
  CLI::App app("Saves a running job: its processes, their GPU objects and their GPU memory.", kTool);
  SetUpProgram(&app);
  const std::unique_ptr<SnapshotEngine> engine = NewEngine();
  app.footer(kWhichJob + NeedsText(*engine, kWithoutRoot) + kExamples);
  app.add_option("JOB", options.job, "which job")->required();
  app.add_option("DIR", options.save.image,
                 "the image, a folder; an older image there is replaced (--keep: the folder of the images)")
      ->required();
  app.add_flag("--stop", options.save.stop, "end the job once it is saved");
  app.add_flag("--tcp-close", options.save.close_tcp,
               "save a job that has TCP connections with others; after a restart these connections are closed");
  app.add_option("--every", options.every, "repeat after this time (as in 30s, 10m, 2h) until the job ends")
      ->type_name("TIME")
      ->transform(CLI::AsNumberWithUnit(std::map<std::string, double>{{"s", 1}, {"m", 60}, {"h", 3600}},
                                        CLI::AsNumberWithUnit::CASE_INSENSITIVE));
  app.add_option("--keep", options.save.keep,
                 "keep the last N images in the folder DIR; they share data files where they are the same")
      ->type_name("N")
      ->check(CLI::Range(size_t{1}, size_t{10000}));
  app.add_option("--timeout", options.save.timeout, "how long to wait for CUDA calls in progress")
      ->type_name("SECONDS")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 86400.0));
  app.add_option(
         "--compress", options.save.compress,
         "Zstandard level for GPU memory; 0: none (default: the fastest one, where it makes the checkpoint faster)")
      ->type_name("LEVEL")
      ->check(CLI::Range(0, 19));
  app.add_option("--pool", options.save.pool,
                 "host memory for copies of GPU memory that are not written yet, as in 16G. If it is full, the rest is "
                 "written in the pause (default: half of the memory that the machine and the control group have left; "
                 "with --stop at most 1 GiB)")
      ->type_name("SIZE")
      ->transform(CLI::AsSizeValue(false));
  app.add_option(
         "--hosts", options.hosts,
         "HOST,HOST,...: save the parts of a job on these hosts at one moment, all or none, through their cr-hostds. "
         "The image of the Nth host is DIR/member-N there. HOST/NAME: the part has this name on that host")
      ->type_name("HOST,...");
  app.add_option("--user", options.user,
                 "for operators (cr-hostd --operator): save the job of this user. The image belongs to the user, in a "
                 "folder that the user may write to")
      ->type_name("USER")
      ->excludes("--hosts");
  app.add_flag("--json", options.json, "print times and sizes as JSON");
  app.add_flag("--times", options.times, "print the duration of each step");
  app.add_flag("--quiet", options.quiet, "print errors only");
  app.add_option("--caller", caller_fd, "used by cr-hostd")->group("");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (options.save.stop && options.every > 0) {
    Say(kTool, "--stop and --every exclude each other");
    return kExitUsage;
  }
  if (!options.hosts.empty()) {
    if (!engine->Capabilities().several_hosts) {
      Say(kTool, "--hosts: jobs on several hosts cannot be saved with " + engine->Requirement());
      return kExitUsage;
    }
    if (options.times) {
      Say(kTool, "--hosts excludes --times");
      return kExitUsage;
    }
    host::Request request = host::RequestOf(app, "group");
    for (host::Option& option : *request.mutable_options()) {
      if (option.name() == "every") option.set_value(std::to_string(options.every));
    }
    request.set_job(options.job);
    request.set_image(Absolute(options.save.image));
    return ThroughHostd(kTool, std::move(request), kExitFailure);
  }
  const auto caller = Caller::From(caller_fd);
  if (!caller.ok()) {
    Say(kTool, caller.status());
    return kExitFailure;
  }
  if (*caller) {
    options.save.gate = (*caller)->gate();
    options.save.waits = (*caller)->waits();
  }
  if (!options.user.empty()) {
    if (geteuid() == 0) {
      Say(kTool, "--user is for operators (cr-hostd --operator); root names the job's folder, or its PID");
      return kExitUsage;
    }
    host::Request request = host::RequestOf(app, "checkpoint");
    auto* const given = request.mutable_options();
    given->erase(std::remove_if(given->begin(), given->end(), [](const auto& one) { return one.name() == "user"; }),
                 given->end());
    request.set_job(options.job);
    request.set_user(options.user);
    request.set_image(Absolute(options.save.image));
    return ThroughHostd(kTool, std::move(request), kExitFailure);
  }
  if (const std::string name = JobOfHostd(options.job); !name.empty()) {
    host::Request request = host::RequestOf(app, "checkpoint");
    request.set_job(name);
    request.set_image(Absolute(options.save.image));
    return ThroughHostd(kTool, std::move(request), kExitFailure);
  }
  return RunInBackground([&](const Background& background) { return Work(options, background); });
}

}  // namespace
}  // namespace cuda_remote::client::tools

int main(int argc, char** argv) {
  try {
    return cuda_remote::client::tools::Main(argc, argv);
  } catch (const std::exception& error) {
    fprintf(stderr, "cr-checkpoint: %s\n", error.what());
    return 1;
  }
}
