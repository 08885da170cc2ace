// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/criu.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/magic.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "checkpoint/engine/criu/affinity.h"
#include "checkpoint/engine/criu/connections.h"
#include "checkpoint/engine/criu/continue.h"
#include "checkpoint/engine/criu/criu_facts.h"
#include "checkpoint/engine/criu/criu_image.h"
#include "checkpoint/engine/criu/held_mutexes.h"
#include "checkpoint/engine/criu/hold.h"
#include "checkpoint/engine/criu/obstacles.h"
#include "checkpoint/engine/criu/open_files.h"
#include "checkpoint/engine/criu/own_settings.h"
#include "checkpoint/engine/criu/pages_socket.h"
#include "checkpoint/engine/criu/passing.h"
#include "checkpoint/engine/criu/proc_paths.h"
#include "checkpoint/engine/criu/process_memory.h"
#include "checkpoint/engine/criu/saved_rights.h"
#include "checkpoint/engine/criu/shared_files.h"
#include "checkpoint/engine/criu/socket_state.h"
#include "checkpoint/engine/criu/thread_settings.h"
#include "checkpoint/engine/instruction_sets.h"
#include "checkpoint/engine/kernel_features.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/cuda_processes.h"
#include "checkpoint/job/gpu_devices.h"
#include "checkpoint/job/isolation/network.h"
#include "checkpoint/job/isolation/stand_ins.h"
#include "checkpoint/job/job.h"
#include "checkpoint/job/stall_watch.h"
#include "proto/base/proc.h"
#include "proto/base/status_macros.h"
#include "proto/base/unique_fd.h"
#include "proto/codec/text.h"
#include "proto/errors/absl_status.h"
#include "proto/errors/annotate.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr const char* kSystemV[] = {"/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg"};
constexpr char kPrivateCriu[] = "/opt/cuda-remote/criu/criu";
// What CRIU says of a connection that is being made or that nobody has accepted yet: of TCP; of a UNIX socket that its
// peer has closed, or has sent data to already.
constexpr const char* kBeingMade[] = {"In-flight connection", "a closed in-flight socket", "on an in-flight socket"};
// What CRIU says where the kernel forbids something: EPERM and EACCES, which it also says by their numbers.
constexpr const char* kForbidden[] = {"Operation not permitted", "Permission denied", "-1", "-13"};
constexpr protozero::pbf_tag_type kNameField = 6;  // of a RegFileEntry (images/regfile.proto)
constexpr int kMaxLogLines = 3;
// How long a process may be without a parent before its own end.
constexpr std::chrono::milliseconds kParentless(100);
constexpr size_t kMostCheckBytes = 1000;
// What `criu check` says in a container without privileges. Jobs need neither: CRIU has clone3 for process numbers, and
// a job that has a tunnel open is refused when it is saved.
constexpr char kLastPid[] = "ns_last_pid sysctl is inaccessible", kNoTunnel[] = "Unable to create tun";
// /dev/ptmx: a descriptor of it is the end of a pseudo-terminal that a terminal's window has.
const dev_t kTerminalMaker = makedev(5, 2);
constexpr int kKillAttempts = 500;
// CRIU notices at once, or never, that a process of the job has ended.
constexpr int kLookMs = 100;
constexpr int kMostLooksAfterEnd = 100;
constexpr int kKillPauseUs = 10000;
constexpr int kLockPauseUs = 20000, kLockUs = 60'000'000;

// Descriptors that CRIU is to find again under the same numbers; not close-on-exec.
int KeepOpen(int fd) { return fcntl(fd, F_DUPFD, 3); }

bool IsTerminal(dev_t device) {
  const unsigned kind = major(device);
  return (kind >= 136 && kind <= 143) || kind == 4;
}

std::string TerminalName(const Stdio& stream) {
  char text[64];
  snprintf(text, sizeof(text), "tty[%llx:%llx]", static_cast<unsigned long long>(stream.rdevice()),
           static_cast<unsigned long long>(stream.device()));
  return text;
}

pid_t g_inside = 0;

// From now on SIGTERM to this process kills `inside`. If this process is killed itself, `inside` goes on: CRIU comes to
// a good end without it.
void PassOnKill(pid_t inside) {
  g_inside = inside;
  struct sigaction action = {};
  action.sa_handler = [](int) { kill(g_inside, SIGKILL); };
  sigaction(SIGTERM, &action, nullptr);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigprocmask(SIG_UNBLOCK, &set, nullptr);
}

// Asked now and then while the process of this number, a child, is awaited: whether to give up.
using GiveUp = std::function<bool(pid_t)>;

// Waits for a child of InsideJob. False if what it waits for was killed because `give_up` said so.
bool Await(pid_t child, const GiveUp& give_up, int* status) {
  const int fd = give_up ? int(syscall(SYS_pidfd_open, child, 0)) : -1;
  bool killed = false;
  while (fd >= 0 && !killed) {
    pollfd waiting{fd, POLLIN, 0};
    if (poll(&waiting, 1, kLookMs) > 0) break;
    killed = give_up(child);
    if (killed) kill(child, SIGTERM);
  }
  if (fd >= 0) close(fd);
  while (waitpid(child, status, 0) < 0 && errno == EINTR) {
  }
  return !killed;
}

// Whether the job has namespaces of its own. A user's own job has none (own_job.h).
bool IsIsolated(const Job& job) { return job.init_pid() > 0; }

// Whether its folder is not root's.
bool IsUsersFolder(const Job& job) { return job.users_own() && !IsIsolated(job); }

// Runs `body` in a child that is inside the job's namespaces. Returns its exit code, or why it was not started. The
// child and what it executes are killed if `give_up` says so (null: never), with 253 as the exit code. A CRIU with a
// user's rights cannot save an IPC namespace, and is in that, too: then it sees none.
absl::StatusOr<int> InsideJob(const Job& job, const std::function<int()>& body, const GiveUp& give_up = nullptr) {
  // Of a job without namespaces of its own: this process's.
  const std::string proc = "/proc/" + (IsIsolated(job) ? std::to_string(job.init_pid()) : "self") + "/ns/";
  const int pids = open((proc + "pid").c_str(), O_RDONLY | O_CLOEXEC);
  const int mounts = open((proc + "mnt").c_str(), O_RDONLY | O_CLOEXEC);
  const int ipc = open((proc + "ipc").c_str(), O_RDONLY | O_CLOEXEC);
  const int network = open((proc + "net").c_str(), O_RDONLY | O_CLOEXEC);
  const auto close_all = [&] {
    for (const int fd : {pids, mounts, ipc, network}) {
      if (fd >= 0) close(fd);
    }
  };
  if (pids < 0 || mounts < 0 || ipc < 0 || network < 0) {
    close_all();
    return absl::FailedPreconditionError("the job has ended");
  }
  fflush(nullptr);
  const pid_t helper = fork();
  if (helper == 0) {
    if (IsIsolated(job) && (setns(pids, CLONE_NEWPID) != 0 || setns(mounts, CLONE_NEWNS) != 0)) _exit(254);
    if (IsIsolated(job) && job.has_user() && setns(ipc, CLONE_NEWIPC) != 0) _exit(254);
    // A restart makes a new one with the same address; CRIU is not to save this one.
    if (job.has_network() && setns(network, CLONE_NEWNET) != 0) _exit(254);
    const pid_t inside = fork();
    if (inside == 0) _exit(body());
    if (inside < 0) _exit(254);
    // CRIU goes on if its caller is killed. Who reads that one's output is not to wait for CRIU.
    syscall(SYS_close_range, 0u, ~0u, 0u);
    PassOnKill(inside);
    int status = 0;
    while (waitpid(inside, &status, 0) < 0 && errno == EINTR) {
    }
    _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 253);
  }
  close_all();
  int status = 0;
  if (helper < 0) return ErrnoStatus("fork");
  const bool waited = Await(helper, give_up, &status);
  const int code = waited && WIFEXITED(status) ? WEXITSTATUS(status) : 253;
  if (code == 254) return absl::FailedPreconditionError("cannot enter the job's namespaces");
  return code;
}

