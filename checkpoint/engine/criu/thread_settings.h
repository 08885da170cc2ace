// SPDX-License-Identifier: Apache-2.0
// How the kernel treats the threads of a program because the program has asked for it, as far as CRIU neither saves nor
// restores that, and other processes can ask and tell: scheduling attributes beside policy and priority, the priority
// of reads and writes (ioprio_set(2)), timer slack; and what a core dump of a process has (core(5)).
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_THREAD_SETTINGS_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_THREAD_SETTINGS_H_

#include <sys/types.h>

#include "checkpoint/engine/criu/process_facts.pb.h"
#include "checkpoint/job/job.h"

namespace cuda_remote::checkpoint {

// Notes those of all threads of the job. For root.
void FindThreadSettings(const Job& job, ProcessFacts* facts);

// Gives the restored processes below the init process `init` theirs again. What this machine does not allow stays as it
// is. For root.
void RestoreThreadSettings(const ProcessFacts& facts, pid_t init);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_THREAD_SETTINGS_H_
