// SPDX-License-Identifier: Apache-2.0
// cr-restart: brings a saved job back. See --help.

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/engine/engines.h"
#include "checkpoint/gpu/gpu_host.h"
#include "checkpoint/gpu/gpu_state.h"
#include "checkpoint/gpu/places.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/caller.h"
#include "checkpoint/job/isolate.h"
#include "checkpoint/job/job.h"
#include "checkpoint/job/job_claim.h"
#include "checkpoint/job/network.h"
#include "checkpoint/job/stand_ins.h"
#include "checkpoint/transaction/at_step.h"
#include "checkpoint/transaction/live_job.h"
#include "ckptfmt/image_reader.h"
#include "client/tools/foreground.h"
#include "client/tools/outputs.h"
#include "client/tools/progress.h"
#include "client/tools/steps.h"
#include "client/tools/through_hostd.h"
#include "host/client.h"
#include "proto/cli/wrong_use.h"
#include "proto/folder/this_job.h"
#include "proto/frame/frame.h"
#include "proto/frame/version.h"

namespace cuda_remote::client::tools {

using namespace checkpoint;
namespace {

constexpr char kTool[] = "cr-restart";

// How long a process that answers no more may take to end.
constexpr int kEndMs = 2000;
// How long the processes of a job may take whose cr-run was killed, and how often that is looked at.
constexpr int kKilledMs = 10000, kLookMs = 10;

constexpr char kExamples[] = R"(
Examples:
  cr-restart /data/train.image                        a GPU server of its own, on this machine
  cr-restart /data/train.image --server gpu8:7070
  cr-restart /data/train                              the newest image that cr-checkpoint --keep has put there
  cr-restart /data/train/image-000007                 a certain one of these
  cr-restart /data/train.image --server unix:/run/user/1000/cuda-remote/session.sock --gpu 1
  cr-restart /data/train.image --server gpu8:7070 --map 2-3=gpu9:7070   ranks 2 and 3 on another server than the others
  cr-restart /data/train.image --map 0-1=:0 --map 2-3=:1                two ranks on each of two GPUs of this machine
  cr-restart /data/train --hosts node1,node2          all parts of a job on several hosts, or none (cr-checkpoint --hosts)

Every byte of the image is compared with its checksum before a process of the job runs. The job then runs in the
foreground, as under cr-run: signals go to it, and its output goes where it went before if that was a file (--output
names another one), and to this program's output if it was a pipe or a terminal. Files that the job has open must be
where they were, as long as they were (--cut-back, --cut), and no other job may be writing to them. A restart that fails
leaves the image as it is and can be tried again. The image must belong to root or
to this user, and nobody else may be able to write to it (--trust-owner). Needs CRIU and root; where cr-hostd runs, an
ordinary user restarts images that it has made of her own jobs.

Ranks are those of mpirun, torchrun or srun; without one of these the processes are counted from 0, as cr-inspect shows
them. A process that saw several GPUs needs as many at its place: its GPU 0 is the first of the list. Processes that
share GPU memory need one server.

With --hosts, cr-restart ends when all parts run.

Exit codes: the job's own; 128 + N if signal N ended it; 121 stopped by cr-checkpoint --stop; 125 the restart failed.
--hosts: 0 all parts run; 125 no part does.
)";

int Fail(const std::string& text) {
  Say(kTool, text);
  return kExitFailed;
}

struct Options {
  std::string image, server, directory, hosts;
  std::vector<PlacementRule> rules;
  int gpu = -1;
  bool quiet = false, cut_back = false, times = false, trust_owner = false;
  std::vector<std::string> cut;
  OutputOptions outputs;
};

// As messages call a saved process: "python3 (PID 12)".
std::string NameOf(const ckptfmt::ProcessInfo& process) {
  return process.program + " (PID " + std::to_string(process.pid) + ")";
}

// Opens and verifies the image, and reads what it says of the job, and the log of each of its processes.
std::unique_ptr<ckptfmt::ImageReader> OpenImage(const Options& options, Job* job, std::vector<replay::Log>* logs,
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
  for (const ckptfmt::ProcessInfo& process : info.processes) {
    if (process.wire_version == kWireVersion) continue;
    *error = options.image + " was made by a version with wire version " + std::to_string(process.wire_version) +
             "; this one has " + std::to_string(kWireVersion);
    return nullptr;
  }
  const auto found = info.client_info.find("job");
  std::string ignored;
  if (!EngineOf(info, &ignored) || found == info.client_info.end() || !JobFromJson(found->second, job)) {
    *error = options.image + " has no processes that could be restored (engine " + info.engine + ")";
    return nullptr;
  }
  logs->resize(info.processes.size());
  for (size_t i = 0; i < logs->size(); ++i) {
    const absl::StatusOr<std::string> bytes = image->ReadLog(i);
    if (!bytes.ok() || !replay::Log::Parse(*bytes, &(*logs)[i], error)) {
      *error = options.image + ": the replay log of " + NameOf(info.processes[i]) +
               " cannot be read: " + (bytes.ok() ? *error : std::string(bytes.status().message()));
      return nullptr;
    }
    const std::string calls = NotReplayableIn((*logs)[i]);
    if (calls.empty()) continue;
    *error = options.image + ": " + NameOf(info.processes[i]) +
             " has objects that cannot be made again here; they came from: " + calls;
    return nullptr;
  }
  return image;
}

// A process's way back to its GPU.
struct Session {
  std::unique_ptr<ClientChannel> channel;
  std::string error;  // empty: all went well
};

// Where each process goes.
bool Plan(const Options& options, const ckptfmt::ImageInfo& info, std::vector<Placed>* placed, std::string* error) {
  // What cr-checkpoint has written: "0,1,-1". Older images have none.
  std::vector<PlacedProcess> who;
  const auto found = info.client_info.find("ranks");
  std::istringstream ranks(found == info.client_info.end() ? "" : found->second);
  for (const ckptfmt::ProcessInfo& process : info.processes) {
    std::string rank;
    const bool known = std::getline(ranks, rank, ',') && !rank.empty();
    who.push_back({process.pid, known ? atoi(rank.c_str()) : -1, NameOf(process)});
  }
  // A server of the job's own has the one GPU only, unless processes are mapped to others.
  const bool only = options.gpu >= 0 && (!options.server.empty() || !options.rules.empty());
  const Place otherwise = {options.server, only ? std::vector<int>{options.gpu} : std::vector<int>()};
  std::vector<Place> places;
  if (!PlaceProcesses(options.rules, otherwise, who, &places, error)) return false;
  for (size_t i = 0; i < places.size(); ++i) placed->push_back({who[i].name, places[i], nullptr});
  return true;
}

// The ways to all places, and to the server of processes that begin to use CUDA later, which is returned. Null: failed.
const GpuHost* OpenHosts(const Options& options, GpuHosts* hosts, std::vector<Placed>* placed, std::string* error) {
  const int own = options.rules.empty() ? options.gpu : -1;
  const bool all_elsewhere =
      !placed->empty() && options.server.empty() &&
      std::none_of(placed->begin(), placed->end(), [](const Placed& one) { return one.place.server.empty(); });
  const GpuHost* const first = hosts->Open(all_elsewhere ? placed->front().place.server : options.server, own, error);
  if (!first) return nullptr;
  for (Placed& one : *placed) {
    one.host = hosts->Open(one.place.server, own, error);
    if (!one.host) return nullptr;
  }
  return first;
}

// A GPU session with all objects that the process had; their memory is still to be loaded.
// `scope`, `ownerless`: replay::ShareIn's.
std::unique_ptr<ClientChannel> RestoreObjects(const Placed& placed, const std::optional<Account>& account,
                                              const std::string& scope, const std::vector<std::string>& ownerless,
                                              const std::string& job, const ckptfmt::ProcessInfo& process,
                                              const replay::Log& log, std::string* error) {
  std::unique_ptr<ClientChannel> channel;
  {
    const ActAs user(account);  // whose session it is
    channel = OpenSession(placed.host->socket_path(), process.pid, process.program, job, placed.place.gpus,
                          process.driver_settings, process.address_layout, error);
  }
  if (!channel) return nullptr;
  ckptfmt::ProcessInfo here;
  if (!DescribeServer(channel.get(), &here, error)) return nullptr;
  if (!CheckDevices(log, process.devices, here.devices, ToText(placed.place), error)) return nullptr;
  for (size_t i = 0; i < process.devices.size(); ++i) {
    if (here.devices[i].name == process.devices[i].name) continue;
    Say(kTool, "GPU " + std::to_string(i) + " of " + NameOf(process) + " was a " + process.devices[i].name +
                   "; here it is a " + here.devices[i].name);
  }
  return ReplayLog(log, channel.get(), error, scope, ownerless) ? std::move(channel) : nullptr;
}

// Whether they can go where they are to go, if they were mapped.
bool FitsPlaces(const Options& options, const std::optional<Account>& account, const std::vector<Placed>& placed,
                const ckptfmt::ImageReader& image, const std::vector<replay::Log>& logs, std::string* error) {
  if (options.rules.empty()) return true;
  std::vector<const replay::Log*> all;
  for (const replay::Log& log : logs) all.push_back(&log);
  std::vector<std::vector<ckptfmt::Region>> regions(placed.size());
  for (const ckptfmt::Region& region : image.regions()) regions[region.process].push_back(region);
  const ActAs user(account);  // who asks the servers
  return CheckSharing(placed, all, error) && CheckRoom(placed, regions, error);
}

// The sessions of all processes, at the same time: the objects of one may be shared with another, and wait for it.
bool RestoreSessions(const std::vector<Placed>& placed, const std::optional<Account>& account, const std::string& scope,
                     const ckptfmt::ImageReader& image, const std::vector<replay::Log>& logs,
                     std::vector<Session>* sessions, Steps* steps, std::string* error) {
  const ckptfmt::ImageInfo& info = image.info();
  std::vector<const replay::Log*> all;
  for (const replay::Log& log : logs) all.push_back(&log);
  const std::vector<std::vector<std::string>> ownerless = OwnerlessAt(placed, all);
  std::vector<std::thread> threads;
  sessions->resize(info.processes.size());
  AtStep("open sessions");
  for (size_t i = 0; i < sessions->size(); ++i) {
    threads.emplace_back([&, i] {
      Session& session = (*sessions)[i];
      session.channel =
          RestoreObjects(placed[i], account, scope, ownerless[i], info.job, info.processes[i], logs[i], &session.error);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < sessions->size(); ++i) {
    if ((*sessions)[i].channel) continue;
    *error = (sessions->size() > 1 ? NameOf(info.processes[i]) + ": " : "") + (*sessions)[i].error;
    return false;
  }
  steps->Done("opening sessions with the GPU server, and making the GPU objects again");
  return true;
}

bool RestoreMemory(const Options& options, const ckptfmt::ImageReader& image, const std::vector<Session>& sessions,
                   Steps* steps, std::string* error) {
  Progress progress("loading GPU memory", options.quiet);
  uint64_t before = 0;
  for (size_t i = 0; i < sessions.size(); ++i) {
    const auto go_on = [&](uint64_t done, uint64_t) {
      progress.Update(before + done, image.sizes().region_bytes);
      return !Interrupted();
    };
    AtStep("load GPU memory", i, sessions.size());
    if (!LoadMemory(image, uint32_t(i), sessions[i].channel.get(), go_on, error)) {
      if (sessions.size() > 1) *error = NameOf(image.info().processes[i]) + ": " + *error;
      return false;
    }
    for (const ckptfmt::Region& region : image.regions()) before += region.process == i ? region.bytes : 0;
  }
  steps->Done("comparing and loading GPU memory");
  return true;
}

// Gives the restored processes their GPU sessions and lets them go on, known to the other tools by then. A process that
// has ended by itself meanwhile, as one may whose last call was made before the checkpoint, needs none.
bool GiveSessions(const Options& options, const ckptfmt::ImageReader& image, const Isolated& isolated,
                  const std::string& directory, const std::vector<Placed>& placed, const std::vector<Session>& sessions,
                  Job* job, std::string* error) {
  job->set_server(options.server);
  job->set_gpu(options.gpu);
  job->set_runner_pid(getpid());
  job->set_caller_pid(Caller::Get() ? Caller::Get()->pid() : 0);
  job->set_init_pid(isolated.init);
  job->set_pid_namespace(PidNamespace(isolated.init));
  job->set_pid(isolated.pid);
  job->set_image(Caller::Get() ? Caller::Get()->image() : Absolute(image.dir()));
  job->set_saved_unix_ms(uint64_t(image.info().created_unix_ms));
  job->set_saved_bytes(image.sizes().total_bytes);
  std::vector<std::unique_ptr<agent::AgentClient>> agents;
  for (size_t i = 0; i < sessions.size(); ++i) {
    const ckptfmt::ProcessInfo& process = image.info().processes[i];
    AtStep("give the session", i, sessions.size());
    const auto ended = [&] { return HasEnded(isolated, 0) || !HasProcess(*job, int(process.pid)); };
    agents.push_back(GiveChannel(directory, process.pid, NameOf(process), *sessions[i].channel,
                                 placed[i].host->server(), ended, error));
    if (agents.back()) continue;
    if (HasEnded(isolated, kEndMs)) {
      Say(kTool, "the job ended before it had its GPU session again");
      return true;
    }
    if (!HasProcess(*job, int(process.pid))) continue;
    *error = "the restored process " + NameOf(process) + " did not take its GPU session: " + *error;
    return false;
  }
  std::string problem;
  AtStep("unlock");
  if (!WriteJob(directory, *job, &problem)) Say(kTool, problem + "; the other tools will not find the job");
  for (size_t i = 0; i < sessions.size(); ++i) {
    const ActAs user(AccountOf(*job));
    TellSaved(placed[i].host->server(), sessions[i].channel->welcome().session, job->saved_unix_ms(),
              job->saved_bytes());
  }
  for (const auto& agent : agents) {
    if (agent) agent->Unlock(&problem);
  }
  return true;
}

// Where a restarted job of an ordinary user's own is, so that jobs of several users have names of their own.
std::string FolderOfUsers(const Job& job, const Account& account) {
  const std::string name = job.directory().substr(job.directory().rfind('/') + 1);
  return JobsFolder() + "/" + name + "@" + (account.name.empty() ? std::to_string(account.user) : account.name);
}

// The processes of a job whose cr-run or cr-restart was killed end, too, but not in the same instant.
bool GoesOn(const Job& job) {
  for (int waited = 0; JobIsAlive(job) && !IsRunning(int(job.runner_pid())) && waited < kKilledMs; waited += kLookMs) {
    usleep(kLookMs * 1000);
  }
  return JobIsAlive(job);
}

int Run(const Options& options) {
  std::string error;
  Job job;
  std::vector<replay::Log> logs;
  std::vector<Mount> mounts;
  Steps steps(kTool, options.times);
  std::unique_ptr<ckptfmt::ImageReader> image = OpenImage(options, &job, &logs, &error);
  steps.Done("comparing the image but for GPU memory");
  if (!image) return Fail(error);
  std::vector<Placed> placed;
  if (!Plan(options, image->info(), &placed, &error)) return Fail(error);
  if (geteuid() != 0) return Fail("restoring a process needs root, or cr-hostd, which does not run here");

  std::string facts;
  const std::unique_ptr<SnapshotEngine> engine = EngineOf(image->info(), &facts);
  if (!engine->CheckUsable(&error)) return Fail(error);
  const Caller* const caller = Caller::Get();
  const bool as_one = caller && caller->waits();  // with the parts on other hosts
  if (!caller) engine->KeepLogs(Absolute(options.image));
  const std::unique_ptr<SavedProcesses> processes = engine->Open(job, facts, image->client_dir(), &error);
  RestoreOptions restore;
  restore.cut_back = options.cut_back;
  for (const std::string& path : options.cut) restore.cut.push_back(Absolute(path));
  restore.needs = &image->info().needs;
  const std::optional<Account> account = AccountOf(job);
  if (account && !CheckAccount(*account, &error)) return Fail(error);
  if (caller && !caller->CheckSaved(account, &error)) return Fail(error);
  if (job.has_network() && !CheckNetwork(job.mutable_network(), caller ? &caller->addresses() : nullptr, &error))
    return Fail(error);
  Outputs outputs;
  const auto open_outputs = [&] {
    const ActAs user(account);
    const mode_t before = caller ? umask(caller->umask()) : 0;
    const bool opened = outputs.Open(options.outputs, &error);
    if (caller) umask(before);
    return opened;
  };
  if (!open_outputs()) return Fail(error);
  for (const int fd : {1, 2}) {
    if (!outputs.path(fd).empty()) restore.outputs.push_back({fd, outputs.path(fd), outputs.size(fd)});
  }
  restore.cancelled = Interrupted;
  restore.say = [](const std::string& text) { Say(kTool, text); };
  if (!processes || !processes->Check(restore, &error)) return Fail(error);
  // What it had by --output and is not exchanged stays its own.
  const std::vector<std::string> exchanged = processes->Exchanged(), opened = outputs.all();
  std::vector<std::string> own;
  for (const std::string& path : job.outputs()) {
    if (std::find(exchanged.begin(), exchanged.end(), path) == exchanged.end()) own.push_back(path);
  }
  const auto lock_outputs = [&] {
    const ActAs user(account);
    return outputs.Lock(own, &error);
  };
  if (!lock_outputs()) return Fail(error);
  own.insert(own.end(), opened.begin(), opened.end());
  job.clear_outputs();
  for (const std::string& path : own) job.add_outputs(path);
  // The folder of a user's own job is his. The restarted one has one of root's, which it sees there.
  const std::optional<Account> shown_to = job.users_own() ? account : std::nullopt;
  const std::string usual = shown_to ? FolderOfUsers(job, *shown_to) : job.directory();
  std::string directory = options.directory.empty() ? usual : Absolute(options.directory);
  Job running;
  std::string ignored, library_folder;
  const auto is_running = [&](const std::string& folder, const std::optional<Account>& whose) {
    const ActAs user(whose);
    return ReadJob(folder, &running, &ignored) && GoesOn(running);
  };
  std::string busy;
  if (is_running(directory, std::nullopt)) busy = directory;
  if (shown_to && options.directory.empty() && is_running(job.directory(), shown_to)) busy = job.directory();
  if (!busy.empty()) {
    return Fail("there is a running job in " + busy + " (PID " + std::to_string(running.pid()) +
                "): end it first, or give the restarted one another folder with --job-dir");
  }
  if (!ClaimJobFolder(directory, &error)) return Fail(error + " (--job-dir)");
  if (!LinkLibrary(directory, &library_folder, &error)) return Fail(error);
  const auto make_shown = [&] {
    const ActAs user(shown_to);
    return MakeShownFolder(job.directory(), &error);
  };
  if (directory != job.directory() && !make_shown()) return Fail(error);
  if (account && !OpenToUser(directory, job.directory(), *account, &error)) return Fail(error);
  // Until the job goes on. What killed an earlier tool has ended the job that was here.
  JobClaim claim;
  if (!claim.Take(directory, kTool, Interrupted, &error)) return Fail(error);
  if (!WriteThisJob(directory, job.directory(), image->info().job, &error)) return Fail(error);
  if (!PlanStandIns(directory, &job, &mounts, &error))
    Say(kTool, error + "; programs with an environment of their own may use this machine's own GPU");
  unlink((directory + "/stopped").c_str());
  // The folder that the job knows is only where the other one is shown: it must stay as long as this job runs.
  const std::string marker = job.directory() + "/.used-by-" + std::to_string(getpid());
  const auto mark = [&] {
    const ActAs user(shown_to);
    if (directory != job.directory())
      close(open(marker.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  };
  mark();
  const auto remove_folders = [&] {
    RemoveJobFolder(directory);
    const ActAs user(shown_to);
    if (directory == job.directory()) return;
    unlink(marker.c_str());
    rmdir(job.directory().c_str());
  };

  std::unique_ptr<NetworkNamespace> network;
  if (job.has_network()) {
    // A job that moves still has the address at the other host, which keeps it silent.
    network = NetworkNamespace::Make(job.network(), /*ask=*/!caller || !caller->holds() || as_one, &error);
    if (!network) {
      remove_folders();
      return Fail(error);
    }
  }
  BlockForwardedSignals();
  auto hosts = std::make_unique<GpuHosts>(SocketFolder(directory), /*detached=*/false, account);
  const GpuHost* const host = OpenHosts(options, hosts.get(), &placed, &error);
  steps.Done("finding the job's files and the GPU server");
  std::vector<Session> sessions;
  const std::string scope = NewSharingScope();
  Isolated isolated;
  std::unique_ptr<ProcessRestore> process;
  const auto begin = [&] {
    outputs.Show();
    process = processes->Begin(directory, mounts, network ? network->fd() : -1, &error);
    outputs.Hide();
    return process != nullptr;
  };
  const auto load = [&] {
    const int only = options.server.empty() && options.rules.empty() ? -1 : options.gpu;
    return RestoreSessions(placed, account, scope, *image, logs, &sessions, &steps, &error) &&
           WriteJobServer(directory, host->server(), only, scope, &error) &&
           RestoreMemory(options, *image, sessions, &steps, &error);
  };
  // Both at once, but for files that are to be cut back: the process needs them so, and they stay as they are if the
  // memory cannot be loaded.
  bool ok = host && FitsPlaces(options, account, placed, *image, logs, &error) &&
            (processes->ChangesFiles() ? load() && begin() : begin() && load());
  AtStep("restore processes");
  // Of a job that moves: until it runs here, it is the other host's. Of a part of a job on several hosts: all run, or
  // none. Of one with an address of its own: a message for a connection that is not there yet would be answered with
  // its end.
  const bool holds = caller && caller->holds();
  if (ok && (holds || network)) {
    error.clear();
    const bool held = process->AwaitHeld(&error);
    ok = held ? (!holds || caller->Announce(kImageRestored, &error)) && (!network || network->Connect(&error))
              : error.empty();
  }
  ok = ok && process->Finish(&isolated, &error);
  if (ok) steps.Done("restoring the process");
  if (ok && !(GiveSessions(options, *image, isolated, directory, placed, sessions, &job, &error) &&
              (!as_one || caller->Announce(kImageUsed, &error)))) {
    // The others at its connections do not hear of it, and the restart can be tried again.
    if (network) network->Silence();
    kill(isolated.init, SIGKILL);
    WaitForwarding(isolated.init, true);
    ok = false;
  }
  if (ok) steps.Done("giving it the session");
  claim.Release();
  sessions.clear();
  if (!ok) {
    if (network) network->Silence();
    process.reset();
    hosts.reset();
    remove_folders();
    return Fail(error);
  }
  network.reset();
  // It may be removed from now on.
  image.reset();
  if (caller && !as_one && !caller->Announce(kImageUsed, &error)) Say(kTool, error);
  const std::shared_ptr<void> upkeep = engine->BeginUpkeep();
  const int code = FinishJob(kTool, isolated, directory, job, process->TakeTerminal(), std::move(hosts), engine.get());
  // What the job has written last is on its way through the terminal.
  if (process->copier() > 0) waitpid(process->copier(), nullptr, 0);
  remove_folders();
  return code;
}

int Main(int argc, char** argv) {
  Options options;
  int caller = -1;
  std::vector<std::string> map;
  CLI::App app("Brings a saved job back, on this machine and any GPU server.", kTool);
  app.failure_message(WrongUse);
  app.footer(kExamples);
  app.set_version_flag("--version", VersionLine("cr-restart"));
  app.add_option("DIR", options.image, "the image, or a folder of images, of which the newest is taken")->required();
  app.add_option("--server", options.server,
                 "the GPU server: unix:PATH or HOST:PORT (default: $CUDA_REMOTE_SERVER, else one of the job's own)");
  app.add_option("--gpu", options.gpu, "the only GPU that the job gets (ordinal)")->check(CLI::Range(0, 255));
  app.add_option("--map", map,
                 "RANK=SERVER[:GPU,...] or RANK=:GPU,...: where a process goes instead; RANK is a number, N-M or "
                 "pid:N. May be given several times")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--job-dir", options.directory,
                 "the job's folder (default: the one that it had); where cr-hostd does the restart, a name for it");
  AddOutputOptions(&app, &options.outputs);
  app.add_flag(
      "--cut-back", options.cut_back,
      "cut the files that the job had by --output and --error back to their length at the checkpoint; it writes "
      "the rest again");
  app.add_option("--cut", options.cut,
                 "also cut this file back, which the job has open for writing, whoever has written to it since");
  app.add_flag("--trust-owner", options.trust_owner,
               "also take an image that another user owns or may write: he can make the job do what he wants");
  app.add_flag("--times", options.times, "tell how long each step took");
  app.add_option(
      "--hosts", options.hosts,
      "HOST,HOST,...: restart the parts of a job on several hosts there, DIR/member-N on the host N, or those "
      "of the newest set in DIR (cr-checkpoint --hosts --keep), by their cr-hostds: all run, or none. "
      "HOST/NAME: under that name. --output and --error are then for streams that were pipes or terminals "
      "(default: /dev/null), with %n for N");
  app.add_flag("--quiet", options.quiet, "print errors only");
  app.add_option("--caller", caller, "used by cr-hostd")->group("");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitFailed;
  }
  const char* const server = getenv("CUDA_REMOTE_SERVER");
  if (options.server.empty() && server) options.server = server;
  std::string error;
  if (!ParsePlacement(map, &options.rules, &error)) return Fail(error);
  if (caller >= 0 && !Caller::Take(caller, &error)) return Fail(error);
  if (!options.hosts.empty()) {
    if (!options.directory.empty() || options.times) return Fail("--hosts excludes --job-dir and --times");
    host::Request request = host::RequestOf(app, "regroup");
    for (host::Option& option : *request.mutable_options()) {
      if (option.name() == "output" || option.name() == "error" || option.name() == "cut") {
        option.set_value(Absolute(option.value()));
      }
    }
    if (app.count("--server") == 0 && server) host::AddOption("server", server, &request);
    request.set_image(Absolute(options.image));
    return ThroughHostd(kTool, std::move(request), kExitFailed);
  }
  if (geteuid() != 0) {
    if (const auto hostd = host::Hostd::Connect(&error)) {
      host::Request request = host::RequestOf(app, "restart");
      if (app.count("--server") == 0 && server) host::AddOption("server", server, &request);
      request.set_image(Absolute(options.image));
      if (!options.directory.empty() && !NameOfHostdFolder(options.directory, request.mutable_job())) {
        return Fail("--job-dir " + options.directory +
                    ": cr-hostd makes the folders of jobs itself; give the name of one, "
                    "without slashes");
      }
      return hostd->Run(kTool, std::move(request), kExitFailed);
    }
    if (!error.empty()) return Fail(error);
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
