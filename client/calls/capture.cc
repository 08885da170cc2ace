// SPDX-License-Identifier: Apache-2.0
// Capturing streams into graphs. What the record of a captured graph is: client/graphs/captures.h.

#include <cuda.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/calls/graph_names.h"
#include "client/core/call.h"
#include "client/core/log.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {
namespace {

// New handles for the nodes of one answer. If there are more, all nodes of the graph get theirs first.
constexpr size_t kMaxNewNodes = 6;

CUresult CaptureInfo(CUstream hStream, bool per_thread, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                     const CUgraphNode** dependencies, const CUgraphEdgeData** edges, size_t* count,
                     bool again = false) {
  if (!status) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuStreamGetCaptureInfo_v3);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuStreamGetCaptureInfo_v3_Request request;
  if (const CUresult result = call.StreamToWire(hStream, per_thread, &request.stream); result != CUDA_SUCCESS) {
    return result;
  }
  if (!call.session().graphs().captures().active()) {
    *status = CU_STREAM_CAPTURE_STATUS_NONE;  // and the rest is left alone, as by the driver
    return CUDA_SUCCESS;
  }
  request.want_graph = graph != nullptr;
  request.want_dependencies = dependencies != nullptr;
  // The nodes die with their graph, so its handle must be one that stays.
  uint64_t known = call.session().graphs().captures().GraphOf(request.stream);
  if (known == 0 && (request.want_graph || request.want_dependencies)) {
    request.graph = known = call.NewHandle(Kind::kGraph, kNoParent);
    if (!request.graph) return CUDA_ERROR_OUT_OF_MEMORY;
    request.origin = call.session().graphs().captures().OriginOf(request.stream);
  }
  for (size_t i = 0; request.want_dependencies && i < kMaxNewNodes; ++i) {
    const uint64_t node = call.NewHandle(Kind::kGraphNode, known);
    if (!node) return CUDA_ERROR_OUT_OF_MEMORY;
    request.nodes.push_back(node);
  }
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuStreamGetCaptureInfo_v3_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  *status = CUstreamCaptureStatus(reply.status);
  if (id) *id = reply.id;
  if (graph) *graph = reinterpret_cast<CUgraph>(reply.graph);
  if (count) *count = size_t(reply.dependency_count);
  // Handles that the server made use of live on, and the request that bound them is part of the capture.
  bool named = reply.graph && reply.graph == request.graph;
  if (named) call.Keep(reply.graph);
  for (const uint64_t node : reply.dependencies) {
    if (std::find(request.nodes.begin(), request.nodes.end(), node) == request.nodes.end()) continue;
    call.Keep(node);
    named = true;
  }
  if (dependencies) {
    if (reply.dependencies.size() != reply.dependency_count) {
      // More nodes without handles than were offered.
      if (again) return call.session().Lose(ChannelStatus::kProtocolError);
      if (named) call.NamedInCapture(request.stream, reply.graph);
      if (const CUresult result = NameNodes(call.session(), reply.graph); result != CUDA_SUCCESS) return result;
      return CaptureInfo(hStream, per_thread, status, id, graph, dependencies, edges, count, true);
    }
    ThreadState& thread = call.thread();
    thread.capture_nodes.clear();
    for (const uint64_t node : reply.dependencies) {
      thread.capture_nodes.push_back(reinterpret_cast<CUgraphNode>(node));
    }
    // The array is the driver's own natively; it stays valid until the thread asks again.
    *dependencies = thread.capture_nodes.data();
    if (edges) {
      thread.capture_edges.assign(reply.dependencies.size(), CUgraphEdgeData{});
      const size_t bytes = thread.capture_edges.size() * sizeof(CUgraphEdgeData);
      if (reply.edges.size() == bytes) {
        std::copy_n(reply.edges.data(), bytes, reinterpret_cast<char*>(thread.capture_edges.data()));
      }
      *edges = thread.capture_edges.data();
    }
  }
  if (named) call.NamedInCapture(request.stream, reply.graph);
  return CUDA_SUCCESS;
}

