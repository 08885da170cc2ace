// SPDX-License-Identifier: Apache-2.0
// Graphs as wholes: making executables of them, launching those, clones, updates, drawings. Nodes: graph_nodes.cc.

#include <cuda.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/calls/graph_memory.h"
#include "client/calls/graph_names.h"
#include "client/calls/staged_node.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {
namespace {

// Instantiates; `error_node` and `outcome` may be null.
CUresult Instantiate(CUgraphExec* exec, CUgraph graph, uint64_t flags, uint64_t upload_stream, CUgraphNode* error_node,
                     CUgraphInstantiateResult* outcome) {
  static constexpr CallInfo kInfo = Under(info::k_cuGraphInstantiateWithParams, "cuGraphInstantiate");
  if (!exec) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = PrepareInstantiation(graph); result != CUDA_SUCCESS) return result;
  Call call(kInfo);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuGraphInstantiateWithParams_Request request;
  request.graph = reinterpret_cast<uint64_t>(graph);
  if (!call.Valid(Kind::kGraph, request.graph)) return CUDA_ERROR_INVALID_VALUE;
  Session& session = call.session();
  if (session.graphs().disguised_nodes().uses_memory()) {
    ReaderLock lock(&session.graphs().disguised_nodes().mutex());
    const CUresult may = session.graphs().disguised_nodes().memory().MayInstantiate(request.graph);
    if (may != CUDA_SUCCESS) return may;
  }
  request.exec = call.NewHandle(Kind::kGraphExec, kNoParent);
  if (!request.exec) return CUDA_ERROR_OUT_OF_MEMORY;
  request.flags = flags;
  request.upload_stream = upload_stream;
  request.Encode(&call.message());
  const CUresult result = call.Transact();
  wire::cuGraphInstantiateWithParams_Reply reply;
  if (reply.Decode(call.reply())) {
    if (error_node) *error_node = reinterpret_cast<CUgraphNode>(reply.error_node);
    if (outcome) *outcome = CUgraphInstantiateResult(reply.result);
  }
  if (result != CUDA_SUCCESS) return result;
  // The record uploads nothing: the stream may be gone by the time of a replay.
  request.flags &= ~uint64_t(CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD);
  request.upload_stream = 0;
  const bool launchable = (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) != 0;
  if (launchable) {
    // A server without such graphs has refused.
    if (reply.handle == 0) return session.Lose(ChannelStatus::kProtocolError);
    // The program and its kernels have the handle: a replay must get the same one.
    request.expected = reply.handle;
  }
  call.message().clear();
  request.Encode(&call.message());
  call.Created({Kind::kGraphExec, request.exec}, {{Kind::kGraph, request.graph}});
  if (session.graphs().disguised_nodes().uses_memory()) {
    WriterLock lock(&session.graphs().disguised_nodes().mutex());
    driverabi::GraphMemory& memory = session.graphs().disguised_nodes().memory();
    memory.Instantiated(request.graph, request.exec, (flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH) != 0);
    if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) memory.Uploaded(request.exec);
  }
  session.graphs().disguised_nodes().Instantiated(request.graph, request.exec, &session.objects());
  *exec = reinterpret_cast<CUgraphExec>(request.exec);
  if (launchable) {
    {
      WriterLock lock(&session.objects().mutex());
      session.objects().graph_records().MakeLaunchable(request.exec);
      if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD)
        session.objects().graph_records().Uploaded({Kind::kGraphExec, request.exec});
    }
    session.graphs().driver_execs().Name(reply.handle, request.exec);
    *exec = reinterpret_cast<CUgraphExec>(reply.handle);
  }
  return CUDA_SUCCESS;
}