// Whether CRIU waits in vain: it does, in rare cases, for a process that is killed while it looks at it.
class LostWait {
 public:
  explicit LostWait(std::vector<int> pids) : running_(std::move(pids)) {
    running_.erase(std::remove_if(running_.begin(), running_.end(), [](int pid) { return !IsRunning(pid); }),
                   running_.end());
  }
  bool IsLost() {
    if (std::all_of(running_.begin(), running_.end(), IsRunning)) return false;
    looks_ += 1;
    return lost_ = looks_ > kMostLooksAfterEnd;
  }
  bool lost() const { return lost_; }

 private:
  std::vector<int> running_;
  int looks_ = 0;
  bool lost_ = false;
};

// Signal to every process of the namespace but its init, or of the job that has none.
bool SignalAll(const Job& job, int signal) {
  if (!IsIsolated(job)) {
    // With the user's rights: a number may have become another process's.
    const ActAs user(AccountOf(job));
    bool ok = true;
    for (const int pid : ProcessesOf(job)) ok = (kill(pid, signal) == 0 || errno == ESRCH) && ok;
    return ok;
  }
  const absl::StatusOr<int> code = InsideJob(job, [signal] { return kill(-1, signal) == 0 || errno == ESRCH ? 0 : 1; });
  return code.ok() && *code == 0;
}

// Has all processes run on that were stopped, but those that somebody else had stopped, as numbered inside.
bool RunOn(const Job& job, const std::set<int>& stopped_before) {
  const ActAs user(AccountOf(job));
  std::map<int, UniqueFd> held;
  for (const int pid : ProcessesOf(job)) held[pid] = UniqueFd(int(syscall(SYS_pidfd_open, pid, 0u)));
  bool ok = true;
  // What is held and is the job's now, is so for good.
  for (const int pid : ProcessesOf(job)) {
    const auto process = held.find(pid);
    if (process == held.end() || process->second.get() < 0 || stopped_before.count(InnerPid(pid)) != 0) continue;
    ok = ContinueUnnoticed(pid, process->second.get()) && ok;
  }
  return ok;
}

// While a job with its own address is saved: its processes stand still, no connection is without a process, and then
// its network is silent. What CRIU has read of a connection must stay as it is, and a machine at the other end must not
// be told that the connection is gone.
class Standstill {
 public:
  explicit Standstill(const Job& job) : job_(job) {}
  ~Standstill() { End(); }
  Standstill(const Standstill&) = delete;
  Standstill& operator=(const Standstill&) = delete;
  // `still`: before the silence; null: nothing. `leave_stopped`: the dump stops the processes in any case.
  absl::Status Begin(bool leave_stopped, const std::function<absl::Status()>& still) {
    begun_ = job_.has_network();
    if (begun_ || leave_stopped) stopped_before_ = StoppedProcesses(job_);
    const auto stop = [this] { SignalAll(job_, SIGSTOP); };
    const auto run_on = [this] { RunOn(job_, stopped_before_); };
    if (begun_) CR_RETURN_IF_ERROR(BringToStandstill(job_, stop, run_on));
    if (still) CR_RETURN_IF_ERROR(still());
    if (!begun_) return absl::OkStatus();
    CR_RETURN_IF_ERROR(SilenceNetwork(job_.init_pid()));
    // Nobody can call any more, and CRIU would save the sockets' filters.
    LetCallersIn(job_);
    return absl::OkStatus();
  }
  void End() {
    if (std::exchange(begun_, false)) ContinueProcesses(job_, stopped_before_);
  }
  // Until ContinueProcesses, or the job's end.
  void Keep() { begun_ = false; }
  // Processes that somebody else had stopped, as numbered inside.
  const std::set<int>& stopped_before() const { return stopped_before_; }

 private:
  const Job& job_;
  bool begun_ = false;
  std::set<int> stopped_before_;
};

// The group of processes that has the job's terminal, as numbered inside; 0 if there is none any more.
int TerminalGroup(const Job& job) {
  const int foreground = StatOf(job.pid()).foreground;
  return foreground > 0 ? InnerPid(foreground) : 0;
}

// The files that are the program's standard streams.
std::set<std::pair<dev_t, ino_t>> StreamFiles(const Job& job) {
  std::set<std::pair<dev_t, ino_t>> files;
  for (int fd = 0; fd <= 2; ++fd) {
    struct stat status;
    const std::string path = "/proc/" + std::to_string(job.pid()) + "/fd/" + std::to_string(fd);
    if (stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode)) files.emplace(status.st_dev, status.st_ino);
  }
  return files;
}

// A device is the same under every node of it: what starts a process in a container, as podman exec does, may open the
// /dev/null of its own /dev for it.
bool IsSameFile(const struct stat& one, const struct stat& other) {
  if (S_ISCHR(one.st_mode) && S_ISCHR(other.st_mode)) return one.st_rdev == other.st_rdev;
  return one.st_ino == other.st_ino && one.st_dev == other.st_dev;
}

// What the job has open on mounts that are not in its namespace: all that it inherited. Of a job without one: its
// streams, which may become others at a restart. Of a restarted job also its outputs (cr-run --output, --error), since
// CRIU opens them within the namespace; not those that it has open in another way as well.
absl::Status FindInheritedFiles(const Job& job, const std::vector<int>& pids, ProcessFacts* facts) {
  const std::set<std::pair<dev_t, ino_t>> streams = StreamFiles(job);
  std::set<int> mounts;
  std::ifstream mount_info("/proc/" + std::to_string(job.init_pid()) + "/mountinfo");
  std::string line;
  while (std::getline(mount_info, line)) mounts.insert(atoi(line.c_str()));
  facts->clear_files();
  const std::set<std::string> outputs(job.outputs().begin(), job.outputs().end());
  std::map<std::string, InheritedFile> outputs_inside;  // by id
  std::set<std::string> ids, opened_otherwise;
  for (int pid : pids) {
    const std::string proc = "/proc/" + std::to_string(pid);
    const std::unique_ptr<DIR, int (*)(DIR*)> list(opendir((proc + "/fd").c_str()), closedir);
    while (const dirent* const entry = list ? readdir(list.get()) : nullptr) {
      if (entry->d_name[0] == '.') continue;
      const std::string path = proc + "/fd/" + entry->d_name;
      const std::string target = ReadLink(path);
      struct stat status;
      if (target.empty() || target[0] != '/' || stat(path.c_str(), &status) != 0) continue;
      std::ifstream fd_info(proc + "/fdinfo/" + entry->d_name);
      int mount = -1;
      unsigned flags = 0;
      while (std::getline(fd_info, line)) {
        if (line.compare(0, 7, "mnt_id:") == 0) mount = atoi(line.c_str() + 7);
        if (line.compare(0, 6, "flags:") == 0) flags = unsigned(strtoul(line.c_str() + 6, nullptr, 8));
      }
      const bool inside = IsIsolated(job) && mounts.count(mount) != 0;
      const bool known =
          IsIsolated(job) ? inside && outputs.count(target) == 0 : streams.count({status.st_dev, status.st_ino}) == 0;
      // Anonymous files (/memfd:...) are on mounts that no namespace has.
      if (mount < 0 || known || target.compare(0, 7, "/memfd:") == 0) continue;
      if (S_ISCHR(status.st_mode) && IsTerminal(status.st_rdev)) continue;
      if (S_ISCHR(status.st_mode) && status.st_rdev == kTerminalMaker) {
        return absl::FailedPreconditionError(
            "process " + std::to_string(pid) +
            " has inherited the other end of a terminal, which cannot be restored; start the job without it");
      }
      char id[64];
      snprintf(id, sizeof(id), "file[%x:%llx]", mount, static_cast<unsigned long long>(status.st_ino));
      InheritedFile found;
      found.set_id(id);
      found.set_path(target);
      found.set_flags(flags);
      if (inside) {
        const auto [same, is_new] = outputs_inside.emplace(id, found);
        if (!is_new && (same->second.flags() & O_ACCMODE) != (flags & O_ACCMODE)) opened_otherwise.insert(id);
        continue;
      }
      if (!ids.insert(id).second) continue;
      struct stat named;
      if (stat(target.c_str(), &named) != 0 || !IsSameFile(named, status)) {
        return absl::FailedPreconditionError("the job has the file " + target +
                                             " open, which is gone or was replaced by another one");
      }
      *facts->add_files() = found;
    }
  }
  for (const auto& [id, file] : outputs_inside) {
    if (opened_otherwise.count(id) == 0) *facts->add_files() = file;
  }
  return absl::OkStatus();
}

