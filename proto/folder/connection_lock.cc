// SPDX-License-Identifier: Apache-2.0
#include "proto/folder/connection_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

namespace cuda_remote {
namespace {

constexpr long kPauseNs = 5000000;

}  // namespace

ConnectionLock::ConnectionLock(const std::string& folder) {
  if (folder.empty()) return;
  const std::string path = folder + "/" + kConnectionLockName;
  while (true) {
    fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd_ < 0) return;  // no such folder any more: nobody takes snapshots either
    if (flock(fd_, LOCK_SH | LOCK_NB) == 0) return;
    const bool busy = errno == EWOULDBLOCK || errno == EINTR;
    close(fd_);
    fd_ = -1;
    if (!busy) return;
    const timespec pause = {0, kPauseNs};
    nanosleep(&pause, nullptr);
  }
}

ConnectionLock::~ConnectionLock() {
  if (fd_ < 0) return;
  // By name: a child that was forked meanwhile has a copy of the descriptor.
  flock(fd_, LOCK_UN);
  close(fd_);
}

}  // namespace cuda_remote
