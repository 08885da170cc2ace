// SPDX-License-Identifier: Apache-2.0
#include "client/memory/transfers.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <string_view>

#include "proto/base/clock.h"

namespace cuda_remote::client {
namespace {

// Terminals, and /dev/null and the like, copy.
bool IsHarmlessDevice(dev_t device) {
  const unsigned number = major(device), unit = minor(device);
  const bool memory = number == 1 && (unit == 3 || unit == 5 || unit == 7 || unit == 8 || unit == 9 || unit == 11);
  const bool terminal = number == 4 || number == 5 || (number >= 136 && number <= 143);
  return memory || terminal;
}

bool IsHarmlessSocket(int fd) {
  int family = 0;
  socklen_t length = sizeof family;
  if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &length) != 0) return false;
  return family == AF_UNIX || family == AF_INET || family == AF_INET6 || family == AF_NETLINK;
}

// What has no file: eventfd, epoll and so on.
bool IsHarmlessObject(int directory, const char* name) {
  char link[64];
  const ssize_t length = readlinkat(directory, name, link, sizeof link);
  if (length <= 0) return false;
  constexpr std::string_view kPrefix = "anon_inode:";
  std::string_view what(link, size_t(length));
  if (what.substr(0, kPrefix.size()) != kPrefix) return false;
  what.remove_prefix(kPrefix.size());
  constexpr std::string_view kHarmless[] = {"[eventfd]",  "[eventpoll]", "[timerfd]",     "[signalfd]",  "inotify",
                                            "[fanotify]", "[pidfd]",     "[userfaultfd]", "[perf_event]"};
  return std::any_of(std::begin(kHarmless), std::end(kHarmless), [what](std::string_view one) { return what == one; });
}

bool IsHarmless(int directory, const char* name) {
  const int fd = atoi(name);
  const int flags = fcntl(fd, F_GETFL);
  struct stat facts;
  // Closed meanwhile: what read from it in the foreground has ended.
  if (flags < 0 || fstat(fd, &facts) != 0) return true;
  if (flags & O_DIRECT) return false;
  switch (facts.st_mode & S_IFMT) {
    case S_IFCHR:
      return IsHarmlessDevice(facts.st_rdev);
    case S_IFSOCK:
      return IsHarmlessSocket(fd);
    case S_IFREG:
    case S_IFDIR:
    case S_IFIFO:
    case S_IFBLK:
    case S_IFLNK:
      return true;
    default:
      return IsHarmlessObject(directory, name);
  }
}

void SetPages(uint64_t base, const RecentPages::Runs& runs, std::vector<uint64_t>* bits) {
  for (const auto& [begin, end] : runs) {
    for (uint64_t page = (begin - base) / RecentPages::kPage; page < (end - base) / RecentPages::kPage; ++page) {
      (*bits)[page / 64] |= uint64_t{1} << (page % 64);
    }
  }
}

}  // namespace

bool TransfersPossible() {
  DIR* const list = opendir("/proc/self/fd");
  if (list == nullptr) return true;
  bool harmless = true;
  while (const dirent* const entry = harmless ? readdir(list) : nullptr) {
    if (entry->d_name[0] != '.') harmless = IsHarmless(dirfd(list), entry->d_name);
  }
  closedir(list);
  return !harmless;
}

RecentPages::RecentPages(uint64_t base, uint64_t bytes)
    : base_(base), young_((bytes / kPage + 63) / 64), old_((bytes / kPage + 63) / 64) {}

RecentPages::Runs RecentPages::Add(const Runs& runs, Moment now) {
  SetPages(base_, runs, &young_);
  Runs all;
  for (uint64_t word = 0; word < young_.size(); ++word) {
    for (uint64_t bits = young_[word] | old_[word]; bits != 0; bits &= bits - 1) {
      const uint64_t begin = base_ + (word * 64 + uint64_t(__builtin_ctzll(bits))) * kPage;
      if (!all.empty() && all.back().second == begin) {
        all.back().second += kPage;
      } else {
        all.emplace_back(begin, begin + kPage);
      }
    }
  }
  if (now - turned_ >= kKept) {
    turned_ = now;
    old_.swap(young_);
    std::fill(young_.begin(), young_.end(), 0);
  }
  return all;
}

}  // namespace cuda_remote::client