std::string ProcessText(int pid) {
  const std::string name = CommOf(pid);
  return "process " + std::to_string(pid) + (name.empty() ? "" : " (" + Printable(name) + ")");
}

// `session_too`: it is a child of the first process, but its session's leader has ended.
std::string OutlivedText(const std::string& process, bool session_too) {
  const std::string all = process + " of the job has outlived the process that started it";
  if (session_too) {
    return all +
           ", and the one that made its session, and a restart could not bring it back as a child of the job's first "
           "process: end it, or have it call setsid itself";
  }
  return all +
         ", and only processes whose parents still run up to the job's first one can be saved: end it, or start the "
         "job "
         "with cr-run --adopt";
}

// Whether a process in the tree below the first one would be a child of the namespace's init after a restart. CRIU
// restores the session of an ended leader by a process that starts its members and ends; those then go to the next one
// that takes processes without parents, which the first one does only once it is complete.
bool LosesParent(const Job& job, int pid) {
  const pid_t session = getsid(pid);
  return ParentOf(pid) == job.pid() && session != pid && session != getsid(job.pid());
}

// Namespaces of which CRIU saves one of each kind only. It also saves further mounts and networks, but restores them
// only if the job's first process had its own ones made by CRIU.
constexpr const char* kOnlyOnce[] = {"user", "mnt", "net", "ipc", "uts", "cgroup", "time"};

// Whether a process of the job's is in a namespace that CRIU cannot save beside the job's own.
absl::Status CheckOnlyOnce(const Job& job, const std::vector<int>& pids) {
  const auto refuse = [&](int pid, const char* name) {
    return absl::FailedPreconditionError(
        ProcessText(pid) + " is in a " + name +
        " namespace of its own, as programs in containers are, and those of a job that is started in this one; it "
        "cannot be saved. End it first, or start it outside of the job");
  };
  const auto space = [](int pid, const char* name) { return ReadLink("/proc/" + std::to_string(pid) + "/ns/" + name); };
  for (const char* const name : kOnlyOnce) {
    const std::string first = space(job.pid(), name);
    for (const int pid : pids) {
      const std::string its = space(pid, name);
      if (its != first && !its.empty() && !first.empty() && IsRunning(pid)) return refuse(pid, name);
    }
  }
  int found = 0;
  const uint64_t own = PidNamespace(getpid());
  for (const int pid : AllProcesses()) {
    const uint64_t its = PidNamespace(pid);
    if (its == 0 || its == own || its == job.pid_namespace() || !IsRunning(pid)) continue;
    int above = pid;
    while (above > 0 && above != job.init_pid()) above = ParentOf(above);
    if (above == job.init_pid()) found = pid;
    if (found != 0) break;
  }
  return found == 0 ? absl::OkStatus() : refuse(found, "PID");
}

// CRIU saves the first process and those below it. One whose parents have ended is a child of the first one, unless
// that does not want it: then it is one of the namespace's init, would end with a stopped job and not come back.
absl::Status CheckTree(const Job& job, const std::vector<int>& pids) {
  for (int pid : pids) {
    int above = pid;
    while (above > 0 && above != job.pid() && above != job.init_pid()) above = ParentOf(above);
    const bool in_tree = above != job.init_pid();
    if (in_tree && !LosesParent(job, pid)) continue;
    return absl::FailedPreconditionError(OutlivedText(ProcessText(pid), in_tree));
  }
  return absl::OkStatus();
}

// The same for a job without an init process: there they are children of its cr-run, and may use CUDA.
absl::Status CheckOwnTree(const Job& job) {
  // Other users' processes can have the job's variables, too.
  const ActAs user(AccountOf(job));
  if (ParentOf(job.pid()) != job.runner_pid()) {
    return absl::FailedPreconditionError(
        "the job's cr-run has ended before it, and it is not known what belongs to the job; it cannot be saved");
  }
  const std::vector<int> pids = ProcessesOf(job);
  for (const int pid : pids) {
    if (LosesParent(job, pid)) return absl::FailedPreconditionError(OutlivedText(ProcessText(pid), true));
  }
  for (const CudaProcess& process : FindCudaProcesses(job, job.directory())) {
    if (std::find(pids.begin(), pids.end(), process.pid) != pids.end()) continue;
    return absl::FailedPreconditionError(
        NameOf(process) +
        " uses the job's GPU server, but the job's first process has not started it, and it cannot "
        "be saved; end it first");
  }
  for (const int pid : OutlivedProcessesOf(job)) {
    if (ParentOf(pid) != job.runner_pid()) continue;
    return absl::FailedPreconditionError(OutlivedText(ProcessText(pid), false));
  }
  return absl::OkStatus();
}

constexpr const char* kNamespaces[] = {"user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time"};

// Of a job without namespaces of its own: whether all of its processes are where this tool, and CRIU with it, are.
absl::Status CheckNamespaces(const Job& job) {
  struct stat own_root, root;
  for (const int pid : ProcessesOf(job)) {
    const std::string process = "/proc/" + std::to_string(pid);
    if (!IsRunning(pid)) continue;
    std::string other;
    for (const char* const name : kNamespaces) {
      const std::string own = ReadLink(std::string("/proc/self/ns/") + name), its = ReadLink(process + "/ns/" + name);
      if (own != its && IsRunning(pid)) other = std::string(name) + " namespace";
    }
    if (other.empty() && stat("/", &own_root) == 0 && stat((process + "/root").c_str(), &root) == 0 &&
        (own_root.st_ino != root.st_ino || own_root.st_dev != root.st_dev)) {
      other = "root folder";
    }
    if (other.empty()) continue;
    return absl::FailedPreconditionError(ProcessText(pid) + " has another " + other +
                                         " than this tool, and CRIU cannot save it; start the job outside of "
                                         "containers and of namespaces of its user's own");
  }
  return absl::OkStatus();
}