// All but what becomes of disguised copies.
CUresult UpdateNodes(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo* info) {
  Call call(info::k_cuGraphExecUpdate_v2);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuGraphExecUpdate_v2_Request request;
  request.exec = reinterpret_cast<uint64_t>(exec);
  request.graph = reinterpret_cast<uint64_t>(graph);
  if (!call.Valid(Kind::kGraphExec, request.exec) || !call.Valid(Kind::kGraph, request.graph)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Session& session = call.session();
  if (session.graphs().disguised_nodes().uses_memory()) {
    ReaderLock lock(&session.graphs().disguised_nodes().mutex());
    if (!session.graphs().disguised_nodes().memory().MayUpdate(request.exec, request.graph)) {
      *info = {};
      info->result = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
      return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    }
  }
  request.Encode(&call.message());
  const CUresult result = call.Transact();
  wire::cuGraphExecUpdate_v2_Reply reply;
  if (reply.Decode(call.reply())) {
    info->result = CUgraphExecUpdateResult(reply.result);
    info->errorNode = reinterpret_cast<CUgraphNode>(reply.error_node);
    info->errorFromNode = reinterpret_cast<CUgraphNode>(reply.error_from_node);
  }
  if (result != CUDA_SUCCESS) return result;
  call.Modified({Kind::kGraphExec, request.exec}, 0, {{Kind::kGraph, request.graph}});
  if (session.graphs().disguised_nodes().uses_memory()) {
    DisguisedNodes::Addresses gone;
    {
      WriterLock lock(&session.graphs().disguised_nodes().mutex());
      session.graphs().disguised_nodes().memory().Updated(request.exec, request.graph, &gone);
    }
    session.graphs().FreeMemory(gone);
  }
  return CUDA_SUCCESS;
}

CUresult Update(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo* info) {
  if (!Session::Get()) return CUDA_ERROR_NOT_INITIALIZED;
  return UpdateStaged(exec, graph, [&] { return UpdateNodes(exec, graph, info); });
}

// A launch that may allocate and free.
CUresult LaunchWithMemory(Call& call, const wire::cuGraphLaunch_Request& request, bool waits) {
  Session& session = call.session();
  DisguisedNodes::Addresses gone;
  {
    WriterLock lock(&session.graphs().disguised_nodes().mutex());
    driverabi::GraphMemory& memory = session.graphs().disguised_nodes().memory();
    if (memory.ExecHasNodes(request.hGraph)) {
      // It would become a child graph.
      if (session.graphs().captures().IsCaptured(request.hStream)) return CUDA_ERROR_NOT_SUPPORTED;
      const CUresult may = memory.MayLaunch(request.hGraph);
      if (may != CUDA_SUCCESS) return may;
      memory.Launched(request.hGraph, &gone);
    }
  }
  const CUresult result = waits ? call.Transact() : call.Send();
  session.graphs().FreeMemory(gone);
  return result;
}

// Notes that an executable has come to the GPU, by an upload or a launch in `stream`, if kernels may launch it.
CUresult NoteUpload(Call& call, CUresult result, uint64_t exec, uint64_t stream) {
  Session& session = call.session();
  if (result != CUDA_SUCCESS || !session.graphs().driver_execs().Has(exec)) return result;
  if (session.graphs().captures().IsCaptured(stream)) return result;  // it became a child graph
  WriterLock lock(&session.objects().mutex());
  session.objects().graph_records().Uploaded({Kind::kGraphExec, exec});
  return result;
}

// All but what is done for copies of pageable memory. `waits`: for the server's answer.
CUresult LaunchAlone(CUgraphExec hGraph, CUstream hStream, bool per_thread, bool waits) {
  Call call(info::k_cuGraphLaunch);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuGraphLaunch_Request request;
  request.hGraph = reinterpret_cast<uint64_t>(hGraph);
  if (!call.Valid(Kind::kGraphExec, request.hGraph)) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = call.StreamToWire(hStream, per_thread, &request.hStream); result != CUDA_SUCCESS) {
    return result;
  }
  request.Encode(&call.message());
  const bool with_memory = call.session().graphs().disguised_nodes().uses_memory();
  const CUresult result =
      with_memory ? LaunchWithMemory(call, request, waits) : (waits ? call.Transact() : call.Send());
  return NoteUpload(call, result, request.hGraph, request.hStream);
}

}  // namespace

CUresult Custom_cuGraphInstantiateWithParams(CUgraphExec* phGraphExec, CUgraph hGraph,
                                             CUDA_GRAPH_INSTANTIATE_PARAMS* instantiateParams, bool per_thread) {
  if (!instantiateParams) return CUDA_ERROR_INVALID_VALUE;
  uint64_t stream;
  {
    Call call(info::k_cuGraphInstantiateWithParams);
    if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
    if (const CUresult result = call.StreamToWire(instantiateParams->hUploadStream, per_thread, &stream);
        result != CUDA_SUCCESS) {
      return result;
    }
  }
  return Instantiate(phGraphExec, hGraph, instantiateParams->flags, stream, &instantiateParams->hErrNode_out,
                     &instantiateParams->result_out);
}

CUresult Custom_cuGraphInstantiate_v2(CUgraphExec* phGraphExec, CUgraph hGraph, CUgraphNode* phErrorNode,
                                      char* logBuffer, size_t bufferSize) {
  if (logBuffer && bufferSize) logBuffer[0] = 0;
  return Instantiate(phGraphExec, hGraph, 0, 0, phErrorNode, nullptr);
}

