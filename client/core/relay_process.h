// SPDX-License-Identifier: Apache-2.0
// Starts a cr-relay for a program that was not started by cr-run but names a remote server.
#ifndef CUDA_REMOTE_CLIENT_CORE_RELAY_PROCESS_H_
#define CUDA_REMOTE_CLIENT_CORE_RELAY_PROCESS_H_

#include <string>

#include "proto/base/status.h"

namespace cuda_remote::client {

// Starts the cr-relay that stands beside the client library (in the same folder, or ../bin), connected to `address`
// ("host:port"), and waits until it accepts sessions. It is no child of this process, and goes away by itself when its
// last session ends. Gives the path of its session socket.
StatusOr<std::string> StartRelay(const std::string& address);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_RELAY_PROCESS_H_
