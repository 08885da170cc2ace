// SPDX-License-Identifier: Apache-2.0
// cr-mpirun: starts an MPI job over several hosts as one job that can be saved. See --help.
//
// The part on this host runs mpirun. In the place of ssh, mpirun starts cr-mpi-agent, which leaves a file with what is
// to be started where in a folder of this program's. This program, which is outside of the job, starts it there by the
// user's launch agent, as a part of the job with an address of its own. So no connection of ssh belongs to the job.

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "checkpoint/job/forwarded_signals.h"
#include "checkpoint/job/job.h"
#include "programs/mpi/parts.h"
#include "proto/base/clock.h"
#include "proto/cli/help.h"

extern char** environ;

namespace cuda_remote::client::mpi {
namespace {

constexpr char kTool[] = "cr-mpirun";
constexpr int kExitStopped = 121;  // as cr-run's
constexpr int kExitFailed = 125;
constexpr int kLookMs = 50;
// How long the other parts may take to end after the first, and after they were told to.
constexpr std::chrono::seconds kEnd(10);
constexpr char kVariables[] = "CUDA_REMOTE_";

constexpr char kExamples[] = R"(
Examples:
  cr-mpirun --name heat --part node7=10.9.0.50:4 --part node8=10.9.0.51:4 -- mpirun ./heat
  cr-mpirun --name heat --part node7=10.9.0.50/24@eth1:2 --part node8=10.9.0.51/24@eth1:2 --output heat.log -- mpirun -n 4 ./heat
  cr-mpirun --name heat --part node7=10.9.0.50 --part node8=10.9.0.51 --agent "ssh -p 2222" -- mpirun ./heat
  cr-checkpoint heat /data/heat --hosts node7,node8      then saves all of it

The first part is on this host; mpirun runs there. HOST is a host's name for the launch agent, which is ssh, or a program
that is called in the same way: AGENT HOST COMMAND, where COMMAND is for a shell. The host needs cuda-remote in the same
folder as here, and a cr-hostd. ADDRESS is an address of the part's own, as with cr-run --address, by which the ranks
reach each other, and which moves with the part. RANKS (default: 1) is how many ranks the part has room for.

Works with mpirun of Open MPI 4 and with MPICH, which find their hosts in variables (OMPI_MCA_..., HYDRA_...). Omit their
options for hosts and for the remote shell. Each part is a job NAME of the user's on its host. Its GPU server is one
of its own, if --server names none. Variables whose names begin with CUDA_REMOTE_ go to all hosts.

Exit codes: mpirun's own; 128 + N if signal N ended it; 121 stopped by cr-checkpoint --stop; 125 a part could not be
started, or has failed.
)";

void Say(const std::string& text) { fprintf(stderr, "%s: %s\n", kTool, text.c_str()); }

int Fail(const std::string& text) {
  Say(text);
  return kExitFailed;
}

struct Options {
  std::string name, server, agent = "ssh -x -o BatchMode=yes", output, error;
  int gpu = -1;
  bool append = false;
  std::vector<Part> parts;
  std::vector<std::string> command;
};

// A folder that ends with this program.
class Folder {
 public:
  Folder() {
    const char* const top = getenv("TMPDIR");
    std::string path = std::string(top && *top ? top : "/tmp") + "/cr-mpirun-XXXXXX";
    if (mkdtemp(&path[0])) path_ = path;
  }
  ~Folder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::string& path() const { return path_; }
  bool Write(const std::string& name, const std::string& text) const {
    std::ofstream file(path_ + "/" + name);
    file << text;
    file.close();
    return bool(file);
  }

 private:
  std::string path_;
};

class Runner {
 public:
  Runner(const Options& options, const Folder& folder) : options_(options), folder_(folder) {}
  // The exit code.
  int Run();

 private:
  struct Agent {
    pid_t pid = 0;
    int input = -1;  // the part ends when this is closed
    std::string host;
  };
  std::vector<std::string> CrRun(const Part& part) const;
  std::string CommandFor(const Part& part, const std::string& command) const;
  pid_t Spawn(const std::vector<std::string>& command, int input) const;
  bool StartFirst();
  void StartPart(const Launch& launch);
  void Reap();
  void GiveUp(const std::string& why);
  void PassOn(const signalfd_siginfo& info);

