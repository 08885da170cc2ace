// SPDX-License-Identifier: Apache-2.0
// Host memory in slots of one chunk, touched beforehand. Data that is read from a GPU waits there for the threads that
// write it into the image, so a job need not stand still until they are done.
//
// Chunks of half a slot or less are packed: they lie behind each other in one slot, in the order in which they are
// taken. Such a slot can be used again when all of them have been given back.
//
// Touching memory for the first time takes as long as copying to it. So Prepare does that before the job stops, with
// huge pages and several threads. When all prepared slots are in use, further slots are used untouched, up to the
// limit; then Take waits until one is given back. Children of fork do not get the memory.
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_CHUNK_POOL_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_CHUNK_POOL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "proto/threads/mutex.h"

namespace cuda_remote::checkpoint {

class ChunkPool {
 public:
  static constexpr size_t kSlotBytes = 2u << 20;
  static constexpr size_t kLeastSlots = 8;

  // A pool of at most `limit` bytes, but kLeastSlots at least. Takes no memory yet.
  explicit ChunkPool(uint64_t limit);
  // All slots must have been given back before.
  ~ChunkPool();
  ChunkPool(const ChunkPool&) = delete;
  ChunkPool& operator=(const ChunkPool&) = delete;

  // False if the system has no addresses for it; then nothing else may be called.
  bool ok() const { return memory_ != nullptr; }
  uint64_t limit() const { return uint64_t(slots_) * kSlotBytes; }

  // Touches `bytes` of memory, at most the limit, with several threads. Stops when `cancelled` returns true. Call it
  // before the first Take.
  void Prepare(uint64_t bytes, const std::function<bool()>& cancelled);
  uint64_t prepared() const { return prepared_ * kSlotBytes; }
  // Of the limit, what nobody has taken now. Any thread.
  uint64_t free_bytes() const;

  // How much of a pool chunks of these sizes take at most, in whatever order they are taken.
  static uint64_t MostTaken(const std::vector<size_t>& chunks);

  // Memory for a chunk of 1 to kSlotBytes bytes: of a slot that was used or prepared if there is one. Any thread.
  char* Take(size_t bytes = kSlotBytes);  // waits until there is some
  // Null if there is none, or if then more than `most_taken` bytes of the pool were taken.
  char* TryTake(size_t bytes = kSlotBytes, uint64_t most_taken = UINT64_MAX);
  void Give(char* memory);

 private:
  size_t NumberOf(const char* memory) const { return size_t(memory - memory_) / kSlotBytes; }  // of its slot
  char* TakeLocked(size_t bytes, uint64_t most_taken) CR_REQUIRES(mutex_);

  size_t slots_;
  void* mapping_ = nullptr;
  size_t mapped_bytes_ = 0;
  char* memory_ = nullptr;  // the first slot
  size_t prepared_ = 0;

  mutable Mutex mutex_;
  Condition given_;
  std::vector<char*> ready_ CR_GUARDED_BY(mutex_);      // the last one was used last
  size_t untouched_ CR_GUARDED_BY(mutex_) = 0;          // slots from this one on have never been used
  std::vector<uint32_t> packed_ CR_GUARDED_BY(mutex_);  // by slot: chunks that are packed there now
  char* open_ CR_GUARDED_BY(mutex_) = nullptr;          // the slot where the next one may go; it has some
  size_t open_used_ CR_GUARDED_BY(mutex_) = 0;          // bytes of it
};

// How many bytes a pool may have on this machine: half of the memory that is available, also in the control groups of
// this process.
uint64_t SpareMemory();

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_CHUNK_POOL_H_
