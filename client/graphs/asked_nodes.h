// SPDX-License-Identifier: Apache-2.0
// Arrays that the application has got by asking for the parameters of graphs' nodes. They are the driver's natively,
// and valid until the node is destroyed or its parameters are set. Here they stay until the node is asked again or is
// gone, so that a program which uses them a little longer does not crash.
//
// Thread-safe. No other lock is taken under its own.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_CLIENT_GRAPHS_ASKED_NODES_H_
#define CUDA_REMOTE_CLIENT_GRAPHS_ASKED_NODES_H_

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "proto/threads/mutex.h"

namespace cuda_remote::client {

// Of one node, which is of one type.
struct AskedArrays {
  std::string block;            // a kernel's parameters
  std::vector<void*> pointers;  // to each of them
  std::vector<CUstreamBatchMemOpParams> operations;
  std::vector<CUgraph> bodies;  // of a conditional node
};

class AskedNodes {
 public:
  // Calls fill(arrays) for the arrays of `node`, which still have what was there at the last question: an answer of the
  // same length stays in its place, as natively, since others may be using it.
  template <typename Fill>
  void Keep(uint64_t node, Fill fill) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    fill(&nodes_[node]);
    count_.store(nodes_.size(), std::memory_order_relaxed);
  }

  // The node is gone.
  void Forget(uint64_t node) CR_EXCLUDES(mutex_) {
    if (count() == 0) return;
    MutexLock lock(&mutex_);
    nodes_.erase(node);
    count_.store(nodes_.size(), std::memory_order_relaxed);
  }

  // How many nodes have arrays. Without the lock.
  size_t count() const { return count_.load(std::memory_order_relaxed); }

 private:
  Mutex mutex_;
  std::unordered_map<uint64_t, AskedArrays> nodes_ CR_GUARDED_BY(mutex_);
  std::atomic<size_t> count_{0};
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_GRAPHS_ASKED_NODES_H_
