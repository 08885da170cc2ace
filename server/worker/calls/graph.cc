// SPDX-License-Identifier: Apache-2.0
// Graph calls whose answers name objects that may be new to the client: it offers virtual handles, and those that are
// needed get bound. (Nodes with parameters: node_parameters.cc.)

#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "proto/codec/graph.gen.h"
#include "proto/codec/stream.gen.h"
#include "proto/logging/log.h"
#include "server/dispatch/malformed.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/graphs/conditional_bodies.h"
#include "server/worker/graphs/graph_nodes.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {
namespace {

// The virtual handle of a real object: the one it has, or `offered`, which becomes its own and dies with `parent`.
uint64_t Name(Session& session, Kind kind, uint64_t real, uint64_t offered, uint64_t parent) {
  if (real == 0) return 0;
  if (const uint64_t known = session.Virtual(kind, real); known != 0) return known;
  if (!session.MayBind(kind, offered)) return 0;
  session.Bind(kind, offered, real, parent);
  return offered;
}

}  // namespace

CUresult Custom_cuGraphInstantiateWithParams(WorkerSession& session, const Request&,
                                             const wire::cuGraphInstantiateWithParams_Request& in,
                                             wire::cuGraphInstantiateWithParams_Reply* out, ReplyBuilder*) {
  if (!session.MayBind(Kind::kGraphExec, in.exec)) return kMalformedRequest;
  CUgraph graph;
  CUDA_GRAPH_INSTANTIATE_PARAMS params = {};
  if (!session.Real(Kind::kGraph, in.graph, &graph)) return CUDA_ERROR_INVALID_VALUE;
  if (!session.RealStream(in.upload_stream, &params.hUploadStream)) return CUDA_ERROR_INVALID_HANDLE;
  params.flags = in.flags;
  CUgraphExec exec = nullptr;
  CUresult result = CUDA_SUCCESS;
  const auto instantiate = [&]() -> uint64_t {
    result = session.driver().cuGraphInstantiateWithParams(&exec, graph, &params);
    return result == CUDA_SUCCESS ? reinterpret_cast<uint64_t>(exec) : 0;
  };
  const bool launchable = (in.flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) != 0;
  if (launchable && in.expected != 0) {
    session.InstantiateAt(in.expected, instantiate);
  } else {
    instantiate();
  }
  out->result = int(params.result_out);
  out->error_node = session.Virtual(Kind::kGraphNode, reinterpret_cast<uint64_t>(params.hErrNode_out));
  if (result != CUDA_SUCCESS) return result;
  session.Bind(Kind::kGraphExec, in.exec, reinterpret_cast<uint64_t>(exec), 0);
  if (launchable) out->handle = reinterpret_cast<uint64_t>(exec);
  return CUDA_SUCCESS;
}

