// SPDX-License-Identifier: Apache-2.0
// How many descriptors this process may have.
#ifndef CUDA_REMOTE_PROTO_BASE_DESCRIPTOR_LIMIT_H_
#define CUDA_REMOTE_PROTO_BASE_DESCRIPTOR_LIMIT_H_

#include <sys/resource.h>

namespace cuda_remote {

// Raises the soft limit, which is usually 1024, to the hard one. For programs that hold descriptors for many processes
// or allocations; not for those that become a program of the user's, which would inherit it.
inline void RaiseDescriptorLimit() {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_BASE_DESCRIPTOR_LIMIT_H_
