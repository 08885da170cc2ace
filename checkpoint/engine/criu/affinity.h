// SPDX-License-Identifier: Apache-2.0
// The processors that a program has chosen for its threads (taskset, mpirun --bind-to, sched_setaffinity). CRIU neither
// saves nor restores that.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_AFFINITY_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_AFFINITY_H_

#include <sys/types.h>

#include "checkpoint/engine/criu/process_facts.pb.h"
#include "checkpoint/job/job.h"

namespace cuda_remote::checkpoint {

// Notes those of the job's threads that may run on other processors than the tool that started the job.
void FindAffinities(const Job& job, ProcessFacts* facts);

// Gives the restored processes below the init process `init` their processors again. A thread that had one which this
// init process may not use, as on another machine or in another batch job, keeps those of the init process. For root.
void RestoreAffinities(const ProcessFacts& facts, pid_t init);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_AFFINITY_H_
