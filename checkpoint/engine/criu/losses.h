// SPDX-License-Identifier: Apache-2.0
// State of open sockets, pipes and terminals that neither CRIU nor cuda-remote can bring back. With nothing but the C
// library: the library in CRIU looks for it, too.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_LOSSES_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_LOSSES_H_

namespace cuda_remote::checkpoint {

struct Loss {
  const char* what;    // "has a TCP connection with an urgent byte that nobody has read"
  const char* advice;  // "have the program read it before the checkpoint"
};

// What would be lost of an open descriptor of this process; null: nothing. Changes nothing. Of a terminal: call it only
// if both of its ends would be saved. Safe to call for a duplicate of another process's descriptor.
const Loss* LossOf(int fd);

// The data in a TCP connection's queue: `received` bytes, as /proc/net/tcp has them; `ended`: the other end has sent
// its end, too, which counts as one. CRIU would save the part before an urgent byte only.
const Loss* LossBehindUrgent(int fd, unsigned received, bool ended);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_LOSSES_H_
