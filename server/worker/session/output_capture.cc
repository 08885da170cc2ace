// SPDX-License-Identifier: Apache-2.0
#include "server/worker/session/output_capture.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/status_macros.h"
#include "proto/base/unique_fd.h"
#include "proto/errors/absl_status.h"
#include "proto/logging/log.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::server {
namespace {

// Read in pieces of this size, and the file is emptied when it has grown beyond it.
constexpr size_t kPiece = 256 << 10;

absl::Status Failed() { return ErrnoStatus("cannot capture what the driver prints"); }

}  // namespace

absl::Status OutputCapture::Replace(int descriptor, const char* name, File* file) {
  UniqueFd fd(memfd_create(name, MFD_CLOEXEC));
  if (!fd.ok() || fcntl(fd.get(), F_SETFL, O_APPEND) != 0 || dup2(fd.get(), descriptor) < 0) return Failed();
  file->fd = fd.Release();
  return absl::OkStatus();
}

absl::Status OutputCapture::Install() {
  CR_RETURN_IF_ERROR(Replace(STDOUT_FILENO, "cuda-remote-stdout", &out_));
  // Two writers must not interleave inside stdio; a full buffer is cheaper than a line at a time.
  setvbuf(stdout, nullptr, _IOFBF, 64 << 10);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // A sanitizer's report would be lost with the process.
  const int log = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3);
  if (log < 0) return Failed();
  CR_RETURN_IF_ERROR(Replace(STDERR_FILENO, "cuda-remote-stderr", &err_));
  log_fd_ = log;
#endif
  return absl::OkStatus();
}

void OutputCapture::Take(File* file, const std::function<void(std::string_view)>& send) {
  struct stat facts;
  if (file->fd < 0 || fstat(file->fd, &facts) != 0 || uint64_t(facts.st_size) <= file->taken) return;
  std::string piece;
  while (file->taken < uint64_t(facts.st_size)) {
    piece.resize(kPiece);
    const ssize_t n = pread(file->fd, &piece[0], piece.size(), off_t(file->taken));
    if (n <= 0) break;
    file->taken += uint64_t(n);
    send(std::string_view(piece).substr(0, size_t(n)));
  }
  // Bytes that arrive between the look and the cut would be lost: cut only where nobody can be printing, when all that
  // was there is taken and the file is long.
  if (file->taken >= (64u << 20) && fstat(file->fd, &facts) == 0 && uint64_t(facts.st_size) == file->taken &&
      ftruncate(file->fd, 0) == 0) {
    file->taken = 0;
  }
}

void OutputCapture::Flush(const std::function<void(std::string_view, bool)>& send) {
  MutexLock lock(&mutex_);
  if (out_.fd < 0) return;
  fflush(stdout);
  Take(&out_, [&send](std::string_view bytes) { send(bytes, false); });
  Take(&err_, [this, &send](std::string_view bytes) {
    const bool logged = logging::Enabled(logging::Level::kWarn);
    for (std::string_view left = logged ? bytes : std::string_view(); !left.empty();) {
      const ssize_t n = write(log_fd_, left.data(), left.size());
      if (n <= 0) break;
      left.remove_prefix(size_t(n));
    }
    send(bytes, true);
  });
}

}  // namespace cuda_remote::server
