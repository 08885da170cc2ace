// SPDX-License-Identifier: Apache-2.0
#include "client/graphs/disguised_nodes.h"

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
    orders_.erase(object.id);
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

bool DisguisedNodes::IsUnderLocked(uint64_t at, uint64_t whole, ObjectTable* handles, bool* in_body) const {
  *in_body = false;
  while (at != 0 && at != whole) {
    if (bodies_.count(at) != 0) *in_body = true;
    const Object* const object = handles->Find(KindOf(at), at);
    // A node that the application took out of its graph may live on for copies from before.
    at = object && object->active ? object->parent : 0;
  }
  return at != 0;
}

std::vector<StagedInExec> DisguisedNodes::StagedUnderLocked(uint64_t graph, ObjectTable* handles) const {
  std::map<std::pair<uint64_t, uint64_t>, StagedInExec> in_order;  // a clone that was moved into it has equal numbers
  for (const auto& [handle, node] : nodes_) {
    StagedInExec one{handle, node.staged};
    if (node.type != CU_GRAPH_NODE_TYPE_MEMCPY) continue;
    if (IsUnderLocked(node.graph, graph, handles, &one.in_body)) in_order[{node.number, handle}] = one;
  }
  std::vector<StagedInExec> found;
  for (const auto& [place, node] : in_order) found.push_back(node);
  return found;
}

std::vector<StagedInExec*> DisguisedNodes::StagedInLocked(uint64_t exec, uint64_t inside, ObjectTable* handles) {
  std::vector<StagedInExec*> found;
  const auto all = staged_.find(exec);
  if (all == staged_.end()) return found;
  for (StagedInExec& one : all->second) {
    bool in_body;
    if (inside == 0 || (one.node != inside && IsUnderLocked(one.node, inside, handles, &in_body))) {
      found.push_back(&one);
    }
  }
  return found;
}

void DisguisedNodes::Instantiated(uint64_t graph, uint64_t exec, RecordedObjects* objects) {
  if (!any()) return;
  ReaderLock looking(&objects->mutex());
  WriterLock lock(&mutex_);
  std::vector<StagedInExec> found = StagedUnderLocked(graph, &objects->handles());
  bool any_at_launch = false;
  for (const StagedInExec& one : found) {
    one.params.piece->owner = exec;
    any_at_launch |= one.params.at_launch && !one.in_body;
  }
  if (!found.empty()) staged_[exec] = std::move(found);
  if (any_at_launch) any_at_launch_.store(true, std::memory_order_relaxed);
}

void DisguisedNodes::Updated(uint64_t graph, uint64_t exec, uint64_t inside, RecordedObjects* objects) {
  if (!any()) return;
  ReaderLock looking(&objects->mutex());
  WriterLock lock(&mutex_);
  const std::vector<StagedInExec*> changed = StagedInLocked(exec, inside, &objects->handles());
  const std::vector<StagedInExec> from = StagedUnderLocked(graph, &objects->handles());
  if (from.size() != changed.size()) return;
  for (size_t i = 0; i < from.size(); ++i) {
    changed[i]->params = from[i].params;
    from[i].params.piece->owner = exec;
    if (from[i].params.at_launch) any_at_launch_.store(true, std::memory_order_relaxed);
  }
}

std::vector<StagedInExec> DisguisedNodes::WouldStayDisabled(uint64_t graph, uint64_t exec, uint64_t inside,
                                                            RecordedObjects* objects) {
  std::vector<StagedInExec> found;
  if (!any()) return found;
  ReaderLock looking(&objects->mutex());
  ReaderLock lock(&mutex_);
  const std::vector<StagedInExec*> updated = StagedInLocked(exec, inside, &objects->handles());
  if (updated.empty()) return found;
  const std::vector<StagedInExec> from = StagedUnderLocked(graph, &objects->handles());
  for (size_t i = 0; i < from.size() && from.size() == updated.size(); ++i) {
    if (!updated[i]->enabled) found.push_back(from[i]);
  }
  return found;
}

std::vector<StagedInExec> DisguisedNodes::StagedUnder(uint64_t graph, RecordedObjects* objects) {
  if (!any()) return {};
  ReaderLock looking(&objects->mutex());
  ReaderLock lock(&mutex_);
  return StagedUnderLocked(graph, &objects->handles());
}

void DisguisedNodes::NoteCopied(uint64_t graph, RecordedObjects* objects) {
  if (!any()) return;
  ReaderLock looking(&objects->mutex());
  WriterLock lock(&mutex_);
  if (!StagedUnderLocked(graph, &objects->handles()).empty()) copied_.insert(graph);
}

void DisguisedNodes::NoteCaptured(uint64_t exec) {
  WriterLock lock(&mutex_);
  copied_.insert(exec);
}

std::vector<uint64_t> DisguisedNodes::Unexplored(uint64_t graph, RecordedObjects* objects) {
  std::vector<uint64_t> found;
  if (!any()) return found;
  ReaderLock looking(&objects->mutex());
  ReaderLock lock(&mutex_);
  for (const uint64_t copied : copied_) {
    for (const uint64_t made : objects->graph_records().UsersOf(copied)) {
      bool in_body;
      if (KindOf(made) == Kind::kGraphExec || explored_.count(made) != 0) continue;
      if (IsUnderLocked(made, graph, &objects->handles(), &in_body)) found.push_back(made);
    }
  }
  return found;
}

void DisguisedNodes::NoteExplored(const std::vector<uint64_t>& made) {
  WriterLock lock(&mutex_);
  explored_.insert(made.begin(), made.end());
}

void DisguisedNodes::ForgetGraphOf(uint64_t node, RecordedObjects* objects) {
  if (!any()) return;
  ReaderLock looking(&objects->mutex());
  WriterLock lock(&mutex_);
  explored_.erase(node);
  for (auto one = nodes_.begin(); one != nodes_.end();) {
    bool in_body;
    const bool is_inside = IsUnderLocked(one->second.graph, node, &objects->handles(), &in_body);
    one = is_inside ? nodes_.erase(one) : std::next(one);
  }
}

void DisguisedNodes::NoteBody(uint64_t graph) {
  WriterLock lock(&mutex_);
  bodies_.insert(graph);
}

bool DisguisedNodes::IsOfOthers(const StagedCopy& piece, uint64_t exec) {
  ReaderLock lock(&mutex_);
  return piece.owner != 0 && piece.owner != exec;
}

std::shared_ptr<Mutex> DisguisedNodes::OrderOf(uint64_t exec) {
  WriterLock lock(&mutex_);
  std::shared_ptr<Mutex>& order = orders_[exec];
  if (!order) order = std::make_shared<Mutex>();
  return order;
}

void DisguisedNodes::Moved(uint64_t graph, uint64_t parent) {
  if (!uses_memory()) return;
  WriterLock lock(&mutex_);
  memory_.Move(graph, parent, true);
}

void DisguisedNodes::ForgetNode(uint64_t node) {
  if (!any()) return;
  WriterLock lock(&mutex_);
  nodes_.erase(node);
  explored_.erase(node);
}

void DisguisedNodes::ForgetInside(uint64_t graph) {
  if (!uses_memory() && !any()) return;
  WriterLock lock(&mutex_);
  memory_.ForgetInside(graph);
  staged_.erase(graph);
  copied_.erase(graph);
  explored_.erase(graph);
  bodies_.erase(graph);
  orders_.erase(graph);
}

}  // namespace cuda_remote::client
