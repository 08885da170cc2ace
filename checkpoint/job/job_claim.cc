// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/job_claim.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/status_macros.h"
#include "proto/codec/text.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::checkpoint {
namespace {

// A tool that was interrupted gives the job back in this time.
constexpr int kWaitMs = 3000, kPauseMs = 20;
// A keeper waits for the engine, which has all of the processes to save.
constexpr int kKeeperMs = 60000;

// Which bytes of the file are locked: the tool's, its keeper's, and the job's holder's.
enum class Part { kTool = 0, kKeeper = 1, kHolder = 2 };

// A lock of the process, which its children do not have: the job itself may be one.
bool Lock(int fd, Part part, short type = F_WRLCK) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = off_t(part);
  lock.l_len = 1;
  return fcntl(fd, F_SETLK, &lock) == 0;
}

int OpenClaim(const std::string& directory) {
  return open((directory + "/" + kClaimName).c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
}

std::string TextOf(int fd) {
  char text[200];
  const ssize_t got = pread(fd, text, sizeof(text), 0);
  return got > 0 ? Printable(std::string(text, size_t(got))) : std::string();
}

}  // namespace

absl::Status JobClaim::Take(const std::string& directory, const char* tool, const std::function<bool()>& cancelled) {
  const std::string path = directory + "/" + kClaimName;
  fd_ = OpenClaim(directory);
  if (fd_ < 0) return ErrnoStatus("cannot open " + path);
  const auto wait = [&](Part part, int most_ms, const std::function<std::string(const std::string&)>& say) {
    for (int waited = 0; !Lock(fd_, part); waited += kPauseMs) {
      absl::Status failed;
      if (errno != EAGAIN && errno != EACCES && errno != EINTR) {
        failed = ErrnoStatus("cannot lock " + path);
      } else if (waited >= most_ms || cancelled()) {
        const std::string other = TextOf(fd_);
        failed = absl::FailedPreconditionError(say(other.empty() ? "another tool" : other));
      } else {
        usleep(kPauseMs * 1000);
        continue;
      }
      close(fd_);
      fd_ = -1;
      return failed;
    }
    return absl::OkStatus();
  };
  const auto at_work = [](const std::string& other) {
    // One that restores a job does not end with that.
    const bool restores = other.compare(0, 10, "cr-restart") == 0;
    return other + (restores ? " is restarting this job; try again when the job runs"
                             : " is working on this job; try again when it has ended");
  };
  const auto was_killed = [](const std::string& other) {
    return other + " was killed, and the job is being given its GPU sessions back; try again in a moment";
  };
  CR_RETURN_IF_ERROR(wait(Part::kTool, kWaitMs, at_work));
  CR_RETURN_IF_ERROR(wait(Part::kKeeper, kKeeperMs, was_killed));
  CR_RETURN_IF_ERROR(wait(Part::kHolder, kKeeperMs, was_killed));
  Lock(fd_, Part::kKeeper, F_UNLCK);
  Lock(fd_, Part::kHolder, F_UNLCK);
  killed_ = TextOf(fd_);
  const std::string text = std::string(tool) + " (PID " + std::to_string(getpid()) + ")";
  if (ftruncate(fd_, 0) != 0 || pwrite(fd_, text.data(), text.size(), 0) != ssize_t(text.size())) {
    const absl::Status failed = ErrnoStatus("cannot write " + path);
    Release();
    return failed;
  }
  return absl::OkStatus();
}

void JobClaim::Release() {
  if (fd_ < 0) return;
  // The text goes first: without it nobody takes this tool for one that was killed.
  const int ignored = ftruncate(fd_, 0);
  (void)ignored;
  close(fd_);
  fd_ = -1;
}

bool KeeperClaim::Take(const std::string& directory) {
  if (fd_ < 0) fd_ = OpenClaim(directory);
  return fd_ >= 0 && Lock(fd_, whose_ == Whose::kKeeper ? Part::kKeeper : Part::kHolder);
}

void KeeperClaim::Release() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

}  // namespace cuda_remote::checkpoint