CUresult Custom_cuGraphInstantiateWithFlags(CUgraphExec* phGraphExec, CUgraph hGraph, unsigned long long flags) {
  return Instantiate(phGraphExec, hGraph, flags, 0, nullptr, nullptr);
}

CUresult Custom_cuGraphInstantiate(CUgraphExec* phGraphExec, CUgraph hGraph, CUgraphNode* phErrorNode, char* logBuffer,
                                   size_t bufferSize) {
  return Custom_cuGraphInstantiate_v2(phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize);
}

CUresult Custom_cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo* resultInfo) {
  CUgraphExecUpdateResultInfo unasked{};
  return Update(hGraphExec, hGraph, resultInfo ? resultInfo : &unasked);
}

CUresult Custom_cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode* hErrorNode_out,
                                  CUgraphExecUpdateResult* updateResult_out) {
  CUgraphExecUpdateResultInfo info{};
  const CUresult result = Update(hGraphExec, hGraph, &info);
  if (updateResult_out) *updateResult_out = info.result;
  if (hErrorNode_out) *hErrorNode_out = info.errorNode;
  return result;
}

CUresult Custom_cuGraphClone(CUgraph* phGraphClone, CUgraph originalGraph) {
  if (!phGraphClone) return CUDA_ERROR_INVALID_VALUE;
  wire::cuGraphClone_Request request;
  request.originalGraph = reinterpret_cast<uint64_t>(originalGraph);
  std::vector<std::pair<uint64_t, DisguisedNode>> disguised;
  {
    Call call(info::k_cuGraphClone);
    if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
    if (!call.Valid(Kind::kGraph, request.originalGraph)) return CUDA_ERROR_INVALID_VALUE;
    Session& session = call.session();
    if (const CUresult result = CheckWithoutMemory(session, request.originalGraph); result != CUDA_SUCCESS) {
      return result;
    }
    if (const CUresult result = PrepareCopies(session, request.originalGraph); result != CUDA_SUCCESS) return result;
    request.phGraphClone = call.NewHandle(Kind::kGraph, kNoParent);
    if (!request.phGraphClone) return CUDA_ERROR_OUT_OF_MEMORY;
    request.Encode(&call.message());
    if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
    call.Created({Kind::kGraph, request.phGraphClone}, {{Kind::kGraph, request.originalGraph}});
    if (session.graphs().disguised_nodes().any()) {
      ReaderLock lock(&session.graphs().disguised_nodes().mutex());
      for (const auto& [node, facts] : session.graphs().disguised_nodes().nodes()) {
        if (facts.graph == request.originalGraph) disguised.emplace_back(node, facts);
      }
    }
  }
  *phGraphClone = reinterpret_cast<CUgraph>(request.phGraphClone);
  // The clone's nodes are to the application what the original's are.
  for (const auto& [node, facts] : disguised) {
    CUgraphNode copy;
    const CUresult result = Custom_cuGraphNodeFindInClone(&copy, reinterpret_cast<CUgraphNode>(node), *phGraphClone);
    if (result != CUDA_SUCCESS) continue;  // it was taken out of the graph
    Session* const session = Session::Get();
    WriterLock lock(&session->graphs().disguised_nodes().mutex());
    DisguisedNode& kept = session->graphs().disguised_nodes().nodes()[reinterpret_cast<uint64_t>(copy)];
    kept = facts;
    kept.graph = request.phGraphClone;
  }
  return CUDA_SUCCESS;
}

CUresult Custom_cuGraphNodeFindInClone(CUgraphNode* phNode, CUgraphNode hOriginalNode, CUgraph hClonedGraph) {
  if (!phNode) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuGraphNodeFindInClone);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuGraphNodeFindInClone_Request request;
  request.original = reinterpret_cast<uint64_t>(hOriginalNode);
  request.clone = reinterpret_cast<uint64_t>(hClonedGraph);
  if (!call.Valid(Kind::kGraphNode, request.original) || !call.Valid(Kind::kGraph, request.clone)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  request.node = call.NewHandle(Kind::kGraphNode, request.clone);
  if (!request.node) return CUDA_ERROR_OUT_OF_MEMORY;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuGraphNodeFindInClone_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  if (reply.node == request.node) call.Created({Kind::kGraphNode, request.node});
  *phNode = reinterpret_cast<CUgraphNode>(reply.node);
  return CUDA_SUCCESS;
}

