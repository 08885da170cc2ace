// SPDX-License-Identifier: Apache-2.0
// Nodes of graphs that the server knows as something else, and the memory that graphs allocate by such nodes (README,
// "Disguised nodes").
//
// Both share one lock, because a memory node is noted in both in one step.
//
// Threads: any. Functions that end in Locked, and those that return a table, need mutex(). The others take it
// themselves, or need none, as they say.
//
// Lock order: after recorded_objects.h, since graphs and their memory end with their objects. A thread that holds
// mutex() may take that of captures.h, and takes no other lock under it.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_CLIENT_SESSION_DISGUISED_NODES_H_
#define CUDA_REMOTE_CLIENT_SESSION_DISGUISED_NODES_H_

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "client/session/recorded_objects.h"
#include "proto/driverabi/graph_memory.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::client {

// A node of a graph that is not to the server what it is to the application.
struct DisguisedNode {
  uint64_t graph = 0;  // virtual handle
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  // Allocation: `accesses` is what its accessDescs point to. Free: the address alone.
  CUDA_MEM_ALLOC_NODE_PARAMS allocation{};
  std::vector<CUmemAccessDesc> accesses;
  // Copy of pageable memory: what the application asked for, and the user object by which the node's graph has its
  // pinned memory.
  CUDA_MEMCPY3D copy{};
  uint64_t user_object = 0;
};

class DisguisedNodes {
 public:
  using Addresses = driverabi::GraphMemory::Addresses;

  SharedMutex& mutex() CR_RETURNS(mutex_) { return mutex_; }

  // Under mutex(), shared to look at them. The nodes are by virtual handle.
  driverabi::GraphMemory& memory() CR_REQUIRES_SHARED(mutex_) { return memory_; }
  std::unordered_map<uint64_t, DisguisedNode>& nodes() CR_REQUIRES_SHARED(mutex_) { return nodes_; }

  // Whether there has ever been memory of a graph: what every launch of one, and every free, asks first. Without the
  // lock; the flag is set before memory() is changed for the first time.
  bool uses_memory() const { return uses_memory_.load(std::memory_order_relaxed); }
  void set_uses_memory() { uses_memory_.store(true, std::memory_order_relaxed); }
  // The same for nodes().
  bool any() const { return any_.load(std::memory_order_relaxed); }
  void set_any() { any_.store(true, std::memory_order_relaxed); }

  // The application destroyed a graph or an executable, or a capture's graph came to nothing. Appends to *gone the
  // memory that nobody can use any more. Looks at the handles of `objects`.
  void Destroyed(replay::ObjectKey object, RecordedObjects* objects, Addresses* gone) CR_EXCLUDES(mutex_);
  // A node of `parent` has taken `graph` over.
  void Moved(uint64_t graph, uint64_t parent) CR_EXCLUDES(mutex_);
  // Device memory is gone with its context.
  void ForgetMemory(uint64_t address) CR_EXCLUDES(mutex_);
  // A graph or an executable is gone.
  void ForgetInside(uint64_t graph) CR_EXCLUDES(mutex_);

 private:
  friend class Captures;  // its lock comes after this one, and says so

  SharedMutex mutex_ CR_ACQUIRED_AFTER(&RecordedObjects::mutex_);
  driverabi::GraphMemory memory_ CR_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, DisguisedNode> nodes_ CR_GUARDED_BY(mutex_);
  std::atomic<bool> uses_memory_{false};
  std::atomic<bool> any_{false};
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_SESSION_DISGUISED_NODES_H_
