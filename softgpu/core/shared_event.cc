// SPDX-License-Identifier: Apache-2.0
#include "softgpu/core/shared_event.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

namespace cuda_remote::softgpu {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr uint64_t kMark = 0x544e455655504753;  // in every handle that is made here
// How often a wait looks whether its context has ended.
constexpr timespec kPatience = {0, 100'000'000};

struct Name {
  uint64_t mark;
  int32_t pid;
  int32_t fd;
  uint64_t inode;
};

}  // namespace

std::shared_ptr<SharedEvent> SharedEvent::Map(int fd) {
  void* const page = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (page == MAP_FAILED) {
    close(fd);
    return nullptr;
  }
  return std::shared_ptr<SharedEvent>(new SharedEvent(fd, static_cast<State*>(page)));
}

std::shared_ptr<SharedEvent> SharedEvent::Create() {
  const int fd = memfd_create("softgpu-event", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return nullptr;
  // Another process must not be able to cut it short under our feet.
  if (ftruncate(fd, kPageBytes) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    close(fd);
    return nullptr;
  }
  return Map(fd);
}

std::shared_ptr<SharedEvent> SharedEvent::Open(const CUipcEventHandle& handle) {
  Name name;
  static_assert(sizeof name <= sizeof handle);
  std::memcpy(&name, &handle, sizeof name);
  if (name.mark != kMark) return nullptr;
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", name.pid, name.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  struct stat facts;
  const int seals = fcntl(fd, F_GET_SEALS);
  if (fstat(fd, &facts) != 0 || facts.st_ino != name.inode || facts.st_size != off_t(kPageBytes) || seals < 0 ||
      (seals & F_SEAL_SHRINK) == 0) {
    close(fd);
    return nullptr;
  }
  return Map(fd);
}

SharedEvent::~SharedEvent() { munmap(state_, kPageBytes); }

CUipcEventHandle SharedEvent::Handle() const {
  CUipcEventHandle handle = {};
  struct stat facts = {};
  fstat(fd_.get(), &facts);
  const Name name = {kMark, getpid(), fd_.get(), facts.st_ino};
  std::memcpy(&handle, &name, sizeof name);
  return handle;
}

uint64_t SharedEvent::Submit() { return state_->submitted.fetch_add(1) + 1; }

void SharedEvent::Complete(uint64_t record) {
  uint64_t before = state_->completed.load();
  while (before < record && !state_->completed.compare_exchange_weak(before, record)) {
  }
  state_->changes.fetch_add(1);
  syscall(SYS_futex, &state_->changes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

uint64_t SharedEvent::Latest() const { return state_->submitted.load(); }

bool SharedEvent::Done(uint64_t record) const { return state_->completed.load() >= record; }

void SharedEvent::Wait(uint64_t record, const std::atomic<bool>* cancel) const {
  while (!Done(record) && !(cancel != nullptr && cancel->load())) {
    const uint32_t changes = state_->changes.load();
    if (Done(record)) return;
    syscall(SYS_futex, &state_->changes, FUTEX_WAIT, changes, &kPatience, nullptr, 0);
  }
}

}  // namespace cuda_remote::softgpu
