// SPDX-License-Identifier: Apache-2.0
// Copies of a process's GPU memory that are made in rounds while the job runs, so that the pause has less to read.
//
// Nothing watches what the job writes. The GPU hashes all memory, twice with a moment in between; chunks that did not
// change are copied, and each copy is hashed. In the pause the GPU hashes all memory once more: a copy with the same
// hash is what the memory holds, whatever was written, freed or allocated meanwhile. A copy that was torn has another
// hash.
//
// Memory that changes all the time is not copied, and rounds end when the next one would not leave less to read. Copies
// lie in slots of the pool.
//
// Not thread-safe.
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_PRECOPY_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_PRECOPY_H_

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/gpu/chunk_pool.h"
#include "checkpoint/gpu/peeker.h"
#include "checkpoint/gpu/shared_buffers.h"
#include "checkpoint/gpu/side_requests.h"
#include "ckptfmt/types.h"
#include "proto/chunkhash/chunk_hash.h"

namespace cuda_remote::checkpoint {

struct PrecopyTimes {
  uint64_t rounds = 0;
  uint64_t copied_bytes = 0;  // in all rounds
  uint64_t kept_bytes = 0;    // of them, still right in the pause
  double seconds = 0;
  double comparing = 0;  // in the pause
  void Add(const PrecopyTimes& other);
};

class Precopy {
 public:
  // Of the pool, which must outlive it, no more than `most_bytes` are taken.
  Precopy(ChunkPool* pool, uint64_t most_bytes) : pool_(pool), most_slots_(most_bytes / ChunkPool::kSlotBytes) {}
  ~Precopy() { Clear(); }
  Precopy(const Precopy&) = delete;
  Precopy& operator=(const Precopy&) = delete;

  // The rounds, while the job runs. `shared`: null, or buffers that nobody else uses meanwhile. False and *error if
  // nothing more can be asked; the copies that there are may be used all the same.
  bool Run(SideRequests* requests, SharedBuffers* shared, const std::function<bool()>& cancelled, std::string* error);

  // In the pause: keeps the copies that are right. Without an answer none is.
  bool Compare(SideRequests* requests, const std::vector<ckptfmt::Region>& regions, std::string* error);
  // After that: the copy of a chunk, which is the caller's slot from then on; null if there is none.
  char* Take(const ckptfmt::Region& region, uint64_t index);

  // Of the pool, now.
  uint64_t held_bytes() const { return copies_.size() * ChunkPool::kSlotBytes; }
  // Gives all slots back.
  void Clear();

  const PrecopyTimes& times() const { return times_; }

 private:
  struct Copy {
    char* slot = nullptr;
    size_t bytes = 0;
    ChunkHash hash;
  };
  bool Round(SideRequests* requests, SharedBuffers* shared, const std::vector<Peeker::Chunk>& wanted,
             const std::function<bool()>& cancelled, std::string* error);
  void Drop(uint64_t address);

  ChunkPool* const pool_;
  const size_t most_slots_;
  std::unordered_map<uint64_t, Copy> copies_;  // by address
  PrecopyTimes times_;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_PRECOPY_H_
