// SPDX-License-Identifier: Apache-2.0
#include "softgpu/core/machine_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "proto/threads/mutex.h"
#include "softgpu/core/settings.h"

namespace cuda_remote::softgpu {
namespace {

// Locks lie behind the rows: one byte for the table, and one for each process.
constexpr off_t kLocks = off_t{1} << 40;

bool Lock(int fd, off_t byte, short type, bool wait) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = kLocks + byte;
  lock.l_len = 1;
  int result;
  do {
    result = fcntl(fd, wait ? F_OFD_SETLKW : F_OFD_SETLK, &lock);
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

bool IsLocked(int fd, off_t byte) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = kLocks + byte;
  lock.l_len = 1;
  return fcntl(fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

class TableLock {
 public:
  explicit TableLock(int fd) : fd_(fd) { Lock(fd_, 0, F_WRLCK, true); }
  ~TableLock() { Lock(fd_, 0, F_UNLCK, true); }
  TableLock(const TableLock&) = delete;
  TableLock& operator=(const TableLock&) = delete;

 private:
  const int fd_;
};

}  // namespace

MachineMemory* MachineMemory::Get() {
  static MachineMemory* const memory = [] {
    const char* const path = std::getenv("SOFTGPU_MEMORY_FILE");
    return path != nullptr && *path != 0 ? Open(path) : nullptr;
  }();
  return memory;
}

MachineMemory* MachineMemory::Open(const char* path) {
  const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  void* rows = MAP_FAILED;
  if (fd >= 0 && ftruncate(fd, kRows * sizeof(Row)) == 0) {
    rows = mmap(nullptr, kRows * sizeof(Row), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (rows != MAP_FAILED) {
    for (uint64_t own = 1; own <= kProcesses; ++own) {
      if (!Lock(fd, off_t(own), F_WRLCK, false)) continue;
      auto* const memory = new MachineMemory(fd, static_cast<Row*>(rows), own);
      MutexLock only(&memory->mutex_);
      const TableLock lock(fd);
      for (uint64_t i = 0; i < kRows; ++i) {
        if (memory->rows_[i].process == own) memory->rows_[i] = {};  // a dead process's
      }
      return memory;
    }
  }
  Log(std::string("SOFTGPU_MEMORY_FILE: cannot use ") + path + ": " + strerror(errno));
  if (fd >= 0) close(fd);
  return nullptr;
}

void MachineMemory::Reap() {
  std::set<uint64_t> alive, dead;
  for (uint64_t i = 0; i < kRows; ++i) {
    const uint64_t process = rows_[i].process;
    if (process == 0 || process == own_ || alive.count(process) != 0) continue;
    if (dead.count(process) == 0 && IsLocked(fd_, off_t(process))) {
      alive.insert(process);
      continue;
    }
    dead.insert(process);
    rows_[i] = {};
  }
}

uint64_t MachineMemory::SumLocked(int gpu, uint64_t thing, bool* known) {
  *known = false;
  uint64_t sum = 0;
  std::set<uint64_t> seen;
  for (uint64_t i = 0; i < kRows; ++i) {
    const Row& row = rows_[i];
    if (row.process == 0 || row.gpu != uint64_t(gpu)) continue;
    if (thing != 0 && row.thing == thing) *known = true;
    if (row.thing == 0 || seen.insert(row.thing).second) sum += row.bytes;
  }
  return sum;
}

bool MachineMemory::Take(int gpu, uint64_t thing, uint64_t bytes, uint64_t total) {
  MutexLock own(&mutex_);
  const TableLock lock(fd_);
  Reap();
  bool known = false;
  const uint64_t sum = SumLocked(gpu, thing, &known);
  if (!known && (bytes > total || sum > total - bytes)) return false;
  Row* free = nullptr;
  for (uint64_t i = 0; i < kRows; ++i) {
    Row& row = rows_[i];
    if (thing == 0 && row.process == own_ && row.gpu == uint64_t(gpu) && row.thing == 0) {
      row.bytes += bytes;
      return true;
    }
    if (row.process == 0 && free == nullptr) free = &row;
  }
  if (free == nullptr) return false;
  *free = {own_, uint64_t(gpu), thing, bytes};
  return true;
}

void MachineMemory::Give(int gpu, uint64_t thing, uint64_t bytes) {
  MutexLock own(&mutex_);
  const TableLock lock(fd_);
  for (uint64_t i = 0; i < kRows; ++i) {
    Row& row = rows_[i];
    if (row.process != own_ || row.gpu != uint64_t(gpu) || row.thing != thing) continue;
    if (thing != 0) {
      row = {};
    } else {
      row.bytes -= bytes;
    }
    return;
  }
}

uint64_t MachineMemory::Used(int gpu) {
  MutexLock own(&mutex_);
  const TableLock lock(fd_);
  Reap();
  bool known;
  return SumLocked(gpu, 0, &known);
}

}  // namespace cuda_remote::softgpu
