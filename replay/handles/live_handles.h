// SPDX-License-Identifier: Apache-2.0
// Which virtual handles may be used, for looking without a lock: each call looks several times, from many threads.
//
// One word for each slot: the handle if it may be used, else 0 or another handle, which nobody has asked for. Words
// never move or go away, so a reader needs nothing but two loads of memory that is hardly ever written to.
//
// Contains: any thread, at any time. Set and Clear: one thread at a time (the owner locks). What a reader finds of a
// handle that another thread makes or drops at the same time is one or the other.
#ifndef CUDA_REMOTE_REPLAY_HANDLES_LIVE_HANDLES_H_
#define CUDA_REMOTE_REPLAY_HANDLES_LIVE_HANDLES_H_

#include <atomic>
#include <cstdint>
#include <new>

#include "proto/frame/handle.h"

namespace cuda_remote::replay {

class LiveHandles {
 public:
  LiveHandles() = default;
  ~LiveHandles() {
    for (auto& chunk : chunks_) delete[] chunk.load(std::memory_order_relaxed);
  }
  LiveHandles(const LiveHandles&) = delete;
  LiveHandles& operator=(const LiveHandles&) = delete;

  bool Contains(uint64_t handle) const {
    const Place place = PlaceOf(SlotOf(handle));
    const std::atomic<uint64_t>* const chunk = chunks_[place.chunk].load(std::memory_order_acquire);
    return chunk && chunk[place.offset].load(std::memory_order_acquire) == handle && handle != 0;
  }

  // Makes room for a slot. False if memory is short.
  bool Reserve(uint32_t slot) {
    const Place place = PlaceOf(slot);
    if (chunks_[place.chunk].load(std::memory_order_relaxed)) return true;
    auto* const chunk = new (std::nothrow) std::atomic<uint64_t>[size_t(kFirst) << place.chunk]();
    chunks_[place.chunk].store(chunk, std::memory_order_release);
    return chunk != nullptr;
  }

  // Both need room for the handle's slot.
  void Set(uint64_t handle) { Word(handle).store(handle, std::memory_order_release); }
  void Clear(uint64_t handle) { Word(handle).store(0, std::memory_order_release); }

 private:
  // Each chunk has twice the slots of the one before it.
  static constexpr uint32_t kFirst = 256;
  static constexpr uint32_t kChunks = 17;
  static_assert((uint64_t(1) << kChunks) * kFirst - kFirst > kMaxSlot);

  struct Place {
    uint32_t chunk;
    uint32_t offset;
  };
  static Place PlaceOf(uint32_t slot) {
    const uint32_t chunk = 31 - uint32_t(__builtin_clz(slot / kFirst + 1));
    return {chunk, slot - ((kFirst << chunk) - kFirst)};
  }
  std::atomic<uint64_t>& Word(uint64_t handle) {
    const Place place = PlaceOf(SlotOf(handle));
    return chunks_[place.chunk].load(std::memory_order_relaxed)[place.offset];
  }

  std::atomic<std::atomic<uint64_t>*> chunks_[kChunks] = {};
};

}  // namespace cuda_remote::replay

#endif  // CUDA_REMOTE_REPLAY_HANDLES_LIVE_HANDLES_H_
