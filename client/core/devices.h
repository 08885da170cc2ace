// SPDX-License-Identifier: Apache-2.0
// The session's GPUs as the application sees them.
#ifndef CUDA_REMOTE_CLIENT_CORE_DEVICES_H_
#define CUDA_REMOTE_CLIENT_CORE_DEVICES_H_

#include <vector>

#include "client/core/objects.h"

namespace cuda_remote::wire {
struct OpSessionInfo_Reply;
}  // namespace cuda_remote::wire

namespace cuda_remote::client {

// The first `most` of the GPUs (-1: all) that the server's answer describes, without what only works where the server
// runs. Thread-safe.
std::vector<Device> ReadDevices(const wire::OpSessionInfo_Reply& info, int most);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_DEVICES_H_
