// SPDX-License-Identifier: Apache-2.0
// A job on several nodes: its parts, one on each node at first, which are saved together (cr-checkpoint --hosts).
//
// A part is a job of its node's with an address of its own (cr-run --address), by which the parts reach each other, and
// which it keeps for good. The first part is the batch script, on the first node. The others serve the first one's
// mpirun, in the place of ssh (programs/mpi/part_shell.h). Each of them runs in a step of the job, as Slurm's srun
// starts it, so Slurm counts, limits and ends what is in it. After a restart the parts can be on other nodes, and
// several of them on one.
//
// For single-threaded tools.
#ifndef CUDA_REMOTE_PROGRAMS_SLURM_NODES_H_
#define CUDA_REMOTE_PROGRAMS_SLURM_NODES_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "programs/mpi/parts.h"
#include "programs/slurm/part_plan.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::client::slurm {

// The nodes of this job, this one first.
absl::StatusOr<std::vector<Node>> FindNodes();

// For the first part's programs, and for what starts the others: sets the variables by which mpirun and srun find the
// parts, and makes what they name in the job's folder. `fresh`: the job starts anew.
absl::Status PrepareParts(const std::string& folder, const std::vector<mpi::Part>& parts, bool fresh);

// The steps with the parts but the first.
class PartSteps {
 public:
  // `set`: the folder of the images to restart, or empty.
  static absl::StatusOr<std::unique_ptr<PartSteps>> Start(const std::string& job, const std::vector<PlacedPart>& parts,
                                                          const std::string& set);
  // Ends them.
  ~PartSteps();
  PartSteps(const PartSteps&) = delete;
  PartSteps& operator=(const PartSteps&) = delete;

  // This child has ended. The node of its part; empty if it was none of these.
  std::string Ended(pid_t child);

 private:
  struct StepChild {
    pid_t pid;
    UniqueFd input;  // the part ends when this is closed
    std::string node;
  };
  PartSteps() = default;

  std::vector<StepChild> steps_;
};

// For what this process starts: the job's own GPU server gets the GPUs that Slurm has assigned on this node
// (NumberGpus).
void UseAssignedGpus();

// In such a step: runs `command` with the GPUs of part `index` of `count` on this node, untouched by Slurm's signals,
// which are for cr-slurm-run on the first node: it saves the job. The exit code; 0 if the part was saved or told to
// end.
int RunPart(int index, int count, const std::vector<std::string>& command);

}  // namespace cuda_remote::client::slurm

#endif  // CUDA_REMOTE_PROGRAMS_SLURM_NODES_H_
