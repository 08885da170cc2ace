// SPDX-License-Identifier: Apache-2.0
#include "client/graphs/user_object_records.h"

#include <cuda.h>

#include <algorithm>
#include <string>

#include "proto/codec/decode_as.h"
#include "proto/codec/graph.gen.h"

namespace cuda_remote::client {
namespace {

using Create = wire::cuUserObjectCreate_Request;
using Release = wire::cuUserObjectRelease_Request;
using GraphRetain = wire::cuGraphRetainUserObject_Request;
using GraphRelease = wire::cuGraphReleaseUserObject_Request;

constexpr uint32_t kRetain = GraphRetain::kCallId, kRelease = GraphRelease::kCallId;

template <typename Request>
std::string Encoded(const Request& request) {
  std::string message;
  request.Encode(&message);
  return message;
}

std::string GraphMessage(bool retains, uint64_t graph, uint64_t user_object, uint32_t count) {
  if (retains) {
    GraphRetain request;
    request.graph = graph;
    request.object = user_object;
    request.count = count;
    return Encoded(request);
  }
  GraphRelease request;
  request.graph = graph;
  request.object = user_object;
  request.count = count;
  return Encoded(request);
}

replay::ObjectKey KeyOf(uint64_t user_object) { return {Kind::kUserObject, user_object}; }

}  // namespace

bool UserObjectRecords::Modify(replay::ObjectKey object, const FrameHeader& header, std::string_view message,
                               const std::vector<replay::ObjectKey>& needs) {
  wire::cuUserObjectRetain_Request retained;
  Release released;
  GraphRetain graph_retained;
  GraphRelease graph_released;
  if (wire::DecodeAs(header.call, message, &retained)) {
    if (log_->Find(object)) ProgramRetains(object.id, retained.count);
  } else if (wire::DecodeAs(header.call, message, &released)) {
    if (log_->Find(object)) ProgramReleases(object.id, released.count);
  } else if (wire::DecodeAs(header.call, message, &graph_retained)) {
    if (!log_->Find(KeyOf(graph_retained.object))) return true;
    GraphChanges(object, graph_retained.object, true, graph_retained.count, header, needs);
    // A reference that moves is a new one, and one that the program gives up.
    const bool moves = (graph_retained.flags & CU_GRAPH_USER_OBJECT_MOVE) != 0;
    ProgramReleases(graph_retained.object, moves ? graph_retained.count : 0);
  } else if (wire::DecodeAs(header.call, message, &graph_released)) {
    if (!log_->Find(KeyOf(graph_released.object))) return true;
    GraphChanges(object, graph_released.object, false, graph_released.count, header, needs);
    ProgramReleases(graph_released.object, 0);
  } else {
    return false;
  }
  return true;
}

uint32_t UserObjectRecords::ReleasedCount(uint64_t user_object) const {
  const replay::Record* const record = log_->FindSetting(KeyOf(user_object), Release::kCallId, 0);
  Release released;
  return record && released.Decode(record->message) ? released.count : 0;
}

void UserObjectRecords::SetReleasedCount(uint64_t user_object, uint32_t count) {
  if (count == 0) return log_->ForgetSetting(KeyOf(user_object), Release::kCallId, 0);
  Release request;
  request.object = user_object;
  request.count = count;
  FrameHeader header;
  header.call = Release::kCallId;
  log_->Modify(KeyOf(user_object), 0, header, Encoded(request));
}

uint32_t UserObjectRecords::CreatedCount(uint64_t user_object) const {
  const replay::Record* const record = log_->Find(KeyOf(user_object));
  Create created;
  return record && created.Decode(record->message) ? created.count : 0;
}

void UserObjectRecords::ProgramRetains(uint64_t user_object, uint32_t count) {
  const uint32_t released = ReleasedCount(user_object), taken_back = std::min(released, count);
  if (taken_back > 0) SetReleasedCount(user_object, released - taken_back);
  Create created;
  if (count == taken_back || !created.Decode(log_->Find(KeyOf(user_object))->message)) return;
  created.count += count - taken_back;
  log_->SetMessage(KeyOf(user_object), Encoded(created));
}

// With a count of 0, the record comes to its place behind the latest one. No more than the program had: to give back
// references of others is undefined.
void UserObjectRecords::ProgramReleases(uint64_t user_object, uint32_t count) {
  SetReleasedCount(user_object, std::min(ReleasedCount(user_object) + count, CreatedCount(user_object)));
}

void UserObjectRecords::Write(replay::ObjectKey graph, uint64_t user_object, const Reference& reference) {
  const uint32_t call = reference.retains ? kRetain : kRelease;
  if (reference.count == 0) return log_->ForgetSetting(graph, call, reference.key);
  log_->SetSettingMessage(graph, call, reference.key,
                          GraphMessage(reference.retains, graph.id, user_object, reference.count));
}

void UserObjectRecords::GraphChanges(replay::ObjectKey graph, uint64_t user_object, bool retains, uint32_t count,
                                     const FrameHeader& header, const std::vector<replay::ObjectKey>& needs) {
  std::vector<Reference>& all = of_graphs_[graph.id][user_object];
  graphs_[user_object].insert(graph.id);
  const uint64_t key = next_key_++;
  log_->Modify(graph, key, header, GraphMessage(retains, graph.id, user_object, count), needs);
  all.push_back({retains, key, log_->last_order(), count});
  // A reference that the graph took and gave back, and of which nothing was made between, leaves nothing. Two calls of
  // a kind, between which nothing was made, are one.
  for (size_t later = 1; later < all.size(); ++later) {
    for (size_t i = later; i-- > 0 && all[later].count > 0;) {
      Reference& earlier = all[i];
      if (earlier.count == 0) continue;
      if (copied_between_(graph.id, earlier.order, all[later].order)) break;
      if (earlier.retains == all[later].retains) {
        earlier.count += all[later].count;
        all[later].count = 0;
      } else if (earlier.retains) {
        const uint32_t both = std::min(earlier.count, all[later].count);
        earlier.count -= both;
        all[later].count -= both;
      } else {
        break;
      }
      Write(graph, user_object, earlier);
      Write(graph, user_object, all[later]);
    }
  }
  all.erase(std::remove_if(all.begin(), all.end(), [](const Reference& one) { return one.count == 0; }), all.end());
  if (!all.empty()) return;
  of_graphs_[graph.id].erase(user_object);
  graphs_[user_object].erase(graph.id);
}

void UserObjectRecords::ObjectGone(uint64_t user_object) {
  const auto graphs = graphs_.find(user_object);
  if (graphs == graphs_.end()) return;
  for (const uint64_t graph : graphs->second) {
    const auto objects = of_graphs_.find(graph);
    for (const Reference& one : objects->second[user_object])
      log_->ForgetSetting({Kind::kGraph, graph}, one.retains ? kRetain : kRelease, one.key);
    objects->second.erase(user_object);
    if (objects->second.empty()) of_graphs_.erase(objects);
  }
  graphs_.erase(graphs);
}

void UserObjectRecords::GraphGone(uint64_t graph) {
  const auto objects = of_graphs_.find(graph);
  if (objects == of_graphs_.end()) return;
  for (const auto& [user_object, references] : objects->second) {
    const auto graphs = graphs_.find(user_object);
    graphs->second.erase(graph);
    if (graphs->second.empty()) graphs_.erase(graphs);
  }
  of_graphs_.erase(objects);
}

}  // namespace cuda_remote::client
