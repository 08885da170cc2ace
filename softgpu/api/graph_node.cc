// SPDX-License-Identifier: Apache-2.0
// Nodes of graphs: adding, asking, changing, in graphs and executable graphs.
#include "softgpu/api/graph_node.h"

#include <algorithm>

#include "proto/threads/mutex.h"
#include "softgpu/api/api.h"
#include "softgpu/core/copy.h"
#include "softgpu/core/graph.h"
#include "softgpu/core/launch.h"
#include "softgpu/core/memory_map.h"

namespace cuda_remote::softgpu {

CUresult ListNodes(const std::vector<GraphNode*>& list, CUgraphNode* nodes, size_t* count) {
  if (nodes == nullptr) {
    *count = list.size();
    return CUDA_SUCCESS;
  }
  // As the real driver.
  if (*count == 0) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < *count; ++i) nodes[i] = i < list.size() ? list[i]->handle() : nullptr;
  *count = std::min(*count, list.size());
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::softgpu

using namespace cuda_remote::softgpu;

namespace {

using NodePtr = std::shared_ptr<GraphNode>;

CUresult FindNode(CUgraphNode handle, NodePtr* node) {
  *node = Registry<GraphNode>::Get().Find(handle);
  return *node ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult Add(CUgraphNode* out, CUgraph handle, const CUgraphNode* dependencies, size_t count, CUgraphNodeType type,
             Work work, GraphNode** made = nullptr) {
  if (out == nullptr || (dependencies == nullptr && count != 0)) return CUDA_ERROR_INVALID_VALUE;
  RecursiveMutexLock lock(&CaptureMutex());
  GraphPtr graph = Registry<Graph>::Get().Find(handle);
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  std::vector<GraphNode*> before;
  for (size_t i = 0; i < count; ++i) {
    NodePtr node;
    if (CUresult result = FindNode(dependencies[i], &node); result != CUDA_SUCCESS) return result;
    if (node->graph != graph.get()) return CUDA_ERROR_INVALID_VALUE;
    if (std::find(before.begin(), before.end(), node.get()) != before.end()) return CUDA_ERROR_INVALID_VALUE;
    before.push_back(node.get());
  }
  GraphNode* node = graph->Add(type, std::move(work), std::move(before));
  if (made != nullptr) *made = node;
  *out = node->handle();
  return CUDA_SUCCESS;
}

// P: any version of the kernel node parameters.
template <typename P>
CUresult KernelFrom(const P* params, CUkernel kernel, CUcontext context_handle, KernelWork* work) {
  ContextPtr context;
  CUfunction function = params->func != nullptr ? params->func : reinterpret_cast<CUfunction>(kernel);
  CUresult result = context_handle ? ContextFor(context_handle, &context)
                                   : UsableContextOr([function] { return OwnContext(function); }, &context);
  if (result != CUDA_SUCCESS) return result;
  result = MakeLaunch(context,
                      {function,
                       {params->gridDimX, params->gridDimY, params->gridDimZ},
                       {params->blockDimX, params->blockDimY, params->blockDimZ},
                       params->sharedMemBytes,
                       params->kernelParams,
                       params->extra,
                       {}},
                      work);
  // More parameters than the kernel has: the driver has another error for it than in a launch.
  return result == CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES ? CUDA_ERROR_INVALID_VALUE : result;
}
CUresult KernelFrom(const CUDA_KERNEL_NODE_PARAMS_v1* params, KernelWork* work) {
  return params == nullptr ? CUDA_ERROR_INVALID_VALUE : KernelFrom(params, nullptr, nullptr, work);
}
CUresult KernelFrom(const CUDA_KERNEL_NODE_PARAMS_v2* params, KernelWork* work) {
  return params == nullptr ? CUDA_ERROR_INVALID_VALUE : KernelFrom(params, params->kern, params->ctx, work);
}

template <typename P>
CUresult KernelTo(CUgraphNode handle, P* params) {
  NodePtr node;
  if (CUresult result = FindNode(handle, &node); result != CUDA_SUCCESS) return result;
  RecursiveMutexLock lock(&CaptureMutex());
  auto* work = std::get_if<KernelWork>(&node->work);
  if (params == nullptr || work == nullptr) return CUDA_ERROR_INVALID_VALUE;
  node->param_pointers.clear();
  for (const ptx::ParamInfo& info : work->function->info->params) {
    node->param_pointers.push_back(work->params.data() + info.offset);
  }
  *params = {};
  if constexpr (std::is_same_v<P, CUDA_KERNEL_NODE_PARAMS_v2>) params->kern = work->kernel;
  if (std::is_same_v<P, CUDA_KERNEL_NODE_PARAMS_v1> || work->kernel == nullptr) params->func = work->function->handle();
  params->gridDimX = work->grid.x;
  params->gridDimY = work->grid.y;
  params->gridDimZ = work->grid.z;
  params->blockDimX = work->block.x;
  params->blockDimY = work->block.y;
  params->blockDimZ = work->block.z;
  params->sharedMemBytes = work->shared_bytes;
  params->kernelParams = node->param_pointers.empty() ? nullptr : node->param_pointers.data();
  return CUDA_SUCCESS;
}

// Whether a side in known memory that is named as the host's leaves that memory. Of other sides MakeCopy knows.
bool LeavesPinned(CUmemorytype type, const void* host, uint64_t first, uint64_t pitch, uint64_t slice,
                  const CopyWork& work) {
  if (type != CU_MEMORYTYPE_HOST || !MemoryMap::Get().Find(reinterpret_cast<uint64_t>(host))) return false;
  return !MemoryMap::Get().Covers(first, (work.depth - 1) * slice + (work.height - 1) * pitch + work.width);
}

CUresult CopyFrom(const CUDA_MEMCPY3D* params, CopyWork* work) {
  // An empty copy may be done, but is no node.
  if (params == nullptr || params->WidthInBytes == 0 || params->Height == 0 || params->Depth == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  bool from, to;
  if (CUresult result = MakeCopy(*params, work, &from, &to); result != CUDA_SUCCESS) return result;
  const bool leaves =
      LeavesPinned(params->srcMemoryType, params->srcHost, work->from, work->from_pitch, work->from_slice, *work) ||
      LeavesPinned(params->dstMemoryType, params->dstHost, work->to, work->to_pitch, work->to_slice, *work);
  return leaves ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// `fill` is any version of the memset node parameters.
template <typename P>
CUresult MemsetFrom(const P* fill, MemsetWork* work) {
  if (fill == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (fill->elementSize != 1 && fill->elementSize != 2 && fill->elementSize != 4) return CUDA_ERROR_INVALID_VALUE;
  if (fill->width == 0 || fill->height == 0) return CUDA_ERROR_INVALID_VALUE;  // an empty fill is no node
  return MakeMemset(fill->dst, fill->pitch, fill->value, fill->elementSize, fill->width, fill->height, work);
}

// A kernel's attributes stay when its parameters change.
CUresult Replace(GraphNode* node, Work work) {
  const auto* before = std::get_if<KernelWork>(&node->work);
  auto* after = std::get_if<KernelWork>(&work);
  if (before != nullptr && after != nullptr) {
    if (CUresult result = SetAttributes(before->attributes, after); result != CUDA_SUCCESS) return result;
  }
  node->work = std::move(work);
  return CUDA_SUCCESS;
}

CUresult SetWork(CUgraphNode handle, CUgraphNodeType type, Work work) {
  NodePtr node;
  if (CUresult result = FindNode(handle, &node); result != CUDA_SUCCESS) return result;
  RecursiveMutexLock lock(&CaptureMutex());
  if (node->type != type) return CUDA_ERROR_INVALID_VALUE;
  return Replace(node.get(), std::move(work));
}

// The executable graph's own node for a node of the graph that it was made from. Under the capture lock.
CUresult ExecNode(CUgraphExec exec_handle, CUgraphNode handle, GraphExecPtr* exec, GraphNode** node) {
  *exec = Registry<GraphExec>::Get().Find(exec_handle);
  // A node that was taken out of its graph since is none any more.
  if (!*exec || !Registry<GraphNode>::Get().Find(handle)) return CUDA_ERROR_INVALID_VALUE;
  auto it = (*exec)->made.find(reinterpret_cast<const GraphNode*>(handle));
  if (it == (*exec)->made.end()) return CUDA_ERROR_INVALID_VALUE;
  *node = it->second;
  return CUDA_SUCCESS;
}

// Whether it copies or fills more than one row.
bool HasRows(const Work& work) {
  if (const auto* const copy = std::get_if<CopyWork>(&work)) return copy->height > 1 || copy->depth > 1;
  const auto* const fill = std::get_if<MemsetWork>(&work);
  return fill != nullptr && fill->height > 1;
}

CUresult SetExecWork(CUgraphExec exec_handle, CUgraphNode handle, CUgraphNodeType type, Work work) {
  RecursiveMutexLock lock(&CaptureMutex());
  GraphExecPtr exec;
  GraphNode* node;
  if (CUresult result = ExecNode(exec_handle, handle, &exec, &node); result != CUDA_SUCCESS) return result;
  if (node->type != type) return CUDA_ERROR_INVALID_VALUE;
  // Copies and fills of several rows can be changed in graphs only.
  if (HasRows(node->work) || HasRows(work)) return CUDA_ERROR_INVALID_VALUE;
  const auto* const child = std::get_if<ChildGraphWork>(&work);
  if (!child) return Replace(exec->Own(reinterpret_cast<GraphNode*>(handle)), std::move(work));
  GraphNode* where;
  bool type_differs;
  if (!std::get<ChildGraphWork>(node->work).graph->IsLike(*child->graph, &where, &type_differs)) {
    return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  }
  // The names of the nodes inside, and whether they are enabled, stay.
  exec->Unshare();
  Graph* const inside = std::get<ChildGraphWork>(exec->made.at(reinterpret_cast<GraphNode*>(handle))->work).graph.get();
  exec->Adopt(*child->graph, inside, false);
  inside->user_objects = child->graph->user_objects;
  return CUDA_SUCCESS;
}

// As the driver: other nodes cannot be switched off, and not be asked about that.
bool CanBeDisabled(const GraphNode& node) {
  return node.type == CU_GRAPH_NODE_TYPE_KERNEL || node.type == CU_GRAPH_NODE_TYPE_MEMCPY ||
         node.type == CU_GRAPH_NODE_TYPE_MEMSET;
}

// Whether a graph may become a child graph, memory nodes aside.
CUresult MayBeChild(const Graph& graph) {
  if (graph.has_conditionals()) return CUDA_ERROR_NOT_SUPPORTED;
  return graph.moved_into != nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// The operation that the general form of parameters means.
CUresult WorkFrom(const CUgraphNodeParams* params, Work* work) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = CUDA_SUCCESS;
  switch (params->type) {
    case CU_GRAPH_NODE_TYPE_EMPTY:
      *work = EmptyWork{};
      break;
    case CU_GRAPH_NODE_TYPE_KERNEL: {
      KernelWork kernel;
      result = KernelFrom(&params->kernel, params->kernel.kern, params->kernel.ctx, &kernel);
      *work = std::move(kernel);
      break;
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY: {
      CopyWork copy;
      result = CopyFrom(&params->memcpy.copyParams, &copy);
      *work = std::move(copy);
      break;
    }
    case CU_GRAPH_NODE_TYPE_MEMSET: {
      MemsetWork fill;
      result = MemsetFrom(&params->memset, &fill);
      *work = fill;
      break;
    }
    case CU_GRAPH_NODE_TYPE_HOST:
      if (params->host.fn == nullptr) return CUDA_ERROR_INVALID_VALUE;
      *work = HostWork{params->host.fn, params->host.userData};
      break;
    case CU_GRAPH_NODE_TYPE_GRAPH: {
      GraphPtr child = Registry<Graph>::Get().Find(params->graph.graph);
      if (!child) return CUDA_ERROR_INVALID_VALUE;
      RecursiveMutexLock lock(&CaptureMutex());
      if (CUresult refused = MayBeChild(*child); refused != CUDA_SUCCESS) return refused;
      // Nothing says what becomes of the graph that a node has when another one is moved into it.
      if (child->has_memory() || params->graph.ownership != CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE) {
        return CUDA_ERROR_NOT_SUPPORTED;
      }
      *work = CloneOf(*child);
      break;
    }
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT: {
      bool record = params->type == CU_GRAPH_NODE_TYPE_EVENT_RECORD;
      EventPtr event = Registry<Event>::Get().Find(record ? params->eventRecord.event : params->eventWait.event);
      if (!event) return CUDA_ERROR_INVALID_VALUE;
      if (record) {
        *work = EventRecordWork{event};
      } else {
        *work = EventWaitWork{event};
      }
      break;
    }
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
      return CUDA_ERROR_NOT_SUPPORTED;  // these nodes cannot be changed
    default:
      if (unsigned(params->type) > CU_GRAPH_NODE_TYPE_CONDITIONAL) return CUDA_ERROR_INVALID_VALUE;
      LogOnce("graph nodes of type " + std::to_string(params->type) + " are not supported");
      return CUDA_ERROR_NOT_SUPPORTED;
  }
  return result;
}

CUresult AddConditional(CUgraphNode* out, CUgraph handle, const CUgraphNode* dependencies, size_t count,
                        CUDA_CONDITIONAL_NODE_PARAMS* params, GraphNode** node) {
  GraphPtr graph = Registry<Graph>::Get().Find(handle);
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  Graph* whole = graph->whole != nullptr ? graph->whole : graph.get();
  const unsigned most = params->type == CU_GRAPH_COND_TYPE_WHILE ? 1 : params->type == CU_GRAPH_COND_TYPE_IF ? 2 : ~0u;
  if (unsigned(params->type) > CU_GRAPH_COND_TYPE_SWITCH || params->size == 0 || params->size > most ||
      params->handle - 1 >= whole->conditionals.size() || whole->conditionals[params->handle - 1].used) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  ConditionalWork work;
  work.handle = params->handle;
  work.type = params->type;
  std::vector<CUgraph> bodies;
  for (unsigned i = 0; i < params->size; ++i) {
    auto body = std::make_shared<Graph>();
    body->whole = whole;
    bodies.push_back(body->handle());
    work.bodies.push_back(std::move(body));
  }
  const std::vector<GraphPtr> made = work.bodies;
  const CUresult result = Add(out, handle, dependencies, count, CU_GRAPH_NODE_TYPE_CONDITIONAL, std::move(work), node);
  if (result != CUDA_SUCCESS) return result;
  for (const GraphPtr& body : made) Registry<Graph>::Get().Add(body);
  whole->conditionals[params->handle - 1].used = true;
  (*node)->bodies = std::move(bodies);
  params->phGraph_out = (*node)->bodies.data();
  return CUDA_SUCCESS;
}

// A node that takes its graph over, which keeps its handle. Under CaptureMutex().
CUresult AddMovedGraph(CUgraphNode* out, CUgraph handle, const CUgraphNode* dependencies, size_t count,
                       CUgraph child_handle, GraphNode** node) {
  GraphPtr graph = Registry<Graph>::Get().Find(handle), child = Registry<Graph>::Get().Find(child_handle);
  if (!graph || !child || child->whole != nullptr || child->embedded) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult result = MayBeChild(*child); result != CUDA_SUCCESS) return result;
  for (const Graph* above = graph.get(); above != nullptr; above = above->moved_into) {
    if (above == child.get()) return CUDA_ERROR_INVALID_VALUE;
  }
  // Memory nodes cannot come into graphs inside of nodes.
  if (child->has_memory() && (graph->embedded || graph->whole != nullptr)) return CUDA_ERROR_NOT_SUPPORTED;
  const CUresult result = Add(out, handle, dependencies, count, CU_GRAPH_NODE_TYPE_GRAPH, ChildGraphWork{child}, node);
  if (result != CUDA_SUCCESS) return result;
  child->moved_into = graph.get();
  child->embedded = true;
  graph->memory.insert(graph->memory.end(), child->memory.begin(), child->memory.end());
  GraphMemoryState::Get().rules.Move(child->number(), graph->number(), true);
  return CUDA_SUCCESS;
}

CUresult AddMemoryNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                       CUgraphNodeParams* params) {
  if (params->type == CU_GRAPH_NODE_TYPE_MEM_FREE) {
    return cuGraphAddMemFreeNode(out, graph, dependencies, count, params->free.dptr);
  }
  CUDA_MEM_ALLOC_NODE_PARAMS v1 = {};
  v1.poolProps = params->alloc.poolProps;
  v1.accessDescs = params->alloc.accessDescs;
  v1.accessDescCount = params->alloc.accessDescCount;
  v1.bytesize = params->alloc.bytesize;
  const CUresult result = cuGraphAddMemAllocNode(out, graph, dependencies, count, &v1);
  if (result == CUDA_SUCCESS) params->alloc.dptr = v1.dptr;
  return result;
}

}  // namespace

SOFTGPU_API cuGraphAddKernelNode_v2(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                    const CUDA_KERNEL_NODE_PARAMS_v2* params) {
  SOFTGPU_ENTER();
  KernelWork work;
  if (CUresult result = KernelFrom(params, &work); result != CUDA_SUCCESS) return result;
  return Add(out, graph, dependencies, count, CU_GRAPH_NODE_TYPE_KERNEL, std::move(work));
}
SOFTGPU_API cuGraphAddKernelNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                 const CUDA_KERNEL_NODE_PARAMS_v1* params) {
  SOFTGPU_ENTER();
  KernelWork work;
  if (CUresult result = KernelFrom(params, &work); result != CUDA_SUCCESS) return result;
  return Add(out, graph, dependencies, count, CU_GRAPH_NODE_TYPE_KERNEL, std::move(work));
}
SOFTGPU_API cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v2* params) {
  SOFTGPU_ENTER();
  return KernelTo(node, params);
}
SOFTGPU_API cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v1* params) {
  SOFTGPU_ENTER();
  return KernelTo(node, params);
}
SOFTGPU_API cuGraphKernelNodeSetParams_v2(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v2* params) {
  SOFTGPU_ENTER();
  KernelWork work;
  if (CUresult result = KernelFrom(params, &work); result != CUDA_SUCCESS) return result;
  return SetWork(node, CU_GRAPH_NODE_TYPE_KERNEL, std::move(work));
}
SOFTGPU_API cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1* params) {
  SOFTGPU_ENTER();
  KernelWork work;
  if (CUresult result = KernelFrom(params, &work); result != CUDA_SUCCESS) return result;
  return SetWork(node, CU_GRAPH_NODE_TYPE_KERNEL, std::move(work));
}
SOFTGPU_API cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node,
                                              const CUDA_KERNEL_NODE_PARAMS_v2* params) {
  SOFTGPU_ENTER();
  KernelWork work;
  if (CUresult result = KernelFrom(params, &work); result != CUDA_SUCCESS) return result;
  return SetExecWork(exec, node, CU_GRAPH_NODE_TYPE_KERNEL, std::move(work));
}
SOFTGPU_API cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                           const CUDA_KERNEL_NODE_PARAMS_v1* params) {
  SOFTGPU_ENTER();
  KernelWork work;
  if (CUresult result = KernelFrom(params, &work); result != CUDA_SUCCESS) return result;
  return SetExecWork(exec, node, CU_GRAPH_NODE_TYPE_KERNEL, std::move(work));
}

