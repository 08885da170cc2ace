// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/job.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <google/protobuf/util/json_util.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "checkpoint/job/hostd_places.h"
#include "proto/base/proc.h"
#include "proto/base/status_macros.h"
#include "proto/base/text.h"
#include "proto/errors/absl_status.h"
#include "proto/folder/connection_lock.h"
#include "proto/folder/private_folder.h"
#include "proto/folder/this_job.h"

namespace cuda_remote::checkpoint {
namespace {

// From the program's folder: an installation with everything in one folder, or with bin, lib and libexec.
constexpr const char* kPlaces[] = {"", "../lib/", "../bin/", "../libexec/"};

// Our libraries by the names that programs look for. Some (Numba) look for those without a version first.
constexpr std::pair<const char*, const char*> kLinks[] = {{kClientLibrary, "libcuda.so.1"},
                                                          {kClientLibrary, "libcuda.so"},
                                                          {kNvmlLibrary, "libnvidia-ml.so.1"},
                                                          {kNvmlLibrary, "libnvidia-ml.so"},
                                                          {kPreloadedLibrary, kPreloadedLibrary}};

// Of files that the job's processes read. The folder is closed to other users, but not to the job's.
constexpr mode_t kForProcesses = 0644;

// What SocketFolder looks for.
constexpr char kSocketFolder[] = "/user";

// Of a file in a job's folder.
constexpr size_t kMostJobBytes = 4 << 20;
// How often, and how many times, job.json is looked for in the folder of a job that begins.
constexpr std::chrono::milliseconds kStartLook(10);
constexpr int kStartLooks = 200;
// Who looks whether a folder is in use (IsInUse, RemoveStaleJobs) has it locked meanwhile. How long whoever is to run a
// job there waits for that, and how often it tries.
constexpr int kClaimMs = 1000, kClaimLookMs = 5;

bool EndsWith(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Of a plain file with `most` bytes at most.
bool ReadSome(int fd, size_t most, std::string* text) {
  struct stat facts;
  if (fstat(fd, &facts) != 0) return false;
  errno = S_ISREG(facts.st_mode) ? EFBIG : EINVAL;
  if (!S_ISREG(facts.st_mode) || size_t(facts.st_size) > most) return false;
  text->resize(size_t(facts.st_size));
  const ssize_t got = pread(fd, text->data(), text->size(), 0);
  text->resize(got > 0 ? size_t(got) : 0);
  return got >= 0;
}

// Empty if there is none.
std::string ReadText(const std::string& path) {
  std::string text;
  const int file = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (file < 0 || !ReadSome(file, kMostJobBytes, &text)) text.clear();
  if (file >= 0) close(file);
  return text;
}

// In one step. `rights`: of the file, if they are not the usual ones.
absl::Status Replace(const std::string& path, const std::string& text, mode_t rights = 0) {
  const std::string fresh = path + ".new";
  // Of a tool that was killed.
  unlink(fresh.c_str());
  const int out = open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  const bool written = out >= 0 && write(out, text.data(), text.size()) == ssize_t(text.size()) &&
                       (rights == 0 || fchmod(out, rights) == 0);
  if (out >= 0) close(out);
  if (written && rename(fresh.c_str(), path.c_str()) == 0) return absl::OkStatus();
  const absl::Status failed = ErrnoStatus("cannot write " + path);
  unlink(fresh.c_str());
  return failed;
}

// The folder of a job of that name that cr-hostd has started for some user. Empty if there is none.
std::string FolderOfHostdJob(const std::string& name) {
  glob_t found = {};
  std::string folder;
  // As UserJobsFolder, for any user.
  std::string jobs = UserJobsFolder(HostdSocket(), 0);
  const size_t number = jobs.rfind("/0/");
  if (name.empty() || number == std::string::npos) return folder;
  jobs.replace(number, 3, "/[0-9]*/");
  if (glob(jobs.c_str(), GLOB_NOSORT, nullptr, &found) == 0) {
    for (size_t i = 0; folder.empty() && i < found.gl_pathc; ++i) {
      const std::string one = std::string(found.gl_pathv[i]) + "/" + name;
      if (access((one + "/job.json").c_str(), F_OK) == 0) folder = one;
    }
  }
  globfree(&found);
  return folder;
}

// The folders of that name in which ordinary users have jobs of their own, by user.
std::map<uid_t, std::string> FoldersOfOwnJobs(const std::string& name) {
  std::map<uid_t, std::string> folders;
  glob_t found = {};
  for (const char* const jobs : {"/run/user/[0-9]*/cuda-remote/jobs", "/tmp/cuda-remote-[0-9]*/jobs"}) {
    if (name.empty() || glob(jobs, GLOB_NOSORT, nullptr, &found) != 0) continue;
    for (size_t i = 0; i < found.gl_pathc; ++i) {
      struct stat facts;
      const std::string one = std::string(found.gl_pathv[i]) + "/" + name;
      if (lstat(one.c_str(), &facts) == 0 && facts.st_uid != 0) folders[facts.st_uid] = one;
    }
    globfree(&found);
    found = {};
  }
  return folders;
}

// Whether it is, or is in, the folder of this user's jobs that cr-hostd has made. They are root's.
bool IsOfHostd(const std::string& path) {
  const std::string jobs = UserJobsFolder(HostdSocket(), geteuid());
  return geteuid() != 0 && (path + "/").compare(0, jobs.size() + 1, jobs + "/") == 0;
}

// What is in a folder and does not begin with a dot, sorted.
std::vector<std::string> NamesIn(const std::string& folder) {
  std::vector<std::string> names;
  DIR* const list = opendir(folder.c_str());
  while (const dirent* const entry = list ? readdir(list) : nullptr) {
    if (entry->d_name[0] != '.') names.push_back(entry->d_name);
  }
  if (list) closedir(list);
  std::sort(names.begin(), names.end());
  return names;
}

void AddJobsIn(const std::string& folder, std::vector<FoundJob>* jobs) {
  for (const std::string& name : NamesIn(folder)) {
    const std::string directory = folder + "/" + name;
    if (absl::StatusOr<Job> job = ReadJob(directory); job.ok()) jobs->push_back({directory, *std::move(job)});
  }
}

}  // namespace

std::string JobsFolder() { return RuntimeFolders().front() + "/jobs"; }

std::vector<std::string> JobsFolders() {
  std::vector<std::string> folders = RuntimeFolders();
  for (std::string& folder : folders) folder += "/jobs";
  if (geteuid() != 0) folders.push_back(UserJobsFolder(HostdSocket(), geteuid()));
  return folders;
}

std::string Absolute(const std::string& path) {
  std::string whole = path;
  if (whole.empty() || whole[0] != '/') {
    char folder[4096];
    if (getcwd(folder, sizeof(folder))) whole = std::string(folder) + "/" + whole;
  }
  // The parts, without "." and "..", whose file may not exist yet.
  std::vector<std::string> parts;
  for (size_t at = 0; at < whole.size();) {
    size_t end = whole.find('/', at);
    if (end == std::string::npos) end = whole.size();
    const std::string part = whole.substr(at, end - at);
    at = end + 1;
    if (part.empty() || part == ".") continue;
    if (part == "..") {
      if (!parts.empty()) parts.pop_back();
    } else {
      parts.push_back(part);
    }
  }
  std::string out;
  for (const std::string& part : parts) out += "/" + part;
  return out.empty() ? "/" : out;
}

absl::Status MakeJobFolder(const std::string& directory) {
  // Whoever may enter could take the program's GPU session over; whoever may write, give it a library of his own.
  return ToAbsl(CheckFolder(directory, FolderUse::kMake));
}

absl::Status MakeShownFolder(const std::string& directory) { return ToAbsl(CheckFolder(directory, FolderUse::kServe)); }

absl::Status ClaimJobFolder(const std::string& directory) {
  // Again if somebody else just looks at it, or has just removed it as a stale one.
  for (int waited = 0;; waited += kClaimLookMs) {
    CR_ASSIGN_OR_RETURN(UniqueFd folder, ToAbsl(OpenFolder(directory, FolderUse::kMake)));
    struct stat opened, named;
    const bool locked = flock(folder.get(), LOCK_EX | LOCK_NB) == 0;
    const bool in_place = fstat(folder.get(), &opened) == 0 && lstat(directory.c_str(), &named) == 0 &&
                          opened.st_ino == named.st_ino && opened.st_dev == named.st_dev;
    if (locked && in_place) {
      (void)folder.Release();  // locked until this program ends
      return absl::OkStatus();
    }
    if (waited >= kClaimMs && in_place) {
      return absl::AlreadyExistsError(absl::StrCat("another job runs in ", directory, ", or begins to"));
    }
    if (waited >= kClaimMs)
      return absl::UnavailableError(absl::StrCat("the folder ", directory, " keeps disappearing"));
    usleep(kClaimLookMs * 1000);
  }
}

namespace {

// An access control list, as the kernel has it in an attribute (linux/posix_acl_xattr.h).
struct AclEntry {
  uint16_t tag, rights;
  uint32_t id;
};
constexpr uint32_t kAclVersion = 2, kAclNobody = ~uint32_t{0};
constexpr uint16_t kAclOwner = 0x01, kAclUser = 0x02, kAclGroup = 0x04, kAclMask = 0x10, kAclOthers = 0x20;
constexpr uint16_t kAclAll = 7, kAclEnterAndList = 5;

// Lets this user, and not the user's group, enter and list root's folder. Where a file system has no such lists, the
// group may do so, too.
bool LetRead(const std::string& directory, const Account& account) {
  const AclEntry entries[] = {{kAclOwner, kAclAll, kAclNobody},
                              {kAclUser, kAclEnterAndList, account.user},
                              {kAclGroup, 0, kAclNobody},
                              {kAclMask, kAclEnterAndList, kAclNobody},
                              {kAclOthers, 0, kAclNobody}};
  std::string list(reinterpret_cast<const char*>(&kAclVersion), sizeof(kAclVersion));
  list.append(reinterpret_cast<const char*>(entries), sizeof(entries));
  if (setxattr(directory.c_str(), "system.posix_acl_access", list.data(), list.size(), 0) == 0) return true;
  return chown(directory.c_str(), uid_t(-1), account.group) == 0 && chmod(directory.c_str(), 0750) == 0;
}

}  // namespace

absl::Status OpenToUser(const std::string& directory, const std::string& seen_as, const Account& account) {
  const std::string own = directory + kSocketFolder;
  std::vector<std::string> above;
  for (const std::string& runtime : RuntimeFolders()) {
    const std::string jobs = runtime + "/jobs";
    for (const std::string& folder : {directory, seen_as}) {
      if (folder.compare(0, jobs.size() + 1, jobs + "/") == 0) above.insert(above.end(), {jobs, runtime});
    }
  }
  struct stat facts;
  for (const std::string& folder : above) {
    if (stat(folder.c_str(), &facts) == 0 && facts.st_uid == geteuid()) chmod(folder.c_str(), facts.st_mode | 0111);
  }
  // The user may look at it: a cr-run in the job looks whether it is in use.
  if (!LetRead(directory, account)) {
    return ErrnoStatus("cannot let " + NameOf(account) + " into the folder " + directory);
  }
  if ((mkdir(own.c_str(), 0700) != 0 && errno != EEXIST) || lstat(own.c_str(), &facts) != 0 ||
      !S_ISDIR(facts.st_mode) || lchown(own.c_str(), account.user, account.group) != 0) {
    return ErrnoStatus("cannot make the folder " + own);
  }
  const ActAs user(&account);
  // Effective rights, not the real user's.
  if (faccessat(AT_FDCWD, own.c_str(), W_OK | X_OK, AT_EACCESS) == 0) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat(NameOf(account), " cannot enter the job's folder ", directory, ": ",
                                                  strerror(errno),
                                                  "; choose one with --job-dir whose folders others may enter"));
}

absl::Status MakeSocketFolder(const std::string& directory) {
  const std::string folder = directory + kSocketFolder;
  if (mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST) return absl::OkStatus();
  return ErrnoStatus("cannot make the folder " + folder);
}

bool IsInUse(const std::string& directory) {
  // It may be root's, in a job of cr-run --user.
  const int folder = open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return false;
  const bool free = flock(folder, LOCK_SH | LOCK_NB) == 0;
  close(folder);
  return !free;
}

std::string KeptLibrary(const std::string& directory, const std::string& library) {
  return directory + "/lib/" + library + ".kept";
}

absl::StatusOr<std::string> LinkLibrary(const std::string& directory) {
  const std::string library_folder = directory + "/lib";
  if (mkdir(library_folder.c_str(), 0700) != 0 && errno != EEXIST) {
    return ErrnoStatus("cannot make the folder " + library_folder);
  }
  for (const auto& [library, name] : kLinks) {
    const std::string target = FindCompanion(library), link = library_folder + "/" + name;
    if (target.empty()) {
      return absl::NotFoundError(absl::StrCat(library, " is not beside cr-run: the installation is incomplete"));
    }
    unlink(link.c_str());
    if (symlink(target.c_str(), link.c_str()) != 0) return ErrnoStatus("cannot make the link " + link);
  }
  return library_folder;
}

namespace {

// `more`: lines behind those for the server.
absl::Status WriteServer(const std::string& directory, const std::string& address, int gpu, const std::string& more) {
  // The snapshot of a process that was about to take the lock has it open.
  const std::string path = directory + "/" + kConnectionLockName;
  const int lock = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (lock < 0) return ErrnoStatus("cannot make " + path);
  // The job's user takes it, too, and nobody else.
  struct stat facts;
  const bool given = stat(SocketFolder(directory).c_str(), &facts) != 0 || facts.st_uid == geteuid() ||
                     fchown(lock, facts.st_uid, gid_t(-1)) == 0;
  close(lock);
  const std::string text = address + "\n" + std::to_string(gpu) + "\n" + more;
  if (given) return Replace(directory + "/gpu-server", text, kForProcesses);
  return ErrnoStatus("cannot give " + path + " to the job's user");
}

}  // namespace

absl::Status WriteGpuServer(const std::string& directory, const std::string& address, int gpu) {
  return WriteServer(directory, address, gpu, "");
}

absl::Status WriteJobServer(const std::string& directory, const std::string& address, int gpu,
                            const std::string& scope) {
  return WriteServer(directory, address, gpu, HexBytes(scope) + "\n");
}

ServerChange::ServerChange(const std::string& directory) : path_(directory + "/gpu-server"), before_(ReadText(path_)) {}

ServerChange::~ServerChange() {
  if (kept_) return;
  if (before_.empty()) unlink(path_.c_str());
  // Nobody is left to tell.
  if (!before_.empty()) Replace(path_, before_, kForProcesses).IgnoreError();
}

void NoteStopped(const std::string& directory, const std::string& where) {
  const std::string path = directory + "/stopped", line = where + "\n";
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
  if (file < 0) return;
  const ssize_t ignored = write(file, line.data(), line.size());
  (void)ignored;
  close(file);
}

std::string NewSharingScope() {
  std::string scope(16, '\0');
  for (size_t done = 0; done < scope.size();) {
    const ssize_t got = getrandom(&scope[done], scope.size() - done, 0);
    if (got > 0) done += size_t(got);
  }
  return scope;
}

absl::Status WriteThisJob(const std::string& directory, const std::string& seen_as, const std::string& name) {
  // The folder is closed; what is seen of it elsewhere is for all users that the job's processes run as.
  const std::string folder = directory + "/lib";
  if (chmod(folder.c_str(), 0755) == 0) return Replace(folder + "/job", ThisJobText(seen_as, name), 0644);
  return ErrnoStatus("cannot let others read " + folder);
}

std::string GpuServerOf(const std::string& directory) {
  std::string address;
  int gpu = -1;
  return ReadGpuServer(directory, &address, &gpu) ? address : std::string();
}

absl::Status ConnectionPause::Take(const std::string& directory, int timeout_ms) {
  const std::string path = directory + "/" + kConnectionLockName;
  fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd_ < 0) return errno == ENOENT ? absl::NotFoundError("the job has ended") : ErrnoStatus("cannot open " + path);
  for (int waited = 0; flock(fd_, LOCK_EX | LOCK_NB) != 0; ++waited) {
    if (waited >= timeout_ms) {
      Release();
      return absl::DeadlineExceededError(
          "a process of the job has not finished connecting to its GPU server; try again");
    }
    usleep(1000);
  }
  return absl::OkStatus();
}

