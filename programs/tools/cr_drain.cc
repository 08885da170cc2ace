// SPDX-License-Identifier: Apache-2.0
// cr-drain: moves or saves all jobs of this host, so that it can go down. See --help.

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/engine/engines.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/caller.h"
#include "checkpoint/job/hostd_places.h"
#include "checkpoint/job/job.h"
#include "host/client.h"
#include "programs/tools/foreground.h"
#include "proto/base/clock.h"
#include "proto/base/proc.h"
#include "proto/base/status_macros.h"
#include "proto/cli/help.h"
#include "proto/codec/text.h"
#include "proto/control/server_control.h"
#include "proto/errors/absl_status.h"
#include "proto/folder/private_folder.h"
#include "proto/threads/mutex.h"
#include "proto/threads/start_thread.h"

namespace cuda_remote::client::tools {

using namespace checkpoint;
namespace {

constexpr char kTool[] = "cr-drain";
constexpr int kExitLeft = 4;
// Of RunTool, besides the tool's exit codes.
constexpr int kNotStarted = -1, kTooLate = -2;
// How many users' jobs are drained at a time. One that takes longer than kPatience is none of them any more: a user can
// stop the tool that works on his job.
constexpr int kAtOnce = 4;
constexpr std::chrono::minutes kPatience(2);
// How often to look whether a tool has ended.
constexpr std::chrono::milliseconds kLook(20);
// How long a tool gets to give up.
constexpr std::chrono::seconds kGivesUp(10);

constexpr char kExamples[] = R"(
Examples:
  cr-drain --to-host node8                     users' jobs continue at node8
  cr-drain --to-host node8 --save /data/drain  the same, and what cannot go there is saved and ended
  cr-drain --save /data/drain                  all jobs are saved and ended
  cr-drain --save /data/drain --dry-run        says what would happen to each job
  cr-drain --undo                              the host accepts jobs again

From then on this host's cr-hostd starts and accepts no jobs, until --undo or the next boot.
Users' jobs that cr-hostd has started move or are saved as their user does it, with cr-migrate --whole or cr-checkpoint
--stop. An image is in DIR/USER and belongs to that user. Jobs that root has started are saved in DIR/root; they do not
move to another host. cr-drain does not see jobs that users have started without cr-hostd. If CUDA_REMOTE_HOSTD names
another cr-hostd than the host's, only the jobs of that one are drained, and root's go on.

Needs root, or an operator of this host (cr-hostd --operator). For an operator, root must have created the folder of
--save so that users can enter it (mode 0755). If cr-drain is interrupted, jobs that were moved or saved stay so. Run it
again for the rest.

The jobs of one user are drained one after the other, beside those of other users. What is not moved or saved when the
time of --limit is over goes on here.

Exit codes: 0 no job is left, 1 failed, 2 wrong use, 4 jobs are left here, or sessions of this host's GPU server.
)";

struct Options {
  std::string to_host, server, save, reason = "the host is being drained";
  double timeout = 60, limit = 7200;
  bool undo = false, dry_run = false;
  bool of_operator = false;  // cr-hostd has started the tool for one: root must not make or open folders then
};

// What happened to the jobs. For any thread.
class Outcome {
 public:
  void Moved() {
    MutexLock lock(&mutex_);
    ++moved_;
  }
  void Saved() {
    MutexLock lock(&mutex_);
    ++saved_;
  }
  void Left(std::string line) {
    MutexLock lock(&mutex_);
    left_.push_back(std::move(line));
  }
  // The exit code.
  int Print(bool dry_run) {
    MutexLock lock(&mutex_);
    printf(dry_run ? "%d would move, %d would be saved, %zu would be left\n" : "%d moved, %d saved, %zu left\n", moved_,
           saved_, left_.size());
    for (const std::string& one : left_) printf("%s: %s\n", dry_run ? "would be left" : "left", one.c_str());
    return left_.empty() ? 0 : kExitLeft;
  }

