// SPDX-License-Identifier: Apache-2.0
// Takes jobs from other hosts' cr-hostds (move.proto), in a process of its own beside cr-hostd, which has no threads.
//
// A host is believed what it says of a user only if its certificate is signed by the authority of --tls-ca; the number
// and the name must be one user here, too. An image is taken only if it is signed with this cluster's key. It is
// restored by a worker of cr-hostd, which is asked over its socket.
#ifndef CUDA_REMOTE_HOST_HOSTS_SERVER_H_
#define CUDA_REMOTE_HOST_HOSTS_SERVER_H_

#include <string>
#include <vector>

#include "host/signature.h"
#include "host/worker.h"

namespace cuda_remote::host {

// Serves other hosts at Settings::listen and Prometheus at Settings::metrics, each if it is not empty, until SIGTERM
// ends the process. Writes a line to `ready` and closes it once it listens: "ready", and the port of the metrics.
// Returns if it cannot, with the process's exit code; the line says why.
int ServeHosts(const Settings& settings, const Key& key, int ready);

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_HOSTS_SERVER_H_