  const Options& options_;
  const Folder& folder_;
  pid_t first_ = 0;
  std::vector<Agent> agents_;
  std::set<std::string> started_;
  std::optional<int> code_;
  bool failed_ = false;
};

// cr-run for a part, without what it runs.
std::vector<std::string> Runner::CrRun(const Part& part) const {
  std::vector<std::string> words = {checkpoint::FindCompanion("cr-run"), "--name", options_.name, "--address",
                                    part.address};
  if (!options_.server.empty()) words.insert(words.end(), {"--server", options_.server});
  if (options_.gpu >= 0) words.insert(words.end(), {"--gpu", std::to_string(options_.gpu)});
  return words;
}

// For the shell of the part's host.
std::string Runner::CommandFor(const Part& part, const std::string& command) const {
  std::string text = "cd " + Quoted(std::filesystem::current_path().string()) + " && exec env";
  for (char** one = environ; *one; ++one) {
    const std::string variable = *one;
    if (variable.compare(0, strlen(kVariables), kVariables) == 0) text += " " + Quoted(variable);
  }
  text += " " + Quoted(checkpoint::FindCompanion("cr-mpi-agent")) + " --part";
  for (const std::string& word : CrRun(part)) text += " " + Quoted(word);
  return text + " -- /bin/sh -c " + Quoted(command);
}

// `input`: -1: as here.
pid_t Runner::Spawn(const std::vector<std::string>& command, int input) const {
  std::vector<char*> words;
  for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  fflush(nullptr);
  const pid_t parent = getpid(), child = fork();
  if (child != 0) return child;
  // What the terminal sends is for the first part only.
  if (input >= 0) setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(kExitFailed);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  if (input >= 0) dup2(input, STDIN_FILENO);
  execvp(words[0], words.data());
  Say(std::string("cannot start ") + words[0] + ": " + strerror(errno));
  _exit(kExitFailed);
}

bool Runner::StartFirst() {
  std::vector<std::string> words = CrRun(options_.parts[0]);
  if (!options_.output.empty()) words.insert(words.end(), {"--output", options_.output});
  if (!options_.error.empty()) words.insert(words.end(), {"--error", options_.error});
  if (options_.append) words.push_back("--append");
  words.push_back("--");
  words.insert(words.end(), options_.command.begin(), options_.command.end());
  const std::string agent = checkpoint::FindCompanion("cr-mpi-agent");
  setenv(kLaunchFolder, folder_.path().c_str(), 1);
  SetMpirunVariables(agent, folder_.path());
  first_ = Spawn(words, -1);
  unsetenv(kLaunchFolder);
  return first_ > 0;
}

void Runner::StartPart(const Launch& launch) {
  const auto part =
      std::find_if(options_.parts.begin(), options_.parts.end(), [&](const Part& one) { return one.ip == launch.ip; });
  if (part == options_.parts.end()) {
    return GiveUp("mpirun wants to start processes on " + launch.ip +
                  ", which is not the address of a --part; omit mpirun's own "
                  "options for hosts");
  }
  if (!started_.insert(launch.ip).second) return GiveUp("mpirun wants to start the part on " + part->host + " twice");
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return GiveUp(std::string("pipe: ") + strerror(errno));
  std::istringstream agent(options_.agent);
  std::vector<std::string> words{std::istream_iterator<std::string>(agent), {}};
  words.insert(words.end(), {part->host, CommandFor(*part, launch.command)});
  const pid_t pid = Spawn(words, ends[0]);
  close(ends[0]);
  agents_.push_back({pid, ends[1], part->host});
  if (pid < 0) GiveUp(std::string("fork: ") + strerror(errno));
}

void Runner::GiveUp(const std::string& why) {
  if (!failed_) Say(why);
  if (!failed_ && first_ > 0) kill(first_, SIGTERM);
  failed_ = true;
}

void Runner::Reap() {
  int status = 0;
  for (pid_t ended; (ended = waitpid(-1, &status, WNOHANG)) > 0;) {
    const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    if (ended == first_) {
      code_ = code;
      first_ = 0;
      continue;
    }
    const auto agent = std::find_if(agents_.begin(), agents_.end(), [&](const Agent& one) { return one.pid == ended; });
    if (agent == agents_.end()) continue;
    const std::string host = agent->host;
    close(agent->input);
    agents_.erase(agent);
    // The first one knows by itself of parts that end as they should.
    if (code == 0 || code == kExitStopped || first_ == 0) continue;
    GiveUp("the part on " + host + " has ended with " + std::to_string(code) + "; the job ends");
  }
}

void Runner::PassOn(const signalfd_siginfo& info) {
  // What a terminal sends reaches the first part anyway.
  if (info.ssi_signo != SIGCHLD && info.ssi_code != SI_KERNEL && first_ > 0) kill(first_, int(info.ssi_signo));
}

int Runner::Run() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  for (const int signal : checkpoint::kForwardedSignals) sigaddset(&set, signal);
  sigprocmask(SIG_BLOCK, &set, nullptr);
  const int signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  if (signals < 0 || !StartFirst()) return Fail(std::string("cannot start cr-run: ") + strerror(errno));
  std::optional<Moment> limit;
  int asked = 0;
  while (!code_ || !agents_.empty()) {
    pollfd waiting = {signals, POLLIN, 0};
    poll(&waiting, 1, kLookMs);
    signalfd_siginfo info;
    while (read(signals, &info, sizeof(info)) == ssize_t(sizeof(info))) PassOn(info);
    Reap();
    if (!code_) {
      for (const Launch& launch : TakeLaunches(folder_.path())) StartPart(launch);
      continue;
    }
    // The others hear of it from the first part. What does not, is ended.
    if (!limit) limit = Now() + kEnd;
    if (Now() < *limit && !(failed_ && asked == 0)) continue;
    limit = Now() + kEnd;
    for (Agent& agent : agents_) {
      if (asked > 0) kill(agent.pid, asked == 1 ? SIGTERM : SIGKILL);
      close(agent.input);
      agent.input = -1;
    }
    ++asked;
  }
  close(signals);
  return failed_ ? kExitFailed : *code_;
}

