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
    fd_.Reset(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!fd_.ok()) return;  // no such folder any more: nobody takes snapshots either
    if (flock(fd_.get(), LOCK_SH | LOCK_NB) == 0) return;
    const bool busy = errno == EWOULDBLOCK || errno == EINTR;
    fd_.Close();
    if (!busy) return;
    const timespec pause = {0, kPauseNs};
    nanosleep(&pause, nullptr);
  }
}

ConnectionLock::~ConnectionLock() {
  if (!fd_.ok()) return;
  // By name: a child that was forked meanwhile has a copy of the descriptor.
  flock(fd_.get(), LOCK_UN);
}

}  // namespace cuda_remote
