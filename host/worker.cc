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
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
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

#include "checkpoint/engine/engines.h"
#include "checkpoint/gpu/modules.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/caller.h"
#include "checkpoint/job/caller.pb.h"
#include "checkpoint/job/forwarded_signals.h"
#include "checkpoint/job/hostd_places.h"
#include "checkpoint/job/job.h"
#include "checkpoint/job/network.h"
#include "checkpoint/transaction/at_step.h"
#include "ckptfmt/folder.h"
#include "ckptfmt/image_reader.h"
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
#include "proto/base/text.h"
#include "proto/codec/json.h"
#include "proto/codec/text.h"

namespace cuda_remote::host {
namespace {

using checkpoint::Caller;

// The first message must be there by then.
constexpr int kFirstMessageSeconds = 10;
constexpr int kLookMs = 500;
constexpr size_t kMostName = 64;
constexpr size_t kMostKept = 10000;
constexpr size_t kMostHosts = 512;
constexpr int kExitNotRestarted = 125;  // as cr-restart's
constexpr int kExitInterrupted = 3;     // as cr-checkpoint's
// Of --every over hosts: how often it looks whether the user gives up, and whether the job has ended.
constexpr auto kWaitStep = std::chrono::milliseconds(100);
constexpr auto kLookForJob = std::chrono::seconds(10);
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
constexpr char kMove[] = "move";
constexpr char kGroup[] = "group";
constexpr char kRegroup[] = "regroup";

const std::vector<Tool>& Tools() {
  static const auto* const tools = new std::vector<Tool>{
      {"run", true, false, false, {"append", "io-uring", "adopt"}, {"server", "gpu", "output", "error", "address"}},
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
      {kDrainTool, false, false, false, {"undo"}, {"to-host", "to", "save", "reason", "timeout"}},
      {kHostsTool, false, false, false, {}, {"hosts"}},
  };
  return *tools;
}

void Log(const checkpoint::Account& account, const std::string& text) {
  fprintf(stderr, "cr-hostd: %s: %s\n", NameOf(account).c_str(), Printable(text).c_str());
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

bool MakeFolder(const std::string& path, std::string* error) {
  struct stat facts;
  if ((mkdir(path.c_str(), 0755) == 0 || errno == EEXIST) && lstat(path.c_str(), &facts) == 0 &&
      S_ISDIR(facts.st_mode) && facts.st_uid == 0 && (facts.st_mode & 022) == 0 && chmod(path.c_str(), 0755) == 0) {
    return true;
  }
  *error = "cannot make the folder " + path + ": " + strerror(errno);
  return false;
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

  // False and *error: nothing was started.
  bool Begin(std::string* error);
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
  const checkpoint::Account& account() const { return peer_.account; }
  void Tell(Reply::Kind kind, int value, const std::string& text = {});

 private:
  bool ReadRequest(std::string* error);
  bool FindArrived(std::string* error);
  bool ActForOwner(std::string* error);
  bool MakeJobsFolder(std::string* error);
  bool FindJob(std::string* error);
  bool MakeSpool(std::string* error);
  bool ListArguments(std::string* error);
  bool StartTool(std::string* error);
  [[noreturn]] void BecomeTool(int facts, int announcements, int failure);
  bool Do(const std::string& announced, std::string* said);
  void SilenceJob();
  void PassOn();
  void LookForRoom();
  int FollowTool();
  bool Drains() const { return tool_->name == std::string(kDrainTool); }
  // Of a move.
  bool Moves() const { return tool_->name == std::string(kMove); }
  bool BeginMove(std::string* error);
  bool OpenStreams(std::string* error);
  bool MoveImage(std::string* error);
  bool AnnounceMove(const std::string& image, std::string* error);
  bool WatchFor(const std::function<bool()>& work, std::string* error);
  void KeepDoubtful();
  int FinishMove(int code);
  // Of a checkpoint or a restart over several hosts: of the one who asks for it, and of a part.
  struct Outcome {
    std::string image;
    double seconds = 0, paused = 0;
  };
  bool IsGroup() const { return tool_->name == std::string(kGroup) || Regroups(); }
  bool Regroups() const { return tool_->name == std::string(kRegroup); }
  bool BeginGroup(std::string* error);
  bool DoGroup(Outcome* outcome, std::string* error);
  void TellGroup(const Outcome& outcome);
  int DoGroupOnce();
  int RepeatGroup();
  bool GroupIsOver();
  bool IsMember() const { return request_.has_member(); }
  bool Rejoins() const { return tool_->name == std::string(kRejoinTool); }
  bool FindMember(std::string* error);
  bool MakeImagesFolder(std::string* error);
  bool TakeMembersImage(std::string* error);
  bool AwaitOthers(SaveStep step, std::string* said);
  // Of a job that has come from another host.
  bool Arrives() const { return tool_->name == std::string(kArriveTool); }
  // Of one that may come, and the GPUs for it.
  bool AsksForGpus() const { return tool_->name == std::string(kGpusTool); }
  bool FindComing(std::string* error);
  bool AwaitGoOn(std::string* said);

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

bool Worker::ReadRequest(std::string* error) {
  const timeval limit = {kFirstMessageSeconds, 0}, none = {0, 0};
  setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  const bool read = Receive(socket_, &request_, &fds_);
  setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof(none));
  struct stat facts;
  if (!read || fds_.size() != kMostDescriptors || fstat(fds_[3], &facts) != 0 || !S_ISDIR(facts.st_mode)) {
    *error = "cr-hostd cannot read the request";
    return false;
  }
  if (request_.version() != kVersion) {
    *error = "cr-hostd speaks version " + std::to_string(kVersion) + " and this tool version " +
             std::to_string(request_.version()) + "; install the same version of both";
    return false;
  }
  for (size_t i = 0; i < 3; ++i) {
    if (IsHarmless(fds_[i])) continue;
    *error =
        "descriptor " + std::to_string(i) + " is a file of the kernel's, to which cr-hostd does not write; use a pipe";
    return false;
  }
  for (const Tool& tool : Tools()) {
    if (tool.name == request_.tool()) tool_ = &tool;
  }
  if (!tool_) {
    *error = "cr-hostd does not know the tool " + request_.tool();
    return false;
  }
  // The engine opens a pipe once more, for which it must be the user's: it is not to become hers by that.
  for (size_t i = 0; tool_->takes_image && i < 3; ++i) {
    if (!IsPipe(fds_[i]) || fstat(fds_[i], &facts) != 0 || facts.st_uid == peer_.account.user) continue;
    *error = "descriptor " + std::to_string(i) + " is a pipe that belongs to user " + std::to_string(facts.st_uid) +
             ", not to " + NameOf(peer_.account) + "; use a file, or a pipe of that user";
    return false;
  }
  return true;
}

// For the folders of the user's jobs. They are root's, and the user's processes pass through them.
bool Worker::MakeJobsFolder(std::string* error) {
  const std::string folder = checkpoint::UserFolder(settings_.socket, peer_.account.user);
  return MakeFolder(folder.substr(0, folder.rfind('/')), error) && MakeFolder(folder, error) &&
         MakeFolder(folder + "/cuda-remote", error) &&
         MakeFolder(checkpoint::UserJobsFolder(settings_.socket, peer_.account.user), error);
}

// The user's own job of that name, and its folder, which is root's.
bool Worker::FindJob(std::string* error) {
  if (!IsJobName(request_.job())) {
    *error = "\"" + request_.job() + "\" cannot be the name of a job: up to " + std::to_string(kMostName) +
             " printable characters without spaces and slashes, of which the first is neither a dot nor a dash";
    return false;
  }
  job_folder_ = checkpoint::UserJobsFolder(settings_.socket, peer_.account.user) + "/" + request_.job();
  if (tool_->runs_job) return MakeJobsFolder(error);
  checkpoint::Job job;
  if (!ReadJob(job_folder_, &job, error)) return false;
  if (job.has_user() && job.user().id() == peer_.account.user) return true;
  *error = "the job " + request_.job() + " is another user's";
  return false;
}

// What an operator asks for is done as the job's owner. Nothing that the operator has decided, such as an environment,
// goes to processes that run as the owner.
bool Worker::ActForOwner(std::string* error) {
  if (request_.user().empty() && !Drains()) return true;
  if (!IsOperator(settings_.operators, peer_.account)) {
    *error = NameOf(peer_.account) + " is not an operator of this host (cr-hostd --operator); " +
             (Drains() ? "cr-drain needs root, or an operator" : "users save their own jobs only");
    return false;
  }
  if (Drains()) return true;
  if (tool_->name != std::string("checkpoint")) {
    *error = "operators save other users' jobs, and do nothing else with them";
    return false;
  }
  checkpoint::Account owner;
  if (!checkpoint::FindAccount(request_.user(), &owner, error)) return false;
  Log(peer_.account, "asks as an operator for " + NameOf(owner));
  peer_.account = owner;
  request_.clear_environment();
  return true;
}

bool Worker::MakeSpool(std::string* error) {
  std::string name = settings_.spool + "/" + std::to_string(peer_.account.user) + "-XXXXXX";
  // The user's process that copies an image looks through this folder; nobody comes here by a path.
  if (!mkdtemp(&name[0]) || chmod(name.c_str(), 0711) != 0 ||
      (spool_fd_ = open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0 ||
      flock(spool_fd_, LOCK_EX | LOCK_NB) != 0) {
    *error = "cannot make a folder in " + settings_.spool + ": " + strerror(errno);
    return false;
  }
  spool_ = name;
  if (HasRoom(spool_, 0)) return true;
  *error = "there is no room left in cr-hostd's folder " + settings_.spool;
  return false;
}

bool Worker::ListArguments(std::string* error) {
  const std::string program = tool_->program ? tool_->program : std::string("cr-") + tool_->name;
  program_ = checkpoint::FindCompanion(program);
  if (program_.empty()) {
    *error = program + " is not beside cr-hostd: the installation is incomplete";
    return false;
  }
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
      *error = "--" + option.name() + " takes a number from 1 to " + std::to_string(kMostKept);
      return false;
    }
    if (!known.count(option.name())) {
      *error = "--" + option.name() + " is not available through cr-hostd";
      return false;
    }
    if (option.value().find('\0') != std::string::npos) {
      *error = "--" + option.name() + " has a value that no command line can have";
      return false;
    }
    // In one word, so that no value is taken for an option.
    arguments_.push_back("--" + option.name() + (option.flag() ? "" : "=" + option.value()));
  }
  if (tool_->runs_job && !job_folder_.empty()) arguments_.insert(arguments_.end(), {"--job-dir", job_folder_});
  if (Moves()) {
    arguments_.insert(arguments_.end(), {"--quiet", "--json", "--keep=2", job_folder_, spool_ + kImages});
    return true;
  }
  if (Arrives()) arguments_.insert(arguments_.end(), {"--append", "--quiet"});
  if (Rejoins() && !output_.empty()) arguments_.push_back("--output=" + output_);
  if (Rejoins() && !error_output_.empty()) arguments_.push_back("--error=" + error_output_);
  if (IsMember()) arguments_.push_back("--quiet");
  if (tool_->makes_image) arguments_.insert(arguments_.end(), {job_folder_, spool_ + kImage});
  if (tool_->takes_image) arguments_.push_back(spool_ + kImage);
  if (AsksForGpus())
    arguments_.insert(arguments_.end(), {"--describe-gpus", "--job-dir", job_folder_});
  else if (!tool_->runs_job && !tool_->makes_image && !Drains())
    arguments_.push_back(job_folder_);
  return true;
}

// Whose job it is. As the source has vouched for it, and this host's cr-hostd has found it right.
bool Worker::FindComing(std::string* error) {
  const ArrivedJob& arrived = request_.arrived();
  if (!checkpoint::FindAccount(std::to_string(arrived.user()), &peer_.account, error)) return false;
  peer_.account.group = arrived.group();
  peer_.account.groups.assign(arrived.groups().begin(), arrived.groups().end());
  if (!AsksForGpus()) return true;
  // Of no job; a name that none can have.
  job_folder_ = checkpoint::UserJobsFolder(settings_.socket, arrived.user()) + "/.gpus-" + std::to_string(getpid());
  return MakeJobsFolder(error);
}

bool Worker::FindArrived(std::string* error) {
  if (!FindComing(error)) return false;
  char path[4096];
  const ssize_t length = readlink(("/proc/self/fd/" + std::to_string(fds_[3])).c_str(), path, sizeof(path));
  spool_.assign(path, size_t(std::max<ssize_t>(length, 0)));
  std::error_code ignored;
  if (spool_.substr(0, spool_.rfind('/')) == std::filesystem::canonical(settings_.spool, ignored)) {
    spool_fd_ = fcntl(fds_[3], F_DUPFD_CLOEXEC, 3);  // with its lock
    return FindJob(error);
  }
  spool_.clear();
  *error = "what has arrived is not in cr-hostd's folder";
  return false;
}

// As the coordinator has vouched for her, and this host's cr-hostd has found it right.
bool Worker::FindMember(std::string* error) {
  const GroupMember& member = request_.member();
  if (!checkpoint::FindAccount(std::to_string(member.user()), &peer_.account, error)) return false;
  peer_.account.group = member.group();
  peer_.account.groups.assign(member.groups().begin(), member.groups().end());
  if (image_.empty() || image_[0] != '/' || image_.find('\0') != std::string::npos) {
    *error = "no image is named";
    return false;
  }
  if (Rejoins()) return MakeSpool(error) && TakeMembersImage(error);
  return FindJob(error) && MakeSpool(error) && MakeImagesFolder(error);
}

bool Worker::MakeImagesFolder(std::string* error) {
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
    *error = "cannot make the folder " + one + ": " + strerror(errno);
    return false;
  }
  return true;
}

// What an image says of its job, and of the job's processes.
bool ReadFacts(const std::string& image, std::unique_ptr<ckptfmt::ImageReader>* reader, checkpoint::SavedSummary* saved,
               std::string* error) {
  using ckptfmt::ImageReader;
  auto opened = ImageReader::Open(image, ImageReader::Owner::kTrusted, ImageReader::Parts::kFacts);
  if (!opened.ok()) {
    *error = std::string(opened.status().message());
    return false;
  }
  *reader = std::move(*opened);
  std::string facts;
  const auto engine = checkpoint::EngineOf((*reader)->info(), &facts);
  if (engine) return engine->Summarize(facts, saved, error);
  *error = "the image does not describe the job's processes";
  return false;
}

// The image of a part that is restarted, and what the part's name and streams are to be.
bool Worker::TakeMembersImage(std::string* error) {
  if (const std::string reason = checkpoint::DrainingReason(settings_.socket); !reason.empty()) {
    *error = "this host accepts no jobs at present: " + reason;
    return false;
  }
  std::unique_ptr<ckptfmt::ImageReader> image;
  checkpoint::SavedSummary saved;
  if (!TakeImage(peer_.account, key_, spool_ + kImage, &image_, &checkpoint_, error) ||
      !ReadFacts(spool_ + kImage, &image, &saved, error)) {
    return false;
  }
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
  return FindJob(error);
}

bool Worker::BeginGroup(std::string* error) {
  if (settings_.tls.empty()) {
    *error = "this cr-hostd saves and restarts no jobs over several hosts: it has no certificate (cr-hostd --tls-cert)";
    return false;
  }
  if (!Regroups() && !IsJobName(request_.job())) {
    *error = "\"" + request_.job() +
             "\" cannot be the name of a job; with --hosts, JOB is the name that it has on all hosts "
             "(cr-run --name)";
    return false;
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
      *error = "--" + option.name() + " " + option.value() + " is out of range";
      return false;
    } else {
      SaveOption* const passed = group_begin_.add_options();
      passed->set_name(option.name());
      passed->set_value(option.value());
      passed->set_flag(option.flag());
    }
  }
  checkpoint::Account named;
  if (!ParseGroup(host_, request_.job(), &parts_, error) ||
      !checkpoint::FindAccount(std::to_string(peer_.account.user), &named, error)) {
    return false;
  }
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
  return true;
}

