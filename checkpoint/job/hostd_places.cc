// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/hostd_places.h"

#include <stdlib.h>

namespace cuda_remote::checkpoint {

std::string HostdSocket() {
  const char* const named = getenv("CUDA_REMOTE_HOSTD");
  return named && *named ? named : "/run/cuda-remote/hostd.sock";
}

std::string UserFolder(const std::string& socket, uid_t user) {
  return socket.substr(0, socket.rfind('/') + 1) + "users/" + std::to_string(user);
}

std::string UserJobsFolder(const std::string& socket, uid_t user) {
  return UserFolder(socket, user) + "/cuda-remote/jobs";
}

}  // namespace cuda_remote::checkpoint
