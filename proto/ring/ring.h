// SPDX-License-Identifier: Apache-2.0
// The two ends of one ring: RingWriter produces frames, RingReader consumes them.
//
// Single producer, single consumer: each end belongs to one thread at a time (its owner's lock or role sees to that).
// Neither trusts the other: a position is copied, then checked against the end's own, and a header is copied out before
// it is checked. A wrong one yields kCorrupt for ever after; the caller ends the session. No memory outside the ring is
// ever touched, whatever the peer writes.
//
// Non-owning: the RingMemory must outlive both. Nothing throws or allocates.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_RING_RING_H_
#define CUDA_REMOTE_PROTO_RING_RING_H_

#include <atomic>
#include <cstdint>

#include "proto/frame/frame.h"
#include "proto/ring/memory.h"
#include "proto/ring/ring_abi.h"
#include "proto/ring/spin.h"

namespace cuda_remote::ring {

enum class RingStatus {
  kOk,
  kNotYet,   // reader: no frame is there. writer: no room is there.
  kCorrupt,  // the peer wrote something impossible
};

// Whether a header is within the limits of frames, whatever the rest means.
bool SaneFrame(const FrameHeader& header);

// Walks over the frames in [data, data + bytes). True if they are whole, sane and fill it exactly. *frames: how many.
bool WholeFrames(const char* data, uint64_t bytes, uint64_t* frames);

class RingWriter {
 public:
  RingWriter(RingMemory* memory, RingIndex index);

  // Takes the position over from shared memory: after another process has written to this ring.
  void Resync() { tail_ = WrittenUntil(*control_); }

  // Room for `bytes` (a multiple of kFrameAlignment, at most max_frame()) in one piece at *where.
  RingStatus Reserve(uint64_t bytes, char** where) {
    // The head that was seen last says how much room there is at least; usually that is enough.
    if (bytes > capacity_ / 2 || tail_ - seen_head_ > capacity_ - bytes) return ReserveSlowly(bytes, where);
    *where = data_ + (tail_ & (capacity_ - 1));
    return RingStatus::kOk;
  }
  // Publishes what was written there, and wakes the reader if it sleeps.
  void Commit(uint64_t bytes) {
    Publish(bytes);
    Wake();
  }
  // The two halves of Commit. Wake may be called from any thread, so also after giving up the lock that Publish was
  // called under: it may be a system call. Until then the reader may sleep on.
  void Publish(uint64_t bytes) {
    tail_ += bytes;
    control_->tail.store(tail_, std::memory_order_release);
  }
  // Publishes what was written there in a way that does not disturb a reader that keeps up: it finds it within
  // microseconds, or with the next frame that is published in the other way. Wake afterwards, too.
  void PublishQuietly(uint64_t bytes) {
    tail_ += bytes;
    control_->quiet_tail.store(tail_, std::memory_order_release);
  }
  void Wake();
  // Waits until Reserve(bytes) could succeed, at most timeout_ms; spins first.
  void WaitRoom(uint64_t bytes, int timeout_ms);

  // Position of the next byte: how many bytes were ever written.
  uint64_t position() const { return tail_; }
  uint64_t capacity() const { return capacity_; }
  // What the reader claims to have given back; not checked.
  uint64_t given_back() const { return control_->head.load(std::memory_order_acquire); }
  // Longest frame that this ring takes.
  uint64_t max_frame() const { return capacity_ / 2; }
  // Wakes this end's own waiter in WaitRoom, from another thread.
  void Interrupt();

 private:
  RingStatus ReserveSlowly(uint64_t bytes, char** where);

  RingControl* const control_;
  char* const data_;
  const uint64_t capacity_;
  uint64_t tail_ = 0;
  uint64_t seen_head_ = 0;
  SpinBudget spin_;
};

class RingReader {
 public:
  RingReader(RingMemory* memory, RingIndex index);

  // Takes the position over from shared memory: after another process has read from this ring.
  void Resync() {
    next_ = seen_tail_ = control_->head.load(std::memory_order_relaxed);
    head_.store(next_, std::memory_order_relaxed);
  }

  // The next frame: *header is a copy, checked; *frame points to the frame in the ring (its header, which may have
  // changed since, then message and payload). Frames that were published quietly are found after a Wait, or with
  // others.
  RingStatus Peek(FrameHeader* header, const char** frame);
  // Steps over the frame that Peek returned, leaving it in the ring.
  void Skip(const FrameHeader& header) {
    next_ += FrameBytes(header.message_bytes, header.payload_bytes);
    // The next frame, if there is one, lies in another processor's cache. It comes while this one is being worked on.
    if (seen_tail_ == next_) return;
    __builtin_prefetch(at(next_));
    __builtin_prefetch(at(next_) + 64);
  }
  // Gives the room before `position` back to the writer; between the last given back and position(). May be called from
  // another thread than the rest, one at a time.
  void FreeUntil(uint64_t position);
  // Skip and give back.
  void Pop(const FrameHeader& header) {
    Skip(header);
    FreeUntil(next_);
  }
  // How long Wait looks before it sleeps, at most (see SpinBudget). Any thread.
  void SpinAtMost(int64_t ns) { spin_.SetMax(ns); }
  // Waits until Peek could find something, at most timeout_ms; spins first.
  void Wait(int timeout_ms);
  // Whether something is there that was not published quietly.
  bool Ready() const { return seen_tail_ != next_ || control_->tail.load(std::memory_order_acquire) > next_; }
  // Whether anything is there, which Wait then finds at once. To be asked now and then only: the line that it looks at
  // is the one that quiet frames are not to have taken away.
  bool ReadyAtAll() const { return Ready() || control_->quiet_tail.load(std::memory_order_acquire) > next_; }

  // Position of the next frame to be looked at, and the oldest one not yet given back.
  uint64_t position() const { return next_; }
  uint64_t freed() const { return head_.load(std::memory_order_relaxed); }
  // Goes back to an earlier position that was not given back: to send frames again.
  void Rewind(uint64_t position) { next_ = position; }
  uint64_t capacity() const { return capacity_; }
  const char* at(uint64_t position) const { return data_ + (position & (capacity_ - 1)); }
  // Wakes this end's own waiter in Wait, from another thread.
  void Interrupt();

 private:
  RingControl* const control_;
  char* const data_;
  const uint64_t capacity_;
  std::atomic<uint64_t> head_{0};
  uint64_t next_ = 0;
  // The tail when it was looked at last, checked. The producer writes to its line for each frame, so looking again
  // while there still are frames would fetch it from another processor each time, and take it from the producer.
  uint64_t seen_tail_ = 0;
  uint64_t told_ = 0;            // the last one read from `tail`, checked; quiet frames may lie behind it
  bool look_for_quiet_ = false;  // Peek is to look at quiet_tail, too
  SpinBudget spin_;
};

}  // namespace cuda_remote::ring

#endif  // CUDA_REMOTE_PROTO_RING_RING_H_
