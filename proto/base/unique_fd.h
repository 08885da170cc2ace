// SPDX-License-Identifier: Apache-2.0
// The one owner of a file descriptor.
//
// Not thread-safe. Part of the client library.
#ifndef CUDA_REMOTE_PROTO_BASE_UNIQUE_FD_H_
#define CUDA_REMOTE_PROTO_BASE_UNIQUE_FD_H_

#include <errno.h>
#include <unistd.h>

#include <utility>

namespace cuda_remote {

// Closes its descriptor when it is destroyed, and leaves errno as it was. -1 stands for none.
class UniqueFd {
 public:
  explicit UniqueFd(int fd = -1) : fd_(fd) {}
  ~UniqueFd() { Close(); }
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.Release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) Reset(other.Release());
    return *this;
  }

  // The descriptor, which stays this object's.
  int get() const { return fd_; }
  bool ok() const { return fd_ >= 0; }

  // The descriptor, which is the caller's from now on.
  [[nodiscard]] int Release() { return std::exchange(fd_, -1); }
  // Closes the descriptor and owns `fd` in its place.
  void Reset(int fd) {
    Close();
    fd_ = fd;
  }
  // Closes the descriptor, if there is one.
  void Close() {
    if (fd_ < 0) return;
    const int before = errno;
    close(std::exchange(fd_, -1));
    errno = before;
  }

 private:
  int fd_;
};

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_BASE_UNIQUE_FD_H_
