// SPDX-License-Identifier: Apache-2.0
// GPU memory that goes from one worker to another on the same GPU without a copy: the new worker maps the old one's
// physical memory at the same addresses. Until one of them ends, both have it: the old worker can go on as if nothing
// had happened, provided that nobody has written to it on the new side. So that side must not run anything of the job,
// nor load memory, before the move is done.
//
// Only what lies behind cuMemAlloc and its kin goes this way. Whether the two workers are on one machine, on one GPU
// and of one user, they find out themselves: what is refused is left to the other ways (direct_copy.h,
// memory_transfer.h).
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_HAND_OVER_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_HAND_OVER_H_

#include <cstdint>
#include <map>

#include "absl/status/statusor.h"
#include "checkpoint/gpu/side_requests.h"
#include "ckptfmt/types.h"
#include "proto/channel/client_channel.h"

namespace cuda_remote::checkpoint {

// Ranges of device memory that two sessions share.
class SharedBlocks {
 public:
  void Add(uint64_t address, uint64_t bytes) { blocks_[address] = bytes; }
  bool empty() const { return blocks_.empty(); }
  // Whether all of the region is in one of them.
  bool Have(const ckptfmt::Region& region) const;

 private:
  std::map<uint64_t, uint64_t> blocks_;  // address -> bytes
};

// Whether the process behind `running` and the server of `to` are on this machine, as far as they know.
bool MayHandOver(const SideRequests& running, const ClientChannel& to);

// While the job runs: has its server prepare what takes long at times. Without it HandOver takes longer, so it says
// nothing of errors.
void PrepareHandOver(SideRequests* running);

// Before the replay: the new session maps what it may of the old one's memory, and this is that. Fails only if a
// session is lost.
absl::StatusOr<SharedBlocks> HandOver(ClientChannel* from, ClientChannel* to);

// After the replay: what the new session's allocations got of it. The new session unmaps the rest.
absl::StatusOr<SharedBlocks> KeepHandedOver(ClientChannel* to);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_HAND_OVER_H_
