// SPDX-License-Identifier: Apache-2.0
#include "client/session/disguised_nodes.h"

#include <iterator>
#include <map>
#include <utility>

namespace cuda_remote::client {

void DisguisedNodes::Destroyed(replay::ObjectKey object, RecordedObjects* objects, Addresses* gone) {
  if (!uses_memory() && !any()) return;
  if (object.kind == Kind::kGraphExec) {
    WriterLock lock(&mutex_);
    memory_.ExecDestroyed(object.id, gone);
    staged_.erase(object.id);
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

std::vector<StagedInExec> DisguisedNodes::StagedOfLocked(uint64_t graph) const {
  std::map<uint64_t, StagedInExec> in_order;
  for (const auto& [handle, node] : nodes_) {
    if (node.graph == graph && node.type == CU_GRAPH_NODE_TYPE_MEMCPY) in_order[node.number] = {handle, node.staged};
  }
  std::vector<StagedInExec> found;
  for (const auto& [number, node] : in_order) found.push_back(node);
  return found;
}

void DisguisedNodes::Instantiated(uint64_t graph, uint64_t exec) {
  if (!any()) return;
  WriterLock lock(&mutex_);
  std::vector<StagedInExec> found = StagedOfLocked(graph);
  if (!found.empty()) staged_[exec] = std::move(found);
}

void DisguisedNodes::Updated(uint64_t graph, uint64_t exec) {
  if (!any()) return;
  WriterLock lock(&mutex_);
  const auto changed = staged_.find(exec);
  if (changed == staged_.end()) return;
  const std::vector<StagedInExec> from = StagedOfLocked(graph);
  if (from.size() != changed->second.size()) return;
  for (size_t i = 0; i < from.size(); ++i) changed->second[i].params = from[i].params;
}

std::vector<StagedInExec> DisguisedNodes::WouldStayDisabled(uint64_t graph, uint64_t exec) {
  std::vector<StagedInExec> found;
  if (!any()) return found;
  ReaderLock lock(&mutex_);
  const auto updated = staged_.find(exec);
  if (updated == staged_.end()) return found;
  const std::vector<StagedInExec> from = StagedOfLocked(graph);
  for (size_t i = 0; i < from.size() && from.size() == updated->second.size(); ++i) {
    if (!updated->second[i].enabled) found.push_back(from[i]);
  }
  return found;
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

void DisguisedNodes::ForgetNode(uint64_t node) {
  if (!any()) return;
  WriterLock lock(&mutex_);
  nodes_.erase(node);
}

void DisguisedNodes::ForgetInside(uint64_t graph) {
  if (!uses_memory() && !any()) return;
  WriterLock lock(&mutex_);
  memory_.ForgetInside(graph);
  staged_.erase(graph);
}

}  // namespace cuda_remote::client
