// SPDX-License-Identifier: Apache-2.0
// cr-slurm-run: the job of a batch script, from its start or from its newest image. See --help.

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/job/isolation/isolate.h"
#include "checkpoint/job/job.h"
#include "ckptfmt/folder.h"
#include "programs/slurm/child.h"
#include "programs/slurm/gpu_node.h"
#include "programs/slurm/job_start.h"
#include "programs/slurm/nodes.h"
#include "programs/slurm/options.h"
#include "programs/slurm/part_plan.h"
#include "programs/slurm/submission.h"
#include "proto/base/clock.h"
#include "proto/cli/help.h"
#include "proto/errors/absl_status.h"
#include "proto/errors/annotate.h"
#include "proto/folder/private_folder.h"

extern char** environ;

namespace cuda_remote::client::slurm {
namespace {

constexpr char kTool[] = "cr-slurm-run";
constexpr int kExitStopped = 121;  // as cr-run's
constexpr int kExitFailed = 125;
// How long Slurm may take to end a job that it has requeued.
constexpr int kEndMs = 30000;
// A job that has just begun is not known to cr-checkpoint yet.
constexpr std::chrono::milliseconds kAgain(500);
// How long a copy of the job on a node that Slurm has lost has to see that it was started again, and the parts of a job
// on several nodes to end, whose cr-slurm-run was killed.
constexpr unsigned kTakeOverSeconds = 3, kPartsEndSeconds = 15;

// After the end of a job with parts: how often it looks whether something of the job is left.
constexpr int kLookAfterEndMs = 200, kMostLooksAfterEnd = 100, kGoneLooks = 3;

constexpr char kExamples[] = R"(
Examples:
  exec cr-slurm-run -- ./train --epochs 90        as the last line of a batch script
  exec cr-slurm-run --checkpoint-interval 10m --checkpoint-dir /scratch/me/images -- ./train

cr-sbatch calls this program, so that batch scripts need not. A script that calls it itself needs these lines, and exec:
  #SBATCH --requeue --open-mode=append --signal=B:USR1@120

The program runs under cr-run. When Slurm warns the job (SIGUSR1) or ends it (SIGTERM), cr-checkpoint saves it and ends
it. After a warning the job then requeues itself. When it starts again, its newest image is restarted by cr-restart. If
an image cannot be written, the job continues, and this program says so. Images are in DIR/job-N/images, for a task of an
array in DIR/job-N_TASK/images, and are removed when the program has ended with 0.

In a heterogeneous job (#SBATCH hetjob), the program uses the GPUs of the second component's node. cr-slurm-run starts a
GPU server there, which serves this job only and ends with it.

Exit codes: the program's own; 128 + N if signal N ended it; 121 saved and ended; 125 it was not started; 2 wrong use.
)";

void Say(const std::string& text) { fprintf(stderr, "%s: %s\n", kTool, text.c_str()); }

int Fail(const std::string& text) {
  Say(text);
  return kExitFailed;
}

int Fail(const absl::Status& status) { return Fail(std::string(status.message())); }

// Which start of the job is the last one, for copies of it on nodes that Slurm has lost.
int LastStart(const std::string& folder) {
  std::ifstream file(folder + "/restarts");
  int restarts = -1;
  file >> restarts;
  return file ? restarts : -1;
}

bool BeginStart(const std::string& folder, int restarts) {
  const std::string path = folder + "/restarts";
  std::ofstream file(path + ".new");
  file << restarts << "\n";
  file.close();
  return file && rename((path + ".new").c_str(), path.c_str()) == 0;
}

// The job under cr-run or cr-restart, and the cr-checkpoint beside it.
class Runner {
 public:
  // `folder`: the job's, with its images. `gpu_node`: may be null.
  Runner(const CheckpointOptions& options, const SlurmJob& job, const std::string& folder, GpuNode* gpu_node)
      : options_(options), job_(job), folder_(folder), images_(folder + "/images"), gpu_node_(gpu_node) {}
  // Of a job on several nodes, whose first part Run runs.
  void SetParts(const std::vector<PlacedPart>& parts, PartSteps* steps) {
    parts_ = parts;
    steps_ = steps;
  }

  // Runs `command` to its end. The exit code.
  int Run(const std::vector<std::string>& command);

