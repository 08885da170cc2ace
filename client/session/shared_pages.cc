// SPDX-License-Identifier: Apache-2.0
#include "client/session/shared_pages.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <map>
#include <string>

#include "proto/base/mappings.h"
#include "proto/base/unique_fd.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::client {
namespace {

constexpr int kReadWrite = PROT_READ | PROT_WRITE;

bool IsFile(int fd, const Mapping& mapping) {
  struct stat facts;
  return fstat(fd, &facts) == 0 && S_ISREG(facts.st_mode) && facts.st_ino == mapping.inode &&
         major(facts.st_dev) == mapping.major && minor(facts.st_dev) == mapping.minor;
}

// A descriptor of the file that is mapped; -1: none. The kernel's own link to it needs CAP_CHECKPOINT_RESTORE
// (proc_pid_map_files(5)); without that, the path has to lead there still.
UniqueFd OpenMapped(const Mapping& mapping) {
  for (const std::string& candidate : {MapFile("/proc/self", mapping), mapping.name}) {
    if (candidate[0] != '/') continue;
    UniqueFd fd(open(candidate.c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
    if (fd.ok() && IsFile(fd.get(), mapping)) return fd;
  }
  return UniqueFd();
}

// While it lives, writes to the pages wait. They go on when it goes, to whatever is mapped there by then.
class WriteStop {
 public:
  // `shared`: the pages are a file's.
  bool Stop(uint64_t start, uint64_t bytes, bool shared) {
    fd_.Reset(int(syscall(SYS_userfaultfd, O_CLOEXEC)));
    if (!fd_.ok()) return false;
    uffdio_api api = {};
    api.api = UFFD_API;
    api.features = UFFD_FEATURE_PAGEFAULT_FLAG_WP;
    if (shared) api.features |= UFFD_FEATURE_WP_HUGETLBFS_SHMEM;
    if (ioctl(fd_.get(), UFFDIO_API, &api) != 0) return false;
    uffdio_register registration = {};
    registration.range = {start, bytes};
    registration.mode = UFFDIO_REGISTER_MODE_WP;
    if (ioctl(fd_.get(), UFFDIO_REGISTER, &registration) != 0) return false;
    uffdio_writeprotect protection = {};
    protection.range = {start, bytes};
    protection.mode = UFFDIO_WRITEPROTECT_MODE_WP;
    return ioctl(fd_.get(), UFFDIO_WRITEPROTECT, &protection) == 0;
  }

 private:
  UniqueFd fd_;
};

// Replaces the mapping by private memory with the same contents.
bool MakePrivate(uint64_t start, uint64_t bytes) {
  void* const there = reinterpret_cast<void*>(start);
  void* const copy = mmap(nullptr, bytes, kReadWrite, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED) return false;
  memcpy(copy, there, bytes);
  if (mremap(copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, there) == there) return true;
  munmap(copy, bytes);
  return false;
}

// The pages that are moved at the moment: start and length.
struct Moved {
  Mutex mutex;
  std::map<uint64_t, uint64_t> pages CR_GUARDED_BY(mutex);
  // While a fork is under way: what the child says on it is that it has its copies.
  int copied[2] CR_GUARDED_BY(mutex) = {-1, -1};
};
Moved& AllMoved() {
  static auto* moved = new Moved;  // outlives exit handlers
  return *moved;
}

// The lock is held from before the fork until both processes have done what is theirs.
void BeforeFork() CR_UNGUARDED {
  Moved& moved = AllMoved();
  moved.mutex.lock();
  if (moved.pages.empty() || pipe2(moved.copied, O_CLOEXEC) != 0) moved.copied[0] = moved.copied[1] = -1;
}

// The child would go on sharing the pages with its parent, and each would see what the other writes.
void InChild() CR_UNGUARDED {
  Moved& moved = AllMoved();
  for (const auto& [start, bytes] : moved.pages) {
    // Without memory for a copy: a fault is better than contents that change, here or in the parent.
    if (!MakePrivate(start, bytes)) munmap(reinterpret_cast<void*>(start), bytes);
  }
  moved.pages.clear();
  if (moved.copied[0] >= 0) {
    close(moved.copied[0]);
    close(moved.copied[1]);
  }
  moved.mutex.unlock();
}

// The thread that forked goes on when the child has its copies, or is gone. (Other threads that write in between do so
// at the time of the fork, which might have been after it.)
void InParent() CR_UNGUARDED {
  Moved& moved = AllMoved();
  if (moved.copied[0] >= 0) {
    close(moved.copied[1]);
    char none;
    while (read(moved.copied[0], &none, 1) < 0 && errno == EINTR) {
    }
    close(moved.copied[0]);
  }
  moved.mutex.unlock();
}

void WatchForks() {
  static const int registered = pthread_atfork(BeforeFork, InParent, InChild);
  (void)registered;
}

}  // namespace

PageBacking FindBacking(uint64_t start, uint64_t bytes, int except) {
  PageBacking found;
  const uint64_t end = start + bytes;
  uint64_t at = start;  // what is before is known to be of one kind
  Mapping first;
  const auto look = [&](const Mapping& one) {
    if (one.end <= at) return true;
    if (one.begin > at || !one.readable || !one.writable) return false;
    const bool file = one.shared && one.inode != 0;
    const bool anonymous = !one.shared && one.inode == 0 && one.name != "[stack]";
    if (at == start) {
      first = one;
      found.kind = file ? PageBacking::kFile : anonymous ? PageBacking::kPrivate : PageBacking::kOther;
      found.offset = one.offset + (start - one.begin);
    }
    if (found.kind == PageBacking::kOther || (found.kind == PageBacking::kPrivate && !anonymous)) return false;
    if (found.kind == PageBacking::kFile) {
      const bool same = file && one.inode == first.inode && one.major == first.major && one.minor == first.minor;
      if (!same || one.offset + (at - one.begin) != found.offset + (at - start)) return false;
    }
    at = one.end;
    return at < end;
  };
  ForEachMapping("/proc/self", look, start);
  if (at < end) found.kind = PageBacking::kOther;
  if (found.kind != PageBacking::kFile) return found;
  if (except < 0 || !IsFile(except, first)) found.fd = OpenMapped(first);
  if (!found.fd.ok()) found.kind = PageBacking::kOther;
  return found;
}

bool MovePages(uint64_t start, uint64_t bytes, int fd, uint64_t offset, void* window) {
  void* const there = reinterpret_cast<void*>(start);
  WatchForks();
  Moved& all = AllMoved();
  MutexLock lock(&all.mutex);
  // Pages that do not exist yet cannot be stopped on older kernels.
  if (madvise(there, bytes, MADV_POPULATE_WRITE) != 0) return false;
  WriteStop stop;
  if (!stop.Stop(start, bytes, false)) return false;
  memcpy(window, there, bytes);
  if (mmap(there, bytes, kReadWrite, MAP_SHARED | MAP_FIXED, fd, off_t(offset)) != there) return false;
  all.pages[start] = bytes;
  return true;
}

bool MovePagesBack(uint64_t start, uint64_t bytes) {
  Moved& all = AllMoved();
  MutexLock lock(&all.mutex);
  const auto moved = all.pages.find(start);
  if (moved == all.pages.end() || moved->second != bytes) return false;
  WriteStop stop;
  if (!stop.Stop(start, bytes, true) || !MakePrivate(start, bytes)) return false;
  all.pages.erase(moved);
  return true;
}

}  // namespace cuda_remote::client
