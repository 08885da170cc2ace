// SPDX-License-Identifier: Apache-2.0
// Copies of a process's GPU memory that are made in rounds while the job runs, so that the pause has less to read.
//
// Nothing watches what the job writes. The GPU hashes all memory, twice with a moment in between; chunks that did not
// change are copied, and each copy is hashed. In the pause the GPU hashes all memory once more: a copy with the same
// hash is what the memory holds, whatever was written, freed or allocated meanwhile. A copy that was torn has another
// hash.
//
// Memory that changes all the time is not copied, and rounds end when the next one would not leave less to read. Nor is
// memory copied that an earlier image has: this, too, the hashes tell. Copies lie in slots of the pool.
//
// Not thread-safe.
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_PRECOPY_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_PRECOPY_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <utility>
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
  double seconds = 0;         // of all looks and rounds
  void Add(const PrecopyTimes& other);
};

// Whether a chunk with this hash need not be read at all.
using IsKnown = std::function<bool(const ckptfmt::Region& region, uint64_t index, const ChunkHash& hash)>;

class Precopy {
 public:
  // The pool must outlive it. `is_known`: null if all must be read.
  explicit Precopy(ChunkPool* pool, IsKnown is_known = nullptr) : pool_(pool), is_known_(std::move(is_known)) {}
  ~Precopy() { Clear(); }
  Precopy(const Precopy&) = delete;
  Precopy& operator=(const Precopy&) = delete;

  // Has the GPU hash the memory, while the job runs, and so finds known_bytes(). Takes nothing of the pool. False and
  // *error if the job cannot be asked.
  bool Look(SideRequests* requests, const std::function<bool()>& cancelled, std::string* error);
  // How much of the memory is known, as of Look.
  uint64_t known_bytes() const { return known_bytes_; }

  // The rounds, after Look. Takes no more of the pool than `most_bytes`. `shared`: null, or buffers that nobody else
  // uses meanwhile. False and *error if nothing more can be asked; the copies that there are may be used all the same.
  bool Run(SideRequests* requests, SharedBuffers* shared, uint64_t most_bytes, const std::function<bool()>& cancelled,
           std::string* error);

  // In the pause: keeps the copies that are right by these hashes of the regions (HashRegions).
  void Compare(const std::vector<ckptfmt::Region>& regions, const std::vector<std::vector<ChunkHash>>& hashes);
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
  // Lists and hashes the memory as it is now. False with *refused: the job could be asked, but it does not stand still.
  bool Look(SideRequests* requests, const std::function<bool()>& cancelled, uint32_t* refused, std::string* error);
  bool Round(SideRequests* requests, SharedBuffers* shared, size_t most_slots, const std::vector<Peeker::Chunk>& wanted,
             const std::function<bool()>& cancelled, std::string* error);
  void Drop(uint64_t address);

  ChunkPool* const pool_;
  const IsKnown is_known_;
  // As of the last look.
  std::chrono::steady_clock::time_point looked_;
  std::vector<ckptfmt::Region> regions_;
  std::vector<std::vector<ChunkHash>> hashes_;
  uint64_t known_bytes_ = 0;
  std::unordered_map<uint64_t, Copy> copies_;  // by address
  PrecopyTimes times_;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_PRECOPY_H_
