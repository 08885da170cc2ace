// SPDX-License-Identifier: Apache-2.0
#include "proto/mirror/mirror.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <thread>

namespace cuda_remote::mirror {
namespace {

constexpr uint64_t kBlock = 4096;
// A run's head costs as much as so many equal bytes.
constexpr uint64_t kGap = 16;
// Longest run, so that one never fills a message by itself.
constexpr uint64_t kLongest = 256 << 10;

// After so much without a difference, helpers are worth their start, if there is so much left.
constexpr uint64_t kAlone = 4 << 20, kWorthHelp = 16 << 20;
// What one of them looks at in one go.
constexpr uint64_t kPiece = 1 << 20;
constexpr int kMostHelpers = 3;

// A part of the processors: the others are the program's.
int Helpers() {
  static const int helpers = std::clamp(int(std::thread::hardware_concurrency()) / 4, 0, kMostHelpers);
  return helpers;
}

// Several threads look for the first piece that differs.
class Search {
 public:
  Search(const char* now, const char* base, uint64_t at, uint64_t bytes)
      : now_(now), base_(base), bytes_(bytes), next_(at), found_(bytes) {}

  // Where that piece begins; `bytes` if there is none.
  uint64_t Run(int helpers) {
    pthread_t threads[kMostHelpers];
    int started = 0;
    // The application's signals are for its own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (started < std::min(helpers, kMostHelpers) && pthread_create(&threads[started], nullptr, &Help, this) == 0) {
      ++started;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    Look();
    for (int i = 0; i < started; ++i) pthread_join(threads[i], nullptr);
    return found_;
  }

 private:
  static void* Help(void* search) {
    static_cast<Search*>(search)->Look();
    return nullptr;
  }

  // Pieces are taken in their order, so all before the first one that differs are looked at by somebody.
  void Look() {
    while (true) {
      const uint64_t at = next_.fetch_add(kPiece);
      uint64_t found = found_;
      if (at >= found) return;
      if (memcmp(now_ + at, base_ + at, std::min(kPiece, bytes_ - at)) == 0) continue;
      while (at < found && !found_.compare_exchange_weak(found, at)) {
      }
      return;
    }
  }

  const char* const now_;
  const char* const base_;
  const uint64_t bytes_;
  std::atomic<uint64_t> next_, found_;
};

}  // namespace

uint64_t FirstDifference(const char* now, const char* base, uint64_t at, uint64_t bytes, int helpers) {
  uint64_t alone = at + kAlone;
  while (at < bytes) {
    if (helpers > 0 && at >= alone && bytes - at >= kWorthHelp) {
      at = Search(now, base, at, bytes).Run(helpers);
      alone = at + kAlone;
      continue;
    }
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
    const uint64_t start = FirstDifference(now, base, *at, bytes, Helpers());
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
