// SPDX-License-Identifier: Apache-2.0
// Names of open files below /proc.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_PROC_PATHS_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_PROC_PATHS_H_

#include <string_view>

namespace cuda_remote::checkpoint {

// Whether CRIU cannot open this file again, although its process comes back: it opens all files of a process before it
// makes the threads beside the first one, and in no certain order, so what /proc shows of those threads, of open files
// and of mappings is not there yet. `path`: as /proc/PID/fd or CRIU's image names the file.
bool IsGoneInRestore(std::string_view path);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_PROC_PATHS_H_
