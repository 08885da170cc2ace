// SPDX-License-Identifier: Apache-2.0
// Chunks of a process's GPU memory that are copied to free memory of the same GPU in the pause, and read when the job
// runs again (server/worker/memory/snapshot_memory.h). Copying inside the GPU takes a hundredth of the time that the
// bus does.
//
// What there is no room for is not taken; it has to be read in the pause. Not thread-safe.
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_GPU_SNAPSHOT_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_GPU_SNAPSHOT_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/gpu/memory_transfer.h"
#include "checkpoint/gpu/peeker.h"
#include "ckptfmt/types.h"

namespace cuda_remote::checkpoint {

class GpuSnapshot {
 public:
  // In the pause: copies what `skip` does not leave out, as far as there is room. Fails if the session is lost.
  absl::Status Take(ClientChannel* channel, const std::vector<ckptfmt::Region>& regions, const SkipChunk& skip);
  // Whether a chunk has been taken.
  bool Has(size_t region, uint64_t index) const { return region < taken_.size() && taken_[region][index]; }
  uint64_t bytes() const { return bytes_; }

  // When the job runs again: reads all into slots of `pool` and hands them to `use`. `shared`: null, or buffers that
  // nobody else uses meanwhile. The server frees what has been read.
  absl::Status Read(SideRequests* requests, SharedBuffers* shared, ChunkPool* pool, const UseChunk& use,
                    const Continue& go_on);

  // In the pause, of a checkpoint that has failed: frees all.
  void Drop(ClientChannel* channel);

 private:
  struct Chunk {
    size_t region = 0;
    uint64_t index = 0;
    size_t bytes = 0;
    uint64_t at = 0;   // in the snapshot
    size_t piece = 0;  // which of pieces_, from 1 on
  };

  std::vector<std::vector<bool>> taken_;  // by region and index
  std::vector<uint64_t> contexts_;        // of regions
  std::vector<Chunk> chunks_;
  std::vector<uint64_t> pieces_;  // their addresses
  uint64_t bytes_ = 0;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_GPU_SNAPSHOT_H_
