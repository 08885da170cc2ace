// SPDX-License-Identifier: Apache-2.0
// Open files of other processes.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_DESCRIPTORS_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_DESCRIPTORS_H_

#include <functional>
#include <string>

namespace cuda_remote::checkpoint {

// "PROGRAM (PID n)" of a process with a descriptor for which `is_it` returns true; empty if there is none, or none that
// this user may look at. Looks only at processes for which `is_wanted` does. `process`: its folder in /proc; `number`:
// of the descriptor, a link in the folder's `fd`.
std::string FindUserOfFile(const std::function<bool(int pid)>& is_wanted,
                           const std::function<bool(const std::string& process, const std::string& number)>& is_it);

// A duplicate of a process's descriptor, which is the caller's; -1: there is none, or this user may not have it.
int DuplicateOf(int pid, int number);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_DESCRIPTORS_H_