SOFTGPU_API cuGraphAddMemcpyNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                 const CUDA_MEMCPY3D* params, CUcontext) {
  SOFTGPU_ENTER();
  CopyWork work;
  if (CUresult result = CopyFrom(params, &work); result != CUDA_SUCCESS) return result;
  GraphNode* node = nullptr;
  CUresult result = Add(out, graph, dependencies, count, CU_GRAPH_NODE_TYPE_MEMCPY, std::move(work), &node);
  if (result == CUDA_SUCCESS) node->copy = *params;
  return result;
}
SOFTGPU_API cuGraphMemcpyNodeGetParams(CUgraphNode handle, CUDA_MEMCPY3D* params) {
  SOFTGPU_ENTER();
  NodePtr node;
  if (CUresult result = FindNode(handle, &node); result != CUDA_SUCCESS) return result;
  RecursiveMutexLock lock(&CaptureMutex());
  auto* work = std::get_if<CopyWork>(&node->work);
  if (params == nullptr || work == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *params = node->copy;
  if (params->WidthInBytes != 0) return CUDA_SUCCESS;
  // Captured: addresses are all that is known.
  params->srcMemoryType = params->dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  params->srcDevice = work->from;
  params->dstDevice = work->to;
  params->srcPitch = work->from_pitch;
  params->dstPitch = work->to_pitch;
  params->srcHeight = work->from_pitch != 0 ? work->from_slice / work->from_pitch : 0;
  params->dstHeight = work->to_pitch != 0 ? work->to_slice / work->to_pitch : 0;
  params->WidthInBytes = work->width;
  params->Height = work->height;
  params->Depth = work->depth;
  return CUDA_SUCCESS;
}
SOFTGPU_API cuGraphMemcpyNodeSetParams(CUgraphNode handle, const CUDA_MEMCPY3D* params) {
  SOFTGPU_ENTER();
  CopyWork work;
  if (CUresult result = CopyFrom(params, &work); result != CUDA_SUCCESS) return result;
  if (CUresult result = SetWork(handle, CU_GRAPH_NODE_TYPE_MEMCPY, std::move(work)); result != CUDA_SUCCESS)
    return result;
  NodePtr node;
  if (CUresult result = FindNode(handle, &node); result != CUDA_SUCCESS) return result;
  RecursiveMutexLock lock(&CaptureMutex());
  node->copy = *params;
  return CUDA_SUCCESS;
}
SOFTGPU_API cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D* params, CUcontext) {
  SOFTGPU_ENTER();
  CopyWork work;
  if (CUresult result = CopyFrom(params, &work); result != CUDA_SUCCESS) return result;
  return SetExecWork(exec, node, CU_GRAPH_NODE_TYPE_MEMCPY, std::move(work));
}

