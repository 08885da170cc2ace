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
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "client/session/recorded_objects.h"
#include "client/session/staged_copies.h"
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
  // Copy of pageable memory: what the application asked for, the user object by which the node's graph has its pinned
  // memory, and a number that rises with every such node. A clone's node has the number of its original.
  StagedParams staged;
  uint64_t user_object = 0;
  uint64_t number = 0;
  // Instead of the latter two: a copy node that was made with other memory, and is one to the server, too.
  std::shared_ptr<const LaunchCopy> at_launch;
};

// A copy node of pageable memory in an executable.
struct StagedInExec {
  uint64_t node = 0;    // of the graph that the executable was made from: virtual handle
  StagedParams params;  // set last, also while the node is disabled
  bool enabled = true;
};

// A copy node of an executable whose bytes are moved before and after each launch.
struct LaunchedInExec {
  uint64_t node = 0;  // as above
  std::shared_ptr<const LaunchCopy> copy;
  bool enabled = true;
};

class DisguisedNodes {
 public:
  using Addresses = driverabi::GraphMemory::Addresses;

  SharedMutex& mutex() CR_RETURNS(mutex_) { return mutex_; }

  // Under mutex(), shared to look at them. The nodes are by virtual handle.
  driverabi::GraphMemory& memory() CR_REQUIRES_SHARED(mutex_) { return memory_; }
  std::unordered_map<uint64_t, DisguisedNode>& nodes() CR_REQUIRES_SHARED(mutex_) { return nodes_; }
  // Those nodes that are child graphs to the server, in executables, by virtual handle, in the order in which the nodes
  // were made.
  std::unordered_map<uint64_t, std::vector<StagedInExec>>& staged() CR_REQUIRES_SHARED(mutex_) { return staged_; }
  // The nodes of executables whose bytes are moved around launches, by virtual handle.
  std::unordered_map<uint64_t, std::vector<LaunchedInExec>>& launched() CR_REQUIRES_SHARED(mutex_) { return launched_; }
  // DisguisedNode::number of a new node.
  uint64_t NextNumberLocked() CR_REQUIRES(mutex_) { return next_number_++; }

  // Whether there has ever been memory of a graph: what every launch of one, and every free, asks first. Without the
  // lock; the flag is set before memory() is changed for the first time.
  bool uses_memory() const { return uses_memory_.load(std::memory_order_relaxed); }
  void set_uses_memory() { uses_memory_.store(true, std::memory_order_relaxed); }
  // The same for nodes().
  bool any() const { return any_.load(std::memory_order_relaxed); }
  void set_any() { any_.store(true, std::memory_order_relaxed); }

  // The same for launched(): what every launch asks first.
  bool any_launched() const { return any_launched_.load(std::memory_order_relaxed); }

  // The application destroyed a graph or an executable, or a capture's graph came to nothing. Appends to *gone the
  // memory that nobody can use any more. Looks at the handles of `objects`.
  void Destroyed(replay::ObjectKey object, RecordedObjects* objects, Addresses* gone) CR_EXCLUDES(mutex_);
  // An executable was made from `graph`, or updated from it: its copy nodes of pageable memory do what those of the
  // graph do. Nodes are paired in their order, as the driver pairs those of graphs that were built alike. An update
  // leaves them enabled or disabled, as natively.
  void Instantiated(uint64_t graph, uint64_t exec) CR_EXCLUDES(mutex_);
  void Updated(uint64_t graph, uint64_t exec) CR_EXCLUDES(mutex_);
  // The nodes of `graph` that an update would pair with disabled nodes of the executable.
  std::vector<StagedInExec> WouldStayDisabled(uint64_t graph, uint64_t exec) CR_EXCLUDES(mutex_);
  // The nodes of a graph whose bytes are moved around the launches of its executables; and those of an executable.
  std::vector<LaunchedInExec> LaunchedOf(uint64_t graph) CR_EXCLUDES(mutex_);
  std::vector<LaunchedInExec> LaunchedInside(uint64_t exec) CR_EXCLUDES(mutex_);
  void SetLaunched(uint64_t exec, std::vector<LaunchedInExec> nodes) CR_EXCLUDES(mutex_);
  // One of them, or another node, was enabled or disabled, or given memory that the server reaches.
  void EnableLaunched(uint64_t exec, uint64_t node, bool enabled) CR_EXCLUDES(mutex_);
  void ForgetLaunched(uint64_t exec, uint64_t node) CR_EXCLUDES(mutex_);
  // A node was taken out of the graph, or given another child graph: executables from before may have others in them.
  void NoteReshaped(uint64_t graph) CR_EXCLUDES(mutex_);
  bool IsReshaped(uint64_t graph) CR_EXCLUDES(mutex_);
  // A node of `parent` has taken `graph` over.
  void Moved(uint64_t graph, uint64_t parent) CR_EXCLUDES(mutex_);
  // Device memory is gone with its context.
  void ForgetMemory(uint64_t address) CR_EXCLUDES(mutex_);
  // The application took a node out of its graph, or its graph is gone.
  void ForgetNode(uint64_t node) CR_EXCLUDES(mutex_);
  // A graph or an executable is gone.
  void ForgetInside(uint64_t graph) CR_EXCLUDES(mutex_);

 private:
  friend class Captures;  // its lock comes after this one, and says so

  // The copy nodes of pageable memory in a graph that are child graphs to the server, in their order.
  std::vector<StagedInExec> StagedOfLocked(uint64_t graph) const CR_REQUIRES_SHARED(mutex_);

  SharedMutex mutex_ CR_ACQUIRED_AFTER(&RecordedObjects::mutex_);
  driverabi::GraphMemory memory_ CR_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, DisguisedNode> nodes_ CR_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, std::vector<StagedInExec>> staged_ CR_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, std::vector<LaunchedInExec>> launched_ CR_GUARDED_BY(mutex_);
  std::unordered_set<uint64_t> reshaped_ CR_GUARDED_BY(mutex_);
  uint64_t next_number_ CR_GUARDED_BY(mutex_) = 0;
  std::atomic<bool> uses_memory_{false};
  std::atomic<bool> any_{false};
  std::atomic<bool> any_launched_{false};
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_SESSION_DISGUISED_NODES_H_
