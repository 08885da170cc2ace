// SPDX-License-Identifier: Apache-2.0
// The parts of a job on several nodes: their addresses, where they run, and which images are theirs.
//
// Functions without state.
#ifndef CUDA_REMOTE_PROGRAMS_SLURM_PART_PLAN_H_
#define CUDA_REMOTE_PROGRAMS_SLURM_PART_PLAN_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "programs/mpi/parts.h"

namespace cuda_remote::client::slurm {

struct Node {
  std::string name;     // Slurm's
  std::string address;  // by which Slurm reaches it: NodeAddr
};

// From what scontrol prints with --oneliner show node, in the order of `names`.
absl::StatusOr<std::vector<Node>> ParseNodes(const std::string& text, const std::vector<std::string>& names);

// "2(x2),1", as in SLURM_TASKS_PER_NODE, is 2, 2, 1. Empty if it cannot be read.
std::vector<int> ParseTasks(const std::string& text);

// Parts for a new job with these tasks on each node. `range`: FIRST-LAST[/PREFIX][@INTERFACE]. Which of its addresses
// depends on the job's number, so that jobs that follow each other have different ones.
absl::StatusOr<std::vector<mpi::Part>> PlanParts(const std::string& range, const std::string& job_id,
                                                 const std::vector<int>& tasks);

// The parts in a file, which stays with the job.
std::string PartsText(const std::vector<mpi::Part>& parts);
absl::StatusOr<std::vector<mpi::Part>> ParsePartsText(const std::string& text);

struct PlacedPart {
  mpi::Part part;
  int number = 1;  // from 1
  Node node;
  std::string name;          // of its job on that node
  int index = 0, count = 1;  // which of the parts on that node
};

// Parts that follow each other on the same node if there are fewer nodes. `name`: the job's.
std::vector<PlacedPart> PlaceParts(const std::vector<mpi::Part>& parts, const std::vector<Node>& nodes,
                                   const std::string& name);

// As cr-checkpoint --hosts takes them.
std::string HostsOf(const std::vector<PlacedPart>& parts);

// The newest set of images, with one for each part, in a folder that all nodes have; empty if there is none.
std::string NewestSetIn(const std::string& folder, size_t parts);

// Of GPUs, as in CUDA_VISIBLE_DEVICES, those of one of `count` parts; all if there are fewer than parts.
std::string ShareOfGpus(const std::string& assigned, int index, int count);

}  // namespace cuda_remote::client::slurm

#endif  // CUDA_REMOTE_PROGRAMS_SLURM_PART_PLAN_H_
