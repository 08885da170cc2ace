// SPDX-License-Identifier: Apache-2.0
#include "proto/ring/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <new>
#include <utility>

#include "proto/base/status_macros.h"

namespace cuda_remote::ring {
namespace {

constexpr int kNeededSeals = F_SEAL_SHRINK | F_SEAL_GROW;

bool SaneCapacity(uint64_t capacity) {
  return capacity >= kMinCapacity && capacity <= kMaxCapacity && (capacity & (capacity - 1)) == 0;
}

}  // namespace

StatusOr<std::unique_ptr<RingMemory>> RingMemory::Create() { return Create(kDefaultCapacity); }

StatusOr<std::unique_ptr<RingMemory>> RingMemory::Create(const uint64_t capacity[kRingCount]) {
  std::unique_ptr<RingMemory> memory(new (std::nothrow) RingMemory);
  if (!memory) return Error("out of memory");
  uint64_t total = kPageBytes;
  for (int i = 0; i < kRingCount; ++i) {
    if (!SaneCapacity(capacity[i])) return Error("a ring's capacity must be a power of two between 64 KiB and 1 GiB");
    memory->capacity_[i] = capacity[i];
    total += capacity[i];
  }
  memory->fd_.Reset(memfd_create("cuda-remote-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory->fd_.ok()) return ErrnoError("cannot make shared memory (memfd_create)");
  if (ftruncate(memory->fd_.get(), off_t(total)) != 0 ||
      fcntl(memory->fd_.get(), F_ADD_SEALS, kNeededSeals | F_SEAL_SEAL) != 0) {
    return ErrnoError("cannot size shared memory");
  }
  CR_RETURN_IF_ERROR(memory->MapAll());
  MemoryHeader* const header = memory->header_;
  header->version = kMemoryVersion;
  header->header_bytes = kPageBytes;
  for (int i = 0; i < kRingCount; ++i) header->capacity[i] = capacity[i];
  header->magic = kMemoryMagic;
  return memory;
}

StatusOr<std::unique_ptr<RingMemory>> RingMemory::Map(UniqueFd fd) {
  std::unique_ptr<RingMemory> memory(new (std::nothrow) RingMemory);
  if (!memory) return Error("out of memory");
  memory->fd_ = std::move(fd);
  const int seals = fcntl(memory->fd(), F_GET_SEALS);
  if (seals < 0 || (seals & kNeededSeals) != kNeededSeals) {
    return Error("the server's shared memory is not sealed against shrinking");
  }
  struct stat facts;
  MemoryHeader header;
  if (fstat(memory->fd(), &facts) != 0 || pread(memory->fd(), &header, sizeof(header), 0) != ssize_t(sizeof(header))) {
    return Error("the server's shared memory has no header");
  }
  if (header.magic != kMemoryMagic) return Error("the server's shared memory does not hold rings");
  if (header.version != kMemoryVersion || header.header_bytes != kPageBytes) {
    return Error("the server's rings have layout version " + std::to_string(header.version) + ", this side speaks " +
                 std::to_string(kMemoryVersion) + "; install the same release on both sides");
  }
  uint64_t total = kPageBytes;
  for (int i = 0; i < kRingCount; ++i) {
    if (!SaneCapacity(header.capacity[i])) return Error("the server's shared memory names an impossible ring size");
    memory->capacity_[i] = header.capacity[i];
    total += header.capacity[i];
  }
  if (uint64_t(facts.st_size) != total) return Error("the server's shared memory has the wrong size");
  CR_RETURN_IF_ERROR(memory->MapAll());
  return memory;
}

Status RingMemory::MapAll() {
  mapped_bytes_ = kPageBytes;
  for (uint64_t capacity : capacity_) mapped_bytes_ += 2 * capacity;
  void* const reserved = mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) {
    mapped_bytes_ = 0;
    return ErrnoError("cannot reserve addresses for the rings");
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
  if (!ok) return ErrnoError("cannot map the rings");
  // A forked child has no session; it must not keep one side's view of the rings alive.
  madvise(base_, mapped_bytes_, MADV_DONTFORK);
  header_ = reinterpret_cast<MemoryHeader*>(base_);
  return OkStatus();
}

void RingMemory::CloseInForkedChild() {
  fd_.Close();
  base_ = nullptr;
}

RingMemory::~RingMemory() {
  if (base_) munmap(base_, mapped_bytes_);
}

}  // namespace cuda_remote::ring