bool Worker::Begin(std::string* error) {
  ucred facts = {};
  socklen_t size = sizeof(facts);
  const bool root = getsockopt(socket_, SOL_SOCKET, SO_PEERCRED, &facts, &size) == 0 && facts.uid == 0;
  if (!root && !FindPeer(socket_, &peer_, error)) return false;
  if (!ReadRequest(error)) {
    elsewhere_ = false;
    return false;
  }
  if (AsksForHosts()) return true;
  const bool comes = Arrives() || AsksForGpus();
  const bool of_hosts = comes || Rejoins() || tool_->name == std::string(kMemberTool);
  if (root != of_hosts || request_.has_arrived() != comes || IsMember() != (of_hosts && !comes)) {
    *error = root ? "root needs no cr-hostd: start the tool without it"
                  : "cr-hostd does not know the tool " + request_.tool();
    elsewhere_ = root;
    return false;
  }
  elsewhere_ = false;
  if (!root && !ActForOwner(error)) return false;
  // The user's names of files are meant from there, and are only used with her rights.
  if (fchdir(fds_[3]) != 0) {
    *error = std::string("cr-hostd cannot enter the working folder: ") + strerror(errno);
    return false;
  }
  image_ = request_.image();
  if (Arrives()) {
    if (!FindArrived(error) || !ListArguments(error)) return false;
    Log(peer_.account, "job " + request_.job() + " arrives " + image_);
    return StartTool(error);
  }
  if (AsksForGpus()) return FindComing(error) && ListArguments(error) && StartTool(error);
  if (IsMember()) {
    if (!FindMember(error) || !ListArguments(error)) return false;
    Log(peer_.account,
        "a part of job " + request_.job() + (Rejoins() ? " is restarted" : " is saved") + ", image " + image_);
    return StartTool(error);
  }
  if (Drains()) {
    Log(peer_.account, "cr-drain");
    return ListArguments(error) && StartTool(error);
  }
  if (IsGroup()) {
    Log(peer_.account,
        std::string(tool_->program) + " of job " + request_.job() + " on several hosts, image " + image_);
    return BeginGroup(error);
  }
  if ((tool_->takes_image || tool_->makes_image) && (image_.empty() || image_.find('\0') != std::string::npos)) {
    *error = "no image is named";
    return false;
  }
  if (const std::string reason = checkpoint::DrainingReason(settings_.socket); tool_->runs_job && !reason.empty()) {
    *error = "this host accepts no jobs at present: " + reason;
    return false;
  }
  // A restarted job has the name that it had, if it gets no other one.
  const bool named = !tool_->takes_image || !request_.job().empty();
  if ((named ? !FindJob(error) : !MakeJobsFolder(error)) ||
      ((tool_->takes_image || tool_->makes_image || Moves()) && !MakeSpool(error)) ||
      (tool_->takes_image && !TakeImage(peer_.account, key_, spool_ + kImage, &image_, nullptr, error))) {
    return false;
  }
  if (!ListArguments(error) || (Moves() && !BeginMove(error))) return false;
  Log(peer_.account, std::string("cr-") + tool_->name + (request_.job().empty() ? "" : " of job " + request_.job()) +
                         (image_.empty() ? "" : ", image " + image_));
  return StartTool(error);
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
  checkpoint::Account account;
  std::string error;
  if (hosts.size() > kMostHosts) {
    error = std::to_string(hosts.size()) + " hosts are more than the " + std::to_string(kMostHosts) +
            " that can be asked at the same time";
  } else if (!hosts.empty() && settings_.tls.empty()) {
    error = "this cr-hostd asks no other hosts: it has no certificate (cr-hostd --tls-cert)";
  } else if (user == 0 || checkpoint::FindAccount(std::to_string(user), &account, &error)) {
    MovedUser moved;
    moved.set_id(user);
    moved.set_name(account.name);
    moved.set_group(peer_.account.group);
    for (const gid_t group : peer_.account.groups) moved.add_groups(group);
    // This host is one of them, if nobody has said which.
    if (!named) *reply.mutable_hosts()->add_hosts() = DescribeHost(settings_, user);
    reply.mutable_hosts()->MergeFrom(AskHosts(hosts, settings_.tls, moved));
  }
  if (error.empty()) Send(socket_, reply);
  if (!error.empty()) Tell(Reply::REFUSED, 0, error);
}

