// SPDX-License-Identifier: Apache-2.0
// Copies of a process's GPU memory that are made in rounds while the job runs, so that the pause has less to read.
//
// Nothing watches what the job writes. The GPU hashes all memory, twice with a moment in between; chunks that did not
// change are copied, and each copy is hashed. In the pause the GPU hashes all memory once more: a copy with the same
// hash is what the memory holds, whatever was written, freed or allocated meanwhile. A copy that was torn has another
// hash.
//
// While the GPU hashes, the job's kernels have less of the memory's bandwidth. So the first two hashes are of a part of
// each chunk, a row of 8 KiB in 16: a change that they miss costs a copy in vain. Copies are compared by whole hashes.
//
// Memory that changes all the time is not copied, and rounds end when the next one would not leave less to read. Nor is
// memory copied that an earlier image has: this, too, the hashes tell. Copies lie in slots of the pool, or go to a
// CopySink.
//
// Not thread-safe.
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_PRECOPY_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_PRECOPY_H_

#include <cstdint>
#include <functional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/gpu/chunk_pool.h"
#include "checkpoint/gpu/peeker.h"
#include "checkpoint/gpu/shared_buffers.h"
#include "checkpoint/gpu/side_requests.h"
#include "ckptfmt/types.h"
#include "proto/base/clock.h"
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

// Where copies go instead of staying in slots of the pool.
class CopySink {
 public:
  using Ranges = std::vector<std::pair<uint64_t, uint64_t>>;  // [begin, end) of each

  virtual ~CopySink() = default;
  // The memory as of a look that was just made through `requests`: what Has answers from. The result are addresses for
  // which it keeps no copy any more. Fails if it can take no more copies.
  virtual absl::StatusOr<Ranges> Follow(SideRequests* requests) = 0;
  // Whether it takes copies of this region.
  virtual bool Has(const ckptfmt::Region& region) const = 0;
  // Takes a copy; the bytes are valid during the call only. False: it has none of these addresses now. Any thread.
  virtual bool Put(const Peeker::Chunk& chunk, const char* bytes) = 0;
  // It takes no more copies. Any thread.
  virtual bool is_lost() const = 0;
  // After a round: waits for what is on its way. As Follow.
  virtual absl::Status Finish() = 0;
};

class Precopy {
 public:
  // The pool must outlive it. `is_known`: null if all must be read.
  explicit Precopy(ChunkPool* pool, IsKnown is_known = nullptr) : pool_(pool), is_known_(std::move(is_known)) {}
  // Copies go to `sink`, which must outlive this; nobody else uses the pool, which has kSinkSlots at least.
  Precopy(ChunkPool* pool, CopySink* sink) : pool_(pool), is_known_(nullptr), sink_(sink) {}
  ~Precopy() { Clear(); }
  Precopy(const Precopy&) = delete;
  Precopy& operator=(const Precopy&) = delete;

  // Enough for all copies that are on their way to a sink.
  static constexpr uint64_t kSinkSlots = 64;

  // Has the GPU hash the memory, while the job runs, and so finds known_bytes(). Takes nothing of the pool. Fails if
  // the job cannot be asked.
  absl::Status Look(SideRequests* requests, const std::function<bool()>& cancelled);
  // How much of the memory is known, as of Look.
  uint64_t known_bytes() const { return known_bytes_; }
  // How much of the pool the rest takes at most; 0 if Look has not found it out.
  uint64_t pool_bytes() const { return pool_bytes_; }

  // The rounds, after Look. Takes of the pool until `most_bytes` of it are taken. `shared`: null, or buffers that
  // nobody else uses meanwhile. Fails if nothing more can be asked; the copies that there are may be used all the same.
  absl::Status Run(SideRequests* requests, SharedBuffers* shared, uint64_t most_bytes,
                   const std::function<bool()>& cancelled);

  // Without a sink. In the pause: keeps the copies that are right by these hashes of the regions (HashRegions).
  void Compare(const std::vector<ckptfmt::Region>& regions, const std::vector<std::vector<ChunkHash>>& hashes);
  // After that: the copy of a chunk, which is the caller's slot from then on; null if there is none.
  char* Take(const ckptfmt::Region& region, uint64_t index);

  // Of copies in the pool, now.
  uint64_t held_bytes() const;
  // Gives all slots back.
  void Clear();

  const PrecopyTimes& times() const { return times_; }

 private:
  struct Copy {
    char* slot = nullptr;  // null: the sink has it
    size_t bytes = 0;
    ChunkHash hash;
  };
  // What a look has found of a chunk.
  struct Seen {
    ChunkHash part;
    bool known = false;  // an earlier image has it
  };
  // Lists the memory as it is now, and hashes a part of it, or that and all. A failure with *refused: the job could be
  // asked, but it does not stand still.
  absl::Status Look(SideRequests* requests, const std::function<bool()>& cancelled, bool whole, uint32_t* refused);
  absl::Status Round(SideRequests* requests, SharedBuffers* shared, uint64_t most_bytes,
                     const std::vector<Peeker::Chunk>& wanted, const std::function<bool()>& cancelled);
  void Drop(uint64_t address);
  // After a look.
  absl::Status Follow(SideRequests* requests);
  bool MayCopy(const ckptfmt::Region& region, size_t bytes) const;

  ChunkPool* const pool_;
  const IsKnown is_known_;
  CopySink* const sink_ = nullptr;
  // As of the last look.
  Moment looked_;
  std::vector<ckptfmt::Region> regions_;
  std::vector<std::vector<ChunkHash>> parts_;
  std::vector<std::vector<ChunkHash>> hashes_;  // empty if only parts were hashed
  uint64_t known_bytes_ = 0, pool_bytes_ = 0;
  std::unordered_map<uint64_t, Copy> copies_;  // by address
  PrecopyTimes times_;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_PRECOPY_H_
