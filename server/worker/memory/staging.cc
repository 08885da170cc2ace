// SPDX-License-Identifier: Apache-2.0
#include "server/worker/memory/staging.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "proto/threads/mutex.h"

namespace cuda_remote::server {
namespace {

// Buffers of the pool's sizes that are kept when nobody uses them.
constexpr size_t kMaxKept = 48;
constexpr size_t kPage = 4096;
// For tests: what has been given back is overwritten at once, not only when it is used again.
const bool kPoison = getenv("CUDA_REMOTE_POISON") != nullptr;

size_t RoundUp(size_t bytes) { return (bytes + kPage - 1) & ~(kPage - 1); }

}  // namespace

StagingPool::~StagingPool() {
  for (auto* list : {&small_, &large_}) {
    for (Buffer& buffer : *list) munmap(buffer.data, buffer.bytes);
  }
  for (auto& [bytes, buffer] : unused_) munmap(buffer.data, bytes);
}

bool StagingPool::Make(size_t bytes, Buffer* buffer) {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return false;
  buffer->data = static_cast<char*>(data);
  buffer->bytes = bytes;
  buffer->registered = false;
  return true;
}

void StagingPool::Register(Buffer* buffer) {
  uint64_t epoch;
  {
    MutexLock lock(&mutex_);
    epoch = epoch_;
  }
  // Without a registration (no context, too much locked memory) the driver copies through buffers of its own.
  buffer->registered =
      driver_.cuMemHostRegister_v2(buffer->data, buffer->bytes, CU_MEMHOSTREGISTER_PORTABLE) == CUDA_SUCCESS;
  buffer->epoch = epoch;
}

bool StagingPool::FindFree(size_t bytes, Buffer* buffer) {
  MutexLock lock(&mutex_);
  auto* const list = bytes <= kSmall ? &small_ : bytes <= kLarge ? &large_ : nullptr;
  while (list != nullptr && !list->empty()) {
    *buffer = list->back();
    list->pop_back();
    if (!buffer->registered || buffer->epoch == epoch_) return true;
    KeepUnusedLocked(*buffer);
  }
  // One of at most about twice the size.
  for (auto it = unused_.lower_bound(bytes); it != unused_.end() && it->first / 2 <= bytes; ++it) {
    if (it->second.epoch != epoch_) continue;
    *buffer = it->second;
    unused_bytes_ -= it->first;
    unused_.erase(it);
    return true;
  }
  return false;
}

std::shared_ptr<char> StagingPool::Take(size_t bytes) {
  const size_t size = bytes <= kSmall ? kSmall : bytes <= kLarge ? kLarge : RoundUp(bytes);
  Buffer buffer;
  if (!FindFree(size, &buffer) && !Make(size, &buffer)) return nullptr;
  if (!buffer.registered) Register(&buffer);
  return std::shared_ptr<char>(buffer.data, [this, buffer](char*) { Release(buffer); });
}

void StagingPool::Release(Buffer buffer) {
  if (kPoison) memset(buffer.data, 0xdb, buffer.bytes);
  {
    MutexLock lock(&mutex_);
    auto* const list = buffer.bytes == kSmall ? &small_ : buffer.bytes == kLarge ? &large_ : nullptr;
    if (list != nullptr && list->size() < kMaxKept) {
      list->push_back(buffer);
      return;
    }
    if (buffer.registered) {
      KeepUnusedLocked(buffer);
      return;
    }
  }
  munmap(buffer.data, buffer.bytes);
}

void StagingPool::GiveBack() {
  std::multimap<size_t, Buffer> unused;
  {
    MutexLock lock(&mutex_);
    unused.swap(unused_);
    unused_bytes_ = 0;
  }
  for (const auto& [bytes, buffer] : unused) {
    driver_.cuMemHostUnregister(buffer.data);
    munmap(buffer.data, bytes);
  }
}

void StagingPool::KeepUnusedLocked(const Buffer& buffer) {
  unused_.emplace(buffer.bytes, buffer);
  unused_bytes_ += buffer.bytes;
}

void StagingPool::Prepare(size_t count) {
  std::vector<std::shared_ptr<char>> taken;
  for (size_t i = 0; i < count; ++i) taken.push_back(Take(kLarge));
  for (size_t i = 0; i < count; ++i) taken.push_back(Take(kSmall));
}

void StagingPool::ContextDies() {
  MutexLock lock(&mutex_);
  ++epoch_;
}

}  // namespace cuda_remote::server