int Main(int argc, char** argv) {
  Options options;
  std::vector<std::string> parts;
  CLI::App app("Runs an MPI job over several hosts, as a job that can be saved.", kTool);
  SetUpProgram(&app, "[OPTIONS] -- MPIRUN [ARGUMENTS]");
  app.footer(kExamples);
  app.add_option("--name", options.name, "the job's name, on all hosts")->type_name("NAME")->required();
  app.add_option("--part", parts,
                 "HOST=ADDRESS[/PREFIX][@INTERFACE][:RANKS]: a host, the address of the job's part there, and how many "
                 "ranks it has room for. Once for each host; the first one is this host")
      ->type_name("PART")
      ->required()
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--agent", options.agent, "command that starts a command on another host")
      ->type_name("COMMAND")
      ->capture_default_str();
  app.add_option("--server", options.server,
                 "the GPU server of all parts: unix:PATH or HOST:PORT (default: each has its own)")
      ->type_name("ADDR");
  app.add_option("--gpu", options.gpu, "the only GPU that a part sees (ordinal; default: all)")
      ->check(CLI::Range(0, 255));
  app.add_option("--output", options.output, "file for mpirun's standard output")->type_name("FILE");
  app.add_option("--error", options.error, "file for mpirun's standard error")->type_name("FILE");
  app.add_flag("--append", options.append, "append to these files, instead of emptying them");
  int own = 1;
  while (own < argc && strcmp(argv[own], "--") != 0) ++own;
  try {
    app.parse(own, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitFailed;
  }
  options.command.assign(argv + std::min(own + 1, argc), argv + argc);
  if (options.command.empty()) return Fail("no command given: cr-mpirun [OPTIONS] -- MPIRUN [ARGUMENTS]");
  std::set<std::string> hosts, addresses;
  for (const std::string& text : parts) {
    const absl::StatusOr<Part> part = ParsePart(text);
    if (!part.ok()) return Fail("--part: " + std::string(part.status().message()));
    if (!hosts.insert(part->host).second) return Fail("--part: " + part->host + " is named twice");
    if (!addresses.insert(part->ip).second) return Fail("--part: " + part->ip + " is the address of two parts");
    options.parts.push_back(*part);
  }
  if (options.agent.find_first_not_of(' ') == std::string::npos) return Fail("--agent names no program");
  for (const char* program : {"cr-run", "cr-mpi-agent"}) {
    if (checkpoint::FindCompanion(program).empty())
      return Fail(std::string(program) + " is not beside cr-mpirun: the installation is incomplete");
  }
  const Folder folder;
  if (folder.path().empty() || !folder.Write("openmpi", OpenMpiHosts(options.parts)) ||
      !folder.Write("hydra", HydraHosts(options.parts))) {
    return Fail(std::string("cannot make a folder with the hosts for mpirun: ") + strerror(errno));
  }
  return Runner(options, folder).Run();
}

}  // namespace
}  // namespace cuda_remote::client::mpi

int main(int argc, char** argv) {
  try {
    return cuda_remote::client::mpi::Main(argc, argv);
  } catch (const std::exception& error) {
    fprintf(stderr, "cr-mpirun: %s\n", error.what());
    return 125;
  }
}