// Whether one of the kernel's lists of System V objects has one that the processes of `job` may have made or used. No
// list says which processes use semaphores.
bool MayUse(std::istream* list, const Job& job) {
  const std::vector<int> pids = ProcessesOf(job);
  std::string line, word;
  std::vector<std::string> columns;
  std::getline(*list, line);
  for (std::istringstream words(line); words >> word;) columns.push_back(word);
  while (std::getline(*list, line)) {
    std::istringstream words(line);
    bool users = false, fresh = false, used = false;
    for (const std::string& column : columns) {
      words >> word;
      const uint64_t number = strtoull(word.c_str(), nullptr, 10);
      if (column == "uid" || column == "cuid") users = users || number == job.user().id();
      if (column == "ctime") fresh = number + 1 >= uint64_t(job.started_unix_ms()) / 1000;
      if (column.size() == 4 && column.compare(1, 3, "pid") == 0) {
        used = used || std::find(pids.begin(), pids.end(), int(number)) != pids.end();
      }
      if (column.size() == 5 && column.compare(2, 3, "pid") == 0) {
        used = used || std::find(pids.begin(), pids.end(), int(number)) != pids.end();
      }
    }
    if (used || (users && fresh)) return true;
  }
  return false;
}

// Whether there is anything in the job's IPC namespace, or anything of the job in this machine's.
bool UsesSystemV(const Job& job) {
  if (!IsIsolated(job)) {
    for (const char* const path : kSystemV) {
      std::ifstream list(path);
      if (MayUse(&list, job)) return true;
    }
    return false;
  }
  const auto look = [] {
    for (const char* const path : kSystemV) {
      std::ifstream list(path);
      std::string line;
      // The first line has the columns' names.
      if (std::getline(list, line) && std::getline(list, line)) return 1;
    }
    return 0;
  };
  const absl::StatusOr<int> found = InsideJob(job, look);
  return found.ok() && *found == 1;
}

// Of a job of another user's: all of its processes have exactly that user's rights. CRIU, which has these rights only,
// could not bring others back.
absl::Status CheckRights(const Job& job, const std::vector<int>& pids) {
  const std::optional<Account> account = AccountOf(job);
  if (!account) return absl::OkStatus();
  const std::vector<uint64_t> users(4, account->user), groups(4, account->group);
  for (int pid : pids) {
    std::vector<uint64_t> more = StatusNumbers(pid, "Groups", 10);
    std::sort(more.begin(), more.end());
    const std::vector<uint64_t> capabilities = StatusNumbers(pid, "CapPrm", 16);
    // One that has ended uses its rights no more. Restored, it has CRIU's.
    if (!IsRunning(pid)) continue;
    if (StatusNumbers(pid, "Uid", 10) == users && StatusNumbers(pid, "Gid", 10) == groups &&
        std::equal(more.begin(), more.end(), account->groups.begin(), account->groups.end()) &&
        capabilities == std::vector<uint64_t>{0}) {
      continue;
    }
    return absl::FailedPreconditionError(ProcessText(pid) + " has other rights than the job, which runs as " +
                                         NameOf(*account) + ", and cannot be saved; wait until it has ended");
  }
  if (!UsesSystemV(job)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "the job uses System V memory, semaphores or message queues, which cannot be saved of another user's job; have "
      "the program use POSIX ones");
}

