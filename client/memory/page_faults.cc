// SPDX-License-Identifier: Apache-2.0
#include "client/memory/page_faults.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "proto/base/unique_fd.h"

// Newer than some of the headers that this is built with.
#ifndef UFFD_FEATURE_MINOR_SHMEM
#define UFFD_FEATURE_MINOR_SHMEM (1 << 10)
#endif
#ifndef UFFD_FEATURE_WP_HUGETLBFS_SHMEM
#define UFFD_FEATURE_WP_HUGETLBFS_SHMEM (1 << 12)
#endif
#ifndef UFFDIO_CONTINUE_MODE_WP
#define UFFDIO_CONTINUE_MODE_WP (uint64_t{1} << 1)
#endif
#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif
#ifndef USERFAULTFD_IOC_NEW
#define USERFAULTFD_IOC_NEW _IO(0xAA, 0x00)
#endif

namespace cuda_remote::client {
namespace {

constexpr uint64_t kFeatures = UFFD_FEATURE_MISSING_SHMEM | UFFD_FEATURE_MINOR_SHMEM | UFFD_FEATURE_PAGEFAULT_FLAG_WP |
                               UFFD_FEATURE_WP_HUGETLBFS_SHMEM;

// What a child made by fork has to close: the process that it could hold up is its parent.
std::atomic<int> g_open{-1};

void CloseInChild() {
  const int fd = g_open.exchange(-1);
  if (fd >= 0) close(fd);
}

}  // namespace

int PageFaults::OpenDescriptor(const DeviceSource& source, Accesses accesses, int flags) {
  int fd = int(syscall(SYS_userfaultfd, flags));
  if (fd >= 0) return fd;
  UniqueFd device(::open("/dev/userfaultfd", O_RDWR | O_CLOEXEC));
  if (!device.ok() && source) device.Reset(source());
  // For the memory of the process that asks for it, whoever has opened the device.
  if (device.ok()) fd = ioctl(device.get(), USERFAULTFD_IOC_NEW, flags);
  if (fd >= 0 || accesses == Accesses::kAll) return fd;
  return int(syscall(SYS_userfaultfd, flags | UFFD_USER_MODE_ONLY));
}

bool PageFaults::Supported(const DeviceSource& source, Accesses accesses) {
  PageFaults faults(source, accesses);
  if (!faults.Open()) return false;
  const int file = memfd_create("cuda-remote-probe", MFD_CLOEXEC);
  if (file < 0) return false;
  bool works = false;
  if (ftruncate(file, off_t(kPage)) == 0) {
    void* const page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) {
      const uint64_t address = reinterpret_cast<uint64_t>(page);
      *static_cast<volatile char*>(page) = 1;
      works = faults.Register(address, kPage);
      if (works) {
        Unmap(address, kPage);
        works = faults.Map(address, kPage, true) && *static_cast<volatile char*>(page) == 1;
        faults.Unregister(address, kPage);
      }
      munmap(page, kPage);
    }
  }
  close(file);
  return works;
}

bool PageFaults::Open() {
  fd_ = OpenDescriptor(source_, accesses_, O_CLOEXEC | O_NONBLOCK);
  if (fd_ < 0) return false;
  uffdio_api api = {};
  api.api = UFFD_API;
  api.features = kFeatures;
  event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (ioctl(fd_, UFFDIO_API, &api) != 0 || event_ < 0) {
    Close();
    return false;
  }
  static const int registered = pthread_atfork(nullptr, nullptr, &CloseInChild);
  (void)registered;
  g_open = fd_;
  return true;
}

void PageFaults::Close() {
  if (fd_ >= 0) {
    int mine = fd_;
    g_open.compare_exchange_strong(mine, -1);
    close(fd_);
  }
  if (event_ >= 0) close(event_);
  fd_ = event_ = -1;
}

bool PageFaults::Register(uint64_t address, uint64_t bytes) {
  uffdio_register request = {};
  request.range = {address, bytes};
  request.mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_MINOR | UFFDIO_REGISTER_MODE_WP;
  return ioctl(fd_, UFFDIO_REGISTER, &request) == 0;
}

void PageFaults::Unregister(uint64_t address, uint64_t bytes) {
  uffdio_range range = {address, bytes};
  ioctl(fd_, UFFDIO_UNREGISTER, &range);
}

bool PageFaults::Next(Fault* fault, const std::function<void()>& look) {
  while (true) {
    if (look) look();
    uffd_msg message;
    const ssize_t got = read(fd_, &message, sizeof message);
    if (got == ssize_t(sizeof message)) {
      if (message.event != UFFD_EVENT_PAGEFAULT) continue;
      fault->page = message.arg.pagefault.address & ~(kPage - 1);
      fault->protect = (message.arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WP) != 0;
      fault->is_write = fault->protect || (message.arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WRITE) != 0;
      return true;
    }
    pollfd both[2] = {{fd_, POLLIN, 0}, {event_, POLLIN, 0}};
    poll(both, 2, -1);
    if (both[1].revents != 0) return false;
  }
}

void PageFaults::Interrupt() {
  const uint64_t one = 1;
  const ssize_t wrote = write(event_, &one, sizeof one);
  (void)wrote;
}

bool PageFaults::Map(uint64_t address, uint64_t bytes, bool protect) {
  while (bytes != 0) {
    uffdio_continue request = {};
    request.range = {address, bytes};
    request.mode = protect ? UFFDIO_CONTINUE_MODE_WP : 0;
    if (ioctl(fd_, UFFDIO_CONTINUE, &request) == 0) return true;
    const int error = errno;
    // How far it came, which is said with EAGAIN alone.
    uint64_t done = 0;
    if (error == EAGAIN && request.mapped > 0) done = uint64_t(request.mapped);
    if (error == EEXIST) {
      // The first page is mapped: it stays as it is.
      Wake(address, kPage);
      done = kPage;
    }
    if (error != EAGAIN && error != EEXIST) return false;
    if (done == 0) sched_yield();
    address += done;
    bytes -= done;
  }
  return true;
}

void PageFaults::Unprotect(uint64_t address, uint64_t bytes) {
  uffdio_writeprotect request = {};
  request.range = {address, bytes};
  while (ioctl(fd_, UFFDIO_WRITEPROTECT, &request) != 0 && errno == EAGAIN) sched_yield();
}

void PageFaults::Wake(uint64_t address, uint64_t bytes) {
  uffdio_range range = {address, bytes};
  ioctl(fd_, UFFDIO_WAKE, &range);
}

void PageFaults::Unmap(uint64_t address, uint64_t bytes) {
  madvise(reinterpret_cast<void*>(address), bytes, MADV_DONTNEED);
}

}  // namespace cuda_remote::client