CUresult Custom_cuGraphExecUpdate_v2(WorkerSession& session, const Request&,
                                     const wire::cuGraphExecUpdate_v2_Request& in,
                                     wire::cuGraphExecUpdate_v2_Reply* out, ReplyBuilder*) {
  CUgraphExec exec;
  CUgraph graph;
  if (!session.Real(Kind::kGraphExec, in.exec, &exec) || !session.Real(Kind::kGraph, in.graph, &graph)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  CUgraphExecUpdateResultInfo info = {};
  const CUresult result = session.driver().cuGraphExecUpdate_v2(exec, graph, &info);
  out->result = int(info.result);
  out->error_node = session.Virtual(Kind::kGraphNode, reinterpret_cast<uint64_t>(info.errorNode));
  out->error_from_node = session.Virtual(Kind::kGraphNode, reinterpret_cast<uint64_t>(info.errorFromNode));
  return result;
}

CUresult Custom_cuGraphNodeFindInClone(WorkerSession& session, const Request&,
                                       const wire::cuGraphNodeFindInClone_Request& in,
                                       wire::cuGraphNodeFindInClone_Reply* out, ReplyBuilder*) {
  CUgraphNode original, node = nullptr;
  CUgraph clone;
  if (!session.Real(Kind::kGraphNode, in.original, &original) || !session.Real(Kind::kGraph, in.clone, &clone)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const CUresult result = session.driver().cuGraphNodeFindInClone(&node, original, clone);
  if (result != CUDA_SUCCESS) return result;
  out->node = Name(session, Kind::kGraphNode, reinterpret_cast<uint64_t>(node), in.node, in.clone);
  return out->node != 0 ? CUDA_SUCCESS : kMalformedRequest;
}

CUresult Custom_cuGraphChildGraphNodeGetGraph(WorkerSession& session, const Request&,
                                              const wire::cuGraphChildGraphNodeGetGraph_Request& in,
                                              wire::cuGraphChildGraphNodeGetGraph_Reply* out, ReplyBuilder*) {
  CUgraphNode node;
  CUgraph graph = nullptr;
  if (!session.Real(Kind::kGraphNode, in.node, &node)) return CUDA_ERROR_INVALID_VALUE;
  if (in.body != 0) {
    const auto bodies = ConditionalBodies().find(node);
    if (bodies == ConditionalBodies().end() || in.body > bodies->second.size()) return CUDA_ERROR_INVALID_VALUE;
    graph = bodies->second[in.body - 1];
  } else {
    const CUresult result = session.driver().cuGraphChildGraphNodeGetGraph(node, &graph);
    if (result != CUDA_SUCCESS) return result;
  }
  out->graph = Name(session, Kind::kGraph, reinterpret_cast<uint64_t>(graph), in.graph, in.node);
  return out->graph != 0 ? CUDA_SUCCESS : kMalformedRequest;
}

CUresult Custom_cuGraphConditionalHandleCreate(WorkerSession& session, const Request&,
                                               const wire::cuGraphConditionalHandleCreate_Request& in,
                                               wire::cuGraphConditionalHandleCreate_Reply* out, ReplyBuilder*) {
  CUgraph graph;
  CUcontext context;
  if (!session.Real(Kind::kGraph, in.hGraph, &graph)) return CUDA_ERROR_INVALID_VALUE;
  if (!session.Real(Kind::kContext, in.ctx, &context)) return CUDA_ERROR_INVALID_CONTEXT;
  CUgraphConditionalHandle handle = 0;
  const CUresult result =
      session.driver().cuGraphConditionalHandleCreate(&handle, graph, context, in.defaultLaunchValue, in.flags);
  if (result != CUDA_SUCCESS) return result;
  if (in.expected != 0 && handle != in.expected) {
    // Kernels have the other number among their arguments.
    logging::Error(
        "the driver numbers the conditional handles of a graph in another way than before ({} instead of {})", handle,
        in.expected);
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  out->handle = handle;
  return CUDA_SUCCESS;
}

CUresult Custom_cuGraphKernelNodeSetAttribute(WorkerSession& session, const Request&,
                                              const wire::cuGraphKernelNodeSetAttribute_Request& in,
                                              wire::cuGraphKernelNodeSetAttribute_Reply*, ReplyBuilder*) {
  CUgraphNode node;
  CUkernelNodeAttrValue value;
  if (!session.Real(Kind::kGraphNode, in.hNode, &node)) return CUDA_ERROR_INVALID_VALUE;
  if (in.value.size() != sizeof value) return kMalformedRequest;
  std::memcpy(&value, in.value.data(), sizeof value);
  const auto id = CUkernelNodeAttrID(in.attr);
  CUevent* event = nullptr;
  if (id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT) event = &value.programmaticEvent.event;
  if (id == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT) event = &value.launchCompletionEvent.event;
  // What lies in the value would be memory of this process.
  if (id == CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE) return CUDA_ERROR_NOT_SUPPORTED;
  if (event != nullptr && !session.Real(Kind::kEvent, reinterpret_cast<uint64_t>(*event), event)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return session.driver().cuGraphKernelNodeSetAttribute(node, id, &value);
}

CUresult OpGraphNames(WorkerSession& session, const Request&, const wire::OpGraphNames_Request& in,
                      wire::OpGraphNames_Reply* out, ReplyBuilder*) {
  CUgraph graph;
  if (!session.Real(Kind::kGraph, in.graph, &graph)) return CUDA_ERROR_INVALID_VALUE;
  const DriverTable& driver = session.driver();
  std::vector<CUgraphNode> nodes;
  if (const CUresult result = NodesOf(driver, graph, &nodes); result != CUDA_SUCCESS) return result;
  size_t used = 0;
  for (CUgraphNode node : nodes) {
    const uint64_t real = reinterpret_cast<uint64_t>(node);
    if (real == 0 || session.Virtual(Kind::kGraphNode, real) != 0) continue;
    if (used == in.nodes.size()) {
      ++out->unnamed;
      continue;
    }
    if (!session.MayBind(Kind::kGraphNode, in.nodes[used])) return kMalformedRequest;
    session.Bind(Kind::kGraphNode, in.nodes[used++], real, in.graph);
  }
  return used == in.nodes.size() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult OpNodeBefore(WorkerSession& session, const Request&, const wire::OpNodeBefore_Request& in,
                      wire::OpNodeBefore_Reply* out, ReplyBuilder*) {
  constexpr size_t kMostNodes = 1000;
  std::unordered_map<CUgraphNode, uint64_t> wanted;
  for (const uint64_t handle : in.nodes) {
    CUgraphNode node;
    if (session.Real(Kind::kGraphNode, handle, &node)) wanted[node] = handle;
  }
  // In the order of their distance.
  std::vector<CUgraphNode> seen;
  std::unordered_set<CUgraphNode> known;
  const auto see = [&](CUgraphNode node) {
    if (seen.size() < kMostNodes && known.insert(node).second) seen.push_back(node);
  };
  for (const uint64_t handle : in.others) {
    CUgraphNode node;
    if (!session.Real(Kind::kGraphNode, handle, &node)) return CUDA_ERROR_INVALID_VALUE;
    see(node);
  }
  const DriverTable& driver = session.driver();
  std::vector<CUgraphNode> before(8);
  std::vector<CUgraphEdgeData> edges(before.size());
  for (size_t i = 0; i < seen.size(); ++i) {
    if (const auto found = wanted.find(seen[i]); found != wanted.end()) {
      out->node = found->second;
      return CUDA_SUCCESS;
    }
    size_t count = 0;
    CUresult result = driver.cuGraphNodeGetDependencies_v2(seen[i], nullptr, nullptr, &count);
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_LOSSY_QUERY) return result;
    if (count == 0) continue;
    if (count > before.size()) {
      before.resize(count);
      edges.resize(count);
    }
    result = driver.cuGraphNodeGetDependencies_v2(seen[i], before.data(), edges.data(), &count);
    if (result != CUDA_SUCCESS) return result;
    for (size_t k = 0; k < std::min(count, before.size()); ++k) see(before[k]);
  }
  return CUDA_SUCCESS;
}

CUresult Custom_cuStreamGetCaptureInfo_v3(WorkerSession& session, const Request&,
                                          const wire::cuStreamGetCaptureInfo_v3_Request& in,
                                          wire::cuStreamGetCaptureInfo_v3_Reply* out, ReplyBuilder* reply) {
  CUstream stream;
  if (!session.RealStream(in.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t id = 0;
  CUgraph graph = nullptr;
  const CUgraphNode* nodes = nullptr;
  const CUgraphEdgeData* edges = nullptr;
  size_t count = 0;
  const DriverTable& driver = session.driver();
  CUresult result = driver.cuStreamGetCaptureInfo_v3(stream, &status, &id, &graph, &nodes, &edges, &count);
  if (result == CUDA_ERROR_LOSSY_QUERY) {
    // Some edge carries data: the caller must take it.
  } else if (result != CUDA_SUCCESS) {
    return result;
  }
  out->status = int(status);
  out->id = id;
  std::string edge_bytes;
  if (status == CU_STREAM_CAPTURE_STATUS_ACTIVE) {
    out->dependency_count = count;
    if (in.want_graph || in.want_dependencies) {
      const uint64_t origin = KindOf(in.origin) == Kind::kStream ? in.origin : 0;
      out->graph = Name(session, Kind::kGraph, reinterpret_cast<uint64_t>(graph), in.graph, origin);
      if (out->graph == 0) return kMalformedRequest;
    }
    size_t offered = 0;
    for (size_t i = 0; in.want_dependencies && i < count; ++i) {
      const uint64_t next = offered < in.nodes.size() ? in.nodes[offered] : 0;
      const uint64_t name = Name(session, Kind::kGraphNode, reinterpret_cast<uint64_t>(nodes[i]), next, out->graph);
      if (name == 0) break;  // more than the client offered handles for: it sees the difference from the count
      if (name == next) ++offered;
      out->dependencies.push_back(name);
    }
    if (edges != nullptr && in.want_dependencies) {
      edge_bytes.assign(reinterpret_cast<const char*>(edges), count * sizeof *edges);
      out->edges = edge_bytes;
    }
  }
  out->Encode(&reply->message);  // the view points to a local
  return result;
}

}  // namespace cuda_remote::server
