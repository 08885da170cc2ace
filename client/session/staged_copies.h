// SPDX-License-Identifier: Apache-2.0
// Copies between ordinary memory of the application and the GPU inside a graph, captured or built node by node.
//
// Natively such a copy reads or writes the application's memory whenever the graph runs. Here it goes through pinned
// memory that the server reaches: a host function in the graph moves the bytes between the two, and the graph's own
// copy is one of pinned memory. The pinned piece belongs to the graph and what is made from it (a user object says when
// they are gone) and is used again by later graphs; it is never given back.
//
// Thread-safe.
#ifndef CUDA_REMOTE_CLIENT_SESSION_STAGED_COPIES_H_
#define CUDA_REMOTE_CLIENT_SESSION_STAGED_COPIES_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "proto/threads/mutex.h"

namespace cuda_remote::client {

// Which sides of a copy go through pinned memory.
struct StagedSides {
  bool from_host = false, to_host = false;
};

// One copy, of rows in slices. The graph's host function gets its address.
struct StagedCopy {
  struct Side {
    char* address = nullptr;
    size_t pitch = 0, slice = 0;  // bytes from row to row, and from slice to slice
  };
  char* pinned = nullptr;  // null: between two places of the application's memory
  size_t capacity = 0;
  Side to, from;  // one of these two is `pinned`
  size_t width = 0, height = 1, depth = 1;

  // What the host function does. Takes a StagedCopy*.
  static void Run(void* data);
};

// A copy node of pageable memory as the application describes it.
struct StagedParams {
  CUDA_MEMCPY3D copy{};
  StagedSides sides;            // never change: the server's nodes follow from them
  uint64_t context = 0;         // virtual handle
  StagedCopy* piece = nullptr;  // the graph's or executable's, which keeps it (client/custom/staged_node.cc, OwnStaged)
};

// What is moved around each launch of an executable for one of its copy nodes, which was made with other memory and
// given pageable memory later: to pinned memory before the launch, and from pinned memory after it. Null: nothing. Who
// makes one gives the pieces back when nobody has it any more.
struct LaunchCopy {
  StagedCopy *before = nullptr, *after = nullptr;
};

class StagedCopies {
 public:
  // A free piece of at least `bytes`; null if there is none.
  StagedCopy* Take(size_t bytes);
  // Gives pieces back, or adds new ones.
  void Give(const std::vector<StagedCopy*>& pieces);

 private:
  Mutex mutex_;
  std::vector<StagedCopy*> free_ CR_GUARDED_BY(mutex_);
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_SESSION_STAGED_COPIES_H_
