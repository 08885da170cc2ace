// What cr-restart and its action script, cr-hold, have agreed upon. Constants only: cr-hold has nothing but the C
// library.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_HOLD_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_HOLD_H_

namespace cuda_remote::checkpoint {

// The environment variable with the pipe's path, as the restorer sees it.
inline constexpr char kHoldVariable[] = "CUDA_REMOTE_HOLD";
// What is written into the pipe when the processes may run.
inline constexpr char kHoldGo[] = "go\n";

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_HOLD_H_
