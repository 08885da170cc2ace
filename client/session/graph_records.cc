// SPDX-License-Identifier: Apache-2.0
#include "client/session/graph_records.h"

#include <algorithm>

#include "proto/codec/graph.gen.h"

namespace cuda_remote::client {
namespace {

// Makes another key of a setting's. Keys are virtual handles and small numbers.
constexpr uint64_t kOtherKey = uint64_t(1) << 61;

}  // namespace

void GraphRecords::Retain(uint64_t user, uint64_t slot, uint64_t used) {
  uses_[used].users.push_back({user, log_->last_order()});
  for (Retained& one : retained_[user]) {
    if (one.slot != slot) continue;
    const uint64_t before = one.used;
    one.used = used;
    RemoveUser(&uses_[before], user);
    Release(before);
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

void GraphRecords::RemoveUser(Use* use, uint64_t user) {
  // The oldest of several: a newer slot of the same user holds what it took later.
  const auto mine =
      std::find_if(use->users.begin(), use->users.end(), [user](const User& u) { return u.handle == user; });
  if (mine != use->users.end()) use->users.erase(mine);
}

void GraphRecords::ModifyNode(replay::ObjectKey node, uint64_t key, const FrameHeader& header,
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
    }
  }
  const uint64_t log_key = key_taken ? next_setting_key_++ : key;
  log_->Modify(node, log_key, header, message, needs);
  kept.push_back({log_key, log_->last_order()});
  settings = std::move(kept);
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
  launchable_.erase(object);
  const auto it = retained_.find(object);
  if (it == retained_.end()) return;
  const std::vector<Retained> all = std::move(it->second);
  retained_.erase(it);
  for (const Retained& one : all) {
    RemoveUser(&uses_[one.used], object);
    Release(one.used);
  }
}

void GraphRecords::UserObjectGone(uint64_t user_object) {
  const auto found = user_object_settings_.find(user_object);
  if (found == user_object_settings_.end()) return;
  for (const GraphSetting& one : found->second) log_->ForgetSetting(one.graph, one.call, one.key);
  user_object_settings_.erase(found);
}

}  // namespace cuda_remote::client