 private:
  enum class Save { kNone, kAtIntervals, kAndStop };

  void Take(int signal);
  void StartSaving();
  void Reap();
  void SaverEnded(int code);
  // Something without which the program cannot go on, and cannot be saved any more.
  void Lose(const std::string& what);
  void PartEnded(const std::string& node, int code);
  std::string Newest() const {
    return parts_.empty() ? ckptfmt::NewestImageIn(images_) : NewestSetIn(images_, parts_.size());
  }
  int Requeue();

  const CheckpointOptions& options_;
  const SlurmJob& job_;
  const std::string folder_, images_;
  GpuNode* const gpu_node_;
  int signals_ = -1;
  pid_t program_ = 0, saver_ = 0;
  Save saving_ = Save::kNone;
  bool stop_wanted_ = false, requeue_wanted_ = false, saved_ = false, at_intervals_ = false;
  std::vector<PlacedPart> parts_;
  PartSteps* steps_ = nullptr;
  std::string ended_part_;  // while it was saved; empty: none
  bool lost_ = false;       // its GPU server, or a part
  Moment next_;             // when cr-checkpoint may be started
  std::optional<int> code_;
};

void Runner::Take(int signal) {
  const bool warned = signal == SIGUSR1 && options_.On("timeout");
  if (!warned && !(signal == SIGTERM && options_.On("preempt"))) {
    if (program_ != 0) kill(program_, signal);
    return;
  }
  if (stop_wanted_ || saved_) return;
  Say(warned ? "Slurm's warning has come: saving the job" : "Slurm ends the job: saving it");
  stop_wanted_ = true;
  // A job that Slurm ends is requeued by Slurm, or is to be cancelled.
  requeue_wanted_ = warned;
  next_ = Now();
  if (saving_ == Save::kAtIntervals) kill(saver_, SIGTERM);
}

void Runner::StartSaving() {
  std::vector<std::string> command = {checkpoint::FindCompanion("cr-checkpoint"), "--keep",
                                      std::to_string(options_.keep)};
  if (stop_wanted_) {
    command.push_back("--stop");
  } else {
    command.insert(command.end(), {"--every", std::to_string(options_.interval) + "s"});
  }
  if (!parts_.empty()) command.insert(command.end(), {"--hosts", HostsOf(parts_)});
  command.insert(command.end(), {parts_.empty() ? std::to_string(program_) : parts_[0].name, images_});
  saver_ = StartChild(command, SIGTERM);
  if (saver_ != 0) saving_ = stop_wanted_ ? Save::kAndStop : Save::kAtIntervals;
  next_ = Now() + kAgain;
}

void Runner::SaverEnded(int code) {
  const Save ended = saving_;
  saver_ = 0;
  saving_ = Save::kNone;
  // The program may be noticed to have ended first: it is cr-checkpoint that has ended it.
  if (ended == Save::kAndStop && code == 0) {
    saved_ = true;
    stop_wanted_ = false;
  }
  if (code_ || lost_ || (stop_wanted_ && ended == Save::kAtIntervals)) return;
  next_ = Now() + kAgain;
  if (code == checkpoint::kExitNoJob) return;
  if (ended == Save::kAndStop) {
    stop_wanted_ = false;
    if (saved_) return;
    if (!ended_part_.empty()) return Lose(ended_part_);
    const std::string image = Newest();
    Say("the job could not be saved and continues; " +
        (image.empty() ? "it has no image" : image + " is its newest image"));
    next_ = Now() + std::chrono::milliseconds(int64_t(options_.interval * 1000));
  } else if (code != 0) {
    Say("the job continues, but it is no longer saved at intervals");
    at_intervals_ = false;
  }
}

void Runner::Lose(const std::string& what) {
  if (code_ || saved_ || lost_) return;
  const std::string image = Newest();
  Say(what + " has ended, and the job ends with it; " +
      (image.empty() ? "it has no image" : image + " is its newest image"));
  lost_ = true;
  kill(program_, SIGKILL);
  if (saver_ != 0) kill(saver_, SIGTERM);
}

void Runner::PartEnded(const std::string& node, int code) {
  // The program knows by itself of one that ends as it should. One that is saved and stopped may end before the others.
  const std::string what = "the part on " + node;
  if (code == 0) return;
  if (saving_ == Save::kAndStop) {
    ended_part_ = what;
  } else {
    Lose(what);
  }
}

void Runner::Reap() {
  int status = 0;
  for (pid_t ended; (ended = waitpid(-1, &status, WNOHANG)) > 0;) {
    const int code = checkpoint::ExitCode(status);
    if (ended == saver_) SaverEnded(code);
    // Its calls would wait for that server.
    if (gpu_node_ && ended == gpu_node_->process()) {
      gpu_node_->Ended();
      Lose("the GPU server");
    }
    if (const std::string node = steps_ ? steps_->Ended(ended) : ""; !node.empty()) PartEnded(node, code);
    if (ended != program_) continue;
    code_ = code;
    program_ = 0;
    if (saving_ == Save::kAtIntervals) kill(saver_, SIGTERM);
  }
}

// Only after the program has ended. The job's exit code if Slurm does not end it now.
int Runner::Requeue() {
  const pid_t child = StartChild({"scontrol", "requeue", job_.Name()}, SIGTERM);
  int status = 0;
  if (child == 0 || waitpid(child, &status, 0) != child || status != 0) {
    Say("the job is saved, but Slurm does not requeue it (see its reason above); continue it with: "
        "scontrol requeue " +
        job_.Name());
    return kExitStopped;
  }
  // Slurm now ends it. If this program ended first, Slurm could take the job for one that has ended by itself.
  pollfd waiting{signals_, POLLIN, 0};
  signalfd_siginfo info;
  const Moment limit = Now() + std::chrono::milliseconds(kEndMs);
  while (Now() < limit) {
    if (poll(&waiting, 1, 1000) > 0 && read(signals_, &info, sizeof(info)) > 0 && info.ssi_signo == SIGTERM) break;
  }
  return kExitStopped;
}

int Runner::Run(const std::vector<std::string>& command) {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGUSR1, SIGUSR2, SIGTERM, SIGINT, SIGHUP, SIGCHLD}) sigaddset(&set, signal);
  sigprocmask(SIG_BLOCK, &set, nullptr);
  signals_ = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  // If slurmstepd is killed, Slurm takes the job for ended and starts it elsewhere. Then it must not go on here.
  const int parent = int(syscall(SYS_pidfd_open, getppid(), 0));
  if (signals_ < 0 || parent < 0) return Fail(std::string("cannot watch the job: ") + strerror(errno));
  fcntl(parent, F_SETFD, FD_CLOEXEC);
  program_ = StartChild(command, SIGKILL);
  if (program_ == 0) return Fail(std::string("fork: ") + strerror(errno));
  at_intervals_ = options_.interval > 0;
  next_ = Now() + std::chrono::milliseconds(int64_t(options_.interval * 1000));
  while (!code_ || saver_ != 0) {
    const bool to_save = !code_ && saver_ == 0 && !saved_ && !lost_ && (stop_wanted_ || at_intervals_);
    if (to_save && Now() >= next_) StartSaving();
    pollfd waiting[2] = {{signals_, POLLIN, 0}, {parent, POLLIN, 0}};
    poll(waiting, 2, to_save ? 100 : 1000);
    if (waiting[1].revents != 0) {
      Say("slurmstepd has ended, and the job ends with it");
      _exit(kExitFailed);  // the children end with this program
    }
    if (LastStart(folder_) > job_.restarts) {
      Say("Slurm has started the job again on another node; it ends on this one");
      _exit(kExitFailed);
    }
    signalfd_siginfo info;
    while (read(signals_, &info, sizeof(info)) == sizeof(info)) {
      if (info.ssi_signo != SIGCHLD) Take(int(info.ssi_signo));
    }
    Reap();
  }
  if (saved_) return requeue_wanted_ ? Requeue() : kExitStopped;
  return *code_;
}

