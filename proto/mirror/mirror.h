// SPDX-License-Identifier: Apache-2.0
// Mirrored memory: two processes have a copy each, and tell each other what has changed.
//
// Each side has the bytes themselves and a copy of what they were when both sides last agreed (the base). A side finds
// its own changes by comparing the two, sends them as runs, and takes them into its base; the other side takes what it
// is sent into its base and, where it differs from the base, into its bytes. So bytes that only one side has changed
// arrive at the other, wherever they lie in a page, and what a side has changed itself is not undone by an answer that
// crossed it.
//
// Runs, one after the other: address (8 bytes), length (8 bytes), the bytes, zeros up to a multiple of 8.
// Little-endian.
//
// Pure functions; any thread. Finding changes in much memory takes threads of its own, for as long as it lasts. Part of
// the client library: no exceptions of its own.
#ifndef CUDA_REMOTE_PROTO_MIRROR_MIRROR_H_
#define CUDA_REMOTE_PROTO_MIRROR_MIRROR_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace cuda_remote::mirror {

// Most bytes of runs in one message.
inline constexpr size_t kMostRuns = size_t{1} << 20;

// Finds where `now` differs from `base` from `*at` on, both `bytes` long, appends the differences to `runs` as being at
// `address` + offset, and makes `base` the same. Stops when `runs` is longer than kMostRuns allows; *at is where to go
// on, and true means that all has been seen. Equal bytes between two differences are sent along if they are few and
// `exact` is false. `now` may be written to meanwhile: what is sent is what `base` becomes.
bool CollectChanges(uint64_t address, const char* now, char* base, uint64_t bytes, bool exact, uint64_t* at,
                    std::string* runs);

// The first offset from `at` on where the two differ; `bytes` if they do not. After some MiB without a difference, this
// many helpers look on at the same time.
uint64_t FirstDifference(const char* now, const char* base, uint64_t at, uint64_t bytes, int helpers);

// Appends one run of at most kMostRuns bytes.
void AppendRun(uint64_t address, const char* bytes, uint64_t count, std::string* runs);

// The receiving side: sets those bytes of `now` that differ from `base`, and `base`. False: this side had changed some
// of these bytes to something else, and what it wrote is lost.
inline bool ApplyRun(const char* from, uint64_t bytes, char* now, char* base) {
  bool alone = true;
  for (uint64_t i = 0; i < bytes; ++i) {
    if (from[i] == base[i]) continue;
    alone = alone && (now[i] == base[i] || now[i] == from[i]);
    now[i] = from[i];
    base[i] = from[i];
  }
  return alone;
}

// The same if what is sent counts in any case: sets all of the bytes. False: this side had changed some of them to
// something else since both last agreed, and what it wrote is lost. `from`, which others may change meanwhile, is read
// once.
inline bool OverwriteRun(const char* from, uint64_t bytes, char* now, char* base) {
  // Nothing is lost where all is as it was, which is nearly always.
  const bool as_it_was = memcmp(now, base, bytes) == 0;
  bool alone = true;
  if (as_it_was) {
    memcpy(base, from, bytes);
  } else {
    for (uint64_t i = 0; i < bytes; ++i) {
      const char sent = from[i];
      alone = alone && (now[i] == base[i] || now[i] == sent);
      base[i] = sent;
    }
  }
  memcpy(now, base, bytes);
  return alone;
}

// Calls use(address, bytes) for each run until it returns false. False then, and if `runs` is malformed.
template <typename Use>
bool ForEachRun(std::string_view runs, const Use& use) {
  while (!runs.empty()) {
    uint64_t head[2];
    if (runs.size() < sizeof(head)) return false;
    memcpy(head, runs.data(), sizeof(head));
    runs.remove_prefix(sizeof(head));
    if (head[1] > runs.size() || head[1] > kMostRuns) return false;
    const uint64_t padded = (head[1] + 7) & ~uint64_t{7};
    if (padded > runs.size() || head[0] + head[1] < head[0]) return false;
    if (!use(head[0], runs.substr(0, head[1]))) return false;
    runs.remove_prefix(padded);
  }
  return true;
}

}  // namespace cuda_remote::mirror

#endif  // CUDA_REMOTE_PROTO_MIRROR_MIRROR_H_
