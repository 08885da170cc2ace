// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/restart_job.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>

#include "checkpoint/gpu/gpu_state.h"
#include "checkpoint/gpu/parallel.h"
#include "checkpoint/job/cuda_processes.h"
#include "checkpoint/job/isolation/stand_ins.h"
#include "checkpoint/transaction/at_step.h"
#include "proto/base/status_macros.h"
#include "proto/errors/absl_status.h"
#include "proto/errors/annotate.h"
#include "proto/folder/this_job.h"
#include "proto/frame/frame.h"

namespace cuda_remote::checkpoint {
namespace {

// How long a process that answers no more may take to end.
constexpr int kEndMs = 2000;
// How long the processes of a job may take whose cr-run was killed, and how often that is looked at.
constexpr int kKilledMs = 10000, kLookMs = 10;

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

// Whether the job in `folder`, which is `whose`, runs.
bool HasRunningJob(const std::string& folder, const std::optional<Account>& whose, Job* running) {
  const ActAs user(whose);
  absl::StatusOr<Job> read = ReadJob(folder);
  if (!read.ok()) return false;
  *running = *std::move(read);
  return GoesOn(*running);
}

}  // namespace

RestartJob::~RestartJob() {
  if (!done_) Undo();
}

absl::Status RestartJob::Run() {
  const absl::Status status = TakeSteps();
  done_ = status.ok();
  if (!done_) Undo();
  return status;
}

absl::Status RestartJob::TakeSteps() {
  CR_RETURN_IF_ERROR(ReadImage());
  CR_RETURN_IF_ERROR(sessions_.Plan(saved_));
  CR_RETURN_IF_ERROR(OpenEngine());
  CR_RETURN_IF_ERROR(CheckJob());
  CR_RETURN_IF_ERROR(CheckFiles());
  CR_RETURN_IF_ERROR(LockOutputs());
  CR_RETURN_IF_ERROR(ChooseFolder());
  CR_RETURN_IF_ERROR(MakeFolder());
  CR_RETURN_IF_ERROR(MakeNetwork());
  CR_RETURN_IF_ERROR(Restore());
  return GoOn();
}

// Opens and verifies the image, and reads what it says of the job.
absl::Status RestartJob::ReadImage() {
  using Owner = ckptfmt::ImageReader::Owner;
  auto opened = ckptfmt::ImageReader::Open(options_.image, options_.trust_owner ? Owner::kAnyone : Owner::kTrusted);
  if (absl::IsPermissionDenied(opened.status()) && !options_.trust_owner) {
    return AnnotateBehind(opened.status(), " (--trust-owner)");
  }
  CR_ASSIGN_OR_RETURN(saved_.image, std::move(opened));
  {
    const auto progress = report_.Begin("verifying the image");
    // The chunks of memory are compared as they are read, and the process only runs after all of them.
    CR_RETURN_IF_ERROR(saved_.image->Verify([&](uint64_t done, uint64_t total) { progress->Update(done, total); },
                                            ckptfmt::ImageReader::Files::kAllButMemory));
  }
  const ckptfmt::ImageInfo& info = saved_.image->info();
  for (const ckptfmt::ProcessInfo& process : info.processes) {
    if (process.wire_version == kWireVersion) continue;
    return absl::UnimplementedError(options_.image + " was made by a version with wire version " +
                                    std::to_string(process.wire_version) + "; this one has " +
                                    std::to_string(kWireVersion) + "; use the cuda-remote that made the image");
  }
  const auto found = info.client_info.find("job");
  engine_ = find_engine_(info, &facts_);
  if (!engine_ || found == info.client_info.end() || !JobFromJson(found->second, &saved_.job)) {
    return absl::FailedPreconditionError(options_.image + " has no processes that could be restored (engine " +
                                         info.engine + ")");
  }
  // What cr-checkpoint has written: "140731,140732".
  if (const auto marks = info.client_info.find("programs"); marks != info.client_info.end()) {
    std::istringstream list(marks->second);
    for (std::string mark; std::getline(list, mark, ',');) marks_.push_back(strtoull(mark.c_str(), nullptr, 10));
  }
  marks_.resize(info.processes.size());
  CR_RETURN_IF_ERROR(ReadLogs());
  report_.Done("verifying the image, except GPU memory");
  return absl::OkStatus();
}

absl::Status RestartJob::ReadLogs() {
  const auto& processes = saved_.image->info().processes;
  saved_.logs.resize(processes.size());
  for (size_t i = 0; i < processes.size(); ++i) {
    const absl::StatusOr<std::string> bytes = saved_.image->ReadLog(i);
    auto log = bytes.ok() ? ToAbsl(replay::Log::Parse(*bytes)) : bytes.status();
    if (!log.ok()) {
      return Annotate(options_.image + ": the replay log of " + NameOf(processes[i]) + " cannot be read: ",
                      log.status());
    }
    saved_.logs[i] = *std::move(log);
    const std::string calls = NotReplayableIn(saved_.logs[i]);
    if (calls.empty()) continue;
    return absl::UnimplementedError(
        options_.image + ": " + NameOf(processes[i]) +
        " has GPU objects that cannot be recreated on another server; they were created by: " + calls +
        ". See docs/context-state.md");
  }
  return absl::OkStatus();
}

absl::Status RestartJob::OpenEngine() {
  if (engine_->Capabilities().needs_root && geteuid() != 0) {
    return absl::PermissionDeniedError("restoring a process needs root, or cr-hostd, which does not run here");
  }
  CR_RETURN_IF_ERROR(engine_->CheckUsable());
  if (!caller_) engine_->KeepLogs(Absolute(options_.image));
  CR_ASSIGN_OR_RETURN(processes_, engine_->Open(saved_.job, facts_, saved_.image->client_dir()));
  return absl::OkStatus();
}

absl::Status RestartJob::CheckJob() {
  account_ = AccountOf(saved_.job);
  if (account_) CR_RETURN_IF_ERROR(CheckAccount(*account_));
  if (caller_) CR_RETURN_IF_ERROR(caller_->CheckSaved(account_));
  if (!saved_.job.has_network()) return absl::OkStatus();
  return CheckNetwork(saved_.job.mutable_network(), caller_ ? &caller_->addresses() : nullptr);
}

// Opens the files for the job's output, and compares all that the processes need with what is here.
absl::Status RestartJob::CheckFiles() {
  {
    const ActAs user(account_);
    const mode_t before = caller_ ? umask(caller_->umask()) : 0;
    const absl::Status opened = outputs_.Open(options_.outputs);
    if (caller_) umask(before);
    CR_RETURN_IF_ERROR(opened);
  }
  RestoreOptions restore;
  restore.cut_back = options_.cut_back;
  for (const std::string& path : options_.cut) restore.cut.push_back(Absolute(path));
  restore.needs = &saved_.image->info().needs;
  for (const int fd : {1, 2}) {
    if (!outputs_.path(fd).empty()) restore.outputs.push_back({fd, outputs_.path(fd), outputs_.size(fd)});
  }
  restore.cancelled = [this] { return report_.Cancelled(); };
  restore.say = [this](const std::string& text) { report_.Say(text); };
  return processes_->Check(restore);
}

// What the job had by --output and is not exchanged stays its own.
absl::Status RestartJob::LockOutputs() {
  Job& job = saved_.job;
  const std::vector<std::string> exchanged = processes_->Exchanged(), opened = outputs_.all();
  std::vector<std::string> own;
  for (const std::string& path : job.outputs()) {
    if (std::find(exchanged.begin(), exchanged.end(), path) == exchanged.end()) own.push_back(path);
  }
  {
    const ActAs user(account_);
    CR_RETURN_IF_ERROR(outputs_.Lock(own));
  }
  own.insert(own.end(), opened.begin(), opened.end());
  job.clear_outputs();
  for (const std::string& path : own) job.add_outputs(path);
  return absl::OkStatus();
}

absl::Status RestartJob::ChooseFolder() {
  const Job& job = saved_.job;
  // The folder of a user's own job is his. The restarted one has one of root's, which it sees there.
  if (job.users_own()) shown_to_ = account_;
  const std::string usual = shown_to_ ? FolderOfUsers(job, *shown_to_) : job.directory();
  directory_ = options_.directory.empty() ? usual : Absolute(options_.directory);
  Job running;
  std::string busy;
  if (HasRunningJob(directory_, std::nullopt, &running)) busy = directory_;
  if (shown_to_ && options_.directory.empty() && HasRunningJob(job.directory(), shown_to_, &running)) {
    busy = job.directory();
  }
  if (busy.empty()) return absl::OkStatus();
  return absl::AlreadyExistsError("there is a running job in " + busy + " (PID " + std::to_string(running.pid()) +
                                  "): end it first, or give the restarted one another folder with --job-dir");
}

absl::Status RestartJob::MakeFolder() {
  Job& job = saved_.job;
  CR_RETURN_IF_ERROR(AnnotateBehind(ClaimJobFolder(directory_), " (--job-dir)"));
  CR_RETURN_IF_ERROR(LinkLibrary(directory_).status());
  if (directory_ != job.directory()) {
    const ActAs user(shown_to_);
    CR_RETURN_IF_ERROR(MakeShownFolder(job.directory()));
  }
  if (account_) CR_RETURN_IF_ERROR(OpenToUser(directory_, job.directory(), *account_));
  // What killed an earlier tool has ended the job that was here.
  const auto cancelled = [this] { return report_.Cancelled(); };
  CR_RETURN_IF_ERROR(claim_.Take(directory_, report_.Tool(), cancelled));
  has_folder_ = true;
  CR_RETURN_IF_ERROR(WriteThisJob(directory_, job.directory(), saved_.image->info().job));
  const absl::Status planned = PlanStandIns(directory_, &job, &mounts_);
  if (!planned.ok()) {
    report_.Say(std::string(planned.message()) +
                "; programs with an environment of their own may use this machine's own GPU");
  }
  unlink((directory_ + "/stopped").c_str());
  MarkFolder();
  return absl::OkStatus();
}

// The folder that the job knows is only where the other one is shown: it must stay as long as this job runs.
void RestartJob::MarkFolder() {
  if (directory_ == saved_.job.directory()) return;
  const ActAs user(shown_to_);
  marker_ = saved_.job.directory() + "/.used-by-" + std::to_string(getpid());
  close(open(marker_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
}

void RestartJob::RemoveFolders() {
  if (!std::exchange(has_folder_, false)) return;
  RemoveJobFolder(directory_);
  if (marker_.empty()) return;
  const ActAs user(shown_to_);
  unlink(marker_.c_str());
  rmdir(saved_.job.directory().c_str());
}

absl::Status RestartJob::MakeNetwork() {
  if (!saved_.job.has_network()) return absl::OkStatus();
  // A job that moves still has the address at the other host, which keeps it silent.
  const bool ask = !caller_ || !caller_->holds() || is_part();
  CR_ASSIGN_OR_RETURN(network_, NetworkNamespace::Make(saved_.job.network(), ask));
  return absl::OkStatus();
}

absl::Status RestartJob::Restore() {
  BlockForwardedSignals();
  CR_RETURN_IF_ERROR(sessions_.OpenHosts(SocketFolder(directory_), account_));
  report_.Done("finding the job's files and the GPU server");
  CR_RETURN_IF_ERROR(sessions_.CheckPlaces());
  // Both at once, but for files that are to be cut back: the process needs them so, and they stay as they are if the
  // memory cannot be loaded.
  const bool late = processes_->ChangesFiles();
  if (!late) CR_RETURN_IF_ERROR(BeginProcesses());
  CR_RETURN_IF_ERROR(LoadGpus());
  if (late) CR_RETURN_IF_ERROR(BeginProcesses());
  return FinishProcesses();
}

absl::Status RestartJob::BeginProcesses() {
  outputs_.Show();
  auto begun = processes_->Begin(directory_, mounts_, network_ ? network_->fd() : -1);
  outputs_.Hide();
  CR_ASSIGN_OR_RETURN(restore_, std::move(begun));
  return absl::OkStatus();
}

absl::Status RestartJob::LoadGpus() {
  const RestartPlaces& places = options_.places;
  const int only = places.server.empty() && places.rules.empty() ? -1 : places.gpu;
  const std::string scope = NewSharingScope();
  CR_RETURN_IF_ERROR(OpenSessions(scope));
  CR_RETURN_IF_ERROR(WriteJobServer(directory_, sessions_.server(), only, scope));
  return LoadMemory();
}

absl::Status RestartJob::Of(size_t process, const absl::Status& status) const {
  const auto& processes = saved_.image->info().processes;
  return AnnotateOneOf(processes.size(), NameOf(processes[process]), status);
}

absl::Status RestartJob::OpenSessions(const std::string& scope) {
  const size_t count = saved_.logs.size();
  AtStep("open sessions");
  std::vector<absl::Status> results(count);
  CR_RETURN_IF_ERROR(AllAtOnce(count, [&](size_t i) { results[i] = sessions_.Open(i, scope); }));
  for (size_t i = 0; i < count; ++i) CR_RETURN_IF_ERROR(Of(i, results[i]));
  report_.Done("opening sessions with the GPU server, and recreating the GPU objects");
  return absl::OkStatus();
}

absl::Status RestartJob::LoadMemory() {
  const ckptfmt::ImageReader& image = *saved_.image;
  const size_t count = saved_.logs.size();
  {
    const auto progress = report_.Begin("loading GPU memory");
    uint64_t before = 0;
    for (size_t i = 0; i < count; ++i) {
      const auto go_on = [&](uint64_t done, uint64_t) {
        progress->Update(before + done, image.sizes().region_bytes);
        return !report_.Cancelled();
      };
      AtStep("load GPU memory", i, count);
      CR_RETURN_IF_ERROR(Of(i, sessions_.LoadMemory(i, go_on)));
      for (const ckptfmt::Region& region : image.regions()) before += region.process == i ? region.bytes : 0;
    }
  }
  report_.Done("comparing and loading GPU memory");
  return absl::OkStatus();
}

absl::Status RestartJob::FinishProcesses() {
  AtStep("restore processes");
  // Of a job that moves: until it runs here, it is the other host's. Of a part of a job on several hosts: all run, or
  // none. Of one with an address of its own: a message for a connection that is not there yet would be answered with
  // its end.
  const bool holds = caller_ && caller_->holds();
  if (holds || network_) {
    const absl::Status held = restore_->AwaitHeld();
    if (held.ok()) {
      if (holds) CR_RETURN_IF_ERROR(caller_->gate()->Pass(IMAGE_RESTORED).status());
      if (network_) CR_RETURN_IF_ERROR(network_->Connect());
    } else if (!held.message().empty()) {
      return held;
    }
  }
  CR_ASSIGN_OR_RETURN(isolated_, restore_->Finish());
  restored_ = true;
  report_.Done("restoring the process");
  return absl::OkStatus();
}

absl::Status RestartJob::GoOn() {
  DescribeJob();
  CR_ASSIGN_OR_RETURN(const bool ended, GiveSessions());
  if (ended) {
    report_.Say("the job ended before it had its GPU session again");
  } else {
    const Job& job = saved_.job;
    AtStep("unlock");
    const absl::Status written = WriteJob(directory_, job);
    if (!written.ok()) report_.Say(std::string(written.message()) + "; the other tools will not find the job");
    for (size_t i = 0; i < saved_.logs.size(); ++i) sessions_.NoteSaved(i, job.saved_unix_ms(), job.saved_bytes());
    sessions_.Unlock();
  }
  if (is_part()) CR_RETURN_IF_ERROR(caller_->gate()->Pass(IMAGE_USED).status());
  report_.Done("giving it the session");
  claim_.Release();
  sessions_.LetGo();
  // It may be removed from now on.
  saved_.image.reset();
  if (caller_ && !is_part()) {
    const auto passed = caller_->gate()->Pass(IMAGE_USED);
    if (!passed.ok()) report_.Say(std::string(passed.status().message()));
  }
  upkeep_ = engine_->BeginUpkeep();
  return absl::OkStatus();
}

// What the other tools are to know of the restored job.
void RestartJob::DescribeJob() {
  Job& job = saved_.job;
  job.set_server(options_.places.server);
  job.set_gpu(options_.places.gpu);
  job.set_runner_pid(getpid());
  job.set_caller_pid(caller_ ? caller_->pid() : 0);
  job.set_init_pid(isolated_.init);
  job.set_pid_namespace(PidNamespace(isolated_.init));
  job.set_pid(isolated_.pid);
  job.set_image(caller_ ? caller_->image() : Absolute(saved_.image->dir()));
  // A job that comes from another host leaves no image behind: its last one is the one that it had there.
  if (job.image().rfind('/', 0) != 0) return;
  job.set_saved_unix_ms(uint64_t(saved_.image->info().created_unix_ms));
  job.set_saved_bytes(saved_.image->sizes().total_bytes);
  job.set_saved_image(job.image());
}

// Gives the restored processes their GPU sessions. A process that has ended by itself meanwhile, as one may whose last
// call was made before the checkpoint, or that executes another program, needs none. Whether all of the job has ended.
absl::StatusOr<bool> RestartJob::GiveSessions() {
  const auto& processes = saved_.image->info().processes;
  for (size_t i = 0; i < processes.size(); ++i) {
    AtStep("give the session", i, processes.size());
    const int pid = int(processes[i].pid);
    const auto goes_on = [&] { return HasProcess(saved_.job, pid, marks_[i]); };
    const auto has_ended = [&] { return HasEnded(isolated_, 0) || !goes_on(); };
    // Another program, which has no session, or one of its own: it may have been there since the checkpoint.
    if (HasProcess(saved_.job, pid) && !goes_on()) continue;
    const absl::Status given = sessions_.Give(i, directory_, has_ended);
    if (given.ok()) continue;
    if (HasEnded(isolated_, kEndMs)) return true;
    if (!goes_on()) continue;
    return Annotate("the restored process " + NameOf(processes[i]) + " did not take its GPU session: ", given);
  }
  return false;
}

void RestartJob::Undo() {
  // The others at its connections do not hear of it, and the restart can be tried again.
  if (network_) network_->Silence();
  if (std::exchange(restored_, false)) {
    kill(isolated_.init, SIGKILL);
    WaitForwarding(isolated_.init, true);
  }
  restore_.reset();
  claim_.Release();
  sessions_.LetGo();
  sessions_.TakeHosts().reset();
  RemoveFolders();
  network_.reset();
}

void RestartJob::Clean(bool by_itself) {
  if (network_) network_->Leave(by_itself);
  // What the job has written last is on its way through the terminal.
  if (restore_->copier() > 0) waitpid(restore_->copier(), nullptr, 0);
  RemoveFolders();
}

}  // namespace cuda_remote::checkpoint
