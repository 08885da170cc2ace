// SPDX-License-Identifier: Apache-2.0
#include "client/session/disguised_nodes.h"

#include <iterator>

namespace cuda_remote::client {

void DisguisedNodes::Destroyed(replay::ObjectKey object, RecordedObjects* objects, Addresses* gone) {
  if (!uses_memory() && !any()) return;
  if (object.kind == Kind::kGraphExec) {
    WriterLock lock(&mutex_);
    memory_.ExecDestroyed(object.id, gone);
    return;
  }
  ReaderLock looking(&objects->mutex());
  WriterLock lock(&mutex_);
  memory_.GraphDestroyed(object.id, gone);
  for (auto node = nodes_.begin(); node != nodes_.end();) {
    // Graphs that were moved into it went with it.
    const uint64_t its_graph = node->second.graph;
    const bool dead = its_graph == object.id || !objects->handles().Find(Kind::kGraph, its_graph);
    node = dead ? nodes_.erase(node) : std::next(node);
  }
}

void DisguisedNodes::Moved(uint64_t graph, uint64_t parent) {
  if (!uses_memory()) return;
  WriterLock lock(&mutex_);
  memory_.Move(graph, parent, true);
}

void DisguisedNodes::ForgetMemory(uint64_t address) {
  if (!uses_memory()) return;
  WriterLock lock(&mutex_);
  memory_.Forget(address);
}

void DisguisedNodes::ForgetInside(uint64_t graph) {
  if (!uses_memory()) return;
  WriterLock lock(&mutex_);
  memory_.ForgetInside(graph);
}

}  // namespace cuda_remote::client
