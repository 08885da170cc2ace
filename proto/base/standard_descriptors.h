// SPDX-License-Identifier: Apache-2.0
// A program may have closed its standard input, output and error. The client library must not get these numbers for its
// own descriptors: what the program prints would go to the GPU server.
//
// Part of the client library.
#ifndef CUDA_REMOTE_PROTO_BASE_STANDARD_DESCRIPTORS_H_
#define CUDA_REMOTE_PROTO_BASE_STANDARD_DESCRIPTORS_H_

#include <fcntl.h>
#include <unistd.h>

#include <utility>

#include "proto/base/unique_fd.h"

namespace cuda_remote {

inline constexpr int kStandardDescriptors = 3;

// `fd`, which is the caller's, or if it has one of these numbers, another descriptor of the same in its place. -1 with
// errno if there is no room for that.
inline int BesideStandard(int fd) {
  if (fd < 0 || fd >= kStandardDescriptors) return fd;
  const int other = fcntl(fd, F_DUPFD_CLOEXEC, kStandardDescriptors);
  close(fd);
  return other;
}

// While it lives, nothing that this process opens gets one of these numbers. A program that reads or writes them
// meanwhile gets EBADF, as if they were closed. Does nothing where there is no /dev/null.
class StandardDescriptorsTaken {
 public:
  StandardDescriptorsTaken() {
    while (true) {
      UniqueFd fd(open("/dev/null", O_PATH | O_CLOEXEC));
      if (!fd.ok() || fd.get() >= kStandardDescriptors) return;
      const int number = fd.get();
      taken_[number] = std::move(fd);
    }
  }
  ~StandardDescriptorsTaken() {
    for (UniqueFd& fd : taken_) {
      // Not what the program has put there meanwhile.
      const int flags = fd.ok() ? fcntl(fd.get(), F_GETFL) : -1;
      if (flags < 0 || (flags & O_PATH) == 0) (void)fd.Release();
    }
  }
  StandardDescriptorsTaken(const StandardDescriptorsTaken&) = delete;
  StandardDescriptorsTaken& operator=(const StandardDescriptorsTaken&) = delete;

 private:
  UniqueFd taken_[kStandardDescriptors];
};

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_BASE_STANDARD_DESCRIPTORS_H_
