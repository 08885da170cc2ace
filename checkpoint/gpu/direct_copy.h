// SPDX-License-Identifier: Apache-2.0
// GPU memory from one worker to another without the host: the old worker offers it, the new one maps it beside its own
// and copies, inside the GPU or from GPU to GPU. Whether the two are on one machine, are of one user, and have GPUs
// that reach each other, they find out themselves: what is refused is left to the other ways (memory_transfer.h).
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_DIRECT_COPY_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_DIRECT_COPY_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/gpu/memory_transfer.h"
#include "ckptfmt/types.h"
#include "proto/channel/client_channel.h"

namespace cuda_remote::checkpoint {

// Copies what is worth two requests and can go this way. The result says of each region whether all of it is at the
// second server. `go_on`: with the bytes of copied regions, and those of all regions. Fails if a session is lost, or
// `go_on` says so; then no request is on the way either.
absl::StatusOr<std::vector<bool>> CopyDirectly(ClientChannel* from, ClientChannel* to,
                                               const std::vector<ckptfmt::Region>& regions, const Continue& go_on);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_DIRECT_COPY_H_
