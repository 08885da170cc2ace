// Copies to the GPU straight out of the channel's memory.
//
// The request ring is registered with the driver, so such a copy runs at the bus's speed and the driver makes no copy of
// its own; the payload is held in the ring until the GPU has read it. Ring space comes back in order, so only so much is
// held at a time.
//
// Executor only, but for the thread that gives the ring space back.
#ifndef CUDA_REMOTE_SERVER_WORKER_RING_COPIES_H_
#define CUDA_REMOTE_SERVER_WORKER_RING_COPIES_H_

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>

#include "proto/channel/server_channel.h"
#include "server/driver/driver_table.h"
#include "server/worker/current_context.h"

namespace cuda_remote::server {

class RingCopies {
 public:
  // Payloads below this are better copied by the driver on the spot.
  static constexpr size_t kSmallest = 32 << 10;
  // Most bytes held in the ring; beyond that the driver copies, too.
  static constexpr size_t kMostHeld = 24 << 20;

  RingCopies(const DriverTable& driver, ServerChannel* channel) : driver_(driver), channel_(channel) {}
  ~RingCopies();
  RingCopies(const RingCopies&) = delete;
  RingCopies& operator=(const RingCopies&) = delete;

  // Whether the payload of the current request, which begins at `data`, may be copied in place.
  bool MayHold(ContextRef context, const char* data, size_t bytes);

  // The copy from the payload that MayHold accepted is in `stream`: gives `hold` back when it is done.
  CUresult ReleaseWhenDone(ContextRef context, CUstream stream, size_t bytes, uint64_t hold);

  // The registration dies with its context.
  void ContextDies(uint64_t context_id);

 private:
  struct Held {
    uint64_t hold;
    CUevent event;
    ContextRef context;
    size_t bytes;
  };
  void Loop();

  const DriverTable& driver_;
  ServerChannel* const channel_;
  uint64_t registered_in_ = 0;  // ContextRef::id
  bool refused_ = false;        // the driver does not register such memory
  std::atomic<size_t> held_bytes_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Held> held_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_RING_COPIES_H_
