// SPDX-License-Identifier: Apache-2.0
// cr-srun: srun for the scripts of cr-sbatch. See --help.
//
// Slurm's srun starts its tasks by slurmstepd, outside of the job that can be saved, and an MPI library then holds a
// connection to slurmstepd. cr-slurm-run puts a folder with a link "srun" to this program first on the script's PATH.

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "checkpoint/job/forwarded_signals.h"
#include "programs/slurm/step.h"
#include "proto/base/proc.h"
#include "proto/frame/version.h"

extern char** environ;

namespace cuda_remote::client::slurm {
namespace {

constexpr char kTool[] = "cr-srun";
constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;
constexpr int kExitNoProgram = 127;

constexpr char kHelp[] = R"(srun in a job of cr-sbatch: starts tasks inside of the job, so that they are saved with it.
Usage: srun [OPTIONS] PROGRAM [ARGUMENTS]

Scripts of cr-sbatch find this program under the name srun.

Options:
  -n, --ntasks N           how many tasks (default: the job's, or one on each node)
  -N, --nodes N            on how many of the job's nodes (default: all)
      --ntasks-per-node N  how many tasks on each node
  -c, --cpus-per-task N    sets SLURM_CPUS_PER_TASK; tasks are bound to no processor
      --mpi TYPE           pmix (Open MPI's mpirun starts the tasks), pmi2 (MPICH's mpiexec.hydra), or none
                           (default: $SLURM_MPI_TYPE, else Slurm's MpiDefault)
      --export ALL, -J, -K, -Q, -u, -v, --cpu-bind, --exact, --exclusive, --overlap   change nothing
      --help, --version

Other options of srun are refused, and the message names them. Each task has SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID,
SLURM_NTASKS, SLURM_NPROCS, SLURM_STEP_NUM_TASKS and SLURM_STEP_NUM_NODES. All tasks see all GPUs that the job has on
their node.

Exit codes: the highest of the tasks', or the mpirun's; 128 + N if signal N ended a task; 1 the tasks could not be
started; 2 wrong use; 127 there is no such program.
)";

int Fail(const std::string& text, int code = kExitFailed) {
  fprintf(stderr, "%s: %s\n", kTool, text.c_str());
  return code;
}

std::vector<char*> Pointers(const std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (const std::string& word : words) pointers.push_back(const_cast<char*>(word.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

int Execute(const std::vector<std::string>& words) {
  execvp(words[0].c_str(), Pointers(words).data());
  return Fail("cannot start " + words[0] + ": " + strerror(errno), errno == ENOENT ? kExitNoProgram : kExitFailed);
}

void Set(const Variables& variables) {
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
}

// The first of `names` that is on PATH; empty: none. The name alone: Open MPI takes a path for a --prefix.
std::string OnPath(const std::vector<std::string>& names) {
  const char* const path = getenv("PATH");
  for (const std::string& name : names) {
    std::istringstream folders(path ? path : "/usr/bin:/bin");
    for (std::string folder; std::getline(folders, folder, ':');) {
      if (access((folder + "/" + name).c_str(), X_OK) == 0) return name;
    }
  }
  return "";
}

// --task: what mpirun starts.
int RunTask(const std::vector<std::string>& command) {
  const char* const tasks = getenv(kStepTasks);
  const char* rank = getenv("OMPI_COMM_WORLD_RANK");
  if (!rank) rank = getenv("PMI_RANK");
  if (!tasks || !rank || command.empty()) return Fail("--task is for mpirun only", kExitUsage);
  std::vector<int> counts;
  for (const std::string& count : Divided(tasks)) counts.push_back(atoi(count.c_str()));
  Set(TaskVariables(atoi(rank), counts));
  unsetenv(kStepTasks);
  return Execute(command);
}

// Without MPI, on this node: the tasks are children of this process.
int RunHere(const Step& step) {
  sigset_t set, before;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  for (const int signal : checkpoint::kForwardedSignals) sigaddset(&set, signal);
  sigprocmask(SIG_BLOCK, &set, &before);
  std::set<pid_t> tasks;
  for (int rank = 0; rank < step.Count(); ++rank) {
    const pid_t child = fork();
    if (child < 0) {
      for (const pid_t task : tasks) kill(task, SIGTERM);
      return Fail(std::string("cannot start the tasks: ") + strerror(errno));
    }
    if (child == 0) {
      sigprocmask(SIG_SETMASK, &before, nullptr);
      Set(TaskVariables(rank, step.tasks));
      _exit(Execute(step.command));
    }
    tasks.insert(child);
  }
  int code = 0;
  while (!tasks.empty()) {
    int signal = 0;
    sigwait(&set, &signal);
    if (signal != SIGCHLD) {
      for (const pid_t task : tasks) kill(task, signal);
      continue;
    }
    int status = 0;
    for (pid_t ended; (ended = waitpid(-1, &status, WNOHANG)) > 0;) {
      tasks.erase(ended);
      code = std::max(code, WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
    }
  }
  return code;
}

int RunByMpirun(const Step& step, const std::vector<std::string>& addresses) {
  const bool hydra = step.mpi == Mpi::kPmi2;
  const std::string launcher =
      hydra ? OnPath({"mpiexec.hydra"}) : OnPath({"orterun", "prterun", "mpirun.openmpi", "mpirun"});
  if (launcher.empty()) {
    return Fail(hydra ? "--mpi=pmi2 needs MPICH's mpiexec.hydra, which is not on PATH"
                      : "this step needs Open MPI's mpirun, which is not on PATH");
  }
  if (geteuid() == 0) Set({{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}});
  std::string counts;
  for (const int count : step.tasks) counts += (counts.empty() ? "" : ",") + std::to_string(count);
  Set({{kStepTasks, counts}});
  std::vector<std::string> exported;
  for (char** variable = environ; *variable; ++variable) {
    const std::string name(*variable, strcspn(*variable, "="));
    // A shell's functions are no names that mpirun takes.
    const bool plain = name.find_first_of("%()") == std::string::npos;
    if (plain && name.compare(0, strlen("OMPI_"), "OMPI_") != 0) exported.push_back(name);
  }
  const std::string self = ReadLink("/proc/self/exe");
  if (self.empty()) return Fail("/proc is not there");
  return Execute(LauncherWords(step, launcher, addresses, exported, {self, "--task"}));
}

int Main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (!words.empty() && (words[0] == "--help" || words[0] == "-h")) {
    fputs(kHelp, stdout);
    return 0;
  }
  if (!words.empty() && (words[0] == "--version" || words[0] == "-V")) {
    printf("%s\n", VersionLine(kTool).c_str());
    return 0;
  }
  if (!words.empty() && words[0] == "--task") return RunTask({words.begin() + 1, words.end()});
  Variables variables;
  for (char** variable = environ; *variable; ++variable) {
    const size_t size = strcspn(*variable, "=");
    if ((*variable)[size] == '=') variables[std::string(*variable, size)] = *variable + size + 1;
  }
  const char* const parts = getenv(kPartAddresses);
  const std::vector<std::string> addresses = Divided(parts ? parts : "");
  const absl::StatusOr<Step> step = ParseStep(words, variables, addresses.empty() ? 1 : int(addresses.size()));
  if (!step.ok()) return Fail(std::string(step.status().message()), kExitUsage);
  if (step->cpus > 0) Set({{"SLURM_CPUS_PER_TASK", std::to_string(step->cpus)}});
  if (step->mpi == Mpi::kNone && step->tasks.size() == 1) return RunHere(*step);
  return RunByMpirun(*step, addresses);
}

}  // namespace
}  // namespace cuda_remote::client::slurm

int main(int argc, char** argv) {
  try {
    return cuda_remote::client::slurm::Main(argc, argv);
  } catch (const std::exception& error) {
    fprintf(stderr, "cr-srun: %s\n", error.what());
    return 1;
  }
}
