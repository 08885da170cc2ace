// SPDX-License-Identifier: Apache-2.0
#include "client/memory/shared_pages.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <string>
#include <thread>
#include <utility>

#include "proto/base/mappings.h"
#include "proto/base/unique_fd.h"
#include "proto/ring/spin.h"
#include "proto/threads/mutex.h"
#include "proto/threads/start_thread.h"

namespace cuda_remote::client {
namespace {

constexpr int kReadWrite = PROT_READ | PROT_WRITE;

bool IsFile(int fd, const Mapping& mapping) {
  struct stat facts;
  return fstat(fd, &facts) == 0 && S_ISREG(facts.st_mode) && facts.st_ino == mapping.inode &&
         major(facts.st_dev) == mapping.major && minor(facts.st_dev) == mapping.minor;
}

// A descriptor of the file that is mapped, for what the mapping allows; -1: none. The kernel's own link to it needs
// CAP_CHECKPOINT_RESTORE (proc_pid_map_files(5)); without that, the path has to lead there still.
UniqueFd OpenMapped(const Mapping& mapping) {
  for (const std::string& candidate : {MapFile("/proc/self", mapping), mapping.name}) {
    if (candidate[0] != '/') continue;
    UniqueFd fd(open(candidate.c_str(), (mapping.writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
    if (fd.ok() && IsFile(fd.get(), mapping)) return fd;
  }
  return UniqueFd();
}

// While it lives, writes to the pages wait. They go on when it goes, to whatever is mapped there by then.
class WriteStop {
 public:
  // `shared`: the pages are a file's.
  bool Stop(uint64_t start, uint64_t bytes, bool shared, const PageFaults::DeviceSource& source) {
    fd_.Reset(PageFaults::OpenDescriptor(source, PageFaults::Accesses::kAll, O_CLOEXEC));
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

// Whether the first page is locked: only then the kernel refuses this advice, which else says that the page may be
// written to the swap area earlier.
bool IsLocked(void* page) { return madvise(page, 1, MADV_COLD) != 0 && errno == EINVAL; }

// While it lives, no handler of a signal runs on this thread, which might write to pages that this thread has stopped.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t before_;
};

// Copies with up to four threads, or alone. While writes to pages of this process are stopped, its memory allocator may
// be, too, so the threads are there before.
class Copier {
 public:
  Copier(uint64_t bytes, bool alone) : bytes_(bytes) {
    constexpr uint64_t kLeast = 4 << 20;  // of a thread
    const auto wanted = int64_t(std::min<uint64_t>({4, bytes / kLeast, uint64_t(ring::UsableProcessors())}));
    if (alone || wanted < 2) return;
    const NoSignals none;  // the threads have this mask
    part_ = bytes / uint64_t(wanted);
    for (int64_t i = 1; i < wanted; ++i) {
      std::thread helper = StartThread([this, i] { Help(uint64_t(i)); });
      if (!helper.joinable()) break;
      helpers_.push_back(std::move(helper));
    }
  }
  ~Copier() {
    if (state_ == kWait) state_ = kLeave;
    for (std::thread& helper : helpers_) helper.join();
  }
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Once. Allocates nothing. `file`: where the bytes can be read faster than by way of this process's pages; -1:
  // nowhere.
  void Run(char* to, const char* from, int file, uint64_t offset) {
    to_ = to;
    from_ = from;
    file_ = file;
    offset_ = offset;
    state_ = kCopy;
    // What the helpers leave is at both ends.
    const uint64_t theirs = part_ * helpers_.size(), mine = part_ == 0 ? bytes_ : part_;
    CopyPart(0, mine);
    CopyPart(mine + theirs, bytes_ - mine - theirs);
    while (done_ != helpers_.size()) std::this_thread::yield();
  }

 private:
  enum State { kWait, kCopy, kLeave };

  void Help(uint64_t index) {
    while (state_ == kWait) std::this_thread::yield();
    if (state_ == kLeave) return;
    CopyPart(index * part_, part_);
    ++done_;
  }

  void CopyPart(uint64_t begin, uint64_t bytes) {
    uint64_t done = 0;
    while (file_ >= 0 && done < bytes) {
      const ssize_t n = pread(file_, to_ + begin + done, bytes - done, off_t(offset_ + begin + done));
      if (n <= 0) break;
      done += uint64_t(n);
    }
    memcpy(to_ + begin + done, from_ + begin + done, bytes - done);
  }

  const uint64_t bytes_;
  uint64_t part_ = 0;
  char* to_ = nullptr;
  const char* from_ = nullptr;
  int file_ = -1;
  uint64_t offset_ = 0;
  std::atomic<State> state_{kWait};
  std::atomic<uint64_t> done_{0};
  std::vector<std::thread> helpers_;
};

// What has moved into a file.
struct MovedPages {
  uint64_t bytes;
  bool writable;
  int fd;
  uint64_t offset;
};

// Replaces a mapping of moved pages by the private ones at `copy`, which get the contents.
bool Replace(uint64_t start, const MovedPages& pages, char* copy, Copier* copier) {
  char* const there = reinterpret_cast<char*>(start);
  const bool locked = IsLocked(there);
  copier->Run(copy, there, pages.fd, pages.offset);
  if (!pages.writable) mprotect(copy, pages.bytes, PROT_READ);
  if (mremap(copy, pages.bytes, pages.bytes, MREMAP_MAYMOVE | MREMAP_FIXED, there) != there) return false;
  if (locked) mlock(there, pages.bytes);
  return true;
}

char* NewPages(uint64_t bytes) {
  void* const pages = mmap(nullptr, bytes, kReadWrite, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return pages == MAP_FAILED ? nullptr : static_cast<char*>(pages);
}

// Whether this thread's stack or its errno may lie on these pages or beside them.
bool AreThisThreads(uint64_t start, uint64_t bytes) {
  constexpr uint64_t kNear = 256 << 10;
  const auto near = [&](const void* own) {
    const auto address = reinterpret_cast<uint64_t>(own);
    return start < address + kNear && address < start + bytes + kNear;
  };
  return near(__builtin_frame_address(0)) || near(&errno);
}

// What is moved at a time, so that it does not need twice the memory.
constexpr uint64_t kStep = 64 << 20;

// The pages that are moved at the moment.
struct Moved {
  Mutex mutex;
  std::map<uint64_t, MovedPages> pages CR_GUARDED_BY(mutex);  // by address
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
  for (const auto& [start, pages] : moved.pages) {
    // Without memory for a copy: a fault is better than contents that change, here or in the parent.
    char* const copy = NewPages(pages.bytes);
    Copier copier(pages.bytes, true);
    if (!copy || !Replace(start, pages, copy, &copier)) munmap(reinterpret_cast<void*>(start), pages.bytes);
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

std::vector<PageBacking> FindBacking(uint64_t start, uint64_t bytes, int moved) {
  std::vector<PageBacking> found;
  std::vector<Mapping> files;  // of those in `found` that are some
  const uint64_t end = start + bytes;
  uint64_t at = start;
  const auto look = [&](const Mapping& one) {
    if (one.end <= at) return true;
    if (one.begin > at || !one.readable) return false;
    PageBacking piece;
    piece.start = at;
    piece.bytes = std::min(one.end, end) - at;
    piece.writable = one.writable;
    if (one.shared && one.inode != 0) {
      piece.kind = moved >= 0 && IsFile(moved, one) ? PageBacking::kMoved : PageBacking::kFile;
      piece.offset = one.offset + (at - one.begin);
    } else if (!one.shared && one.inode == 0 && one.name != "[stack]") {
      piece.kind = PageBacking::kPrivate;
    }
    at += piece.bytes;
    // The kernel keeps mappings apart that differ in what does not matter here.
    PageBacking* const last = found.empty() ? nullptr : &found.back();
    if (last && last->kind == piece.kind && last->writable == piece.writable &&
        (piece.kind == PageBacking::kPrivate || piece.kind == PageBacking::kOther ||
         (last->offset + last->bytes == piece.offset && files.back().inode == one.inode &&
          files.back().major == one.major && files.back().minor == one.minor))) {
      last->bytes += piece.bytes;
    } else {
      found.push_back(std::move(piece));
      files.push_back(one);
    }
    return at < end;
  };
  ForEachMapping("/proc/self", look, start);
  if (at < end) return {};
  for (size_t i = 0; i < found.size(); ++i) {
    if (found[i].kind != PageBacking::kFile) continue;
    found[i].fd = OpenMapped(files[i]);
    if (!found[i].fd.ok()) found[i].kind = PageBacking::kOther;
  }
  return found;
}

namespace {

// Moves at most kStep.
bool MoveStep(uint64_t start, uint64_t bytes, bool writable, int fd, uint64_t offset, char* window,
              const PageFaults::DeviceSource& source) {
  char* const there = reinterpret_cast<char*>(start);
  // Pages that do not exist yet cannot be stopped on older kernels.
  if (madvise(there, bytes, writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) != 0) return false;
  Copier copier(bytes, false);
  const NoSignals none;
  WriteStop stop;
  if (writable && !stop.Stop(start, bytes, false, source)) return false;
  const bool locked = IsLocked(there);
  copier.Run(window, there, -1, 0);
  const int protection = writable ? kReadWrite : PROT_READ;
  if (mmap(there, bytes, protection, MAP_SHARED | MAP_FIXED, fd, off_t(offset)) != there) return false;
  if (locked) mlock(there, bytes);
  return true;
}

bool MoveStepBack(uint64_t start, const MovedPages& pages, const PageFaults::DeviceSource& source) {
  char* const copy = NewPages(pages.bytes);
  if (!copy) return false;
  Copier copier(pages.bytes, false);
  const NoSignals none;
  WriteStop stop;
  if ((!pages.writable || stop.Stop(start, pages.bytes, true, source)) && Replace(start, pages, copy, &copier))
    return true;
  munmap(copy, pages.bytes);
  return false;
}

}  // namespace

bool MovePages(uint64_t start, uint64_t bytes, bool writable, int fd, uint64_t offset, char* window,
               const PageFaults::DeviceSource& source) {
  // Parent and child would run on the same stack until the child has its copy.
  if (AreThisThreads(start, bytes)) return false;
  WatchForks();
  Moved& all = AllMoved();
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t step = std::min(kStep, bytes - done);
    bool moved;
    {
      MutexLock lock(&all.mutex);
      moved = MoveStep(start + done, step, writable, fd, offset + done, window + done, source);
      if (moved) all.pages[start + done] = {step, writable, fd, offset + done};
    }
    if (!moved) {
      if (done != 0) MovePagesBack(start, done, source);
      return false;
    }
    done += step;
  }
  return true;
}

bool MovePagesBack(uint64_t start, uint64_t bytes, const PageFaults::DeviceSource& source) {
  Moved& all = AllMoved();
  const uint64_t end = start + bytes;
  for (uint64_t at = start; at < end;) {
    MutexLock lock(&all.mutex);
    auto it = all.pages.upper_bound(at);
    if (it == all.pages.begin()) return false;
    --it;
    const uint64_t begins = it->first;
    const MovedPages all_of_it = it->second;
    const uint64_t ends = begins + all_of_it.bytes;
    if (ends <= at) return false;
    const uint64_t to = std::min(ends, end);
    const auto part = [&](uint64_t from, uint64_t until) {
      MovedPages pages = all_of_it;
      pages.bytes = until - from;
      pages.offset += from - begins;
      return pages;
    };
    if (AreThisThreads(at, to - at) || !MoveStepBack(at, part(at, to), source)) return false;
    all.pages.erase(it);
    if (begins < at) all.pages[begins] = part(begins, at);
    if (to < ends) all.pages[to] = part(to, ends);
    at = to;
  }
  return true;
}

}  // namespace cuda_remote::client