void DestroyAll(const std::vector<uint64_t>& graphs) {
  for (const uint64_t graph : graphs) Call_cuGraphDestroy(reinterpret_cast<CUgraph>(graph));
}

// Whether a capture goes on although ending it failed.
bool GoesOn(CUresult result) {
  switch (result) {
    case CUDA_ERROR_STREAM_CAPTURE_UNMATCHED:  // asked of a stream that only joined it
    case CUDA_ERROR_ILLEGAL_STATE:             // no capture there
    case CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD:
    case CUDA_ERROR_INVALID_HANDLE:
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_CONTEXT:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
      return true;
    default:
      return false;
  }
}

}  // namespace

CUresult Custom_cuStreamBeginCapture(CUstream hStream, bool per_thread) {
  Call call(info::k_cuStreamBeginCapture);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuStreamBeginCapture_v2_Request request;
  if (const CUresult result = call.StreamToWire(hStream, per_thread, &request.hStream); result != CUDA_SUCCESS) {
    return result;
  }
  // The first version had no mode; it behaved as the global one.
  request.mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  request.Encode(&call.message());
  return call.Transact();
}

CUresult Custom_cuStreamEndCapture(CUstream hStream, CUgraph* phGraph, bool per_thread) {
  CUgraph unasked;
  if (!phGraph) phGraph = &unasked;
  Call call(info::k_cuStreamEndCapture);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Session& session = call.session();
  wire::cuStreamEndCapture_Request request;
  if (const CUresult result = call.StreamToWire(hStream, per_thread, &request.hStream); result != CUDA_SUCCESS) {
    return result;
  }
  request.phGraph = call.NewHandle(Kind::kGraph, kNoParent);
  if (!request.phGraph) return CUDA_ERROR_OUT_OF_MEMORY;
  request.streams = session.graphs().captures().StreamsOf(request.hStream);
  request.graph = session.graphs().captures().OwnGraphOf(request.hStream);
  request.added_only = session.graphs().captures().OnlyAddsNodes(request.hStream);
  request.Encode(&call.message());
  const CUresult result = call.Transact();
  if (result != CUDA_SUCCESS) {
    *phGraph = nullptr;
    if (GoesOn(result)) return result;
    if (const auto failed = session.graphs().captures().End(request.hStream)) {
      session.graphs().CaptureFailed(*failed);
      DestroyAll(failed->children);
    }
    return result;
  }
  wire::cuStreamEndCapture_Reply reply;
  const std::unique_ptr<CaptureRecord> record = session.graphs().captures().End(request.hStream);
  if (!reply.Decode(call.reply()) || !record || reply.flags.size() != record->streams.size() ||
      reply.priorities.size() != record->streams.size()) {
    return session.Lose(ChannelStatus::kProtocolError);
  }
  const uint64_t graph = reply.graph;
  if (graph == request.phGraph) {
    call.Keep(graph);
  } else if (KindOf(graph) != Kind::kGraph || graph != record->graph) {
    return session.Lose(ChannelStatus::kProtocolError);
  }
  *phGraph = reinterpret_cast<CUgraph>(graph);

  wire::OpGraphCapture_Request again;
  wire::OpGraphCapture_Reply answer;
  answer.shape = reply.shape;
  again.graph = graph;
  again.stream = request.hStream;
  again.added_only = request.added_only;
  WriterLock lock(&session.objects().mutex());
  const auto parent_of = [&session](uint64_t handle) CR_REQUIRES_SHARED(session.objects().mutex()) {
    const Object* const object = session.objects().handles().Find(KindOf(handle), handle);
    return object ? object->parent : 0;
  };
  again.streams = record->gone_streams;
  for (size_t i = 0; i < record->streams.size(); ++i) {
    const uint64_t stream = record->streams[i];
    const auto is_it = [stream](const wire::CapturedStream& gone) { return gone.stream == stream; };
    if (std::none_of(record->gone_streams.begin(), record->gone_streams.end(), is_it)) {
      again.streams.push_back({stream, parent_of(stream), reply.flags[i], reply.priorities[i]});
    }
  }
  for (const wire::CapturedStream& stream : again.streams) {
    if (stream.context) record->needs.push_back({KindOf(stream.context), stream.context});
  }
  again.events = record->gone_events;
  for (const uint64_t event : record->events) {
    const auto is_it = [event](const wire::CapturedEvent& gone) { return gone.event == event; };
    if (std::none_of(record->gone_events.begin(), record->gone_events.end(), is_it)) {
      again.events.push_back({event, parent_of(event)});
    }
  }
  for (uint64_t at = record->own_graph || !session.graphs().captures().active() ? 0 : graph; at != 0;
       at = parent_of(at)) {
    if (KindOf(at) == Kind::kGraph && session.graphs().captures().EndedInside(at))
      record->obstacle = "a capture around it";
  }
  replay::ObjectKey object{Kind::kGraph, graph};
  if (!record->own_graph) {
    // What was added to a graph that has a record of its own.
    const uint64_t added = session.objects().handles().New(Kind::kCapture, graph);
    if (!added) return CUDA_ERROR_OUT_OF_MEMORY;
    session.objects().handles().Find(Kind::kCapture, added)->parent = graph;
    object = {Kind::kCapture, added};
    record->needs.push_back({Kind::kGraph, graph});
  }
  FrameHeader header;
  // Of a green context's stream: none, the stream will do.
  const uint64_t context = parent_of(request.hStream);
  header.context_or_result = KindOf(context) == Kind::kContext ? SlotOf(context) : 0;
  std::string message, expected;
  if (record->obstacle.empty()) {
    header.call = kOpGraphCapture;
    again.Encode(&message);
    answer.Encode(&expected);
    const Hash128 frames = session.objects().log().AddImage(record->frames);
    session.objects().log().Create(object, record->needs, header, message, expected, frames);
  } else {
    LogLine("a captured graph has %s in it: it runs, but this job cannot be checkpointed while the graph exists",
            record->obstacle.c_str());
    header.call = kCall_cuStreamEndCapture;
    session.objects().log().Create(object, record->needs, header, call.message(), call.reply(), {});
  }
  for (size_t i = 0; i < record->retains.size(); ++i)
    session.objects().graph_records().Retain(object.id, i, record->retains[i]);
  lock.Unlock();
  if (!record->own_graph) NoteCaptureInto(session, graph, object.id, request.added_only);
  DestroyAll(record->children);
  return CUDA_SUCCESS;
}