// The script of cr-sbatch, as a file that stays where it is until the job has ended: a restart needs it.
absl::Status KeepScript(const std::string& batch_script, int line, const std::string& path) {
  if (std::filesystem::exists(path)) return absl::OkStatus();
  std::ifstream in(batch_script, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(in)), {});
  const std::string fresh = path + ".new";
  std::ofstream out(fresh, std::ios::binary);
  out << FromLine(text, line);
  out.close();
  if (in && out && chmod(fresh.c_str(), 0700) == 0 && rename(fresh.c_str(), path.c_str()) == 0) return absl::OkStatus();
  return ErrnoStatus("cannot copy the script " + batch_script + " to " + path);
}

// The job's folder, with the script that a restart runs. Whoever could change it would run programs as this user.
absl::Status MakeOwnFolder(const std::string& folder) {
  std::error_code failed;
  std::filesystem::create_directories(std::filesystem::path(folder).parent_path(), failed);
  struct stat facts;
  if (failed) return ErrnoStatus("cannot make the folder " + folder, failed.value());
  if ((mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) || lstat(folder.c_str(), &facts) != 0) {
    return ErrnoStatus("cannot make the folder " + folder);
  }
  const std::string why = S_ISDIR(facts.st_mode) ? WhyNotTrusted(facts) : "is not a folder";
  if (why.empty() && facts.st_uid == geteuid()) return absl::OkStatus();
  return absl::PermissionDeniedError("the job's folder " + folder + " " + (why.empty() ? "belongs to root" : why) +
                                     "; remove it, or name another --checkpoint-dir");
}

