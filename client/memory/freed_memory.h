// SPDX-License-Identifier: Apache-2.0
// Stream-ordered memory that the application has freed, kept for its next allocation of the same size in the same
// stream.
//
// In one stream an allocation may have the memory of an earlier free at once: by the time that the new owner's work
// runs, the old one's is done. Programs that allocate and free in a loop would ask the server twice for what is always
// the same answer, so the client keeps the memory: the server is not told of the free, the replay log keeps the record,
// and the next matching allocation takes both over. What is kept is given back (Session::GiveBackFreed) before a
// checkpoint looks at the memory, before the application is told how much is free, and when an allocation finds no
// room.
//
// Not thread-safe: part of KnownMemory, under its lock.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_CLIENT_MEMORY_FREED_MEMORY_H_
#define CUDA_REMOTE_CLIENT_MEMORY_FREED_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace cuda_remote::client {

class FreedMemory {
 public:
  // What is kept at most. Few blocks, so that looking through them is cheap; the bytes are as many as the server keeps
  // of what it was given back.
  static constexpr size_t kMostBlocks = 64;
  static constexpr uint64_t kMostBytes = uint64_t(256) << 20;

  struct Block {
    uint64_t address = 0;
    uint64_t bytes = 0;
    uint64_t stream = 0;   // on the wire; freed in this one
    uint64_t context = 0;  // virtual handle; allocated and freed in this one
    uint64_t pool = 0;     // virtual handle, 0: the device's default
    int device = 0;
  };

  // Takes out the address of a block that equals `wanted` in all but the address; 0 if there is none.
  uint64_t Take(const Block& wanted) {
    // The last one first: it is the likeliest to be warm in the GPU's caches.
    for (size_t i = blocks_.size(); i-- > 0;) {
      const Block& block = blocks_[i];
      if (block.bytes != wanted.bytes || block.stream != wanted.stream || block.context != wanted.context ||
          block.pool != wanted.pool || block.device != wanted.device) {
        continue;
      }
      const uint64_t address = block.address;
      RemoveAt(i);
      return address;
    }
    return 0;
  }

  // Keeps a block. Appends to *out those that must be given back for it; the block itself, if it is too large.
  void Keep(const Block& block, std::vector<Block>* out) {
    if (block.bytes > kMostBytes) {
      out->push_back(block);
      return;
    }
    while (blocks_.size() >= kMostBlocks || bytes_ + block.bytes > kMostBytes) {
      out->push_back(blocks_.front());
      RemoveAt(0);
    }
    blocks_.push_back(block);
    bytes_ += block.bytes;
  }

  // Takes out everything.
  std::vector<Block> TakeAll() {
    bytes_ = 0;
    return std::exchange(blocks_, {});
  }

  // The server has dropped this memory, with its context.
  void Forget(uint64_t address) {
    for (size_t i = 0; i < blocks_.size(); ++i) {
      if (blocks_[i].address == address) return RemoveAt(i);
    }
  }

  bool empty() const { return blocks_.empty(); }
  uint64_t bytes() const { return bytes_; }

 private:
  void RemoveAt(size_t index) {
    bytes_ -= blocks_[index].bytes;
    blocks_.erase(blocks_.begin() + std::ptrdiff_t(index));
  }

  std::vector<Block> blocks_;  // the oldest first
  uint64_t bytes_ = 0;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_MEMORY_FREED_MEMORY_H_
