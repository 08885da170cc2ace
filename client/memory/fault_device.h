// SPDX-License-Identifier: Apache-2.0
// /dev/userfaultfd for processes that may not open it: a server on this machine may give it away.
#ifndef CUDA_REMOTE_CLIENT_MEMORY_FAULT_DEVICE_H_
#define CUDA_REMOTE_CLIENT_MEMORY_FAULT_DEVICE_H_

#include <string>

namespace cuda_remote::client {

// Asks the GPU server at this address, as in CUDA_REMOTE_SERVER, for an open /dev/userfaultfd, which the caller closes.
// -1 if the server is on another machine, or gives none (cr-server --userfaultfd). Any thread; waits for the answer,
// some seconds at most.
int AskForFaultDevice(const std::string& server);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_MEMORY_FAULT_DEVICE_H_
