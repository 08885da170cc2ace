// SPDX-License-Identifier: Apache-2.0
// A step: what a script in a job asks of srun, and where its tasks run. For cr-srun, which starts them inside of the
// job.
//
// Functions without state.
#ifndef CUDA_REMOTE_PROGRAMS_SLURM_STEP_H_
#define CUDA_REMOTE_PROGRAMS_SLURM_STEP_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "programs/slurm/job_start.h"

namespace cuda_remote::client::slurm {

// The addresses of the job's parts, with commas; not set in a job on one node.
inline constexpr char kPartAddresses[] = "CUDA_REMOTE_SLURM_PARTS";
// How many tasks of a step each of its nodes has, with commas: from cr-srun to its tasks.
inline constexpr char kStepTasks[] = "CUDA_REMOTE_SLURM_STEP_TASKS";

enum class Mpi { kNone, kPmix, kPmi2 };

struct Step {
  Mpi mpi = Mpi::kNone;
  // On each node, from the job's first one on. Tasks are numbered node by node.
  std::vector<int> tasks;
  int cpus = 0;  // for each task, as the script says; 0: it does not
  std::vector<std::string> command;

  int Count() const;
};

// `words`: behind "srun". `variables`: those of the job. `nodes`: how many the job has. Refuses options that srun has
// and a step inside of the job cannot have, by name.
absl::StatusOr<Step> ParseStep(const std::vector<std::string>& words, const Variables& variables, int nodes);

// What Slurm sets for the task `rank` of a step, whose tasks are `tasks` as above.
Variables TaskVariables(int rank, const std::vector<int>& tasks);

// The command line that starts the tasks with the mpirun at `launcher`, each by `wrapper` ..., the step's command.
// `addresses`: of the job's parts; empty in a job on one node. `exported`: names of the variables for tasks on other
// nodes.
std::vector<std::string> LauncherWords(const Step& step, const std::string& launcher,
                                       const std::vector<std::string>& addresses,
                                       const std::vector<std::string>& exported,
                                       const std::vector<std::string>& wrapper);

// "a,b" in parts; none for an empty text.
std::vector<std::string> Divided(const std::string& text);

}  // namespace cuda_remote::client::slurm

#endif  // CUDA_REMOTE_PROGRAMS_SLURM_STEP_H_
