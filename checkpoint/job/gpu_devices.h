// SPDX-License-Identifier: Apache-2.0
// Processes that use this machine's own GPU, past the client library.
//
// Such a process holds GPU state that no checkpoint has. A program gets there if it loads NVIDIA's library in spite of
// all that cr-run does (stand_ins.h), or opens the devices itself.
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_GPU_DEVICES_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_GPU_DEVICES_H_

#include <poll.h>

#include <set>
#include <string>
#include <vector>

#include "checkpoint/job/job.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::checkpoint {

struct DeviceUser {
  int pid = 0;          // as this machine numbers it
  std::string program;  // its name
  std::string device;   // /dev/nvidia0
};

// The job's processes that have one of NVIDIA's devices open now, each once.
std::vector<DeviceUser> DeviceUsersOf(const Job& job);
// The same among `pids`, the job's processes (ProcessesOf), where they are known.
std::vector<DeviceUser> DeviceUsersOf(const Job& job, std::vector<int> pids);

// One sentence about it, for messages.
std::string ToText(const DeviceUser& user);

// Looks at a job whenever somebody on this machine has opened one of NVIDIA's devices, and says who of it has. Not
// thread-safe.
class DeviceWatch {
 public:
  // `tool`: for the messages. Does nothing where there is no such device.
  DeviceWatch(const char* tool, const Job& job);
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  // For Beside: what to wait for, and what to do after any wait. Cheap if nobody has opened anything.
  int Ask(std::vector<pollfd>* waiting) const;
  void Look();

 private:
  const char* const tool_;
  const Job job_;
  UniqueFd events_;
  // Not 0: when to look, since a file that was just opened is not among a process's descriptors yet.
  int64_t look_at_ms_ = 0;
  std::set<int> told_;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_GPU_DEVICES_H_
