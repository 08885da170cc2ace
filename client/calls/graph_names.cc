// SPDX-License-Identifier: Apache-2.0
// Handles for nodes that the application did not make one by one: those of captured graphs and of clones.

#include "client/calls/graph_names.h"

#include <cuda.h>

#include <algorithm>
#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/calls/graph_memory.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {
namespace {

// Handles in one request; well below the longest message.
constexpr uint64_t kMostHandles = 50000;

// New handles that die with `parent`; those that are not kept are given back.
class NewHandles {
 public:
  NewHandles(Session* session, uint64_t count, uint64_t parent) : session_(session) {
    WriterLock lock(&session_->objects().mutex());
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t handle = session_->objects().handles().New(Kind::kGraphNode, parent);
      if (handle == 0) break;
      session_->objects().handles().Find(Kind::kGraphNode, handle)->parent = parent;
      handles_.push_back(handle);
    }
  }
  ~NewHandles() {
    WriterLock lock(&session_->objects().mutex());
    for (size_t i = kept_; i < handles_.size(); ++i) session_->objects().handles().Drop(handles_[i]);
  }
  const std::vector<uint64_t>& all() const { return handles_; }
  void Keep(size_t first_ones) { kept_ = first_ones; }

 private:
  Session* const session_;
  std::vector<uint64_t> handles_;
  size_t kept_ = 0;
};

// Asks for the number of nodes without handles, after giving them these.
CUresult Name(Call& call, uint64_t graph, const std::vector<uint64_t>& handles, uint64_t* unnamed) {
  wire::OpGraphNames_Request request;
  request.graph = graph;
  request.nodes = handles;
  call.message().clear();
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::OpGraphNames_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  *unnamed = reply.unnamed;
  return CUDA_SUCCESS;
}

}  // namespace

CUresult NameNodes(Session& session, uint64_t graph_or_node) {
  static constexpr CallInfo kInfo = Under(info::k_OpGraphNames, "cuGraphGetNodes");
  Call call(kInfo);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  uint64_t graph = graph_or_node;
  if (KindOf(graph) == Kind::kGraphNode) {
    ReaderLock lock(&session.objects().mutex());
    const Object* const node = session.objects().handles().Find(Kind::kGraphNode, graph);
    graph = node ? node->parent : 0;
  }
  if (!call.Valid(Kind::kGraph, graph)) return CUDA_ERROR_INVALID_VALUE;
  uint64_t unnamed = 0;
  if (const CUresult result = Name(call, graph, {}, &unnamed); result != CUDA_SUCCESS) return result;
  while (unnamed != 0) {
    const uint64_t before = unnamed;
    NewHandles handles(&session, std::min(unnamed, kMostHandles), graph);
    if (handles.all().empty()) return CUDA_ERROR_OUT_OF_MEMORY;
    if (const CUresult result = Name(call, graph, handles.all(), &unnamed); result != CUDA_SUCCESS) return result;
    if (unnamed + handles.all().size() != before) return session.Lose(ChannelStatus::kProtocolError);
    handles.Keep(handles.all().size());
    call.Modified({Kind::kGraph, graph}, handles.all().front());
  }
  return CUDA_SUCCESS;
}

CUresult PrepareCaptureInto(Session& session, uint64_t graph) {
  bool in_capture = false;
  {
    ReaderLock lock(&session.objects().mutex());
    for (uint64_t at = graph; at != 0 && !in_capture;) {
      in_capture = session.graphs().captures().IsGraphOfOne(at);
      const Object* const object = session.objects().handles().Find(KindOf(at), at);
      at = object ? object->parent : 0;
    }
  }
  if (!in_capture) {
    if (const CUresult result = NameNodes(session, graph); result != CUDA_SUCCESS) return result;
  }
  WriterLock lock(&session.objects().mutex());
  session.objects().graph_records().BeforeCapture(graph, !in_capture);
  return CUDA_SUCCESS;
}

void NoteCaptureInto(Session& session, uint64_t graph, uint64_t capture, bool adds_only) {
  const bool named = adds_only && NameNodes(session, graph) == CUDA_SUCCESS;
  WriterLock lock(&session.objects().mutex());
  session.objects().graph_records().CapturedInto(graph, capture, named);
}

}  // namespace cuda_remote::client
