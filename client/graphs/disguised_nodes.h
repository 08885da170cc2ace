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
#ifndef CUDA_REMOTE_CLIENT_GRAPHS_DISGUISED_NODES_H_
#define CUDA_REMOTE_CLIENT_GRAPHS_DISGUISED_NODES_H_

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "client/core/recorded_objects.h"
#include "client/graphs/staged_copies.h"
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
};

// A copy node of pageable memory in an executable.
struct StagedInExec {
  uint64_t node = 0;    // of the graph that the executable was made from: virtual handle
  StagedParams params;  // set last, also while the node is disabled
  bool enabled = true;
  bool in_body = false;  // of a conditional node: a launch may run it any number of times
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
  // DisguisedNode::number of a new node.
  uint64_t NextNumberLocked() CR_REQUIRES(mutex_) { return next_number_++; }

  // Whether there has ever been memory of a graph: what every launch of one, and every free, asks first. Without the
  // lock; the flag is set before memory() is changed for the first time.
  bool uses_memory() const { return uses_memory_.load(std::memory_order_relaxed); }
  void set_uses_memory() { uses_memory_.store(true, std::memory_order_relaxed); }
  // The same for nodes().
  bool any() const { return any_.load(std::memory_order_relaxed); }
  void set_any() { any_.store(true, std::memory_order_relaxed); }

  // Whether a launch may have bytes to move: what every launch asks first.
  bool any_at_launch() const { return any_at_launch_.load(std::memory_order_relaxed); }
  void set_any_at_launch() { any_at_launch_.store(true, std::memory_order_relaxed); }

  // The application destroyed a graph or an executable, or a capture's graph came to nothing. Appends to *gone the
  // memory that nobody can use any more. Looks at the handles of `objects`.
  void Destroyed(replay::ObjectKey object, RecordedObjects* objects, Addresses* gone) CR_EXCLUDES(mutex_);
  // An executable was made from `graph`, or updated from it: its copy nodes of pageable memory do what those of the
  // graph do, by way of the same pieces, which are the executable's now. Nodes are paired in their order, as the driver
  // pairs those of graphs that were built alike. An update leaves them enabled or disabled, as natively. `inside`: not
  // all of the executable was updated, but the graph in that node; 0: all.
  void Instantiated(uint64_t graph, uint64_t exec, RecordedObjects* objects) CR_EXCLUDES(mutex_);
  void Updated(uint64_t graph, uint64_t exec, uint64_t inside, RecordedObjects* objects) CR_EXCLUDES(mutex_);
  // The nodes of `graph` that an update would pair with disabled nodes of the executable.
  std::vector<StagedInExec> WouldStayDisabled(uint64_t graph, uint64_t exec, uint64_t inside, RecordedObjects* objects)
      CR_EXCLUDES(mutex_);
  // The copy nodes of pageable memory, in a graph and in those inside it, that are child graphs to the server: first
  // the graph's own, in the order in which they were made, then the others.
  std::vector<StagedInExec> StagedUnder(uint64_t graph, RecordedObjects* objects) CR_EXCLUDES(mutex_);

  // Something is about to be made from `graph` that will have its nodes' pieces: a clone, or a node. What is not known
  // of that is found when it is needed (Unexplored). NoteCaptured: an executable becomes part of a captured graph.
  void NoteCopied(uint64_t graph, RecordedObjects* objects) CR_EXCLUDES(mutex_);
  void NoteCaptured(uint64_t exec) CR_EXCLUDES(mutex_);
  // What was made like that, is part of `graph` or that graph itself, and was not looked at.
  std::vector<uint64_t> Unexplored(uint64_t graph, RecordedObjects* objects) CR_EXCLUDES(mutex_);
  void NoteExplored(const std::vector<uint64_t>& made) CR_EXCLUDES(mutex_);
  // Another child graph was put into the node.
  void ForgetGraphOf(uint64_t node, RecordedObjects* objects) CR_EXCLUDES(mutex_);
  // The graph is the body of a conditional node.
  void NoteBody(uint64_t graph) CR_EXCLUDES(mutex_);
  // DisguisedNode::number of nodes inside others begins here.
  static constexpr uint64_t kFirstInside = uint64_t(1) << 62;

  // Whether another executable than this one copies by way of the piece. 0: a new one.
  bool IsOfOthers(const StagedCopy& piece, uint64_t exec) CR_EXCLUDES(mutex_);
  // Held over the launches of an executable whose bytes are taken at the call, so that they reach the server in the
  // order in which that was done. It is taken before any lock of the session.
  std::shared_ptr<Mutex> OrderOf(uint64_t exec) CR_EXCLUDES(mutex_);
  // A node of `parent` has taken `graph` over.
  void Moved(uint64_t graph, uint64_t parent) CR_EXCLUDES(mutex_);
  // Device memory is gone with its context.
  void ForgetMemory(uint64_t address) CR_EXCLUDES(mutex_) {
    if (!uses_memory()) return;
    WriterLock lock(&mutex_);
    memory_.Forget(address);
  }
  // The application took a node out of its graph, or its graph is gone.
  void ForgetNode(uint64_t node) CR_EXCLUDES(mutex_);
  // A graph or an executable is gone.
  void ForgetInside(uint64_t graph) CR_EXCLUDES(mutex_);

 private:
  friend class Captures;  // its lock comes after this one, and says so

  std::vector<StagedInExec> StagedUnderLocked(uint64_t graph, ObjectTable* handles) const CR_REQUIRES_SHARED(mutex_);
  // Whether the graph or node is `whole`, or in it. *in_body: whether a body of a conditional node is between the two.
  bool IsUnderLocked(uint64_t at, uint64_t whole, ObjectTable* handles, bool* in_body) const CR_REQUIRES_SHARED(mutex_);
  // The executable's nodes; those inside `inside` if that is not 0.
  std::vector<StagedInExec*> StagedInLocked(uint64_t exec, uint64_t inside, ObjectTable* handles)
      CR_REQUIRES_SHARED(mutex_);

  SharedMutex mutex_ CR_ACQUIRED_AFTER(&RecordedObjects::mutex_);
  driverabi::GraphMemory memory_ CR_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, DisguisedNode> nodes_ CR_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, std::vector<StagedInExec>> staged_ CR_GUARDED_BY(mutex_);
  std::unordered_set<uint64_t> copied_ CR_GUARDED_BY(mutex_);    // graphs and executables: NoteCopied, NoteCaptured
  std::unordered_set<uint64_t> explored_ CR_GUARDED_BY(mutex_);  // graphs, nodes and captures made from those
  std::unordered_set<uint64_t> bodies_ CR_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, std::shared_ptr<Mutex>> orders_ CR_GUARDED_BY(mutex_);
  uint64_t next_number_ CR_GUARDED_BY(mutex_) = 0;
  std::atomic<bool> uses_memory_{false};
  std::atomic<bool> any_{false};
  std::atomic<bool> any_at_launch_{false};
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_GRAPHS_DISGUISED_NODES_H_