// CRIU opens the streams that a job gets once more, and so the user must have a right to what is open as `fd`. A pipe
// is given to him, and nobody else gets one by that: it has no name.
bool LetOpen(const Account& account, int fd) {
  struct statfs system;
  const bool is_pipe = fstatfs(fd, &system) == 0 && system.f_type == PIPEFS_MAGIC;
  if (is_pipe && fchown(fd, account.user, gid_t(-1)) != 0) return false;
  const ActAs user(&account);
  const int mode = fcntl(fd, F_GETFL) & O_ACCMODE;
  const int again = open(("/proc/self/fd/" + std::to_string(fd)).c_str(), mode | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (again >= 0) close(again);
  return again >= 0;
}

// Lets CRIU, which has the user's rights, write into a folder of root's that nobody can come to by its path.
absl::Status LendFolder(const Account& account, int folder) {
  if (fchown(folder, account.user, gid_t(-1)) == 0) return absl::OkStatus();
  return ErrnoStatus("cannot let CRIU write the image");
}

// Nobody is kept from sending meanwhile, for which CRIU would need iptables: what others send is not in the image
// anyway.
// Always: a connection may have been made since the processes were looked at.
std::vector<std::string> TcpOptions() { return {"--tcp-established", "--network-lock", "skip"}; }

// The job's own terminal is given to its session by init; CRIU only has the descriptors. A user's own job is in the
// session and group of his shell.
std::vector<std::string> TerminalOptions(const Job& job) {
  if (job.terminal() || job.users_own()) return {"--shell-job"};
  return {};
}

std::string Several(const std::vector<Connection>& connections) {
  std::string text = ToText(connections[0]);
  if (connections.size() > 1) text += " and " + std::to_string(connections.size() - 1) + " more";
  return text;
}

// Fails if a connection has no second end that would come back with it, and is not to be closed. Those of an address
// that comes back with the job go on.
absl::Status CheckConnections(const Job& job, const std::vector<int>& pids, const ProcessFacts& facts) {
  if (facts.tcp_close() || job.has_network()) return absl::OkStatus();
  std::vector<Connection> others = WithOthers(OpenConnections(pids));
  if (!others.empty()) {
    // Not one whose other end a process has got, or closed, since the processes were listed.
    usleep(kLookAgainUs);
    const std::vector<Connection> now = WithOthers(OpenConnections(ProcessesOf(job)));
    const std::set<Connection> last(now.begin(), now.end());
    const auto passes = [&](const Connection& one) { return last.count(one) == 0; };
    others.erase(std::remove_if(others.begin(), others.end(), passes), others.end());
  }
  if (others.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "the job has TCP connections with others, which cannot come back after a restart: " + Several(others) +
      "; with --tcp-close it is saved, and finds them closed then; a job that was started with an address of its own "
      "(cr-run --address) keeps them");
}

// Changes those of CRIU's files in the image whose names are `wanted`. `what`: what each describes, for messages.
absl::Status ChangeImages(const std::string& image_folder, const std::function<bool(const char* name)>& wanted,
                          bool (*change)(std::string*), const std::string& what) {
  const std::unique_ptr<DIR, int (*)(DIR*)> list(opendir(image_folder.c_str()), closedir);
  if (!list) return ErrnoStatus("cannot read " + image_folder);
  while (const dirent* const entry = readdir(list.get())) {
    if (!wanted(entry->d_name)) continue;
    const std::string path = image_folder + "/" + entry->d_name;
    std::string image;
    if (!ReadImageFile(path, &image))
      return absl::UnimplementedError("cannot read CRIU's image of " + what + ": " + path);
    const std::string before = image;
    if (!change(&image))
      return absl::UnimplementedError("cannot read this CRIU version's image of " + what + ": " + path);
    if (image != before) CR_RETURN_IF_ERROR(WriteImageFile(path, image));
  }
  return absl::OkStatus();
}

// What the image has of the connections themselves, so that CRIU sends nothing before both ends are there.
absl::Status SettleStreams(const std::string& image_folder) {
  const auto is_stream = [](const char* name) { return strncmp(name, "tcp-stream-", 11) == 0; };
  return ChangeImages(image_folder, is_stream, CallAllSent, "a TCP connection");
}

absl::Status SettleTerminal(const Job& job, const std::string& image_folder) {
  const std::string path = image_folder + "/tty-info.img";
  std::string image;
  if (!job.terminal() || access(path.c_str(), F_OK) != 0) return absl::OkStatus();
  if (ReadImageFile(path, &image) && LetGoOfTerminals(&image)) return WriteImageFile(path, image);
  return absl::UnimplementedError("cannot read from this CRIU version's image which terminals the job has");
}

// Waits a while for what may have been left of an earlier dump. Returns -1 and errno on failure. Of a user's own job
// the folder is his, and he may have locked the file, too.
int LockDump(const Job& job, const std::string& work_folder) {
  const ActAs user(IsUsersFolder(job) ? AccountOf(job) : std::nullopt);
  const int lock = open((work_folder + "/" + kDumpLock).c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  for (int waited = 0; lock >= 0 && flock(lock, LOCK_EX | LOCK_NB) != 0; waited += kLockPauseUs) {
    if (waited < kLockUs && (errno == EWOULDBLOCK || errno == EINTR) && usleep(kLockPauseUs) == 0) continue;
    const int code = errno;
    close(lock);
    errno = code;
    return -1;
  }
  return lock;
}

// Looks which connections the image has after all. Those with others are closed in it, if that is wanted.
absl::Status SettleConnections(const Job& job, const ProcessFacts& facts, const std::string& image_folder,
                               DumpFacts* found) {
  const std::string path = image_folder + "/files.img";
  std::string image;
  std::vector<Connection> connections;
  CR_RETURN_IF_ERROR(SettleStreams(image_folder));
  if (!ReadImageFile(path, &image) || !SavedConnections(image, &connections))
    return absl::UnimplementedError("cannot read from this CRIU version's image which TCP connections the job has");
  const std::vector<Connection> others = WithOthers(connections);
  if (others.empty() || (job.has_network() && !facts.tcp_close())) return absl::OkStatus();
  if (!facts.tcp_close()) {
    found->failure_passes = true;
    return absl::UnavailableError("the job has opened or lost a TCP connection while it was saved: " + Several(others) +
                                  "; try again");
  }
  CloseSaved(others, &image);
  return WriteImageFile(path, image);
}

// Whether the image has all processes of the job: CRIU saves those below the first one, and one may have lost its
// parent since they were looked at. `before`: the processes when CRIU was started, since there may be newer ones; null:
// all have stood still since CRIU saved them, so none can be newer.
absl::Status CheckSavedTree(const Job& job, const std::vector<int>* before, const std::string& image_folder,
                            DumpFacts* found) {
  std::vector<int> now = ProcessesOf(job);
  if (!IsIsolated(job)) {
    const std::vector<int> outlived = OutlivedProcessesOf(job);
    now.insert(now.end(), outlived.begin(), outlived.end());
  }
  for (const int pid : now) {
    if (before && std::find(before->begin(), before->end(), pid) == before->end()) continue;
    const int number = InnerPid(pid);
    if (number == 0 || !IsRunning(pid)) continue;
    if (access((image_folder + "/core-" + std::to_string(number) + ".img").c_str(), F_OK) == 0) continue;
    found->failure_passes = true;
    return absl::UnavailableError(ProcessText(pid) +
                                  " of the job lost its parent while the job was saved, and was not saved; try again");
  }
  return absl::OkStatus();
}

// A restored process runs, unless somebody else than Standstill had stopped it.
absl::Status SettleStates(const std::set<int>& stopped_before, const std::string& image_folder) {
  const auto runs = [&](const char* name) {
    int number = 0;
    return sscanf(name, "core-%d.img", &number) == 1 && stopped_before.count(number) == 0;
  };
  return ChangeImages(image_folder, runs, LetRun, "a process");
}

// Has timers that ran out while their process stood still go on after a restore.
absl::Status SettleTimers(const std::string& image_folder) {
  const auto is_files = [](const char* name) { return strcmp(name, "files.img") == 0; };
  const auto is_process = [](const char* name) {
    int number = 0;
    return sscanf(name, "core-%d.img", &number) == 1;
  };
  CR_RETURN_IF_ERROR(ChangeImages(image_folder, is_files, KeepTimersOn, "a timer"));
  return ChangeImages(image_folder, is_process, KeepAlarmOn, "a process");
}

// Whether CRIU can restore all files that it has saved. What a process had open before was looked at (obstacles.h).
absl::Status CheckSavedFiles(const std::string& image_folder, DumpFacts* found) {
  std::string image, gone;
  if (!ReadImageFile(image_folder + "/files.img", &image) ||
      !ReadFilesImage(image, FileKind::kRegular, [&gone](protozero::pbf_reader file) {
        while (file.next(kNameField)) {
          const std::string path = file.get_string();
          if (IsGoneInRestore(path)) gone = path;
        }
      })) {
    return absl::UnimplementedError("cannot read from this CRIU version's image which files the job has open");
  }
  if (gone.empty()) return absl::OkStatus();
  found->failure_passes = true;
  return absl::UnavailableError("a process of the job has opened " + gone +
                                ", which cannot be restored, while the job was saved; try again");
}

// After a dump has succeeded: whether the image has what it must have, and the changes in it that a restore needs.
// `before`: as in CheckSavedTree.
absl::Status SettleImage(const Job& job, const ProcessFacts& facts, const std::vector<int>* before,
                         const std::string& image_folder, DumpFacts* found) {
  CR_RETURN_IF_ERROR(CheckSavedFiles(image_folder, found));
  CR_RETURN_IF_ERROR(CheckSavedTree(job, before, image_folder, found));
  // What is in a queue now may have been read at another try.
  found->failure_passes = true;
  CR_RETURN_IF_ERROR(CheckLosses(image_folder, ProcessesOf(job)));
  CR_RETURN_IF_ERROR(CheckQueues(image_folder, ProcessesOf(job)));
  found->failure_passes = false;
  CR_RETURN_IF_ERROR(SettleQueues(image_folder));
  CR_RETURN_IF_ERROR(SettleLinks(facts, image_folder));
  CR_RETURN_IF_ERROR(SettleTerminal(job, image_folder));
  CR_RETURN_IF_ERROR(SettleTimers(image_folder));
  if (job.has_network()) CR_RETURN_IF_ERROR(SettleStates(found->stopped_before, image_folder));
  return SettleConnections(job, facts, image_folder, found);
}

}  // namespace

absl::StatusOr<std::string> FindCriu() {
  const char* const named = getenv("CUDA_REMOTE_CRIU");
  if (named && *named) {
    if (access(named, X_OK) == 0) return named;
    return absl::FailedPreconditionError(std::string("CUDA_REMOTE_CRIU names ") + named + ", which cannot be executed");
  }
  if (access(kPrivateCriu, X_OK) == 0) return kPrivateCriu;
  std::istringstream folders(getenv("PATH") ? getenv("PATH") : "");
  std::string folder;
  std::vector<std::string> places{"/usr/sbin", "/usr/local/sbin"};
  while (std::getline(folders, folder, ':')) places.push_back(folder);
  for (const std::string& place : places) {
    std::string criu = place + "/criu";
    if (access(criu.c_str(), X_OK) == 0) return criu;
  }
  return absl::NotFoundError(
      "CRIU, which saves the processes of a job, is not installed: run setup-criu as root (it is in tools, or in "
      "lib/cuda-remote of an installation), or set CUDA_REMOTE_CRIU");
}

absl::Status HasCapabilities() {
  const std::string missing = MissingCapability({{CAP_SYS_ADMIN, "SYS_ADMIN"}, {CAP_SYS_PTRACE, "SYS_PTRACE"}});
  if (missing.empty()) return absl::OkStatus();
  return absl::PermissionDeniedError("saving and restoring processes needs " + missing);
}

std::vector<int> CriuCapabilities() {
  return {CAP_SYS_ADMIN, CAP_CHECKPOINT_RESTORE, CAP_SYS_PTRACE, CAP_NET_ADMIN, CAP_NET_RAW, CAP_SYS_CHROOT, CAP_KILL,
          CAP_SETPCAP,   CAP_SYS_RESOURCE};
}

std::string CriuVersion(const std::string& criu) {
  // As "Version: 4.2.1".
  FILE* const out = popen(("'" + criu + "' --version 2>/dev/null").c_str(), "r");
  char line[256] = "";
  const bool read = out && fgets(line, sizeof(line), out);
  if (out) pclose(out);
  const std::string text = read ? line : "";
  const size_t from = text.find_first_of("0123456789");
  const size_t end = text.find_first_not_of("0123456789.", from);
  return from == std::string::npos ? "" : text.substr(from, end - from);
}

std::string CriuCheck(const std::string& criu) {
  FILE* const out = popen(("'" + criu + "' check 2>&1").c_str(), "r");
  std::string errors, last_pid;
  char line[512];
  while (out && fgets(line, sizeof(line), out)) {
    std::string text = line;
    while (!text.empty() && text.back() == '\n') text.pop_back();
    if (text.find("Warn") == 0 || text.find(kNoTunnel) != std::string::npos) continue;
    if (text.find(kLastPid) != std::string::npos) {
      last_pid = text;
    } else if (errors.size() <= kMostCheckBytes) {
      errors += (errors.empty() ? "" : "; ") + text;
    }
  }
  const int status = out ? pclose(out) : -1;
  if (status == 0) return "";
  if (!errors.empty() || last_pid.empty()) return errors.empty() ? "it does not say why" : errors;
  // That CRIU cannot write ns_last_pid is all that it misses, and it needs that only without clone3.
  const std::string clone3 = "'" + criu + "' check --feature clone3_set_tid >/dev/null 2>&1";
  FILE* const asked = popen(clone3.c_str(), "r");
  return asked && pclose(asked) == 0 ? "" : last_pid;
}

absl::Status DescribeProcesses(const Job& job, bool close_tcp, ProcessFacts* facts) {
  facts->set_tcp_close(close_tcp);
  if ((!IsIsolated(job) && !job.users_own()) || !job.no_checkpoint().empty()) {
    return absl::FailedPreconditionError("this job cannot be checkpointed: " + (job.no_checkpoint().empty()
                                                                                    ? "it has no PID namespace"
                                                                                    : job.no_checkpoint()));
  }
  CR_RETURN_IF_ERROR(HasCapabilities());
  if (!JobIsAlive(job)) return absl::FailedPreconditionError("the job has ended");
  // Once: the second time the job stands still, and to list them takes as long as the machine has processes.
  const std::vector<int> pids = ProcessesOf(job);
  const std::vector<DeviceUser> users = DeviceUsersOf(job, pids);
  if (!users.empty()) {
    return absl::FailedPreconditionError(
        ToText(users[0]) + (users.size() > 1 ? ", and " + std::to_string(users.size() - 1) + " more do" : "") +
        "; what it has there would not be saved");
  }
  bool listed = false;
  // Jobs are described once before they stop, and again when they have.
  const bool is_held = !facts->criu_version().empty();
  const std::vector<Obstacle> obstacles =
      FindObstacles([&] { return std::exchange(listed, true) ? ProcessesOf(job) : pids; }, is_held);
  if (!obstacles.empty()) {
    std::string text = ToText(obstacles[0]);
    for (size_t i = 1; i < obstacles.size(); ++i) text += ". " + ToText(obstacles[i]);
    return absl::FailedPreconditionError(text);
  }
  facts->set_terminal_group(job.terminal() ? TerminalGroup(job) : 0);
  facts->clear_stdio();
  for (int fd = 0; fd <= 2; ++fd) {
    const std::string path = "/proc/" + std::to_string(job.pid()) + "/fd/" + std::to_string(fd);
    const std::string target = ReadLink(path);
    if (target.empty()) continue;  // closed
    Stdio* const stream = facts->add_stdio();
    stream->set_fd(fd);
    stream->set_target(target);
    struct stat status;
    if (stat(path.c_str(), &status) == 0 && S_ISCHR(status.st_mode)) {
      stream->set_terminal(IsTerminal(status.st_rdev));
      stream->set_device(status.st_dev);
      stream->set_rdevice(status.st_rdev);
    }
    if (stream->target().compare(0, 7, "socket:") == 0) {
      return absl::FailedPreconditionError("the job's descriptor " + std::to_string(fd) +
                                           " is a socket, which cannot be restored: start the job with its output "
                                           "going to a file, a pipe or a terminal");
    }
  }
  if (!is_held) {
    // CRIU takes some time to say so.
    CR_ASSIGN_OR_RETURN(const std::string criu, FindCriu());
    facts->set_criu_version(CriuVersion(criu));
  }
  // Those of this machine, also if the job was started on one with fewer: what it has loaded since may use them all.
  facts->clear_instruction_sets();
  for (const std::string& name : InstructionSetsHere()) facts->add_instruction_sets(name);
  facts->clear_kernel_features();
  std::map<int, std::vector<Mapping>> processes;
  std::set<std::string> features;
  for (const int pid : pids) {
    processes[pid] = MappingsOf("/proc/" + std::to_string(pid));
    features.merge(KernelFeaturesOf(processes[pid]));
  }
  for (const std::string& name : features) facts->add_kernel_features(name);
  FindAffinities(job, facts);
  FindThreadSettings(job, facts);
  FindSharedFiles(processes, job.directory(), facts);
  facts->set_own_loader_cache(HasOwnLoaderCache(job));
  CR_RETURN_IF_ERROR(CheckRights(job, pids));
  absl::Status tree;
  listed = false;
  const auto check_tree = [&] {
    const std::vector<int> now = std::exchange(listed, true) ? ProcessesOf(job) : pids;
    tree = IsIsolated(job) ? CheckTree(job, now) : CheckNamespaces(job);
    if (tree.ok()) tree = IsIsolated(job) ? CheckOnlyOnce(job, now) : CheckOwnTree(job);
    return tree.ok();
  };
  if (!Becomes(check_tree, kParentless)) return tree;
  CR_RETURN_IF_ERROR(FindInheritedFiles(job, pids, facts));
  return CheckConnections(job, pids, *facts);
}

std::string CriuErrors(const std::string& path) {
  std::ifstream log(path);
  std::string line, found;
  int count = 0;
  while (count < kMaxLogLines && std::getline(log, line)) {
    // CRIU says this wherever it lacks one privilege; it does no harm.
    const size_t at = line.find("Error (");
    if (at == std::string::npos || line.find("RLIMIT_NOFILE") != std::string::npos) continue;
    const size_t colon = line.find("): ", at);
    found += (count ? "; " : "") + (colon == std::string::npos ? line : line.substr(colon + 3));
    ++count;
  }
  if (found.find("Can't link remap to ") != std::string::npos) {
    found += "; a file link_remap.NUMBER in the same folder is in the way: remove it if no image of CRIU's needs it";
  }
  return found.empty() ? "it does not say why" : found;
}

bool MayLackRights(const std::string& errors) {
  return std::any_of(std::begin(kForbidden), std::end(kForbidden), [&](const std::string& text) {
    for (size_t at = errors.find(text); at != std::string::npos; at = errors.find(text, at + 1)) {
      const size_t end = at + text.size();
      if (end == errors.size() || !isalnum(static_cast<unsigned char>(errors[end]))) return true;
    }
    return false;
  });
}

std::string KeepCriuLog(const std::string& text, const std::string& kept) {
  if (text.empty()) return "";
  // Nobody else's file or link.
  unlink(kept.c_str());
  const int fd = open(kept.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return "";
  const bool written = write(fd, text.data(), text.size()) == ssize_t(text.size());
  close(fd);
  return written ? "; CRIU's log is " + kept : "";
}

uint64_t SavedBytes(const Job& job) {
  uint64_t kib = 0;
  for (const int pid : ProcessesOf(job)) {
    for (const uint64_t number : StatusNumbers(pid, "RssAnon", 10)) kib += number;
  }
  return kib << 10;
}

std::string DumpLog(const Job& job, const std::string& image_folder, const std::string& work_folder) {
  return (IsUsersFolder(job) ? image_folder : work_folder) + "/" + kDumpLog;
}

absl::Status DumpProcesses(const Job& job, const ProcessFacts& facts, const std::string& image_folder,
                           const std::string& work_folder, bool leave_stopped,
                           const std::function<absl::Status()>& still, PageReceiver* pages, DumpFacts* found,
                           const std::function<bool()>& cancelled) {
  CR_ASSIGN_OR_RETURN(const std::string criu, FindCriu());
  // By descriptor: the job's mount namespace may not see where the image goes.
  const std::optional<Account> account = AccountOf(job);
  // The job's folder is closed to its user.
  const std::string log_folder = account ? image_folder : work_folder;
  UniqueFd image(open(image_folder.c_str(), O_RDONLY | O_DIRECTORY));
  if (!image.ok()) return ErrnoStatus("cannot open " + image_folder);
  UniqueFd work(open(log_folder.c_str(), O_RDONLY | O_DIRECTORY));
  if (!work.ok()) return ErrnoStatus("cannot open " + log_folder);
  std::vector<std::string> command = {criu,
                                      "dump",
                                      "--tree",
                                      std::to_string(job.inner_pid()),
                                      "--images-dir",
                                      "/proc/self/fd/" + std::to_string(image.get()),
                                      "--work-dir",
                                      "/proc/self/fd/" + std::to_string(work.get()),
                                      "--log-file",
                                      kDumpLog,
                                      leave_stopped || job.has_network() ? "--leave-stopped" : "--leave-running",
                                      "--manage-cgroups=ignore",
                                      "--ext-unix-sk",
                                      "--file-locks",
                                      "--link-remap",
                                      "--ghost-limit",
                                      "1073741824"};
  for (const Stdio& stream : facts.stdio())
    if (stream.terminal()) command.insert(command.end(), {"--external", TerminalName(stream)});
  if (facts.shared_files_size() > 0) {
    const std::string script = FindCompanion("cr-hold", kOwnFolder);
    if (script.empty())
      return absl::FailedPreconditionError("cr-hold is not beside this tool: the installation is incomplete");
    command.insert(command.end(), {"--action-script", script});
  }
  const std::string preload = FindCompanion("libcuda-remote-criu.so", kOwnFolder);
  if (preload.empty()) {
    return absl::FailedPreconditionError(
        "libcuda-remote-criu.so is not beside this tool: the installation is incomplete");
  }
  if (account) command.push_back("--unprivileged");
  const std::string shared_files = SharedFilesToCopy(facts, image.get());
  for (const InheritedFile& file : facts.files()) command.insert(command.end(), {"--external", file.id()});
  for (const std::string& option : TcpOptions()) command.push_back(option);
  for (const std::string& option : TerminalOptions(job)) command.push_back(option);
  // CRIU has this open, too, and goes on if its caller is killed; then this waits for it.
  UniqueFd lock(LockDump(job, work_folder));
  if (!lock.ok()) return ErrnoStatus("cannot lock " + work_folder + "/" + kDumpLock);
  const std::string log = DumpLog(job, image_folder, work_folder);
  unlink(log.c_str());
  unlink((image_folder + "/" + kSocketFactsName).c_str());  // of another try
  Standstill standstill(job);
  CR_RETURN_IF_ERROR(standstill.Begin(leave_stopped, still));
  found->stopped_before = standstill.stopped_before();
  const LinkLocks links(facts);
  const std::vector<int> before = ProcessesOf(job);
  ProcessMemory memory(job, before);
  const auto read = [&memory](int process, uint64_t address, char* to, size_t bytes) {
    return memory.Read(process, address, to, bytes);
  };
  CR_ASSIGN_OR_RETURN(UniqueFd page_socket, pages->Begin(image.get(), read));
  command.insert(command.end(), {"--page-server", "--ps-socket", std::to_string(page_socket.get())});
  UniqueFd settings(openat(image.get(), kOwnSettingsFile, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  if (!settings.ok()) return ErrnoStatus("cannot write into " + image_folder);
  const std::string kernel = CriuFactsPath(criu);
  LostWait wait(before);
  // Else CRIU, which may have more rights, sends all of it.
  const bool hides = memory.MayRead();
  const auto execute = [&] {
    // Not in this machine's own mounts.
    if (IsIsolated(job)) ShowCriuFacts(kernel);
    std::vector<char*> arguments;
    for (std::string& word : command) arguments.push_back(&word[0]);
    arguments.push_back(nullptr);
    const int null = open("/dev/null", O_RDWR);
    for (int fd : {0, 1, 2}) dup2(null, fd);
    syscall(SYS_close_range, 3u, ~0u, 4u /* CLOSE_RANGE_CLOEXEC */);
    for (const UniqueFd* needed : {&image, &work, &lock, &page_socket, &settings}) fcntl(needed->get(), F_SETFD, 0);
    for (const UniqueFd& needed : links.locks()) fcntl(needed.get(), F_SETFD, 0);
    if (facts.shared_files_size() > 0) setenv(kSharedFilesVariable, shared_files.c_str(), 1);
    setenv("LD_PRELOAD", preload.c_str(), 1);
    setenv(kSocketFactsVariable, std::to_string(image.get()).c_str(), 1);
    setenv(kNoteSettingsVariable, std::to_string(settings.get()).c_str(), 1);
    if (hides) setenv(kPagesSocketVariable, std::to_string(page_socket.get()).c_str(), 1);
    if (account && !Become(*account, CriuCapabilities())) return 126;
    execv(arguments[0], arguments.data());
    return 127;
  };
  // What fails besides CRIU.
  absl::Status status = account ? LendFolder(*account, image.get()) : absl::OkStatus();
  // Of a user's job, CRIU has the user's number: the user may stop it.
  std::optional<StallWatch> watch;
  bool stalled = false;
  const auto give_up = [&](pid_t helper) {
    if (!watch) watch.emplace(helper, [pages] { return pages->progress(); });
    stalled = watch->IsStalled(cancelled && cancelled() ? StallWatch::kHurried : StallWatch::kPatient);
    return stalled || wait.IsLost();
  };
  const absl::StatusOr<int> code = status.ok() ? InsideJob(job, execute, give_up) : absl::StatusOr<int>(status);
  const bool dumped = code.ok() && *code == 0;
  // Also if something that CRIU has started has this open.
  shutdown(page_socket.get(), SHUT_WR);
  page_socket.Close();
  const absl::Status received = pages->Received();
  const std::string unreceived(received.message());
  if (!received.ok() && dumped) {
    status = absl::DataLossError("CRIU has not sent the memory of the job's processes" +
                                 (unreceived.empty() ? "" : ": " + unreceived));
  }
  if (!dumped || !leave_stopped) standstill.End();
  if (account && status.ok()) {
    // Nothing of CRIU's runs any more. The log goes where it is looked for.
    status = OpenToCriu(*account, image.get());
    if (const std::string written = log_folder + "/" + kDumpLog; written != log) {
      std::string text;
      if (ReadImageFile(written, &text)) KeepCriuLog(text, log);
      unlink(written.c_str());
    }
    // What the job had when it was looked at is not what it must have had when it was saved.
    if (status.ok() && dumped && IsUsersFolder(job)) status = CheckSavedRights(image_folder, *account);
  }
  if (dumped && !status.ok() && leave_stopped) ContinueProcesses(job, found->stopped_before);
  image.Close();
  work.Close();
  lock.Close();
  unlink((log_folder + "/stats-dump").c_str());
  if (dumped && !status.ok()) return status;
  if (stalled) {
    return absl::DeadlineExceededError(
        "CRIU was stopped, as its user may do, or has made no progress for minutes; it was ended, and nothing is "
        "saved");
  }
  if (wait.lost())
    return absl::UnavailableError("CRIU did not notice that a process of the job had ended, and was stopped");
  if (dumped) {
    unlink(log.c_str());
    status = SettleImage(job, facts, leave_stopped ? nullptr : &before, image_folder, found);
    if (leave_stopped && status.ok()) standstill.Keep();
    if (leave_stopped && !status.ok()) ContinueProcesses(job, found->stopped_before);
    return status;
  }
  if (!code.ok()) return code.status();
  const std::string errors = CriuErrors(log);
  found->failure_passes = std::any_of(std::begin(kBeingMade), std::end(kBeingMade),
                                      [&errors](const char* text) { return errors.find(text) != std::string::npos; });
  const std::string refusal = NameRefusal(errors, before);
  return absl::FailedPreconditionError(
      (refusal.empty() ? "CRIU could not save the job's processes: " : refusal + ". CRIU says: ") +
      (unreceived.empty() ? errors : unreceived));
}

void AwaitDumpProcesses(const std::string& work_folder) {
  const int lock = open((work_folder + "/" + kDumpLock).c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
  if (lock < 0) return;
  while (flock(lock, LOCK_EX) != 0 && errno == EINTR) {
  }
  close(lock);
}

absl::Status OpenToCriu(const Account& account, int folder) {
  const auto give = [&](int file) {
    struct stat facts;
    if (file < 0 || fstat(file, &facts) != 0 || (!S_ISREG(facts.st_mode) && !S_ISDIR(facts.st_mode))) return false;
    const mode_t mode = S_ISDIR(facts.st_mode) ? 0750 : 0640;
    if (facts.st_uid == geteuid() && facts.st_gid == account.group && (facts.st_mode & 07777) == mode) return true;
    return fchown(file, geteuid(), account.group) == 0 && fchmod(file, mode) == 0;
  };
  bool ok = give(folder);
  DIR* const list = fdopendir(openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  while (const dirent* const entry = ok && list ? readdir(list) : nullptr) {
    if (entry->d_name[0] == '.') continue;
    const int file = openat(folder, entry->d_name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    ok = give(file);
    if (file >= 0) close(file);
  }
  const absl::Status status = ok && list ? absl::OkStatus() : ErrnoStatus("cannot let CRIU read the saved processes");
  if (list) closedir(list);
  return status;
}

bool ContinueProcesses(const Job& job, const std::set<int>& stopped_before) {
  ResumeConnections(ProcessesOf(job), /*others_only=*/false);
  if (job.has_network()) LetCallersIn(job);
  const bool connected = !job.has_network() || ConnectNetwork(job.init_pid(), job.network()).ok();
  return RunOn(job, stopped_before) && connected;
}

bool KillProcesses(const Job& job) {
  // So that others are told, unless their connections go on after a restart. The job's own connections end without a
  // word, and leave their ports free for it.
  if (!job.has_network()) ResumeConnections(ProcessesOf(job), /*others_only=*/true);
  // Of a job without an init process, which others are the job's is known only while their parents are there.
  const std::vector<int> pids = ProcessesOf(job);
  const auto ended = [&] {
    if (IsIsolated(job)) return !JobIsAlive(job) || ProcessesOf(job).empty();
    return std::none_of(pids.begin(), pids.end(), IsRunning);
  };
  HeldMutexes mutexes(pids);
  // What it returns says nothing: with the program the namespace may end, and whoever is inside.
  SignalAll(job, SIGKILL);
  for (int i = 0; i < kKillAttempts; ++i) {
    if (ended()) {
      mutexes.PutBack();
      return true;
    }
    usleep(kKillPauseUs);
  }
  return false;
}

bool NeedsTerminal(const ProcessFacts& facts) {
  for (const Stdio& stream : facts.stdio())
    if (stream.terminal()) return true;
  return false;
}

absl::Status RestoreCommand(const Job& job, const ProcessFacts& facts, const std::string& image_folder,
                            const std::string& seen_image, const std::string& work_folder, int terminal,
                            std::vector<std::string>* command, std::vector<int>* opened) {
  const std::set<std::string> sets(facts.instruction_sets().begin(), facts.instruction_sets().end());
  const std::string missing = MissingInstructionSets(sets, InstructionSetsHere());
  if (!missing.empty()) {
    return absl::FailedPreconditionError(
        "the job was started on a processor with instruction sets that this one lacks: " + missing +
        "; restart it where there are all of these");
  }
  CR_ASSIGN_OR_RETURN(const std::string criu, FindCriu());
  const std::optional<Account> account = AccountOf(job);
  if (account) CR_RETURN_IF_ERROR(CheckAccount(*account));
  std::string image;
  std::vector<SavedFile> files;
  std::vector<std::string> paths;
  if (ReadImageFile(image_folder + "/files.img", &image) && ParseFiles(image, /*remaps=*/"", facts, &files)) {
    for (const SavedFile& file : files) paths.push_back(file.path);
  }
  const int folder = open(image_folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return ErrnoStatus("cannot open " + image_folder);
  opened->push_back(folder);
  if (account) CR_RETURN_IF_ERROR(OpenToCriu(*account, folder));
  {
    const ActAs user(account);
    CR_RETURN_IF_ERROR(RestoreSharedFiles(facts, folder, image));
    RemoveGhosts(paths);
  }
  *command = {criu, "restore", "--images-dir", seen_image, "--work-dir", work_folder, "--log-file", kRestoreLog,
              "--restore-detached",
              // As the child of init, which it is after CRIU's end in any case: else that would be the end of its
              // parent, of which it may want to be told (PR_SET_PDEATHSIG).
              "--restore-sibling", "--manage-cgroups=ignore", "--ext-unix-sk", "--file-locks"};
  for (const std::string& option : TcpOptions()) command->push_back(option);
  for (const std::string& option : TerminalOptions(job)) command->push_back(option);
  std::set<std::string> named;
  for (const Stdio& stream : facts.stdio()) {
    std::string name;
    if (stream.terminal()) name = TerminalName(stream);
    if (stream.target().compare(0, 5, "pipe:") == 0) name = stream.target();
    if (name.empty() || !named.insert(name).second) continue;
    const int fd = KeepOpen(stream.terminal() ? terminal : stream.fd());
    if (fd < 0) {
      return absl::FailedPreconditionError(stream.terminal() ? "the job needs a terminal"
                                                             : "descriptor " + std::to_string(stream.fd()) +
                                                                   " is closed here, but the job needs it");
    }
    opened->push_back(fd);
    if (account && !LetOpen(*account, fd)) {
      return absl::PermissionDeniedError(
          "descriptor " + std::to_string(stream.fd()) + " is nothing that " + NameOf(*account) +
          " may open; restart the job with its streams going to pipes, or with --output and --error");
    }
    command->insert(command->end(), {"--inherit-fd", "fd[" + std::to_string(fd) + "]:" + name});
  }
  if (account) command->push_back("--unprivileged");
  const ActAs user(account);
  for (const InheritedFile& file : facts.files()) {
    // CRIU opens what this names once more, with the right flags and position.
    const int fd = open(file.path().c_str(), int(file.flags()) & O_ACCMODE);
    if (fd < 0) {
      const absl::Status status = ErrnoStatus("the job needs the file " + file.path());
      return account ? AnnotateBehind(status, " (as " + NameOf(*account) + ")") : status;
    }
    opened->push_back(fd);
    command->insert(command->end(), {"--inherit-fd", "fd[" + std::to_string(fd) + "]:" + file.id()});
  }
  return absl::OkStatus();
}

}  // namespace cuda_remote::checkpoint
