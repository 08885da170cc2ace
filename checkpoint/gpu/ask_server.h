// SPDX-License-Identifier: Apache-2.0
// Questions to a GPU server outside of sessions, as NVML asks them (proto/nvml/query.h). Thread-safe; no state.
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_ASK_SERVER_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_ASK_SERVER_H_

#include <string>

#include "proto/nvml/query.h"

namespace cuda_remote::checkpoint {

// Asks the server at `address` (unix:PATH of a socket, or of cr-server's folder). False if it cannot be reached that
// way (only one on this machine can), does not answer for seconds, or says no.
bool AskServer(const std::string& address, nvml::Question question, nvml::Answer* answer);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_ASK_SERVER_H_