SOFTGPU_API cuGraphAddMemsetNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                 const CUDA_MEMSET_NODE_PARAMS* params, CUcontext) {
  SOFTGPU_ENTER();
  MemsetWork work;
  if (CUresult result = MemsetFrom(params, &work); result != CUDA_SUCCESS) return result;
  return Add(out, graph, dependencies, count, CU_GRAPH_NODE_TYPE_MEMSET, work);
}
SOFTGPU_API cuGraphMemsetNodeGetParams(CUgraphNode handle, CUDA_MEMSET_NODE_PARAMS* params) {
  SOFTGPU_ENTER();
  NodePtr node;
  if (CUresult result = FindNode(handle, &node); result != CUDA_SUCCESS) return result;
  RecursiveMutexLock lock(&CaptureMutex());
  auto* work = std::get_if<MemsetWork>(&node->work);
  if (params == nullptr || work == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *params = {work->to, work->pitch, work->value, work->element, work->width, work->height};
  return CUDA_SUCCESS;
}
SOFTGPU_API cuGraphMemsetNodeSetParams(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS* params) {
  SOFTGPU_ENTER();
  MemsetWork work;
  if (CUresult result = MemsetFrom(params, &work); result != CUDA_SUCCESS) return result;
  return SetWork(node, CU_GRAPH_NODE_TYPE_MEMSET, work);
}
SOFTGPU_API cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS* params,
                                           CUcontext) {
  SOFTGPU_ENTER();
  MemsetWork work;
  if (CUresult result = MemsetFrom(params, &work); result != CUDA_SUCCESS) return result;
  return SetExecWork(exec, node, CU_GRAPH_NODE_TYPE_MEMSET, work);
}