// In the child.
void Worker::BecomeTool(int facts, int announcements, int failure) {
  const auto fail = [&](const std::string& text) {
    const ssize_t ignored = write(failure, text.data(), text.size());
    _exit(ignored > 0 ? 125 : 126);
  };
  std::string error;
  setpgid(0, 0);
  // A job may leave a core, as its user; root's tool must not leave one in the user's folder.
  const rlimit no_core = {0, 0};
  if (!tool_->runs_job) setrlimit(RLIMIT_CORE, &no_core);
  // A job goes on if this process's parent is killed; what only works on one gives up.
  if (!tool_->runs_job) prctl(PR_SET_PDEATHSIG, SIGTERM);
  const bool asked_here = !request_.has_arrived() && !IsMember();
  if (asked_here ? !JoinPeer(peer_, tool_->runs_job, &error)
                 : !JoinUserControlGroup(peer_.account, settings_.user_cgroup, &error)) {
    fail(error);
  }
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

bool Worker::StartTool(std::string* error) {
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
    *error = std::string("cannot start the tool: ") + strerror(errno);
    return false;
  }
  facts.set_announcements(ends[1]);
  const std::string bytes = facts.SerializeAsString();
  if (write(memory, bytes.data(), bytes.size()) != ssize_t(bytes.size())) {
    *error = std::string("cannot start the tool: ") + strerror(errno);
    return false;
  }
  fflush(nullptr);
  child_ = fork();
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
  if (child_ > 0 && got <= 0) return true;
  *error = child_ < 0 ? std::string("fork: ") + strerror(errno) : std::string(text, size_t(got));
  if (child_ > 0) waitpid(child_, nullptr, 0);
  return false;
}

