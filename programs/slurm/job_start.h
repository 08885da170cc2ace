// SPDX-License-Identifier: Apache-2.0
// How a job of Slurm starts: what Slurm's variables say of it, from what it starts, and which GPUs it has.
//
// Functions without state.
#ifndef CUDA_REMOTE_PROGRAMS_SLURM_JOB_START_H_
#define CUDA_REMOTE_PROGRAMS_SLURM_JOB_START_H_

#include <map>
#include <string>

#include "absl/status/statusor.h"

namespace cuda_remote::client::slurm {

// Environment variables by name.
using Variables = std::map<std::string, std::string>;

struct SlurmJob {
  std::string id;           // of one task of an array it is the array's
  std::string array, task;  // empty: not in an array
  int restarts = 0;
  int nodes = 1;
  std::string tasks;          // on each node, as SLURM_TASKS_PER_NODE
  bool has_gpu_node = false;  // its second component, of a heterogeneous job

  // "12", or "12_3". For scontrol, too, which takes an array's number for all tasks.
  std::string Name() const { return array.empty() ? id : array + "_" + task; }
};

// Fails if this is no job of Slurm's, or one that cannot be saved.
absl::StatusOr<SlurmJob> ReadSlurmJob(const Variables& variables);

enum class Start { kProgram, kImage };

// Where the job starts. `image`: the newest one in `folder`, empty if there is none. Fails if it is another job's.
absl::StatusOr<Start> ChooseStart(const SlurmJob& job, const std::string& folder, const std::string& image);

// `text` with the job's numbers in the place of %j, %A and %a; %% is a %.
std::string Expand(const std::string& text, const SlurmJob& job);

// The value of a line "NAME = VALUE" of scontrol show config; empty if there is none.
std::string SettingIn(const std::string& text, const std::string& name);

// After a restart a job may get other GPUs of its node than before, while its program keeps the numbers that it knows.
// So the job's own GPU server gets the GPUs that Slurm has assigned, and the program sees them as 0, 1, ...
// `assigned`: CUDA_VISIBLE_DEVICES as Slurm has set it. False if it lists no GPUs; then it stays as it is.
bool NumberGpus(const std::string& assigned, std::string* seen);

}  // namespace cuda_remote::client::slurm

#endif  // CUDA_REMOTE_PROGRAMS_SLURM_JOB_START_H_
