// SPDX-License-Identifier: Apache-2.0
// What cr-checkpoint and cr-migrate of an ordinary user leave to cr-hostd (host/README.md).
#ifndef CUDA_REMOTE_PROGRAMS_TOOLS_THROUGH_HOSTD_H_
#define CUDA_REMOTE_PROGRAMS_TOOLS_THROUGH_HOSTD_H_

#include <string>

#include "host/client.h"

namespace cuda_remote::client::tools {

// The name of the job that a person calls `job`, if cr-hostd has started it for this user; empty otherwise, and for
// root.
std::string JobOfHostd(const std::string& job);

// Which of cr-hostd's folders of this user's jobs a person means: *name is its name, or the last part of its path.
// False for another path.
bool NameOfHostdFolder(const std::string& folder, std::string* name);

// Has cr-hostd do it. Returns the exit code; `failed`, with a message, if there is no cr-hostd or it refuses.
int ThroughHostd(const char* tool, host::Request request, int failed);

}  // namespace cuda_remote::client::tools

#endif  // CUDA_REMOTE_PROGRAMS_TOOLS_THROUGH_HOSTD_H_
