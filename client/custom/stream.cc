// Questions about streams that the client answers, and capture state.

#include <cuda.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>

#include "client/custom/call_names.h"
#include "client/entry/custom.gen.h"
#include "client/session/call.h"
#include "client/session/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {
namespace {

// New handles for the nodes of one answer. More dependencies than this in one capture are refused by name.
constexpr size_t kMaxNewNodes = 6;

CUresult ContextOfStream(const CallInfo& info, CUstream hStream, bool per_thread, CUcontext* pctx) {
  if (!pctx) return CUDA_ERROR_INVALID_VALUE;
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  uint64_t stream;
  if (const CUresult result = call.StreamToWire(hStream, per_thread, &stream); result != CUDA_SUCCESS) return result;
  uint64_t context = call.thread().current_context();
  if (KindOf(stream) == Kind::kStream) {
    std::shared_lock<std::shared_mutex> lock(call.session().mutex());
    if (const Object* object = call.session().handles().Find(Kind::kStream, stream)) context = object->parent;
  }
  *pctx = reinterpret_cast<CUcontext>(context);
  return CUDA_SUCCESS;
}

CUresult CaptureInfo(CUstream hStream, bool per_thread, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                     const CUgraphNode** dependencies, const CUgraphEdgeData** edges, size_t* count) {
  static constexpr CallInfo kInfo{kCall_cuStreamGetCaptureInfo_v3, "cuStreamGetCaptureInfo", false, true};
  if (!status) return CUDA_ERROR_INVALID_VALUE;
  Call call(kInfo);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuStreamGetCaptureInfo_v3_Request request;
  if (const CUresult result = call.StreamToWire(hStream, per_thread, &request.stream); result != CUDA_SUCCESS) {
    return result;
  }
  request.want_graph = graph != nullptr;
  request.want_dependencies = dependencies != nullptr;
  if (request.want_graph || request.want_dependencies) {
    request.graph = call.NewHandle(Kind::kGraph, kNoParent);
    if (!request.graph) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  for (size_t i = 0; request.want_dependencies && i < kMaxNewNodes; ++i) {
    const uint64_t node = call.NewHandle(Kind::kGraphNode, request.graph);
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
  // Handles that the server made use of live on; a capture in progress holds a checkpoint off, so they need no record.
  if (reply.graph && reply.graph == request.graph) call.Keep(reply.graph);
  if (dependencies) {
    if (reply.dependencies.size() != reply.dependency_count) {
      return Call::Unsupported("cuStreamGetCaptureInfo", "a capture with this many open dependencies");
    }
    ThreadState& thread = call.thread();
    thread.capture_nodes.clear();
    for (const uint64_t node : reply.dependencies) {
      if (std::find(request.nodes.begin(), request.nodes.end(), node) != request.nodes.end()) call.Keep(node);
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
  return CUDA_SUCCESS;
}

}  // namespace

CUresult Custom_cuStreamGetCtx(CUstream hStream, CUcontext* pctx, bool per_thread) {
  static constexpr CallInfo kInfo{kLocalCall, "cuStreamGetCtx", false, true};
  return ContextOfStream(kInfo, hStream, per_thread, pctx);
}

CUresult Custom_cuStreamGetCtx_v2(CUstream hStream, CUcontext* pctx, CUgreenCtx* pGreenCtx, bool per_thread) {
  static constexpr CallInfo kInfo{kLocalCall, "cuStreamGetCtx_v2", false, true};
  if (!pGreenCtx) return CUDA_ERROR_INVALID_VALUE;
  const CUresult result = ContextOfStream(kInfo, hStream, per_thread, pctx);
  if (result == CUDA_SUCCESS) *pGreenCtx = nullptr;  // there are none
  return result;
}

CUresult Custom_cuStreamGetGreenCtx(CUstream hStream, CUgreenCtx* phCtx) {
  static constexpr CallInfo kInfo{kLocalCall, "cuStreamGetGreenCtx", false, true};
  CUcontext context;
  if (!phCtx) return CUDA_ERROR_INVALID_VALUE;
  const CUresult result = ContextOfStream(kInfo, hStream, false, &context);
  if (result == CUDA_SUCCESS) *phCtx = nullptr;  // there are none
  return result;
}

// The mode is each thread's own. The server never restricts its executor, which serves all threads.
CUresult Custom_cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  static constexpr CallInfo kInfo{kLocalCall, "cuThreadExchangeStreamCaptureMode", false, false};
  if (!mode || *mode < CU_STREAM_CAPTURE_MODE_GLOBAL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Call call(kInfo);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  std::swap(call.thread().capture_mode, *mode);
  return CUDA_SUCCESS;
}

CUresult Custom_cuStreamGetCaptureInfo_v2(CUstream hStream, CUstreamCaptureStatus* captureStatus_out, cuuint64_t* id_out,
                                          CUgraph* graph_out, const CUgraphNode** dependencies_out,
                                          size_t* numDependencies_out, bool per_thread) {
  return CaptureInfo(hStream, per_thread, captureStatus_out, id_out, graph_out, dependencies_out, nullptr,
                     numDependencies_out);
}

CUresult Custom_cuStreamGetCaptureInfo_v3(CUstream hStream, CUstreamCaptureStatus* captureStatus_out, cuuint64_t* id_out,
                                          CUgraph* graph_out, const CUgraphNode** dependencies_out,
                                          const CUgraphEdgeData** edgeData_out, size_t* numDependencies_out,
                                          bool per_thread) {
  return CaptureInfo(hStream, per_thread, captureStatus_out, id_out, graph_out, dependencies_out, edgeData_out,
                     numDependencies_out);
}

}  // namespace cuda_remote::client
