// SPDX-License-Identifier: Apache-2.0
// cr-drain: moves or saves all jobs of this host, so that it can go down. See --help.

#include <errno.h>
#include <limits.h>
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
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/engine/engines.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/caller.h"
#include "checkpoint/job/hostd_places.h"
#include "checkpoint/job/job.h"
#include "client/tools/foreground.h"
#include "host/client.h"
#include "proto/base/status_macros.h"
#include "proto/cli/help.h"
#include "proto/codec/text.h"
#include "proto/control/server_control.h"
#include "proto/errors/absl_status.h"
#include "proto/folder/private_folder.h"

namespace cuda_remote::client::tools {

using namespace checkpoint;
namespace {

constexpr char kTool[] = "cr-drain";
constexpr int kExitLeft = 4;

constexpr char kExamples[] = R"(
Examples:
  cr-drain --to-host node8                     users' jobs continue at node8
  cr-drain --to-host node8 --save /data/drain  the same, and what cannot go there is saved and ended
  cr-drain --save /data/drain                  all jobs are saved and ended
  cr-drain --undo                              the host accepts jobs again

From then on this host's cr-hostd starts and accepts no jobs, until --undo or the next boot.
Users' jobs that cr-hostd has started move or are saved as their user does it, with cr-migrate --whole or cr-checkpoint
--stop. An image is in DIR/USER and belongs to that user. Jobs that root has started are saved in DIR/root; they do not
move to another host. cr-drain does not see jobs that users have started without cr-hostd.

Needs root, or an operator of this host (cr-hostd --operator). For an operator, root must have created the folder of
--save so that users can enter it (mode 0755). If cr-drain is interrupted, jobs that were moved or saved stay so. Run it
again for the rest.

Exit codes: 0 no job is left, 1 failed, 2 wrong use, 4 jobs are left here, or sessions of this host's GPU server.
)";

struct Options {
  std::string to_host, server, save, reason = "the host is being drained";
  double timeout = 60;
  bool undo = false;
};

// What happened to the jobs.
struct Outcome {
  int moved = 0, saved = 0;
  std::vector<std::string> left;  // a line each
};

// Runs a tool beside this one to its end, as `account` if there is one. Its exit code; -1: it could not be started.
int RunTool(const std::string& name, const std::vector<std::string>& words, const std::optional<Account>& account) {
  const std::string program = FindCompanion(name);
  if (program.empty()) {
    Say(kTool, name + " is not beside cr-drain: the installation is incomplete");
    return -1;
  }
  fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    std::vector<std::string> environment = {"PATH=/usr/local/bin:/usr/bin:/bin", "CUDA_REMOTE_HOSTD=" + HostdSocket()};
    for (const std::string& name : NewEngine()->Environment()) {
      if (const char* const value = getenv(name.c_str())) environment.push_back(name + "=" + value);
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
    const bool ready = chdir("/") == 0 && (!account || (LeaveTerminal() && Become(*account)));
    // The tool has left the terminal, so Ctrl-C reaches this program alone. After the change of the user, since the
    // kernel then forgets this.
    if (account) prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (ready) execve(program.c_str(), arguments.data(), variables.data());
    fprintf(stderr, "%s: cannot start %s: %s\n", kTool, program.c_str(), strerror(errno));
    _exit(126);
  }
  int status = 0;
  while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (child < 0) Say(kTool, std::string("fork: ") + strerror(errno));
  if (child < 0) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// A folder for images of `account` (none: root's) in `folder`. Others cannot have prepared it.
absl::StatusOr<std::string> MakeImagesFolder(const std::string& folder, const std::optional<Account>& account) {
  struct stat facts;
  // An operator must not have root make or open folders.
  const bool of_operator = Caller::Get() != nullptr;
  if (of_operator && (lstat(folder.c_str(), &facts) != 0 || !S_ISDIR(facts.st_mode) || facts.st_uid != 0 ||
                      (facts.st_mode & 5) != 5)) {
    return absl::FailedPreconditionError(
        folder + " is not a folder of root that users can enter; root must create it (mode 0755)");
  }
  if (!of_operator && mkdir(folder.c_str(), 0755) != 0 && errno != EEXIST) {
    return ErrnoStatus("cannot make the folder " + folder);
  }
  // Root's alone, also above it.
  CR_RETURN_IF_ERROR(ToAbsl(CheckFolder(folder, FolderUse::kServe)));
  if (!of_operator && chmod(folder.c_str(), 0755) != 0) return ErrnoStatus("cannot open " + folder + " to users");
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
    char target[PATH_MAX];
    const std::string link = "/proc/" + std::to_string(job.pid()) + "/fd/" + fd;
    const ssize_t length = readlink(link.c_str(), target, sizeof(target));
    const std::string path(target, size_t(std::max<ssize_t>(length, 0)));
    if (std::find(job.outputs().begin(), job.outputs().end(), path) != job.outputs().end())
      words->push_back(option + path);
  }
}

void DrainOne(const Options& options, const FoundJob& found, bool of_hostd, Outcome* outcome) {
  const std::string name = found.directory.substr(found.directory.rfind('/') + 1);
  // Root's tools handle root's jobs as root, also those of cr-run --user.
  const std::optional<Account> account = of_hostd ? AccountOf(found.job) : std::nullopt;
  const std::string which = "job " + Printable(name) + " of " + (account ? NameOf(*account) : std::string("root"));
  std::string error;
  if (of_hostd && !account) {
    outcome->left.push_back(which + ": its job.json names no user");
    return;
  }
  printf("%s: %s\n", which.c_str(), options.to_host.empty() || !of_hostd ? "is saved" : "moves");
  if (!options.to_host.empty() && of_hostd) {
    std::vector<std::string> words = {"--whole", "--to-host=" + options.to_host,
                                      "--timeout=" + std::to_string(options.timeout)};
    if (!options.server.empty()) words.push_back("--to=" + options.server);
    AddOutputs(found.job, &words);
    words.push_back(name);
    if (RunTool("cr-migrate", words, account) == 0) {
      ++outcome->moved;
      return;
    }
    if (!JobIsAlive(found.job)) {
      outcome->left.push_back(which + ": it has ended, and cr-migrate did not succeed; see above");
      return;
    }
    error = "it could not be moved";
  } else if (!options.to_host.empty()) {
    error = "jobs of root do not move to other hosts";
  }
  if (!options.save.empty()) {
    const absl::StatusOr<std::string> folder = MakeImagesFolder(options.save, account);
    if (!folder.ok()) {
      error = std::string(folder.status().message());
    } else {
      const std::string image = NewImage(*folder, name);
      const int code = RunTool(
          "cr-checkpoint",
          {"--stop", "--timeout=" + std::to_string(options.timeout), account ? name : found.directory, image}, account);
      if (code == 0) {
        ++outcome->saved;
        printf("%s: saved as %s\n", which.c_str(), image.c_str());
        return;
      }
      error = "it could not be saved";
    }
  }
  // It may have come to its end by itself meanwhile.
  if (JobIsAlive(found.job)) outcome->left.push_back(which + ": " + error);
}

// Programs of other hosts that use this host's GPU server.
void FindSessions(Outcome* outcome) {
  const std::string socket = RuntimeFolders().front() + "/session.sock";
  if (access(socket.c_str(), F_OK) != 0) return;
  const auto server = control::ServerControl::Open("unix:" + socket, {});
  const auto sessions = server.ok() ? (*server)->List() : server.status();
  if (!sessions.ok()) {
    outcome->left.push_back("the GPU server of this host: " + std::string(sessions.status().message()));
    return;
  }
  for (const control::SessionInfo& one : sessions->sessions()) {
    outcome->left.push_back("session " + std::to_string(one.id()) + " of this host's GPU server: " +
                            Printable(one.program()) + (one.peer().empty() ? "" : " from " + Printable(one.peer())) +
                            "; its user moves it with cr-migrate --to, cr-ps --end ends it");
  }
}

int Drain(const Options& options) {
  if (const absl::Status set = SetDrainingReason(HostdSocket(), options.reason); !set.ok()) {
    Say(kTool, set);
    return kExitFailure;
  }
  Outcome outcome;
  // A job that was being started when this began appears a moment later.
  std::set<std::string> seen;
  for (bool found_one = true; found_one;) {
    found_one = false;
    for (const bool of_hostd : {true, false}) {
      for (const FoundJob& found : of_hostd ? JobsOfHostd(HostdSocket(), 0) : AllJobs()) {
        if (!JobIsAlive(found.job) || !seen.insert(found.directory + std::to_string(found.job.pid_namespace())).second)
          continue;
        DrainOne(options, found, of_hostd, &outcome);
        found_one = true;
      }
    }
  }
  FindSessions(&outcome);
  printf("%d moved, %d saved, %zu left\n", outcome.moved, outcome.saved, outcome.left.size());
  for (const std::string& one : outcome.left) printf("left: %s\n", one.c_str());
  return outcome.left.empty() ? 0 : kExitLeft;
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
  int caller = -1;
  app.add_option("--caller", caller, "used by cr-hostd")->group("");
  CLI::Option* const undo = app.add_flag("--undo", options.undo, "let the host accept jobs again");
  for (const char* other : {"--to-host", "--to", "--save", "--reason", "--timeout"}) undo->excludes(other);
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
  if (const absl::Status taken = caller >= 0 ? Caller::Take(caller) : absl::OkStatus(); !taken.ok()) {
    Say(kTool, taken);
    return kExitFailure;
  }
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
