// SPDX-License-Identifier: Apache-2.0
// Which processes of a job share GPU memory, events or pools with each other.
#ifndef CUDA_REMOTE_REPLAY_REPLAYER_SHARING_GROUPS_H_
#define CUDA_REMOTE_REPLAY_REPLAYER_SHARING_GROUPS_H_

#include <cstddef>
#include <vector>

#include "replay/log/log.h"

namespace cuda_remote::replay {

// Those that share something, by their logs, must have their sessions on one server: for each log the number of the
// first one of its group. A log that shares with no other one is a group of its own.
std::vector<size_t> SharingGroups(const std::vector<const Log*>& logs);

}  // namespace cuda_remote::replay

#endif  // CUDA_REMOTE_REPLAY_REPLAYER_SHARING_GROUPS_H_
