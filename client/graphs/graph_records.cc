// SPDX-License-Identifier: Apache-2.0
#include "client/graphs/graph_records.h"

#include <algorithm>
#include <cstring>

#include "proto/codec/graph.gen.h"
#include "proto/codec/operations.gen.h"

namespace cuda_remote::client {
namespace {

// Makes another key of a setting's. Keys are virtual handles and small numbers.
constexpr uint64_t kOtherKey = uint64_t(1) << 61;

// Whether bytes of requests may hold a number: in an array, or as a field of its own.
bool MayHold(std::string_view bytes, uint64_t number) {
  const std::string_view in_array(reinterpret_cast<const char*>(&number), sizeof number);
  std::string field;
  for (uint64_t rest = number; rest != 0; rest >>= 7) field += char((rest & 0x7f) | (rest > 0x7f ? 0x80 : 0));
  return bytes.find(in_array) != bytes.npos || bytes.find(field) != bytes.npos;
}

// The requests of a capture (CaptureRecord::frames): the message of the first one, and how long the first one is.
// False if that does not begin a capture into a graph.
bool ReadBegin(const std::string& requests, FrameHeader* header, std::string_view* message, size_t* bytes) {
  if (requests.size() < sizeof *header) return false;
  memcpy(header, requests.data(), sizeof *header);
  *bytes = sizeof *header + (size_t(header->message_bytes) + 7) / 8 * 8;
  if (!CapturesInto(header->call) || requests.size() < *bytes) return false;
  *message = std::string_view(requests).substr(sizeof *header, header->message_bytes);
  return true;
}

}  // namespace

void GraphRecords::Retain(uint64_t user, uint64_t slot, uint64_t used) {
  uses_[used].users.push_back({user, slot, log_->last_order(), {}});
  for (Retained& one : retained_[user]) {
    if (one.slot != slot) continue;
    const uint64_t before = one.used;
    one.used = used;
    RemoveUser(before, user, slot);
    return;
  }
  retained_[user].push_back({slot, used});
}

std::vector<uint64_t> GraphRecords::UsersOf(uint64_t used) const {
  std::vector<uint64_t> users;
  if (const auto use = uses_.find(used); use != uses_.end()) {
    for (const User& user : use->second.users) users.push_back(user.handle);
  }
  return users;
}

void GraphRecords::RemoveUser(uint64_t used, uint64_t user, uint64_t slot) {
  const auto use = uses_.find(used);
  if (use == uses_.end()) return;
  // The older of two: the slot may have been filled anew with the same.
  std::vector<User>& users = use->second.users;
  const auto mine =
      std::find_if(users.begin(), users.end(), [&](const User& one) { return one.handle == user && one.slot == slot; });
  Held held;
  if (mine != users.end()) {
    held = std::move(mine->held);
    users.erase(mine);
  }
  Release(used);
  DropOrHold(held);
}

void GraphRecords::ReleaseSlot(uint64_t user, uint64_t slot) {
  const auto retained = retained_.find(user);
  if (retained == retained_.end()) return;
  const auto one = std::find_if(retained->second.begin(), retained->second.end(),
                                [slot](const Retained& r) { return r.slot == slot; });
  if (one == retained->second.end()) return;
  const uint64_t used = one->used;
  retained->second.erase(one);
  RemoveUser(used, user, slot);
}

const replay::Record* GraphRecords::RecordOf(const Naming& naming) const {
  return naming.modifies ? log_->FindSetting(naming.object, naming.call, naming.key) : log_->Find(naming.object);
}

void GraphRecords::NoteEdges(const replay::Record& record) {
  const Naming naming{record.object, record.modifies, record.header.call, record.key};
  for (const uint64_t node : EndsOfEdges(naming.call, record.message)) {
    // The others are never taken out of the log before their graph.
    const replay::Record* const made = log_->Find({Kind::kGraphNode, node});
    if (!(made && AddsNode(made->header.call)) && captured_by_.count(node) == 0) continue;
    Named& named = named_[node];
    named.by.push_back(naming);
    if (named.by.size() < named.purge_at) continue;
    const auto is_gone = [this](const Naming& naming) { return !RecordOf(naming); };
    named.by.erase(std::remove_if(named.by.begin(), named.by.end(), is_gone), named.by.end());
    named.purge_at = 2 * named.by.size() + 16;
  }
  const bool adds = AddsEdges(naming.call);
  if (!adds && !RemovesEdges(naming.call)) return;
  const std::set<Edge> edges = EdgesOf(naming.call, record.message);
  if (edges.empty()) return log_->ForgetSetting(naming.object, naming.call, naming.key);
  if (adds) {
    for (const Edge& edge : edges) edges_added_[edge].push_back(naming);
    PurgeEdges();
    return;
  }
  // What each of them was added by, if a setting did that.
  std::map<std::pair<uint32_t, uint64_t>, RemovedEdges> removed;
  for (const Edge& edge : edges) {
    const auto found = edges_added_.find(edge);
    if (found == edges_added_.end()) continue;
    const Naming added = found->second.back();
    found->second.pop_back();
    if (found->second.empty()) edges_added_.erase(found);
    removed.try_emplace({added.call, added.key}, RemovedEdges{{}, added, naming}).first->second.edges.insert(edge);
  }
  for (const auto& [by, one] : removed) DropOrHold(one);
}

void GraphRecords::PurgeEdges() {
  if (edges_added_.size() < purge_edges_at_) return;
  for (auto of = edges_added_.begin(); of != edges_added_.end();) {
    std::vector<Naming>& by = of->second;
    by.erase(std::remove_if(by.begin(), by.end(), [this](const Naming& naming) { return !RecordOf(naming); }),
             by.end());
    of = by.empty() ? edges_added_.erase(of) : std::next(of);
  }
  purge_edges_at_ = 2 * edges_added_.size() + 64;
}

std::vector<uint64_t> GraphRecords::NodesOf(uint64_t graph) const {
  std::vector<uint64_t> nodes;
  handles_->ForEachBelow(graph, [&](uint64_t below) {
    if (KindOf(below) != Kind::kGraphNode) return;
    if (const Object* const node = handles_->Find(Kind::kGraphNode, below); node && node->parent == graph) {
      nodes.push_back(below);
    }
  });
  return nodes;
}

void GraphRecords::BeforeCapture(uint64_t graph, bool known) {
  CapturesInto& into = captured_into_[graph];
  into.known = known;
  into.before.clear();
  if (!known) return;
  for (const uint64_t node : NodesOf(graph)) into.before.insert(node);
}

void GraphRecords::CapturedInto(uint64_t graph, uint64_t capture, bool adds_only) {
  const replay::Record* const record = log_->Find({Kind::kCapture, capture});
  if (!record) return;
  CapturesInto& into = captured_into_[graph];
  into.captures.push_back({capture, record->order, adds_only && into.known, {}, 0, {}});
  CaptureInto& added = into.captures.back();
  if (added.adds_only) {
    for (const uint64_t node : NodesOf(graph)) {
      if (into.before.count(node) != 0 || log_->Find({Kind::kGraphNode, node})) continue;
      added.nodes.push_back(node);
      captured_by_[node] = capture;
    }
  }
  into.known = false;
  into.before.clear();
  DropCaptureOrHold(capture);  // if it has added nothing
}

GraphRecords::CaptureInto* GraphRecords::FindCapture(uint64_t graph, uint64_t capture) {
  const auto into = captured_into_.find(graph);
  if (into == captured_into_.end()) return nullptr;
  for (CaptureInto& one : into->second.captures) {
    if (one.handle == capture) return &one;
  }
  return nullptr;
}

bool GraphRecords::MayName(const CaptureInto& capture, uint64_t node) const {
  const replay::Record* const record = log_->Find({Kind::kCapture, capture.handle});
  // What else it may have done is compared with the whole graph (GraphShape).
  if (!capture.adds_only || !record || !record->image) return true;
  const std::string* const requests = log_->FindImage(*record->image);
  if (!requests) return true;
  FrameHeader header;
  std::string_view begin;
  size_t bytes = 0;
  if (!ReadBegin(*requests, &header, &begin, &bytes)) bytes = 0;
  return MayHold(std::string_view(*requests).substr(bytes), node);
}

GraphRecords::CaptureInto* GraphRecords::CaptureNaming(uint64_t node, uint64_t graph, uint64_t after, uint64_t before) {
  while (graph != 0) {
    if (const auto into = captured_into_.find(graph); into != captured_into_.end()) {
      for (CaptureInto& one : into->second.captures) {
        if (after < one.order && one.order < before && MayName(one, node)) return &one;
      }
    }
    const Object* const object = handles_->Find(KindOf(graph), graph);
    graph = object ? object->parent : 0;
  }
  return nullptr;
}

void GraphRecords::NodeRemoved(replay::ObjectKey graph, replay::ObjectKey node) {
  const replay::Record* const made = log_->Find(node);
  const replay::Record* const removed = log_->FindSetting(graph, wire::cuGraphDestroyNode_Request::kCallId, node.id);
  if (!removed) return;  // by a capture
  if (const auto by = captured_by_.find(node.id); by != captured_by_.end()) {
    const uint64_t capture = by->second;
    if (CaptureInto* const added = FindCapture(graph.id, capture)) ++added->removed;
    return DropCaptureOrHold(capture);
  }
  if (made && AddsNode(made->header.call)) DropOrHold({graph, node, made->order, removed->order});
}

bool GraphRecords::IsUnder(uint64_t handle, uint64_t ancestor) const {
  while (handle != 0 && handle != ancestor) {
    const Object* const object = handles_->Find(KindOf(handle), handle);
    handle = object ? object->parent : 0;
  }
  return handle != 0;
}

GraphRecords::User* GraphRecords::UserBetween(uint64_t used, uint64_t after, uint64_t before, uint64_t outside) {
  const auto use = uses_.find(used);
  if (use == uses_.end()) return nullptr;
  for (User& user : use->second.users) {
    if (after < user.order && user.order < before && (outside == 0 || !IsUnder(user.handle, outside))) return &user;
  }
  return nullptr;
}

GraphRecords::User* GraphRecords::UserAbove(uint64_t used, uint64_t after, uint64_t before, uint64_t outside) {
  while (used != 0) {
    if (User* const user = UserBetween(used, after, before, outside)) return user;
    const Object* const object = handles_->Find(KindOf(used), used);
    used = object ? object->parent : 0;
  }
  return nullptr;
}

GraphRecords::User* GraphRecords::UserOfNode(uint64_t node, uint64_t after, uint64_t before) {
  User* user = UserBetween(node, after, before, node);
  handles_->ForEachBelow(node, [&](uint64_t below) {
    if (!user) user = UserBetween(below, after, before, node);
  });
  return user;
}

void GraphRecords::DropOrHold(const Held& held) {
  for (const RemovedNode& one : held.nodes) DropOrHold(one);
  for (const RemovedEdges& one : held.edges) DropOrHold(one);
  for (const uint64_t one : held.captures) DropCaptureOrHold(one);
}

void GraphRecords::DropOrHold(const RemovedNode& removed) {
  const replay::Record* const made = log_->Find(removed.node);
  if (!made || made->order != removed.made) return;  // it went with its graph
  const uint64_t node = removed.node.id;
  User* user = UserAbove(removed.graph.id, removed.made, removed.removed, node);
  if (!user) user = UserOfNode(node, removed.made, removed.removed);
  if (user) return user->held.nodes.push_back(removed);
  // Requests of captures name nodes, too, and stay as they are.
  if (CaptureInto* const capture = CaptureNaming(node, removed.graph.id, removed.made, removed.removed)) {
    return capture->held.nodes.push_back(removed);
  }
  ForgetEdgesOf(node, removed.graph.id);
  log_->ForgetSetting(removed.graph, wire::cuGraphDestroyNode_Request::kCallId, node);
  drop_(removed.node);
}

void GraphRecords::DropOrHold(const RemovedEdges& removed) {
  const replay::Record* const before = RecordOf(removed.added);
  const replay::Record* const after = RecordOf(removed.removed);
  if (!before || !after) return;  // they went with the graph, or with nodes of it
  const uint64_t graph = removed.removed.object.id;
  if (User* const user = UserAbove(graph, before->order, after->order, 0)) return user->held.edges.push_back(removed);
  if (const auto into = captured_into_.find(graph); into != captured_into_.end()) {
    for (CaptureInto& one : into->second.captures) {
      if (!one.adds_only && before->order < one.order && one.order < after->order) {
        return one.held.edges.push_back(removed);
      }
    }
  }
  for (const Naming& naming : {removed.added, removed.removed}) {
    const std::string message = WithoutEdges(removed.edges, naming.call, RecordOf(naming)->message);
    if (message.empty()) {
      log_->ForgetSetting(naming.object, naming.call, naming.key);
    } else {
      log_->SetSettingMessage(naming.object, naming.call, naming.key, message);
    }
  }
}

void GraphRecords::DropCaptureOrHold(uint64_t capture) {
  const Object* const object = handles_->Find(Kind::kCapture, capture);
  CaptureInto* const added = object ? FindCapture(object->parent, capture) : nullptr;
  if (!added || !added->adds_only || added->removed != added->nodes.size()) return;
  const replay::ObjectKey graph{Kind::kGraph, object->parent};
  constexpr uint32_t kRemove = wire::cuGraphDestroyNode_Request::kCallId;
  uint64_t last = added->order;
  for (const uint64_t node : added->nodes) {
    const replay::Record* const removed = log_->FindSetting(graph, kRemove, node);
    if (removed) last = std::max(last, removed->order);
  }
  User* user = UserAbove(graph.id, added->order, last, 0);
  for (const uint64_t node : added->nodes) {
    if (!user) user = UserOfNode(node, added->order, last);
  }
  if (user) return user->held.captures.push_back(capture);
  for (const uint64_t node : added->nodes) {
    if (CaptureInto* const other = CaptureNaming(node, graph.id, added->order, last)) {
      return other->held.captures.push_back(capture);
    }
  }
  const std::vector<uint64_t> nodes = std::move(added->nodes);
  const Held held = std::move(added->held);
  std::vector<CaptureInto>& all = captured_into_[graph.id].captures;
  all.erase(all.begin() + (added - all.data()));
  for (const uint64_t node : nodes) {
    ForgetEdgesOf(node, graph.id);
    log_->ForgetSetting(graph, kRemove, node);
    log_->ForgetSetting(graph, wire::OpGraphNames_Request::kCallId, node);
  }
  for (const uint64_t node : nodes) drop_({Kind::kGraphNode, node});
  drop_({Kind::kCapture, capture});
  DropOrHold(held);
}

void GraphRecords::ForgetEdgesOf(uint64_t node, uint64_t graph) {
  std::vector<Naming> names;
  if (const auto named = named_.find(node); named != named_.end()) names = std::move(named->second.by);
  for (const Naming& one : names) {
    const replay::Record* const record = RecordOf(one);
    if (!record) continue;
    const std::string message = WithoutEdgesOf(node, record->header.call, record->message);
    if (one.modifies && message.empty()) {
      log_->ForgetSetting(one.object, one.call, one.key);
    } else if (one.modifies) {
      log_->SetSettingMessage(one.object, one.call, one.key, message);
    } else if (!message.empty()) {
      log_->SetMessage(one.object, message);
    }
  }
  const auto into = captured_into_.find(graph);
  if (into == captured_into_.end()) return;
  for (const CaptureInto& capture : into->second.captures) {
    const replay::Record* const record = log_->Find({Kind::kCapture, capture.handle});
    const std::string* const requests = record && record->image ? log_->FindImage(*record->image) : nullptr;
    FrameHeader header;
    std::string_view begin;
    size_t bytes = 0;
    if (!requests || !ReadBegin(*requests, &header, &begin, &bytes)) continue;
    const std::vector<uint64_t> ends = EndsOfEdges(header.call, begin);
    if (std::find(ends.begin(), ends.end(), node) == ends.end()) continue;
    const std::string message = WithoutEdgesOf(node, header.call, begin);
    header.message_bytes = uint32_t(message.size());
    std::string edited(reinterpret_cast<const char*>(&header), sizeof header);
    edited += message;
    edited.resize((edited.size() + 7) / 8 * 8);
    edited.append(*requests, bytes);
    log_->SetImage({Kind::kCapture, capture.handle}, edited);
  }
}

uint64_t GraphRecords::ModifyNode(replay::ObjectKey node, uint64_t key, const FrameHeader& header,
                                  const std::string& message, const std::vector<replay::ObjectKey>& needs) {
  std::vector<uint64_t> taken;  // when the node's graphs were copied into something that is alive
  for (uint64_t at = node.id; at != 0;) {
    if (const auto use = uses_.find(at); use != uses_.end()) {
      for (const User& user : use->second.users) taken.push_back(user.order);
    }
    const Object* const object = handles_->Find(KindOf(at), at);
    at = object ? object->parent : 0;
  }
  std::vector<NodeSetting>& settings = node_settings_[node.id][{header.call, key}];
  std::vector<NodeSetting> kept;
  std::vector<uint64_t> forgotten;
  bool key_taken = false;
  for (size_t i = 0; i < settings.size(); ++i) {
    const uint64_t until = i + 1 < settings.size() ? settings[i + 1].order : log_->last_order() + 1;
    const bool needed = std::any_of(taken.begin(), taken.end(),
                                    [&](uint64_t order) { return settings[i].order < order && order < until; });
    if (needed) {
      kept.push_back(settings[i]);
      key_taken = key_taken || settings[i].key == key;
    } else {
      log_->ForgetSetting(node, header.call, settings[i].key);
      forgotten.push_back(settings[i].key);
    }
  }
  const uint64_t log_key = key_taken ? next_setting_key_++ : key;
  log_->Modify(node, log_key, header, message, needs);
  kept.push_back({log_key, log_->last_order()});
  settings = std::move(kept);
  for (const uint64_t one : forgotten) ReleaseSlot(node.id, SlotOfSetting(header.call, one));
  return log_key;
}

uint64_t GraphRecords::ModifyExec(replay::ObjectKey exec, uint64_t key, const FrameHeader& header,
                                  const std::string& message, const std::vector<replay::ObjectKey>& needs) {
  uint64_t log_key = key;
  if (const auto found = launchable_.find(exec.id); found != launchable_.end() && found->second.uploaded) {
    ExecSetting& setting = found->second.settings[{header.call, key}];
    // Beside the uploaded one, which has one of these two keys.
    if (!setting.later) setting.later = setting.uploaded == key ? key ^ kOtherKey : key;
    log_key = *setting.later;
    found->second.changed = true;
  } else if (found != launchable_.end()) {
    found->second.settings[{header.call, key}].later = key;
  }
  log_->Modify(exec, log_key, header, message, needs);
  return log_key;
}

void GraphRecords::Uploaded(replay::ObjectKey exec) {
  const auto found = launchable_.find(exec.id);
  const replay::Record* const made = log_->Find(exec);
  if (found == launchable_.end() || !made) return;
  Launchable& launchable = found->second;
  if (launchable.uploaded && !launchable.changed) return;
  for (auto& [of, setting] : launchable.settings) {
    if (!setting.later) continue;
    if (setting.uploaded) log_->ForgetSetting(exec, of.first, *setting.uploaded);
    setting.uploaded = setting.later;
    setting.later.reset();
  }
  launchable.uploaded = true;
  launchable.changed = false;
  // In the context that the executable was made in, and in no stream: that may be gone by the time of a replay.
  wire::cuGraphUpload_Request request;
  request.hGraph = exec.id;
  std::string message;
  request.Encode(&message);
  FrameHeader header = made->header;
  header.call = wire::cuGraphUpload_Request::kCallId;
  log_->Modify(exec, 0, header, message, std::vector<replay::ObjectKey>(made->depends_on));
}

bool GraphRecords::MarkDestroyed(replay::ObjectKey object) {
  if (!IsOf(object.kind)) return false;
  const auto use = uses_.find(object.id);
  if (use == uses_.end() || use->second.users.empty() || !log_->Find(object)) return false;
  use->second.destroyed = true;
  return true;
}

void GraphRecords::Release(uint64_t used) {
  const auto use = uses_.find(used);
  if (use == uses_.end() || !use->second.users.empty()) return;
  const bool destroyed = use->second.destroyed;
  uses_.erase(use);
  if (destroyed) drop_({KindOf(used), used});
}

void GraphRecords::Forget(uint64_t object) {
  node_settings_.erase(object);
  named_.erase(object);
  captured_by_.erase(object);
  if (const auto into = captured_into_.find(object); into != captured_into_.end()) {
    for (const CaptureInto& one : into->second.captures) {
      for (const uint64_t node : one.nodes) captured_by_.erase(node);
    }
    captured_into_.erase(into);
  }
  launchable_.erase(object);
  const auto it = retained_.find(object);
  if (it == retained_.end()) return;
  const std::vector<Retained> all = std::move(it->second);
  retained_.erase(it);
  for (const Retained& one : all) RemoveUser(one.used, object, one.slot);
}

}  // namespace cuda_remote::client
