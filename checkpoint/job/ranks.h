// SPDX-License-Identifier: Apache-2.0
// Which rank each process of a job is, by the variables that launchers set (mpirun, torchrun, srun).
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_RANKS_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_RANKS_H_

#include <string>
#include <vector>

namespace cuda_remote::checkpoint {

// `environments`: as in /proc/PID/environ. The first variable counts of which every process that has it has another
// value: where a launcher has started another one, the outer one's is the same in all. -1: no rank. All are -1 if no
// variable tells processes apart.
std::vector<int> RanksIn(const std::vector<std::string>& environments);

// The same for processes of this machine. One that this user may not look at has no rank.
std::vector<int> RanksOf(const std::vector<int>& pids);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_RANKS_H_