// What the tool waits for. *said: the answer; if false, what went wrong.
bool Worker::Do(const std::string& announced, std::string* said) {
  if (announced == checkpoint::kImageBegins && tool_->makes_image) {
    giver_.reset();
    giver_ = ImageGiver::Begin(peer_.account, spool_fd_, image_, keep_, said);
    if (giver_) *said = keep_ > 0 ? giver_->dir() : image_;
    return giver_ != nullptr;
  }
  if (announced == checkpoint::kImageComplete && tool_->makes_image && giver_) {
    const auto folder = ckptfmt::OpenedFolder::Open(spool_ + kImage);
    if (!folder.ok()) *said = std::string(folder.status().message());
    std::string note;
    const PartOf part = {request_.member().id(), request_.member().whole_job()};
    const bool given = folder.ok() && SignImage(*folder, key_, peer_.account.user, part, said) &&
                       GiveFiles(peer_.account, spool_fd_, said) && giver_->Copy(said) &&
                       (!IsMember() || AwaitOthers(SAVE_COMPLETE, said)) && giver_->Publish(&note, said);
    giver_.reset();
    RemoveOwnFolder(spool_ + kImage);
    if (!note.empty()) Tell(Reply::NOTE, 0, note);
    return given;
  }
  if (announced == checkpoint::kImageBegins && Moves()) {
    // So the user's cr-run says where her job is.
    if (last_) *said = checkpoint::kMovedTo + host_;
    return true;
  }
  if (announced == checkpoint::kImageComplete && Moves()) {
    if (MoveImage(&move_problem_)) return true;
    *said = move_problem_;
    return false;
  }
  if (announced == checkpoint::kImageRestored && Arrives()) return AwaitGoOn(said);
  if (announced == checkpoint::kJobReady && IsMember()) return AwaitOthers(SAVE_READY, said);
  if (announced == checkpoint::kJobLocked && IsMember()) return AwaitOthers(SAVE_LOCKED, said);
  if (announced == checkpoint::kJobStill && IsMember()) return AwaitOthers(SAVE_STILL, said);
  if (announced == checkpoint::kJobDumped && IsMember()) return AwaitOthers(SAVE_DUMPED, said);
  if (announced == checkpoint::kImageRestored && Rejoins()) return released_ = AwaitOthers(RESTART_HELD, said);
  if (announced == checkpoint::kImageUsed && Rejoins()) {
    if (!AwaitOthers(RESTART_RUNS, said) || (!peer_gone_ && !AwaitOthers(RESTART_SURE, said))) return false;
    goes_on_ = running_ = true;
    RemoveOwnFolder(spool_);
    spool_.clear();
    Tell(Reply::RUNNING, 0);
    return true;
  }
  if (announced == checkpoint::kImageUsed && tool_->takes_image) {
    RemoveOwnFolder(spool_);
    spool_.clear();
    if (!Arrives()) return true;
    running_ = true;
    SetMoveState(settings_.moves, request_.arrived().id(), kMoveRuns);
    Tell(Reply::RUNNING, 0);
    return true;
  }
  *said = "cr-hostd cannot read the request";
  return false;
}

