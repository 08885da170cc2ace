// SPDX-License-Identifier: Apache-2.0
// Layout of the shared memory of a session. proto/WIRE.md repeats it; the static assertions keep both equal.
//
//     offset 0          one page: MemoryHeader, then three RingControls
//            4096       data area of the request ring   client -> worker   64 MiB
//            + 64 MiB   data area of the reply ring     worker -> client   64 MiB
//            + 64 MiB   data area of the event ring     worker -> client    1 MiB
//
//     data area of one ring; its capacity C is a power of two; positions only rise, their place is position mod C:
//
//           head                 tail
//            |                    |
//       .....[frame][frame][frame]....................|
//        free  \___ used: tail - head <= C ___/  free
//
//     A reader maps the data area twice in a row, so a frame that runs over the end still lies in one piece:
//
//       | data area           | data area again     |
//                        [ frame ]
//
// `tail` is written by the producer only, `head` by the consumer only; each stands on cache lines of its own. A frame
// is complete before `tail` moves over it: between head and tail there are whole frames only, each padded to
// kFrameAlignment.
//
// Frames that nobody is in a hurry for (a record of an event, say) are written *quietly*: only `quiet_tail` moves over
// them. A consumer looks there when it has looked at `tail` in vain for a moment, and always before it sleeps; and
// `tail` moves over them with the next frame that is not quiet. So a consumer that keeps up takes many of them at a
// time, in place of having each one's cache lines, and that of `tail`, go from one processor to the other at once. All
// frames up to the larger one of the two are complete.
//
// Parking: a side that finds nothing to do sets its parked flag to 1, looks once more, and sleeps on the flag (futex).
// The other side, after moving its position, clears a set flag and wakes the sleeper. Nobody makes a system call while
// both sides are busy, and a sleeping side costs nothing. A consumer wakes the producer only when half the ring is
// free, so that a full ring does not end in a switch of threads for each frame.
//
// States of one side:   RUNNING --nothing to do--> SPINNING --budget used up--> PARKED --doorbell--> RUNNING
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_RING_RING_ABI_H_
#define CUDA_REMOTE_PROTO_RING_RING_ABI_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "proto/frame/frame.h"

namespace cuda_remote::ring {

inline constexpr uint64_t kMemoryMagic = 0x31474e4952524355;  // "UCRRING1"
inline constexpr uint32_t kMemoryVersion = 2;
inline constexpr size_t kPageBytes = 4096;
inline constexpr size_t kFrameAlignment = 8;

enum RingIndex : int { kRequestRing = 0, kReplyRing = 1, kEventRing = 2, kRingCount = 3 };

inline constexpr uint64_t kDefaultCapacity[kRingCount] = {64u << 20, 64u << 20, 1u << 20};
// What a peer may offer. A frame takes at most half a ring, so with the default capacities only event frames (1 MiB
// ring) are limited further than by kMaxMessageBytes and kMaxPayloadBytes.
inline constexpr uint64_t kMinCapacity = 64u << 10;
inline constexpr uint64_t kMaxCapacity = 1u << 30;

struct RingControl {
  alignas(128) std::atomic<uint64_t> tail;             // written by the producer
  alignas(128) std::atomic<uint64_t> head;             // written by the consumer
  alignas(128) std::atomic<uint32_t> consumer_parked;  // 1: sleeps until the tail moves
  alignas(128) std::atomic<uint32_t> producer_parked;  // 1: sleeps until the head moves
  // Written by the producer. On a line whose neighbour nobody writes in the long run, as processors fetch them in
  // pairs.
  alignas(64) std::atomic<uint64_t> quiet_tail;
};
static_assert(sizeof(RingControl) == 512 && offsetof(RingControl, quiet_tail) == 448);

// How far the producer has written, quietly or not.
inline uint64_t WrittenUntil(const RingControl& control) {
  const uint64_t quiet = control.quiet_tail.load(std::memory_order_acquire);
  const uint64_t tail = control.tail.load(std::memory_order_acquire);
  return tail > quiet ? tail : quiet;
}

struct MemoryHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t header_bytes;  // kPageBytes
  uint64_t capacity[kRingCount];
  uint8_t reserved[512 - 16 - 8 * kRingCount];
  RingControl rings[kRingCount];
};
static_assert(sizeof(MemoryHeader) == 2048 && sizeof(MemoryHeader) <= kPageBytes);
static_assert(offsetof(MemoryHeader, rings) == 512);
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// Bytes that a frame takes up in a ring.
constexpr uint64_t FrameBytes(uint64_t message_bytes, uint64_t payload_bytes) {
  return (sizeof(FrameHeader) + message_bytes + payload_bytes + kFrameAlignment - 1) & ~uint64_t(kFrameAlignment - 1);
}

}  // namespace cuda_remote::ring

#endif  // CUDA_REMOTE_PROTO_RING_RING_ABI_H_
