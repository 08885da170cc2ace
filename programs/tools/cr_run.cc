// SPDX-License-Identifier: Apache-2.0
// cr-run: runs a program with its GPU on a cr-server. See --help.

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/engine/engines.h"
#include "checkpoint/gpu/gpu_host.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/caller.h"
#include "checkpoint/job/isolation/isolate.h"
#include "checkpoint/job/isolation/network.h"
#include "checkpoint/job/isolation/own_ptys.h"
#include "checkpoint/job/isolation/stand_ins.h"
#include "checkpoint/job/isolation/terminal.h"
#include "checkpoint/job/job.h"
#include "checkpoint/job/job_claim.h"
#include "checkpoint/job/outputs.h"
#include "host/client.h"
#include "programs/tools/foreground.h"
#include "programs/tools/output_options.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/cli/help.h"
#include "proto/codec/text.h"
#include "proto/folder/this_job.h"

extern char** environ;

namespace cuda_remote::client::tools {

using namespace checkpoint;
namespace {

constexpr char kTool[] = "cr-run";

constexpr char kExamples[] = R"(
Examples:
  cr-run -- ./program --its options           a GPU server of its own, on this machine
  cr-run --server unix:/run/user/1000/cuda-remote/session.sock -- ./program
  cr-run --server gpu7:7070 --gpu 1 -- python3 train.py
  cr-run --output train.log -- ./program      its output goes to train.log; another job cannot use this file meanwhile
  cr-run --user anna -- ./program             as root: runs it as anna; root's tools can save, restart and move it
  cr-run --address 10.9.0.50 -- ./program     as root, or as cr-hostd allows: its connections move with the job
  cr-run --name train -- ./program &          then: cr-checkpoint train DIR, cr-migrate train --to gpu8:7070

The program runs in the foreground, and signals go to it. It finds the client library through LD_LIBRARY_PATH, as
libcuda.so.1. For programs that change LD_LIBRARY_PATH, the library also replaces the machine's libcuda.so.1, if this
user may create mounts; if not, a library in LD_PRELOAD puts the variables back.

A job without --plain can be saved (cr-checkpoint) if root starts it, or an ordinary user where cr-hostd runs. It then
has PID and IPC namespaces of its own. If root starts it at a terminal, it has a terminal of its own. Root can also save
an ordinary user's job with --plain. Every job can be moved (cr-migrate).

For a server on another machine, set CUDA_REMOTE_TLS_CA. Also set CUDA_REMOTE_TLS_CERT and CUDA_REMOTE_TLS_KEY, or
CUDA_REMOTE_TOKEN_FILE in place of these two.

Exit codes: the program's own; 128 + N if signal N ended it; 121 stopped by cr-checkpoint --stop; 125 cr-run failed,
or its GPU server cannot be reached; 126 the program cannot be executed; 127 it was not found.
)";

// Our own options end at "--" or at the first word that is none. Returns how many words are ours.
int OwnWords(const CLI::App& app, int argc, char** argv) {
  int at = 1;
  while (at < argc && argv[at][0] == '-') {
    const std::string word = argv[at];
    if (word == "--") break;
    ++at;
    if (word.find('=') != std::string::npos) continue;
    const CLI::Option* const option = app.get_option_no_throw(word);
    // An unknown one is the last word, so that the message is about it and not about the program.
    if (!option) break;
    if (option->get_expected_max() > 0) ++at;
  }
  return at < argc ? at : argc;
}

void SetVariable(std::vector<std::string>* environment, const std::string& name, const std::string& value) {
  for (std::string& variable : *environment) {
    if (variable.compare(0, name.size() + 1, name + "=") != 0) continue;
    variable = name + "=" + value;
    return;
  }
  environment->push_back(name + "=" + value);
}

// Puts `library` (empty: none) at the end of LD_PRELOAD, in the place of another job's.
void SetPreloaded(std::vector<std::string>* environment, const std::string& library) {
  constexpr char kName[] = "LD_PRELOAD=";
  const std::string of_jobs = std::string("/") + kPreloadedLibrary;
  std::string all;
  const auto add = [&all](const std::string& path) { all += (all.empty() ? "" : ":") + path; };
  for (auto at = environment->begin(); at != environment->end();) {
    if (at->compare(0, strlen(kName), kName) != 0) {
      ++at;
      continue;
    }
    std::string paths = at->substr(strlen(kName));
    std::replace(paths.begin(), paths.end(), ' ', ':');
    std::istringstream list(paths);
    for (std::string path; std::getline(list, path, ':');) {
      const bool other =
          path.size() >= of_jobs.size() && path.compare(path.size() - of_jobs.size(), of_jobs.size(), of_jobs) == 0;
      if (!path.empty() && !other) add(path);
    }
    at = environment->erase(at);
  }
  if (library.find_first_of(": ") != std::string::npos) {
    Say(kTool, "LD_PRELOAD cannot name " + library +
                   ", because of the space or colon in it; programs that get another environment do not find the GPU. "
                   "Choose another folder with --job-dir");
  } else if (!library.empty()) {
    add(library);
  }
  if (!all.empty()) environment->push_back(kName + all);
}

// What a program finds of its user in its environment; what is said of the caller's folders does not hold.
void SetUser(const Account& account, std::vector<std::string>* environment) {
  const auto is_callers = [](const std::string& variable) { return variable.compare(0, 16, "XDG_RUNTIME_DIR=") == 0; };
  environment->erase(std::remove_if(environment->begin(), environment->end(), is_callers), environment->end());
  if (account.name.empty()) return;
  SetVariable(environment, "USER", account.name);
  SetVariable(environment, "LOGNAME", account.name);
  SetVariable(environment, "HOME", account.home);
  SetVariable(environment, "SHELL", account.shell);
}

int Fail(const std::string& text, int code = kExitFailed) {
  Say(kTool, text);
  return code;
}

int Fail(const absl::Status& failure, int code = kExitFailed) {
  Say(kTool, failure);
  return code;
}

// One cr-run, in steps. A step that ends it says why, and returns the exit code.
class Run {
 public:
  Run(int argc, char** argv) : argc_(argc), argv_(argv) {}

