// cr-restart: brings a saved job back. See --help.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <fstream>
#include <set>
#include <string>

#include "ckptfmt/image_reader.h"
#include "client/tools/criu_facts.h"
#include "client/tools/criu_image.h"
#include "client/tools/foreground.h"
#include "client/tools/gpu_host.h"
#include "client/tools/gpu_state.h"
#include "client/tools/held_job.h"
#include "client/tools/isolate.h"
#include "client/tools/job.h"
#include "client/tools/job_claim.h"
#include "client/tools/modules.h"
#include "client/tools/open_files.h"
#include "client/tools/ports.h"
#include "client/tools/process_restore.h"
#include "client/tools/progress.h"
#include "client/tools/stand_ins.h"
#include "client/tools/steps.h"
#include "proto/frame/frame.h"
#include "proto/frame/version.h"
#include "replay/replayer/replayer.h"

namespace cuda_remote::client::tools {
namespace {

constexpr char kTool[] = "cr-restart";

// How long a process that answers no more may take to end.
constexpr int kEndMs = 2000;

constexpr char kExamples[] = R"(
Examples:
  cr-restart /data/train.image                        a GPU server of its own, on this machine
  cr-restart /data/train.image --server gpu8:7070
  cr-restart /data/train.image --server unix:/run/user/1000/cuda-remote/session.sock --gpu 1

Every byte of the image is compared with its checksum before the job's process runs. The job then runs in the
foreground, as under cr-run: signals go to it, and its output goes where it went before if that was a file, and to this
program's output if it was a pipe or a terminal. Files that the job has open must be where they were, as long as they
were (--cut-back). A restart that fails leaves the image as it is and can be tried again. The image must belong to root or
to this user, and nobody else may be able to write to it (--trust-owner). Needs root and CRIU.

Exit codes: the job's own; 128 + N if signal N ended it; 121 stopped by cr-checkpoint --stop; 125 the restart failed.
)";

int Fail(const std::string& text) {
  Say(kTool, text);
  return kExitFailed;
}

struct Options {
  std::string image, server, directory;
  int gpu = -1;
  bool quiet = false, cut_back = false, times = false, trust_owner = false;
};

// Opens and verifies the image, and reads what it says of the job and of its log.
std::unique_ptr<ckptfmt::ImageReader> OpenImage(const Options& options, Job* job, replay::Log* log,
                                                std::string* error) {
  using Owner = ckptfmt::ImageReader::Owner;
  auto opened = ckptfmt::ImageReader::Open(options.image, options.trust_owner ? Owner::kAnyone : Owner::kTrusted);
  if (!opened.ok()) {
    *error = std::string(opened.status().message());
    if (absl::IsPermissionDenied(opened.status()) && !options.trust_owner) *error += " (--trust-owner)";
    return nullptr;
  }
  std::unique_ptr<ckptfmt::ImageReader> image = std::move(*opened);
  Progress progress("verifying the image", options.quiet);
  // The chunks of memory are compared as they are read, and the process only runs after all of them.
  const absl::Status verified = image->Verify([&](uint64_t done, uint64_t total) { progress.Update(done, total); },
                                              ckptfmt::ImageReader::Files::kAllButMemory);
  if (!verified.ok()) {
    *error = std::string(verified.message());
    return nullptr;
  }
  const ckptfmt::ImageInfo& info = image->info();
  if (info.wire_version != kWireVersion) {
    *error = options.image + " was made by a version with wire version " + std::to_string(info.wire_version) +
             "; this one has " + std::to_string(kWireVersion);
    return nullptr;
  }
  const auto found = info.client_info.find("job");
  if (info.engine != "criu" || found == info.client_info.end() || !JobFromJson(found->second, job)) {
    *error = options.image + " has no client process that could be restored (engine " + info.engine + ")";
    return nullptr;
  }
  const absl::StatusOr<std::string> bytes = image->ReadLog();
  if (!bytes.ok() || !replay::Log::Parse(*bytes, log, error)) {
    *error = options.image +
             ": the replay log cannot be read: " + (bytes.ok() ? *error : std::string(bytes.status().message()));
    return nullptr;
  }
  std::string calls;
  for (const std::string& call : replay::NotReplayable(*log)) calls += (calls.empty() ? "" : ", ") + call;
  if (!calls.empty()) {
    *error = options.image + " has objects that cannot be made again here; they came from: " + calls;
    return nullptr;
  }
  return image;
}

// Compares the job's open files with what is there.
bool CheckFiles(const Options& options, const ckptfmt::ImageReader& image, const Job& job,
                std::vector<SavedFile>* longer, std::string* error) {
  std::string bytes;
  std::vector<SavedFile> files;
  // An image of a newer CRIU may look otherwise: then CRIU itself finds what differs.
  if (!ReadImageFile(image.client_dir() + "/files.img", &bytes) || !ParseFiles(bytes, job, &files)) return true;
  for (SavedFile& file : files) {
    if (access(file.path.c_str(), F_OK) != 0 && SeenByJob(job, file.path) != file.path) {
      *error = "a process of the job has loaded " + file.path +
               ", in whose place it saw cuda-remote's library; there is no such file on this machine: restart the job "
               "where the same driver is installed";
      return false;
    }
    file.path = SeenByJob(job, file.path);
  }
  if (!CompareFiles(files, longer, error)) return false;
  if (longer->empty() || options.cut_back) return true;
  *error = "the job has gone on writing since the checkpoint; --cut-back takes these files back to their length then:";
  for (const SavedFile& file : *longer) *error += " " + file.path + " (" + std::to_string(file.bytes) + " bytes)";
  return false;
}

// Sees to it that no connection that ended a moment ago, such as the stopped job's own, holds a port of the job.
bool CheckPorts(const ckptfmt::ImageReader& image, std::string* error) {
  std::string bytes;
  std::set<uint16_t> ports;
  if (!ReadImageFile(image.client_dir() + "/files.img", &bytes) || !SavedPorts(bytes, &ports)) return true;
  bool said = false;
  uint16_t last = 0;
  const auto waiting = [&](uint16_t port) {
    last = port;
    if (!said) {
      Say(kTool, "TCP port " + std::to_string(port) +
                     " of the job is held by a connection that has ended; the kernel frees it within a minute");
    }
    said = true;
    return !Interrupted();
  };
  if (FreePorts(ports, waiting) || last == 0) return true;
  *error = "interrupted while waiting for TCP port " + std::to_string(last);
  return false;
}

// A GPU session with all objects that the job had; their memory is still to be loaded.
std::unique_ptr<ClientChannel> RestoreObjects(const Options& options, const GpuHost& host, const Job& job,
                                              const ckptfmt::ImageReader& image, const replay::Log& log, Steps* steps,
                                              std::string* error) {
  const ckptfmt::ImageInfo& info = image.info();
  std::unique_ptr<ClientChannel> channel = OpenSession(host.socket_path(), OwnPid(job), info.program, info.job,
                                                       options.server.empty() ? -1 : options.gpu, error);
  if (!channel) return nullptr;
  ckptfmt::ImageInfo here;
  if (!DescribeServer(channel.get(), &here, error)) return nullptr;
  if (here.devices.size() < info.devices.size()) {
    *error = "the job saw " + std::to_string(info.devices.size()) + " GPUs; this server has " +
             std::to_string(here.devices.size());
    return nullptr;
  }
  if (!CheckModules(log, info.devices, here.devices, error)) return nullptr;
  for (size_t i = 0; i < info.devices.size(); ++i) {
    if (here.devices[i].name != info.devices[i].name)
      Say(kTool,
          "GPU " + std::to_string(i) + " was a " + info.devices[i].name + "; here it is a " + here.devices[i].name);
  }
  steps->Done("opening a session with the GPU server");
  if (!ReplayLog(log, channel.get(), error)) return nullptr;
  steps->Done("making the GPU objects again");
  return channel;
}

bool RestoreMemory(const Options& options, const ckptfmt::ImageReader& image, ClientChannel* channel, Steps* steps,
                   std::string* error) {
  Progress progress("loading GPU memory", options.quiet);
  const auto go_on = [&](uint64_t done, uint64_t total) {
    progress.Update(done, total);
    return !Interrupted();
  };
  if (!LoadMemory(image, channel, go_on, error)) return false;
  steps->Done("comparing and loading GPU memory");
  return true;
}

// Gives the restored process its GPU session and lets it go on, known to the other tools by then. True also for a job
// that has ended by itself meanwhile, as one may whose last call was made before the checkpoint.
bool GiveSession(const Options& options, const ckptfmt::ImageReader& image, const Isolated& isolated,
                 const std::string& directory, const GpuHost& host, const ClientChannel& channel, Job* job,
                 std::string* error) {
  const std::unique_ptr<agent::AgentClient> agent = GiveChannel(
      directory, channel, host.server(), [&] { return HasEnded(isolated, 0); }, error);
  if (agent) {
    job->set_server(options.server);
    job->set_gpu(options.gpu);
    job->set_runner_pid(getpid());
    job->set_init_pid(isolated.init);
    job->set_pid_namespace(PidNamespace(isolated.init));
    job->set_pid(isolated.pid);
    job->set_image(Absolute(options.image));
    job->set_saved_unix_ms(uint64_t(image.info().created_unix_ms));
    job->set_saved_bytes(image.sizes().total_bytes);
    job->clear_stdio();
    job->clear_files();
    job->clear_tcp();
    job->clear_tcp_close();
    job->clear_terminal_group();
    if (!WriteJob(directory, *job, error)) Say(kTool, *error + "; the other tools will not find the job");
    TellSaved(host.server(), channel.welcome().session, job->saved_unix_ms(), job->saved_bytes());
    if (agent->Unlock(error)) return true;
  }
  if (HasEnded(isolated, kEndMs)) {
    Say(kTool, "the job ended before it had its GPU session again");
    return true;
  }
  *error = "the restored process did not take its GPU session: " + *error;
  return false;
}

int Run(const Options& options) {
  std::string error;
  Job job;
  replay::Log log;
  std::vector<Mount> mounts;
  Steps steps(kTool, options.times);
  const std::unique_ptr<ckptfmt::ImageReader> image = OpenImage(options, &job, &log, &error);
  steps.Done("comparing the image but for GPU memory");
  if (!image) return Fail(error);
  const std::string why = NoIsolation();
  if (!why.empty()) return Fail("restoring a process needs root");

  std::vector<SavedFile> longer;
  if (!CheckFiles(options, *image, job, &longer, &error) || !CheckPorts(*image, &error)) return Fail(error);
  std::string directory = options.directory.empty() ? job.directory() : Absolute(options.directory);
  Job running;
  std::string ignored, library_folder;
  if (ReadJob(directory, &running, &ignored) && JobIsAlive(running)) {
    return Fail("there is a running job in " + directory + " (PID " + std::to_string(running.pid()) +
                "): end it first, or give the restarted one another folder with --job-dir");
  }
  if (!ClaimJobFolder(directory, &error)) return Fail(error + " (--job-dir)");
  if (!LinkLibrary(directory, &library_folder, &error)) return Fail(error);
  if (directory != job.directory() && !MakeJobFolder(job.directory(), &error)) return Fail(error);
  // Until the job goes on. What killed an earlier tool has ended the job that was here.
  JobClaim claim;
  if (!claim.Take(directory, kTool, Interrupted, &error)) return Fail(error);
  if (!WriteThisJob(directory, job.directory(), image->info().job, &error)) return Fail(error);
  if (!PlanStandIns(directory, &job, &mounts, &error))
    Say(kTool, error + "; programs with an environment of their own may use this machine's own GPU");
  unlink((directory + "/stopped").c_str());
  // The folder that the job knows is only where the other one is shown: it must stay as long as this job runs.
  const std::string marker = job.directory() + "/.used-by-" + std::to_string(getpid());
  if (directory != job.directory()) std::ofstream(marker) << directory << "\n";
  const auto remove_folders = [&] {
    RemoveJobFolder(directory);
    if (directory == job.directory()) return;
    unlink(marker.c_str());
    rmdir(job.directory().c_str());
  };

  BlockForwardedSignals();
  std::unique_ptr<GpuHost> host = GpuHost::Open(options.server, options.gpu, directory, /*detached=*/false, &error);
  steps.Done("finding the job's files and the GPU server");
  std::unique_ptr<ClientChannel> channel;
  Isolated isolated;
  auto process = std::make_unique<ProcessRestore>(job, directory, mounts);
  const auto begin = [&] { return process->Begin(image->client_dir(), &error); };
  const auto load = [&] {
    channel = RestoreObjects(options, *host, job, *image, log, &steps, &error);
    return channel && WriteGpuServer(directory, host->server(), options.server.empty() ? -1 : options.gpu, &error) &&
           RestoreMemory(options, *image, channel.get(), &steps, &error);
  };
  // Both at once, but for files that are to be cut back: the process needs them so, and they stay as they are if the
  // memory cannot be loaded.
  bool ok = host && (longer.empty() ? begin() && load() : load() && CutBack(longer, &error) && begin());
  ok = ok && process->Finish(&isolated, &error);
  if (ok) steps.Done("restoring the process");
  if (ok && !GiveSession(options, *image, isolated, directory, *host, *channel, &job, &error)) {
    kill(isolated.init, SIGKILL);
    WaitForwarding(isolated.init, true);
    ok = false;
  }
  if (ok) steps.Done("giving it the session");
  claim.Release();
  channel.reset();
  if (!ok) {
    process.reset();
    host.reset();
    remove_folders();
    return Fail(error);
  }
  const CriuFacts facts;
  const int code = FinishJob(kTool, isolated, directory, job, process->TakeTerminal(), std::move(host));
  // What the job has written last is on its way through the terminal.
  if (process->copier() > 0) waitpid(process->copier(), nullptr, 0);
  remove_folders();
  return code;
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Brings a saved job back, on this machine and any GPU server.", kTool);
  app.footer(kExamples);
  app.set_version_flag("--version", VersionLine("cr-restart"));
  app.add_option("DIR", options.image, "the image")->required();
  app.add_option("--server", options.server,
                 "the GPU server: unix:PATH or HOST:PORT (default: $CUDA_REMOTE_SERVER, else one of the job's own)");
  app.add_option("--gpu", options.gpu, "the only GPU that the job gets (ordinal)")->check(CLI::Range(0, 255));
  app.add_option("--job-dir", options.directory, "the job's folder (default: the one that it had)");
  app.add_flag("--cut-back", options.cut_back,
               "cut files that the job went on writing after the checkpoint back to their length then; it writes the "
               "rest again");
  app.add_flag("--trust-owner", options.trust_owner,
               "also take an image that another user owns or may write: he can make the job do what he wants");
  app.add_flag("--times", options.times, "tell how long each step took");
  app.add_flag("--quiet", options.quiet, "print errors only");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitFailed;
  }
  const char* const server = getenv("CUDA_REMOTE_SERVER");
  if (options.server.empty() && server) options.server = server;
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