// Asked before every launch by some libraries. Captures are begun by this process alone, so without one there is
// nothing to ask the server.
CUresult Custom_cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus* captureStatus, bool per_thread) {
  if (!captureStatus) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuStreamIsCapturing);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuStreamIsCapturing_Request request;
  if (const CUresult result = call.StreamToWire(hStream, per_thread, &request.hStream); result != CUDA_SUCCESS) {
    return result;
  }
  if (!call.session().graphs().captures().active()) {
    *captureStatus = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
  }
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuStreamIsCapturing_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  *captureStatus = CUstreamCaptureStatus(reply.captureStatus);
  return CUDA_SUCCESS;
}

CUresult Custom_cuStreamGetCaptureInfo_v2(CUstream hStream, CUstreamCaptureStatus* captureStatus_out,
                                          cuuint64_t* id_out, CUgraph* graph_out, const CUgraphNode** dependencies_out,
                                          size_t* numDependencies_out, bool per_thread) {
  return CaptureInfo(hStream, per_thread, captureStatus_out, id_out, graph_out, dependencies_out, nullptr,
                     numDependencies_out);
}

CUresult Custom_cuStreamGetCaptureInfo_v3(CUstream hStream, CUstreamCaptureStatus* captureStatus_out,
                                          cuuint64_t* id_out, CUgraph* graph_out, const CUgraphNode** dependencies_out,
                                          const CUgraphEdgeData** edgeData_out, size_t* numDependencies_out,
                                          bool per_thread) {
  return CaptureInfo(hStream, per_thread, captureStatus_out, id_out, graph_out, dependencies_out, edgeData_out,
                     numDependencies_out);
}

}  // namespace cuda_remote::client
