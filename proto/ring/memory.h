// SPDX-License-Identifier: Apache-2.0
// The shared memory of a session, mapped: made by the worker, or mapped from a descriptor that came over a socket.
//
// Not thread-safe (mapping and unmapping); the memory itself is shared by design. Owns its mapping and its descriptor.
// A descriptor from outside is checked before it is used: sealed against shrinking (else the peer could make every
// access a bus error), of the right size, with sane capacities. Not inherited by fork's child.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_RING_MEMORY_H_
#define CUDA_REMOTE_PROTO_RING_MEMORY_H_

#include <memory>

#include "proto/base/status.h"
#include "proto/base/unique_fd.h"
#include "proto/ring/ring_abi.h"

namespace cuda_remote::ring {

class RingMemory {
 public:
  // New, empty rings.
  static StatusOr<std::unique_ptr<RingMemory>> Create();
  // For tests: other capacities (powers of two, multiples of a page).
  static StatusOr<std::unique_ptr<RingMemory>> Create(const uint64_t capacity[kRingCount]);
  // Maps what a peer made. Fails if that is not rings of this version, or not sealed.
  static StatusOr<std::unique_ptr<RingMemory>> Map(UniqueFd fd);
  ~RingMemory();
  RingMemory(const RingMemory&) = delete;
  RingMemory& operator=(const RingMemory&) = delete;

  int fd() const { return fd_.get(); }
  // In fork's child, where nothing is mapped: closes the copy of the descriptor. Async-signal-safe.
  void CloseInForkedChild();
  RingControl* control(RingIndex index) const { return &header_->rings[index]; }
  // The data area; data()[i] and data()[i + capacity] are the same byte for i < capacity.
  char* data(RingIndex index) const { return data_[index]; }
  uint64_t capacity(RingIndex index) const { return capacity_[index]; }

 private:
  RingMemory() = default;
  Status MapAll();

  UniqueFd fd_;
  char* base_ = nullptr;
  size_t mapped_bytes_ = 0;
  MemoryHeader* header_ = nullptr;
  char* data_[kRingCount] = {};
  uint64_t capacity_[kRingCount] = {};  // private copies, checked
};

}  // namespace cuda_remote::ring

#endif  // CUDA_REMOTE_PROTO_RING_MEMORY_H_
