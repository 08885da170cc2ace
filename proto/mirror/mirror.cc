// SPDX-License-Identifier: Apache-2.0
#include "proto/mirror/mirror.h"

#include <algorithm>

namespace cuda_remote::mirror {
namespace {

constexpr uint64_t kBlock = 4096;
// A run's head costs as much as so many equal bytes.
constexpr uint64_t kGap = 16;
// Longest run, so that one never fills a message by itself.
constexpr uint64_t kLongest = 256 << 10;

// The first offset from `at` on where the two differ; `bytes` if they do not.
uint64_t FirstDifference(const char* now, const char* base, uint64_t at, uint64_t bytes) {
  while (at < bytes) {
    const uint64_t block = std::min(kBlock - at % kBlock, bytes - at);
    if (memcmp(now + at, base + at, block) == 0) {
      at += block;
      continue;
    }
    for (const uint64_t end = at + block; at < end; ++at) {
      if (now[at] != base[at]) return at;
    }
  }
  return bytes;
}

}  // namespace

void AppendRun(uint64_t address, const char* bytes, uint64_t count, std::string* runs) {
  const uint64_t head[2] = {address, count};
  runs->append(reinterpret_cast<const char*>(head), sizeof(head));
  runs->append(bytes, count);
  runs->append((8 - count % 8) % 8, '\0');
}

bool CollectChanges(uint64_t address, const char* now, char* base, uint64_t bytes, bool exact, uint64_t* at,
                    std::string* runs) {
  const uint64_t gap = exact ? 0 : kGap;
  while (true) {
    const uint64_t start = FirstDifference(now, base, *at, bytes);
    *at = start;
    if (start == bytes) return true;
    if (runs->size() + kLongest + 64 > kMostRuns) return false;
    const uint64_t limit = std::min(bytes, start + kLongest);
    uint64_t end = start + 1;
    // The run goes on while the next difference is near.
    for (uint64_t look = end; look < limit && look - end <= gap; ++look) {
      if (now[look] != base[look]) end = look + 1;
    }
    const size_t place = runs->size() + 16;
    AppendRun(address + start, now + start, end - start, runs);
    memcpy(base + start, runs->data() + place, end - start);
    *at = end;
  }
}

}  // namespace cuda_remote::mirror
