// SPDX-License-Identifier: Apache-2.0
// Which rights the processes in CRIU's image files would have after a restore.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_SAVED_RIGHTS_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_SAVED_RIGHTS_H_

#include <string>

#include "absl/status/status.h"
#include "checkpoint/job/account.h"

namespace cuda_remote::checkpoint {

// Whether every thread in the image in `folder` has the numbers and groups of `account`, no capability and no secure
// bits, and no process has a namespace or a root folder that is not the job's. Fails otherwise,
// and for files that are not understood. Any input is safe.
absl::Status CheckSavedRights(const std::string& folder, const Account& account);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_SAVED_RIGHTS_H_
