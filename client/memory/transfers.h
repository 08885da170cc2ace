// SPDX-License-Identifier: Apache-2.0
// Transfers that bring bytes into this process's memory without the kernel reporting them when they come
// (page_writes.h): devices write to pages that were looked up when the transfer began.
#ifndef CUDA_REMOTE_CLIENT_MEMORY_TRANSFERS_H_
#define CUDA_REMOTE_CLIENT_MEMORY_TRANSFERS_H_

#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

#include "proto/base/clock.h"

namespace cuda_remote::client {

// Whether such a transfer may be in progress, by the descriptors that this process has open: files with O_DIRECT,
// io_urings, devices that are not known to be harmless, and sockets of other families than those that copy. True also
// if the descriptors cannot be listed. A transfer goes on without a descriptor only if it is asynchronous and the
// program has closed the file that it reads (libaio). Any thread; takes about a microsecond for each descriptor.
bool TransfersPossible();

// The parts of a range that were reported a short time ago: a transfer that nobody knew of may have begun there, and
// ended since. Not thread-safe.
class RecentPages {
 public:
  using Runs = std::vector<std::pair<uint64_t, uint64_t>>;  // [begin, end), whole pages

  static constexpr std::chrono::milliseconds kKept{100};
  static constexpr uint64_t kPage = 4096;

  // For the pages from `base` on.
  RecentPages() = default;
  RecentPages(uint64_t base, uint64_t bytes);

  // `runs` have just been reported, at `now`. Returns them and all that were reported in the last kKept, in order. What
  // was reported before that has been in an answer at least kKept later.
  Runs Add(const Runs& runs, Moment now);

 private:
  uint64_t base_ = 0;
  Moment turned_;
  std::vector<uint64_t> young_, old_;  // a bit for each page
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_MEMORY_TRANSFERS_H_
