// Memory barriers that a rarely sleeping consumer makes its producer's threads go through.
//
// After publishing a frame, a producer looks whether the consumer sleeps; a consumer that goes to sleep says so, then
// looks for frames once more. Both need a full barrier in between, so that one of the two sees the other. The
// producer's, for each frame, is what a launch costs most: it waits until the frame's cache lines, which the consumer
// had, are the producer's. So the consumer, who sleeps seldom, has the kernel do it: membarrier(2) with
// MEMBARRIER_CMD_GLOBAL_EXPEDITED returns after every running thread of every registered process has passed a full
// barrier. Linux 4.16 has it; without it, or where a filter forbids it, both sides use fences.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_RING_BARRIERS_H_
#define CUDA_REMOTE_PROTO_RING_BARRIERS_H_

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace cuda_remote::ring {

inline long Membarrier(int command) { return syscall(SYS_membarrier, command, 0, 0); }

// Whether BarrierInRegistered works here.
inline bool CanBarrierInRegistered() {
  const long known = Membarrier(MEMBARRIER_CMD_QUERY);
  return known > 0 && (known & MEMBARRIER_CMD_GLOBAL_EXPEDITED) && Membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED) == 0;
}

// Lets the barriers of other processes reach this one. False if the kernel does not do that.
inline bool RegisterForBarriers() { return Membarrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED) == 0; }

// A full barrier in every running thread of every registered process, and in this thread.
inline void BarrierInRegistered() { Membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED); }

}  // namespace cuda_remote::ring

#endif  // CUDA_REMOTE_PROTO_RING_BARRIERS_H_
