// SPDX-License-Identifier: Apache-2.0
// For programs that play their own session's server: the session's shared memory, as the worker has it, and a check of
// driver calls. To be included behind cuda.h.
#ifndef CUDA_REMOTE_BENCH_INSTRUCTIONS_OWN_RING_H_
#define CUDA_REMOTE_BENCH_INSTRUCTIONS_OWN_RING_H_

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "proto/base/status.h"
#include "proto/base/unique_fd.h"
#include "proto/ring/memory.h"

// Ends the program, with the call and the error's number, if a driver call fails. At once: its session may be over.
#define CHECK(call)                                                                                        \
  do {                                                                                                     \
    const CUresult check_result = (call);                                                                  \
    if (check_result != CUDA_SUCCESS) {                                                                    \
      fprintf(stderr, "%s: %s: CUDA error %d\n", program_invocation_short_name, #call, int(check_result)); \
      _exit(1);                                                                                            \
    }                                                                                                      \
  } while (0)

namespace cuda_remote::bench {

// Maps the rings that the client library has open in this process. Fails if there are none: no session, or a server
// that shares no memory.
inline StatusOr<std::unique_ptr<ring::RingMemory>> MapOwnRing() {
  DIR* const directory = opendir("/proc/self/fd");
  StatusOr<std::unique_ptr<ring::RingMemory>> found =
      Error("no ring among this process's descriptors: is the server on this machine?");
  while (const dirent* entry = directory ? readdir(directory) : nullptr) {
    char target[256] = {};
    const std::string path = std::string("/proc/self/fd/") + entry->d_name;
    if (readlink(path.c_str(), target, sizeof(target) - 1) <= 0 || !strstr(target, "memfd:cuda-remote-ring")) continue;
    found = ring::RingMemory::Map(UniqueFd(fcntl(atoi(entry->d_name), F_DUPFD_CLOEXEC, 100)));
  }
  if (directory) closedir(directory);
  return found;
}

}  // namespace cuda_remote::bench

#endif  // CUDA_REMOTE_BENCH_INSTRUCTIONS_OWN_RING_H_
