// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/isolation/isolate.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <random>
#include <sstream>

#include "checkpoint/job/forwarded_signals.h"
#include "checkpoint/job/isolation/io_uring.h"
#include "checkpoint/job/isolation/mptcp.h"
#include "checkpoint/job/isolation/own_ptys.h"
#include "checkpoint/job/stall_watch.h"
#include "proto/base/proc.h"
#include "proto/base/status_macros.h"
#include "proto/errors/absl_status.h"
#include "proto/errors/annotate.h"

extern char** environ;

namespace cuda_remote::checkpoint {
namespace {

// How often is looked whether a start or a restore makes progress: there may be many processes. Some may be stopped,
// and are restored so.
constexpr int kLooksAtProgress = 20;
constexpr StallWatch::Limits kRestoring = {StallWatch::kPatient.idle_ms, StallWatch::kPatient.idle_ms};

sigset_t g_before;
bool g_blocked = false;

// From init to the tool.
struct Report {
  enum Kind { kFailed = 1, kStarted = 2, kEnded = 3, kStopped = 4 };
  int kind;
  int value;  // exit code of the tool, inner PID, wait status, signal
  char text[256];
};

void Send(int socket, int kind, int value, const std::string& text = {}) {
  Report report{};
  report.kind = kind;
  report.value = value;
  strncpy(report.text, text.c_str(), sizeof(report.text) - 1);
  while (send(socket, &report, sizeof(report), MSG_NOSIGNAL) < 0 && errno == EINTR) {
  }
}

sigset_t WaitedSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  for (int signal : kForwardedSignals) sigaddset(&set, signal);
  return set;
}

// In the child: the program instead of this one. Returns only if that fails.
void Execute(const Plan& plan) {
  std::vector<char*> arguments, environment;
  for (const std::string& word : plan.command) arguments.push_back(const_cast<char*>(word.c_str()));
  for (const std::string& word : plan.environment) environment.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  environment.push_back(nullptr);
  // Looked for in the program's own PATH.
  environ = environment.data();
  execvp(arguments[0], arguments.data());
}

void ShowMounts(const Plan& plan) {
  for (const Mount& wanted : plan.mounts) {
    if (mount(wanted.source.c_str(), wanted.target.c_str(), nullptr, MS_BIND, nullptr) == 0) continue;
    fprintf(stderr,
            "cuda-remote: cannot show %s as %s: %s; programs with an environment of their own may not find it\n",
            wanted.source.c_str(), wanted.target.c_str(), strerror(errno));
  }
}

bool WriteText(const char* path, const std::string& text) {
  const int fd = open(path, O_WRONLY | O_CLOEXEC);
  const bool written = fd >= 0 && write(fd, text.data(), text.size()) == ssize_t(text.size());
  if (fd >= 0) close(fd);
  return written;
}

// A user namespace, in which this user has the same number as outside, with mounts of its own.
bool EnterUserNamespace() {
  const std::string user = std::to_string(geteuid()), group = std::to_string(getegid());
  return unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 && WriteText("/proc/self/setgroups", "deny") &&
         WriteText("/proc/self/uid_map", user + " " + user + " 1") &&
         WriteText("/proc/self/gid_map", group + " " + group + " 1") &&
         mount(nullptr, "/", nullptr, MS_REC | MS_SLAVE, nullptr) == 0;
}

void OwnMounts(const Plan& plan) {
  // MayMount has tried it.
  if (EnterUserNamespace()) ShowMounts(plan);
}

// In the program's process, or the restorer's.
void TakeTerminal(const Plan& plan) {
  if (!plan.restored_pid || plan.own_group) {
    setpgid(0, 0);
    tcsetpgrp(plan.terminal, getpid());
  }
  if (!plan.restored_pid) {
    for (int stream : plan.terminal_streams) dup2(plan.terminal, stream);
  }
  close(plan.terminal);
  signal(SIGTTOU, SIG_DFL);
}

// Forks and executes. Returns the child, or -1 with *failure = errno of fork or of the execution.
pid_t Spawn(const Plan& plan, bool own_session, int* failure) {
  int ready[2];
  if (pipe2(ready, O_CLOEXEC) != 0) {
    *failure = errno;
    return -1;
  }
  const pid_t child = fork();
  if (child == 0) {
    close(ready[0]);
    if (plan.terminal >= 0) {
      TakeTerminal(plan);
    } else if (own_session) {
      setsid();
    }
    // A restored program has this if it had it.
    if (plan.adopt) prctl(PR_SET_CHILD_SUBREAPER, 1);
    if (!own_session && !plan.mounts.empty()) OwnMounts(plan);
    if (plan.restored_pid) {
      const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
      dup2(null, 0);
      dup2(plan.restorer_output, 1);
      dup2(plan.restorer_output, 2);
    }
    // An ordinary user's plain child could have no such filter that leaves setuid programs as they are.
    if (own_session && plan.withhold_io_uring && !WithholdIoUring()) {
      fprintf(stderr, "cuda-remote: io_uring cannot be kept from the job: %s; a program that uses it cannot be saved\n",
              strerror(errno));
    }
    if (own_session && plan.withhold_mptcp && !WithholdMptcp()) {
      fprintf(stderr, "cuda-remote: MPTCP cannot be kept from the job: %s; a program that uses it cannot be saved\n",
              strerror(errno));
    }
    UnblockInChild();
    const bool is_user = !plan.account || Become(*plan.account, plan.kept_capabilities);
    if (plan.umask) umask(*plan.umask);
    if (is_user) Execute(plan);
    const int code = errno;
    const ssize_t ignored = write(ready[1], &code, sizeof(code));
    _exit(ignored == sizeof(code) ? 127 : 126);
  }
  close(ready[1]);
  int code = 0;
  ssize_t got = 0;
  if (child > 0) {
    do {
      got = read(ready[0], &code, sizeof(code));
    } while (got < 0 && errno == EINTR);
  } else {
    code = errno;
  }
  close(ready[0]);
  if (child > 0 && got == 0) return child;
  if (child > 0) waitpid(child, nullptr, 0);
  *failure = code;
  return -1;
}

// What a tool that is killed, or other runs, must not find open here: all that would not survive an execution.
void CloseToolsFiles(int keep, int terminal) {
  DIR* const list = opendir("/proc/self/fd");
  if (!list) return;
  std::vector<int> doomed;
  while (const dirent* const entry = readdir(list)) {
    const int fd = atoi(entry->d_name);
    const bool needed = fd <= 2 || fd == keep || fd == terminal || fd == dirfd(list);
    if (!needed && (fcntl(fd, F_GETFD) & FD_CLOEXEC)) doomed.push_back(fd);
  }
  closedir(list);
  for (int fd : doomed) close(fd);
}

// Reads nothing and writes nothing any more: a pipe must end when the program closes it.
void LetGoOfStreams(const std::vector<int>& keep) {
  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int fd : {0, 1, 2}) dup2(null, fd);
  if (DIR* const list = opendir("/proc/self/fd")) {
    std::vector<int> doomed;
    while (const dirent* const entry = readdir(list)) {
      const int fd = atoi(entry->d_name);
      if (fd > 2 && fd != dirfd(list) && std::find(keep.begin(), keep.end(), fd) == keep.end()) doomed.push_back(fd);
    }
    closedir(list);
    for (int fd : doomed) close(fd);
  }
}

