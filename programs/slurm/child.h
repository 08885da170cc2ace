// SPDX-License-Identifier: Apache-2.0
// Programs that cr-slurm-run starts.
//
// For single-threaded tools.
#ifndef CUDA_REMOTE_PROGRAMS_SLURM_CHILD_H_
#define CUDA_REMOTE_PROGRAMS_SLURM_CHILD_H_

#include <sys/types.h>

#include <string>
#include <vector>

namespace cuda_remote::client::slurm {

// Starts a program in a process group of its own: Slurm may send its signals to the whole group of the batch script,
// and they are for cr-slurm-run. `signal_with_parent`: what the program gets when this process ends; 0: nothing.
// `input`, `output`: descriptors for its standard streams; -1: this process's own. 0: failed, with errno.
pid_t StartChild(const std::vector<std::string>& command, int signal_with_parent, int input = -1, int output = -1);

// What a program that ends by itself prints; *code: as ExitCode's, 125 if it could not be started.
std::string OutputOf(const std::vector<std::string>& command, int* code);

// Waits for the end of a child; after `seconds` it is killed. As waitpid's status.
int EndChild(pid_t child, int seconds);

}  // namespace cuda_remote::client::slurm

#endif  // CUDA_REMOTE_PROGRAMS_SLURM_CHILD_H_
