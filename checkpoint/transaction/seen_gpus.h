// SPDX-License-Identifier: Apache-2.0
// The GPUs that a user's job would have at a GPU server, asked before the job comes. Not thread-safe.
#ifndef CUDA_REMOTE_CHECKPOINT_TRANSACTION_SEEN_GPUS_H_
#define CUDA_REMOTE_CHECKPOINT_TRANSACTION_SEEN_GPUS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/job/caller.h"
#include "ckptfmt/types.h"

namespace cuda_remote::checkpoint {

// Opens a session with `server`, as the user, and ends it. `server`, `gpu`: as for GpuHost::Open and cr-restart --gpu.
// What is started for that has its sockets in `folder`, a new job folder, which is removed then.
absl::StatusOr<std::vector<ckptfmt::DeviceFacts>> FindSeenGpus(const std::string& server, int gpu,
                                                               const std::string& folder, const Caller& caller);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_TRANSACTION_SEEN_GPUS_H_
