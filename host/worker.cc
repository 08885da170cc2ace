// SPDX-License-Identifier: Apache-2.0
#include "host/worker.h"

#include <dirent.h>
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
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <sstream>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_join.h"
#include "checkpoint/engine/engines.h"
#include "checkpoint/gpu/modules.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/caller.h"
#include "checkpoint/job/caller.pb.h"
#include "checkpoint/job/forwarded_signals.h"
#include "checkpoint/job/hostd_places.h"
#include "checkpoint/job/isolation/network.h"
#include "checkpoint/job/job.h"
#include "checkpoint/transaction/at_step.h"
#include "ckptfmt/folder.h"
#include "ckptfmt/image_reader.h"
#include "host/earlier_images.h"
#include "host/exchange.h"
#include "host/group.h"
#include "host/move_rounds.h"
#include "host/move_source.h"
#include "host/move_state.h"
#include "host/peer.h"
#include "host/report.h"
#include "host/request.pb.h"
#include "host/sets.h"
#include "host/wire.h"
#include "proto/base/clock.h"
#include "proto/base/proc.h"
#include "proto/base/status_macros.h"
#include "proto/base/text.h"
#include "proto/base/unique_fd.h"
#include "proto/codec/json.h"
#include "proto/codec/text.h"
#include "proto/errors/absl_status.h"
#include "proto/logging/log.h"

namespace cuda_remote::host {
namespace {

using checkpoint::Caller;

// The first message must be there by then.
constexpr auto kFirstMessageTime = std::chrono::seconds(10);
constexpr int kLookMs = 500;
constexpr size_t kMostName = 64;
constexpr size_t kMostKept = 10000;
constexpr size_t kMostHosts = 512;
constexpr int kExitNotRestarted = 125;  // as cr-restart's
constexpr int kExitInterrupted = 3;     // as cr-checkpoint's
// Of --every over hosts: how often it looks whether the user gives up, and whether the job has ended.
constexpr auto kWaitStep = std::chrono::milliseconds(100);
constexpr auto kLookForJob = std::chrono::seconds(10);
constexpr char kToolHasDied[] = "cr-checkpoint has died";  // of a move
constexpr char kCannotRead[] = "cr-hostd cannot read the request";
constexpr char kImage[] = "/image";
constexpr char kImages[] = "/images";  // a store: of a move
// What root's tools get of cr-hostd's own environment, and what of it they must not get.
constexpr const char* kNotForTools[] = {"CUDA_REMOTE_SERVER", "CUDA_REMOTE_JOB_DIR", "CUDA_REMOTE_JOB",
                                        "CUDA_REMOTE_GPU", "XDG_RUNTIME_DIR"};

// What root's tools accept of a user. Everything else, such as --user, --job-dir and --trust-owner, is root's to say.
struct Tool {
  const char* name;
  bool runs_job;     // in the foreground until the job ends
  bool takes_image;  // reads one
  bool makes_image;  // for the user
  std::set<std::string> flags, values;
  std::set<std::string> own = {};  // options that are for cr-hostd
  const char* program = nullptr;   // null: cr-NAME
};
std::string ProgramOf(const Tool& tool) { return tool.program ? tool.program : std::string("cr-") + tool.name; }

constexpr char kMove[] = "move";
constexpr char kGroup[] = "group";
constexpr char kRegroup[] = "regroup";

const std::vector<Tool>& Tools() {
  static const auto* const tools = new std::vector<Tool>{
      {"run",
       true,
       false,
       false,
       {"append", "io-uring", "adopt", "no-check"},
       {"server", "gpu", "name", "output", "error", "address"}},
      {"checkpoint",
       false,
       false,
       true,
       {"stop", "tcp-close", "json", "times", "quiet"},
       {"every", "timeout", "compress", "pool"},
       {"keep"}},
      {"restart",
       true,
       true,
       false,
       {"append", "cut-back", "times", "quiet"},
       {"server", "gpu", "map", "cut", "output", "error"}},
      {"migrate", false, false, false, {"json", "quiet"}, {"to", "gpu", "map", "timeout"}},
      {kMove,
       false,
       false,
       false,
       {},
       {"timeout"},
       {"to-host", "to", "gpu", "output", "error", "json", "quiet"},
       "cr-checkpoint"},
      {kGroup, false, false, false, {}, {}, {"hosts", "json", "quiet", "every", "keep"}, "cr-checkpoint"},
      {kRegroup, false, false, false, {}, {}, {"hosts", "quiet"}, "cr-restart"},
      {kRejoinTool,
       true,
       true,
       false,
       {"append", "cut-back"},
       {"server", "gpu", "map", "cut"},
       {"output", "error"},
       "cr-restart"},
      {kMemberTool, false, false, true, {"stop", "tcp-close"}, {"timeout", "compress", "pool"}, {}, "cr-checkpoint"},
      {kArriveTool, true, true, false, {}, {"server", "gpu", "output", "error"}, {}, "cr-restart"},
      {kGpusTool, false, false, false, {}, {"server", "gpu"}, {}, "cr-restart"},
      {kDrainTool, false, false, false, {"undo", "dry-run"}, {"to-host", "to", "save", "reason", "timeout"}},
      {kHostsTool, false, false, false, {}, {"hosts"}},
  };
  return *tools;
}

// "user 1000 (anna), job train: ..."
std::string LogLine(const checkpoint::Account& account, const std::string& job, const std::string& text) {
  return NameOf(account) + (job.empty() ? "" : ", job " + Printable(job)) + ": " + Printable(text);
}

// What a tool of root's writes to a file of these kinds could mean more than when the user writes it.
bool IsHarmless(int fd) {
  struct statfs facts;
  if (fstatfs(fd, &facts) != 0) return false;
  constexpr uint32_t kKernels[] = {PROC_SUPER_MAGIC, SYSFS_MAGIC,   CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC,
                                   DEBUGFS_MAGIC,    TRACEFS_MAGIC, SECURITYFS_MAGIC,   BPF_FS_MAGIC};
  return std::find(std::begin(kKernels), std::end(kKernels), uint32_t(facts.f_type)) == std::end(kKernels);
}

// One without a name.
bool IsPipe(int fd) {
  struct statfs facts;
  return fstatfs(fd, &facts) == 0 && facts.f_type == PIPEFS_MAGIC;
}

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

// "HOST,HOST:PORT"
std::vector<std::string> SplitHosts(const std::string& list) {
  std::vector<std::string> hosts;
  std::istringstream names(list);
  for (std::string name; std::getline(names, name, ',');) {
    if (!name.empty()) hosts.push_back(name);
  }
  return hosts;
}

// This moment as people write it, here.
std::string TimeText() {
  const time_t now = UnixMs() / 1000;
  tm parts{};
  char text[32];
  if (!localtime_r(&now, &parts) || strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &parts) == 0) return "?";
  return text;
}

class Worker {
 public:
  Worker(int socket, const Settings& settings, const Key& key) : socket_(socket), settings_(settings), key_(key) {}
  ~Worker();

  // If it fails, nothing was started.
  absl::Status Begin();
  // Whether that was because of the process that asks, whatever it asks for.
  bool IsElsewhere() const { return elsewhere_; }
  // Until the tool has ended.
  // False: the tool has failed; the exit code of a job is its own.
  bool Follow();
  // There is no tool: the answer says what there is at hosts.
  bool AsksForHosts() const { return tool_ && tool_->name == std::string(kHostsTool); }
  void AnswerHosts();
  // For the counters.
  std::string tool() const { return tool_ ? tool_->name : ""; }
  // A line of cr-hostd's log, with the user and the job.
  void Log(const std::string& text) const { logging::Info("{}", LogLine(peer_.account, request_.job(), text)); }
  void LogRefused(const std::string& why) const {
    logging::Warn("{}", LogLine(peer_.account, request_.job(), "refused: " + why));
  }
  void Tell(Reply::Kind kind, int value, const std::string& text = {});

