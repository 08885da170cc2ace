// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/job_claim.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/codec/text.h"

namespace cuda_remote::checkpoint {
namespace {

// A tool that was interrupted gives the job back in this time.
constexpr int kWaitMs = 3000, kPauseMs = 20;

// A lock of the process, which its children do not have: the job itself may be one.
bool Lock(int fd) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return fcntl(fd, F_SETLK, &lock) == 0;
}

std::string TextOf(int fd) {
  char text[200];
  const ssize_t got = pread(fd, text, sizeof(text), 0);
  return got > 0 ? Printable(std::string(text, size_t(got))) : std::string();
}

}  // namespace

bool JobClaim::Take(const std::string& directory, const char* tool, const std::function<bool()>& cancelled,
                    std::string* error) {
  const std::string path = directory + "/" + kClaimName;
  fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd_ < 0) {
    *error = "cannot open " + path + ": " + strerror(errno);
    return false;
  }
  for (int waited = 0; !Lock(fd_); waited += kPauseMs) {
    if (errno != EAGAIN && errno != EACCES && errno != EINTR) {
      *error = "cannot lock " + path + ": " + strerror(errno);
    } else if (waited >= kWaitMs || cancelled()) {
      const std::string other = TextOf(fd_);
      *error = (other.empty() ? "another tool" : other) + " is working on this job; try again when it has ended";
    } else {
      usleep(kPauseMs * 1000);
      continue;
    }
    close(fd_);
    fd_ = -1;
    return false;
  }
  killed_ = TextOf(fd_);
  const std::string text = std::string(tool) + " (PID " + std::to_string(getpid()) + ")";
  if (ftruncate(fd_, 0) != 0 || pwrite(fd_, text.data(), text.size(), 0) != ssize_t(text.size())) {
    *error = "cannot write " + path + ": " + strerror(errno);
    Release();
    return false;
  }
  return true;
}

void JobClaim::Release() {
  if (fd_ < 0) return;
  // The text goes first: without it nobody takes this tool for one that was killed.
  const int ignored = ftruncate(fd_, 0);
  (void)ignored;
  close(fd_);
  fd_ = -1;
}

}  // namespace cuda_remote::checkpoint
