// SPDX-License-Identifier: Apache-2.0
// Starting a worker process.
#ifndef CUDA_REMOTE_SERVER_SUPERVISOR_SPAWN_H_
#define CUDA_REMOTE_SERVER_SUPERVISOR_SPAWN_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/supervisor/restrict.h"

namespace cuda_remote::server {

// Starts `command` with `link` at kWorkerLinkFd, standard input from /dev/null, standard output going where standard
// error goes, in a process group of its own, without what `restrictions` takes from it, and with the promise of being
// killed when the calling thread ends. Fails also if the program cannot be executed.
absl::StatusOr<pid_t> SpawnWorker(const std::vector<std::string>& command, int link, const Restrictions& restrictions);

// The path of `program` as installed beside this executable, or in the build tree; empty if it is nowhere.
std::string FindCompanion(const std::string& program, const std::vector<std::string>& places);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_SUPERVISOR_SPAWN_H_