 private:
  absl::Status ReadRequest();
  absl::Status CheckAccepts() const;
  absl::Status FindArrived();
  absl::Status ActForOwner();
  absl::Status MakeJobsFolder();
  absl::Status FindJob();
  absl::Status MakeSpool();
  absl::Status ListArguments();
  absl::Status StartTool();
  [[noreturn]] void BecomeTool(int facts, int announcements, int failure);
  absl::StatusOr<std::string> Do(const std::string& announced);
  absl::StatusOr<std::string> BeginImage();
  // Of the image that is made: whether it shares memory with earlier ones, and where those are.
  bool Shares() const { return keep_ > 0 || request_.member().in_set(); }
  std::vector<std::string> PathsToShareWith() const;
  absl::Status GiveImage();
  void SilenceJob();
  void PassOn();
  void LookForRoom();
  int FollowTool();
  bool Drains() const { return tool_->name == std::string(kDrainTool); }
  // Of a move.
  bool Moves() const { return tool_->name == std::string(kMove); }
  absl::Status BeginMove();
  absl::Status OpenStreams();
  absl::Status MoveImage();
  absl::Status AnnounceMove(const std::string& image);
  absl::Status WatchFor(const std::function<absl::Status()>& work);
  absl::Status WatchGiver(const std::function<absl::Status()>& work);
  void KeepDoubtful();
  int FinishMove(int code);
  // Of a checkpoint or a restart over several hosts: of the one who asks for it, and of a part.
  struct Outcome {
    std::string image;
    double seconds = 0, paused = 0;
  };
  bool IsGroup() const { return tool_->name == std::string(kGroup) || Regroups(); }
  bool Regroups() const { return tool_->name == std::string(kRegroup); }
  absl::Status BeginGroup();
  absl::Status DoGroup(Outcome* outcome);
  void TellGroup(const Outcome& outcome);
  int DoGroupOnce();
  int RepeatGroup();
  bool GroupIsOver();
  bool IsMember() const { return request_.has_member(); }
  bool Rejoins() const { return tool_->name == std::string(kRejoinTool); }
  absl::Status FindMember();
  absl::Status MakeImagesFolder();
  absl::Status TakeMembersImage();
  absl::Status AwaitOthers(SaveStep step);
  // Of a job that has come from another host.
  bool Arrives() const { return tool_->name == std::string(kArriveTool); }
  // Of one that may come, and the GPUs for it.
  bool AsksForGpus() const { return tool_->name == std::string(kGpusTool); }
  absl::Status FindComing();
  absl::Status AwaitGoOn();
  absl::Status FindAccountOf(uint32_t user);

  const int socket_;
  const Settings& settings_;
  const Key& key_;
  Peer peer_;
  Request request_;
  std::vector<int> fds_;
  const Tool* tool_ = nullptr;
  std::string program_, job_folder_, image_;
  size_t keep_ = 0;  // of a store's images; 0: it is none
  std::vector<std::string> arguments_;
  std::string spool_;  // this request's folder
  int spool_fd_ = -1;
  std::unique_ptr<ImageGiver> giver_;
  std::unique_ptr<EarlierImages> earlier_;  // null: the image shares nothing
  int announcements_ = -1;
  pid_t child_ = 0;
  bool peer_gone_ = false, full_ = false, elsewhere_ = true;

