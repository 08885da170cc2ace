// SPDX-License-Identifier: Apache-2.0
// Graphs of the application, and captures that make them: the parts that know of them, and what ends with one.
//
// Threads and locks: each part has its own, and says so. What a function here locks, it says.
#ifndef CUDA_REMOTE_CLIENT_GRAPHS_GRAPHS_H_
#define CUDA_REMOTE_CLIENT_GRAPHS_GRAPHS_H_

#include <cstdint>

#include "client/core/recorded_objects.h"
#include "client/core/server_requests.h"
#include "client/graphs/asked_nodes.h"
#include "client/graphs/captures.h"
#include "client/graphs/disguised_nodes.h"
#include "client/graphs/driver_execs.h"
#include "client/graphs/staged_copies.h"
#include "client/memory/memory.h"
#include "replay/log/log.h"

namespace cuda_remote::client {

class Graphs {
 public:
  // All outlive this. None is used before the session is open.
  Graphs(RecordedObjects* objects, Memory* memory, ServerRequests* requests)
      : objects_(objects), memory_(memory), requests_(requests), captures_(memory) {}

  DisguisedNodes& disguised_nodes() { return disguised_nodes_; }
  DriverExecs& driver_execs() { return driver_execs_; }
  AskedNodes& asked_nodes() { return asked_nodes_; }
  StagedCopies& staged_copies() { return staged_copies_; }
  Captures& captures() { return captures_; }

  // Gives memory of graphs back that nobody can use any more, once the GPU is idle; does not wait. Locks the session's
  // objects and memory.
  void FreeMemory(const DisguisedNodes::Addresses& gone);
  // The application destroyed a graph or an executable. Locks as FreeMemory, and disguised_nodes().
  void Destroyed(replay::ObjectKey object);
  // A capture came to nothing: its own graph is gone, with its nodes and their memory. Locks as Destroyed.
  void CaptureFailed(const CaptureRecord& failed);
  // `node` of `parent` has taken `graph` over: it keeps its handle, and dies with the node. Locks the session's objects
  // and disguised_nodes().
  void Moved(uint64_t graph, uint64_t node, uint64_t parent);

  // A node, or a graph with its nodes, is gone for the application: frees what was answered about them. `objects` are
  // the session's.
  void ForgetAskedLocked(RecordedObjects& objects, uint64_t graph_or_node) CR_REQUIRES_SHARED(objects.mutex());
  // A graph, a node, an executable, a stream or an event is gone.
  void ForgetGoneLocked(RecordedObjects& objects, const replay::ObjectKey& dead) CR_REQUIRES_SHARED(objects.mutex());

 private:
  RecordedObjects* const objects_;
  Memory* const memory_;
  ServerRequests* const requests_;
  DisguisedNodes disguised_nodes_;
  DriverExecs driver_execs_;
  AskedNodes asked_nodes_;
  StagedCopies staged_copies_;
  Captures captures_;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_GRAPHS_GRAPHS_H_
