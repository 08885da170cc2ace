// SPDX-License-Identifier: Apache-2.0
#include "softgpu/core/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <iterator>
#include <map>

#include "proto/threads/mutex.h"

namespace cuda_remote::softgpu {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kAlignment = 512;
// Pieces of less than this are cut out of chunks; many mappings would meet the system's limit of them.
constexpr uint64_t kSmall = 1 << 20;
constexpr uint64_t kChunk = 4 << 20;

struct File {
  int fd = -1;
  uint64_t next = 0;
};

// A mapped piece of a device's file that small pieces are cut out of.
struct Chunk {
  FileRange range;
  std::map<uint64_t, uint64_t> free;  // address -> bytes, no two side by side
};

struct Files {
  Mutex mutex;
  std::map<int, File> files CR_GUARDED_BY(mutex);
  std::map<int, std::map<uint64_t, Chunk>> chunks CR_GUARDED_BY(mutex);  // by device and address
};

Files& All() {
  static auto* files = new Files;
  return *files;
}

uint64_t RoundUp(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }

bool TakeLocked(int device, uint64_t bytes, FileRange* range) CR_REQUIRES(All().mutex) {
  File& file = All().files[device];
  if (file.fd < 0) {
    file.fd = memfd_create("softgpu-memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    // Another process must not be able to cut it short.
    if (file.fd >= 0) fcntl(file.fd, F_ADD_SEALS, F_SEAL_SHRINK);
  }
  if (file.fd < 0 || ftruncate(file.fd, static_cast<off_t>(file.next + bytes)) != 0) return false;
  *range = {file.fd, file.next};
  file.next += bytes;
  return true;
}

void* Map(const FileRange& range, uint64_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, range.fd,
                            static_cast<off_t>(range.offset));
  return memory == MAP_FAILED ? nullptr : memory;
}

// Cuts `bytes` out of a chunk that has them.
void* Cut(std::map<uint64_t, Chunk>* chunks, uint64_t bytes, FileRange* range) {
  for (auto& [begin, chunk] : *chunks) {
    for (auto it = chunk.free.begin(); it != chunk.free.end(); ++it) {
      if (it->second < bytes) continue;
      const uint64_t address = it->first, rest = it->second - bytes;
      chunk.free.erase(it);
      if (rest != 0) chunk.free[address + bytes] = rest;
      *range = {chunk.range.fd, chunk.range.offset + (address - begin)};
      return reinterpret_cast<void*>(address);
    }
  }
  return nullptr;
}

}  // namespace

bool TakeFileRange(int device, uint64_t bytes, FileRange* range) {
  MutexLock lock(&All().mutex);
  return TakeLocked(device, bytes, range);
}

void GiveFileRange(const FileRange& range, uint64_t bytes) {
  fallocate(range.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(range.offset),
            static_cast<off_t>(bytes));
}

void* MapDeviceMemory(int device, uint64_t bytes, FileRange* range) {
  MutexLock lock(&All().mutex);
  if (bytes >= kSmall) {
    bytes = RoundUp(bytes, kPage);
    if (!TakeLocked(device, bytes, range)) return nullptr;
    void* const memory = Map(*range, bytes);
    if (memory == nullptr) GiveFileRange(*range, bytes);
    return memory;
  }
  bytes = RoundUp(bytes, kAlignment);
  auto& chunks = All().chunks[device];
  if (void* const memory = Cut(&chunks, bytes, range)) return memory;
  Chunk chunk;
  if (!TakeLocked(device, kChunk, &chunk.range)) return nullptr;
  void* const memory = Map(chunk.range, kChunk);
  if (memory == nullptr) return nullptr;
  const auto begin = reinterpret_cast<uint64_t>(memory);
  chunk.free[begin] = kChunk;
  chunks[begin] = std::move(chunk);
  return Cut(&chunks, bytes, range);
}

void UnmapDeviceMemory(int device, void* memory, uint64_t bytes, const FileRange& range) {
  if (bytes >= kSmall) {
    munmap(memory, RoundUp(bytes, kPage));
    GiveFileRange(range, RoundUp(bytes, kPage));
    return;
  }
  bytes = RoundUp(bytes, kAlignment);
  MutexLock lock(&All().mutex);
  auto& chunks = All().chunks[device];
  auto address = reinterpret_cast<uint64_t>(memory);
  const auto it = std::prev(chunks.upper_bound(address));
  auto& free = it->second.free;
  const auto after = free.find(address + bytes);
  if (after != free.end()) {
    bytes += after->second;
    free.erase(after);
  }
  const auto next = free.lower_bound(address);
  if (next != free.begin() && std::prev(next)->first + std::prev(next)->second == address) {
    address = std::prev(next)->first;
    bytes += std::prev(next)->second;
  }
  free[address] = bytes;
  if (bytes != kChunk) return;
  munmap(reinterpret_cast<void*>(it->first), kChunk);
  GiveFileRange(it->second.range, kChunk);
  chunks.erase(it);
}

}  // namespace cuda_remote::softgpu