  // Of a move.
  std::string host_, server_, output_, error_output_;
  int gpu_ = -1;
  bool json_ = false, quiet_ = false;
  std::unique_ptr<MoveSource> move_;
  std::unique_ptr<Group> group_;
  std::vector<GroupPart> parts_;
  SaveBegin group_begin_;
  std::unique_ptr<Sets> sets_;
  double every_ = 0;        // seconds; 0: once
  std::string checkpoint_;  // of the part's image
  checkpoint::Job job_;
  bool last_ = false;  // the tool's second run, after which the job ends here
  bool moved_ = false, doubtful_ = false;
  std::atomic<bool> cancelled_{false};
  std::string move_problem_;
  int user_output_ = -1, tool_output_ = -1, tool_errors_ = -1;
  MoveRounds rounds_;
  Moment begun_ = Now();
  // Of one that arrives, or of a part: whether the source has let it go on, or all parts run; and whether it runs.
  bool goes_on_ = false, running_ = false;
  bool released_ = false;  // of a part: its processes may run, and end by its tool unless all do
};

Worker::~Worker() {
  giver_.reset();
  if (!spool_.empty()) RemoveOwnFolder(spool_);
}

void Worker::Tell(Reply::Kind kind, int value, const std::string& text) {
  Reply reply;
  reply.set_kind(kind);
  reply.set_value(value);
  reply.set_text(Printable(text));
  Send(socket_, reply);
}

absl::Status Worker::ReadRequest() {
  const bool read = Receive(socket_, &request_, &fds_, Now() + kFirstMessageTime);
  struct stat facts;
  if (!read || fds_.size() != kMostDescriptors || fstat(fds_[3], &facts) != 0 || !S_ISDIR(facts.st_mode)) {
    return absl::InvalidArgumentError(kCannotRead);
  }
  if (request_.version() != kVersion) {
    return absl::UnimplementedError("cr-hostd speaks version " + std::to_string(kVersion) + " and this tool version " +
                                    std::to_string(request_.version()) + "; install the same version of both");
  }
  for (size_t i = 0; i < 3; ++i) {
    if (IsHarmless(fds_[i])) continue;
    return absl::PermissionDeniedError("descriptor " + std::to_string(i) +
                                       " is a file of the kernel's, to which cr-hostd does not write; use a pipe");
  }
  for (const Tool& tool : Tools()) {
    if (tool.name == request_.tool()) tool_ = &tool;
  }
  if (!tool_) return absl::UnimplementedError("cr-hostd does not know the tool " + request_.tool());
  // The engine opens a pipe once more, for which it must be the user's: it is not to become hers by that.
  for (size_t i = 0; tool_->takes_image && i < 3; ++i) {
    if (!IsPipe(fds_[i]) || fstat(fds_[i], &facts) != 0 || facts.st_uid == peer_.account.user) continue;
    return absl::PermissionDeniedError("descriptor " + std::to_string(i) + " is a pipe that belongs to user " +
                                       std::to_string(facts.st_uid) + ", not to " + NameOf(peer_.account) +
                                       "; use a file, or a pipe of that user");
  }
  return absl::OkStatus();
}

// Whether this host accepts jobs. It may be drained at any time, so this is asked again behind whatever takes long.
absl::Status Worker::CheckAccepts() const {
  const std::string reason = tool_->runs_job ? checkpoint::DrainingReason(settings_.socket) : "";
  if (reason.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError("this host accepts no jobs at present: " + reason);
}

// For the folders of the user's jobs. They are root's, and the user's processes pass through them.
absl::Status Worker::MakeJobsFolder() {
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
absl::Status Worker::FindJob() {
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

// What an operator asks for is done as the job's owner. Nothing that the operator has decided, such as an environment,
// goes to processes that run as the owner.
absl::Status Worker::ActForOwner() {
  if (request_.user().empty() && !Drains()) return absl::OkStatus();
  if (!IsOperator(settings_.operators, peer_.account)) {
    return absl::PermissionDeniedError(
        NameOf(peer_.account) + " is not an operator of this host (cr-hostd --operator); " +
        (Drains() ? "cr-drain needs root, or an operator" : "users save their own jobs only"));
  }
  if (Drains()) return absl::OkStatus();
  if (tool_->name != std::string("checkpoint"))
    return absl::PermissionDeniedError("operators save other users' jobs, and do nothing else with them");
  CR_ASSIGN_OR_RETURN(const checkpoint::Account owner, checkpoint::FindAccount(request_.user()));
  Log("asks as an operator for " + NameOf(owner));
  peer_.account = owner;
  request_.clear_environment();
  return absl::OkStatus();
}

absl::Status Worker::MakeSpool() {
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

absl::Status Worker::ListArguments() {
  const std::string program = ProgramOf(*tool_);
  program_ = checkpoint::FindCompanion(program);
  if (program_.empty()) return absl::NotFoundError(program + " is not beside cr-hostd: the installation is incomplete");
  arguments_ = {program_};
  for (const Option& option : request_.options()) {
    const std::set<std::string>& known = option.flag() ? tool_->flags : tool_->values;
    if (tool_->own.count(option.name()) && (Moves() || Rejoins())) {
      std::string* const text = option.name() == "to-host"  ? &host_
                                : option.name() == "to"     ? &server_
                                : option.name() == "output" ? &output_
                                : option.name() == "error"  ? &error_output_
                                                            : nullptr;
      if (text) *text = option.value();
      if (option.name() == "gpu") gpu_ = atoi(option.value().c_str());
      if (option.name() == "json") json_ = true;
      if (option.name() == "quiet") quiet_ = true;
      continue;
    }
    if (!option.flag() && tool_->own.count(option.name())) {
      keep_ = size_t(strtoul(option.value().c_str(), nullptr, 10));
      if (keep_ >= 1 && keep_ <= kMostKept) continue;
      return absl::InvalidArgumentError("--" + option.name() + " takes a number from 1 to " +
                                        std::to_string(kMostKept));
    }
    if (!known.count(option.name()))
      return absl::InvalidArgumentError("--" + option.name() + " is not available through cr-hostd");
    if (option.value().find('\0') != std::string::npos)
      return absl::InvalidArgumentError("--" + option.name() + " has a value that no command line can have");
    // In one word, so that no value is taken for an option.
    arguments_.push_back("--" + option.name() + (option.flag() ? "" : "=" + option.value()));
  }
  if (tool_->runs_job && !job_folder_.empty()) arguments_.insert(arguments_.end(), {"--job-dir", job_folder_});
  if (Moves()) {
    arguments_.insert(arguments_.end(), {"--quiet", "--json", "--keep=2", job_folder_, spool_ + kImages});
    return absl::OkStatus();
  }
  if (Arrives()) arguments_.insert(arguments_.end(), {"--append", "--quiet"});
  if (Rejoins() && !output_.empty()) arguments_.push_back("--output=" + output_);
  if (Rejoins() && !error_output_.empty()) arguments_.push_back("--error=" + error_output_);
  if (IsMember()) arguments_.push_back("--quiet");
  if (tool_->makes_image && Shares()) {
    // Which of the user's images stay is not the tool's to say.
    arguments_.insert(arguments_.end(), {"--keep=1", job_folder_, spool_ + kImages});
  } else if (tool_->makes_image) {
    arguments_.insert(arguments_.end(), {job_folder_, spool_ + kImage});
  }
  if (tool_->takes_image) arguments_.push_back(spool_ + kImage);
  if (AsksForGpus())
    arguments_.insert(arguments_.end(), {"--describe-gpus", "--job-dir", job_folder_});
  else if (!tool_->runs_job && !tool_->makes_image && !Drains())
    arguments_.push_back(job_folder_);
  return absl::OkStatus();
}

absl::Status Worker::FindAccountOf(uint32_t user) {
  CR_ASSIGN_OR_RETURN(peer_.account, checkpoint::FindAccount(std::to_string(user)));
  return absl::OkStatus();
}

// Whose job it is. As the source has vouched for it, and this host's cr-hostd has found it right.
absl::Status Worker::FindComing() {
  const ArrivedJob& arrived = request_.arrived();
  CR_RETURN_IF_ERROR(FindAccountOf(arrived.user()));
  peer_.account.group = arrived.group();
  peer_.account.groups.assign(arrived.groups().begin(), arrived.groups().end());
  if (!AsksForGpus()) return absl::OkStatus();
  // Of no job; a name that none can have.
  job_folder_ = checkpoint::UserJobsFolder(settings_.socket, arrived.user()) + "/.gpus-" + std::to_string(getpid());
  return MakeJobsFolder();
}

absl::Status Worker::FindArrived() {
  CR_RETURN_IF_ERROR(FindComing());
  spool_ = ReadLink("/proc/self/fd/" + std::to_string(fds_[3]));
  std::error_code ignored;
  if (spool_.substr(0, spool_.rfind('/')) == std::filesystem::canonical(settings_.spool, ignored)) {
    spool_fd_ = fcntl(fds_[3], F_DUPFD_CLOEXEC, 3);  // with its lock
    return FindJob();
  }
  spool_.clear();
  return absl::InvalidArgumentError("what has arrived is not in cr-hostd's folder");
}

// As the coordinator has vouched for her, and this host's cr-hostd has found it right.
absl::Status Worker::FindMember() {
  const GroupMember& member = request_.member();
  CR_RETURN_IF_ERROR(FindAccountOf(member.user()));
  peer_.account.group = member.group();
  peer_.account.groups.assign(member.groups().begin(), member.groups().end());
  if (image_.empty() || image_[0] != '/' || image_.find('\0') != std::string::npos)
    return absl::InvalidArgumentError("no image is named");
  if (!Rejoins()) CR_RETURN_IF_ERROR(FindJob());
  CR_RETURN_IF_ERROR(MakeSpool());
  return Rejoins() ? TakeMembersImage() : MakeImagesFolder();
}

absl::Status Worker::MakeImagesFolder() {
  const checkpoint::ActAs user(&peer_.account);
  const std::string folder = image_.substr(0, image_.rfind('/'));
  std::vector<std::string> folders = {folder};
  if (ckptfmt::IsStoreImage(folder)) folders.insert(folders.begin(), folder.substr(0, folder.rfind('/')));
  for (const std::string& one : folders) {
    if (mkdir(one.c_str(), 0700) == 0) {
      // An image that is on the disk is to be found there.
      if (ckptfmt::SyncFolder(one + "/..").ok()) continue;
    } else if (errno == EEXIST) {
      continue;
    }
    return ErrnoStatus("cannot make the folder " + one);
  }
  return absl::OkStatus();
}

// What an image says of its job, and of the job's processes.
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

// The image of a part that is restarted, and what the part's name and streams are to be.
absl::Status Worker::TakeMembersImage() {
  CR_RETURN_IF_ERROR(CheckAccepts());
  checkpoint::SavedSummary saved;
  CR_RETURN_IF_ERROR(TakeImage(peer_.account, key_, spool_ + kImage, &image_, &checkpoint_));
  CR_ASSIGN_OR_RETURN(const std::unique_ptr<ckptfmt::ImageReader> image, ReadFacts(spool_ + kImage, &saved));
  const auto about = image->info().client_info.find("job");
  if (request_.job().empty() && about != image->info().client_info.end() &&
      checkpoint::JobFromJson(about->second, &job_)) {
    request_.set_job(job_.directory().substr(job_.directory().rfind('/') + 1));
  }
  // Nobody listens at a pipe or a terminal any more.
  std::string output = "-", error_output = "-", first;
  for (const checkpoint::SavedSummary::Stream& stream : saved.streams) {
    if (stream.fd == 0 || !stream.stays) continue;
    if (stream.fd == 1) output = output_, first = stream.target;
    // As 2>&1 has it.
    if (stream.fd == 2) error_output = error_output_.empty() && stream.target == first ? output : error_output_;
  }
  const auto chosen = [](const std::string& file) {
    return file == "-" ? std::string() : file.empty() ? std::string("/dev/null") : file;
  };
  output_ = chosen(output);
  error_output_ = chosen(error_output);
  return FindJob();
}

absl::Status Worker::BeginGroup() {
  if (settings_.tls.empty()) {
    return absl::FailedPreconditionError(
        "this cr-hostd saves and restarts no jobs over several hosts: it has no certificate (cr-hostd --tls-cert)");
  }
  if (!Regroups() && !IsJobName(request_.job())) {
    return absl::InvalidArgumentError("\"" + request_.job() +
                                      "\" cannot be the name of a job; with --hosts, JOB is the name that it has on "
                                      "all hosts (cr-run --name)");
  }
  for (const Option& option : request_.options()) {
    if (option.name() == "json" || option.name() == "quiet") {
      (option.name() == "json" ? json_ : quiet_) = true;
    } else if (option.name() == "hosts") {
      host_ = option.value();
    } else if (tool_->own.count(option.name())) {
      const double value = atof(option.value().c_str());
      if (option.name() == "every") every_ = value;
      if (option.name() == "keep") keep_ = value >= 1 && value <= double(kMostKept) ? size_t(value) : 0;
      if (option.name() == "every" ? every_ > 0 : keep_ > 0) continue;
      return absl::InvalidArgumentError("--" + option.name() + " " + option.value() + " is out of range");
    } else {
      SaveOption* const passed = group_begin_.add_options();
      passed->set_name(option.name());
      passed->set_value(option.value());
      passed->set_flag(option.flag());
    }
  }
  CR_ASSIGN_OR_RETURN(parts_, ParseGroup(host_, request_.job()));
  CR_ASSIGN_OR_RETURN(const checkpoint::Account named, checkpoint::FindAccount(std::to_string(peer_.account.user)));
  group_begin_.set_version(kVersion);
  group_begin_.set_decider(parts_[0].host);
  group_begin_.set_whole_job(request_.job());
  group_begin_.set_umask(request_.umask());
  group_begin_.set_restart(Regroups());
  if (Regroups()) *group_begin_.mutable_environment() = request_.environment();
  group_begin_.mutable_user()->set_id(peer_.account.user);
  group_begin_.mutable_user()->set_name(named.name);
  group_begin_.mutable_user()->set_group(peer_.account.group);
  for (const gid_t group : peer_.account.groups) group_begin_.mutable_user()->add_groups(group);
  user_output_ = fcntl(fds_[1], F_DUPFD_CLOEXEC, 3);
  if (keep_ > 0 || Regroups()) sets_ = std::make_unique<Sets>(parts_, settings_.tls, key_, group_begin_.user(), image_);
  return absl::OkStatus();
}

absl::Status Worker::Begin() {
  ucred facts = {};
  socklen_t size = sizeof(facts);
  const bool root = getsockopt(socket_, SOL_SOCKET, SO_PEERCRED, &facts, &size) == 0 && facts.uid == 0;
  if (!root) CR_RETURN_IF_ERROR(FindPeer(socket_, &peer_));
  if (const absl::Status read = ReadRequest(); !read.ok()) {
    elsewhere_ = false;
    return read;
  }
  if (AsksForHosts()) return absl::OkStatus();
  const bool comes = Arrives() || AsksForGpus();
  const bool of_hosts = comes || Rejoins() || tool_->name == std::string(kMemberTool);
  if (root != of_hosts || request_.has_arrived() != comes || IsMember() != (of_hosts && !comes)) {
    elsewhere_ = root;
    if (root) return absl::FailedPreconditionError("root needs no cr-hostd: start the tool without it");
    return absl::UnimplementedError("cr-hostd does not know the tool " + request_.tool());
  }
  elsewhere_ = false;
  if (!root) CR_RETURN_IF_ERROR(ActForOwner());
  // The user's names of files are meant from there, and are only used with her rights.
  if (fchdir(fds_[3]) != 0) return ErrnoStatus("cr-hostd cannot enter the working folder");
  image_ = request_.image();
  if (Arrives()) {
    CR_RETURN_IF_ERROR(FindArrived());
    CR_RETURN_IF_ERROR(ListArguments());
    Log("the job arrives from another host, " + image_);
    return StartTool();
  }
  if (AsksForGpus()) {
    CR_RETURN_IF_ERROR(FindComing());
    CR_RETURN_IF_ERROR(ListArguments());
    return StartTool();
  }
  if (IsMember()) {
    CR_RETURN_IF_ERROR(FindMember());
    CR_RETURN_IF_ERROR(ListArguments());
    Log(std::string("a part of the job is ") + (Rejoins() ? "restarted" : "saved") + ", image " + image_);
    return StartTool();
  }
  if (Drains()) {
    Log("cr-drain");
    CR_RETURN_IF_ERROR(ListArguments());
    return StartTool();
  }
  if (IsGroup()) {
    Log(ProgramOf(*tool_) + " on the hosts " + host_ + ", image " + image_);
    return BeginGroup();
  }
  if ((tool_->takes_image || tool_->makes_image) && (image_.empty() || image_.find('\0') != std::string::npos))
    return absl::InvalidArgumentError("no image is named");
  CR_RETURN_IF_ERROR(CheckAccepts());
  // A restarted job has the name that it had, if it gets no other one.
  const bool named = !tool_->takes_image || !request_.job().empty();
  CR_RETURN_IF_ERROR(named ? FindJob() : MakeJobsFolder());
  if (tool_->takes_image || tool_->makes_image || Moves()) CR_RETURN_IF_ERROR(MakeSpool());
  if (tool_->takes_image) CR_RETURN_IF_ERROR(TakeImage(peer_.account, key_, spool_ + kImage, &image_, nullptr));
  CR_RETURN_IF_ERROR(ListArguments());
  if (Moves()) CR_RETURN_IF_ERROR(BeginMove());
  Log((Moves() ? "cr-migrate --whole" : ProgramOf(*tool_)) + (image_.empty() ? "" : ", image " + image_) +
      (host_.empty() ? "" : ", to " + host_));
  return StartTool();
}

void Worker::AnswerHosts() {
  std::vector<std::string> hosts;
  for (const Option& option : request_.options()) {
    if (option.name() == "hosts" && !option.flag()) hosts = SplitHosts(option.value());
  }
  const bool named = !hosts.empty();
  if (!named) hosts = settings_.known_hosts;
  Reply reply;
  reply.set_kind(Reply::HOSTS);
  // Operators see what root sees.
  const uid_t user = IsOperator(settings_.operators, peer_.account) ? 0 : peer_.account.user;
  const auto ask = [&]() -> absl::Status {
    if (hosts.size() > kMostHosts) {
      return absl::InvalidArgumentError(std::to_string(hosts.size()) + " hosts are more than the " +
                                        std::to_string(kMostHosts) + " that can be asked at the same time");
    }
    if (!hosts.empty() && settings_.tls.empty()) {
      return absl::FailedPreconditionError(
          "this cr-hostd asks no other hosts: it has no certificate (cr-hostd --tls-cert)");
    }
    checkpoint::Account account;
    if (user != 0) {
      CR_ASSIGN_OR_RETURN(account, checkpoint::FindAccount(std::to_string(user)));
    }
    MovedUser moved;
    moved.set_id(user);
    moved.set_name(account.name);
    moved.set_group(peer_.account.group);
    for (const gid_t group : peer_.account.groups) moved.add_groups(group);
    // This host is one of them, if nobody has said which.
    if (!named) *reply.mutable_hosts()->add_hosts() = DescribeHost(settings_, user);
    reply.mutable_hosts()->MergeFrom(AskHosts(hosts, settings_.tls, moved));
    return absl::OkStatus();
  };
  const absl::Status asked = ask();
  if (asked.ok()) Send(socket_, reply);
  if (!asked.ok()) Tell(Reply::REFUSED, 0, std::string(asked.message()));
}

// In the child.
void Worker::BecomeTool(int facts, int announcements, int failure) {
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
  const bool asked_here = !request_.has_arrived() && !IsMember();
  const absl::Status joined =
      asked_here ? JoinPeer(peer_, tool_->runs_job) : JoinUserControlGroup(peer_.account, settings_.user_cgroup);
  if (!joined.ok()) fail(std::string(joined.message()));
  for (int i = 0; i < 3; ++i) {
    if (dup2(fds_[size_t(i)], i) < 0) fail(std::string("dup2: ") + strerror(errno));
  }
  // The others are closed by the execution.
  for (const int fd : {facts, announcements}) fcntl(fd, F_SETFD, 0);
  for (const char* name : kNotForTools) unsetenv(name);
  if (Drains())
    setenv("CUDA_REMOTE_HOSTD", settings_.socket.c_str(), 1);
  else
    setenv("XDG_RUNTIME_DIR", checkpoint::UserFolder(settings_.socket, peer_.account.user).c_str(), 1);
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
  execv(program_.c_str(), words.data());
  fail("cannot execute " + program_ + ": " + strerror(errno));
  _exit(126);
}

absl::Status Worker::StartTool() {
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
  facts.set_holds(Arrives() || Rejoins());
  facts.set_waits(IsMember());
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

std::vector<std::string> Worker::PathsToShareWith() const {
  const checkpoint::ActAs user(&peer_.account);
  if (!IsMember()) return ckptfmt::ImagesIn(ckptfmt::ParentOf(giver_->dir()));
  const auto& sets = request_.member().earlier();
  return EarlierInSets(image_, {sets.begin(), sets.end()});
}

// Something that waits for the user's process. The tool, which waits for the answer, hears of a signal, too.
absl::Status Worker::WatchGiver(const std::function<absl::Status()>& work) {
  const absl::Status done = WatchFor(work);
  if (cancelled_) kill(child_, SIGTERM);
  return done;
}

// The user gets a folder for the image; and the tool, if it is one of several, the earlier ones to share with.
absl::StatusOr<std::string> Worker::BeginImage() {
  giver_.reset();
  earlier_.reset();
  CR_ASSIGN_OR_RETURN(
      giver_, ImageGiver::Begin(peer_.account, spool_fd_, image_, keep_, [this] { return cancelled_ || peer_gone_; }));
  CR_RETURN_IF_ERROR(WatchGiver([&] { return giver_->AwaitPlace(); }));
  if (!Shares()) return image_;
  RemoveOwnFolder(spool_ + kImages);
  CR_ASSIGN_OR_RETURN(earlier_,
                      EarlierImages::Take(peer_.account, key_, PathsToShareWith(), giver_->dir(), spool_ + kImages));
  if (const absl::Status& sharing = earlier_->sharing(); !sharing.ok()) {
    Tell(Reply::NOTE, 0, "the image shares nothing with earlier ones: " + std::string(sharing.message()));
  }
  return giver_->dir();
}

// The image is complete: from the spool to the user.
absl::Status Worker::GiveImage() {
  if (earlier_ && rename(ckptfmt::NewestImageIn(spool_ + kImages).c_str(), (spool_ + kImage).c_str()) != 0) {
    return ErrnoStatus("cannot find the image");
  }
  CR_ASSIGN_OR_RETURN(const ckptfmt::OpenedFolder folder, ckptfmt::OpenedFolder::Open(spool_ + kImage));
  const PartOf part = {request_.member().id(), request_.member().whole_job()};
  CR_RETURN_IF_ERROR(SignImage(folder, key_, peer_.account.user, part, earlier_ ? &earlier_->chunks() : nullptr));
  if (earlier_) CR_RETURN_IF_ERROR(earlier_->PlaceFiles(folder));
  CR_RETURN_IF_ERROR(GiveFiles(peer_.account, spool_fd_));
  CR_RETURN_IF_ERROR(WatchGiver([&] { return giver_->Copy(); }));
  if (IsMember()) CR_RETURN_IF_ERROR(AwaitOthers(SAVE_COMPLETE));
  std::string note;
  CR_RETURN_IF_ERROR(WatchGiver([&] {
    CR_ASSIGN_OR_RETURN(note, giver_->Publish());
    return absl::OkStatus();
  }));
  if (!note.empty()) Tell(Reply::NOTE, 0, note);
  return absl::OkStatus();
}

// What the tool waits for. Gives the answer.
absl::StatusOr<std::string> Worker::Do(const std::string& announced) {
  const std::string nothing;
  if (announced == checkpoint::kImageBegins && tool_->makes_image) {
    return BeginImage();
  }
  if (announced == checkpoint::kImageComplete && tool_->makes_image && giver_) {
    const absl::Status given = GiveImage();
    giver_.reset();
    RemoveOwnFolder(spool_ + kImage);
    if (earlier_) RemoveOwnFolder(spool_ + kImages);
    earlier_.reset();
    CR_RETURN_IF_ERROR(given);
    return nothing;
  }
  if (announced == checkpoint::kImageBegins && Moves()) {
    // So the user's cr-run says where her job is.
    return last_ ? checkpoint::kMovedTo + host_ : nothing;
  }
  if (announced == checkpoint::kImageComplete && Moves()) {
    const absl::Status moved = MoveImage();
    if (!moved.ok()) move_problem_ = std::string(moved.message());
    CR_RETURN_IF_ERROR(moved);
    return nothing;
  }
  if (announced == checkpoint::kImageRestored && Arrives()) {
    CR_RETURN_IF_ERROR(AwaitGoOn());
    return nothing;
  }
  if (IsMember()) {
    for (const auto& [word, step] :
         {std::pair(checkpoint::kJobReady, SAVE_READY), std::pair(checkpoint::kJobLocked, SAVE_LOCKED),
          std::pair(checkpoint::kJobStill, SAVE_STILL), std::pair(checkpoint::kJobDumped, SAVE_DUMPED)}) {
      if (announced != word) continue;
      CR_RETURN_IF_ERROR(AwaitOthers(step));
      return nothing;
    }
  }
  if (announced == checkpoint::kImageRestored && Rejoins()) {
    const absl::Status held = AwaitOthers(RESTART_HELD);
    released_ = held.ok();
    CR_RETURN_IF_ERROR(held);
    return nothing;
  }
  if (announced == checkpoint::kImageUsed && Rejoins()) {
    CR_RETURN_IF_ERROR(AwaitOthers(RESTART_RUNS));
    if (!peer_gone_) CR_RETURN_IF_ERROR(AwaitOthers(RESTART_SURE));
    goes_on_ = running_ = true;
    RemoveOwnFolder(spool_);
    spool_.clear();
    Tell(Reply::RUNNING, 0);
    return nothing;
  }
  if (announced == checkpoint::kImageUsed && tool_->takes_image) {
    RemoveOwnFolder(spool_);
    spool_.clear();
    if (!Arrives()) return nothing;
    running_ = true;
    SetMoveState(settings_.moves, request_.arrived().id(), kMoveRuns);
    Tell(Reply::RUNNING, 0);
    return nothing;
  }
  return absl::InvalidArgumentError(kCannotRead);
}

// Before its tool is killed, which then cannot do it. The kernel keeps connections whose other end does not answer, and
// with them the job's address, for minutes: nobody may answer for that address then.
void Worker::SilenceJob() {
  const std::string folder = checkpoint::UserJobsFolder(settings_.socket, peer_.account.user);
  std::error_code failed;
  for (const auto& entry : std::filesystem::directory_iterator(folder, failed)) {
    const auto job = checkpoint::ReadJob(entry.path().string());
    if (!job.ok() || job->runner_pid() != child_) continue;
    // The tool is killed in any case.
    if (job->has_network()) checkpoint::SilenceNetwork(job->init_pid()).IgnoreError();
  }
}

void Worker::PassOn() {
  Control control;
  if (!Receive(socket_, &control, nullptr, Now())) {
    peer_gone_ = true;
    // A part that runs ends by its tool: killed, it would leave the address in use by what its connections have to
    // send.
    if (goes_on_ || released_) return;
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

void Worker::LookForRoom() {
  if ((!tool_->makes_image && !Moves()) || full_ || HasRoom(spool_, 0)) return;
  full_ = true;
  Tell(Reply::NOTE, 0,
       "there is no room left in cr-hostd's folder " + settings_.spool + "; the checkpoint is cancelled");
  kill(child_, SIGTERM);
}

// The job waits, restored, until the source lets it go on.
absl::Status Worker::AwaitGoOn() {
  const absl::Status not_released = absl::CancelledError("the source host has not released the job");
  Tell(Reply::RESTORED, 0);
  Control control;
  if (!Receive(socket_, &control) || !control.go_on()) {
    peer_gone_ = true;
    return not_released;
  }
  CR_RETURN_IF_ERROR(CheckAccepts());
  // Not if the source was told meanwhile that it is too late.
  goes_on_ = BeginMoveState(settings_.moves, request_.arrived().id(), kMoveGoesOn);
  return goes_on_ ? absl::OkStatus() : not_released;
}

absl::Status Worker::AwaitOthers(SaveStep step) {
  Tell(Reply::REACHED, step, MoveName(checkpoint_));
  Control control;
  if (Receive(socket_, &control) && control.go_on()) return absl::OkStatus();
  peer_gone_ = true;
  const absl::Status cancelled = absl::CancelledError(Rejoins() ? "the restart over the hosts was cancelled"
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
                                    (Rejoins() ? "restart is complete; the part of the job on this host ends"
                                               : "checkpoint is complete; on this host it is discarded"));
  }
}

// One checkpoint, or restart, of all parts.
absl::Status Worker::DoGroup(Outcome* outcome) {
  const auto begun = Now();
  const auto note = [this](const std::string& text) {
    if (!quiet_) Tell(Reply::NOTE, 0, text);
  };
  outcome->image = image_;
  if (sets_) {
    CR_RETURN_IF_ERROR(sets_->Look());
    CR_ASSIGN_OR_RETURN(outcome->image, Regroups() ? sets_->Newest() : sets_->Next());
    const std::vector<uint64_t> earlier = keep_ > 0 ? sets_->Complete(request_.job()) : std::vector<uint64_t>();
    group_begin_.set_in_set(keep_ > 0);
    *group_begin_.mutable_earlier() = {earlier.begin(), earlier.end()};
  }
  CR_ASSIGN_OR_RETURN(group_, Group::Open(parts_, settings_.tls));
  const absl::Status done = WatchFor([&] { return group_->Run(group_begin_, outcome->image, key_, note); });
  outcome->paused = group_->paused_seconds();
  group_.reset();
  if (done.ok() && keep_ > 0) {
    checkpoint::AtStep("remove old sets");
    if (const absl::Status pruned = sets_->Prune(request_.job(), keep_); !pruned.ok()) {
      note("the checkpoint is complete, but old ones could not be removed: " + std::string(pruned.message()) +
           "; the next one tries again");
    }
  }
  outcome->seconds = SecondsSince(begun);
  if (done.ok()) {
    Log(std::string("the parts on ") + host_ + (Regroups() ? " run" : " are saved") + ", image " + outcome->image);
  } else {
    Log(ProgramOf(*tool_) + " on " + host_ + " has failed: " + std::string(done.message()));
  }
  return done;
}

void Worker::TellGroup(const Outcome& outcome) {
  if (json_) {
    JsonWriter json(JsonWriter::kSpaced);
    json.BeginOutput();
    json.Member("image", outcome.image);
    json.Member("hosts", host_);
    json.RealMember("seconds", outcome.seconds, 3);
    if (!Regroups()) json.RealMember("paused_seconds", outcome.paused, 3);
    json.End('}');
    const std::string line = json.text() + "\n";
    const ssize_t ignored = write(user_output_, line.data(), line.size());
    static_cast<void>(ignored);
  } else if (!quiet_) {
    char text[128];
    snprintf(text, sizeof(text), " in %.1f s (the job stood still for %.1f s)", outcome.seconds, outcome.paused);
    if (Regroups()) snprintf(text, sizeof(text), " in %.1f s; the job runs", outcome.seconds);
    Tell(Reply::NOTE, 0, (every_ > 0 ? TimeText() + ": " : "") + outcome.image + "/member-N on " + host_ + text);
  }
}

// The exit code for the user's tool.
int Worker::DoGroupOnce() {
  Outcome outcome;
  const absl::Status done = DoGroup(&outcome);
  if (done.ok()) {
    TellGroup(outcome);
    return 0;
  }
  const std::string error(done.message());
  if (Regroups()) {
    Tell(Reply::NOTE, 0, "no restart of " + outcome.image + " on " + host_ + ": " + error + "; no part of it runs");
    return kExitNotRestarted;
  }
  const bool over = !cancelled_ && GroupIsOver();
  const char* const rest = over ? "" : "; the job continues";
  Tell(Reply::NOTE, 0, "no checkpoint of " + request_.job() + " on " + host_ + ": " + error + rest);
  return over ? checkpoint::kExitNoJob : checkpoint::kExitFailure;
}

// Whether no host has a part of the job any more. One that does not answer may have one.
bool Worker::GroupIsOver() {
  std::vector<std::string> hosts;
  for (const GroupPart& part : parts_) hosts.push_back(part.host);
  const HostReports reports = AskHosts(hosts, settings_.tls, group_begin_.user());
  for (size_t i = 0; i < parts_.size(); ++i) {
    const HostReport& report = reports.hosts(int(i));
    const auto is_part = [&](const HostJob& job) { return job.running() && job.name() == parts_[i].job; };
    if (!report.error().empty() || std::any_of(report.jobs().begin(), report.jobs().end(), is_part)) return false;
  }
  return true;
}

// --every: what goes wrong once is said, and tried again at the next time. The exit code for the user's tool.
int Worker::RepeatGroup() {
  const auto interval = std::chrono::duration_cast<Moment::duration>(std::chrono::duration<double>(every_));
  std::string last;
  for (bool first = true;; first = false) {
    Outcome outcome;
    const absl::Status status = DoGroup(&outcome);
    const bool done = status.ok();
    const std::string error(status.message());
    const Moment next = Now() + interval;
    if (done) last = outcome.image;
    if (done) TellGroup(outcome);
    bool over = !done && !cancelled_ && GroupIsOver();
    if (over && first) {
      Tell(Reply::NOTE, 0, "no checkpoint of " + request_.job() + " on " + host_ + ": " + error);
      return checkpoint::kExitNoJob;
    }
    if (!done && !over && !cancelled_) {
      Tell(Reply::NOTE, 0,
           TimeText() + ": no checkpoint of " + request_.job() + " on " + host_ + ": " + error +
               "; the job continues. " +
               (last.empty() ? "There is no image from this run yet" : last + " is still its last image") +
               "; the next try is in " + std::to_string(std::lround(every_)) + " s");
    }
    const auto wait = [&] {
      for (auto look = Now() + kLookForJob; !over && !cancelled_ && Now() < next;) {
        std::this_thread::sleep_for(std::min(interval, Moment::duration(kWaitStep)));
        if (Now() < look) continue;
        over = GroupIsOver();
        look = Now() + kLookForJob;
      }
      return absl::OkStatus();
    };
    WatchFor(wait).IgnoreError();  // cancelled_ says whether it was interrupted
    if (cancelled_) return kExitInterrupted;
    if (!over) continue;
    if (last.empty()) Tell(Reply::NOTE, 0, "the job has ended, and there is no image of it from this run");
    return last.empty() ? checkpoint::kExitFailure : 0;
  }
}

// Streams for the tool, whose words are this worker's to say.
absl::Status Worker::OpenStreams() {
  fds_ = {open("/dev/null", O_RDWR | O_CLOEXEC), memfd_create("output", MFD_CLOEXEC),
          memfd_create("errors", MFD_CLOEXEC)};
  for (int* const kept : {&tool_output_, &tool_errors_}) {
    if (*kept >= 0) close(*kept);
  }
  tool_output_ = fcntl(fds_[1], F_DUPFD_CLOEXEC, 3);
  tool_errors_ = fcntl(fds_[2], F_DUPFD_CLOEXEC, 3);
  if (fds_[0] >= 0 && tool_output_ >= 0 && tool_errors_ >= 0) return absl::OkStatus();
  return ErrnoStatus("no descriptors");
}

absl::Status Worker::BeginMove() {
  if (settings_.tls.empty()) {
    return absl::FailedPreconditionError(
        "this cr-hostd moves no jobs to other hosts: it has no certificate (cr-hostd --tls-cert)");
  }
  if (host_.empty()) return absl::InvalidArgumentError("no host is named (--to-host)");
  CR_ASSIGN_OR_RETURN(job_, checkpoint::ReadJob(job_folder_));
  if (job_.terminal()) {
    return absl::UnimplementedError(
        "the job has a terminal, which cannot go to another host; start it without one (cr-run ... < /dev/null | cat)");
  }
  if (server_.empty() && job_.server().compare(0, 5, "unix:") == 0) {
    return absl::InvalidArgumentError("the job uses the GPU server " + job_.server() +
                                      " of this host; name one for it there with --to");
  }
  if (server_.empty()) server_ = job_.server();
  user_output_ = fcntl(fds_[1], F_DUPFD_CLOEXEC, 3);
  for (const int fd : fds_) close(fd);
  return OpenStreams();
}

std::vector<ckptfmt::DeviceFacts> DevicesOf(const HostGpus& gpus) {
  std::vector<ckptfmt::DeviceFacts> devices;
  for (const HostGpu& gpu : gpus.gpus()) {
    ckptfmt::DeviceFacts& device = devices.emplace_back();
    device.name = gpu.name();
    device.uuid = gpu.uuid();
    device.compute_major = gpu.compute_major();
    device.compute_minor = gpu.compute_minor();
    device.total_memory = gpu.total_memory();
  }
  return devices;
}

// Says what the job needs, before anything is sent.
absl::Status Worker::AnnounceMove(const std::string& image) {
  checkpoint::SavedSummary saved;
  CR_ASSIGN_OR_RETURN(const std::unique_ptr<ckptfmt::ImageReader> opened, ReadFacts(image, &saved));
  const ckptfmt::ImageInfo& info = opened->info();
  MoveBegin begin;
  begin.set_version(kVersion);
  std::string id(16, '\0');
  if (getrandom(&id[0], id.size(), 0) != ssize_t(id.size())) return ErrnoStatus("no random numbers");
  begin.set_id(id);
  begin.set_host(info.host);
  begin.set_job(request_.job());
  CR_ASSIGN_OR_RETURN(const checkpoint::Account named, checkpoint::FindAccount(std::to_string(peer_.account.user)));
  begin.mutable_user()->set_id(peer_.account.user);
  begin.mutable_user()->set_name(named.name);
  begin.mutable_user()->set_group(job_.user().group());
  *begin.mutable_user()->mutable_groups() = job_.user().groups();
  begin.set_bytes(opened->sizes().total_bytes);
  begin.set_about_job(job_.SerializeAsString());
  begin.set_kernel(info.needs.kernel);
  begin.set_engine_version(info.needs.engine_version);
  for (const std::string& name : saved.instruction_sets) begin.add_instruction_sets(name);
  for (const std::string& name : saved.kernel_features) begin.add_kernel_features(name);
  std::set<std::string> replaced;
  for (const checkpoint::SavedSummary::Stream& stream : saved.streams) {
    const std::string& other = stream.fd == 1 ? output_ : error_output_;
    if (stream.fd != 0 && !other.empty()) {
      replaced.insert(stream.target);
      continue;
    }
    if (stream.fd == 0 || !stream.stays) continue;
    // As 2>&1 has it.
    if (stream.fd == 2 && replaced.count(stream.target)) continue;
    const char* const option = stream.fd == 1 ? "--output" : "--error";
    return absl::InvalidArgumentError("the job's descriptor " + std::to_string(stream.fd) +
                                      " is a pipe or a terminal, which stays here; name a file of " + host_ +
                                      " for it with " + option);
  }
  for (const ckptfmt::NeededFile& file : info.needs.files) {
    if (!file.kept.empty() || replaced.count(file.path)) continue;
    MovedNeed* const need = begin.add_needs();
    need->set_path(file.path);
    need->set_bytes(file.bytes);
    need->set_build_id(file.build_id);
    need->set_written(file.written);
  }
  begin.set_uses_gpus(!info.processes.empty());
  begin.set_server(server_);
  begin.set_gpu(gpu_);
  *begin.mutable_environment() = request_.environment();
  CR_ASSIGN_OR_RETURN(const MoveChecked checked, move_->Begin(begin));
  std::vector<std::string> missing(checked.missing().begin(), checked.missing().end());
  if (checked.has_gpus()) {
    CR_ASSIGN_OR_RETURN(const std::vector<std::string> refusals,
                        checkpoint::ListRefusals(*opened, DevicesOf(checked.gpus()), host_));
    missing.insert(missing.end(), refusals.begin(), refusals.end());
  }
  for (const std::string& note : checked.notes()) {
    if (!quiet_) Tell(Reply::NOTE, 0, note);
  }
  if (missing.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      host_ + " lacks what the job needs, and nothing was sent: " + absl::StrJoin(missing, "; "));
}

// Does it, and looks meanwhile whether the user's tool gives up, or the one that holds the job has died.
absl::Status Worker::WatchFor(const std::function<absl::Status()>& work) {
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
        if (move_) move_->Cancel();
      }
      if (waiting[0].revents == 0) continue;
      Control control;
      if (!Receive(socket_, &control, nullptr, Now())) peer_gone_ = true;
      const int number = control.signal();
      if (!peer_gone_ && number != SIGINT && number != SIGTERM && number != SIGHUP) continue;
      cancelled_ = true;
      if (move_) move_->Cancel();
      if (group_) group_->Cancel();
    }
  });
  const absl::Status done = work();
  close(over[1]);
  watch.join();
  close(over[0]);
  if (tool >= 0) close(tool);
  if (tool_gone && !cancelled_) return absl::UnavailableError(kToolHasDied);
  // A checkpoint over several hosts may have been decided before, and the user may have the image.
  if (!cancelled_ || ((group_ || giver_) && done.ok())) return done;
  return absl::CancelledError("interrupted");
}

// What has become of the job is not known: then it must not go on here, too. Nothing is lost: the image stays.
void Worker::KeepDoubtful() {
  doubtful_ = true;
  const std::string kept = settings_.spool.substr(0, settings_.spool.rfind('/')) + "/doubtful-" +
                           std::to_string(peer_.account.user) + "-" + request_.job() + "-" +
                           spool_.substr(spool_.rfind('-') + 1);
  const bool stays = rename(spool_.c_str(), kept.c_str()) == 0;
  spool_.clear();  // in no case to be removed
  Tell(Reply::NOTE, 0,
       host_ + " was asked to resume the job, and has not answered since. The job has ended on this host. Check on " +
           host_ + " whether it runs (cr-ps). If it does not, root can restart it on this host: cr-restart " +
           (stays ? kept : settings_.spool) + kImages);
}

absl::Status Worker::MoveImage() {
  const std::string image = ckptfmt::NewestImageIn(spool_ + kImages);
  CR_ASSIGN_OR_RETURN(const ckptfmt::OpenedFolder folder, ckptfmt::OpenedFolder::Open(image));
  CR_RETURN_IF_ERROR(SignImage(folder, key_, peer_.account.user, PartOf()));
  if (!move_) {
    CR_ASSIGN_OR_RETURN(move_, MoveSource::Open(host_, settings_.tls));
  }
  const uint64_t before = move_->sent_bytes();
  CR_RETURN_IF_ERROR(WatchFor([&] {
    if (rounds_.empty()) CR_RETURN_IF_ERROR(AnnounceMove(image));
    return move_->SendImage(folder);
  }));
  if (!last_) {
    rounds_.Add(move_->sent_bytes() - before);
    return absl::OkStatus();
  }
  MoveRestore restore;
  restore.set_umask(request_.umask());
  restore.set_output(output_);
  restore.set_error(error_output_);
  CR_RETURN_IF_ERROR(WatchFor([&] { return move_->Restore(restore); }));
  // The tool holds the job. Without it, the job may run.
  siginfo_t tool = {};
  if (waitid(P_PID, id_t(child_), &tool, WEXITED | WNOHANG | WNOWAIT) != 0 || tool.si_pid != 0)
    return absl::UnavailableError(kToolHasDied);
  const absl::Status runs = move_->GoOn();
  if (absl::IsUnavailable(runs)) {
    KeepDoubtful();
    return absl::OkStatus();
  }
  moved_ = runs.ok();
  return runs;
}

// After the tool's first run: the others, of which the last one ends the job here, and the report. The exit code for
// the user's tool.
int Worker::FinishMove(int code) {
  const auto told = [](int fd) {
    std::string text(4000, '\0');
    text.resize(size_t(std::max<ssize_t>(pread(fd, &text[0], text.size(), 0), 0)));
    return text;
  };
  std::string error = move_problem_;
  while (code == 0 && !cancelled_ && !last_) {
    last_ = !rounds_.NeedsAnother();
    if (last_) arguments_.insert(arguments_.begin() + 1, "--stop");
    // What BecomeTool has added was the child's.
    absl::Status started = OpenStreams();
    if (started.ok()) started = StartTool();
    if (!started.ok()) error = std::string(started.message());
    code = started.ok() ? FollowTool() : 1;
  }
  if (moved_ || doubtful_) {
    // Whatever has become of the tool.
    if (checkpoint::JobIsAlive(job_)) kill(job_.init_pid(), SIGKILL);
    if (doubtful_) {
      Log(host_ + " does not say whether the job has moved there");
      return 1;
    }
    Log("moved to " + host_);
    const std::string said = told(tool_output_), name = "\"paused_seconds\": ";
    const size_t at = said.find(name);
    const double paused = at == std::string::npos ? 0 : atof(said.c_str() + at + name.size());
    const double seconds = SecondsSince(begun_);
    const uint64_t before = rounds_.total();
    const size_t rounds = rounds_.bytes().size();
    const uint64_t after = move_->sent_bytes() - before;
    settings_.counters->bytes_before += before;
    settings_.counters->bytes_in_pause += after;
    settings_.counters->paused_us += uint64_t(paused * 1e6);
    if (json_) {
      JsonWriter json(JsonWriter::kSpaced);
      json.BeginOutput();
      json.Member("host", host_);
      json.RealMember("seconds", seconds, 3);
      json.RealMember("paused_seconds", paused, 3);
      json.Member("rounds", rounds);
      json.Begin("bytes_before", '[');
      for (const uint64_t bytes : rounds_.bytes()) json.Value(bytes);
      json.End(']');
      json.Member("bytes_in_pause", after);
      json.End('}');
      const std::string line = json.text() + "\n";
      const ssize_t ignored = write(user_output_, line.data(), line.size());
      static_cast<void>(ignored);
    } else if (!quiet_) {
      char text[512];
      snprintf(text, sizeof(text),
               "moved to %s in %.1f s (the job stood still for %.1f s): %s sent while it ran, in %zu round%s, and %s "
               "while it stood still",
               host_.c_str(), seconds, paused, ByteText(double(before)).c_str(), rounds, rounds == 1 ? "" : "s",
               ByteText(double(after)).c_str());
      Tell(Reply::NOTE, 0, text);
    }
    return 0;
  }
  if (error.empty() && move_problem_.empty()) error = cancelled_ ? "interrupted" : told(tool_errors_);
  if (!move_problem_.empty()) error = move_problem_;
  while (!error.empty() && error.back() == '\n') error.pop_back();
  Log("was not moved to " + host_ + ": " + error);
  Tell(Reply::NOTE, 0,
       request_.job() + " was not moved: " + error +
           (checkpoint::JobIsAlive(job_) ? "; the job continues where it was" : ""));
  return 1;
}

bool Worker::Follow() {
  int code = !IsGroup() ? FollowTool() : every_ > 0 ? RepeatGroup() : DoGroupOnce();
  if (Moves()) code = FinishMove(code);
  // If the tool was killed, as when nobody waits for its answer any more.
  if (AsksForGpus()) checkpoint::RemoveJobFolder(job_folder_);
  if (Arrives() && !running_) SetMoveState(settings_.moves, request_.arrived().id(), kMoveFailed);
  Tell(Reply::ENDED, code);
  return tool_->runs_job ? code != kExitNotRestarted : code == 0;
}

// To the end of the tool: its exit code.
int Worker::FollowTool() {
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
    if (poll(waiting, 3, tool_->makes_image || Moves() ? kLookMs : -1) < 0) continue;
    signalfd_siginfo info;
    while (read(signals, &info, sizeof(info)) == ssize_t(sizeof(info))) {
    }
    if (waiting[1].revents != 0) PassOn();
    if (waiting[2].revents != 0) {
      char text[256];
      const ssize_t got = recv(announcements_, text, sizeof(text), 0);
      if (got <= 0) {
        close(announcements_);
        announcements_ = -1;
      } else {
        const absl::StatusOr<std::string> said = Do(std::string(text, size_t(got)));
        const std::string answer = said.ok() ? "+" + *said : "-" + std::string(said.status().message());
        send(announcements_, answer.data(), answer.size(), MSG_NOSIGNAL);
      }
    }
    LookForRoom();
  }
}

}  // namespace

bool IsJobName(const std::string& name) {
  const auto is_bad = [](unsigned char byte) { return byte <= ' ' || byte == '/' || byte >= 127; };
  return !name.empty() && name.size() <= kMostName && name[0] != '.' && name[0] != '-' &&
         std::none_of(name.begin(), name.end(), is_bad);
}

void ServeRequest(int socket, const Settings& settings, const Key& key) {
  Worker worker(socket, settings, key);
  const absl::Status begun = worker.Begin();
  const auto count = [&](bool failed) { settings.counters->CountRequest(worker.tool(), failed); };
  if (begun.ok() && worker.AsksForHosts()) {
    worker.AnswerHosts();
    return count(false);
  }
  if (begun.ok()) {
    worker.Tell(Reply::STARTED, 0);
    return count(!worker.Follow());
  }
  count(true);
  const std::string error(begun.message());
  worker.LogRefused(error);
  Reply reply;
  reply.set_kind(worker.IsElsewhere() ? Reply::ELSEWHERE : Reply::REFUSED);
  reply.set_text(Printable(error));
  Send(socket, reply);
}

void CleanSpool(const Settings& settings) {
  DIR* const list = opendir(settings.spool.c_str());
  while (const dirent* const entry = list ? readdir(list) : nullptr) {
    if (entry->d_name[0] == '.') continue;
    const std::string path = settings.spool + "/" + entry->d_name;
    const int folder = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    // A worker has its folder locked.
    if (folder >= 0 && flock(folder, LOCK_EX | LOCK_NB) == 0) RemoveOwnFolder(path);
    if (folder >= 0) close(folder);
  }
  if (list) closedir(list);
}

}  // namespace cuda_remote::host