std::string Unescaped(const std::string& text) {
  std::string path;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool escaped = text[i] == '\\' && i + 3 < text.size();
    path += escaped ? char(strtol(text.substr(i + 1, 3).c_str(), nullptr, 8)) : text[i];
    if (escaped) i += 3;
  }
  return path;
}

// Where something is mounted below `top`; what is mounted below one of these goes with it.
std::vector<std::string> MountsBelow(const std::string& top) {
  std::vector<std::string> all;
  std::ifstream mounts("/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    std::istringstream fields(line);
    std::string field;
    for (int i = 0; i < 5; ++i) fields >> field;
    const std::string path = Unescaped(field);
    const auto is_below = [&path](const std::string& other) {
      return path.compare(0, other.size() + 1, other + "/") == 0;
    };
    if (is_below(top) && std::none_of(all.begin(), all.end(), is_below)) all.push_back(path);
  }
  return all;
}

// /sys shows the network of whoever mounts it, and programs look there for their interfaces (UCX, and with it MPICH).
// What is mounted in it stays, such as control groups.
void ShowOwnNetwork() {
  constexpr char kSys[] = "/sys";
  struct statvfs about;
  const bool read_only = statvfs(kSys, &about) == 0 && (about.f_flag & ST_RDONLY) != 0;
  std::vector<std::pair<std::string, int>> kept;
  for (const std::string& path : MountsBelow(kSys)) {
    const int tree = open_tree(AT_FDCWD, path.c_str(), OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE);
    if (tree >= 0) kept.emplace_back(path, tree);
  }
  const unsigned long flags = MS_NOSUID | MS_NODEV | MS_NOEXEC | (read_only ? MS_RDONLY : 0);
  const bool mounted = mount("sysfs", kSys, "sysfs", flags, nullptr) == 0;
  if (!mounted) {
    fprintf(stderr,
            "cuda-remote: cannot mount /sys for the job: %s; programs see this machine's network interfaces there, "
            "not the job's\n",
            strerror(errno));
  }
  for (const auto& [path, tree] : kept) {
    if (mounted && move_mount(tree, "", AT_FDCWD, path.c_str(), MOVE_MOUNT_F_EMPTY_PATH) != 0) {
      fprintf(stderr, "cuda-remote: cannot show %s to the job: %s\n", path.c_str(), strerror(errno));
    }
    close(tree);
  }
}

