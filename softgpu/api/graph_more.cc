// SPDX-License-Identifier: Apache-2.0
// Graphs: attributes of kernel nodes, events of nodes changed, memory nodes, user objects.
#include <atomic>

#include "proto/threads/mutex.h"
#include "softgpu/api/api.h"
#include "softgpu/core/graph.h"
#include "softgpu/core/launch.h"
#include "softgpu/core/user_object.h"

using namespace cuda_remote::softgpu;

namespace {

using NodePtr = std::shared_ptr<GraphNode>;

// The node of an executable graph that was made from `handle`, to be changed, or null.
GraphNode* ExecNode(CUgraphExec exec_handle, CUgraphNode handle) {
  const GraphExecPtr exec = Registry<GraphExec>::Get().Find(exec_handle);
  if (!exec) return nullptr;
  if (!Registry<GraphNode>::Get().Find(handle)) return nullptr;  // taken out of its graph
  auto it = exec->made.find(reinterpret_cast<const GraphNode*>(handle));
  return it == exec->made.end() ? nullptr : exec->Own(it->first);
}

template <typename EventWork>
CUresult SetEvent(GraphNode* node, CUevent handle) {
  EventPtr event = Registry<Event>::Get().Find(handle);
  if (node == nullptr || !event || !std::holds_alternative<EventWork>(node->work)) return CUDA_ERROR_INVALID_VALUE;
  node->work = EventWork{event};
  return CUDA_SUCCESS;
}

KernelWork* KernelOf(const NodePtr& node) { return node ? std::get_if<KernelWork>(&node->work) : nullptr; }

}  // namespace

