#include "server/worker/output_capture.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace cuda_remote::server {
namespace {

// Read in pieces of this size, and the file is emptied when it has grown beyond it.
constexpr size_t kPiece = 256 << 10;

}  // namespace

bool OutputCapture::Install(std::string* error) {
  const int file = memfd_create("cuda-remote-stdout", MFD_CLOEXEC);
  if (file < 0 || fcntl(file, F_SETFL, O_APPEND) != 0 || dup2(file, STDOUT_FILENO) < 0) {
    *error = std::string("cannot capture standard output: ") + strerror(errno);
    if (file >= 0) close(file);
    return false;
  }
  // Two writers must not interleave inside stdio; a full buffer is cheaper than a line at a time.
  setvbuf(stdout, nullptr, _IOFBF, 64 << 10);
  fd_ = file;
  return true;
}

void OutputCapture::Flush(const std::function<void(std::string_view)>& send) {
  if (fd_ < 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  fflush(stdout);
  struct stat facts;
  if (fstat(fd_, &facts) != 0 || uint64_t(facts.st_size) <= taken_) return;
  std::string piece;
  while (taken_ < uint64_t(facts.st_size)) {
    piece.resize(kPiece);
    const ssize_t n = pread(fd_, &piece[0], piece.size(), off_t(taken_));
    if (n <= 0) break;
    taken_ += uint64_t(n);
    send(std::string_view(piece).substr(0, size_t(n)));
  }
  // Bytes that arrive between the look and the cut would be lost: cut only where nobody can be printing, when all that
  // was there is taken and the file is long.
  if (taken_ >= (64u << 20) && fstat(fd_, &facts) == 0 && uint64_t(facts.st_size) == taken_ && ftruncate(fd_, 0) == 0) {
    taken_ = 0;
  }
}

}  // namespace cuda_remote::server
