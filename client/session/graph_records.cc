// SPDX-License-Identifier: Apache-2.0
#include "client/session/graph_records.h"

#include <algorithm>

#include "client/session/graph_edges.h"
#include "proto/codec/graph.gen.h"

namespace cuda_remote::client {
namespace {

// Makes another key of a setting's. Keys are virtual handles and small numbers.
constexpr uint64_t kOtherKey = uint64_t(1) << 61;

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
  std::vector<RemovedNode> removed;
  if (mine != users.end()) {
    removed = std::move(mine->removed);
    users.erase(mine);
  }
  Release(used);
  for (const RemovedNode& one : removed) DropOrHold(one);
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
  for (const uint64_t node : EndsOfEdges(record.header.call, record.message)) {
    // The others are never taken out of the log before their graph.
    const replay::Record* const made = log_->Find({Kind::kGraphNode, node});
    if (!made || !AddsNode(made->header.call)) continue;
    Named& named = named_[node];
    named.by.push_back({record.object, record.modifies, record.header.call, record.key});
    if (named.by.size() < named.purge_at) continue;
    const auto is_gone = [this](const Naming& naming) { return !RecordOf(naming); };
    named.by.erase(std::remove_if(named.by.begin(), named.by.end(), is_gone), named.by.end());
    named.purge_at = 2 * named.by.size() + 16;
  }
}

void GraphRecords::NodeRemoved(replay::ObjectKey graph, replay::ObjectKey node) {
  const replay::Record* const made = log_->Find(node);
  const replay::Record* const removed = log_->FindSetting(graph, wire::cuGraphDestroyNode_Request::kCallId, node.id);
  if (made && removed && AddsNode(made->header.call)) DropOrHold({graph, node, made->order, removed->order});
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

void GraphRecords::DropOrHold(const RemovedNode& removed) {
  const replay::Record* const made = log_->Find(removed.node);
  if (!made || made->order != removed.made) return;  // it went with its graph
  const uint64_t node = removed.node.id;
  User* user = UserAbove(node, removed.made, removed.removed, node);
  // Graphs in the node.
  handles_->ForEachBelow(node, [&](uint64_t below) {
    if (!user) user = UserBetween(below, removed.made, removed.removed, node);
  });
  if (user) {
    user->removed.push_back(removed);
    return;
  }
  // Requests of captures name nodes, too, and stay as they are.
  for (uint64_t at = removed.graph.id; at != 0;) {
    if (const auto captures = captured_.find(at); captures != captured_.end()) {
      for (const uint64_t order : captures->second) {
        if (removed.made < order && order < removed.removed) return;
      }
    }
    const Object* const object = handles_->Find(KindOf(at), at);
    at = object ? object->parent : 0;
  }
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
  log_->ForgetSetting(removed.graph, wire::cuGraphDestroyNode_Request::kCallId, node);
  drop_(removed.node);
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
  captured_.erase(object);
  launchable_.erase(object);
  const auto it = retained_.find(object);
  if (it == retained_.end()) return;
  const std::vector<Retained> all = std::move(it->second);
  retained_.erase(it);
  for (const Retained& one : all) RemoveUser(one.used, object, one.slot);
}

}  // namespace cuda_remote::client
