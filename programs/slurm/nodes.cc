// SPDX-License-Identifier: Apache-2.0
#include "programs/slurm/nodes.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "checkpoint/job/isolation/isolate.h"
#include "checkpoint/job/job.h"
#include "programs/mpi/part_shell.h"
#include "programs/slurm/child.h"
#include "programs/slurm/job_start.h"
#include "programs/slurm/step.h"
#include "proto/base/status_macros.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::client::slurm {
namespace {

constexpr int kExitStopped = 121;  // as cr-run's
constexpr int kExitFailed = 125;
constexpr int kEndSeconds = 20;

absl::Status WriteFile(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  if (file) return absl::OkStatus();
  return ErrnoStatus("cannot write " + path);
}

}  // namespace

absl::StatusOr<std::vector<Node>> FindNodes() {
  int code = 0;
  std::istringstream lines(OutputOf({"scontrol", "show", "hostnames"}, &code));
  std::vector<std::string> names;
  std::string all;
  for (std::string name; code == 0 && lines >> name;) {
    names.push_back(name);
    all += (all.empty() ? "" : ",") + name;
  }
  const char* const here = getenv("SLURMD_NODENAME");
  const auto own = std::find(names.begin(), names.end(), here ? here : "");
  if (own == names.end()) return absl::NotFoundError("scontrol does not list this node among those of the job");
  std::rotate(names.begin(), own, own + 1);
  const std::string text = OutputOf({"scontrol", "--oneliner", "show", "node", all}, &code);
  return ParseNodes(text, names);
}

absl::Status PrepareParts(const std::string& folder, const std::vector<mpi::Part>& parts, bool fresh) {
  const std::string key = folder + "/key", agent = checkpoint::FindCompanion("cr-mpi-agent");
  if (agent.empty()) {
    return absl::NotFoundError("cr-mpi-agent is not beside cr-slurm-run: the installation is incomplete");
  }
  if (fresh) {
    CR_RETURN_IF_ERROR(mpi::MakePartsKey(key));
    CR_RETURN_IF_ERROR(WriteFile(folder + "/openmpi", mpi::OpenMpiHosts(parts)));
    CR_RETURN_IF_ERROR(WriteFile(folder + "/hydra", mpi::HydraHosts(parts)));
    CR_RETURN_IF_ERROR(WriteFile(folder + "/parts", PartsText(parts)));
  }
  std::string addresses;
  for (const mpi::Part& part : parts) addresses += (addresses.empty() ? "" : ",") + part.ip;
  setenv(kPartAddresses, addresses.c_str(), 1);
  setenv(mpi::kPartsKey, key.c_str(), 1);
  mpi::SetMpirunVariables(agent, folder);
  // The nodes that these know are not where the ranks are to be.
  setenv("OMPI_MCA_ras", "^slurm", 0);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<PartSteps>> PartSteps::Start(const std::string& job,
                                                            const std::vector<PlacedPart>& parts,
                                                            const std::string& set) {
  std::unique_ptr<PartSteps> steps(new PartSteps());
  const std::string self = checkpoint::FindCompanion("cr-slurm-run"), agent = checkpoint::FindCompanion("cr-mpi-agent");
  for (const PlacedPart& part : parts) {
    if (part.number == 1) continue;
    std::vector<std::string> command = {"srun",
                                        "--quiet",
                                        "--overlap",
                                        "--nodes=1",
                                        "--ntasks=1",
                                        "--ntasks-per-node=1",
                                        "--mpi=none",
                                        "--export=ALL",
                                        "--nodelist=" + part.node.name,
                                        "--job-name=part-" + std::to_string(part.number),
                                        self,
                                        "--part",
                                        std::to_string(part.index) + "/" + std::to_string(part.count),
                                        "--",
                                        agent,
                                        "--part"};
    if (set.empty()) {
      command.insert(command.end(), {checkpoint::FindCompanion("cr-run"), "--name", part.name, "--address",
                                     part.part.address, "--", agent, "--serve"});
    } else {
      command.insert(command.end(),
                     {checkpoint::FindCompanion("cr-restart"), set + "/member-" + std::to_string(part.number)});
      if (part.name != job) command.insert(command.end(), {"--job-dir", part.name});
    }
    int input[2];
    const bool made = pipe2(input, O_CLOEXEC) == 0;
    // Without a signal at the end of this process, which the part learns by the end of its input.
    const pid_t child = made ? StartChild(command, 0, input[0]) : 0;
    if (child == 0) return ErrnoStatus("cannot start the step on " + part.node.name);
    close(input[0]);
    steps->steps_.push_back({child, UniqueFd(input[1]), part.node.name});
  }
  return steps;
}

PartSteps::~PartSteps() {
  for (StepChild& step : steps_) step.input.Close();
  for (const StepChild& step : steps_) EndChild(step.pid, kEndSeconds);
}

std::string PartSteps::Ended(pid_t child) {
  const auto step = std::find_if(steps_.begin(), steps_.end(), [&](const StepChild& one) { return one.pid == child; });
  if (step == steps_.end()) return "";
  const std::string node = step->node;
  steps_.erase(step);
  return node;
}

int RunPart(int index, int count, const std::vector<std::string>& command) {
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_BLOCK, &all, nullptr);
  const char* const assigned = getenv("CUDA_VISIBLE_DEVICES");
  if (assigned) setenv("CUDA_VISIBLE_DEVICES", ShareOfGpus(assigned, index, count).c_str(), 1);
  UseAssignedGpus();
  const pid_t child = StartChild(command, SIGKILL);
  int status = 0;
  if (child == 0 || waitpid(child, &status, 0) != child) {
    fprintf(stderr, "cr-slurm-run: cannot start a part of the job: %s\n", strerror(errno));
    return kExitFailed;
  }
  const int code = checkpoint::ExitCode(status);
  // As it should: with the first part, or saved. srun would report other codes as errors.
  return code == 128 + SIGTERM || code == kExitStopped ? 0 : code;
}

void UseAssignedGpus() {
  const char* const assigned = getenv("CUDA_VISIBLE_DEVICES");
  std::string seen;
  // Another server's GPUs are its own affair.
  if (!assigned || getenv("CUDA_REMOTE_SERVER") || !NumberGpus(assigned, &seen)) return;
  setenv("CUDA_REMOTE_SERVER_GPUS", assigned, 1);
  setenv("CUDA_VISIBLE_DEVICES", seen.c_str(), 1);
}

}  // namespace cuda_remote::client::slurm