// Before its tool is killed, which then cannot do it. The kernel keeps connections whose other end does not answer, and
// with them the job's address, for minutes: nobody may answer for that address then.
void Worker::SilenceJob() {
  const std::string folder = checkpoint::UserJobsFolder(settings_.socket, peer_.account.user);
  std::error_code failed;
  for (const auto& entry : std::filesystem::directory_iterator(folder, failed)) {
    checkpoint::Job job;
    std::string ignored;
    if (!checkpoint::ReadJob(entry.path().string(), &job, &ignored) || job.runner_pid() != child_) continue;
    if (job.has_network()) checkpoint::SilenceNetwork(job.init_pid(), &ignored);
  }
}

void Worker::PassOn() {
  Control control;
  if (!Receive(socket_, &control)) {
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
bool Worker::AwaitGoOn(std::string* said) {
  Tell(Reply::RESTORED, 0);
  Control control;
  *said = "the source host has not released the job";
  if (!Receive(socket_, &control) || !control.go_on()) {
    peer_gone_ = true;
    return false;
  }
  // Not if the source was told meanwhile that it is too late.
  goes_on_ = BeginMoveState(settings_.moves, request_.arrived().id(), kMoveGoesOn);
  if (goes_on_) said->clear();
  return goes_on_;
}

bool Worker::AwaitOthers(SaveStep step, std::string* said) {
  Tell(Reply::REACHED, step, MoveName(checkpoint_));
  Control control;
  if (Receive(socket_, &control) && control.go_on()) return true;
  peer_gone_ = true;
  *said = Rejoins() ? "the restart over the hosts was cancelled" : "the checkpoint over the hosts was cancelled";
  if (step != SAVE_COMPLETE && step != RESTART_RUNS && step != RESTART_SURE) return false;
  // It may be decided.
  const SaveDecision decision = AskDecision(request_.member().decider(), request_.member().id(), settings_.tls);
  if (decision == SaveDecision::kUnknown) {
    *said = "the cr-hostd of " + request_.member().decider() + " does not say whether the " +
            (Rejoins() ? "restart is complete; the part of the job on this host ends"
                       : "checkpoint is complete; on this host it is discarded");
  }
  return decision == SaveDecision::kCounts;
}

// One checkpoint, or restart, of all parts.
bool Worker::DoGroup(Outcome* outcome, std::string* error) {
  const auto begun = Now();
  const auto note = [this](const std::string& text) {
    if (!quiet_) Tell(Reply::NOTE, 0, text);
  };
  outcome->image = image_;
  if (sets_ && (!sets_->Look(error) ||
                !(Regroups() ? sets_->Newest(&outcome->image, error) : sets_->Next(&outcome->image, error)))) {
    return false;
  }
  group_ = Group::Open(parts_, settings_.tls, error);
  if (!group_) return false;
  const bool done = WatchFor([&] { return group_->Run(group_begin_, outcome->image, key_, note, error); }, error);
  outcome->paused = group_->paused_seconds();
  group_.reset();
  std::string problem;
  if (done && keep_ > 0) {
    checkpoint::AtStep("remove old sets");
    if (!sets_->Prune(request_.job(), keep_, &problem))
      note("the checkpoint is complete, but old ones could not be removed: " + problem + "; the next one tries again");
  }
  outcome->seconds = SecondsSince(begun);
  return done;
}

void Worker::TellGroup(const Outcome& outcome) {
  if (json_) {
    JsonWriter json(JsonWriter::kSpaced);
    json.Begin('{');
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
  std::string error;
  if (DoGroup(&outcome, &error)) {
    TellGroup(outcome);
    return 0;
  }
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
    std::string error;
    const bool done = DoGroup(&outcome, &error);
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
      return true;
    };
    WatchFor(wait, &error);
    if (cancelled_) return kExitInterrupted;
    if (!over) continue;
    if (last.empty()) Tell(Reply::NOTE, 0, "the job has ended, and there is no image of it from this run");
    return last.empty() ? checkpoint::kExitFailure : 0;
  }
}

// Streams for the tool, whose words are this worker's to say.
bool Worker::OpenStreams(std::string* error) {
  fds_ = {open("/dev/null", O_RDWR | O_CLOEXEC), memfd_create("output", MFD_CLOEXEC),
          memfd_create("errors", MFD_CLOEXEC)};
  for (int* const kept : {&tool_output_, &tool_errors_}) {
    if (*kept >= 0) close(*kept);
  }
  tool_output_ = fcntl(fds_[1], F_DUPFD_CLOEXEC, 3);
  tool_errors_ = fcntl(fds_[2], F_DUPFD_CLOEXEC, 3);
  if (fds_[0] >= 0 && tool_output_ >= 0 && tool_errors_ >= 0) return true;
  *error = std::string("no descriptors: ") + strerror(errno);
  return false;
}

bool Worker::BeginMove(std::string* error) {
  if (settings_.tls.empty()) {
    *error = "this cr-hostd moves no jobs to other hosts: it has no certificate (cr-hostd --tls-cert)";
    return false;
  }
  if (host_.empty()) {
    *error = "no host is named (--to-host)";
    return false;
  }
  if (!checkpoint::ReadJob(job_folder_, &job_, error)) return false;
  if (job_.terminal()) {
    *error =
        "the job has a terminal, which cannot go to another host; start it without one (cr-run ... < /dev/null | cat)";
    return false;
  }
  if (server_.empty() && job_.server().compare(0, 5, "unix:") == 0) {
    *error = "the job uses the GPU server " + job_.server() + " of this host; name one for it there with --to";
    return false;
  }
  if (server_.empty()) server_ = job_.server();
  user_output_ = fcntl(fds_[1], F_DUPFD_CLOEXEC, 3);
  for (const int fd : fds_) close(fd);
  return OpenStreams(error);
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
bool Worker::AnnounceMove(const std::string& image, std::string* error) {
  std::unique_ptr<ckptfmt::ImageReader> opened;
  checkpoint::SavedSummary saved;
  if (!ReadFacts(image, &opened, &saved, error)) return false;
  const ckptfmt::ImageInfo& info = opened->info();
  MoveBegin begin;
  begin.set_version(kVersion);
  std::string id(16, '\0');
  if (getrandom(&id[0], id.size(), 0) != ssize_t(id.size())) {
    *error = std::string("no random numbers: ") + strerror(errno);
    return false;
  }
  begin.set_id(id);
  begin.set_host(info.host);
  begin.set_job(request_.job());
  checkpoint::Account named;
  if (!checkpoint::FindAccount(std::to_string(peer_.account.user), &named, error)) return false;
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
    *error = "the job's descriptor " + std::to_string(stream.fd) +
             " is a pipe or a terminal, which stays here; name a "
             "file of " +
             host_ + " for it with " + option;
    return false;
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
  MoveChecked checked;
  if (!move_->Begin(begin, &checked, error)) return false;
  std::vector<std::string> missing(checked.missing().begin(), checked.missing().end());
  if (checked.has_gpus() && !checkpoint::ListRefusals(*opened, DevicesOf(checked.gpus()), host_, &missing, error)) {
    return false;
  }
  for (const std::string& note : checked.notes()) {
    if (!quiet_) Tell(Reply::NOTE, 0, note);
  }
  if (missing.empty()) return true;
  *error = host_ + " lacks what the job needs, and nothing was sent: ";
  for (const std::string& one : missing) *error += (&one == &missing.front() ? "" : "; ") + one;
  return false;
}

// Does it, and looks meanwhile whether the user's tool gives up, or the one that holds the job has died.
bool Worker::WatchFor(const std::function<bool()>& work, std::string* error) {
  int over[2];
  if (pipe2(over, O_CLOEXEC) != 0) {
    *error = std::string("pipe: ") + strerror(errno);
    return false;
  }
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
      if (!Receive(socket_, &control)) peer_gone_ = true;
      const int number = control.signal();
      if (!peer_gone_ && number != SIGINT && number != SIGTERM && number != SIGHUP) continue;
      cancelled_ = true;
      if (move_) move_->Cancel();
      if (group_) group_->Cancel();
    }
  });
  const bool done = work();
  close(over[1]);
  watch.join();
  close(over[0]);
  if (tool >= 0) close(tool);
  if (tool_gone && !cancelled_) {
    *error = "cr-checkpoint has died";
    return false;
  }
  // A checkpoint over several hosts may have been decided before.
  if (!cancelled_ || (group_ && done)) return done;
  *error = "interrupted";
  return false;
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