 private:
  Mutex mutex_;
  int moved_ CR_GUARDED_BY(mutex_) = 0, saved_ CR_GUARDED_BY(mutex_) = 0;
  std::vector<std::string> left_ CR_GUARDED_BY(mutex_);
};

// Whether the child has ended by then. It still has to be waited for.
bool EndsBy(pid_t child, Moment end) {
  siginfo_t ended{};
  while (waitid(P_PID, id_t(child), &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid == 0) {
    if (Now() >= end) return false;
    std::this_thread::sleep_for(kLook);
  }
  return true;
}

// Runs a tool beside this one to its end, as `account` if there is one. Its exit code; kNotStarted; kTooLate: it was
// ended since it had not ended by itself by `end`.
int RunTool(const std::string& name, const std::vector<std::string>& words, const std::optional<Account>& account,
            Moment end) {
  const std::string program = FindCompanion(name);
  if (program.empty()) {
    Say(kTool, name + " is not beside cr-drain: the installation is incomplete");
    return kNotStarted;
  }
  std::vector<std::string> environment = {"PATH=/usr/local/bin:/usr/bin:/bin", "CUDA_REMOTE_HOSTD=" + HostdSocket()};
  for (const std::string& variable : NewEngine()->Environment()) {
    if (const char* const value = getenv(variable.c_str())) environment.push_back(variable + "=" + value);
  }
  if (const char* const own = getenv("XDG_RUNTIME_DIR"); own && !account)
    environment.push_back(std::string("XDG_RUNTIME_DIR=") + own);
  if (account) environment.push_back("HOME=" + account->home);
  std::vector<char*> arguments, variables;
  std::string first = program;
  arguments.push_back(&first[0]);
  std::vector<std::string> copies = words;
  for (std::string& word : copies) arguments.push_back(&word[0]);
  for (std::string& variable : environment) variables.push_back(&variable[0]);
  arguments.push_back(nullptr);
  variables.push_back(nullptr);
  fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    const bool ready = chdir("/") == 0 && (!account || (LeaveTerminal() && Become(*account)));
    // The tool has left the terminal, so Ctrl-C reaches this program alone. After the change of the user, since the
    // kernel then forgets this.
    if (account) prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (ready) execve(program.c_str(), arguments.data(), variables.data());
    fprintf(stderr, "%s: cannot start %s: %s\n", kTool, program.c_str(), strerror(errno));
    _exit(126);
  }
  if (child < 0) {
    Say(kTool, std::string("fork: ") + strerror(errno));
    return kNotStarted;
  }
  const bool too_late = !EndsBy(child, end);
  for (const int signal : {SIGTERM, SIGKILL}) {
    if (!too_late || kill(child, signal) != 0) break;
    kill(child, SIGCONT);
    if (EndsBy(child, Now() + kGivesUp)) break;
  }
  if (too_late) {
    waitpid(child, nullptr, WNOHANG);
    return kTooLate;
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// A folder for images of `account` (none: root's) in that of --save. Others cannot have prepared it.
absl::StatusOr<std::string> MakeImagesFolder(const Options& options, const std::optional<Account>& account) {
  const std::string& folder = options.save;
  struct stat facts;
  if (options.of_operator && (lstat(folder.c_str(), &facts) != 0 || !S_ISDIR(facts.st_mode) || facts.st_uid != 0 ||
                              (facts.st_mode & 5) != 5)) {
    return absl::FailedPreconditionError(
        folder + " is not a folder of root that users can enter; root must create it (mode 0755)");
  }
  if (!options.of_operator && mkdir(folder.c_str(), 0755) != 0 && errno != EEXIST) {
    return ErrnoStatus("cannot make the folder " + folder);
  }
  // Root's alone, also above it.
  CR_RETURN_IF_ERROR(ToAbsl(CheckFolder(folder, FolderUse::kServe)));
  if (!options.of_operator && chmod(folder.c_str(), 0755) != 0)
    return ErrnoStatus("cannot open " + folder + " to users");
  const std::string path = folder + "/" +
                           (!account                ? "root"
                            : account->name.empty() ? std::to_string(account->user)
                                                    : account->name);
  const uid_t user = account ? account->user : 0;
  const bool made = mkdir(path.c_str(), 0700) == 0;
  if ((!made && errno != EEXIST) || (made && account && lchown(path.c_str(), user, account->group) != 0) ||
      lstat(path.c_str(), &facts) != 0) {
    return ErrnoStatus("cannot make the folder " + path);
  }
  if (S_ISDIR(facts.st_mode) && facts.st_uid == user) return path;
  return absl::PermissionDeniedError(path + " is not a folder of " +
                                     (account ? NameOf(*account) : std::string("root")));
}

// A name for a new image: the job's, with a number behind it if there is one of that name.
std::string NewImage(const std::string& folder, const std::string& job) {
  std::string path = folder + "/" + job;
  struct stat facts;
  for (int i = 2; lstat(path.c_str(), &facts) == 0; ++i) path = folder + "/" + job + "-" + std::to_string(i);
  return path;
}

// The job's output goes on in files of the same names there: those that are its own, and that its program still has.
void AddOutputs(const Job& job, std::vector<std::string>* words) {
  for (const auto& [fd, option] : {std::pair("1", "--output="), std::pair("2", "--error=")}) {
    const std::string path = ReadLink("/proc/" + std::to_string(job.pid()) + "/fd/" + fd);
    if (std::find(job.outputs().begin(), job.outputs().end(), path) != job.outputs().end())
      words->push_back(option + path);
  }
}

// By `end`.
void DrainOne(const Options& options, const FoundJob& found, bool of_hostd, Moment end, Outcome* outcome) {
  const std::string name = found.directory.substr(found.directory.rfind('/') + 1);
  // Root's tools handle root's jobs as root, also those of cr-run --user.
  const std::optional<Account> account = of_hostd ? AccountOf(found.job) : std::nullopt;
  const std::string which = "job " + Printable(name) + " of " + (account ? NameOf(*account) : std::string("root"));
  std::string error;
  if (of_hostd && !account) {
    outcome->Left(which + ": its job.json names no user");
    return;
  }
  if (options.dry_run) {
    if (!options.to_host.empty() && of_hostd) {
      printf("%s: would move to %s\n", which.c_str(), options.to_host.c_str());
      outcome->Moved();
    } else if (!options.save.empty()) {
      printf("%s: would be saved in %s\n", which.c_str(), options.save.c_str());
      outcome->Saved();
    } else {
      outcome->Left(which + ": jobs of root do not move to other hosts");
    }
    return;
  }
  const std::string late = which + ": the time for this user's jobs is over (--limit)";
  if (Now() >= end) {
    if (JobIsAlive(found.job)) outcome->Left(late);
    return;
  }
  printf("%s: %s\n", which.c_str(), options.to_host.empty() || !of_hostd ? "is saved" : "moves");
  if (!options.to_host.empty() && of_hostd) {
    std::vector<std::string> words = {"--whole", "--to-host=" + options.to_host,
                                      "--timeout=" + std::to_string(options.timeout)};
    if (!options.server.empty()) words.push_back("--to=" + options.server);
    AddOutputs(found.job, &words);
    words.push_back(name);
    const int code = RunTool("cr-migrate", words, account, end);
    if (code == 0) {
      outcome->Moved();
      return;
    }
    if (!JobIsAlive(found.job)) {
      outcome->Left(which + ": it has ended, and cr-migrate did not succeed; see above");
      return;
    }
    if (code == kTooLate) {
      outcome->Left(late);
      return;
    }
    error = "it could not be moved";
  } else if (!options.to_host.empty()) {
    error = "jobs of root do not move to other hosts";
  }
  if (!options.save.empty()) {
    const absl::StatusOr<std::string> folder = MakeImagesFolder(options, account);
    if (!folder.ok()) {
      error = std::string(folder.status().message());
    } else {
      const std::string image = NewImage(*folder, name);
      const int code =
          RunTool("cr-checkpoint",
                  {"--stop", "--timeout=" + std::to_string(options.timeout), account ? name : found.directory, image},
                  account, end);
      if (code == 0) {
        outcome->Saved();
        printf("%s: saved as %s\n", which.c_str(), image.c_str());
        return;
      }
      if (code == kTooLate) {
        outcome->Left(JobIsAlive(found.job) ? late : late + "; it has ended, perhaps saved as " + image);
        return;
      }
      error = "it could not be saved";
    }
  }
  // It may have come to its end by itself meanwhile.
  if (JobIsAlive(found.job)) outcome->Left(which + ": " + error);
}

// Drains jobs, those of one user one after the other.
class Drainer {
 public:
  Drainer(const Options& options, Outcome* outcome) : options_(options), outcome_(outcome) {}
  ~Drainer() { Finish(); }

  void Add(const FoundJob& found, bool of_hostd) {
    const std::optional<Account> account = of_hostd ? AccountOf(found.job) : std::nullopt;
    MutexLock lock(&mutex_);
    users_[account ? account->user : 0].jobs.push_back({found, of_hostd});
  }
  // Until all are done that were added.
  void Finish() {
    MutexLock lock(&mutex_);
    while (true) {
      const Moment now = Now();
      bool busy = false;
      int young = 0;
      for (const auto& [user, one] : users_) young += one.running && now < one.begun + kPatience ? 1 : 0;
      for (auto& [user, one] : users_) {
        if (!one.running && !one.jobs.empty() && young < kAtOnce) {
          Begin(&one);
          ++young;
        }
        busy = busy || one.running || !one.jobs.empty();
      }
      if (!busy) break;
      changed_.WaitFor(&mutex_, kLookAgain);
    }
    std::vector<std::thread> threads = std::exchange(threads_, {});
    lock.Unlock();
    for (std::thread& thread : threads) thread.join();
  }

 private:
  struct One {
    FoundJob found;
    bool of_hostd;
  };
  struct User {
    std::deque<One> jobs;  // that have not begun
    bool running = false;
    Moment begun;
    std::optional<Moment> end;
  };

  void Begin(User* user) CR_REQUIRES(mutex_) {
    user->begun = Now();
    user->running = true;
    if (!user->end) {
      user->end =
          user->begun + std::chrono::duration_cast<Moment::duration>(std::chrono::duration<double>(options_.limit));
    }
    const auto run = [this, user, one = user->jobs.front(), end = *user->end] {
      DrainOne(options_, one.found, one.of_hostd, end, outcome_);
      MutexLock lock(&mutex_);
      user->running = false;
      changed_.NotifyAll();
    };
    user->jobs.pop_front();
    threads_.push_back(StartThread(run));
    if (threads_.back().joinable()) return;
    threads_.pop_back();
    user->running = false;
    outcome_->Left("a job: the system gives cr-drain no more threads; run it again");
  }

  static constexpr std::chrono::seconds kLookAgain{1};
  const Options& options_;
  Outcome* const outcome_;
  Mutex mutex_;
  Condition changed_;
  std::map<uid_t, User> users_ CR_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_ CR_GUARDED_BY(mutex_);
};

// Programs of other hosts that use this host's GPU server.
void FindSessions(Outcome* outcome) {
  const std::string socket = RuntimeFolders().front() + "/session.sock";
  if (access(socket.c_str(), F_OK) != 0) return;
  const auto server = control::ServerControl::Open("unix:" + socket, {});
  const auto sessions = server.ok() ? (*server)->List() : server.status();
  if (!sessions.ok()) {
    outcome->Left("the GPU server of this host: " + std::string(sessions.status().message()));
    return;
  }
  for (const control::SessionInfo& one : sessions->sessions()) {
    outcome->Left("session " + std::to_string(one.id()) + " of this host's GPU server: " + Printable(one.program()) +
                  (one.peer().empty() ? "" : " from " + Printable(one.peer())) +
                  "; its user moves it with cr-migrate --to, cr-ps --end ends it");
  }
}

int Drain(const Options& options) {
  const absl::Status set = options.dry_run ? absl::OkStatus() : SetDrainingReason(HostdSocket(), options.reason);
  if (!set.ok()) {
    Say(kTool, set);
    return kExitFailure;
  }
  // Another cr-hostd than the host's has jobs of its own, and no others.
  const bool whole_host = IsUsualHostd(HostdSocket());
  if (!whole_host)
    printf("only jobs of the cr-hostd at %s are drained; jobs of root go on (CUDA_REMOTE_HOSTD)\n",
           HostdSocket().c_str());
  Outcome outcome;
  Drainer drainer(options, &outcome);
  // A job that was being started when this began appears a moment later.
  std::set<std::string> seen;
  for (bool found_one = true; found_one;) {
    found_one = false;
    for (const bool of_hostd : {true, false}) {
      if (!of_hostd && !whole_host) continue;
      for (const FoundJob& found : of_hostd ? JobsOfHostd(HostdSocket(), 0) : AllJobs()) {
        if (!JobIsAlive(found.job) || !seen.insert(found.directory + std::to_string(found.job.pid_namespace())).second)
          continue;
        drainer.Add(found, of_hostd);
        found_one = true;
      }
    }
    drainer.Finish();
  }
  if (whole_host) FindSessions(&outcome);
  return outcome.Print(options.dry_run);
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Moves or saves all jobs of this host, so that it can go down.", kTool);
  SetUpProgram(&app);
  app.footer(kExamples);
  app.add_option("--to-host", options.to_host, "HOST or HOST:PORT of the cr-hostd to which users' jobs move")
      ->type_name("HOST");
  app.add_option("--to", options.server,
                 "with --to-host: the GPU server that jobs use there (default: the same server if it is on the "
                 "network, else one of the job's own)")
      ->type_name("ADDR");
  app.add_option("--save", options.save,
                 "save and end jobs that do not move, in this folder, which is made if it is missing")
      ->type_name("DIR");
  app.add_option("--reason", options.reason, "text for the error message of users who start a job on this host")
      ->capture_default_str();
  app.add_option("--timeout", options.timeout, "how long to wait for the CUDA calls in progress of one job")
      ->type_name("SECONDS")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 86400.0));
  app.add_option("--limit", options.limit, "how long to work on the jobs of one user")
      ->type_name("SECONDS")
      ->capture_default_str()
      ->check(CLI::Range(1.0, 1e6));
  app.add_flag("--dry-run", options.dry_run, "only say what would happen to each job; change nothing");
  int caller_fd = -1;
  app.add_option("--caller", caller_fd, "used by cr-hostd")->group("");
  CLI::Option* const undo = app.add_flag("--undo", options.undo, "let the host accept jobs again");
  for (const char* other : {"--to-host", "--to", "--save", "--reason", "--timeout", "--limit", "--dry-run"})
    undo->excludes(other);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (!options.undo && options.to_host.empty() && options.save.empty()) {
    Say(kTool, "say where the jobs go: --to-host HOST, --save DIR, or both");
    return kExitUsage;
  }
  if (options.reason.empty()) {
    Say(kTool, "--reason takes a text; --undo lets the host accept jobs again");
    return kExitUsage;
  }
  if (!options.save.empty()) options.save = Absolute(options.save);
  if (geteuid() != 0) {
    const auto hostd = host::Hostd::Connect();
    if (!hostd.ok() || !*hostd) {
      Say(kTool, hostd.ok() ? "cr-drain needs root, or an operator of a cr-hostd that runs here"
                            : std::string(hostd.status().message()));
      return kExitFailure;
    }
    host::Request request = host::RequestOf(app, "drain");
    for (host::Option& option : *request.mutable_options()) {
      if (option.name() == "save") option.set_value(options.save);
    }
    return (*hostd)->Run(kTool, std::move(request), kExitFailure);
  }
  const auto caller = Caller::From(caller_fd);
  if (!caller.ok()) {
    Say(kTool, caller.status());
    return kExitFailure;
  }
  options.of_operator = *caller != nullptr;
  setvbuf(stdout, nullptr, _IOLBF, 0);
  if (!options.undo) return Drain(options);
  const absl::Status undone = SetDrainingReason(HostdSocket(), "");
  if (undone.ok()) return 0;
  Say(kTool, undone);
  return kExitFailure;
}

}  // namespace
}  // namespace cuda_remote::client::tools

int main(int argc, char** argv) {
  try {
    return cuda_remote::client::tools::Main(argc, argv);
  } catch (const std::exception& error) {
    fprintf(stderr, "cr-drain: %s\n", error.what());
    return 1;
  }
}
