// SPDX-License-Identifier: Apache-2.0
// Robust mutexes in mapped files. When a thread ends, the kernel marks the mutexes that it holds as those of a dead
// owner. A job that is stopped for a restart ends only to come back as the owner, and would find the marks in its
// files.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_HELD_MUTEXES_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_HELD_MUTEXES_H_

#include <sys/types.h>

#include <cstdint>
#include <vector>

#include "proto/base/unique_fd.h"

namespace cuda_remote::checkpoint {

// Looks at processes that stand still, and are about to be killed. For root; not thread-safe.
class HeldMutexes {
 public:
  // `pids`: as this machine numbers them. What cannot be read is left out.
  explicit HeldMutexes(const std::vector<int>& pids);
  HeldMutexes(const HeldMutexes&) = delete;
  HeldMutexes& operator=(const HeldMutexes&) = delete;

  // After the end of the processes: takes the kernel's marks away. A mutex that another program has locked meanwhile
  // stays as it is.
  void PutBack();

 private:
  void LookAtThread(int pid, int thread);
  void LookAtMutex(int pid, uint64_t address);

  struct Mutex {
    UniqueFd file;
    off_t offset;    // of its word in the file
    uint32_t value;  // of the word, before the end of its owner
  };
  std::vector<Mutex> mutexes_;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_HELD_MUTEXES_H_
