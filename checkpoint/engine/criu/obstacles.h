// SPDX-License-Identifier: Apache-2.0
// What a job has open that CRIU cannot save, found out before anything is stopped, in the user's words.
//
// CRIU itself says such things late, when the job stands still, and in the kernel's words. What is not found here, it
// still finds. Not thread-safe.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_OBSTACLES_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_OBSTACLES_H_

#include <functional>
#include <string>
#include <vector>

namespace cuda_remote::checkpoint {

// Between two looks at what may pass by itself.
inline constexpr int kLookAgainUs = 20000;

struct Obstacle {
  int pid = 0;          // as this machine numbers it
  std::string program;  // its name
  std::string what;     // "has the device /dev/fuse open"
  std::string advice;   // "close it before the checkpoint"
};

// "python3 (PID 4711) has the device /dev/fuse open, which cannot be saved; close it before the checkpoint".
std::string ToText(const Obstacle& obstacle);

// Of the processes that `list` gives, which is called twice if there is any: what has passed by then is none.
// Connections with cuda-remote's own programs are none: the client library lets go of them. Nor is, unless the job is
// `held`, its userfaultfd, which it closes then.
std::vector<Obstacle> FindObstacles(const std::function<std::vector<int>()>& list, bool held);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_OBSTACLES_H_
