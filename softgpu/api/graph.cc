// SPDX-License-Identifier: Apache-2.0
// Graphs and executable graphs. Their nodes: graph_node.cc.
#include "softgpu/core/graph.h"

#include <algorithm>
#include <cstdio>

#include "proto/threads/mutex.h"
#include "softgpu/api/api.h"
#include "softgpu/api/graph_node.h"
#include "softgpu/core/exec_slots.h"
#include "softgpu/core/stream.h"

using namespace cuda_remote::softgpu;

namespace {

using Addresses = cuda_remote::driverabi::GraphMemory::Addresses;

// What a conditional node's body may consist of.
bool IsBody(const Graph& graph) {
  for (const std::shared_ptr<GraphNode>& node : graph.nodes) {
    switch (node->type) {
      case CU_GRAPH_NODE_TYPE_KERNEL:
      case CU_GRAPH_NODE_TYPE_EMPTY:
      case CU_GRAPH_NODE_TYPE_MEMSET:
      case CU_GRAPH_NODE_TYPE_MEMCPY:
      case CU_GRAPH_NODE_TYPE_CONDITIONAL:
        break;
      case CU_GRAPH_NODE_TYPE_GRAPH:
        if (!IsBody(*std::get<ChildGraphWork>(node->work).graph)) return false;
        break;
      default:
        return false;
    }
  }
  return true;
}
bool BodiesAreGood(const Graph& graph) {
  for (const std::shared_ptr<GraphNode>& node : graph.nodes) {
    const auto* conditional = std::get_if<ConditionalWork>(&node->work);
    if (conditional == nullptr) continue;
    for (const GraphPtr& body : conditional->bodies) {
      if (!IsBody(*body) || !BodiesAreGood(*body)) return false;
    }
  }
  return true;
}

CUresult Instantiate(CUgraphExec* out, CUgraph handle, unsigned long long flags) {
  ContextPtr context;
  if (CUresult result = UsableContext(&context); result != CUDA_SUCCESS) return result;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  GraphPtr graph = Registry<Graph>::Get().Find(handle);
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  RecursiveMutexLock lock(&CaptureMutex());
  GraphMemoryState& memory = GraphMemoryState::Get();
  if (CUresult result = memory.rules.MayInstantiate(graph->number()); result != CUDA_SUCCESS) return result;
  if (!BodiesAreGood(*graph) || graph->whole != nullptr || graph->moved_into != nullptr)
    return CUDA_ERROR_INVALID_VALUE;
  const bool conditional = graph->has_conditionals();
  if (conditional && !graph->only.expired()) return CUDA_ERROR_NOT_SUPPORTED;
  auto exec = std::make_shared<GraphExec>();
  if (conditional) graph->only = exec;
  exec->context = context;
  exec->flags = flags;
  exec->graph = graph->Clone(&exec->made);
  for (const auto& [original, node] : exec->made) exec->originals.push_back(original->weak_from_this());
  exec->source = graph;
  if (!exec->graph->Order(&exec->order)) return CUDA_ERROR_INVALID_VALUE;
  if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) {
    exec->slot = TakeExecSlot();
    if (exec->slot == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *out = Registry<GraphExec>::Get().Add(exec, exec->handle())->handle();
  memory.rules.Instantiated(graph->number(), exec->number(),
                            (flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH) != 0);
  if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) memory.rules.Uploaded(exec->number());
  return CUDA_SUCCESS;
}

CUresult Launch(CUgraphExec handle, CUstream stream_handle) {
  ContextPtr context;
  StreamPtr stream;
  if (CUresult result = ResolveStream(stream_handle, &context, &stream); result != CUDA_SUCCESS) return result;
  GraphExecPtr exec = Registry<GraphExec>::Get().Find(handle);
  if (!exec) return CUDA_ERROR_INVALID_VALUE;
  if (std::shared_ptr<Capture> capture = CaptureOf(stream)) {
    RecursiveMutexLock lock(&CaptureMutex());
    if (GraphMemoryState::Get().rules.ExecHasNodes(exec->number())) return CUDA_ERROR_NOT_SUPPORTED;
    return CaptureWork(stream, capture, CloneOf(*exec->graph));
  }
  if (CUresult result = CheckLegacyCapture(stream); result != CUDA_SUCCESS) return result;
  std::vector<Work> works;
  GraphAllocations held;             // until the launch is over
  std::vector<UserReference> users;  // the same: the graph may be destroyed while it runs
  std::vector<GraphPtr> inside;
  std::vector<Graph::Conditional> conditionals;
  {
    RecursiveMutexLock lock(&CaptureMutex());
    GraphMemoryState& memory = GraphMemoryState::Get();
    if (CUresult result = memory.rules.MayLaunch(exec->number()); result != CUDA_SUCCESS) return result;
    Addresses gone;
    memory.rules.Launched(exec->number(), &gone);
    memory.TakeOut(gone);
    held = exec->graph->memory;
    works = exec->Works(&inside);
    users = exec->graph->user_objects;
    conditionals = exec->graph->conditionals;
  }
  // Its nodes may be of several devices.
  NoteReach(stream->context()->device(), kAnyDevice);
  // Launches of one executable graph do not overlap.
  std::vector<TaskPtr> before;
  MutexLock lock(&exec->launch_mutex);
  if (exec->last) before.push_back(exec->last);
  Context* raw = stream->context().get();
  exec->last = stream->Submit(
      [raw, works = std::move(works), held = std::move(held), conditionals = std::move(conditionals),
       values = exec->values, users = std::move(users), inside = std::move(inside)] {
        GraphValuesScope scope(values.get());
        {
          MutexLock values_lock(&values->mutex);
          values->values.resize(conditionals.size());
          for (size_t i = 0; i < conditionals.size(); ++i) {
            if (conditionals[i].assign) values->values[i] = conditionals[i].initial;
          }
        }
        for (const Work& work : works) {
          if (CUresult result = Perform(work, *raw); result != CUDA_SUCCESS) return result;
        }
        return CUDA_SUCCESS;
      },
      std::move(before));
  return CUDA_SUCCESS;
}

CUresult Update(CUgraphExec handle, CUgraph graph_handle, CUgraphExecUpdateResultInfo* info) {
  GraphExecPtr exec = Registry<GraphExec>::Get().Find(handle);
  GraphPtr graph = Registry<Graph>::Get().Find(graph_handle);
  if (!exec || !graph || graph->moved_into != nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUgraphExecUpdateResultInfo unasked;
  if (info == nullptr) info = &unasked;
  *info = {};
  auto fail = [info](CUgraphExecUpdateResult why, GraphNode* node) {
    info->result = why;
    info->errorNode = node != nullptr ? node->handle() : nullptr;
    return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  };
  RecursiveMutexLock lock(&CaptureMutex());
  GraphMemoryState& memory = GraphMemoryState::Get();
  if (!memory.rules.MayUpdate(exec->number(), graph->number())) {
    return fail(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, nullptr);
  }
  GraphNode* where;
  bool type_differs;
  if (!exec->graph->IsLike(*graph, &where, &type_differs)) {
    return fail(
        type_differs ? CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED : CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED,
        where);
  }
  exec->Unshare();
  exec->Adopt(*graph, exec->graph.get(), true);
  exec->graph->memory = graph->memory;
  Addresses gone;
  memory.rules.Updated(exec->number(), graph->number(), &gone);
  memory.TakeOut(gone);
  info->result = CU_GRAPH_EXEC_UPDATE_SUCCESS;
  return CUDA_SUCCESS;
}

}  // namespace

SOFTGPU_API cuGraphCreate(CUgraph* out, unsigned int flags) {
  SOFTGPU_ENTER();
  if (out == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  *out = Registry<Graph>::Get().Add(std::make_shared<Graph>())->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuGraphDestroy(CUgraph handle) {
  SOFTGPU_ENTER();
  RecursiveMutexLock lock(&CaptureMutex());
  GraphPtr graph = Registry<Graph>::Get().Find(handle);
  // A body goes with its node, and so does a child graph.
  if (!graph || graph->whole != nullptr || graph->embedded) return CUDA_ERROR_INVALID_VALUE;
  Registry<Graph>::Get().Remove(handle);
  graph->Unregister();
  Addresses gone;
  GraphMemoryState::Get().rules.GraphDestroyed(graph->number(), &gone);
  GraphMemoryState::Get().TakeOut(gone);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuGraphClone(CUgraph* out, CUgraph handle) {
  SOFTGPU_ENTER();
  GraphPtr graph = Registry<Graph>::Get().Find(handle);
  if (out == nullptr || !graph) return CUDA_ERROR_INVALID_VALUE;
  RecursiveMutexLock lock(&CaptureMutex());
  if (graph->has_memory() || graph->has_conditionals()) return CUDA_ERROR_NOT_SUPPORTED;
  *out = Registry<Graph>::Get().Add(graph->Clone())->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuGraphNodeFindInClone(CUgraphNode* out, CUgraphNode original, CUgraph handle) {
  SOFTGPU_ENTER();
  GraphPtr graph = Registry<Graph>::Get().Find(handle);
  if (out == nullptr || !graph) return CUDA_ERROR_INVALID_VALUE;
  RecursiveMutexLock lock(&CaptureMutex());
  for (const std::shared_ptr<GraphNode>& node : graph->nodes) {
    if (node->origin == nullptr || node->origin != reinterpret_cast<const GraphNode*>(original)) continue;
    *out = node->handle();
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

SOFTGPU_API cuGraphGetNodes(CUgraph handle, CUgraphNode* nodes, size_t* count) {
  SOFTGPU_ENTER();
  GraphPtr graph = Registry<Graph>::Get().Find(handle);
  if (!graph || count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  RecursiveMutexLock lock(&CaptureMutex());
  std::vector<GraphNode*> list;
  for (const std::shared_ptr<GraphNode>& node : graph->nodes) list.push_back(node.get());
  return ListNodes(list, nodes, count);
}

SOFTGPU_API cuGraphGetRootNodes(CUgraph handle, CUgraphNode* nodes, size_t* count) {
  SOFTGPU_ENTER();
  GraphPtr graph = Registry<Graph>::Get().Find(handle);
  if (!graph || count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  RecursiveMutexLock lock(&CaptureMutex());
  std::vector<GraphNode*> list;
  for (const std::shared_ptr<GraphNode>& node : graph->nodes) {
    if (node->dependencies.empty()) list.push_back(node.get());
  }
  return ListNodes(list, nodes, count);
}

SOFTGPU_API cuGraphGetEdges_v2(CUgraph handle, CUgraphNode* from, CUgraphNode* to, CUgraphEdgeData* data,
                               size_t* count) {
  SOFTGPU_ENTER();
  GraphPtr graph = Registry<Graph>::Get().Find(handle);
  if (!graph || count == nullptr || (from == nullptr) != (to == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  if (from == nullptr ? data != nullptr : *count == 0) return CUDA_ERROR_INVALID_VALUE;
  RecursiveMutexLock lock(&CaptureMutex());
  size_t found = 0;
  for (const std::shared_ptr<GraphNode>& node : graph->nodes) {
    if (from != nullptr && data == nullptr && !node->edges.empty()) return CUDA_ERROR_LOSSY_QUERY;
    for (GraphNode* dependency : node->dependencies) {
      if (from != nullptr && found < *count) {
        from[found] = dependency->handle();
        to[found] = node->handle();
        if (data != nullptr) data[found] = node->EdgeFrom(dependency);
      }
      ++found;
    }
  }
  if (from != nullptr) {
    for (size_t i = found; i < *count; ++i) from[i] = to[i] = nullptr;
  }
  *count = from == nullptr ? found : std::min(found, *count);
  return CUDA_SUCCESS;
}
SOFTGPU_API cuGraphGetEdges(CUgraph handle, CUgraphNode* from, CUgraphNode* to, size_t* count) {
  return cuGraphGetEdges_v2(handle, from, to, nullptr, count);
}

// Flags of executables. An upload needs a stream, which only the call with parameters has.
constexpr unsigned long long kExecFlags = CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH |
                                          CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH |
                                          CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;

SOFTGPU_API cuGraphInstantiateWithFlags(CUgraphExec* out, CUgraph graph, unsigned long long flags) {
  SOFTGPU_ENTER();
  if ((flags & ~kExecFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
  return Instantiate(out, graph, flags);
}
SOFTGPU_API cuGraphInstantiate(CUgraphExec* out, CUgraph graph, CUgraphNode* error_node, char* log, size_t log_bytes) {
  SOFTGPU_ENTER();
  if (error_node != nullptr) *error_node = nullptr;
  if (log != nullptr && log_bytes != 0) *log = 0;
  return Instantiate(out, graph, 0);
}
SOFTGPU_API cuGraphInstantiate_v2(CUgraphExec* out, CUgraph graph, CUgraphNode* error_node, char* log,
                                  size_t log_bytes) {
  SOFTGPU_ENTER();
  if (error_node != nullptr) *error_node = nullptr;
  if (log != nullptr && log_bytes != 0) *log = 0;
  return Instantiate(out, graph, 0);
}
SOFTGPU_API cuGraphInstantiateWithParams(CUgraphExec* out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* params) {
  SOFTGPU_ENTER();
  constexpr unsigned long long kKnown = kExecFlags | CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
  if (params == nullptr || (params->flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = Instantiate(out, graph, params->flags);
  params->hErrNode_out = nullptr;
  params->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
  return result;
}

SOFTGPU_API cuGraphExecGetFlags(CUgraphExec handle, cuuint64_t* flags) {
  SOFTGPU_ENTER();
  GraphExecPtr exec = Registry<GraphExec>::Get().Find(handle);
  if (!exec || flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *flags = exec->flags;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuGraphLaunch(CUgraphExec exec, CUstream stream) {
  SOFTGPU_ENTER();
  return Launch(exec, stream);
}

SOFTGPU_API cuGraphUpload(CUgraphExec handle, CUstream stream_handle) {
  SOFTGPU_ENTER();
  ContextPtr context;
  StreamPtr stream;
  if (CUresult result = ResolveStream(stream_handle, &context, &stream); result != CUDA_SUCCESS) return result;
  GraphExecPtr exec = Registry<GraphExec>::Get().Find(handle);
  if (!exec) return CUDA_ERROR_INVALID_VALUE;
  RecursiveMutexLock lock(&CaptureMutex());
  GraphMemoryState::Get().rules.Uploaded(exec->number());
  return CUDA_SUCCESS;
}

SOFTGPU_API cuGraphExecDestroy(CUgraphExec handle) {
  SOFTGPU_ENTER();
  GraphExecPtr exec;  // goes after the lock: its user objects' destructors are the application's
  RecursiveMutexLock lock(&CaptureMutex());
  exec = Registry<GraphExec>::Get().Remove(handle);
  if (!exec) return CUDA_ERROR_INVALID_VALUE;
  Addresses gone;
  GraphMemoryState::Get().rules.ExecDestroyed(exec->number(), &gone);
  GraphMemoryState::Get().TakeOut(gone);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo* info) {
  SOFTGPU_ENTER();
  return Update(exec, graph, info);
}

SOFTGPU_API cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode* error_node, CUgraphExecUpdateResult* why) {
  SOFTGPU_ENTER();
  CUgraphExecUpdateResultInfo info = {};
  CUresult result = Update(exec, graph, &info);
  if (error_node != nullptr) *error_node = info.errorNode;
  if (why != nullptr) *why = info.result;
  return result;
}

SOFTGPU_API cuGraphDebugDotPrint(CUgraph handle, const char* path, unsigned int) {
  SOFTGPU_ENTER();
  GraphPtr graph = Registry<Graph>::Get().Find(handle);
  if (!graph || path == nullptr) return CUDA_ERROR_INVALID_VALUE;
  FILE* file = std::fopen(path, "w");
  if (file == nullptr) return CUDA_ERROR_OPERATING_SYSTEM;
  RecursiveMutexLock lock(&CaptureMutex());
  std::map<const GraphNode*, size_t> index;
  std::fprintf(file, "digraph graph_ {\n");
  for (size_t i = 0; i < graph->nodes.size(); ++i) {
    index[graph->nodes[i].get()] = i;
    const auto* kernel = std::get_if<KernelWork>(&graph->nodes[i]->work);
    std::fprintf(file, "  node%zu [label=\"%d %s\"];\n", i, static_cast<int>(graph->nodes[i]->type),
                 kernel != nullptr ? kernel->function->name.c_str() : "");
  }
  for (const std::shared_ptr<GraphNode>& node : graph->nodes) {
    for (GraphNode* from : node->dependencies)
      std::fprintf(file, "  node%zu -> node%zu;\n", index[from], index[node.get()]);
  }
  std::fprintf(file, "}\n");
  return std::fclose(file) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

SOFTGPU_API cuDeviceGraphMemTrim(CUdevice device) {
  SOFTGPU_ENTER();
  if (GetDevice(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  RecursiveMutexLock lock(&CaptureMutex());
  GraphMemoryState::Get().rules.Trim(device);
  return CUDA_SUCCESS;
}
SOFTGPU_API cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void* value) {
  SOFTGPU_ENTER();
  if (value == nullptr || unsigned(attribute) > CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) return CUDA_ERROR_INVALID_VALUE;
  if (!GetDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
  RecursiveMutexLock lock(&CaptureMutex());
  *static_cast<cuuint64_t*>(value) = GraphMemoryState::Get().rules.Figure(device, attribute);
  return CUDA_SUCCESS;
}
SOFTGPU_API cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void* value) {
  SOFTGPU_ENTER();
  // Only the high-water marks can be set, and only to 0.
  const bool high = attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH || attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH;
  if (value == nullptr || !high || *static_cast<cuuint64_t*>(value) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (GetDevice(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  RecursiveMutexLock lock(&CaptureMutex());
  GraphMemoryState::Get().rules.ResetHigh(device, attribute);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuGraphConditionalHandleCreate(CUgraphConditionalHandle* out, CUgraph handle, CUcontext context_handle,
                                           unsigned int initial, unsigned int flags) {
  SOFTGPU_ENTER();
  GraphPtr graph = Registry<Graph>::Get().Find(handle);
  if (!graph || out == nullptr || (flags & ~unsigned{CU_GRAPH_COND_ASSIGN_DEFAULT}) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // The driver (580) does not take NULL for the current one.
  if (context_handle == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  ContextPtr context;
  if (CUresult result = ContextFor(context_handle, &context); result != CUDA_SUCCESS) return result;
  RecursiveMutexLock lock(&CaptureMutex());
  Graph* whole = graph->whole != nullptr ? graph->whole : graph.get();
  whole->conditionals.push_back({initial, (flags & CU_GRAPH_COND_ASSIGN_DEFAULT) != 0, false});
  *out = whole->conditionals.size();
  return CUDA_SUCCESS;
}
