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
#include <optional>
#include <sstream>
#include <string>
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

// Whether the server that the user calls `name` can serve the program. *signal: the one that ended the question, while
// the signals for the job are blocked.
absl::Status AskServer(const std::string& name, const GpuHost& host, int* signal) {
  constexpr int kSayMs = 2000;
  bool said = false;
  return host.Ask([&](int waited_ms) {
    if (!said && waited_ms >= kSayMs) Say(kTool, "waiting for the GPU server " + name + ", which does not answer");
    said = said || waited_ms >= kSayMs;
    sigset_t pending;
    sigpending(&pending);
    for (const int ends : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
      if (sigismember(&pending, ends) == 1) *signal = ends;
    }
    return *signal == 0;
  });
}

int Main(int argc, char** argv) {
  std::string server, directory, name, user, address;
  int gpu = -1, caller_fd = -1;
  bool plain = false, io_uring = false, adopt = false, no_check = false;
  OutputOptions output_options;
  CLI::App app("Runs a CUDA program on a GPU server, here or on another machine, as a job that can be saved.", kTool);
  SetUpProgram(&app, "[OPTIONS] [--] PROGRAM [ARGUMENTS]");
  app.footer(kExamples);
  app.add_option("--server", server,
                 "the GPU server: unix:PATH or HOST:PORT (default: $CUDA_REMOTE_SERVER, else one of the job's own)")
      ->type_name("ADDR");
  app.add_option("--gpu", gpu, "the only GPU that the program sees (ordinal; default: all)")->check(CLI::Range(0, 255));
  app.add_option("--job-dir", directory,
                 "the job's folder (default: $CUDA_REMOTE_JOB_DIR, else one in $XDG_RUNTIME_DIR/cuda-remote/jobs, "
                 "/run/cuda-remote/jobs (root), /run/user/UID/cuda-remote/jobs or /tmp/cuda-remote-UID/jobs)")
      ->type_name("DIR");
  app.add_option("--name", name, "the job's name, for the other tools (default: cr-run's PID)")->type_name("NAME");
  AddOutputOptions(&app, &output_options);
  app.add_option("--user", user,
                 "run the program as this user, with that user's groups and without capabilities; needs root")
      ->type_name("USER");
  app.add_option("--address", address,
                 "ADDRESS[/PREFIX][@INTERFACE]: the job gets this network address, which no other machine or job has; "
                 "its TCP connections with other machines then continue after a checkpoint, a restart or a move. "
                 "INTERFACE is a bridge or an Ethernet interface (default: the one in whose network ADDRESS is)")
      ->type_name("ADDRESS");
  app.add_flag("--plain", plain,
               "run the program as an ordinary child process, without namespaces. A job of root cannot be checkpointed "
               "then; root can checkpoint that of an ordinary user. Programs that a static program starts with another "
               "LD_LIBRARY_PATH and LD_PRELOAD, and programs with an RPATH to another libcuda.so.1, do not get the "
               "client library");
  app.add_flag("--io-uring", io_uring,
               "programs may use io_uring; a job that has one open cannot be checkpointed (default: io_uring is "
               "unavailable, and most programs do without it)");
  app.add_flag("--adopt", adopt,
               "processes whose parents have ended become children of the program, which gets their SIGCHLD, and are "
               "saved with the job (default: a job with such processes cannot be checkpointed)");
  app.add_flag(
      "--no-check", no_check,
      "start the program without asking the GPU server first (default: cr-run ends with 125 if the server named "
      "with --server or CUDA_REMOTE_SERVER cannot serve the program)");
  app.add_option("--caller", caller_fd, "used by cr-hostd")->group("");
  const int own = OwnWords(app, argc, argv);
  try {
    app.parse(own, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitFailed;
  }
  Plan plan;
  int first = own;
  if (first < argc && strcmp(argv[first], "--") == 0) ++first;
  plan.command.assign(argv + first, argv + argc);
  if (plan.command.empty())
    return Fail("no program given: cr-run [OPTIONS] [--] PROGRAM [ARGUMENTS] (cr-run --help lists the options)");

  JobNetwork network;
  if (!address.empty()) {
    absl::StatusOr<JobNetwork> parsed = ParseNetwork(address);
    if (!parsed.ok()) return Fail("--address: " + std::string(parsed.status().message()));
    network = *std::move(parsed);
  }
  if (!address.empty() && plain) return Fail("--address needs a namespace, and --plain makes none");
  const std::unique_ptr<SnapshotEngine> engine = NewEngine();
  if (!address.empty() && !engine->Capabilities().keeps_tcp) {
    return Fail("--address: the connections of a job cannot be saved with " + engine->Requirement());
  }
  if (caller_fd >= 0) {
    if (const absl::Status taken = Caller::Take(caller_fd); !taken.ok()) return Fail(taken);
  }
  const Caller* const caller = Caller::Get();
  bool own_wishes = false;
  for (const char* option : {"--server", "--gpu", "--name", "--job-dir", "--address", "--user", "--output", "--error"})
    own_wishes |= app.count(option) > 0;
  // In a job whose variables an `env -i`, a `su -` or a launcher has taken away.
  std::string around, ignored;
  if (!caller && !own_wishes && !getenv("CUDA_REMOTE_JOB_DIR") && FindThisJob(&around, &ignored) && IsInUse(around)) {
    directory = around;
  }
  std::string no_hostd;  // why the one that there is does not do it
  if (!caller && !plain && user.empty() && geteuid() != 0 && directory.empty() && !getenv("CUDA_REMOTE_JOB_DIR")) {
    const auto hostd = host::Hostd::Connect();
    if (!hostd.ok()) no_hostd = std::string(hostd.status().message());
    if (hostd.ok() && *hostd) {
      host::Request request = host::RequestOf(app, "run");
      if (server.empty() && getenv("CUDA_REMOTE_SERVER"))
        host::AddOption("server", getenv("CUDA_REMOTE_SERVER"), &request);
      request.set_job(name.empty() ? std::to_string(getpid()) : name);
      if (!name.empty()) host::AddOption("name", name, &request);
      for (const std::string& word : plan.command) request.add_command(word);
      const int code = (*hostd)->Run(kTool, std::move(request), kExitFailed, &no_hostd);
      if (no_hostd.empty()) return code;
    }
    if (!no_hostd.empty() && address.empty())
      Say(kTool, no_hostd + "; the job runs without it, and cannot be checkpointed");
  }

  const char* value;
  const auto variable = [&](const char* wanted) { return caller ? caller->Variable(wanted) : getenv(wanted); };
  if (server.empty() && (value = getenv("CUDA_REMOTE_SERVER"))) server = value;
  if (directory.empty() && (value = getenv("CUDA_REMOTE_JOB_DIR"))) directory = value;
  if (name.find('/') != std::string::npos) return Fail("--name " + name + ": a job's name cannot contain a slash");
  // In a job already: its processes belong to that one, with its server.
  if (!directory.empty() && IsInUse(Absolute(directory)) && app.count("--job-dir") == 0) {
    if (own_wishes) {
      return Fail("this is in the job of " + directory +
                  " already, whose processes all belong to it: omit the options "
                  "of cr-run, or unset CUDA_REMOTE_JOB_DIR and CUDA_REMOTE_SERVER to start another job");
    }
    std::vector<char*> words(argv + first, argv + argc);
    words.push_back(nullptr);
    execvp(words[0], words.data());
    return Fail(std::string("cannot execute ") + words[0] + ": " + strerror(errno), errno == ENOENT ? 127 : 126);
  }
  std::optional<Account> account;
  if (caller) account = caller->account();
  if (!user.empty()) {
    if (geteuid() != 0) return Fail("only root can run a program as another user (--user)");
    absl::StatusOr<Account> found = FindAccount(user);
    if (!found.ok()) return Fail(found.status());
    account = *std::move(found);
  }
  if (!address.empty() && geteuid() != 0) {
    return Fail("--address: only root gives a job an address of its own, or a cr-hostd whose operator allows it" +
                (no_hostd.empty() ? std::string() : ": " + no_hostd));
  }
  if (!address.empty()) {
    const absl::Status checked = CheckNetwork(&network, caller ? &caller->addresses() : nullptr);
    if (!checked.ok()) return Fail(checked);
  }
  if (directory.empty()) directory = JobsFolder() + "/" + (name.empty() ? std::to_string(getpid()) : name);
  directory = Absolute(directory);
  RemoveStaleJobs();
  if (const auto running = ReadJob(directory); running.ok() && JobIsAlive(*running))
    return Fail("the job in " + directory + " is still running (PID " + std::to_string(running->pid()) + ")");
  if (const absl::Status claimed = ClaimJobFolder(directory); !claimed.ok())
    return Fail(std::string(claimed.message()) + " (cr-run --job-dir, XDG_RUNTIME_DIR)");
  const absl::StatusOr<std::string> library_folder = LinkLibrary(directory);
  if (!library_folder.ok()) return Fail(library_folder.status());

  Outputs outputs;
  // In a user namespace it would have mounts of its own, and could not be saved. Without one, root's tools can save it.
  const bool is_root = geteuid() == 0, own_mounts = !plain && (is_root || MayMount()),
             users_own = !is_root && !own_mounts;
  const auto prepare = [&]() -> absl::Status {
    if (account) CR_RETURN_IF_ERROR(OpenToUser(directory, directory, *account));
    if (users_own) CR_RETURN_IF_ERROR(MakeSocketFolder(directory));
    CR_RETURN_IF_ERROR(JobClaim::Prepare(directory));
    const ActAs him(account);
    const mode_t before = caller ? umask(caller->umask()) : 0;
    absl::Status opened = outputs.Open(output_options);
    if (caller) umask(before);
    return opened;
  };
  if (const absl::Status prepared = prepare(); !prepared.ok()) {
    RemoveJobFolder(directory);
    return Fail(prepared);
  }
  std::unique_ptr<NetworkNamespace> own_network;
  if (!address.empty()) {
    auto made = NetworkNamespace::Make(network, /*ask=*/true);
    const absl::Status connected = made.ok() ? (*made)->Connect() : made.status();
    if (!connected.ok()) {
      RemoveJobFolder(directory);
      return Fail(connected);
    }
    own_network = *std::move(made);
    plan.network = own_network->fd();
  }
  // From here on everything that is started must be ended.
  BlockForwardedSignals();
  auto hosts = std::make_unique<GpuHosts>(SocketFolder(directory), /*detached=*/false, account);
  const absl::StatusOr<GpuHost*> host = hosts->Open(server, gpu);
  if (!host.ok()) {
    RemoveJobFolder(directory);
    return Fail(host.status());
  }
  if (!server.empty() && !no_check) {
    int signal = 0;
    const absl::Status asked = AskServer(server, **host, &signal);
    if (!asked.ok()) {
      hosts.reset();
      RemoveJobFolder(directory);
      if (signal != 0) return 128 + signal;
      return Fail("the program was not started, because the GPU server " + server + " cannot be reached: " +
                  std::string(asked.message()) + " (cr-run --no-check starts it all the same)");
    }
  }
  // An own server shows its one GPU as the first.
  const int seen = server.empty() ? -1 : gpu;
  const std::string program = plan.command[0].substr(plan.command[0].rfind('/') + 1);
  const std::string shown = !name.empty() ? name : (value = variable("CUDA_REMOTE_JOB")) && *value ? value : program;
  absl::Status written = WriteGpuServer(directory, (*host)->server(), seen);
  if (written.ok()) written = WriteThisJob(directory, directory, shown);
  if (!written.ok()) {
    hosts.reset();
    RemoveJobFolder(directory);
    return Fail(written);
  }
  if (caller) plan.environment = caller->environment();
  for (char** one = environ; !caller && *one; ++one) plan.environment.push_back(*one);
  SetVariable(&plan.environment, "CUDA_REMOTE_SERVER", (*host)->server());
  SetVariable(&plan.environment, "CUDA_REMOTE_JOB_DIR", directory);
  SetVariable(&plan.environment, "CUDA_REMOTE_JOB", shown);
  if (seen >= 0) SetVariable(&plan.environment, "CUDA_REMOTE_GPU", std::to_string(seen));
  if (account && !caller) SetUser(*account, &plan.environment);
  // gloo looks for the address of the machine's name otherwise, which the job does not have.
  if (!address.empty() && !variable("GLOO_SOCKET_IFNAME"))
    SetVariable(&plan.environment, "GLOO_SOCKET_IFNAME", kJobInterface);
  plan.account = account;
  value = variable("LD_LIBRARY_PATH");
  SetVariable(&plan.environment, "LD_LIBRARY_PATH",
              *library_folder + (value && *value ? std::string(":") + value : ""));

  Isolated isolated;
  int code = kExitFailed;
  Job job;
  if (const absl::Status prepared = engine->PrepareStart(&plan); !prepared.ok()) {
    job.set_no_checkpoint(std::string(prepared.message()));
    Say(kTool, job.no_checkpoint() + "; the job runs, but cannot be checkpointed");
  }
  if (io_uring) plan.withhold_io_uring = false;
  plan.adopt = adopt;
  bool isolate = is_root && !plain && plan.own_processes;
  if (is_root && plain && plan.own_processes) job.set_no_checkpoint("it was started with --plain");
  if (!is_root && own_mounts) job.set_no_checkpoint(kInUserNamespace);
  job.set_users_own(users_own);
  const std::string preloaded = *library_folder + "/" + kPreloadedLibrary;
  bool stands_in = false;
  if (own_mounts) {
    const absl::Status planned = PlanStandIns(directory, &job, &plan.mounts);
    stands_in = planned.ok();
    if (!stands_in) Say(kTool, std::string(planned.message()) + "; some programs may use this machine's own GPU");
  }
  SetPreloaded(&plan.environment, stands_in ? "" : preloaded);
  absl::Status started;
  std::unique_ptr<JobTerminal> terminal;
  outputs.Show();
  if (isolate) {
    auto opened = JobTerminal::Open();
    if (!opened.ok()) Say(kTool, std::string(opened.status().message()) + "; it has no job control");
    if (opened.ok()) terminal = *std::move(opened);
    if (terminal) plan.terminal = terminal->job_end();
    if (terminal && account && fchown(plan.terminal, account->user, gid_t(-1)) != 0) {
      Say(kTool, "the job's terminal does not become " + NameOf(*account) + "'s");
    }
    if (terminal) plan.terminal_streams = terminal->streams();
    plan.outside_ptys = terminal ? PtyNames({plan.terminal}) : PtyNames({0, 1, 2});
    absl::StatusOr<Isolated> processes = StartIsolated(plan, &code);
    if (processes.ok()) isolated = *processes;
    started = processes.status();
    if (terminal) terminal->CloseJobEnd();
    if (!started.ok() && code == kExitFailed && address.empty()) {
      // A container may forbid it. The program still works.
      job.set_no_checkpoint(std::string(started.message()));
      outputs.Hide();
      Say(kTool, job.no_checkpoint() + "; the job runs, but cannot be checkpointed");
      outputs.Show();
      isolate = false;
      terminal.reset();
      plan.terminal = -1;
      plan.mounts.clear();
      job.clear_stand_ins();
      SetPreloaded(&plan.environment, preloaded);
    }
  }
  // What outlives its parent is this process's child then: a checkpoint sees it, and so does the watch for devices.
  if (!isolate) {
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    const absl::StatusOr<pid_t> program_pid = StartPlain(plan, &code);
    if (program_pid.ok()) isolated.pid = *program_pid;
    started = program_pid.status();
  }
  outputs.Hide();
  if (!started.ok()) {
    hosts.reset();
    RemoveJobFolder(directory);
    return Fail(started, code);
  }
  job.set_name(Printable(directory.substr(directory.rfind('/') + 1)));
  for (const std::string& word : plan.command) job.add_command(Printable(word));
  job.set_server(server);
  job.set_gpu(gpu);
  job.set_runner_pid(getpid());
  job.set_caller_pid(caller ? caller->pid() : 0);
  job.set_init_pid(isolated.init);
  job.set_pid_namespace(PidNamespace(isolated.init));
  job.set_pid(isolated.pid);
  job.set_inner_pid(isolated.inner_pid);
  job.set_started_unix_ms(UnixMs());
  job.set_directory(directory);
  job.set_terminal(terminal != nullptr);
  if (account) SetAccount(*account, &job);
  if (!address.empty()) *job.mutable_network() = network;
  for (const std::string& path : outputs.all()) job.add_outputs(path);
  if (const absl::Status noted = WriteJob(directory, job); !noted.ok())
    Say(kTool, std::string(noted.message()) + "; the other tools will not find the job");
  code = FinishJob(kTool, isolated, directory, job, std::move(terminal), std::move(hosts), engine.get());
  if (own_network) own_network->Leave(EndedByItself(code));
  return code;
}

}  // namespace
}  // namespace cuda_remote::client::tools

int main(int argc, char** argv) {
  try {
    return cuda_remote::client::tools::Main(argc, argv);
  } catch (const std::exception& error) {
    fprintf(stderr, "cr-run: %s\n", error.what());
    return 125;
  }
}
