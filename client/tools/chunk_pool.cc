#include "client/tools/chunk_pool.h"

#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

#include "client/tools/parallel.h"

namespace cuda_remote::client::tools {
namespace {

constexpr size_t kPage = 4096;
// Touching does not get much faster beyond this.
constexpr unsigned kMostThreads = 16;

std::string Contents(const std::string& path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// The number after `key` in a text of "key number" lines; `none` if it is not there.
uint64_t NumberAfter(const std::string& text, const std::string& key, uint64_t none) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name;
    uint64_t number;
    if (words >> name && name == key && words >> number) return number;
  }
  return none;
}

// A file with one number; "max" and nothing at all are `none`.
uint64_t NumberIn(const std::string& path, uint64_t none) {
  std::istringstream text(Contents(path));
  uint64_t number;
  return text >> number ? number : none;
}

}  // namespace

ChunkPool::ChunkPool(uint64_t limit) : slots_(std::max<size_t>(size_t(limit / kSlotBytes), kLeastSlots)) {
  // One more, so that the first slot can begin where a huge page does.
  mapped_bytes_ = (slots_ + 1) * kSlotBytes;
  mapping_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    return;
  }
  const uintptr_t start = reinterpret_cast<uintptr_t>(mapping_);
  memory_ = reinterpret_cast<char*>((start + kSlotBytes - 1) & ~uintptr_t(kSlotBytes - 1));
  // Both are for speed only.
  madvise(mapping_, mapped_bytes_, MADV_HUGEPAGE);
  madvise(mapping_, mapped_bytes_, MADV_DONTFORK);
  ready_.reserve(slots_);  // giving back must not fail
}

ChunkPool::~ChunkPool() {
  if (mapping_) munmap(mapping_, mapped_bytes_);
}

void ChunkPool::Prepare(uint64_t bytes, const std::function<bool()>& cancelled) {
  const size_t count = size_t(std::min<uint64_t>(slots_, (bytes + kSlotBytes - 1) / kSlotBytes));
  const size_t begun = InParallel(count, kMostThreads, [&](size_t slot, bool here) {
    // Pages of any size: huge ones may have been refused.
    volatile char* const start = memory_ + slot * kSlotBytes;
    for (size_t at = 0; at < kSlotBytes; at += kPage) start[at] = 0;
    return !(here && cancelled && cancelled());
  });
  std::lock_guard<std::mutex> lock(mutex_);
  prepared_ = untouched_ = begun;
  for (size_t slot = prepared_; slot > 0; --slot) ready_.push_back(memory_ + (slot - 1) * kSlotBytes);
}

char* ChunkPool::TakeLocked() {
  if (!ready_.empty()) {
    char* const slot = ready_.back();
    ready_.pop_back();
    return slot;
  }
  return untouched_ < slots_ ? memory_ + untouched_++ * kSlotBytes : nullptr;
}

char* ChunkPool::TryTake() {
  std::lock_guard<std::mutex> lock(mutex_);
  return TakeLocked();
}

char* ChunkPool::Take() {
  std::unique_lock<std::mutex> lock(mutex_);
  char* slot = nullptr;
  given_.wait(lock, [&] { return (slot = TakeLocked()) != nullptr; });
  return slot;
}

void ChunkPool::Give(char* slot) {
  // Notified under the lock: whoever has the last slot back may destroy the pool.
  std::lock_guard<std::mutex> lock(mutex_);
  ready_.push_back(slot);
  given_.notify_one();
}

uint64_t AvailableIn(const std::string& meminfo) {
  const uint64_t kib = NumberAfter(meminfo, "MemAvailable:", UINT64_MAX);
  return kib == UINT64_MAX ? kib : kib * 1024;
}

uint64_t LeftInGroup(std::string folder, const std::string& root, bool old_names) {
  const char* const limit_name = old_names ? "/memory.limit_in_bytes" : "/memory.max";
  const char* const used_name = old_names ? "/memory.usage_in_bytes" : "/memory.current";
  const char* const cache_name = old_names ? "total_inactive_file" : "inactive_file";
  uint64_t left = UINT64_MAX;
  while (folder.size() >= root.size()) {
    const uint64_t limit = NumberIn(folder + limit_name, UINT64_MAX);
    // Version 1 writes "no limit" as a number near 2^63.
    if (limit < uint64_t{1} << 62) {
      const uint64_t used = NumberIn(folder + used_name, 0);
      const uint64_t cache = NumberAfter(Contents(folder + "/memory.stat"), cache_name, 0);
      const uint64_t needed = used > cache ? used - cache : 0;
      left = std::min(left, limit > needed ? limit - needed : 0);
    }
    const size_t slash = folder.rfind('/');
    if (slash == std::string::npos || slash == 0) break;
    folder.resize(slash);
  }
  return left;
}

uint64_t SpareMemory() {
  uint64_t left = AvailableIn(Contents("/proc/meminfo"));
  // "0::/a/b" (version 2) or "5:memory:/a/b".
  std::istringstream groups(Contents("/proc/self/cgroup"));
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    if (path == "/") path.clear();
    if (controllers.empty()) left = std::min(left, LeftInGroup("/sys/fs/cgroup" + path, "/sys/fs/cgroup", false));
    if (controllers == "memory") {
      left = std::min(left, LeftInGroup("/sys/fs/cgroup/memory" + path, "/sys/fs/cgroup/memory", true));
    }
  }
  // A kernel that says nothing gets the least that works.
  return left == UINT64_MAX ? 0 : left / 2;
}

}  // namespace cuda_remote::client::tools
