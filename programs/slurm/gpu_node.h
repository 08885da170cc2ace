// SPDX-License-Identifier: Apache-2.0
// The GPU server of a heterogeneous job: a cr-server on the node of its second component, as a step of the job. So it
// has the GPUs that Slurm has granted there, and ends with the job.
//
// cr-slurm-run starts itself on that node through srun (ServeGpus). The two speak through srun's pipes: the server's
// address comes back as a line, and the end of the input ends the server. Slurm's signals do not: they reach the step
// as soon as the program, which is only then saved. The server takes nobody but who has a key that is made for this
// start of the job, in the job's folder.
//
// For single-threaded tools.
#ifndef CUDA_REMOTE_PROGRAMS_SLURM_GPU_NODE_H_
#define CUDA_REMOTE_PROGRAMS_SLURM_GPU_NODE_H_

#include <sys/types.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::client::slurm {

class GpuNode {
 public:
  // Starts the server and waits until it serves. `keys`: a folder that both nodes have, and nobody else can look into;
  // it is made.
  static absl::StatusOr<std::unique_ptr<GpuNode>> Start(const std::string& keys);
  // Ends it, and removes `keys`.
  ~GpuNode();
  GpuNode(const GpuNode&) = delete;
  GpuNode& operator=(const GpuNode&) = delete;

  // Sets the variables by which cr-run, cr-restart and cr-relay reach the server.
  void SetVariables() const;
  // srun, a child of this process.
  pid_t process() const { return process_; }
  // It was waited for, so the server has ended.
  void Ended() { process_ = 0; }

 private:
  explicit GpuNode(const std::string& keys) : keys_(keys) {}

  const std::string keys_;
  std::string address_;
  pid_t process_ = 0;
  UniqueFd input_;
};

// On the GPU node, as the step's only task: serves until the end of standard input. The exit code.
int ServeGpus(const std::string& keys);

// The address of this host's by which it reaches `peer`, an address, or is reached from there. Empty if there is none.
std::string OwnAddressTowards(const std::string& peer);

}  // namespace cuda_remote::client::slurm

#endif  // CUDA_REMOTE_PROGRAMS_SLURM_GPU_NODE_H_
