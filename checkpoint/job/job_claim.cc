// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/job_claim.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/status_macros.h"
#include "proto/codec/text.h"
#include "proto/errors/absl_status.h"
#include "proto/folder/this_job.h"

namespace cuda_remote::checkpoint {
namespace {

// A tool that was interrupted gives the job back in this time.
constexpr int kWaitMs = 3000, kPauseMs = 20;
// A keeper waits for the engine, which has all of the processes to save.
constexpr int kKeeperMs = 60000;

// Those that look are done in this time, or others that look do not wait for them; and how often these try again.
constexpr int kLookMs = 2000, kOtherLookMs = 5;
// How long a tool that claims the job waits for those that look: cr-trace writes a long timeline meanwhile.
constexpr int kLookersMs = 30000;

// Which bytes of the file are locked: the tool's, its keeper's, the job's holder's, and that of those who look, which
// a tool locks, too.
enum class Part { kTool = 0, kKeeper = 1, kHolder = 2, kLook = 3 };

struct flock LockOf(Part part, short type, int parts = 1) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = off_t(part);
  lock.l_len = parts;
  return lock;
}

// A lock of the process, which its children do not have: the job itself may be one.
bool Lock(int fd, Part part, short type = F_WRLCK) {
  const struct flock lock = LockOf(part, type);
  return fcntl(fd, F_SETLK, &lock) == 0;
}

bool IsClaimed(int fd) {
  struct flock lock = LockOf(Part::kTool, F_WRLCK, 3);
  return fcntl(fd, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

int OpenClaim(const std::string& directory) {
  const int fd = open((directory + "/" + kClaimName).c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  struct stat file, user;
  // Of a job that runs as another user: that user looks at it, too, and nobody else.
  if (fd >= 0 && fstat(fd, &file) == 0 && stat(SocketFolder(directory).c_str(), &user) == 0 &&
      file.st_uid != user.st_uid && fchown(fd, user.st_uid, gid_t(-1)) != 0) {
    close(fd);
    return -1;
  }
  return fd;
}

std::string TextOf(int fd) {
  char text[200];
  const ssize_t got = pread(fd, text, sizeof(text), 0);
  return got > 0 ? Printable(std::string(text, size_t(got))) : std::string();
}

// Which tool has claimed the job, as in "cr-checkpoint (PID 12)".
std::string ToolIn(int fd) {
  const std::string tool = TextOf(fd);
  return tool.empty() ? "another tool" : tool;
}

// What a person is told who comes while `tool` works on the job.
std::string AtWork(const std::string& tool) {
  // One that restores a job does not end with that.
  const bool restores = tool.compare(0, 10, "cr-restart") == 0;
  return tool + (restores ? " is restarting this job; try again when the job runs"
                          : " is working on this job; try again when it has ended");
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
        failed = absl::FailedPreconditionError(say(ToolIn(fd_)));
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
  const auto was_killed = [](const std::string& other) {
    return other + " was killed, and the job is being given its GPU sessions back; try again in a moment";
  };
  CR_RETURN_IF_ERROR(wait(Part::kTool, kWaitMs, AtWork));
  CR_RETURN_IF_ERROR(wait(Part::kKeeper, kKeeperMs, was_killed));
  CR_RETURN_IF_ERROR(wait(Part::kHolder, kKeeperMs, was_killed));
  Lock(fd_, Part::kKeeper, F_UNLCK);
  Lock(fd_, Part::kHolder, F_UNLCK);
  for (int waited = 0; !Lock(fd_, Part::kLook) && waited < kLookersMs && !cancelled(); waited += kPauseMs)
    usleep(kPauseMs * 1000);
  killed_ = TextOf(fd_);
  const std::string text = std::string(tool) + " (PID " + std::to_string(getpid()) + ")";
  if (ftruncate(fd_, 0) != 0 || pwrite(fd_, text.data(), text.size(), 0) != ssize_t(text.size())) {
    const absl::Status failed = ErrnoStatus("cannot write " + path);
    Release();
    return failed;
  }
  return absl::OkStatus();
}

absl::Status JobClaim::Prepare(const std::string& directory) {
  const UniqueFd made(OpenClaim(directory));
  return made.ok() ? absl::OkStatus() : ErrnoStatus("cannot open " + directory + "/" + kClaimName);
}

void JobClaim::Release() {
  if (fd_ < 0) return;
  // The text goes first: without it nobody takes this tool for one that was killed.
  const int ignored = ftruncate(fd_, 0);
  (void)ignored;
  close(fd_);
  fd_ = -1;
}

absl::Status JobLook::Take(const std::string& directory) {
  // Not made here: who looks may be another user than the one who claims.
  fd_.Reset(open((directory + "/" + kClaimName).c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW));
  if (!fd_.ok()) return absl::OkStatus();
  for (int waited = 0; !IsClaimed(fd_.get()); waited += kOtherLookMs) {
    const bool locked = Lock(fd_.get(), Part::kLook);
    // A tool may have come just now, and found nobody to wait for.
    if (locked && !IsClaimed(fd_.get())) return absl::OkStatus();
    if (locked) break;
    if (errno != EAGAIN && errno != EACCES) return absl::OkStatus();
    if (waited >= kLookMs) return absl::UnavailableError("another tool asks the job's processes; try again");
    usleep(kOtherLookMs * 1000);
  }
  tool_ = ToolIn(fd_.get());
  return absl::FailedPreconditionError(AtWork(tool_));
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
