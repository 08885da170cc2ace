// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/criu_restore.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <poll.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "checkpoint/engine/criu/affinity.h"
#include "checkpoint/engine/criu/connections.h"
#include "checkpoint/engine/criu/criu.h"
#include "checkpoint/engine/criu/criu_facts.h"
#include "checkpoint/engine/criu/criu_image.h"
#include "checkpoint/engine/criu/free_numbers.h"
#include "checkpoint/engine/criu/hold.h"
#include "checkpoint/engine/criu/own_settings.h"
#include "checkpoint/engine/criu/socket_facts.h"
#include "checkpoint/engine/criu/socket_state.h"
#include "checkpoint/engine/criu/thread_settings.h"
#include "checkpoint/job/isolation/own_ptys.h"
#include "proto/base/proc.h"
#include "proto/base/status_macros.h"
#include "proto/base/unique_fd.h"
#include "proto/errors/absl_status.h"
#include "proto/folder/private_folder.h"

extern char** environ;

namespace cuda_remote::checkpoint {
namespace {

constexpr char kHoldName[] = "engine-hold";
constexpr char kShownImage[] = "/image";  // in the job's folder
constexpr char kFilesImage[] = "files.img", kRemapsImage[] = "remap-fpath.img";
constexpr int kLookMs = 200;

bool CopyFile(int folder, const std::string& name, const std::string& to) {
  struct stat facts;
  if (fstatat(folder, name.c_str(), &facts, AT_SYMLINK_NOFOLLOW) != 0) return false;
  if (!S_ISREG(facts.st_mode)) return true;  // the libraries of ours, which CRIU does not read
  const int in = openat(folder, name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  const int out = open(to.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
  off_t left = facts.st_size;
  while (in >= 0 && out >= 0 && left > 0) {
    const ssize_t copied = sendfile(out, in, nullptr, size_t(left));
    if (copied <= 0) break;
    left -= copied;
  }
  const bool ok = in >= 0 && out >= 0 && left == 0;
  if (in >= 0) close(in);
  if (out >= 0) close(out);
  return ok;
}

// `errors`, and what may be the reason: what CRIU can do without for some jobs, and what a job itself may have had.
std::string WithMissingRights(const std::string& errors) {
  const std::string missing = MissingCapability({{CAP_NET_ADMIN, "NET_ADMIN"},
                                                 {CAP_NET_RAW, "NET_RAW"},
                                                 {CAP_CHECKPOINT_RESTORE, "CHECKPOINT_RESTORE"},
                                                 {CAP_SYS_CHROOT, "SYS_CHROOT"},
                                                 {CAP_KILL, "KILL"},
                                                 {CAP_SETPCAP, "SETPCAP"},
                                                 {CAP_SYS_RESOURCE, "SYS_RESOURCE"}});
  return missing.empty() || !MayLackRights(errors) ? errors : errors + ". Perhaps it needs " + missing;
}

}  // namespace

CriuRestore::~CriuRestore() {
  if (begun_) EndIsolated(&isolated_);
  if (!files_image_.empty()) RemoveShownImage();
  CloseOpened();
}

void CriuRestore::CloseOpened() {
  for (int fd : opened_) close(fd);
  opened_.clear();
  if (copy_.terminal >= 0) close(copy_.terminal);
  copy_.terminal = -1;
  if (terminal_) terminal_->CloseJobEnd();
  if (output_) fclose(output_);
  output_ = nullptr;
  if (hold_ >= 0) {
    close(hold_);
    unlink((directory_ + "/" + kHoldName).c_str());
  }
  hold_ = -1;
  if (held_ >= 0) close(held_);
  held_ = -1;
  ghosts_.Release();
}

absl::Status CriuRestore::ShowImage(int image) {
  const std::string folder = directory_ + kShownImage;
  RemoveShownImage();
  const int copy = openat(image, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* const list = copy >= 0 ? fdopendir(copy) : nullptr;
  // What was verified is what CRIU reads: a link only where nobody else can put another image under that name.
  const std::string real = ReadLink("/proc/self/fd/" + std::to_string(image));
  // A user's rights do not lead to the image by its path.
  const bool linked = !account_ && !real.empty() && CheckFolder(real, FolderUse::kLook).ok();
  bool ok = list && mkdir(folder.c_str(), 0700) == 0;
  while (const dirent* const entry = ok ? readdir(list) : nullptr) {
    const std::string name = entry->d_name;
    if (name[0] == '.' || name == kFilesImage) continue;
    const std::string shown = folder + "/" + name;
    ok = linked ? symlink((real + "/" + name).c_str(), shown.c_str()) == 0 : CopyFile(image, name, shown);
  }
  if (list) closedir(list);
  std::ofstream out;
  if (ok) out.open(folder + "/" + kFilesImage, std::ios::binary);
  ok = ok && out.write(files_image_.data(), std::streamsize(files_image_.size())).flush();
  if (!ok) return ErrnoStatus("cannot prepare the image in " + folder);
  if (!account_) return absl::OkStatus();
  const UniqueFd shown(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!shown.ok()) return ErrnoStatus("cannot prepare the image in " + folder);
  return OpenToCriu(*account_, shown.get());
}

void CriuRestore::RemoveShownImage() {
  const std::string folder = directory_ + kShownImage;
  DIR* const list = opendir(folder.c_str());
  while (const dirent* const entry = list ? readdir(list) : nullptr) {
    if (entry->d_name[0] != '.') unlink((folder + "/" + entry->d_name).c_str());
  }
  if (list) closedir(list);
  rmdir(folder.c_str());
}

absl::Status CriuRestore::MakeHold() {
  const std::string path = directory_ + "/" + kHoldName;
  unlink(path.c_str());
  // For reading, too: then opening waits for nobody, and what is written is there for whoever comes later.
  const bool made =
      mkfifo(path.c_str(), 0600) == 0 && (!account_ || lchown(path.c_str(), account_->user, account_->group) == 0);
  if (made) hold_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
  // After this program's own opening.
  if (hold_ >= 0) held_ = inotify_init1(IN_CLOEXEC);
  if (held_ >= 0 && inotify_add_watch(held_, path.c_str(), IN_OPEN) < 0) {
    close(held_);
    held_ = -1;
  }
  return hold_ >= 0 ? absl::OkStatus() : ErrnoStatus("cannot make the pipe " + path);
}

absl::Status CriuRestore::Begin(const std::string& image_folder) {
  Plan plan;
  plan.restored_pid = job_.inner_pid();
  plan.own_processes = plan.own_ipc = plan.own_ptys = true;  // CRIU brings back the filter against io_uring
  if (directory_ != job_.directory()) {
    plan.folder = directory_;
    plan.seen_as = job_.directory();
    plan.of_account = plan.own_group = job_.users_own();
  }
  constexpr char kPreload[] = "LD_PRELOAD=";
  for (char** variable = environ; *variable; ++variable) {
    if (strncmp(*variable, kPreload, strlen(kPreload)) != 0) plan.environment.push_back(*variable);
  }
  plan.environment.push_back(std::string(kHoldVariable) + "=" + job_.directory() + "/" + kHoldName);
  plan.mounts = mounts_;
  plan.account = account_;
  if (account_) plan.kept_capabilities = CriuCapabilities();
  plan.network = network_;
  if (job_.terminal()) {
    CR_ASSIGN_OR_RETURN(terminal_, JobTerminal::Open());
  }
  int terminal = terminal_ ? terminal_->job_end() : OwnTerminal();
  if ((terminal < 0 || (job_.terminal() && !terminal_)) && (job_.terminal() || NeedsTerminal(facts_))) {
    CR_ASSIGN_OR_RETURN(copy_, CopyTerminal());
    terminal = copy_.terminal;
  }
  // One of cr-restart's own making, not the one that it was started at.
  if (account_ && (terminal_ || copy_.terminal >= 0) && fchown(terminal, account_->user, gid_t(-1)) != 0)
    return ErrnoStatus("cannot give the terminal to the job's user");
  if (job_.terminal()) plan.terminal = terminal;
  plan.outside_ptys = PtyNames({terminal});
  plan.terminal_group = facts_.terminal_group();
  const std::string hold = FindCompanion("cr-hold", kOwnFolder);
  if (hold.empty())
    return absl::FailedPreconditionError("cr-hold is not beside cr-restart: the installation is incomplete");
  {
    const ActAs user(account_);
    unlink(LogPath().c_str());
  }
  // By descriptor: what was verified is what CRIU reads. Other paths as the restorer sees them.
  const int image = open(image_folder.c_str(), O_RDONLY | O_DIRECTORY);
  if (image < 0) return ErrnoStatus("cannot open the saved processes' files");
  opened_.push_back(image);
  if (!files_image_.empty()) CR_RETURN_IF_ERROR(ShowImage(image));
  const std::string& here = image_ = "/proc/self/fd/" + std::to_string(image);
  // Older images have none.
  if (const int settings = openat(image, kOwnSettingsFile, O_RDONLY | O_NOFOLLOW); settings >= 0) {
    const std::string preload = FindCompanion("libcuda-remote-criu.so", kOwnFolder);
    opened_.push_back(settings);
    if (preload.empty()) {
      return absl::FailedPreconditionError(
          "libcuda-remote-criu.so is not beside cr-restart: the installation is incomplete");
    }
    plan.environment.push_back(kPreload + preload);
    plan.environment.push_back(std::string(kOwnSettingsVariable) + "=" + std::to_string(settings));
  }
  CR_ASSIGN_OR_RETURN(plan.first_pid, FreeNumberBeside(here));
  std::string files, remaps;
  // There is none where no file was deleted.
  if (ReadImageFile(here + "/" + kRemapsImage, &remaps) && ReadImageFile(here + "/" + kFilesImage, &files))
    CR_RETURN_IF_ERROR(ghosts_.Take(GhostsIn(files, remaps), Interrupted));
  const std::string seen = files_image_.empty() ? here : job_.directory() + kShownImage;
  CR_RETURN_IF_ERROR(MakeHold());
  CR_RETURN_IF_ERROR(RestoreCommand(job_, facts_, here, seen, job_.directory() + (account_ ? "/user" : ""), terminal,
                                    &plan.command, &opened_));
  const std::string facts = CriuFactsPath(plan.command[0]);
  plan.prepare = [facts] { ShowCriuFacts(facts); };
  plan.command.insert(plan.command.end(), {"--action-script", hold});
  output_ = tmpfile();
  plan.restorer_output = output_ ? fileno(output_) : 2;
  CR_ASSIGN_OR_RETURN(isolated_, BeginIsolated(plan));
  begun_ = true;
  return absl::OkStatus();
}

absl::Status CriuRestore::AwaitHeld() {
  if (held_ < 0) {
    return absl::ResourceExhaustedError(
        "this machine does not tell when the processes are restored (inotify): raise fs.inotify.max_user_instances");
  }
  // Init reports only when the processes run, or when CRIU has failed.
  pollfd waiting[] = {{held_, POLLIN, 0}, {isolated_.report, POLLIN, 0}};
  while (poll(waiting, 2, kLookMs) <= 0) {
    if (Interrupted()) return absl::CancelledError("interrupted");
  }
  if (waiting[0].revents == 0) return absl::FailedPreconditionError("");  // Finish says why
  ghosts_.Release();
  return absl::OkStatus();
}

void CriuRestore::RestoreTheRest() {
  RestoreAffinities(facts_, isolated_.init);
  Job job;
  job.set_init_pid(isolated_.init);
  job.set_pid_namespace(PidNamespace(isolated_.init));
  DetachFilter(ProcessesOf(job), {std::begin(kNoReset), std::end(kNoReset)});
  for (const std::string& what : RestoreSockets(image_, ProcessesOf(job), account_)) {
    if (say_) say_(what);
  }
  RestoreThreadSettings(facts_, isolated_.init);
}

absl::StatusOr<Isolated> CriuRestore::Finish() {
  const absl::Status held = AwaitHeld();
  if (held.ok()) {
    RestoreTheRest();
  } else if (!held.message().empty()) {
    return held;
  }
  if (write(hold_, kHoldGo, strlen(kHoldGo)) != ssize_t(strlen(kHoldGo)))
    return ErrnoStatus("cannot resume the restored processes");
  int code = 0;
  begun_ = false;
  const absl::Status restored = AwaitIsolated(&isolated_, &code);
  std::string error(restored.message()), log;
  // Without a message the restorer has failed, and its log says why.
  const bool failed = !restored.ok() && error.empty();
  {
    // Its folder may be a user's.
    const ActAs user(account_);
    if (failed) error = "CRIU could not restore the job's processes: " + WithMissingRights(CriuErrors(LogPath()));
    if (failed) ReadImageFile(LogPath(), &log);
    unlink((Work() + "/stats-restore").c_str());
    if (restored.ok()) unlink(LogPath().c_str());
  }
  if (failed && !logs_.empty()) error += KeepCriuLog(log, logs_ + "." + kKeptRestoreLog);
  CloseOpened();
  if (!files_image_.empty()) RemoveShownImage();
  if (!restored.ok()) return absl::Status(restored.code(), error);
  return isolated_;
}

}  // namespace cuda_remote::checkpoint