SOFTGPU_API cuGraphKernelNodeSetAttribute(CUgraphNode handle, CUkernelNodeAttrID id,
                                          const CUkernelNodeAttrValue* value) {
  SOFTGPU_ENTER();
  RecursiveMutexLock lock(&CaptureMutex());
  NodePtr node = Registry<GraphNode>::Get().Find(handle);
  KernelWork* work = KernelOf(node);
  if (work == nullptr || value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  LaunchAttributes attributes = work->attributes;
  attributes[id] = *value;
  return SetAttributes(std::move(attributes), work);
}

SOFTGPU_API cuGraphKernelNodeGetAttribute(CUgraphNode handle, CUkernelNodeAttrID id, CUkernelNodeAttrValue* value) {
  SOFTGPU_ENTER();
  RecursiveMutexLock lock(&CaptureMutex());
  NodePtr node = Registry<GraphNode>::Get().Find(handle);
  KernelWork* work = KernelOf(node);
  if (work == nullptr || value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto it = work->attributes.find(id);
  *value = it == work->attributes.end() ? CUkernelNodeAttrValue{} : it->second;
  if (id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION && work->explicit_cluster) {
    value->clusterDim = {work->cluster.x, work->cluster.y, work->cluster.z};
  }
  if (id == CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE &&
      value->clusterSchedulingPolicyPreference == CU_CLUSTER_SCHEDULING_POLICY_DEFAULT) {
    value->clusterSchedulingPolicyPreference = CU_CLUSTER_SCHEDULING_POLICY_SPREAD;  // which is what it is on an H200
  }
  return CUDA_SUCCESS;
}

SOFTGPU_API cuGraphKernelNodeCopyAttributes(CUgraphNode to_handle, CUgraphNode from_handle) {
  SOFTGPU_ENTER();
  RecursiveMutexLock lock(&CaptureMutex());
  NodePtr to = Registry<GraphNode>::Get().Find(to_handle), from = Registry<GraphNode>::Get().Find(from_handle);
  if (KernelOf(to) == nullptr || KernelOf(from) == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return SetAttributes(KernelOf(from)->attributes, KernelOf(to));
}

SOFTGPU_API cuGraphEventRecordNodeSetEvent(CUgraphNode handle, CUevent event) {
  SOFTGPU_ENTER();
  RecursiveMutexLock lock(&CaptureMutex());
  return SetEvent<EventRecordWork>(Registry<GraphNode>::Get().Find(handle).get(), event);
}
SOFTGPU_API cuGraphEventWaitNodeSetEvent(CUgraphNode handle, CUevent event) {
  SOFTGPU_ENTER();
  RecursiveMutexLock lock(&CaptureMutex());
  return SetEvent<EventWaitWork>(Registry<GraphNode>::Get().Find(handle).get(), event);
}
SOFTGPU_API cuGraphExecEventRecordNodeSetEvent(CUgraphExec exec_handle, CUgraphNode handle, CUevent event) {
  SOFTGPU_ENTER();
  RecursiveMutexLock lock(&CaptureMutex());
  return SetEvent<EventRecordWork>(ExecNode(exec_handle, handle), event);
}
SOFTGPU_API cuGraphExecEventWaitNodeSetEvent(CUgraphExec exec_handle, CUgraphNode handle, CUevent event) {
  SOFTGPU_ENTER();
  RecursiveMutexLock lock(&CaptureMutex());
  return SetEvent<EventWaitWork>(ExecNode(exec_handle, handle), event);
}

// Memory of a graph is there from when the node is made until nobody can use it any more.
SOFTGPU_API cuGraphAddMemAllocNode(CUgraphNode* out, CUgraph handle, const CUgraphNode* dependencies, size_t count,
                                   CUDA_MEM_ALLOC_NODE_PARAMS* params) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (params == nullptr || out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  RecursiveMutexLock lock(&CaptureMutex());
  GraphPtr graph = Registry<Graph>::Get().Find(handle);
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  if (graph->embedded) return CUDA_ERROR_NOT_SUPPORTED;
  AllocationPtr allocation;
  if (CUresult result = TakeGraphMemory(*params, &allocation); result != CUDA_SUCCESS) return result;
  if (CUresult result = cuGraphAddEmptyNode(out, handle, dependencies, count); result != CUDA_SUCCESS) {
    GraphAllocation unused(std::move(allocation));
    return result;
  }
  GraphNode* const node = Registry<GraphNode>::Get().Find(*out).get();
  BecomeAllocation(graph.get(), *params, std::move(allocation), node);
  params->dptr = node->allocation.dptr;
  return CUDA_SUCCESS;
}
SOFTGPU_API cuGraphMemAllocNodeGetParams(CUgraphNode handle, CUDA_MEM_ALLOC_NODE_PARAMS* params) {
  SOFTGPU_ENTER();
  RecursiveMutexLock lock(&CaptureMutex());
  NodePtr node = Registry<GraphNode>::Get().Find(handle);
  if (!node || node->type != CU_GRAPH_NODE_TYPE_MEM_ALLOC || params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *params = node->allocation;
  return CUDA_SUCCESS;
}
SOFTGPU_API cuGraphAddMemFreeNode(CUgraphNode* out, CUgraph handle, const CUgraphNode* dependencies, size_t count,
                                  CUdeviceptr address) {
  SOFTGPU_ENTER();
  RecursiveMutexLock lock(&CaptureMutex());
  GraphPtr graph = Registry<Graph>::Get().Find(handle);
  if (!graph || out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (graph->embedded) return CUDA_ERROR_NOT_SUPPORTED;
  CUresult result = GraphMemoryState::Get().rules.MayFree(graph->number(), address);
  if (result == CUDA_SUCCESS) result = cuGraphAddEmptyNode(out, handle, dependencies, count);
  if (result == CUDA_SUCCESS) BecomeFree(graph.get(), address, Registry<GraphNode>::Get().Find(*out).get());
  return result;
}
SOFTGPU_API cuGraphMemFreeNodeGetParams(CUgraphNode handle, CUdeviceptr* address) {
  SOFTGPU_ENTER();
  RecursiveMutexLock lock(&CaptureMutex());
  NodePtr node = Registry<GraphNode>::Get().Find(handle);
  if (!node || node->type != CU_GRAPH_NODE_TYPE_MEM_FREE || address == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *address = node->allocation.dptr;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuUserObjectCreate(CUuserObject* out, void* data, CUhostFn destroy, unsigned int count,
                               unsigned int flags) {
  SOFTGPU_ENTER();
  if (out == nullptr || destroy == nullptr || count == 0 || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto object = std::make_shared<UserObject>();
  object->data = data;
  object->destroy = destroy;
  object->references = static_cast<int>(count);
  *out = Registry<UserObject>::Get().Add(object)->handle();
  return CUDA_SUCCESS;
}
SOFTGPU_API cuUserObjectRetain(CUuserObject handle, unsigned int count) {
  SOFTGPU_ENTER();
  std::shared_ptr<UserObject> object = Registry<UserObject>::Get().Find(handle);
  if (!object || count == 0) return CUDA_ERROR_INVALID_VALUE;
  object->references += static_cast<int>(count);
  return CUDA_SUCCESS;
}
SOFTGPU_API cuUserObjectRelease(CUuserObject handle, unsigned int count) {
  SOFTGPU_ENTER();
  std::shared_ptr<UserObject> object = Registry<UserObject>::Get().Find(handle);
  if (!object || count == 0) return CUDA_ERROR_INVALID_VALUE;
  object->Release(static_cast<int>(count));
  return CUDA_SUCCESS;
}
SOFTGPU_API cuGraphRetainUserObject(CUgraph graph_handle, CUuserObject handle, unsigned int count, unsigned int flags) {
  SOFTGPU_ENTER();
  RecursiveMutexLock lock(&CaptureMutex());
  GraphPtr graph = Registry<Graph>::Get().Find(graph_handle);
  std::shared_ptr<UserObject> object = Registry<UserObject>::Get().Find(handle);
  if (!graph || !object || count == 0 || count > 65536 || (flags & ~unsigned{CU_GRAPH_USER_OBJECT_MOVE}) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!(flags & CU_GRAPH_USER_OBJECT_MOVE)) object->references += static_cast<int>(count);
  for (unsigned i = 0; i < count; ++i) graph->user_objects.emplace_back(object);
  return CUDA_SUCCESS;
}
SOFTGPU_API cuGraphReleaseUserObject(CUgraph graph_handle, CUuserObject handle, unsigned int count) {
  SOFTGPU_ENTER();
  RecursiveMutexLock lock(&CaptureMutex());
  GraphPtr graph = Registry<Graph>::Get().Find(graph_handle);
  std::shared_ptr<UserObject> object = Registry<UserObject>::Get().Find(handle);
  if (!graph || !object || count == 0) return CUDA_ERROR_INVALID_VALUE;
  auto& list = graph->user_objects;
  for (auto it = list.begin(); it != list.end() && count != 0;) {
    if (it->object() != object) {
      ++it;
      continue;
    }
    it = list.erase(it);
    --count;
  }
  return count == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
