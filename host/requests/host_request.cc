// SPDX-License-Identifier: Apache-2.0
#include "host/requests/host_request.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <thread>
#include <utility>

#include "checkpoint/engine/engines.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/forwarded_signals.h"
#include "checkpoint/job/hostd_places.h"
#include "checkpoint/job/isolation/network.h"
#include "checkpoint/job/job.h"
#include "host/exchange.h"
#include "host/move_source.h"
#include "host/move_state.h"
#include "host/wire.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/base/text.h"
#include "proto/base/unique_fd.h"
#include "proto/codec/text.h"
#include "proto/errors/absl_status.h"
#include "proto/logging/log.h"

namespace cuda_remote::host {
namespace {

constexpr int kLookMs = 500;
// What root's tools get of cr-hostd's own environment, and what of it they must not get.
constexpr const char* kNotForTools[] = {"CUDA_REMOTE_SERVER", "CUDA_REMOTE_JOB_DIR", "CUDA_REMOTE_JOB",
                                        "CUDA_REMOTE_GPU", "XDG_RUNTIME_DIR"};

absl::Status MakeFolder(const std::string& path) {
  struct stat facts;
  if ((mkdir(path.c_str(), 0755) == 0 || errno == EEXIST) && lstat(path.c_str(), &facts) == 0 &&
      S_ISDIR(facts.st_mode) && facts.st_uid == 0 && (facts.st_mode & 022) == 0 && chmod(path.c_str(), 0755) == 0) {
    return absl::OkStatus();
  }
  return ErrnoStatus("cannot make the folder " + path);
}

// Gives a user's folder a file system of its own, unless it has one: /run is in memory, the whole system needs it, and
// the user's processes may write in the folders of their jobs. As much as logind gives for a user's /run/user/UID.
absl::Status LimitFolder(const std::string& path) {
  const std::string above = path.substr(0, path.rfind('/'));
  struct statfs system;
  if (statfs(above.c_str(), &system) != 0 || system.f_type != TMPFS_MAGIC) return absl::OkStatus();
  // Requests of this user that come at the same time.
  const UniqueFd lock(open((above + "/.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  struct stat folder, parent;
  if (!lock.ok() || flock(lock.get(), LOCK_EX) != 0 || stat(path.c_str(), &folder) != 0 ||
      stat(above.c_str(), &parent) != 0) {
    return ErrnoStatus("cannot look at the folder " + path);
  }
  std::error_code ignored;
  // What is there belongs to jobs of an older cr-hostd, which would not find it any more.
  if (folder.st_dev != parent.st_dev || !std::filesystem::is_empty(path, ignored)) return absl::OkStatus();
  if (mount("cuda-remote", path.c_str(), "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=10%,nr_inodes=100000") == 0) {
    return absl::OkStatus();
  }
  return ErrnoStatus("cannot limit the room of the folder " + path);
}

}  // namespace

std::string ProgramOf(const Tool& tool) { return tool.program ? tool.program : std::string("cr-") + tool.name; }

std::string LogLine(const checkpoint::Account& account, const std::string& job, const std::string& text) {
  return NameOf(account) + (job.empty() ? "" : ", job " + Printable(job)) + ": " + Printable(text);
}

absl::StatusOr<std::unique_ptr<ckptfmt::ImageReader>> ReadFacts(const std::string& image,
                                                                checkpoint::SavedSummary* saved) {
  using ckptfmt::ImageReader;
  CR_ASSIGN_OR_RETURN(std::unique_ptr<ImageReader> reader,
                      ImageReader::Open(image, ImageReader::Owner::kTrusted, ImageReader::Parts::kFacts));
  std::string facts;
  const auto engine = checkpoint::EngineOf(reader->info(), &facts);
  if (!engine) return absl::DataLossError("the image does not describe the job's processes");
  CR_ASSIGN_OR_RETURN(*saved, engine->Summarize(facts));
  return reader;
}

HostRequest::HostRequest(Asked asked)
    : socket_(asked.socket),
      settings_(asked.settings),
      key_(asked.key),
      tool_(asked.tool),
      peer_(std::move(asked.peer)),
      request_(std::move(asked.request)),
      fds_(std::move(asked.fds)),
      image_(request_.image()) {}

HostRequest::~HostRequest() { RemoveSpool(); }

bool HostRequest::Serve() {
  Tell(Reply::STARTED, 0);
  const int code = Follow();
  Tell(Reply::ENDED, code);
  return tool_->runs_job ? code != kExitNotRestarted : code == 0;
}

void HostRequest::RemoveSpool() {
  if (!spool_.empty()) RemoveOwnFolder(spool_);
  spool_.clear();
}

void HostRequest::Log(const std::string& text) const {
  logging::Info("{}", LogLine(peer_.account, request_.job(), text));
}

void HostRequest::LogRefused(const std::string& why) const {
  logging::Warn("{}", LogLine(peer_.account, request_.job(), "refused: " + why));
}

void HostRequest::Print(int output, const std::string& line) const {
  const std::string text = line + "\n";
  const ssize_t ignored = write(output, text.data(), text.size());
  static_cast<void>(ignored);
}

void HostRequest::Tell(Reply::Kind kind, int value, const std::string& text) const {
  Reply reply;
  reply.set_kind(kind);
  reply.set_value(value);
  reply.set_text(Printable(text));
  Send(socket_, reply);
}

// Whether this host accepts jobs. It may be drained at any time, so this is asked again behind whatever takes long.
absl::Status HostRequest::CheckAccepts() const {
  const std::string reason = tool_->runs_job ? checkpoint::DrainingReason(settings_.socket) : "";
  if (reason.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError("this host accepts no jobs at present: " + reason);
}

absl::Status HostRequest::CheckImageIsNamed() const {
  if (!image_.empty() && image_.find('\0') == std::string::npos) return absl::OkStatus();
  return absl::InvalidArgumentError("no image is named");
}

// For the folders of the user's jobs. They are root's, and the user's processes pass through them.
absl::Status HostRequest::MakeJobsFolder() {
  const std::string folder = checkpoint::UserFolder(settings_.socket, peer_.account.user);
  CR_RETURN_IF_ERROR(MakeFolder(folder.substr(0, folder.rfind('/'))));
  CR_RETURN_IF_ERROR(MakeFolder(folder));
  if (const absl::Status limited = LimitFolder(folder); !limited.ok()) {
    logging::Warn("{}", LogLine(peer_.account, request_.job(), std::string(limited.message())));
  }
  CR_RETURN_IF_ERROR(MakeFolder(folder + "/cuda-remote"));
  return MakeFolder(checkpoint::UserJobsFolder(settings_.socket, peer_.account.user));
}

// The user's own job of that name, and its folder, which is root's.
absl::Status HostRequest::FindJob() {
  if (!IsJobName(request_.job())) {
    return absl::InvalidArgumentError(
        "\"" + request_.job() + "\" cannot be the name of a job: up to " + std::to_string(kMostName) +
        " printable characters without spaces and slashes, of which the first is neither a dot nor a dash");
  }
  job_folder_ = checkpoint::UserJobsFolder(settings_.socket, peer_.account.user) + "/" + request_.job();
  if (tool_->runs_job) return MakeJobsFolder();
  CR_ASSIGN_OR_RETURN(const checkpoint::Job job, checkpoint::ReadJob(job_folder_));
  if (job.has_user() && job.user().id() == peer_.account.user) return absl::OkStatus();
  return absl::PermissionDeniedError("the job " + request_.job() + " is another user's");
}

absl::Status HostRequest::ActFor(uint32_t user, uint32_t group,
                                 const google::protobuf::RepeatedField<uint32_t>& groups) {
  CR_ASSIGN_OR_RETURN(peer_.account, checkpoint::FindAccount(std::to_string(user)));
  peer_.account.group = group;
  peer_.account.groups.assign(groups.begin(), groups.end());
  return absl::OkStatus();
}

absl::Status HostRequest::ActForMember() {
  const GroupMember& member = request_.member();
  CR_RETURN_IF_ERROR(ActFor(member.user(), member.group(), member.groups()));
  if (image_.empty() || image_[0] != '/') return absl::InvalidArgumentError("no image is named");
  return CheckImageIsNamed();
}

absl::Status HostRequest::MakeSpool() {
  std::string name = settings_.spool + "/" + std::to_string(peer_.account.user) + "-XXXXXX";
  // The user's process that copies an image looks through this folder; nobody comes here by a path.
  if (!mkdtemp(&name[0]) || chmod(name.c_str(), 0711) != 0 ||
      (spool_fd_ = open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0 ||
      flock(spool_fd_, LOCK_EX | LOCK_NB) != 0) {
    return ErrnoStatus("cannot make a folder in " + settings_.spool);
  }
  spool_ = name;
  if (HasRoom(spool_, 0)) return absl::OkStatus();
  return absl::ResourceExhaustedError("there is no room left in cr-hostd's folder " + settings_.spool);
}

absl::Status HostRequest::ListArguments() {
  const std::string name = ProgramOf(*tool_), program = checkpoint::FindCompanion(name);
  if (program.empty()) return absl::NotFoundError(name + " is not beside cr-hostd: the installation is incomplete");
  arguments_ = {program};
  for (const Option& option : request_.options()) {
    if (option.value().find('\0') != std::string::npos)
      return absl::InvalidArgumentError("--" + option.name() + " has a value that no command line can have");
    if (tool_->own.count(option.name())) {
      CR_RETURN_IF_ERROR(TakeOwnOption(option));
      continue;
    }
    const std::set<std::string>& known = option.flag() ? tool_->flags : tool_->values;
    if (!known.count(option.name()))
      return absl::InvalidArgumentError("--" + option.name() + " is not available through cr-hostd");
    // In one word, so that no value is taken for an option.
    arguments_.push_back("--" + option.name() + (option.flag() ? "" : "=" + option.value()));
  }
  if (tool_->runs_job && !job_folder_.empty()) arguments_.insert(arguments_.end(), {"--job-dir", job_folder_});
  EndArguments();
  return absl::OkStatus();
}

absl::StatusOr<std::string> HostRequest::Do(checkpoint::Step step) { return absl::InvalidArgumentError(kCannotRead); }

void HostRequest::SetToolsVariables() const {
  setenv("XDG_RUNTIME_DIR", checkpoint::UserFolder(settings_.socket, peer_.account.user).c_str(), 1);
}

// In the child.
void HostRequest::BecomeTool(int facts, int announcements, int failure) {
  const auto fail = [&](const std::string& text) {
    const ssize_t ignored = write(failure, text.data(), text.size());
    _exit(ignored > 0 ? 125 : 126);
  };
  setpgid(0, 0);
  // A job may leave a core, as its user; root's tool must not leave one in the user's folder.
  const rlimit no_core = {0, 0};
  if (!tool_->runs_job) setrlimit(RLIMIT_CORE, &no_core);
  // A job goes on if this process's parent is killed; what only works on one gives up.
  if (!tool_->runs_job) prctl(PR_SET_PDEATHSIG, SIGTERM);
  const bool asked_here = tool_->asker == Asker::kUser;
  const absl::Status joined =
      asked_here ? JoinPeer(peer_, tool_->runs_job) : JoinUserControlGroup(peer_.account, settings_.user_cgroup);
  if (!joined.ok()) fail(std::string(joined.message()));
  for (int i = 0; i < 3; ++i) {
    if (dup2(fds_[size_t(i)], i) < 0) fail(std::string("dup2: ") + strerror(errno));
  }
  // The others are closed by the execution.
  for (const int fd : {facts, announcements}) fcntl(fd, F_SETFD, 0);
  for (const char* name : kNotForTools) unsetenv(name);
  SetToolsVariables();
  umask(077);
  for (int number = 1; number < NSIG; ++number) signal(number, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  const std::string caller = "--caller=" + std::to_string(facts);
  arguments_.insert(arguments_.begin() + 1, caller);
  if (!request_.command().empty()) arguments_.push_back("--");
  arguments_.insert(arguments_.end(), request_.command().begin(), request_.command().end());
  std::vector<char*> words;
  for (std::string& word : arguments_) words.push_back(&word[0]);
  words.push_back(nullptr);
  execv(words[0], words.data());
  fail("cannot execute " + arguments_[0] + ": " + strerror(errno));
  _exit(126);
}

absl::Status HostRequest::StartTool() {
  CR_RETURN_IF_ERROR(CheckAccepts());
  checkpoint::CallerFacts facts;
  facts.set_user(peer_.account.user);
  facts.set_group(peer_.account.group);
  for (const gid_t group : peer_.account.groups) facts.add_groups(group);
  for (const std::string& variable : request_.environment()) {
    if (variable.find('\0') == std::string::npos) facts.add_environment(variable);
  }
  facts.set_image(image_);
  facts.set_umask(request_.umask());
  facts.set_pid(peer_.pid);
  facts.set_holds(holds_);
  facts.set_waits(waits_);
  for (const std::string& network : settings_.addresses) facts.add_addresses(network);
  int ends[2], failure[2];
  const int memory = memfd_create("cr-hostd-caller", MFD_CLOEXEC);
  if (memory < 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0 ||
      pipe2(failure, O_CLOEXEC) != 0) {
    return ErrnoStatus("cannot start the tool");
  }
  facts.set_announcements(ends[1]);
  const std::string bytes = facts.SerializeAsString();
  if (write(memory, bytes.data(), bytes.size()) != ssize_t(bytes.size())) return ErrnoStatus("cannot start the tool");
  fflush(nullptr);
  child_ = fork();
  const absl::Status not_forked = child_ < 0 ? ErrnoStatus("fork") : absl::OkStatus();
  if (child_ == 0) BecomeTool(memory, ends[1], failure[1]);
  setpgid(child_, child_);
  close(memory);
  close(ends[1]);
  close(failure[1]);
  announcements_ = ends[0];
  // A pipe must end when the job closes it.
  for (const int fd : fds_) close(fd);
  fds_.clear();
  char text[1024];
  const ssize_t got = child_ > 0 ? read(failure[0], text, sizeof(text)) : 0;
  close(failure[0]);
  CR_RETURN_IF_ERROR(not_forked);
  if (got <= 0) return absl::OkStatus();
  waitpid(child_, nullptr, 0);
  return absl::UnknownError(std::string(text, size_t(got)));
}

absl::Status HostRequest::WatchFor(const std::function<absl::Status()>& work) {
  int over[2];
  if (pipe2(over, O_CLOEXEC) != 0) return ErrnoStatus("pipe");
  const int tool = child_ > 0 ? int(syscall(SYS_pidfd_open, child_, 0)) : -1;
  std::atomic<bool> tool_gone{false};
  std::thread watch([&] {
    while (!peer_gone_) {
      pollfd waiting[] = {{socket_, POLLIN, 0}, {over[0], POLLIN, 0}, {tool_gone ? -1 : tool, POLLIN, 0}};
      if (poll(waiting, 3, -1) < 0) continue;
      // What the user's tool has said counts also if the work ends at once, as while a host does not answer.
      if (waiting[1].revents != 0 && waiting[0].revents == 0) return;
      if (waiting[2].revents != 0) {
        tool_gone = true;
        CancelWork();
      }
      if (waiting[0].revents == 0) continue;
      Control control;
      if (!Receive(socket_, &control, nullptr, Now())) peer_gone_ = true;
      const int number = control.signal();
      if (!peer_gone_ && number != SIGINT && number != SIGTERM && number != SIGHUP) continue;
      cancelled_ = true;
      CancelWork();
    }
  });
  const absl::Status done = work();
  close(over[1]);
  watch.join();
  close(over[0]);
  if (tool >= 0) close(tool);
  if (tool_gone && !cancelled_) return absl::UnavailableError(kToolHasDied);
  // A checkpoint over several hosts may have been decided before, and the user may have the image.
  if (!cancelled_ || (CountsWhenCancelled() && done.ok())) return done;
  return absl::CancelledError("interrupted");
}

absl::Status HostRequest::AwaitOthers(SaveStep step, const std::string& checkpoint, bool restarts) {
  Tell(Reply::REACHED, step, MoveName(checkpoint));
  Control control;
  if (Receive(socket_, &control) && control.go_on()) return absl::OkStatus();
  peer_gone_ = true;
  const absl::Status cancelled = absl::CancelledError(restarts ? "the restart over the hosts was cancelled"
                                                               : "the checkpoint over the hosts was cancelled");
  if (step != SAVE_COMPLETE && step != RESTART_RUNS && step != RESTART_SURE) return cancelled;
  // It may be decided.
  switch (AskDecision(request_.member().decider(), request_.member().id(), settings_.tls)) {
    case SaveDecision::kCounts:
      return absl::OkStatus();
    case SaveDecision::kGivenUp:
      return cancelled;
    default:
      return absl::UnavailableError("the cr-hostd of " + request_.member().decider() + " does not say whether the " +
                                    (restarts ? "restart is complete; the part of the job on this host ends"
                                              : "checkpoint is complete; on this host it is discarded"));
  }
}

// Before its tool is killed, which then cannot do it. The kernel keeps connections whose other end does not answer, and
// with them the job's address, for minutes: nobody may answer for that address then.
void HostRequest::SilenceJob() {
  const std::string folder = checkpoint::UserJobsFolder(settings_.socket, peer_.account.user);
  std::error_code failed;
  for (const auto& entry : std::filesystem::directory_iterator(folder, failed)) {
    const auto job = checkpoint::ReadJob(entry.path().string());
    if (!job.ok() || job->runner_pid() != child_) continue;
    // The tool is killed in any case.
    if (job->has_network()) checkpoint::SilenceNetwork(job->init_pid()).IgnoreError();
  }
}

void HostRequest::PassOn() {
  Control control;
  if (!Receive(socket_, &control, nullptr, Now())) {
    peer_gone_ = true;
    if (!EndsWithPeer()) return;
    // As when somebody kills cr-run, or a tool that works on a job.
    if (tool_->runs_job) SilenceJob();
    kill(child_, tool_->runs_job ? SIGKILL : SIGTERM);
    return;
  }
  const auto& all = checkpoint::kForwardedSignals;
  const bool known = std::find(std::begin(all), std::end(all), control.signal()) != std::end(all);
  if (!known) return;
  if (control.signal() == SIGCONT) kill(-child_, SIGCONT);
  sigval value = {};
  value.sival_int = checkpoint::kOfTerminal;
  if (control.terminal()) sigqueue(child_, control.signal(), value);
  if (!control.terminal() && control.signal() != SIGCONT) kill(child_, control.signal());
}

void HostRequest::LookForRoom() {
  if (!fills_spool_ || full_ || HasRoom(spool_, 0)) return;
  full_ = true;
  Tell(Reply::NOTE, 0,
       "there is no room left in cr-hostd's folder " + settings_.spool + "; the checkpoint is cancelled");
  kill(child_, SIGTERM);
}

void HostRequest::AnswerAnnouncement() {
  char bytes[256];
  const ssize_t got = recv(announcements_, bytes, sizeof(bytes), 0);
  if (got <= 0) {
    close(announcements_);
    announcements_ = -1;
    return;
  }
  checkpoint::StepAnnouncement announced;
  if (!announced.ParseFromArray(bytes, int(got))) announced.Clear();
  const absl::StatusOr<std::string> done = Do(announced.step());
  checkpoint::StepAnswer answer;
  answer.set_done(done.ok());
  answer.set_interrupted(absl::IsCancelled(done.status()));
  answer.set_text(done.ok() ? *done : std::string(done.status().message()));
  const std::string text = answer.SerializeAsString();
  send(announcements_, text.data(), text.size(), MSG_NOSIGNAL);
}

// To the end of the tool: its exit code.
int HostRequest::FollowTool() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  sigprocmask(SIG_BLOCK, &set, nullptr);
  const int signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  while (true) {
    int status = 0;
    const pid_t changed = waitpid(child_, &status, WNOHANG | WUNTRACED);
    if (changed == child_ && WIFSTOPPED(status)) {
      Tell(Reply::STOPPED, WSTOPSIG(status));
      continue;
    }
    if (changed == child_) {
      const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
      Log(ProgramOf(*tool_) + " has ended with " + std::to_string(code));
      close(signals);
      if (announcements_ >= 0) close(announcements_);
      announcements_ = -1;
      return code;
    }
    pollfd waiting[] = {{signals, POLLIN, 0}, {peer_gone_ ? -1 : socket_, POLLIN, 0}, {announcements_, POLLIN, 0}};
    if (poll(waiting, 3, fills_spool_ ? kLookMs : -1) < 0) continue;
    signalfd_siginfo info;
    while (read(signals, &info, sizeof(info)) == ssize_t(sizeof(info))) {
    }
    if (waiting[1].revents != 0) PassOn();
    if (waiting[2].revents != 0) AnswerAnnouncement();
    LookForRoom();
  }
}

}  // namespace cuda_remote::host
