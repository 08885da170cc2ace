// SPDX-License-Identifier: Apache-2.0
#include "proto/base/status.h"

#include <string.h>

namespace cuda_remote {

Status ErrnoError(const std::string& what, int number) { return Error(what + ": " + strerror(number)); }

}  // namespace cuda_remote