void ConnectionPause::Release() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

std::string JobToJson(const Job& job, bool one_line) {
  std::string text;
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = !one_line;
  options.preserve_proto_field_names = true;
  if (!google::protobuf::util::MessageToJsonString(job, &text, options).ok()) return {};
  return text;
}

bool JobFromJson(const std::string& text, Job* job) {
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = true;
  return google::protobuf::util::JsonStringToMessage(text, job, options).ok();
}

absl::Status WriteJob(const std::string& directory, const Job& job) {
  // Its user may know of it, and the folder is closed to others.
  return Replace(directory + "/job.json", JobToJson(job, /*one_line=*/false), job.has_user() ? kForProcesses : 0);
}

absl::StatusOr<Job> ReadJob(const std::string& directory) {
  const std::string path = directory + "/job.json";
  if (access(path.c_str(), F_OK) != 0 && (errno == ENOENT || errno == ENOTDIR)) {
    return absl::NotFoundError(
        absl::StrCat("no job in ", directory, " (there is no job.json): it has ended, or cr-run did not start it"));
  }
  // What stands there decides which processes and files the tools touch.
  if (!IsOfHostd(directory)) CR_RETURN_IF_ERROR(ToAbsl(CheckFolder(directory, FolderUse::kLook)));
  // The folder is not open to others, but it may be that of another user as whom this program acts (own_job.h).
  UniqueFd file;
  if (IsOfHostd(directory)) {
    CR_ASSIGN_OR_RETURN(file, ToAbsl(OpenTrustedFile(path)));
  } else {
    file.Reset(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  }
  std::string text;
  if (!file.ok() || !ReadSome(file.get(), kMostJobBytes, &text)) return ErrnoStatus("cannot read " + path);
  Job job;
  if (!JobFromJson(text, &job)) return absl::DataLossError(absl::StrCat(path, " is damaged"));
  return job;
}

// A program can run, and be told to tools, before cr-run has written down what it knows of it.
static bool HasJobFile(const std::string& directory) {
  const auto has = [&](const char* name) { return access((directory + name).c_str(), F_OK) == 0; };
  for (int i = 0; i < kStartLooks && !has("/job.json") && has("/gpu-server"); ++i)
    std::this_thread::sleep_for(kStartLook);
  return has("/job.json");
}

// Of the job in `directory`.
static absl::StatusOr<FoundJob> FoundIn(const std::string& directory) {
  CR_ASSIGN_OR_RETURN(Job job, ReadJob(directory));
  return FoundJob{directory, std::move(job)};
}

absl::StatusOr<FoundJob> FindJob(const std::string& name) {
  if (name.find('/') != std::string::npos) {
    const std::string directory = Absolute(name);
    HasJobFile(directory);
    return FoundIn(directory);
  }
  const std::vector<std::string> folders = JobsFolders();
  for (const std::string& folder : folders) {
    const std::string directory = folder + "/" + name;
    if (!name.empty() && HasJobFile(directory)) return FoundIn(directory);
  }
  // A folder of that name right here.
  if (!name.empty() && HasJobFile(name)) return FoundIn(Absolute(name));
  if (IsNumber(name)) {
    const int pid = atoi(name.c_str());
    for (const FoundJob& found : AllJobs()) {
      if (pid != found.job.pid() && pid != found.job.runner_pid() && pid != found.job.caller_pid() &&
          (found.job.init_pid() == 0 || PidNamespace(pid) != found.job.pid_namespace())) {
        continue;
      }
      return found;
    }
  }
  if (geteuid() == 0) {
    const std::string folder = FolderOfHostdJob(name);
    if (!folder.empty()) {
      return absl::NotFoundError(
          absl::StrCat("the job \"", name, "\" was started through cr-hostd: name its folder, ", folder));
    }
    const std::map<uid_t, std::string> own = FoldersOfOwnJobs(name);
    if (own.size() > 1) {
      return absl::NotFoundError(
          absl::StrCat("several users have a job \"", name, "\": name its folder, as in ", own.begin()->second));
    }
  }
  return absl::NotFoundError(absl::StrCat("there is no job \"", name, "\": name its folder, or a job in ",
                                          folders.front(), " (cr-ps lists them)"));
}

uid_t OwnerOfJob(const std::string& name) {
  struct stat facts;
  if (name.find('/') != std::string::npos) return lstat(Absolute(name).c_str(), &facts) == 0 ? facts.st_uid : 0;
  if (!FolderOfHostdJob(name).empty()) return 0;
  // Anybody can give a folder this name.
  if (IsNumber(name) && stat(("/proc/" + name).c_str(), &facts) == 0 && facts.st_uid != 0) return facts.st_uid;
  const std::map<uid_t, std::string> own = FoldersOfOwnJobs(name);
  return own.size() == 1 ? own.begin()->first : 0;
}

std::vector<FoundJob> AllJobs() {
  std::vector<FoundJob> jobs;
  for (const std::string& folder : JobsFolders()) {
    if (IsOfHostd(folder) || CheckFolder(folder, FolderUse::kLook).ok()) AddJobsIn(folder, &jobs);
  }
  return jobs;
}

std::vector<FoundJob> JobsOfHostd(const std::string& socket, uid_t user) {
  std::vector<FoundJob> jobs;
  for (const std::string& number : NamesIn(UsersFolder(socket))) {
    const uid_t owner = uid_t(strtoul(number.c_str(), nullptr, 10));
    if (user == 0 || owner == user) AddJobsIn(UserJobsFolder(socket, owner), &jobs);
  }
  return jobs;
}

std::vector<std::string> RemoveStaleJobs() {
  std::vector<std::string> removed;
  for (const std::string& folder : JobsFolders()) {
    DIR* const list = CheckFolder(folder, FolderUse::kLook).ok() ? opendir(folder.c_str()) : nullptr;
    while (const dirent* const entry = list ? readdir(list) : nullptr) {
      if (entry->d_name[0] == '.') continue;
      const std::string directory = folder + "/" + entry->d_name;
      const StatusOr<UniqueFd> claimed = OpenFolder(directory, FolderUse::kLook);
      const auto goes_on = [&] {
        const absl::StatusOr<Job> job = ReadJob(directory);
        return job.ok() && JobIsAlive(*job);
      };
      // Who runs a job has its folder locked (ClaimJobFolder). A program whose cr-run was killed may go on without it.
      if (claimed.ok() && flock(claimed->get(), LOCK_EX | LOCK_NB) == 0 && !goes_on()) {
        RemoveJobFolder(directory);
        if (access(directory.c_str(), F_OK) != 0) removed.push_back(directory);
      }
    }
    if (list) closedir(list);
  }
  return removed;
}

namespace {

// The sockets in a folder of a job's processes, an own server's, and what an engine has left.
void RemoveSockets(const std::string& directory) {
  for (const char* name : {"/server/session.sock", "/server/control.sock", "/server/server.lock", "/server.log"}) {
    unlink((directory + name).c_str());
  }
  if (DIR* const list = opendir(directory.c_str())) {
    while (const dirent* const entry = readdir(list)) {
      const std::string name = entry->d_name;
      const bool ours = (name.compare(0, 5, "relay") == 0 &&
                         (EndsWith(name, ".sock") || EndsWith(name, ".log") || EndsWith(name, ".server"))) ||
                        (name.compare(0, 5, "agent") == 0 && EndsWith(name, ".sock")) ||
                        name.compare(0, strlen(kEngineFiles), kEngineFiles) == 0;
      if (ours) unlink((directory + "/" + name).c_str());
    }
    closedir(list);
  }
  rmdir((directory + "/server").c_str());
}

}  // namespace

void RemoveJobFolder(const std::string& directory) {
  for (const char* name : {"/lib/job", "/lib/ld.so.cache", "/gpu-server", "/connect.lock", "/tool.lock", "/job.json",
                           "/stopped", "/holder.sock"}) {
    unlink((directory + name).c_str());
  }
  for (const auto& [library, name] : kLinks) unlink((directory + "/lib/" + name).c_str());
  for (const char* library : kJobLibraries) unlink(KeptLibrary(directory, library).c_str());
  RemoveSockets(directory);
  struct stat facts;
  if (const std::string own = SocketFolder(directory); own != directory && stat(own.c_str(), &facts) == 0) {
    Account user;
    user.user = facts.st_uid;
    user.group = facts.st_gid;
    // He may have put links there.
    {
      const ActAs him(geteuid() == 0 && user.user != 0 ? &user : nullptr);
      if (user.user == geteuid()) RemoveSockets(own);
    }
    rmdir(own.c_str());
  }
  rmdir((directory + "/lib").c_str());
  rmdir(directory.c_str());
}

std::string FindCompanion(const std::string& name, const std::string& folder) {
  const std::string own = OwnFolder();
  std::vector<std::string> places(std::begin(kPlaces), std::end(kPlaces));
  if (!folder.empty()) places.push_back("../../" + folder + "/");
  for (const std::string& place : places) {
    const std::string path = own + place + name;
    struct stat facts;
    if (stat(path.c_str(), &facts) != 0 || !S_ISREG(facts.st_mode)) continue;
    // Without links: the folder may be seen from another mount namespace, and the path is what a snapshot remembers.
    char* const real = realpath(path.c_str(), nullptr);
    const std::string found = real ? real : path;
    free(real);
    return found;
  }
  return {};
}

uint64_t PidNamespace(int pid) {
  // Of each process of the machine while a job stands still: to follow the link takes twice as long.
  unsigned long long number = 0;
  const std::string link = pid > 0 ? ReadLink("/proc/" + std::to_string(pid) + "/ns/pid") : "";
  return sscanf(link.c_str(), "pid:[%llu]", &number) == 1 ? number : 0;
}

namespace {

// Every process of this machine with its parent.
std::map<int, int> AllParents() {
  std::map<int, int> parents;
  for (const int pid : AllProcesses()) {
    if (const int parent = ParentOf(pid); parent > 0) parents[pid] = parent;
  }
  return parents;
}

// `tops`, and what descends from them.
std::vector<int> Trees(const std::map<int, int>& parents, const std::set<int>& tops) {
  std::vector<int> pids;
  for (const auto& [pid, parent] : parents) {
    int above = pid;
    for (size_t steps = 0; above > 1 && !tops.count(above) && steps < parents.size(); ++steps) {
      const auto found = parents.find(above);
      above = found == parents.end() ? 0 : found->second;
    }
    if (tops.count(above) && above > 0) pids.push_back(pid);
  }
  return pids;
}

}  // namespace

std::vector<int> ProcessesOf(const Job& job) {
  std::vector<int> pids;
  if (job.init_pid() <= 0) return Trees(AllParents(), {job.pid()});
  if (!JobIsAlive(job)) return pids;
  for (const int pid : AllProcesses()) {
    if (pid != job.init_pid() && PidNamespace(pid) == job.pid_namespace()) pids.push_back(pid);
  }
  // The kernel gives a namespace's number to another one as soon as the job has ended.
  if (!JobIsAlive(job)) pids.clear();
  return pids;
}

std::vector<int> OutlivedProcessesOf(const Job& job) {
  if (job.init_pid() > 0 || job.runner_pid() <= 0) return {};
  const std::map<int, int> parents = AllParents();
  std::set<int> outlived;
  for (const auto& [pid, parent] : parents) {
    if (parent != job.runner_pid() || pid == job.pid() || !IsRunning(pid)) continue;
    const std::string path = ReadLink("/proc/" + std::to_string(pid) + "/exe");
    // Its own server or relay, or a part of itself.
    if (path.compare(path.rfind('/') + 1, 3, "cr-") != 0) outlived.insert(pid);
  }
  return Trees(parents, outlived);
}

int InnerPid(int pid) {
  const std::vector<uint64_t> numbers = StatusNumbers(pid, "NSpid", 10);
  return numbers.empty() ? 0 : int(numbers.back());
}

bool HasTerminal(int pid) { return StatOf(pid).terminal > 0; }

std::vector<uint64_t> StatusNumbers(int pid, const std::string& name, int base) {
  std::istringstream words(StatusField(pid, name));
  std::vector<uint64_t> numbers;
  for (std::string word; words >> word;) numbers.push_back(strtoull(word.c_str(), nullptr, base));
  return numbers;
}

std::vector<int> ThreadsOf(int pid) { return NumbersIn(pid, "task"); }

char StateOf(int pid) { return StatOf(pid).state; }

bool IsRunning(int pid) {
  const char state = StateOf(pid);
  // A dead process that its parent has not noticed yet is still listed, and has a namespace.
  return state != 0 && state != 'Z' && state != 'X';
}

uint64_t ProgramMark(int pid) { return StatOf(pid).stack; }

bool IsSameRun(const Job& job, const Job& other) {
  return job.runner_pid() == other.runner_pid() && job.init_pid() == other.init_pid() && job.pid() == other.pid() &&
         job.pid_namespace() == other.pid_namespace();
}

int ParentOf(int pid) { return StatOf(pid).parent; }

bool JobIsAlive(const Job& job) {
  if (job.init_pid() > 0) {
    if (job.pid_namespace() == 0 || !IsRunning(job.init_pid())) return false;
    // Of a job of cr-hostd's, the namespace's first process is root's, and its user may look only at the program.
    const uint64_t seen = PidNamespace(job.init_pid());
    return (seen != 0 ? seen : PidNamespace(job.pid())) == job.pid_namespace();
  }
  return job.pid() > 0 && kill(job.pid(), 0) == 0 && IsRunning(job.pid());
}

}  // namespace cuda_remote::checkpoint