  int Do() {
    using Step = std::optional<int> (Run::*)();
    for (const Step step :
         {&Run::ReadCommandLine, &Run::GoThroughHostd, &Run::StayInJobAround, &Run::ChooseAccount, &Run::ClaimFolder,
          &Run::PrepareFolder, &Run::MakeNetwork, &Run::OpenServer, &Run::AskServer, &Run::DescribeJob}) {
      if (const std::optional<int> code = (this->*step)()) return Leave(*code);
    }
    SetEnvironment();
    PlanProcesses();
    if (const std::optional<int> code = StartProgram()) return Leave(*code);
    return WaitForProgram();
  }

 private:
  std::optional<int> ReadCommandLine();
  std::optional<int> GoThroughHostd();
  std::optional<int> StayInJobAround();
  std::optional<int> ChooseAccount();
  std::optional<int> ClaimFolder();
  std::optional<int> PrepareFolder();
  std::optional<int> MakeNetwork();
  std::optional<int> OpenServer();
  std::optional<int> AskServer();
  std::optional<int> DescribeJob();
  void SetEnvironment();
  void PlanProcesses();
  std::optional<int> StartProgram();
  int WaitForProgram();

  void AddOptions();
  // The program in namespaces of its own. False: they cannot be had, and the program runs without.
  bool StartInNamespaces(int* code, absl::Status* started);
  absl::Status PrepareFiles();
  int Leave(int code);

