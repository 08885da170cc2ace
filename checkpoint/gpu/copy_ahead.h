// SPDX-License-Identifier: Apache-2.0
// A move over the network copies GPU memory in rounds while the job runs (precopy.h), so that the pause copies only
// what has changed.
//
// The new session makes memory at the addresses of the old one's blocks, and the rounds fill it. The replay's
// allocations at these addresses get it with its contents; what the job has freed by then is dropped. In the pause,
// when the replay is done, both GPUs hash this memory: a chunk with the same hash on both sides need not be copied,
// however it came to be there. So a copy that was torn or lost, and memory that the job freed and allocated again, are
// copied like everything else that differs.
//
// Only what lies behind cuMemAlloc and its kin goes this way. Memory that the new server does not give ahead is copied
// in the pause. Nothing of the job's depends on it before the move is decided: when the new session ends, all of it
// goes.
//
// Not thread-safe, except Put.
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_COPY_AHEAD_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_COPY_AHEAD_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/gpu/chunk_pool.h"
#include "checkpoint/gpu/hand_over.h"
#include "checkpoint/gpu/precopy.h"
#include "checkpoint/gpu/shared_buffers.h"
#include "checkpoint/gpu/side_requests.h"
#include "ckptfmt/types.h"
#include "proto/channel/client_channel.h"
#include "proto/codec/operations.gen.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::checkpoint {

class CopyAhead final : public CopySink {
 public:
  // `to`: the new session, before its replay. It must outlive this, and so must the pool, which has
  // Precopy::kSinkSlots at least.
  CopyAhead(ClientChannel* to, ChunkPool* pool) : to_(to), copies_(pool, this) {}
  ~CopyAhead() override;
  CopyAhead(const CopyAhead&) = delete;
  CopyAhead& operator=(const CopyAhead&) = delete;

  // Whether the two sessions are on different machines, as far as this process knows. On one machine there are faster
  // ways (hand_over.h, direct_copy.h).
  static bool Helps(bool from_shares_memory, const ClientChannel& to) {
    return !from_shares_memory || !to.welcome().shared_memory;
  }

  // The rounds, through requests beside the job's calls; later more of them. `shared`: null, or buffers that nobody
  // else uses meanwhile, nor the pool. `progress`: null, or called when more was sent. Fails if nothing more can be
  // asked, or if is_lost(); what is there may be used all the same in the first case.
  absl::Status Run(SideRequests* from, SharedBuffers* shared, const std::function<void()>& progress,
                   const std::function<bool()>& cancelled);
  // The new session is of no use any more.
  bool is_lost() const override { return lost_; }
  // It has memory that only the end of a replay makes the job's (KeepBlocks), or that goes.
  bool begun() const { return begun_; }

  // What was sent in all rounds so far. Any thread.
  uint64_t put_bytes() const { return put_bytes_.load(std::memory_order_relaxed); }

  // In the pause, before the replay: drops what the job has freed. Fails if a session is lost.
  absl::Status DropFreed(ClientChannel* from);
  // Whether all of the region has memory there now.
  bool Has(const ckptfmt::Region& region) const override { return blocks_.Have(region); }

  // In the pause, after the replay: finds out which chunks of the old session's regions are there. Fails if a session
  // is lost.
  absl::Status Compare(ClientChannel* from, const std::vector<ckptfmt::Region>& regions);
  // After that; the numbers are those of Compare's regions.
  bool IsThere(size_t region, uint64_t index) const {
    return region < there_.size() && index < there_[region].size() && there_[region][index];
  }

  // kept_bytes: as of Compare.
  PrecopyTimes times() const;

  // CopySink.
  absl::StatusOr<Ranges> Follow(SideRequests* requests) override;
  bool Put(const Peeker::Chunk& chunk, const char* bytes) override;
  absl::Status Finish() override;

 private:
  using Blocks = std::map<uint64_t, std::pair<uint64_t, int32_t>>;  // address -> bytes, device
  static absl::StatusOr<Blocks> List(SideRequests* requests);
  absl::Status Stage(const wire::OpStageBlocks_Request& request, const Blocks& wanted, Ranges* lost);
  // Drops what is not among `now`.
  void Outdated(const Blocks& now, wire::OpStageBlocks_Request* request, Ranges* lost);
  void Await(uint64_t number);
  void NoteFailure(const absl::Status& why);
  void Index();

  ClientChannel* const to_;
  bool begun_ = false;
  Blocks staged_;
  SharedBlocks blocks_;  // the same
  std::vector<std::vector<bool>> there_;
  uint64_t kept_bytes_ = 0;
  std::function<void()> progress_;

  Mutex mutex_;  // also of calls of progress_
  std::deque<uint64_t> open_ CR_GUARDED_BY(mutex_);
  std::atomic<uint64_t> put_bytes_{0};
  absl::Status problem_ CR_GUARDED_BY(mutex_);
  std::atomic<bool> lost_{false};

  Precopy copies_;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_COPY_AHEAD_H_