// False and errno on failure. A user may have put a link in the place of his folder.
bool ShowFolder(const Plan& plan) {
  const std::optional<Account> owner = plan.of_account ? plan.account : std::nullopt;
  int place = -1;
  {
    const ActAs user(owner);
    place = open(plan.seen_as.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  }
  struct stat facts;
  if (place < 0 || fstat(place, &facts) != 0) return false;
  errno = EPERM;
  const int folder = facts.st_uid == (owner ? owner->user : geteuid())
                         ? open_tree(AT_FDCWD, plan.folder.c_str(), OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC)
                         : -1;
  const bool shown =
      folder >= 0 && move_mount(folder, "", place, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH) == 0;
  const int code = errno;
  if (folder >= 0) close(folder);
  close(place);
  errno = code;
  return shown;
}

absl::Status SetUp(const Plan& plan, OwnPtys* ptys) {
  // Mounts made outside later are to be seen here as far as the system shares them; ours are not seen outside.
  if (mount(nullptr, "/", nullptr, MS_REC | MS_SLAVE, nullptr) != 0) {
    return ErrnoStatus("cannot make the mounts of the job its own");
  }
  if (!plan.folder.empty() && !ShowFolder(plan)) {
    return ErrnoStatus("cannot show " + plan.folder + " as " + plan.seen_as);
  }
  if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr) != 0) {
    return ErrnoStatus("cannot mount /proc for the job");
  }
  if (plan.network >= 0) ShowOwnNetwork();
  ShowMounts(plan);
  if (plan.own_ptys) {
    if (const absl::Status mounted = ptys->Mount(plan.outside_ptys); !mounted.ok()) {
      fprintf(stderr,
              "cuda-remote: %s; it has this machine's pseudo-terminals, whose numbers may be taken at a restart\n",
              std::string(mounted.message()).c_str());
    }
  }
  if (!plan.restored_pid) ptys->ShowOutside();
  if (plan.terminal >= 0) {
    // Moving the terminal from group to group would stop this process.
    signal(SIGTTOU, SIG_IGN);
    if (setsid() < 0 || ioctl(plan.terminal, TIOCSCTTY, 0) != 0) {
      return ErrnoStatus("cannot give the job its terminal");
    }
  }
  if (plan.prepare) plan.prepare();
  if (plan.first_pid > 0) {
    std::ofstream last("/proc/sys/kernel/ns_last_pid");
    last << plan.first_pid - 1 << std::flush;
    // A new job can have any numbers.
    if (!last && plan.restored_pid) return ErrnoStatus("cannot set /proc/sys/kernel/ns_last_pid");
  }
  return absl::OkStatus();
}

