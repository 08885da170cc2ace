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
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <set>
#include <vector>

#include "checkpoint/job/account.h"
#include "checkpoint/job/caller.h"
#include "checkpoint/job/caller.pb.h"
#include "checkpoint/job/forwarded_signals.h"
#include "checkpoint/job/hostd_places.h"
#include "checkpoint/job/job.h"
#include "host/exchange.h"
#include "host/peer.h"
#include "host/request.pb.h"
#include "host/wire.h"
#include "proto/codec/text.h"

namespace cuda_remote::host {
namespace {

using checkpoint::Caller;

// The first message must be there by then.
constexpr int kFirstMessageSeconds = 10;
constexpr int kLookMs = 500;
constexpr size_t kMostName = 64;
constexpr char kImage[] = "/image";
// What root's tools get of cr-hostd's own environment, and what of it they must not get.
constexpr const char* kNotForTools[] = {"CUDA_REMOTE_SERVER", "CUDA_REMOTE_JOB_DIR", "CUDA_REMOTE_JOB",
                                        "CUDA_REMOTE_GPU", "XDG_RUNTIME_DIR"};

// What root's tools accept of a user. Everything else, such as --user, --job-dir and --trust-owner, is root's to say.
struct Tool {
  const char* name;
  bool runs_job;    // in the foreground until the job ends
  bool takes_image;  // reads one
  bool makes_image;
  std::set<std::string> flags, values;
};

const std::vector<Tool>& Tools() {
  static const auto* const tools = new std::vector<Tool>{
      {"run", true, false, false, {"append", "io-uring"}, {"server", "gpu", "output", "error"}},
      {"checkpoint",
       false,
       false,
       true,
       {"stop", "tcp-close", "json", "times", "quiet"},
       {"every", "timeout", "compress", "pool"}},
      {"restart",
       true,
       true,
       false,
       {"append", "cut-back", "times", "quiet"},
       {"server", "gpu", "map", "cut", "output", "error"}},
      {"migrate", false, false, false, {"json", "quiet"}, {"to", "gpu", "map", "timeout"}},
  };
  return *tools;
}

void Log(const checkpoint::Account& account, const std::string& text) {
  fprintf(stderr, "cr-hostd: %s: %s\n", NameOf(account).c_str(), Printable(text).c_str());
}

// A name that is a part of a path, and readable.
bool IsName(const std::string& name) {
  const auto is_bad = [](unsigned char byte) { return byte <= ' ' || byte == '/' || byte >= 127; };
  return !name.empty() && name.size() <= kMostName && name[0] != '.' && name[0] != '-' &&
         std::none_of(name.begin(), name.end(), is_bad);
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

class Worker {
 public:
  Worker(int socket, const Settings& settings, const Key& key) : socket_(socket), settings_(settings), key_(key) {}
  ~Worker();

  // False and *error: nothing was started.
  bool Begin(std::string* error);
  // Whether that was because of the process that asks, whatever it asks for.
  bool IsElsewhere() const { return elsewhere_; }
  // Until the tool has ended.
  void Follow();
  const checkpoint::Account& account() const { return peer_.account; }
  void Tell(Reply::Kind kind, int value, const std::string& text = {});

 private:
  bool ReadRequest(std::string* error);
  bool FindJob(std::string* error);
  bool MakeSpool(std::string* error);
  bool ListArguments(std::string* error);
  bool StartTool(std::string* error);
  [[noreturn]] void BecomeTool(int facts, int announcements, int failure);
  std::string Do(const std::string& announced);
  void PassOn();
  void LookForRoom();

  const int socket_;
  const Settings& settings_;
  const Key& key_;
  Peer peer_;
  Request request_;
  std::vector<int> fds_;
  const Tool* tool_ = nullptr;
  std::string program_, job_folder_, image_;
  std::vector<std::string> arguments_;
  std::string spool_;  // this request's folder
  int spool_fd_ = -1;
  std::unique_ptr<ImageGiver> giver_;
  int announcements_ = -1;
  pid_t child_ = 0;
  bool peer_gone_ = false, full_ = false, elsewhere_ = true;
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
    *error = "cr-hostd has not understood the request";
    return false;
  }
  if (request_.version() != kVersion) {
    *error = "cr-hostd speaks version " + std::to_string(kVersion) + " and this tool version " +
             std::to_string(request_.version()) + "; install the same version of both";
    return false;
  }
  for (size_t i = 0; i < 3; ++i) {
    if (IsHarmless(fds_[i])) continue;
    *error = "descriptor " + std::to_string(i) + " is a file of the kernel's, to which cr-hostd does not write; use a pipe";
    return false;
  }
  for (const Tool& tool : Tools()) {
    if (tool.name == request_.tool()) tool_ = &tool;
  }
  if (!tool_) {
    *error = "cr-hostd does not know the tool " + request_.tool();
    return false;
  }
  // CRIU opens a pipe once more, for which it must be the user's: it is not to become hers by that.
  for (size_t i = 0; tool_->takes_image && i < 3; ++i) {
    if (!IsPipe(fds_[i]) || fstat(fds_[i], &facts) != 0 || facts.st_uid == peer_.account.user) continue;
    *error = "descriptor " + std::to_string(i) + " is a pipe that belongs to user " + std::to_string(facts.st_uid) +
             ", not to " + NameOf(peer_.account) + "; use a file, or a pipe of her own";
    return false;
  }
  return true;
}

// The user's own job of that name, and its folder, which is root's.
bool Worker::FindJob(std::string* error) {
  if (!IsName(request_.job())) {
    *error = "\"" + request_.job() + "\" cannot be the name of a job: up to " + std::to_string(kMostName) +
             " printable characters without spaces and slashes, of which the first is neither a dot nor a dash";
    return false;
  }
  const std::string jobs = checkpoint::UserJobsFolder(settings_.socket, peer_.account.user);
  job_folder_ = jobs + "/" + request_.job();
  if (tool_->runs_job) {
    const std::string folder = checkpoint::UserFolder(settings_.socket, peer_.account.user);
    return MakeFolder(folder.substr(0, folder.rfind('/')), error) && MakeFolder(folder, error) &&
           MakeFolder(folder + "/cuda-remote", error) && MakeFolder(jobs, error);
  }
  checkpoint::Job job;
  if (!ReadJob(job_folder_, &job, error)) return false;
  if (job.has_user() && job.user().id() == peer_.account.user) return true;
  *error = "the job " + request_.job() + " is another user's";
  return false;
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
  program_ = checkpoint::FindCompanion(std::string("cr-") + tool_->name);
  if (program_.empty()) {
    *error = std::string("cr-") + tool_->name + " is not beside cr-hostd: the installation is incomplete";
    return false;
  }
  arguments_ = {program_};
  for (const Option& option : request_.options()) {
    const std::set<std::string>& known = option.flag() ? tool_->flags : tool_->values;
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
  if (tool_->runs_job && !tool_->takes_image) arguments_.insert(arguments_.end(), {"--job-dir", job_folder_});
  if (tool_->makes_image) arguments_.insert(arguments_.end(), {job_folder_, spool_ + kImage});
  if (tool_->takes_image) arguments_.push_back(spool_ + kImage);
  if (!tool_->runs_job && !tool_->makes_image) arguments_.push_back(job_folder_);
  return true;
}

bool Worker::Begin(std::string* error) {
  if (!FindPeer(socket_, &peer_, error)) return false;
  elsewhere_ = false;
  if (!ReadRequest(error)) return false;
  // The user's names of files are meant from there, and are only used with her rights.
  if (fchdir(fds_[3]) != 0) {
    *error = std::string("cr-hostd cannot enter the working folder: ") + strerror(errno);
    return false;
  }
  image_ = request_.image();
  if ((tool_->takes_image || tool_->makes_image) && (image_.empty() || image_.find('\0') != std::string::npos)) {
    *error = "no image is named";
    return false;
  }
  if ((!tool_->takes_image && !FindJob(error)) ||
      ((tool_->takes_image || tool_->makes_image) && !MakeSpool(error)) ||
      (tool_->takes_image && !TakeImage(peer_.account, image_, key_, spool_ + kImage, error))) {
    return false;
  }
  if (!ListArguments(error)) return false;
  Log(peer_.account, std::string("cr-") + tool_->name + (request_.job().empty() ? "" : " of job " + request_.job()) +
                         (image_.empty() ? "" : ", image " + image_));
  return StartTool(error);
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
  if (!JoinPeer(peer_, tool_->runs_job, &error)) fail(error);
  for (int i = 0; i < 3; ++i) {
    if (dup2(fds_[size_t(i)], i) < 0) fail(std::string("dup2: ") + strerror(errno));
  }
  // The others are closed by the execution.
  for (const int fd : {facts, announcements}) fcntl(fd, F_SETFD, 0);
  for (const char* name : kNotForTools) unsetenv(name);
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
  int ends[2], failure[2];
  const int memory = memfd_create("cr-hostd-caller", MFD_CLOEXEC);
  if (memory < 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0 || pipe2(failure, O_CLOEXEC) != 0) {
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
  char text[1024];
  const ssize_t got = child_ > 0 ? read(failure[0], text, sizeof(text)) : 0;
  close(failure[0]);
  if (child_ > 0 && got <= 0) return true;
  *error = child_ < 0 ? std::string("fork: ") + strerror(errno) : std::string(text, size_t(got));
  if (child_ > 0) waitpid(child_, nullptr, 0);
  return false;
}

// What the tool waits for. Empty: done; else what went wrong.
std::string Worker::Do(const std::string& announced) {
  std::string error;
  if (announced == checkpoint::kImageBegins && tool_->makes_image) {
    giver_.reset();
    giver_ = ImageGiver::Begin(peer_.account, spool_fd_, image_, &error);
    return error;
  }
  if (announced == checkpoint::kImageComplete && tool_->makes_image && giver_) {
    const auto folder = ckptfmt::OpenedFolder::Open(spool_ + kImage);
    if (!folder.ok()) return std::string(folder.status().message());
    const bool given = SignImage(*folder, key_, peer_.account.user, &error) &&
                       GiveFiles(peer_.account, spool_fd_, &error) && giver_->Give(&error);
    giver_.reset();
    RemoveOwnFolder(spool_ + kImage);
    return given ? std::string() : error;
  }
  if (announced == checkpoint::kImageUsed && tool_->takes_image) {
    RemoveOwnFolder(spool_);
    spool_.clear();
    return {};
  }
  return "cr-hostd does not know what that means";
}

void Worker::PassOn() {
  Control control;
  if (!Receive(socket_, &control)) {
    peer_gone_ = true;
    // As when somebody kills cr-run, or a tool that works on a job.
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
  if (!tool_->makes_image || full_ || HasRoom(spool_, 0)) return;
  full_ = true;
  Tell(Reply::NOTE, 0, "there is no room left in cr-hostd's folder " + settings_.spool + "; the checkpoint is given up");
  kill(child_, SIGTERM);
}

void Worker::Follow() {
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
      Tell(Reply::ENDED, code);
      Log(peer_.account, std::string("cr-") + tool_->name + " has ended with " + std::to_string(code));
      return;
    }
    pollfd waiting[] = {{signals, POLLIN, 0}, {peer_gone_ ? -1 : socket_, POLLIN, 0}, {announcements_, POLLIN, 0}};
    if (poll(waiting, 3, tool_->makes_image ? kLookMs : -1) < 0) continue;
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
        const std::string problem = Do(std::string(text, size_t(got)));
        const std::string answer = problem.empty() ? "+" : "-" + problem;
        send(announcements_, answer.data(), answer.size(), MSG_NOSIGNAL);
      }
    }
    LookForRoom();
  }
}

}  // namespace

void ServeRequest(int socket, const Settings& settings, const Key& key) {
  Worker worker(socket, settings, key);
  std::string error;
  if (worker.Begin(&error)) {
    worker.Tell(Reply::STARTED, 0);
    worker.Follow();
    return;
  }
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
