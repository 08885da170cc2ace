// SPDX-License-Identifier: Apache-2.0
// Capturing streams into graphs.
#include <algorithm>

#include "proto/threads/mutex.h"
#include "softgpu/api/api.h"
#include "softgpu/core/graph.h"
#include "softgpu/core/stream.h"
#include "softgpu/core/thread_state.h"

using namespace cuda_remote::softgpu;

namespace {

CUresult StreamFor(CUstream handle, StreamPtr* stream) {
  ContextPtr context;
  return ResolveStream(handle, &context, stream);
}

CUresult Nodes(const CUgraphNode* handles, size_t count, std::vector<GraphNode*>* nodes) {
  if (handles == nullptr && count != 0) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    std::shared_ptr<GraphNode> node = Registry<GraphNode>::Get().Find(handles[i]);
    if (!node) return CUDA_ERROR_INVALID_VALUE;
    nodes->push_back(node.get());
  }
  return CUDA_SUCCESS;
}

CUresult CaptureInfo(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                     const CUgraphNode** dependencies, const CUgraphEdgeData** edges, size_t* count) {
  if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
  StreamPtr stream;
  if (CUresult result = StreamFor(handle, &stream); result != CUDA_SUCCESS) return result;
  RecursiveMutexLock lock(&CaptureMutex());
  std::shared_ptr<Capture> capture = CaptureOf(stream);
  if (!capture) {
    // Asking about the legacy stream while a capture runs that it would disturb is an error by itself.
    if (CUresult result = CheckLegacyCapture(stream); result != CUDA_SUCCESS) return result;
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
  }
  *status = capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  if (id != nullptr) *id = capture->id;
  if (capture->invalid) return CUDA_SUCCESS;
  if (graph != nullptr) *graph = capture->graph->handle();
  std::vector<GraphNode*>& nodes = stream->capture_dependencies;
  if (dependencies != nullptr) *dependencies = reinterpret_cast<const CUgraphNode*>(nodes.data());
  if (edges != nullptr) {
    capture->edges.resize(std::max(capture->edges.size(), nodes.size()));
    *edges = capture->edges.data();
  }
  if (count != nullptr) *count = nodes.size();
  return CUDA_SUCCESS;
}

CUresult UpdateDependencies(CUstream handle, const CUgraphNode* list, size_t count, unsigned flags) {
  StreamPtr stream;
  if (CUresult result = StreamFor(handle, &stream); result != CUDA_SUCCESS) return result;
  RecursiveMutexLock lock(&CaptureMutex());
  std::shared_ptr<Capture> capture = CaptureOf(stream);
  if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
  if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  std::vector<GraphNode*> nodes;
  if (CUresult result = Nodes(list, count, &nodes); result != CUDA_SUCCESS) return result;
  if (flags == CU_STREAM_ADD_CAPTURE_DEPENDENCIES) {
    nodes.insert(nodes.begin(), stream->capture_dependencies.begin(), stream->capture_dependencies.end());
  } else if (flags != CU_STREAM_SET_CAPTURE_DEPENDENCIES) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  stream->capture_dependencies = std::move(nodes);
  return CUDA_SUCCESS;
}

}  // namespace

SOFTGPU_API cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
  SOFTGPU_ENTER();
  StreamPtr stream;
  if (CUresult result = StreamFor(handle, &stream); result != CUDA_SUCCESS) return result;
  if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  return BeginCapture(stream, mode, nullptr, {});
}
SOFTGPU_API cuStreamBeginCapture(CUstream handle) {
  return cuStreamBeginCapture_v2(handle, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

SOFTGPU_API cuStreamBeginCaptureToGraph(CUstream handle, CUgraph graph_handle, const CUgraphNode* dependencies,
                                        const CUgraphEdgeData*, size_t count, CUstreamCaptureMode mode) {
  SOFTGPU_ENTER();
  StreamPtr stream;
  if (CUresult result = StreamFor(handle, &stream); result != CUDA_SUCCESS) return result;
  GraphPtr graph = Registry<Graph>::Get().Find(graph_handle);
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  std::vector<GraphNode*> nodes;
  if (CUresult result = Nodes(dependencies, count, &nodes); result != CUDA_SUCCESS) return result;
  return BeginCapture(stream, mode, graph, std::move(nodes));
}

SOFTGPU_API cuStreamEndCapture(CUstream handle, CUgraph* out) {
  SOFTGPU_ENTER();
  StreamPtr stream;
  if (CUresult result = StreamFor(handle, &stream); result != CUDA_SUCCESS) return result;
  RecursiveMutexLock lock(&CaptureMutex());
  std::shared_ptr<Capture> capture = CaptureOf(stream);
  if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
  if (capture->origin != stream) {
    capture->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  }
  if (out != nullptr) *out = nullptr;
  if (CUresult result = EndCapture(capture); result != CUDA_SUCCESS) return result;
  if (out != nullptr) *out = capture->graph->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  SOFTGPU_ENTER();
  return CaptureInfo(handle, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

SOFTGPU_API cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id) {
  SOFTGPU_ENTER();
  return CaptureInfo(handle, status, id, nullptr, nullptr, nullptr, nullptr);
}
SOFTGPU_API cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                      const CUgraphNode** dependencies, size_t* count) {
  SOFTGPU_ENTER();
  return CaptureInfo(handle, status, id, graph, dependencies, nullptr, count);
}
SOFTGPU_API cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                      const CUgraphNode** dependencies, const CUgraphEdgeData** edges, size_t* count) {
  SOFTGPU_ENTER();
  return CaptureInfo(handle, status, id, graph, dependencies, edges, count);
}

SOFTGPU_API cuStreamUpdateCaptureDependencies(CUstream handle, CUgraphNode* dependencies, size_t count,
                                              unsigned int flags) {
  SOFTGPU_ENTER();
  return UpdateDependencies(handle, dependencies, count, flags);
}
SOFTGPU_API cuStreamUpdateCaptureDependencies_v2(CUstream handle, CUgraphNode* dependencies, const CUgraphEdgeData*,
                                                 size_t count, unsigned int flags) {
  SOFTGPU_ENTER();
  return UpdateDependencies(handle, dependencies, count, flags);
}

SOFTGPU_API cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  SOFTGPU_ENTER();
  if (mode == nullptr || *mode < CU_STREAM_CAPTURE_MODE_GLOBAL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::swap(*mode, GetThreadState().capture_mode);
  return CUDA_SUCCESS;
}
