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
    launched_.erase(object.id);
    return;
  }
  ReaderLock looking(&objects->mutex());
  WriterLock lock(&mutex_);
  memory_.GraphDestroyed(object.id, gone);
  reshaped_.erase(object.id);
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
    if (node.graph != graph || node.type != CU_GRAPH_NODE_TYPE_MEMCPY || node.at_launch) continue;
    in_order[node.number] = {handle, node.staged};
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
  for (const auto& [node, facts] : nodes_) {
    if (facts.graph == graph && facts.at_launch) launched_[exec].push_back({node, facts.at_launch});
  }
  if (!launched_.empty()) any_launched_.store(true, std::memory_order_relaxed);
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

std::vector<LaunchedInExec> DisguisedNodes::LaunchedOf(uint64_t graph) {
  std::vector<LaunchedInExec> found;
  if (!any()) return found;
  ReaderLock lock(&mutex_);
  for (const auto& [node, facts] : nodes_) {
    if (facts.graph == graph && facts.at_launch) found.push_back({node, facts.at_launch});
  }
  return found;
}

std::vector<LaunchedInExec> DisguisedNodes::LaunchedInside(uint64_t exec) {
  if (!any_launched()) return {};
  ReaderLock lock(&mutex_);
  const auto found = launched_.find(exec);
  return found == launched_.end() ? std::vector<LaunchedInExec>() : found->second;
}

void DisguisedNodes::SetLaunched(uint64_t exec, std::vector<LaunchedInExec> nodes) {
  if (nodes.empty() && !any_launched()) return;
  any_.store(true, std::memory_order_relaxed);
  any_launched_.store(true, std::memory_order_relaxed);
  WriterLock lock(&mutex_);
  if (nodes.empty()) {
    launched_.erase(exec);
  } else {
    launched_[exec] = std::move(nodes);
  }
}

void DisguisedNodes::EnableLaunched(uint64_t exec, uint64_t node, bool enabled) {
  if (!any_launched()) return;
  WriterLock lock(&mutex_);
  const auto found = launched_.find(exec);
  if (found == launched_.end()) return;
  for (LaunchedInExec& one : found->second) {
    if (one.node == node) one.enabled = enabled;
  }
}

void DisguisedNodes::ForgetLaunched(uint64_t exec, uint64_t node) {
  std::vector<LaunchedInExec> left;
  for (LaunchedInExec& one : LaunchedInside(exec)) {
    if (one.node != node) left.push_back(std::move(one));
  }
  SetLaunched(exec, std::move(left));
}

void DisguisedNodes::NoteReshaped(uint64_t graph) {
  any_.store(true, std::memory_order_relaxed);
  WriterLock lock(&mutex_);
  reshaped_.insert(graph);
}

bool DisguisedNodes::IsReshaped(uint64_t graph) {
  if (!any()) return false;
  ReaderLock lock(&mutex_);
  return reshaped_.count(graph) != 0;
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
  launched_.erase(graph);
  reshaped_.erase(graph);
}

}  // namespace cuda_remote::client