bool Worker::MoveImage(std::string* error) {
  const std::string image = ckptfmt::NewestImageIn(spool_ + kImages);
  const auto folder = ckptfmt::OpenedFolder::Open(image);
  if (!folder.ok()) {
    *error = std::string(folder.status().message());
    return false;
  }
  if (!SignImage(*folder, key_, peer_.account.user, PartOf(), error)) return false;
  if (!move_) move_ = MoveSource::Open(host_, settings_.tls, error);
  if (!move_) return false;
  const uint64_t before = move_->sent_bytes();
  if (!WatchFor([&] { return (!rounds_.empty() || AnnounceMove(image, error)) && move_->SendImage(*folder, error); },
                error))
    return false;
  if (!last_) {
    rounds_.Add(move_->sent_bytes() - before);
    return true;
  }
  MoveRestore restore;
  restore.set_umask(request_.umask());
  restore.set_output(output_);
  restore.set_error(error_output_);
  if (!WatchFor([&] { return move_->Restore(restore, error); }, error)) return false;
  // The tool holds the job. Without it, the job may run.
  siginfo_t tool = {};
  if (waitid(P_PID, id_t(child_), &tool, WEXITED | WNOHANG | WNOWAIT) != 0 || tool.si_pid != 0) {
    *error = "cr-checkpoint has died";
    return false;
  }
  switch (move_->GoOn(error)) {
    case MoveSource::Outcome::kRunning:
      moved_ = true;
      return true;
    case MoveSource::Outcome::kUnknown:
      KeepDoubtful();
      return true;
    default:
      return false;
  }
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
    code = OpenStreams(&error) && StartTool(&error) ? FollowTool() : 1;
  }
  if (moved_ || doubtful_) {
    // Whatever has become of the tool.
    if (checkpoint::JobIsAlive(job_)) kill(job_.init_pid(), SIGKILL);
    if (doubtful_) return 1;
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
      json.Begin('{');
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
  Tell(Reply::NOTE, 0,
       request_.job() + " was not moved: " + error +
           (checkpoint::JobIsAlive(job_) ? "; the job continues where it was" : ""));
  return 1;
}

bool Worker::Follow() {
  int code = !IsGroup() ? FollowTool() : every_ > 0 ? RepeatGroup() : DoGroupOnce();
  if (Moves()) code = FinishMove(code);
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
      Log(peer_.account, std::string("cr-") + tool_->name + " has ended with " + std::to_string(code));
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
        std::string said;
        const bool done = Do(std::string(text, size_t(got)), &said);
        const std::string answer = (done ? "+" : "-") + said;
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
  std::string error;
  const bool begun = worker.Begin(&error);
  const auto count = [&](bool failed) { settings.counters->CountRequest(worker.tool(), failed); };
  if (begun && worker.AsksForHosts()) {
    worker.AnswerHosts();
    return count(false);
  }
  if (begun) {
    worker.Tell(Reply::STARTED, 0);
    return count(!worker.Follow());
  }
  count(true);
  Log(worker.account(), "refused: " + error);
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
