// SPDX-License-Identifier: Apache-2.0
#include "proto/ring/ring.h"

#include <algorithm>
#include <cstring>

#include "proto/base/clock.h"
#include "proto/ring/futex.h"

namespace cuda_remote::ring {
namespace {

// Wakes the side whose flag this is, if it sleeps. The fence orders the position that was just published before the
// look at the flag; the sleeper does the same the other way round, so one of the two sees the other.
void Doorbell(std::atomic<uint32_t>* parked) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (parked->load(std::memory_order_relaxed) == 0) return;
  parked->store(0, std::memory_order_relaxed);
  FutexWake(parked, true);
}

// How many times a reader looks at `tail` before it looks at `quiet_tail`: about a microsecond.
constexpr unsigned kLooksPerQuietLook = 32;

// `soon` is asked again and again for a while, `ready` before sleeping.
template <typename Soon, typename Ready>
void Park(std::atomic<uint32_t>* parked, SpinBudget* spin, int timeout_ms, Soon soon, Ready ready) {
  if (spin->Spin(soon) || ready() || timeout_ms == 0) return;
  parked->store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const int64_t start = NowNs();
  if (!ready()) FutexWait(parked, 1, timeout_ms, true);
  parked->store(0, std::memory_order_relaxed);
  spin->Slept(NowNs() - start);
}

void WakeSelf(std::atomic<uint32_t>* parked) {
  parked->store(0, std::memory_order_seq_cst);
  FutexWake(parked, true);
}

}  // namespace

bool SaneFrame(const FrameHeader& header) {
  return header.message_bytes <= kMaxMessageBytes && header.payload_bytes <= kMaxPayloadBytes;
}

bool WholeFrames(const char* data, uint64_t bytes, uint64_t* frames) {
  *frames = 0;
  uint64_t at = 0;
  while (at != bytes) {
    FrameHeader header;
    if (bytes - at < sizeof(header)) return false;
    memcpy(&header, data + at, sizeof(header));
    if (!SaneFrame(header)) return false;
    const uint64_t length = FrameBytes(header.message_bytes, header.payload_bytes);
    if (length > bytes - at) return false;
    at += length;
    ++*frames;
  }
  return true;
}

RingWriter::RingWriter(RingMemory* memory, RingIndex index)
    : control_(memory->control(index)), data_(memory->data(index)), capacity_(memory->capacity(index)) {
  Resync();
  seen_head_ = control_->head.load(std::memory_order_acquire);
}

RingStatus RingWriter::ReserveSlowly(uint64_t bytes, char** where) {
  if (bytes > capacity_ / 2) return RingStatus::kCorrupt;  // the caller checks max_frame() first
  seen_head_ = control_->head.load(std::memory_order_acquire);
  if (tail_ - seen_head_ > capacity_ || (seen_head_ | tail_) % kFrameAlignment != 0) return RingStatus::kCorrupt;
  if (tail_ - seen_head_ > capacity_ - bytes) return RingStatus::kNotYet;
  *where = data_ + (tail_ & (capacity_ - 1));
  return RingStatus::kOk;
}

void RingWriter::Wake() { Doorbell(&control_->consumer_parked); }

void RingWriter::WaitRoom(uint64_t bytes, int timeout_ms) {
  const auto ready = [&] {
    // An impossible head counts as ready: Reserve reports it.
    return tail_ - control_->head.load(std::memory_order_acquire) <= capacity_ - bytes ||
           tail_ - control_->head.load(std::memory_order_relaxed) > capacity_;
  };
  Park(&control_->producer_parked, &spin_, timeout_ms, ready, ready);
}

void RingWriter::Interrupt() { WakeSelf(&control_->producer_parked); }

RingReader::RingReader(RingMemory* memory, RingIndex index)
    : control_(memory->control(index)), data_(memory->data(index)), capacity_(memory->capacity(index)) {
  Resync();
}

RingStatus RingReader::Peek(FrameHeader* header, const char** frame) {
  if (seen_tail_ == next_) {
    uint64_t tail = control_->tail.load(std::memory_order_acquire);
    if (tail < told_) return RingStatus::kCorrupt;
    const uint64_t told = tail;
    if (look_for_quiet_) {
      look_for_quiet_ = false;
      tail = std::max(tail, control_->quiet_tail.load(std::memory_order_acquire));
    }
    if (tail <= next_) return RingStatus::kNotYet;
    if (tail - freed() > capacity_ || tail - next_ > capacity_ || (tail | next_) % kFrameAlignment != 0) {
      return RingStatus::kCorrupt;
    }
    told_ = told;
    seen_tail_ = tail;
  }
  const uint64_t used = seen_tail_ - next_;
  if (used < sizeof(FrameHeader)) return RingStatus::kCorrupt;
  const char* const at = data_ + (next_ & (capacity_ - 1));
  memcpy(header, at, sizeof(*header));
  // What is checked below must be the copy, not the memory that the peer can still change.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (!SaneFrame(*header) || FrameBytes(header->message_bytes, header->payload_bytes) > used)
    return RingStatus::kCorrupt;
  *frame = at;
  return RingStatus::kOk;
}

void RingReader::FreeUntil(uint64_t position) {
  head_.store(position, std::memory_order_relaxed);
  control_->head.store(position, std::memory_order_release);
  // A frame takes at most half a ring, so a producer that has half a ring can always go on. Quiet frames are not
  // counted where the tail has not come over them: to look again once too often does no harm.
  const uint64_t tail = control_->tail.load(std::memory_order_relaxed);
  if (tail <= position || tail - position <= capacity_ / 2) Doorbell(&control_->producer_parked);
}

void RingReader::Wait(int timeout_ms) {
  unsigned looks = 0;
  const auto at_all = [this] { return ReadyAtAll(); };
  Park(
      &control_->consumer_parked, &spin_, timeout_ms,
      [&] { return ++looks % kLooksPerQuietLook == 0 ? at_all() : Ready(); }, at_all);
  // Also after a sleep, which does not say what ended it.
  look_for_quiet_ = !Ready();
}

void RingReader::Interrupt() { WakeSelf(&control_->consumer_parked); }

}  // namespace cuda_remote::ring
