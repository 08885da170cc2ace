// SPDX-License-Identifier: Apache-2.0
#include "proto/base/status.h"

#include <errno.h>
#include <string.h>

namespace cuda_remote {

Status ErrnoError(const std::string& what) {
  const int code = errno;
  return Error(what + ": " + strerror(code));
}

}  // namespace cuda_remote
