// SPDX-License-Identifier: Apache-2.0
// Where cr-hostd's socket is, and the folders of the jobs that it has started for ordinary users (host/README.md).
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_HOSTD_PLACES_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_HOSTD_PLACES_H_

#include <sys/types.h>

#include <string>

#include "absl/status/status.h"

namespace cuda_remote::checkpoint {

// In the file "stopped" of a job's folder, in the place of an image: the job continues at the host whose name follows.
inline constexpr char kMovedTo[] = "moved to ";

// $CUDA_REMOTE_HOSTD, else /run/cuda-remote/hostd.sock.
std::string HostdSocket();
// Whether this is the socket of the host's own cr-hostd, without a choice of the user's.
bool IsUsualHostd(const std::string& socket);

// The folder with a folder for each user.
std::string UsersFolder(const std::string& socket);
// Stands for $XDG_RUNTIME_DIR of the tools that cr-hostd starts for this user. Root's. `socket`: cr-hostd's.
std::string UserFolder(const std::string& socket, uid_t user);
// The folder of the user's jobs in it.
std::string UserJobsFolder(const std::string& socket, uid_t user);

// Why this host takes no jobs at present; empty: it does. cr-drain sets it, until it is set to "" again or the machine
// starts anew.
std::string DrainingReason(const std::string& socket);
absl::Status SetDrainingReason(const std::string& socket, const std::string& reason);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_HOSTD_PLACES_H_