  // The one GPU that the program asks for; -1: all. A server of the job's own shows its GPU as the first.
  int SeenGpu() const { return server_.empty() ? -1 : gpu_; }
  // Of the environment of whoever wants the job; null: not set.
  const char* Variable(const char* name) const { return caller_ ? caller_->Variable(name) : getenv(name); }
  void Set(const std::string& name, const std::string& value) { SetVariable(&plan_.environment, name, value); }

  const int argc_;
  char** const argv_;
  CLI::App app_{"Runs a CUDA program on a GPU server, here or on another machine, as a job that can be saved.", kTool};
  std::string server_, directory_, name_, user_, address_;
  int gpu_ = -1, caller_fd_ = -1;
  bool plain_ = false, io_uring_ = false, adopt_ = false, no_check_ = false;
  OutputOptions output_options_;
  int first_ = 0;            // the program's place in argv_
  bool own_wishes_ = false;  // options that make it another job than the one around

  const std::unique_ptr<SnapshotEngine> engine_ = NewEngine();
  std::unique_ptr<const Caller> caller_;
  std::string no_hostd_;  // why the cr-hostd that there is does not do it
  std::optional<Account> account_;
  bool claimed_ = false;  // the folder
  std::string library_folder_, shown_;
  bool own_mounts_ = false;
  Outputs outputs_;
  JobNetwork network_;
  std::unique_ptr<NetworkNamespace> own_network_;
  std::unique_ptr<GpuHosts> hosts_;
  const GpuHost* host_ = nullptr;
  Plan plan_;
  Job job_;
  bool isolate_ = false;
  Isolated isolated_;
  std::unique_ptr<JobTerminal> terminal_;
};

void Run::AddOptions() {
  SetUpProgram(&app_, "[OPTIONS] [--] PROGRAM [ARGUMENTS]");
  app_.footer(kExamples);
  app_.add_option("--server", server_,
                  "the GPU server: unix:PATH or HOST:PORT (default: $CUDA_REMOTE_SERVER, else one of the job's own)")
      ->type_name("ADDR");
  app_.add_option("--gpu", gpu_, "the only GPU that the program sees (ordinal; default: all)")
      ->check(CLI::Range(0, 255));
  app_.add_option("--job-dir", directory_,
                  "the job's folder (default: $CUDA_REMOTE_JOB_DIR, else one in $XDG_RUNTIME_DIR/cuda-remote/jobs, "
                  "/run/cuda-remote/jobs (root), /run/user/UID/cuda-remote/jobs or /tmp/cuda-remote-UID/jobs)")
      ->type_name("DIR");
  app_.add_option("--name", name_, "the job's name, for the other tools (default: cr-run's PID)")->type_name("NAME");
  AddOutputOptions(&app_, &output_options_);
  app_.add_option("--user", user_,
                  "run the program as this user, with that user's groups and without capabilities; needs root")
      ->type_name("USER");
  app_.add_option("--address", address_,
                  "ADDRESS[/PREFIX][@INTERFACE]: the job gets this network address, which no other machine or job has; "
                  "its TCP connections with other machines then continue after a checkpoint, a restart or a move. "
                  "INTERFACE is a bridge or an Ethernet interface (default: the one in whose network ADDRESS is)")
      ->type_name("ADDRESS");
  app_.add_flag(
      "--plain", plain_,
      "run the program as an ordinary child process, without namespaces. A job of root cannot be checkpointed "
      "then; root can checkpoint that of an ordinary user. Programs that a static program starts with another "
      "LD_LIBRARY_PATH and LD_PRELOAD, and programs with an RPATH to another libcuda.so.1, do not get the "
      "client library");
  app_.add_flag("--io-uring", io_uring_,
                "programs may use io_uring; a job that has one open cannot be checkpointed (default: io_uring is "
                "unavailable, and most programs do without it)");
  app_.add_flag("--adopt", adopt_,
                "processes whose parents have ended become children of the program, which gets their SIGCHLD, and are "
                "saved with the job (default: a job with such processes cannot be checkpointed)");
  app_.add_flag(
      "--no-check", no_check_,
      "start the program without asking the GPU server first (default: cr-run ends with 125 if the server named "
      "with --server or CUDA_REMOTE_SERVER cannot serve the program)");
  app_.add_option("--caller", caller_fd_, "used by cr-hostd")->group("");
}

std::optional<int> Run::ReadCommandLine() {
  AddOptions();
  const int own = OwnWords(app_, argc_, argv_);
  try {
    app_.parse(own, argv_);
  } catch (const CLI::ParseError& error) {
    return app_.exit(error) == 0 ? 0 : kExitFailed;
  }
  first_ = own < argc_ && strcmp(argv_[own], "--") == 0 ? own + 1 : own;
  plan_.command.assign(argv_ + first_, argv_ + argc_);
  if (plan_.command.empty())
    return Fail("no program given: cr-run [OPTIONS] [--] PROGRAM [ARGUMENTS] (cr-run --help lists the options)");
  for (const char* option : {"--server", "--gpu", "--name", "--job-dir", "--address", "--user", "--output", "--error"})
    own_wishes_ |= app_.count(option) > 0;
  if (name_.find('/') != std::string::npos) return Fail("--name " + name_ + ": a job's name cannot contain a slash");
  auto caller = Caller::From(caller_fd_);
  if (!caller.ok()) return Fail(caller.status());
  caller_ = *std::move(caller);
  if (address_.empty()) return {};
  absl::StatusOr<JobNetwork> parsed = ParseNetwork(address_);
  if (!parsed.ok()) return Fail("--address: " + std::string(parsed.status().message()));
  network_ = *std::move(parsed);
  if (plain_) return Fail("--address needs a namespace, and --plain makes none");
  if (!engine_->Capabilities().keeps_tcp)
    return Fail("--address: the connections of a job cannot be saved with " + engine_->Requirement());
  return {};
}

std::optional<int> Run::GoThroughHostd() {
  // In a job whose variables an `env -i`, a `su -` or a launcher has taken away.
  std::string around, ignored;
  if (!caller_ && !own_wishes_ && !getenv("CUDA_REMOTE_JOB_DIR") && FindThisJob(&around, &ignored) && IsInUse(around)) {
    directory_ = around;
  }
  if (caller_ || plain_ || !user_.empty() || geteuid() == 0 || !directory_.empty() || getenv("CUDA_REMOTE_JOB_DIR"))
    return {};
  const auto hostd = host::Hostd::Connect();
  if (!hostd.ok()) no_hostd_ = std::string(hostd.status().message());
  if (hostd.ok() && *hostd) {
    host::Request request = host::RequestOf(app_, "run");
    if (server_.empty() && getenv("CUDA_REMOTE_SERVER"))
      host::AddOption("server", getenv("CUDA_REMOTE_SERVER"), &request);
    request.set_job(name_.empty() ? std::to_string(getpid()) : name_);
    if (!name_.empty()) host::AddOption("name", name_, &request);
    for (const std::string& word : plan_.command) request.add_command(word);
    const int code = (*hostd)->Run(kTool, std::move(request), kExitFailed, &no_hostd_);
    if (no_hostd_.empty()) return code;
  }
  if (!no_hostd_.empty() && address_.empty())
    Say(kTool, no_hostd_ + "; the job runs without it, and cannot be checkpointed");
  return {};
}

// The processes of a program that a job starts belong to that job, with its server.
std::optional<int> Run::StayInJobAround() {
  const char* value;
  if (server_.empty() && (value = getenv("CUDA_REMOTE_SERVER"))) server_ = value;
  if (directory_.empty() && (value = getenv("CUDA_REMOTE_JOB_DIR"))) directory_ = value;
  if (directory_.empty() || app_.count("--job-dir") != 0 || !IsInUse(Absolute(directory_))) return {};
  if (own_wishes_) {
    return Fail("this is in the job of " + directory_ +
                " already, whose processes all belong to it: omit the options "
                "of cr-run, or unset CUDA_REMOTE_JOB_DIR and CUDA_REMOTE_SERVER to start another job");
  }
  std::vector<char*> words(argv_ + first_, argv_ + argc_);
  words.push_back(nullptr);
  execvp(words[0], words.data());
  return Fail(std::string("cannot execute ") + words[0] + ": " + strerror(errno), errno == ENOENT ? 127 : 126);
}

std::optional<int> Run::ChooseAccount() {
  if (caller_) account_ = caller_->account();
  if (!user_.empty()) {
    if (geteuid() != 0) return Fail("only root can run a program as another user (--user)");
    absl::StatusOr<Account> found = FindAccount(user_);
    if (!found.ok()) return Fail(found.status());
    account_ = *std::move(found);
  }
  if (address_.empty()) return {};
  if (geteuid() != 0) {
    return Fail("--address: only root gives a job an address of its own, or a cr-hostd whose operator allows it" +
                (no_hostd_.empty() ? std::string() : ": " + no_hostd_));
  }
  const absl::Status checked = CheckNetwork(&network_, caller_ ? &caller_->addresses() : nullptr);
  if (!checked.ok()) return Fail(checked);
  return {};
}

std::optional<int> Run::ClaimFolder() {
  if (directory_.empty()) directory_ = JobsFolder() + "/" + (name_.empty() ? std::to_string(getpid()) : name_);
  directory_ = Absolute(directory_);
  RemoveStaleJobs();
  if (const auto running = ReadJob(directory_); running.ok() && JobIsAlive(*running))
    return Fail("the job in " + directory_ + " is still running (PID " + std::to_string(running->pid()) + ")");
  if (const absl::Status claimed = ClaimJobFolder(directory_); !claimed.ok())
    return Fail(std::string(claimed.message()) + " (cr-run --job-dir, XDG_RUNTIME_DIR)");
  claimed_ = true;
  return {};
}

absl::Status Run::PrepareFiles() {
  CR_ASSIGN_OR_RETURN(library_folder_, LinkLibrary(directory_));
  if (account_) CR_RETURN_IF_ERROR(OpenToUser(directory_, directory_, *account_));
  if (job_.users_own()) CR_RETURN_IF_ERROR(MakeSocketFolder(directory_));
  CR_RETURN_IF_ERROR(JobClaim::Prepare(directory_));
  const ActAs him(account_);
  const mode_t before = caller_ ? umask(caller_->umask()) : 0;
  absl::Status opened = outputs_.Open(output_options_);
  if (caller_) umask(before);
  return opened;
}

std::optional<int> Run::PrepareFolder() {
  // In a user namespace it would have mounts of its own, and could not be saved. Without one, root's tools can save it.
  own_mounts_ = !plain_ && (geteuid() == 0 || MayMount());
  job_.set_users_own(geteuid() != 0 && !own_mounts_);
  const absl::Status prepared = PrepareFiles();
  if (!prepared.ok()) return Fail(prepared);
  return {};
}

std::optional<int> Run::MakeNetwork() {
  if (address_.empty()) return {};
  auto made = NetworkNamespace::Make(network_, /*ask=*/true);
  const absl::Status connected = made.ok() ? (*made)->Connect() : made.status();
  if (!connected.ok()) return Fail(connected);
  own_network_ = *std::move(made);
  plan_.network = own_network_->fd();
  return {};
}

std::optional<int> Run::OpenServer() {
  // From here on everything that is started must be ended.
  BlockForwardedSignals();
  hosts_ = std::make_unique<GpuHosts>(GpuHostOptions{SocketFolder(directory_), /*detached=*/false, account_,
                                                     caller_ ? &caller_->environment() : nullptr});
  const absl::StatusOr<GpuHost*> host = hosts_->Open(server_, gpu_);
  if (!host.ok()) return Fail(host.status());
  host_ = *host;
  return {};
}

// Whether the server that the user names can serve the program.
std::optional<int> Run::AskServer() {
  if (server_.empty() || no_check_) return {};
  constexpr int kSayMs = 2000;
  bool said = false;
  int signal = 0;  // the one that ended the question: the signals for the job are blocked
  const absl::Status asked = host_->Ask([&](int waited_ms) {
    if (!said && waited_ms >= kSayMs) Say(kTool, "waiting for the GPU server " + server_ + ", which does not answer");
    said = said || waited_ms >= kSayMs;
    sigset_t pending;
    sigpending(&pending);
    for (const int ends : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
      if (sigismember(&pending, ends) == 1) signal = ends;
    }
    return signal == 0;
  });
  if (asked.ok()) return {};
  if (signal != 0) return 128 + signal;
  return Fail("the program was not started, because the GPU server " + server_ +
              " cannot be reached: " + std::string(asked.message()) + " (cr-run --no-check starts it all the same)");
}

// For processes of the job that have lost their environment.
std::optional<int> Run::DescribeJob() {
  const std::string program = plan_.command[0].substr(plan_.command[0].rfind('/') + 1);
  const char* const outer = Variable("CUDA_REMOTE_JOB");
  shown_ = !name_.empty() ? name_ : outer && *outer ? outer : program;
  absl::Status written = WriteGpuServer(directory_, host_->server(), SeenGpu());
  if (written.ok()) written = WriteThisJob(directory_, directory_, shown_);
  if (!written.ok()) return Fail(written);
  return {};
}

void Run::SetEnvironment() {
  if (caller_) plan_.environment = caller_->environment();
  for (char** one = environ; !caller_ && *one; ++one) plan_.environment.push_back(*one);
  Set("CUDA_REMOTE_SERVER", host_->server());
  Set("CUDA_REMOTE_JOB_DIR", directory_);
  Set("CUDA_REMOTE_JOB", shown_);
  if (SeenGpu() >= 0) Set("CUDA_REMOTE_GPU", std::to_string(SeenGpu()));
  if (account_ && !caller_) SetUser(*account_, &plan_.environment);
  // gloo looks for the address of the machine's name otherwise, which the job does not have.
  if (!address_.empty() && !Variable("GLOO_SOCKET_IFNAME")) Set("GLOO_SOCKET_IFNAME", kJobInterface);
  const char* const libraries = Variable("LD_LIBRARY_PATH");
  Set("LD_LIBRARY_PATH", library_folder_ + (libraries && *libraries ? std::string(":") + libraries : ""));
}

// What of its own the program's processes get.
void Run::PlanProcesses() {
  const bool is_root = geteuid() == 0;
  plan_.account = account_;
  if (caller_) plan_.umask = caller_->umask();
  if (const absl::Status prepared = engine_->PrepareStart(&plan_); !prepared.ok()) {
    job_.set_no_checkpoint(std::string(prepared.message()));
    Say(kTool, job_.no_checkpoint() + "; the job runs, but cannot be checkpointed");
  }
  if (io_uring_) plan_.withhold_io_uring = false;
  plan_.adopt = adopt_;
  isolate_ = is_root && !plain_ && plan_.own_processes;
  if (is_root && plain_ && plan_.own_processes) job_.set_no_checkpoint("it was started with --plain");
  if (!is_root && own_mounts_) job_.set_no_checkpoint(kInUserNamespace);
  bool stands_in = false;
  if (own_mounts_) {
    const absl::Status planned = PlanStandIns(directory_, &job_, &plan_.mounts);
    stands_in = planned.ok();
    if (!stands_in) Say(kTool, std::string(planned.message()) + "; some programs may use this machine's own GPU");
  }
  SetPreloaded(&plan_.environment, stands_in ? "" : library_folder_ + "/" + kPreloadedLibrary);
}

bool Run::StartInNamespaces(int* code, absl::Status* started) {
  auto opened = JobTerminal::Open();
  if (!opened.ok()) Say(kTool, std::string(opened.status().message()) + "; it has no job control");
  if (opened.ok()) terminal_ = *std::move(opened);
  if (terminal_) {
    plan_.terminal = terminal_->job_end();
    plan_.terminal_streams = terminal_->streams();
    if (account_ && fchown(plan_.terminal, account_->user, gid_t(-1)) != 0)
      Say(kTool, "the job's terminal does not become " + NameOf(*account_) + "'s");
  }
  plan_.outside_ptys = terminal_ ? PtyNames({plan_.terminal}) : PtyNames({0, 1, 2});
  const absl::StatusOr<Isolated> processes = StartIsolated(plan_, code);
  if (processes.ok()) isolated_ = *processes;
  *started = processes.status();
  if (terminal_) terminal_->CloseJobEnd();
  if (started->ok() || *code != kExitFailed || !address_.empty()) return true;
  // A container may forbid it. The program still works.
  job_.set_no_checkpoint(std::string(started->message()));
  outputs_.Hide();
  Say(kTool, job_.no_checkpoint() + "; the job runs, but cannot be checkpointed");
  outputs_.Show();
  terminal_.reset();
  plan_.terminal = -1;
  plan_.mounts.clear();
  job_.clear_stand_ins();
  SetPreloaded(&plan_.environment, library_folder_ + "/" + kPreloadedLibrary);
  return false;
}

std::optional<int> Run::StartProgram() {
  int code = kExitFailed;
  absl::Status started;
  outputs_.Show();
  if (!isolate_ || !StartInNamespaces(&code, &started)) {
    // What outlives its parent is this process's child then: a checkpoint sees it, and so does the watch for devices.
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    const absl::StatusOr<pid_t> program = StartPlain(plan_, &code);
    if (program.ok()) isolated_.pid = *program;
    started = program.status();
  }
  outputs_.Hide();
  if (!started.ok()) return Fail(started, code);
  return {};
}

int Run::WaitForProgram() {
  job_.set_name(Printable(directory_.substr(directory_.rfind('/') + 1)));
  for (const std::string& word : plan_.command) job_.add_command(Printable(word));
  job_.set_server(server_);
  job_.set_gpu(gpu_);
  job_.set_runner_pid(getpid());
  job_.set_caller_pid(caller_ ? caller_->pid() : 0);
  job_.set_init_pid(isolated_.init);
  job_.set_pid_namespace(PidNamespace(isolated_.init));
  job_.set_pid(isolated_.pid);
  job_.set_inner_pid(isolated_.inner_pid);
  job_.set_started_unix_ms(UnixMs());
  job_.set_directory(directory_);
  job_.set_terminal(terminal_ != nullptr);
  if (account_) SetAccount(*account_, &job_);
  if (!address_.empty()) *job_.mutable_network() = network_;
  for (const std::string& path : outputs_.all()) job_.add_outputs(path);
  if (const absl::Status noted = WriteJob(directory_, job_); !noted.ok())
    Say(kTool, std::string(noted.message()) + "; the other tools will not find the job");
  const int code =
      FinishJob(kTool, isolated_, directory_, job_, std::move(terminal_), std::move(hosts_), engine_.get());
  if (own_network_) own_network_->Leave(EndedByItself(code));
  return code;
}

// Ends what a job that does not start has got already.
int Run::Leave(int code) {
  hosts_.reset();
  if (claimed_) RemoveJobFolder(directory_);
  return code;
}

}  // namespace
}  // namespace cuda_remote::client::tools

int main(int argc, char** argv) {
  try {
    return cuda_remote::client::tools::Run(argc, argv).Do();
  } catch (const std::exception& error) {
    fprintf(stderr, "cr-run: %s\n", error.what());
    return 125;
  }
}
