// SPDX-License-Identifier: Apache-2.0
#include "proto/ring/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <new>

namespace cuda_remote::ring {
namespace {

constexpr int kNeededSeals = F_SEAL_SHRINK | F_SEAL_GROW;

std::string Errno(const char* what) { return std::string(what) + ": " + strerror(errno); }

bool SaneCapacity(uint64_t capacity) {
  return capacity >= kMinCapacity && capacity <= kMaxCapacity && (capacity & (capacity - 1)) == 0;
}

}  // namespace

std::unique_ptr<RingMemory> RingMemory::Create(std::string* error) { return Create(kDefaultCapacity, error); }

std::unique_ptr<RingMemory> RingMemory::Create(const uint64_t capacity[kRingCount], std::string* error) {
  std::unique_ptr<RingMemory> memory(new (std::nothrow) RingMemory);
  if (!memory) {
    *error = "out of memory";
    return nullptr;
  }
  uint64_t total = kPageBytes;
  for (int i = 0; i < kRingCount; ++i) {
    if (!SaneCapacity(capacity[i])) {
      *error = "a ring's capacity must be a power of two between 64 KiB and 1 GiB";
      return nullptr;
    }
    memory->capacity_[i] = capacity[i];
    total += capacity[i];
  }
  memory->fd_.Reset(memfd_create("cuda-remote-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory->fd_.ok()) {
    *error = Errno("cannot make shared memory (memfd_create)");
    return nullptr;
  }
  if (ftruncate(memory->fd_.get(), off_t(total)) != 0 ||
      fcntl(memory->fd_.get(), F_ADD_SEALS, kNeededSeals | F_SEAL_SEAL) != 0) {
    *error = Errno("cannot size shared memory");
    return nullptr;
  }
  if (!memory->MapAll(error)) return nullptr;
  MemoryHeader* const header = memory->header_;
  header->version = kMemoryVersion;
  header->header_bytes = kPageBytes;
  for (int i = 0; i < kRingCount; ++i) header->capacity[i] = capacity[i];
  header->magic = kMemoryMagic;
  return memory;
}

std::unique_ptr<RingMemory> RingMemory::Map(int fd, std::string* error) {
  std::unique_ptr<RingMemory> memory(new (std::nothrow) RingMemory);
  if (!memory) {
    close(fd);
    *error = "out of memory";
    return nullptr;
  }
  memory->fd_.Reset(fd);
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kNeededSeals) != kNeededSeals) {
    *error = "the server's shared memory is not sealed against shrinking";
    return nullptr;
  }
  struct stat status;
  MemoryHeader header;
  if (fstat(fd, &status) != 0 || pread(fd, &header, sizeof(header), 0) != ssize_t(sizeof(header))) {
    *error = "the server's shared memory has no header";
    return nullptr;
  }
  if (header.magic != kMemoryMagic) {
    *error = "the server's shared memory does not hold rings";
    return nullptr;
  }
  if (header.version != kMemoryVersion || header.header_bytes != kPageBytes) {
    *error = "the server's rings have layout version " + std::to_string(header.version) + ", this side speaks " +
             std::to_string(kMemoryVersion) + "; install the same release on both sides";
    return nullptr;
  }
  uint64_t total = kPageBytes;
  for (int i = 0; i < kRingCount; ++i) {
    if (!SaneCapacity(header.capacity[i])) {
      *error = "the server's shared memory names an impossible ring size";
      return nullptr;
    }
    memory->capacity_[i] = header.capacity[i];
    total += header.capacity[i];
  }
  if (uint64_t(status.st_size) != total) {
    *error = "the server's shared memory has the wrong size";
    return nullptr;
  }
  if (!memory->MapAll(error)) return nullptr;
  return memory;
}

bool RingMemory::MapAll(std::string* error) {
  mapped_bytes_ = kPageBytes;
  for (uint64_t capacity : capacity_) mapped_bytes_ += 2 * capacity;
  void* const reserved = mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) {
    *error = Errno("cannot reserve addresses for the rings");
    mapped_bytes_ = 0;
    return false;
  }
  base_ = static_cast<char*>(reserved);
  char* at = base_;
  off_t offset = 0;
  auto map = [&](size_t bytes) {
    const bool ok = mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_.get(), offset) != MAP_FAILED;
    at += bytes;
    return ok;
  };
  bool ok = map(kPageBytes);
  offset = kPageBytes;
  for (int i = 0; ok && i < kRingCount; ++i) {
    data_[i] = at;
    ok = map(capacity_[i]) && map(capacity_[i]);
    offset += off_t(capacity_[i]);
  }
  if (!ok) {
    *error = Errno("cannot map the rings");
    return false;
  }
  // A forked child has no session; it must not keep one side's view of the rings alive.
  madvise(base_, mapped_bytes_, MADV_DONTFORK);
  header_ = reinterpret_cast<MemoryHeader*>(base_);
  return true;
}

void RingMemory::CloseInForkedChild() {
  fd_.Close();
  base_ = nullptr;
}

RingMemory::~RingMemory() {
  if (base_) munmap(base_, mapped_bytes_);
}

}  // namespace cuda_remote::ring