// In init. A program that leads its own session cannot be stopped by SIGTSTP; with a terminal of its own, it does not.
bool StopOrContinue(const Plan& plan, pid_t main, int signal) {
  if (signal != SIGTSTP && signal != SIGCONT) return false;
  if (plan.terminal < 0) {
    kill(-1, signal == SIGTSTP ? SIGSTOP : SIGCONT);
  } else {
    kill(-getpgid(main), signal);
  }
  return true;
}

// The init process: number 1 of the namespace.
[[noreturn]] void Init(const Plan& plan, int report) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  prctl(PR_SET_NAME, "cr-init");
  absl::Status ready;
  if (plan.network >= 0 && setns(plan.network, CLONE_NEWNET) != 0) {
    ready = ErrnoStatus("cannot enter the job's network namespace");
  }
  CloseToolsFiles(report, plan.terminal);
  OwnPtys ptys;
  if (ready.ok()) ready = SetUp(plan, &ptys);
  if (!ready.ok()) {
    Send(report, Report::kFailed, 125, std::string(ready.message()));
    _exit(125);
  }
  int failure = 0;
  pid_t main = Spawn(plan, true, &failure);
  if (main < 0) {
    Send(report, Report::kFailed, failure == ENOENT ? 127 : 126,
         "cannot execute " + plan.command[0] + ": " + strerror(failure));
    _exit(125);
  }
  if (plan.restored_pid) {
    Beside beside;
    // The restored process is a child of this one, too, and may have ended already.
    beside.leave_others = true;
    const int status = WaitForwarding(main, false, beside);
    main = plan.restored_pid;
    if (status != 0) {
      Send(report, Report::kFailed, 125, "");
      _exit(125);
    }
    if (plan.terminal >= 0 && plan.terminal_group > 0) tcsetpgrp(plan.terminal, plan.terminal_group);  // if it is there
    ptys.ShowOutside();
  }
  std::vector<int> kept = {report, plan.terminal};
  for (const UniqueFd& place : ptys.places()) kept.push_back(place.get());
  LetGoOfStreams(kept);
  Send(report, Report::kStarted, main);
  Beside beside;
  // SIGSTOP is not the terminal's: a checkpoint stops processes, too.
  beside.stopped = [&](int signal) {
    if (plan.terminal >= 0 && signal != SIGSTOP) Send(report, Report::kStopped, signal);
  };
  beside.take = [&](int signal) { return StopOrContinue(plan, main, signal); };
  beside.to_group = true;
  const int status = WaitForwarding(main, true, beside);
  Send(report, Report::kEnded, status);
  _exit(0);
}

// The number outside of the process that is `inner` for the namespace of `init`.
pid_t OuterPid(pid_t init, pid_t inner) {
  const std::string number = std::to_string(init);
  std::ifstream children("/proc/" + number + "/task/" + number + "/children");
  pid_t child;
  while (children >> child) {
    // The last number is that of the innermost namespace.
    const std::string numbers = StatusField(child, "NSpid");
    if (atoi(numbers.c_str() + numbers.find_last_of(" \t") + 1) == inner) return child;
  }
  return 0;
}

}  // namespace

pid_t ChooseFirstPid() {
  // Low numbers are what the kernel begins again with at the end, and at the end there must be room for the job.
  constexpr int kLowest = 1000;
  int most = 32768;
  std::ifstream("/proc/sys/kernel/pid_max") >> most;
  std::random_device random;
  return most / 2 > kLowest ? std::uniform_int_distribution<pid_t>(kLowest, most / 2)(random) : 0;
}

const char kInUserNamespace[] =
    "it was started neither as root nor through cr-hostd, and has mounts of its own in a user namespace, so it cannot "
    "be saved; start it where cr-hostd runs, or with cr-run --plain, so that root can save it, or have root start it "
    "with cr-run --user";

void BlockForwardedSignals() {
  signal(SIGCHLD, SIG_DFL);
  const sigset_t set = WaitedSignals();
  sigprocmask(SIG_BLOCK, &set, &g_before);
  g_blocked = true;
}

