// SPDX-License-Identifier: Apache-2.0
// Copies chunks of GPU memory to slots of the pool beside a running job: one thread asks the server, many requests at a
// time, and others copy what has arrived out of shared buffers.
//
// The job's calls wait while the server begins with a request, so chunks that follow each other are asked for together.
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_PEEKER_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_PEEKER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/gpu/chunk_pool.h"
#include "checkpoint/gpu/shared_buffers.h"
#include "checkpoint/gpu/side_requests.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::checkpoint {

class Peeker {
 public:
  struct Chunk {
    uint64_t address = 0;
    size_t bytes = 0;
    uint64_t context = 0;
    size_t number = 0;  // the caller's
    // Chunks of one allocation have one number here, so that one request may ask for several. 0: for none but this.
    size_t allocation = 0;
  };
  // Gets a chunk in a slot, which is its own from then on. Called by several threads at once.
  using Use = std::function<void(const Chunk& chunk, char* slot)>;

  // Lets the server map the buffers, which ends with the connection behind `requests`. Null if they cannot be used;
  // fails if nothing can be asked.
  static absl::StatusOr<SharedBuffers*> Attach(SideRequests* requests, SharedBuffers* shared);

  // The server refuses while the job captures a stream. Captures end, so what must be copied can wait for that.
  enum class Captures { kRefuse, kAwait };

  // `shared`: null, or what Attach returned. Slots that are not used go back to `pool`.
  Peeker(SideRequests* requests, SharedBuffers* shared, ChunkPool* pool, Use use,
         Captures captures = Captures::kRefuse);
  // Waits for what is on its way.
  ~Peeker();
  Peeker(const Peeker&) = delete;
  Peeker& operator=(const Peeker&) = delete;

  // Copies a chunk into `slot`, which is the peeker's from then on. Begins at once, or when the next chunk is known.
  // Fails if nothing more can be asked.
  absl::Status Add(const Chunk& chunk, char* slot);
  // Waits for all. Fails as above, or if an earlier one has failed like that.
  absl::Status Finish();
  // What the server answered to the last chunk that it refused; 0 if it refused none.
  uint32_t refused() const { return refused_; }

 private:
  static constexpr size_t kNone = SIZE_MAX;
  // Chunks of one request.
  static constexpr size_t kMostTogether = 4;
  struct Arrived {
    Chunk chunk;
    char* slot;
    size_t buffer;
  };
  struct Flight {
    std::vector<Arrived> what;  // chunks that follow each other, in buffers that do
    std::vector<agent::SideRequest> asked;
    std::vector<uint64_t> numbers;
    std::vector<size_t> sizes;
  };

  // Whether the chunk follows those of next_ and may be asked for together with them.
  bool Follows(const Chunk& chunk) const;
  // Asks for those of next_.
  absl::Status Send();
  absl::Status FinishOne();
  // The answer to a request that has begun as `number`; it may have to be asked again.
  absl::StatusOr<agent::SideAnswer> WaitFor(const agent::SideRequest& asked, uint64_t number);
  // The first of `count` free buffers that follow each other. False if there are none.
  bool TakeBuffersLocked(size_t count, size_t* first) CR_REQUIRES(mutex_);
  void GiveBuffer(size_t buffer);
  void Work();
  void Do(const Arrived& arrived);

  SideRequests* const requests_;
  SharedBuffers* const shared_;
  ChunkPool* const pool_;
  const Use use_;
  const Captures captures_;
  std::vector<Arrived> next_;  // not asked for yet
  std::deque<Flight> flights_;
  uint32_t refused_ = 0;
  Mutex mutex_;
  Condition changed_;
  std::array<bool, SharedBuffers::kCount> free_buffers_ CR_GUARDED_BY(mutex_) = {};
  std::deque<Arrived> arrived_ CR_GUARDED_BY(mutex_);
  bool over_ CR_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_PEEKER_H_
