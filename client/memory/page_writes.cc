// SPDX-License-Identifier: Apache-2.0
#include "client/memory/page_writes.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "proto/base/pagemap_scan.h"

namespace cuda_remote::client {
namespace {

// Newer than some of the headers that this is built with.
constexpr int kUserModeOnly = 1;
constexpr uint64_t kWpUnpopulated = uint64_t{1} << 13, kWpAsync = uint64_t{1} << 15, kWpShared = uint64_t{1} << 12;

// What a child made by fork has to close: its memory is not watched, and a snapshot could not contain it. -1: nobody
// watches.
std::atomic<int> g_fd{-1}, g_pagemap{-1};
std::atomic<bool> g_is_child{false}, g_has_child{false};

void CloseInChild() {
  g_is_child = true;
  for (std::atomic<int>* descriptor : {&g_fd, &g_pagemap}) {
    const int fd = descriptor->exchange(-1);
    if (fd >= 0) close(fd);
  }
}

}  // namespace

bool PageWrites::open() const { return fd_ >= 0 && fd_ == g_fd; }

bool PageWrites::forked() { return g_has_child; }

bool PageWrites::Open() {
  if (open()) return true;
  if (refused_ || g_is_child || g_fd >= 0) return false;
  refused_ = true;
  // The kernel deals with all faults itself, so the mode for user programs is enough, which needs no rights.
  fd_ = int(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | kUserModeOnly));
  if (fd_ < 0) return false;
  pagemap_ = ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  uffdio_api api = {};
  api.api = UFFD_API;
  api.features = kWpUnpopulated | kWpAsync | kWpShared;
  // Before anybody could make a child that has them.
  static const int registered = pthread_atfork(
      nullptr, [] { g_has_child = true; }, &CloseInChild);
  g_fd = fd_;
  g_pagemap = pagemap_;
  if (registered != 0 || pagemap_ < 0 || ioctl(fd_, UFFDIO_API, &api) != 0) {
    Close();
    return false;
  }
  refused_ = false;
  return true;
}

void PageWrites::Close() {
  if (open()) {
    g_fd = g_pagemap = -1;
    close(fd_);
    if (pagemap_ >= 0) close(pagemap_);
  }
  fd_ = pagemap_ = -1;
}

bool PageWrites::Watch(uint64_t address, uint64_t bytes) {
  if (!Open()) return false;
  uffdio_register request = {};
  request.range = {address, bytes};
  request.mode = UFFDIO_REGISTER_MODE_WP;
  if (ioctl(fd_, UFFDIO_REGISTER, &request) != 0) return false;
  std::vector<std::pair<uint64_t, uint64_t>> runs;
  if (Collect(address, bytes, &runs)) return true;
  Unwatch(address, bytes);
  return false;
}

void PageWrites::Unwatch(uint64_t address, uint64_t bytes) {
  if (!open()) return;
  uffdio_range range = {address, bytes};
  ioctl(fd_, UFFDIO_UNREGISTER, &range);
}

bool PageWrites::Collect(uint64_t address, uint64_t bytes, std::vector<std::pair<uint64_t, uint64_t>>* runs) {
  runs->clear();
  if (!open()) return false;
  ScanRegion regions[64];
  for (uint64_t at = address, end = address + bytes; at < end;) {
    ScanArguments scan = {};
    scan.size = sizeof(scan);
    scan.flags = kScanProtects | kScanNeedsAsync;
    scan.start = at;
    scan.end = end;
    scan.regions = reinterpret_cast<uint64_t>(regions);
    scan.region_count = sizeof(regions) / sizeof(regions[0]);
    scan.category_mask = scan.return_mask = kPageIsWritten;
    const int count = ioctl(pagemap_, kPagemapScan, &scan);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 || scan.walk_end <= at) return false;
    for (int i = 0; i < count; ++i) runs->emplace_back(regions[i].start, regions[i].end);
    at = scan.walk_end;
  }
  return true;
}

}  // namespace cuda_remote::client
