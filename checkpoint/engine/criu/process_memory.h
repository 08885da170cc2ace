// SPDX-License-Identifier: Apache-2.0
// Reads the memory of a job's processes, by the numbers that they have inside of the job.
//
// Thread-safe.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_PROCESS_MEMORY_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_PROCESS_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/job/job.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::checkpoint {

class ProcessMemory {
 public:
  // The job stays the caller's and must outlive this. `pids`: its processes, as ProcessesOf says.
  ProcessMemory(const Job& job, const std::vector<int>& pids) : job_(job), pids_(pids) {}
  ProcessMemory(const ProcessMemory&) = delete;
  ProcessMemory& operator=(const ProcessMemory&) = delete;

  // Whether the kernel lets the caller read all of `pids`.
  bool MayRead() const;
  // Copies `bytes` at `address` of `process`, which stands still. All of them must be there.
  absl::Status Read(int process, uint64_t address, char* to, size_t bytes);

 private:
  int Outside(int process);
  void Note(const std::vector<int>& pids) CR_REQUIRES(mutex_);

  const Job& job_;
  const std::vector<int> pids_;
  Mutex mutex_;
  std::map<int, int> outside_ CR_GUARDED_BY(mutex_);  // number, by the one inside
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_PROCESS_MEMORY_H_
