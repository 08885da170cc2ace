// SPDX-License-Identifier: Apache-2.0
// Process numbers for CRIU's own processes during a restore, which none of the restored processes may have.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_FREE_NUMBERS_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_FREE_NUMBERS_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace cuda_remote::checkpoint {

// A process number from which on, and below `limit`, there is room for CRIU's own processes: the processes and threads
// in CRIU's pstree.img, their groups and sessions have no numbers there. Above all of these if there is room, else in
// the largest gap between them. Fails if `image` is not such a file, or if there is no room. Any input is safe.
absl::StatusOr<int> FreeNumber(std::string_view image, int limit);

// The same for the image in `folder`, and this machine's limit.
absl::StatusOr<int> FreeNumberBeside(const std::string& folder);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_FREE_NUMBERS_H_