SOFTGPU_API cuGraphAddHostNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                               const CUDA_HOST_NODE_PARAMS* params) {
  SOFTGPU_ENTER();
  if (params == nullptr || params->fn == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return Add(out, graph, dependencies, count, CU_GRAPH_NODE_TYPE_HOST, HostWork{params->fn, params->userData});
}
SOFTGPU_API cuGraphHostNodeGetParams(CUgraphNode handle, CUDA_HOST_NODE_PARAMS* params) {
  SOFTGPU_ENTER();
  NodePtr node;
  if (CUresult result = FindNode(handle, &node); result != CUDA_SUCCESS) return result;
  RecursiveMutexLock lock(&CaptureMutex());
  auto* work = std::get_if<HostWork>(&node->work);
  if (params == nullptr || work == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *params = {work->function, work->data};
  return CUDA_SUCCESS;
}
SOFTGPU_API cuGraphHostNodeSetParams(CUgraphNode node, const CUDA_HOST_NODE_PARAMS* params) {
  SOFTGPU_ENTER();
  if (params == nullptr || params->fn == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return SetWork(node, CU_GRAPH_NODE_TYPE_HOST, HostWork{params->fn, params->userData});
}
SOFTGPU_API cuGraphExecHostNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_HOST_NODE_PARAMS* params) {
  SOFTGPU_ENTER();
  if (params == nullptr || params->fn == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return SetExecWork(exec, node, CU_GRAPH_NODE_TYPE_HOST, HostWork{params->fn, params->userData});
}

SOFTGPU_API cuGraphAddEmptyNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies, size_t count) {
  SOFTGPU_ENTER();
  return Add(out, graph, dependencies, count, CU_GRAPH_NODE_TYPE_EMPTY, EmptyWork{});
}

SOFTGPU_API cuGraphAddChildGraphNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                     CUgraph child_handle) {
  SOFTGPU_ENTER();
  GraphPtr child = Registry<Graph>::Get().Find(child_handle);
  if (!child) return CUDA_ERROR_INVALID_VALUE;
  RecursiveMutexLock lock(&CaptureMutex());
  if (CUresult result = MayBeChild(*child); result != CUDA_SUCCESS) return result;
  if (child->has_memory()) return CUDA_ERROR_NOT_SUPPORTED;
  return Add(out, graph, dependencies, count, CU_GRAPH_NODE_TYPE_GRAPH, CloneOf(*child));
}

SOFTGPU_API cuGraphChildGraphNodeGetGraph(CUgraphNode handle, CUgraph* out) {
  SOFTGPU_ENTER();
  NodePtr node;
  if (CUresult result = FindNode(handle, &node); result != CUDA_SUCCESS) return result;
  RecursiveMutexLock lock(&CaptureMutex());
  auto* work = std::get_if<ChildGraphWork>(&node->work);
  if (out == nullptr || work == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = Registry<Graph>::Get().Add(work->graph)->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuGraphAddEventRecordNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                      CUevent handle) {
  SOFTGPU_ENTER();
  EventPtr event = Registry<Event>::Get().Find(handle);
  if (!event) return CUDA_ERROR_INVALID_VALUE;
  return Add(out, graph, dependencies, count, CU_GRAPH_NODE_TYPE_EVENT_RECORD, EventRecordWork{event});
}
SOFTGPU_API cuGraphAddEventWaitNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                    CUevent handle) {
  SOFTGPU_ENTER();
  EventPtr event = Registry<Event>::Get().Find(handle);
  if (!event) return CUDA_ERROR_INVALID_VALUE;
  return Add(out, graph, dependencies, count, CU_GRAPH_NODE_TYPE_WAIT_EVENT, EventWaitWork{event});
}
SOFTGPU_API cuGraphEventRecordNodeGetEvent(CUgraphNode handle, CUevent* event) {
  SOFTGPU_ENTER();
  NodePtr node;
  if (CUresult result = FindNode(handle, &node); result != CUDA_SUCCESS) return result;
  auto* work = std::get_if<EventRecordWork>(&node->work);
  if (event == nullptr || work == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *event = work->event->handle();
  return CUDA_SUCCESS;
}
SOFTGPU_API cuGraphEventWaitNodeGetEvent(CUgraphNode handle, CUevent* event) {
  SOFTGPU_ENTER();
  NodePtr node;
  if (CUresult result = FindNode(handle, &node); result != CUDA_SUCCESS) return result;
  auto* work = std::get_if<EventWaitWork>(&node->work);
  if (event == nullptr || work == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *event = work->event->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuGraphAddNode_v2(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies,
                              const CUgraphEdgeData* data, size_t count, CUgraphNodeParams* params) {
  SOFTGPU_ENTER();
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  RecursiveMutexLock lock(&CaptureMutex());
  GraphNode* node = nullptr;
  CUresult result = CUDA_SUCCESS;
  if (params->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || params->type == CU_GRAPH_NODE_TYPE_MEM_FREE) {
    result = AddMemoryNode(out, graph, dependencies, count, params);
    if (result == CUDA_SUCCESS) node = Registry<GraphNode>::Get().Find(*out).get();
  } else if (params->type == CU_GRAPH_NODE_TYPE_CONDITIONAL) {
    result = AddConditional(out, graph, dependencies, count, &params->conditional, &node);
  } else if (params->type == CU_GRAPH_NODE_TYPE_GRAPH &&
             params->graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE) {
    result = AddMovedGraph(out, graph, dependencies, count, params->graph.graph, &node);
  } else {
    Work work;
    result = WorkFrom(params, &work);
    if (result == CUDA_SUCCESS) result = Add(out, graph, dependencies, count, params->type, std::move(work), &node);
  }
  for (size_t i = 0; result == CUDA_SUCCESS && data != nullptr && i < count; ++i) {
    node->SetEdge(reinterpret_cast<const GraphNode*>(dependencies[i]), data[i]);
  }
  return result;
}
SOFTGPU_API cuGraphAddNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                           CUgraphNodeParams* params) {
  return cuGraphAddNode_v2(out, graph, dependencies, nullptr, count, params);
}
SOFTGPU_API cuGraphNodeSetParams(CUgraphNode node, CUgraphNodeParams* params) {
  SOFTGPU_ENTER();
  Work work;
  if (CUresult result = WorkFrom(params, &work); result != CUDA_SUCCESS) return result;
  return SetWork(node, params->type, std::move(work));
}
SOFTGPU_API cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams* params) {
  SOFTGPU_ENTER();
  Work work;
  if (CUresult result = WorkFrom(params, &work); result != CUDA_SUCCESS) return result;
  return SetExecWork(exec, node, params->type, std::move(work));
}

SOFTGPU_API cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraph child) {
  CUgraphNodeParams params = {};
  params.type = CU_GRAPH_NODE_TYPE_GRAPH;
  params.graph.graph = child;
  return cuGraphExecNodeSetParams(exec, node, &params);
}

SOFTGPU_API cuGraphNodeGetType(CUgraphNode handle, CUgraphNodeType* type) {
  SOFTGPU_ENTER();
  NodePtr node;
  if (CUresult result = FindNode(handle, &node); result != CUDA_SUCCESS) return result;
  if (type == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *type = node->type;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuGraphNodeGetDependencies_v2(CUgraphNode handle, CUgraphNode* nodes, CUgraphEdgeData* data,
                                          size_t* count) {
  SOFTGPU_ENTER();
  NodePtr node;
  if (CUresult result = FindNode(handle, &node); result != CUDA_SUCCESS) return result;
  if (count == nullptr || (nodes == nullptr && data != nullptr)) return CUDA_ERROR_INVALID_VALUE;
  RecursiveMutexLock lock(&CaptureMutex());
  if (nodes != nullptr && data == nullptr && !node->edges.empty()) return CUDA_ERROR_LOSSY_QUERY;
  if (CUresult result = ListNodes(node->dependencies, nodes, count); result != CUDA_SUCCESS) return result;
  for (size_t i = 0; data != nullptr && i < *count; ++i) data[i] = node->EdgeFrom(node->dependencies[i]);
  return CUDA_SUCCESS;
}
SOFTGPU_API cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode* nodes, size_t* count) {
  return cuGraphNodeGetDependencies_v2(node, nodes, nullptr, count);
}
SOFTGPU_API cuGraphNodeGetDependentNodes_v2(CUgraphNode handle, CUgraphNode* nodes, CUgraphEdgeData* data,
                                            size_t* count) {
  SOFTGPU_ENTER();
  NodePtr node;
  if (CUresult result = FindNode(handle, &node); result != CUDA_SUCCESS) return result;
  if (count == nullptr || (nodes == nullptr && data != nullptr)) return CUDA_ERROR_INVALID_VALUE;
  RecursiveMutexLock lock(&CaptureMutex());
  std::vector<GraphNode*> list;
  for (const NodePtr& other : node->graph->nodes) {
    const auto& before = other->dependencies;
    if (std::find(before.begin(), before.end(), node.get()) == before.end()) continue;
    if (nodes != nullptr && data == nullptr && other->edges.count(node.get()) != 0) return CUDA_ERROR_LOSSY_QUERY;
    list.push_back(other.get());
  }
  if (CUresult result = ListNodes(list, nodes, count); result != CUDA_SUCCESS) return result;
  for (size_t i = 0; data != nullptr && i < *count; ++i) data[i] = list[i]->EdgeFrom(node.get());
  return CUDA_SUCCESS;
}
SOFTGPU_API cuGraphNodeGetDependentNodes(CUgraphNode node, CUgraphNode* nodes, size_t* count) {
  return cuGraphNodeGetDependentNodes_v2(node, nodes, nullptr, count);
}

SOFTGPU_API cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to,
                                      const CUgraphEdgeData* data, size_t count) {
  SOFTGPU_ENTER();
  const GraphPtr owner = Registry<Graph>::Get().Find(graph);
  if (!owner || (count != 0 && (from == nullptr || to == nullptr))) return CUDA_ERROR_INVALID_VALUE;
  RecursiveMutexLock lock(&CaptureMutex());
  for (size_t i = 0; i < count; ++i) {
    NodePtr first, second;
    if (CUresult result = FindNode(from[i], &first); result != CUDA_SUCCESS) return result;
    if (CUresult result = FindNode(to[i], &second); result != CUDA_SUCCESS) return result;
    auto& before = second->dependencies;
    if (first == second || first->graph != owner.get() || second->graph != owner.get() ||
        std::find(before.begin(), before.end(), first.get()) != before.end()) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    before.push_back(first.get());
    if (data != nullptr) second->SetEdge(first.get(), data[i]);
  }
  return CUDA_SUCCESS;
}
SOFTGPU_API cuGraphAddDependencies(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to, size_t count) {
  return cuGraphAddDependencies_v2(graph, from, to, nullptr, count);
}

SOFTGPU_API cuGraphRemoveDependencies(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to, size_t count) {
  SOFTGPU_ENTER();
  const GraphPtr owner = Registry<Graph>::Get().Find(graph);
  if (!owner || (count != 0 && (from == nullptr || to == nullptr))) return CUDA_ERROR_INVALID_VALUE;
  RecursiveMutexLock lock(&CaptureMutex());
  if (owner->has_memory()) return CUDA_ERROR_NOT_SUPPORTED;
  for (size_t i = 0; i < count; ++i) {
    NodePtr second;
    if (CUresult result = FindNode(to[i], &second); result != CUDA_SUCCESS) return result;
    if (second->graph != owner.get()) return CUDA_ERROR_INVALID_VALUE;
    auto& before = second->dependencies;
    auto it = std::find(before.begin(), before.end(), reinterpret_cast<GraphNode*>(from[i]));
    if (it == before.end()) return CUDA_ERROR_INVALID_VALUE;
    second->edges.erase(*it);
    before.erase(it);
  }
  return CUDA_SUCCESS;
}
SOFTGPU_API cuGraphRemoveDependencies_v2(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to,
                                         const CUgraphEdgeData*, size_t count) {
  return cuGraphRemoveDependencies(graph, from, to, count);
}

SOFTGPU_API cuGraphDestroyNode(CUgraphNode handle) {
  SOFTGPU_ENTER();
  RecursiveMutexLock lock(&CaptureMutex());
  NodePtr node = Registry<GraphNode>::Get().Find(handle);
  if (!node) return CUDA_ERROR_INVALID_VALUE;
  if (node->graph->has_memory()) return CUDA_ERROR_NOT_SUPPORTED;
  Registry<GraphNode>::Get().Remove(handle);
  UnregisterGraphsIn(*node);
  auto& nodes = node->graph->nodes;
  for (const NodePtr& other : nodes) {
    auto& before = other->dependencies;
    before.erase(std::remove(before.begin(), before.end(), node.get()), before.end());
    other->edges.erase(node.get());
  }
  nodes.erase(std::remove(nodes.begin(), nodes.end(), node), nodes.end());
  return CUDA_SUCCESS;
}

SOFTGPU_API cuGraphNodeSetEnabled(CUgraphExec exec_handle, CUgraphNode handle, unsigned int enabled) {
  SOFTGPU_ENTER();
  RecursiveMutexLock lock(&CaptureMutex());
  GraphExecPtr exec;
  GraphNode* node;
  if (CUresult result = ExecNode(exec_handle, handle, &exec, &node); result != CUDA_SUCCESS) return result;
  if (!CanBeDisabled(*node)) return CUDA_ERROR_INVALID_VALUE;
  exec->Own(reinterpret_cast<GraphNode*>(handle))->enabled = enabled != 0;
  return CUDA_SUCCESS;
}
SOFTGPU_API cuGraphNodeGetEnabled(CUgraphExec exec_handle, CUgraphNode handle, unsigned int* enabled) {
  SOFTGPU_ENTER();
  RecursiveMutexLock lock(&CaptureMutex());
  GraphExecPtr exec;
  GraphNode* node;
  if (CUresult result = ExecNode(exec_handle, handle, &exec, &node); result != CUDA_SUCCESS) return result;
  if (enabled == nullptr || !CanBeDisabled(*node)) return CUDA_ERROR_INVALID_VALUE;
  *enabled = node->enabled;
  return CUDA_SUCCESS;
}