bool Interrupted() {
  sigset_t pending;
  sigpending(&pending);
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT})
    if (sigismember(&pending, signal) == 1) return true;
  return false;
}

void UnblockInChild() {
  if (g_blocked) sigprocmask(SIG_SETMASK, &g_before, nullptr);
}

absl::StatusOr<Isolated> StartIsolated(const Plan& plan, int* code) {
  *code = 125;
  CR_ASSIGN_OR_RETURN(Isolated isolated, BeginIsolated(plan));
  CR_RETURN_IF_ERROR(AwaitIsolated(&isolated, code));
  return isolated;
}

absl::StatusOr<Isolated> BeginIsolated(const Plan& plan) {
  int report[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, report) != 0) return ErrnoStatus("socketpair");
  fflush(nullptr);
  const pid_t init = pid_t(syscall(SYS_clone, CLONE_NEWPID | CLONE_NEWNS | (plan.own_ipc ? CLONE_NEWIPC : 0) | SIGCHLD,
                                   nullptr, nullptr, nullptr, nullptr));
  if (init == 0) {
    close(report[0]);
    Init(plan, report[1]);
  }
  const int failure = errno;
  close(report[1]);
  if (init < 0) {
    close(report[0]);
    const absl::Status failed = ErrnoStatus("cannot make PID, mount and IPC namespaces", failure);
    if (failure != EPERM) return failed;
    return AnnotateBehind(failed,
                          " (the capability CAP_SYS_ADMIN is missing, or forbidden by seccomp; a container gets it "
                          "with --cap-add SYS_ADMIN)");
  }
  Isolated isolated;
  isolated.init = init;
  isolated.report = report[0];
  return isolated;
}

void EndIsolated(Isolated* isolated) {
  kill(isolated->init, SIGKILL);
  waitpid(isolated->init, nullptr, 0);
  close(isolated->report);
}

absl::Status AwaitIsolated(Isolated* isolated, int* code) {
  *code = 125;
  // A restore takes as long as reading the image takes; signals that come meanwhile end it.
  Report got{};
  ssize_t bytes = 0;
  bool interrupted = false, stalled = false;
  StallWatch watch(isolated->init);
  pollfd waiting{isolated->report, POLLIN, 0};
  for (int looks = 1; !interrupted && !stalled && poll(&waiting, 1, 100) <= 0; ++looks) {
    interrupted = Interrupted();
    stalled = looks % kLooksAtProgress == 0 && watch.IsStalled(kRestoring);
  }
  if (!interrupted && !stalled) bytes = recv(isolated->report, &got, sizeof(got), 0);
  if (bytes == ssize_t(sizeof(got)) && got.kind == Report::kStarted) {
    isolated->inner_pid = got.value;
    isolated->pid = OuterPid(isolated->init, got.value);
    return absl::OkStatus();
  }
  EndIsolated(isolated);
  if (interrupted) return absl::CancelledError("interrupted");
  if (stalled)
    return absl::DeadlineExceededError("what starts the job's processes has made no progress for 10 minutes");
  if (bytes <= 0) return absl::InternalError("the job's init process died");
  *code = got.value;
  return absl::FailedPreconditionError(absl::string_view(got.text, strnlen(got.text, sizeof(got.text))));
}