CUresult Custom_cuGraphConditionalHandleCreate(CUgraphConditionalHandle* pHandle_out, CUgraph hGraph, CUcontext ctx,
                                               unsigned int defaultLaunchValue, unsigned int flags) {
  if (!pHandle_out) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuGraphConditionalHandleCreate);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuGraphConditionalHandleCreate_Request request;
  request.hGraph = reinterpret_cast<uint64_t>(hGraph);
  if (!call.Valid(Kind::kGraph, request.hGraph)) return CUDA_ERROR_INVALID_VALUE;
  // NULL does not mean the current one here.
  if (!call.Valid(Kind::kContext, ctx)) return CUDA_ERROR_INVALID_CONTEXT;
  request.ctx = reinterpret_cast<uint64_t>(ctx);
  request.defaultLaunchValue = defaultLaunchValue;
  request.flags = flags;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuGraphConditionalHandleCreate_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  // Kernels have the number among their arguments: a replay must get the same one.
  request.expected = reply.handle;
  call.message().clear();
  request.Encode(&call.message());
  call.Modified({Kind::kGraph, request.hGraph}, reply.handle, {{Kind::kContext, request.ctx}});
  *pHandle_out = reply.handle;
  return CUDA_SUCCESS;
}

CUresult Custom_cuGraphChildGraphNodeGetGraph(CUgraphNode hNode, CUgraph* phGraph) {
  return GraphOfNode(hNode, 0, phGraph);
}

CUresult GraphOfNode(CUgraphNode hNode, uint32_t body, CUgraph* phGraph) {
  if (!phGraph) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuGraphChildGraphNodeGetGraph);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuGraphChildGraphNodeGetGraph_Request request;
  request.node = reinterpret_cast<uint64_t>(hNode);
  if (!call.Valid(Kind::kGraphNode, request.node)) return CUDA_ERROR_INVALID_VALUE;
  request.body = body;
  request.graph = call.NewHandle(Kind::kGraph, request.node);
  if (!request.graph) return CUDA_ERROR_OUT_OF_MEMORY;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuGraphChildGraphNodeGetGraph_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  if (reply.graph == request.graph) call.Created({Kind::kGraph, request.graph});
  if (body != 0) call.session().graphs().disguised_nodes().NoteBody(reply.graph);
  *phGraph = reinterpret_cast<CUgraph>(reply.graph);
  return CUDA_SUCCESS;
}

CUresult Custom_cuGraphLaunch(CUgraphExec hGraph, CUstream hStream, bool per_thread) {
  Session* const session = Session::Get();
  if (session && session->graphs().disguised_nodes().any_at_launch()) {
    // Bytes that were taken for a launch that the server refuses must not become those of the next one.
    const auto launch = [&] { return LaunchAlone(hGraph, hStream, per_thread, true); };
    if (CUresult result; LaunchStaged(hGraph, hStream, per_thread, launch, &result)) return result;
  }
  return LaunchAlone(hGraph, hStream, per_thread, false);
}

CUresult Custom_cuGraphUpload(CUgraphExec hGraphExec, CUstream hStream, bool per_thread) {
  Call call(info::k_cuGraphUpload);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuGraphUpload_Request request;
  request.hGraph = reinterpret_cast<uint64_t>(hGraphExec);
  if (!call.Valid(Kind::kGraphExec, request.hGraph)) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = call.StreamToWire(hStream, per_thread, &request.hStream); result != CUDA_SUCCESS) {
    return result;
  }
  if (call.session().graphs().disguised_nodes().uses_memory()) {
    WriterLock lock(&call.session().graphs().disguised_nodes().mutex());
    call.session().graphs().disguised_nodes().memory().Uploaded(request.hGraph);
  }
  request.Encode(&call.message());
  return NoteUpload(call, call.Send(), request.hGraph, request.hStream);
}

CUresult Custom_cuGraphDebugDotPrint(CUgraph hGraph, const char* path, unsigned int flags) {
  if (!path) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuGraphDebugDotPrint);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuGraphDebugDotPrint_Request request;
  request.graph = reinterpret_cast<uint64_t>(hGraph);
  if (!call.Valid(Kind::kGraph, request.graph)) return CUDA_ERROR_INVALID_VALUE;
  request.flags = flags;
  std::string text;
  wire::cuGraphDebugDotPrint_Reply reply;
  do {
    request.offset = text.size();
    call.message().clear();
    request.Encode(&call.message());
    if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
    if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
    text.append(reply.text);
  } while (!reply.text.empty() && text.size() < reply.total);
  const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  bool good = true;
  for (size_t written = 0; good && written < text.size();) {
    const ssize_t n = write(fd, text.data() + written, text.size() - written);
    if (n < 0 && errno == EINTR) continue;
    good = n > 0;
    if (good) written += size_t(n);
  }
  if (close(fd) != 0) good = false;
  return good ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

}  // namespace cuda_remote::client
