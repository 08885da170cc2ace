// SPDX-License-Identifier: Apache-2.0
#include "server/dispatch/runtime.h"

#include <cstdio>

namespace cuda_remote::server {

CUresult UnknownHandle(const Request& request) {
  std::fprintf(stderr, "cr-worker: %s answered with an object that the client has not created; not supported\n",
               CallName(request.header.call));
  return CUDA_ERROR_NOT_SUPPORTED;
}

}  // namespace cuda_remote::server
