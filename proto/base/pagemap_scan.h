// SPDX-License-Identifier: Apache-2.0
// PAGEMAP_SCAN, a request of /proc/PID/pagemap: which pages of a range are in a state, and optionally protects them
// again (linux/fs.h of Linux 6.7, which is newer than some of the headers that this is built with).
//
// Needs nothing but the kernel's headers: the library in CRIU has it, too.
#ifndef CUDA_REMOTE_PROTO_BASE_PAGEMAP_SCAN_H_
#define CUDA_REMOTE_PROTO_BASE_PAGEMAP_SCAN_H_

#include <sys/ioctl.h>

#include <cstdint>

namespace cuda_remote {

// Pages of one state.
struct ScanRegion {
  uint64_t start, end, categories;
};
struct ScanArguments {
  uint64_t size, flags, start, end;
  uint64_t walk_end;               // how far the kernel says it has looked
  uint64_t regions, region_count;  // address of the ScanRegions to fill
  uint64_t max_pages;
  uint64_t category_inverted, category_mask, category_any_mask, return_mask;
};
// Returns how many regions it has filled.
constexpr unsigned long kPagemapScan = _IOWR('f', 16, ScanArguments);

// Flags.
constexpr uint64_t kScanProtects = 1, kScanNeedsAsync = 2;
// Categories. Guard: nothing is there, and an access is an error.
constexpr uint64_t kPageIsWritten = uint64_t{1} << 1, kPageIsGuard = uint64_t{1} << 8;

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_BASE_PAGEMAP_SCAN_H_
