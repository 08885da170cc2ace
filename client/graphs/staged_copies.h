// SPDX-License-Identifier: Apache-2.0
// Copies between ordinary memory of the application and the GPU inside a graph, captured or built node by node.
//
// Such a copy goes through pinned memory that the server reaches: a host function in the graph moves the bytes between
// the two, and the graph's own copy is one of pinned memory. The pinned piece belongs to the graph and what is made
// from it (a user object says when they are gone) and is used again by later graphs; it is never given back.
//
// A copy to the GPU reads pageable memory during the launch (driver 580). So each launch takes the bytes at the call,
// and the host function gives them out in the order of the launches, which is that of their turns: launches of one
// executable do not overlap, and no two executables have a piece in common (client/calls/staged_node.cc, RenewPieces).
//
// Thread-safe.
#ifndef CUDA_REMOTE_CLIENT_GRAPHS_STAGED_COPIES_H_
#define CUDA_REMOTE_CLIENT_GRAPHS_STAGED_COPIES_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "proto/threads/mutex.h"

namespace cuda_remote::client {

// Which sides of a copy go through pinned memory.
struct StagedSides {
  bool from_host = false, to_host = false;
};

struct StagedCopy;
class StagedCopies;

// A copy node of pageable memory as the application describes it.
struct StagedParams {
  CUDA_MEMCPY3D copy{};
  StagedSides sides;  // never change: the server's nodes follow from them
  // Whether launches take the bytes at the call: they go from pageable memory to the GPU.
  bool at_launch = false;
  uint64_t context = 0;         // virtual handle
  StagedCopy* piece = nullptr;  // the graph's or executable's, which keeps it (client/calls/staged_node.cc, OwnStaged)
};

// One copy, of rows in slices. The graph's host function gets its address.
struct StagedCopy {
  struct Side {
    char* address = nullptr;
    size_t pitch = 0, slice = 0;  // bytes from row to row, and from slice to slice
  };
  StagedCopies* home = nullptr;
  char* pinned = nullptr;  // null: between two places of the application's memory
  size_t capacity = 0;
  Side to, from;  // one of these two is `pinned`
  size_t width = 0, height = 1, depth = 1;
  uint64_t owner = 0;  // the executable that copies by way of this piece, 0: none. Under DisguisedNodes::mutex()
  // Of the node that it was made for, for copies of that: its parameters, and the user object that has the piece.
  StagedParams params;
  uint64_t user_object = 0;

  size_t bytes() const { return width * height * depth; }
  // What the host function does. Takes a StagedCopy*. Without bytes of a launch it moves what is there now: for nodes
  // that may run any number of times, and where the memory is not pageable.
  static void Run(void* data);
};

class StagedCopies {
 public:
  // What launches may have taken for copies whose turn has not come. More waits for that, but not for ever: what holds
  // the GPU back may be waiting for the launch.
  static constexpr size_t kMostBytes = size_t(256) << 20;
  explicit StagedCopies(size_t most_bytes = kMostBytes) : most_bytes_(most_bytes) {}

  // A free piece of at least `bytes`; null if there is none.
  StagedCopy* Take(size_t bytes);
  // Gives pieces back, or adds new ones.
  void Give(const std::vector<StagedCopy*>& pieces);

  // Takes the bytes of these copies for a launch, and returns its number; 0: no memory.
  uint64_t TakeBytes(const std::vector<StagedCopy*>& pieces);
  // The launch was refused: takes back what nobody has used.
  void DropBytes(const std::vector<StagedCopy*>& pieces, uint64_t launch);
  // Moves the bytes of the earliest launch to the piece's pinned memory. False: there are none.
  bool UseBytes(const StagedCopy& piece);
  // Bytes taken that no copy has used.
  size_t waiting_bytes();

 private:
  struct Taken {
    uint64_t launch = 0;
    std::unique_ptr<char[]> bytes;
  };

  void Forget(const StagedCopy& piece) CR_REQUIRES(mutex_);

  const size_t most_bytes_;
  Mutex mutex_;
  Condition used_;
  std::vector<StagedCopy*> free_ CR_GUARDED_BY(mutex_);
  std::unordered_map<const StagedCopy*, std::deque<Taken>> taken_ CR_GUARDED_BY(mutex_);
  size_t bytes_ CR_GUARDED_BY(mutex_) = 0;  // of those
  uint64_t launches_ CR_GUARDED_BY(mutex_) = 0;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_GRAPHS_STAGED_COPIES_H_
