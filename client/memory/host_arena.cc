// SPDX-License-Identifier: Apache-2.0
#include "client/memory/host_arena.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <iterator>

#include "client/core/log.h"
#include "proto/machine/machine_memory.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

namespace cuda_remote::client {
namespace {

// From here on the machine is asked whether it has that much.
constexpr size_t kMuch = size_t{64} << 20;

// Makes the file longer. The limit of the program's files (RLIMIT_FSIZE) counts for it, too; beyond it the call fails,
// as it does by itself only for programs that ignore SIGXFSZ. Others get that signal, which would end them.
bool Lengthen(int fd, uint64_t bytes) {
  sigset_t too_long, before, pending;
  sigemptyset(&too_long);
  sigaddset(&too_long, SIGXFSZ);
  pthread_sigmask(SIG_BLOCK, &too_long, &before);
  sigpending(&pending);
  const bool done = ftruncate(fd, off_t(bytes)) == 0;
  if (!done && errno == EFBIG) {
    const timespec at_once{};
    if (!sigismember(&pending, SIGXFSZ)) sigtimedwait(&too_long, nullptr, &at_once);
    static std::atomic<bool> said{false};
    if (!said.exchange(true)) {
      LogLine(
          "out of pinned or managed memory: it is a file in memory, which the limit of file sizes (ulimit -f) "
          "does not let grow to %llu bytes",
          static_cast<unsigned long long>(bytes));
    }
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return done;
}

}  // namespace

void* HostArena::Allocate(size_t bytes, bool replaces) {
  if (bytes == 0 || bytes > kMaxBytes) return nullptr;
  if (!replaces && bytes >= kMuch && bytes > AvailableMemory()) return nullptr;
  const uint64_t wanted = RoundUp(bytes);
  MutexLock lock(&mutex_);
  if (fd_ < 0) {
    fd_ = memfd_create(base_ == kBase ? "cuda-remote-pinned" : "cuda-remote-managed", MFD_CLOEXEC);
    if (fd_ < 0) return nullptr;
  }
  // First fit keeps the file short; pinned allocations are few and long-lived.
  uint64_t offset = end_;
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second < wanted) continue;
    offset = it->first;
    const uint64_t rest = it->second - wanted;
    free_.erase(it);
    if (rest) free_[offset + wanted] = rest;
    break;
  }
  if (offset == end_) {
    if (end_ + wanted > kMaxBytes || !Lengthen(fd_, end_ + wanted)) return nullptr;
    end_ += wanted;
  }
  void* const hint = reinterpret_cast<void*>(base_ + offset);
  void* const mapped = mmap(hint, wanted, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, fd_, off_t(offset));
  if (mapped == hint) {
    if (base_ == kManagedBase) KeepFromChildren(mapped, wanted);
    return mapped;
  }
  // Somebody else's mapping stands there (or the kernel is too old for the flag and went elsewhere). The piece is not
  // put back: it can never be used.
  if (mapped != MAP_FAILED) munmap(mapped, wanted);
  return nullptr;
}

void HostArena::KeepFromChildren(void* memory, size_t bytes) { madvise(memory, bytes, MADV_DONTFORK); }

void HostArena::Free(void* address, size_t bytes) {
  const uint64_t length = RoundUp(bytes);
  uint64_t offset = OffsetOf(reinterpret_cast<uint64_t>(address));
  MutexLock lock(&mutex_);
  munmap(address, length);
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(offset), off_t(length));
  uint64_t merged = length;
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + merged) {
    merged += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      merged += previous->second;
      free_.erase(previous);
    }
  }
  if (offset + merged == end_) {
    end_ = offset;
    if (ftruncate(fd_, off_t(end_)) != 0) end_ = offset + merged;
    if (end_ == offset) return;
  }
  free_[offset] = merged;
}

}  // namespace cuda_remote::client
