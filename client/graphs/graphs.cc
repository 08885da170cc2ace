// SPDX-License-Identifier: Apache-2.0
#include "client/graphs/graphs.h"

#include <string>

#include "proto/codec/operations.gen.h"
#include "proto/frame/handle.h"

namespace cuda_remote::client {

void Graphs::FreeMemory(const DisguisedNodes::Addresses& gone) {
  for (const uint64_t address : gone) {
    // In no stream: the server waits until the GPU is idle.
    wire::OpMemFree_Request request;
    request.address = address;
    uint32_t context_slot = 0;
    {
      ReaderLock lock(&memory_->mutex());
      const auto* const range = memory_->device_ranges().At(address);
      if (range) context_slot = SlotOf(range->value.context);
    }
    {
      WriterLock lock(&objects_->mutex());
      objects_->DropLocked({Kind::kDeviceMemory, address});
    }
    std::string message;
    request.Encode(&message);
    requests_->Send(kOpMemFree, message, context_slot);
  }
}

void Graphs::Destroyed(replay::ObjectKey object) {
  DisguisedNodes::Addresses gone;
  disguised_nodes_.Destroyed(object, objects_, &gone);
  FreeMemory(gone);
}

void Graphs::CaptureFailed(const CaptureRecord& failed) {
  if (!failed.own_graph || failed.graph == 0) return;
  const replay::ObjectKey graph{Kind::kGraph, failed.graph};
  {
    WriterLock lock(&objects_->mutex());
    objects_->DropLocked(graph);
  }
  Destroyed(graph);
}

void Graphs::Moved(uint64_t graph, uint64_t node, uint64_t parent) {
  WriterLock lock(&objects_->mutex());
  if (Object* const object = objects_->handles().Find(Kind::kGraph, graph)) object->parent = node;
  objects_->graph_records().Moved(graph);
  disguised_nodes_.Moved(graph, parent);
}

void Graphs::ForgetAskedLocked(RecordedObjects& objects, uint64_t graph_or_node) {
  if (asked_nodes_.count() == 0) return;
  asked_nodes_.Forget(graph_or_node);
  objects.handles().ForEachBelow(graph_or_node, [this](uint64_t below) { asked_nodes_.Forget(below); });
}

void Graphs::ForgetGoneLocked(RecordedObjects& objects, const replay::ObjectKey& dead) {
  switch (dead.kind) {
    case Kind::kStream:
      if (captures_.active()) captures_.End(dead.id);
      break;
    case Kind::kEvent:
      captures_.ForgetEvent(dead.id);
      break;
    case Kind::kCapture:
      disguised_nodes_.ForgetNode(dead.id);
      break;
    case Kind::kGraphNode:
      disguised_nodes_.ForgetNode(dead.id);
      ForgetAskedLocked(objects, dead.id);
      break;
    case Kind::kGraphExec:
      driver_execs_.Forget(dead.id);
      [[fallthrough]];
    case Kind::kGraph:
      disguised_nodes_.ForgetInside(dead.id);
      ForgetAskedLocked(objects, dead.id);
      break;
    default:
      break;
  }
}

}  // namespace cuda_remote::client
