// SPDX-License-Identifier: Apache-2.0
// One request of an ordinary user, from its first message to the tool's exit code: in a process of its own, as root, which
// goes on when cr-hostd ends.
#ifndef CUDA_REMOTE_HOST_WORKER_H_
#define CUDA_REMOTE_HOST_WORKER_H_

#include <string>

#include "host/signature.h"

namespace cuda_remote::host {

struct Settings {
  std::string socket;  // of cr-hostd; the folders of users are beside it
  std::string spool;   // for images on their way; only root can enter the folder above it
};

// Serves the peer of `socket`.
void ServeRequest(int socket, const Settings& settings, const Key& key);

// Removes what workers that were killed have left in the spool.
void CleanSpool(const Settings& settings);

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_WORKER_H_
