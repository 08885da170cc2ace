// SPDX-License-Identifier: Apache-2.0
// Which GPUs' work may use memory of other GPUs, so that a free waits for it. Work of other GPUs is not waited for: it
// may itself wait for what the program does after the free.
//
// A kernel uses memory of another GPU only where the program has given it access. Copies, fills and stream memory
// operations need none: what such a request names, its context, its stream, memory, is of GPUs that may use each
// other's memory from then on. What is noted stays: work that is in flight may be of any age.
//
// Not thread-safe: the executor's own.
#ifndef CUDA_REMOTE_SERVER_WORKER_MEMORY_GPU_REACH_H_
#define CUDA_REMOTE_SERVER_WORKER_MEMORY_GPU_REACH_H_

#include <array>
#include <cstdint>

namespace cuda_remote::server {

class GpuReach {
 public:
  static constexpr int kAny = -1;

  // Another request begins. `notes`: what it names counts.
  void BeginRequest(bool notes) {
    notes_ = notes;
    named_ = 0;
  }
  // It names something of this GPU; kAny: of one that is not known.
  void Name(int gpu) {
    if (!notes_ || (named_ & Bit(gpu)) == Bit(gpu)) return;
    named_ |= Bit(gpu);
    if ((named_ & (named_ - 1)) != 0) Add(named_, named_);
  }
  // From now on work of `user` may use memory of `owner`; kAny: any GPU.
  void Allow(int user, int owner) { Add(Bit(user), Bit(owner)); }
  bool MayUse(int user, int owner) const {
    return user == owner || owner < 0 || owner >= kMost || (users_[owner] & Bit(user)) != 0;
  }

 private:
  static constexpr int kMost = 64;
  // Sets of GPUs, a bit for each.
  void Add(uint64_t users, uint64_t owners) {
    for (int owner = 0; owner < kMost; ++owner) {
      if ((owners & Bit(owner)) != 0) users_[owner] |= users;
    }
  }
  static uint64_t Bit(int gpu) { return gpu < 0 || gpu >= kMost ? ~uint64_t{0} : uint64_t{1} << gpu; }

  bool notes_ = false;
  uint64_t named_ = 0;
  std::array<uint64_t, kMost> users_{};  // by owner
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MEMORY_GPU_REACH_H_