// The job's folder, with its images. `has_parts`: a checkpoint that was cancelled a moment ago may still be ending on
// the other hosts, and make and remove folders in it. It is left alone once a later start of the job than `restarts`
// has it.
void RemoveJobFolder(const std::string& folder, int restarts, bool has_parts) {
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  for (int looks = 0, gone = 0; has_parts && looks < kMostLooksAfterEnd && gone < kGoneLooks; ++looks) {
    usleep(kLookAfterEndMs * 1000);
    if (LastStart(folder) > restarts) return;
    gone = access(folder.c_str(), F_OK) == 0 ? 0 : gone + 1;
    if (gone == 0) std::filesystem::remove_all(folder, ignored);
  }
}

// Whether what the program prints would overwrite what it printed before a restart.
bool OverwritesOutput() {
  struct stat about;
  const int flags = fcntl(STDOUT_FILENO, F_GETFL);
  return fstat(STDOUT_FILENO, &about) == 0 && S_ISREG(about.st_mode) && !(flags & O_APPEND);
}

// mpirun would let Slurm start its processes, outside of the job that can be saved. In a job of one node it need not.
// For Open MPI 4, Open MPI 5 and MPICH, as far as the user has not chosen.
void StartRanksHere() {
  setenv("OMPI_MCA_plm", "isolated", 0);
  setenv("OMPI_MCA_ras", "^slurm", 0);
  setenv("PRTE_MCA_ras", "^slurm", 0);
  setenv("HYDRA_LAUNCHER", "fork", 0);
  setenv("HYDRA_RMK", "user", 0);
  // System V memory of a user's job cannot be saved.
  if (geteuid() != 0) setenv("UCX_TLS", "^sysv", 0);
}

// The parts of a job on several nodes; none if it is on one. A job that began on several has parts on one, too.
absl::StatusOr<std::vector<mpi::Part>> FindParts(const CheckpointOptions& options, const SlurmJob& job,
                                                 const std::string& folder, Start start) {
  const std::vector<mpi::Part> none;
  if (start == Start::kImage) {
    std::ifstream file(folder + "/parts");
    if (!file && job.nodes == 1) return none;
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    absl::StatusOr<std::vector<mpi::Part>> parts = ParsePartsText(text);
    if (parts.ok()) return parts;
    return Annotate("cannot read " + folder + "/parts, which says where the job's images are to run: ", parts.status());
  }
  std::error_code ignored;
  std::filesystem::remove(folder + "/parts", ignored);
  if (job.nodes == 1) return none;
  const std::string nodes = "the job has " + std::to_string(job.nodes) + " nodes";
  if (options.addresses.empty()) {
    return absl::InvalidArgumentError(
        nodes +
        ", and its parts need addresses of their own: name them with --checkpoint-addresses, or submit "
        "it with --nodes=1");
  }
  if (geteuid() == 0) {
    return absl::UnimplementedError(nodes +
                                    ", and only those of ordinary users can be saved; submit it with --nodes=1");
  }
  const std::vector<int> tasks = ParseTasks(job.tasks);
  if (job.has_gpu_node || tasks.size() != size_t(job.nodes)) {
    return absl::UnimplementedError(nodes + (job.has_gpu_node
                                                 ? ", and a second component; only one of both can be saved"
                                                 : ", and SLURM_TASKS_PER_NODE is \"" + job.tasks + "\""));
  }
  return PlanParts(options.addresses, job.id, tasks);
}

