// SPDX-License-Identifier: Apache-2.0
// What the engine and CRIU's action script, cr-hold, have agreed upon. Constants only: cr-hold has nothing but the C
// library.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_HOLD_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_HOLD_H_

namespace cuda_remote::checkpoint {

// The environment variable with the pipe's path, as the restorer sees it.
inline constexpr char kHoldVariable[] = "CUDA_REMOTE_HOLD";
// What is written into the pipe when the processes may run.
inline constexpr char kHoldGo[] = "go\n";

// In a dump: lines with CRIU's descriptor of the folder to copy to, and the files to copy into it (shared_files.h); an
// empty line is left out.
inline constexpr char kSharedFilesVariable[] = "CUDA_REMOTE_SHARED_FILES";
// What the copy of the first file is called, but for a number: 0.
inline constexpr char kSharedFileName[] = "shared-file-";

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_HOLD_H_