bool MayMount() {
  const pid_t child = fork();
  if (child == 0) _exit(EnterUserNamespace() && mount("/", "/", nullptr, MS_BIND | MS_REC, nullptr) == 0 ? 0 : 1);
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

absl::StatusOr<pid_t> StartPlain(const Plan& plan, int* code) {
  int failure = 0;
  fflush(nullptr);
  const pid_t pid = Spawn(plan, false, &failure);
  if (pid > 0) return pid;
  *code = failure == ENOENT ? 127 : 126;
  return ErrnoStatus("cannot execute " + plan.command[0], failure);
}

int WaitForwarding(pid_t child, bool terminal_too, const Beside& beside) {
  const sigset_t set = WaitedSignals();
  const int signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  int result = 0;
  while (true) {
    int status;
    pid_t ended;
    const pid_t whom = beside.leave_others ? child : -1;
    while ((ended = waitpid(whom, &status, WNOHANG | (beside.stopped ? WUNTRACED : 0))) > 0) {
      if (ended == child && WIFSTOPPED(status)) beside.stopped(WSTOPSIG(status));
      if (WIFSTOPPED(status)) continue;
      result = status;
      if (ended == child) break;
      if (beside.ended) beside.ended(ended, status);
    }
    if (ended == child) break;
    if (ended < 0 && errno == ECHILD) {
      result = 0;
      break;
    }
    std::vector<pollfd> waiting;
    const int limit = beside.ask ? beside.ask(&waiting) : -1;
    waiting.push_back({signals, POLLIN, 0});
    if (poll(waiting.data(), nfds_t(waiting.size()), limit) < 0) continue;
    signalfd_siginfo info;
    while (read(signals, &info, sizeof(info)) == ssize_t(sizeof(info))) {
      const int signal = int(info.ssi_signo);
      if (signal == SIGCHLD || (beside.take && beside.take(signal))) continue;
      const bool of_terminal = info.ssi_code == SI_KERNEL || (info.ssi_code == SI_QUEUE && info.ssi_int == kOfTerminal);
      // What the terminal sends reaches a program in the same process group anyway.
      if (of_terminal && !terminal_too) continue;
      if (of_terminal && beside.to_group) {
        kill(-getpgid(child), signal);
      } else if (of_terminal) {
        sigval value = {};
        value.sival_int = kOfTerminal;
        sigqueue(child, signal, value);
      } else {
        kill(child, signal);
      }
    }
    waiting.pop_back();
    if (beside.ready) beside.ready(waiting);
  }
  close(signals);
  return result;
}

int StopOf(const Isolated& isolated) {
  Report got{};
  const ssize_t bytes = recv(isolated.report, &got, sizeof(got), MSG_DONTWAIT | MSG_PEEK);
  if (bytes != ssize_t(sizeof(got)) || got.kind != Report::kStopped) return 0;
  recv(isolated.report, &got, sizeof(got), MSG_DONTWAIT);
  return got.value;
}

bool StopOwnGroup() {
  // The nearest process above that is not in the group must be in the session: it, a shell, gets to know.
  pid_t above = getppid();
  while (above > 1 && getpgid(above) == getpgrp()) {
    above = StatOf(above).parent;
  }
  if (above <= 0 || getsid(above) != getsid(0)) return false;
  // By the same signal as the others: the shell hears of the first that stops, and may have all go on before a second
  // signal to this process would come, which would then stop it for good.
  struct sigaction standard = {}, kept;
  standard.sa_handler = SIG_DFL;
  sigaction(SIGTSTP, &standard, &kept);
  sigset_t own, blocked;
  sigemptyset(&own);
  sigaddset(&own, SIGTSTP);
  // One that has come already would stop this process before the others.
  const timespec none = {};
  while (sigtimedwait(&own, nullptr, &none) > 0) {
  }
  sigprocmask(SIG_UNBLOCK, &own, &blocked);
  kill(0, SIGTSTP);
  sigprocmask(SIG_SETMASK, &blocked, nullptr);
  sigaction(SIGTSTP, &kept, nullptr);
  return true;
}

bool HasEnded(const Isolated& isolated, int timeout_ms) {
  constexpr int kPauseMs = 10;
  for (int waited = 0;; waited += kPauseMs) {
    siginfo_t ended{};
    if (waitid(P_PID, id_t(isolated.init), &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid != 0) return true;
    if (waited >= timeout_ms) return false;
    usleep(kPauseMs * 1000);
  }
}

bool ProgramStatus(const Isolated& isolated, int* status) {
  while (StopOf(isolated) != 0) {
  }
  Report got{};
  const ssize_t bytes = recv(isolated.report, &got, sizeof(got), MSG_DONTWAIT);
  close(isolated.report);
  if (bytes != ssize_t(sizeof(got)) || got.kind != Report::kEnded) return false;
  *status = got.value;
  return true;
}

int ExitCode(int status) { return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status); }

}  // namespace cuda_remote::checkpoint