// A step of Slurm's own would run outside of the job. So the script finds cr-srun first, under srun's name.
absl::Status PutSrunFirst(const std::string& folder) {
  const std::string programs = folder + "/bin", link = programs + "/srun";
  const std::string srun = checkpoint::FindCompanion("cr-srun");
  std::error_code failed;
  std::filesystem::create_directory(programs, failed);
  std::filesystem::remove(link, failed);
  std::filesystem::create_symlink(srun, link, failed);
  const std::string what = "cannot give the script its srun (" + link + ")";
  if (srun.empty()) {
    return absl::NotFoundError(what + ": cr-srun is not beside cr-slurm-run; the installation is incomplete");
  }
  if (failed) return ErrnoStatus(what, failed.value());
  const char* const path = getenv("PATH");
  setenv("PATH", (programs + ":" + (path ? path : "/usr/bin:/bin")).c_str(), 1);
  if (getenv("SLURM_MPI_TYPE")) return absl::OkStatus();
  int code = 0;
  const std::string type = SettingIn(OutputOf({"scontrol", "show", "config"}, &code), "MpiDefault");
  if (!type.empty()) setenv("SLURM_MPI_TYPE", type.c_str(), 1);
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  CheckpointOptions options;
  int script_line = 0;
  CLI::App app("Runs a program in a Slurm job, saves and restarts it.", kTool);
  SetUpProgram(&app, "[OPTIONS] -- PROGRAM [ARGUMENTS]");
  app.footer(kExamples);
  AddCheckpointOptions(&app, &options);
  app.add_option("--script-line", script_line,
                 "PROGRAM is a batch script of cr-sbatch: run what begins at this line of it")
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 30))
      ->group("");
  std::string keys, place;
  app.add_option("--part", place, "on a further node of the job: run PROGRAM as part I of N there")
      ->type_name("I/N")
      ->group("");
  app.add_option("--serve-gpus", keys,
                 "on the GPU node of a heterogeneous job: serve its GPUs, with keys in this folder")
      ->type_name("DIR")
      ->group("");
  int own = 1;
  while (own < argc && strcmp(argv[own], "--") != 0) ++own;
  try {
    app.parse(own, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (!keys.empty()) return ServeGpus(keys);
  std::vector<std::string> program(argv + std::min(own + 1, argc), argv + argc);
  if (program.empty()) return Fail("no program given: cr-slurm-run [OPTIONS] -- PROGRAM [ARGUMENTS]");
  if (!place.empty()) {
    int index = 0, count = 0;
    if (sscanf(place.c_str(), "%d/%d", &index, &count) != 2 || index < 0 || index >= count) return Fail("--part: I/N");
    return RunPart(index, count, program);
  }

  Variables variables;
  for (char** variable = environ; *variable; ++variable) {
    const char* const equals = strchr(*variable, '=');
    if (equals) variables[std::string(*variable, size_t(equals - *variable))] = equals + 1;
  }
  const absl::StatusOr<SlurmJob> read = ReadSlurmJob(variables);
  if (!read.ok()) return Fail(read.status());
  const SlurmJob& job = *read;
  const std::string folder = checkpoint::Absolute(options.directory) + "/job-" + job.Name();
  if (const absl::Status made = MakeOwnFolder(folder); !made.ok()) return Fail(made);
  const std::string images = folder + "/images";
  // Those of a job on several nodes are in sets.
  std::string image = ckptfmt::NewestImageIn(images);
  if (image.empty()) {
    std::ifstream file(folder + "/parts");
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    if (const auto before = ParsePartsText(text); before.ok()) image = NewestSetIn(images, before->size());
  }
  const absl::StatusOr<Start> start = ChooseStart(job, images, image);
  if (!start.ok()) return Fail(start.status());
  const absl::StatusOr<std::vector<mpi::Part>> parts = FindParts(options, job, folder, *start);
  if (!parts.ok()) return Fail(parts.status());
  absl::StatusOr<std::vector<Node>> nodes = std::vector<Node>();
  if (!parts->empty()) {
    nodes = FindNodes();
    if (!nodes.ok()) return Fail(nodes.status());
    const absl::Status prepared = PrepareParts(folder, *parts, *start == Start::kProgram);
    if (!prepared.ok()) return Fail(prepared);
  }
  const std::string name = "slurm-" + job.Name();
  const std::vector<PlacedPart> placed = PlaceParts(*parts, *nodes, name);
  if (!BeginStart(folder, job.restarts)) return Fail("cannot write " + folder + "/restarts: " + strerror(errno));
  // Slurm may have lost a node on which the job still runs, or may have killed its cr-slurm-run just now.
  const std::string running = folder + "/running";
  if (job.restarts > 0 && access(running.c_str(), F_OK) == 0)
    sleep(placed.empty() ? kTakeOverSeconds : kPartsEndSeconds);
  std::ofstream(running) << "";
  std::unique_ptr<GpuNode> gpu_node;
  if (job.has_gpu_node && !getenv("CUDA_REMOTE_SERVER")) {
    auto started = GpuNode::Start(folder + "/keys-" + std::to_string(job.restarts));
    if (!started.ok()) return Fail(started.status());
    gpu_node = *std::move(started);
    gpu_node->SetVariables();
  }

  std::unique_ptr<PartSteps> steps;
  if (!placed.empty()) {
    auto started = PartSteps::Start(name, placed, *start == Start::kImage ? image : "");
    if (!started.ok()) return Fail(started.status());
    steps = *std::move(started);
    const char* const assigned = getenv("CUDA_VISIBLE_DEVICES");
    if (assigned) setenv("CUDA_VISIBLE_DEVICES", ShareOfGpus(assigned, 0, placed[0].count).c_str(), 1);
  } else {
    StartRanksHere();
  }
  UseAssignedGpus();
  if (const absl::Status put = PutSrunFirst(folder); !put.ok()) return Fail(put);
  std::vector<std::string> command;
  if (*start == Start::kImage) {
    Say("restarting " + image);
    command = {checkpoint::FindCompanion("cr-restart"), placed.empty() ? images : image + "/member-1"};
    if (!options.output.empty() || !options.error.empty()) command.push_back("--cut-back");
    for (const std::string& path : options.cut) command.insert(command.end(), {"--cut", path});
  } else {
    if (job.restarts > 0) Say("there is no image of the job yet: it starts from the beginning");
    if (options.output.empty() && OverwritesOutput()) {
      Say("the output will be overwritten after a restart: submit the job with --open-mode=append");
    }
    if (script_line > 0) {
      const std::string script = folder + "/script";
      const absl::Status kept = KeepScript(program[0], script_line, script);
      if (!kept.ok()) return Fail(kept);
      program[0] = script;
    }
    command = {checkpoint::FindCompanion("cr-run"), "--name", name};
    if (!placed.empty()) command.insert(command.end(), {"--address", placed[0].part.address});
    if (!options.output.empty()) command.insert(command.end(), {"--output", Expand(options.output, job)});
    if (!options.error.empty()) command.insert(command.end(), {"--error", Expand(options.error, job)});
    command.push_back("--");
    command.insert(command.end(), program.begin(), program.end());
  }
  Runner runner(options, job, folder, gpu_node.get());
  runner.SetParts(placed, steps.get());
  const int code = runner.Run(command);
  steps.reset();
  gpu_node.reset();
  if (LastStart(folder) == job.restarts) unlink(running.c_str());
  // Another start of the job may need them by now.
  if (code == 0 && LastStart(folder) == job.restarts) RemoveJobFolder(folder, job.restarts, !placed.empty());
  return code;
}

}  // namespace
}  // namespace cuda_remote::client::slurm

int main(int argc, char** argv) {
  try {
    return cuda_remote::client::slurm::Main(argc, argv);
  } catch (const std::exception& error) {
    fprintf(stderr, "cr-slurm-run: %s\n", error.what());
    return 125;
  }
}
