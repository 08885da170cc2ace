// SPDX-License-Identifier: Apache-2.0
#include "client/calls/graph_memory.h"

#include <algorithm>
#include <string>
#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/calls/captured_node.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {
namespace {

using Addresses = driverabi::GraphMemory::Addresses;

// The node's stand-in on the server. It needs `memory`, if that is not 0.
CUresult AddStandIn(const char* name, CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies,
                    const CUgraphEdgeData* edges, size_t count, uint64_t memory) {
  const CallInfo info = Under(info::k_cuGraphAddNode_v2, name);
  if (!node || (count != 0 && !dependencies)) return CUDA_ERROR_INVALID_VALUE;
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuGraphAddNode_v2_Request request;
  request.graph = reinterpret_cast<uint64_t>(graph);
  if (!call.Valid(Kind::kGraph, request.graph)) return CUDA_ERROR_INVALID_VALUE;
  if (count > kMostDependencies) return Call::Unsupported(name, "more dependencies than a message holds");
  for (size_t i = 0; i < count; ++i) {
    if (!call.Valid(Kind::kGraphNode, dependencies[i])) return CUDA_ERROR_INVALID_VALUE;
    request.dependencies.push_back(reinterpret_cast<uint64_t>(dependencies[i]));
  }
  if (edges) request.edges = {reinterpret_cast<const char*>(edges), count * sizeof *edges};
  request.params.type = CU_GRAPH_NODE_TYPE_EMPTY;
  request.node = call.NewHandle(Kind::kGraphNode, request.graph);
  if (!request.node) return CUDA_ERROR_OUT_OF_MEMORY;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  if (memory) {
    call.Created({Kind::kGraphNode, request.node}, {{Kind::kDeviceMemory, memory}});
  } else {
    call.Created({Kind::kGraphNode, request.node});
  }
  *node = reinterpret_cast<CUgraphNode>(request.node);
  return CUDA_SUCCESS;
}

CUresult CheckProps(const char* name, const CUDA_MEM_ALLOC_NODE_PARAMS& params, size_t devices) {
  const CUmemPoolProps& props = params.poolProps;
  if (params.bytesize == 0 || (params.accessDescCount != 0 && !params.accessDescs)) return CUDA_ERROR_INVALID_VALUE;
  if (props.allocType != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  // CUDA does not share a graph's memory with other processes.
  if (props.handleTypes != CU_MEM_HANDLE_TYPE_NONE) return CUDA_ERROR_NOT_SUPPORTED;
  if (props.location.type == CU_MEM_LOCATION_TYPE_INVALID) return CUDA_ERROR_INVALID_VALUE;
  if (props.location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return Call::Unsupported(name, "memory of a graph that is not a GPU's");
  }
  const auto is_device = [devices](int id) { return id >= 0 && size_t(id) < devices; };
  if (!is_device(props.location.id)) return CUDA_ERROR_INVALID_VALUE;
  // As natively: each device once, and for reading and writing.
  for (size_t i = 0; i < params.accessDescCount; ++i) {
    const CUmemAccessDesc& access = params.accessDescs[i];
    if (access.flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return CUDA_ERROR_NOT_SUPPORTED;
    if (!is_device(access.location.id)) return CUDA_ERROR_INVALID_DEVICE;
    for (size_t j = 0; j < i; ++j) {
      if (params.accessDescs[j].location.id == access.location.id) return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return CUDA_SUCCESS;
}

// CUDA_ERROR_NOT_SUPPORTED for a graph inside of another one's node: memory nodes cannot be added there.
CUresult CheckOwn(Session* session, CUgraph graph) {
  ReaderLock lock(&session->objects().mutex());
  return session->objects().IsEmbeddedLocked(reinterpret_cast<uint64_t>(graph)) ? CUDA_ERROR_NOT_SUPPORTED
                                                                                : CUDA_SUCCESS;
}

// Memory that the graph has freed before nodes that depend on these; 0: none, or they are refused later.
//
// Who would notice if graphs did not use memory again: NVIDIA's sample graphMemoryNodes, which prints whether they do,
// and a program whose graph allocates and frees more than the GPU has.
CUresult FindFreed(Session* session, const char* name, uint64_t graph, const CUgraphNode* dependencies, size_t count,
                   uint64_t bytes, int device, CUdeviceptr* address) {
  *address = 0;
  std::vector<driverabi::GraphMemory::Freed> freed;
  if (count != 0 && count <= kMostDependencies && session->graphs().disguised_nodes().uses_memory()) {
    ReaderLock lock(&session->graphs().disguised_nodes().mutex());
    freed = session->graphs().disguised_nodes().memory().FreedFor(graph, bytes, device);
  }
  if (freed.empty()) return CUDA_SUCCESS;
  const CallInfo info = Under(info::k_OpNodeBefore, name);
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::OpNodeBefore_Request request;
  // Some will do: not all of them may fit into a message.
  constexpr size_t kMost = 4096;
  if (freed.size() > kMost) freed.erase(freed.begin(), freed.end() - kMost);
  for (const driverabi::GraphMemory::Freed& one : freed) request.nodes.push_back(one.node);
  for (size_t i = 0; i < count; ++i) {
    if (!call.Valid(Kind::kGraphNode, dependencies[i])) return CUDA_ERROR_INVALID_VALUE;
    request.others.push_back(reinterpret_cast<uint64_t>(dependencies[i]));
  }
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::OpNodeBefore_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  for (const driverabi::GraphMemory::Freed& one : freed) {
    if (one.node == reply.node) *address = one.address;
  }
  return CUDA_SUCCESS;
}

// Adds an allocation of `params` to a graph; sets its dptr.
CUresult AddAllocation(const char* name, CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies,
                       const CUgraphEdgeData* edges, size_t count, CUDA_MEM_ALLOC_NODE_PARAMS* params) {
  if (!params || !node || (count != 0 && !dependencies)) return CUDA_ERROR_INVALID_VALUE;
  Session* const session = Session::Get();
  if (!session) return CUDA_ERROR_NOT_INITIALIZED;
  if (const CUresult result = CheckProps(name, *params, session->devices().size()); result != CUDA_SUCCESS) {
    return result;
  }
  const int device = params->poolProps.location.id;
  if (!session->objects().Usable(Kind::kGraph, reinterpret_cast<uint64_t>(graph))) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = CheckOwn(session, graph); result != CUDA_SUCCESS) return result;
  const uint64_t handle = reinterpret_cast<uint64_t>(graph);
  CUdeviceptr address = 0;
  const CUresult found = FindFreed(session, name, handle, dependencies, count, params->bytesize, device, &address);
  if (found != CUDA_SUCCESS) return found;
  bool again = false;
  if (address) {
    // Another thread may have been faster.
    WriterLock lock(&session->graphs().disguised_nodes().mutex());
    again = session->graphs().disguised_nodes().memory().AllocatesAgain(handle, address);
  }
  if (!again) {
    const CallInfo info = Under(info::k_OpMemAlloc, name);
    const CUresult result = AllocateForGraph(info, params->bytesize, device, &address);
    if (result != CUDA_SUCCESS) return result;
  }
  const CUresult result = AddStandIn(name, node, graph, dependencies, edges, count, address);
  if (result != CUDA_SUCCESS) {
    if (!again) {
      session->graphs().FreeMemory({address});
      return result;
    }
    WriterLock lock(&session->graphs().disguised_nodes().mutex());
    session->graphs().disguised_nodes().memory().DoesNotAllocateAgain(handle, address);
    return result;
  }
  params->dptr = address;
  WriterLock lock(&session->graphs().disguised_nodes().mutex());
  session->graphs().disguised_nodes().set_uses_memory();
  session->graphs().disguised_nodes().set_any();
  if (!again) session->graphs().disguised_nodes().memory().Allocates(handle, address, params->bytesize, device);
  DisguisedNode& kept = session->graphs().disguised_nodes().nodes()[reinterpret_cast<uint64_t>(*node)];
  kept.graph = handle;
  kept.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC;
  kept.allocation = *params;
  if (params->accessDescCount) {
    kept.accesses.assign(params->accessDescs, params->accessDescs + params->accessDescCount);
  }
  return CUDA_SUCCESS;
}

CUresult AddFree(const char* name, CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies,
                 const CUgraphEdgeData* edges, size_t count, CUdeviceptr address) {
  if (!node) return CUDA_ERROR_INVALID_VALUE;
  Session* const session = Session::Get();
  if (!session) return CUDA_ERROR_NOT_INITIALIZED;
  const uint64_t handle = reinterpret_cast<uint64_t>(graph);
  if (!session->objects().Usable(Kind::kGraph, handle)) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = CheckOwn(session, graph); result != CUDA_SUCCESS) return result;
  {
    ReaderLock lock(&session->graphs().disguised_nodes().mutex());
    const CUresult may = session->graphs().disguised_nodes().memory().MayFree(handle, address);
    if (may != CUDA_SUCCESS) return may;
  }
  const CUresult result = AddStandIn(name, node, graph, dependencies, edges, count, 0);
  if (result != CUDA_SUCCESS) return result;
  WriterLock lock(&session->graphs().disguised_nodes().mutex());
  session->graphs().disguised_nodes().memory().Frees(handle, address, reinterpret_cast<uint64_t>(*node));
  DisguisedNode& kept = session->graphs().disguised_nodes().nodes()[reinterpret_cast<uint64_t>(*node)];
  kept.graph = handle;
  kept.type = CU_GRAPH_NODE_TYPE_MEM_FREE;
  kept.allocation.dptr = address;
  return CUDA_SUCCESS;
}

CUresult FindOfType(const char* name, CUgraphNode node, CUgraphNodeType type, DisguisedNode* found) {
  const CallInfo info = Under(info::k_cuGraphMemAllocNodeGetParams, name);
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (!call.Valid(Kind::kGraphNode, node)) return CUDA_ERROR_INVALID_VALUE;
  return FindDisguised(call.session(), node, found) && found->type == type ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CheckDevice(Call& call, CUdevice device) {
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  return device >= 0 && size_t(device) < call.session().devices().size() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

}  // namespace

bool FindDisguised(Session& session, CUgraphNode node, DisguisedNode* found) {
  if (!session.graphs().disguised_nodes().any()) return false;
  ReaderLock lock(&session.graphs().disguised_nodes().mutex());
  const auto it = session.graphs().disguised_nodes().nodes().find(reinterpret_cast<uint64_t>(node));
  if (it == session.graphs().disguised_nodes().nodes().end()) return false;
  *found = it->second;
  return true;
}

CUresult CaptureAllocation(Call& call, uint64_t stream, size_t bytes, uint64_t pool, CUdeviceptr* dptr) {
  CUDA_MEM_ALLOC_NODE_PARAMS params{};
  params.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  params.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  params.bytesize = bytes;
  {
    const int device = call.device();
    KnownMemory& memory = call.session().memory();
    ReaderLock lock(&memory.mutex());
    params.poolProps.location.id = memory.pools().PlaceOf(pool, device).device;
  }
  const char* const name = call.info().name;
  const CUresult result = AddToCapture(
      stream, [&](CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, const CUgraphEdgeData* edges,
                  size_t count) { return AddAllocation(name, node, graph, dependencies, edges, count, &params); });
  if (result == CUDA_SUCCESS) *dptr = params.dptr;
  return result;
}

CUresult CaptureFree(Call& call, uint64_t stream, CUdeviceptr dptr) {
  {
    // Before the capture's graph gets a handle for it: other memory than a graph's is an error that ends no capture.
    ReaderLock lock(&call.session().graphs().disguised_nodes().mutex());
    if (!call.session().graphs().disguised_nodes().memory().Contains(dptr)) return CUDA_ERROR_INVALID_VALUE;
  }
  const char* const name = call.info().name;
  return AddToCapture(
      stream, [&](CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, const CUgraphEdgeData* edges,
                  size_t count) { return AddFree(name, node, graph, dependencies, edges, count, dptr); });
}

bool FreeOfGraph(Session& session, CUdeviceptr dptr, CUresult* result) {
  if (!session.graphs().disguised_nodes().uses_memory()) return false;
  Addresses gone;
  {
    WriterLock lock(&session.graphs().disguised_nodes().mutex());
    if (!session.graphs().disguised_nodes().memory().Contains(dptr)) return false;
    *result = session.graphs().disguised_nodes().memory().Free(dptr, &gone);
  }
  session.graphs().FreeMemory(gone);
  return true;
}

CUresult CheckWithoutMemory(Session& session, uint64_t graph_or_node) {
  if (!session.graphs().disguised_nodes().uses_memory()) return CUDA_SUCCESS;
  uint64_t graph = graph_or_node;
  if (KindOf(graph) == Kind::kGraphNode) {
    ReaderLock lock(&session.objects().mutex());
    const Object* const node = session.objects().handles().Find(Kind::kGraphNode, graph);
    graph = node ? node->parent : 0;
  }
  ReaderLock lock(&session.graphs().disguised_nodes().mutex());
  return session.graphs().disguised_nodes().memory().HasNodes(graph) ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

CUresult Custom_cuGraphAddMemAllocNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                       size_t numDependencies, CUDA_MEM_ALLOC_NODE_PARAMS* nodeParams) {
  return AddAllocation("cuGraphAddMemAllocNode", phGraphNode, hGraph, dependencies, nullptr, numDependencies,
                       nodeParams);
}

CUresult Custom_cuGraphMemAllocNodeGetParams(CUgraphNode hNode, CUDA_MEM_ALLOC_NODE_PARAMS* params_out) {
  if (!params_out) return CUDA_ERROR_INVALID_VALUE;
  DisguisedNode found;
  const CUresult result = FindOfType("cuGraphMemAllocNodeGetParams", hNode, CU_GRAPH_NODE_TYPE_MEM_ALLOC, &found);
  if (result != CUDA_SUCCESS) return result;
  *params_out = found.allocation;
  Session* const session = Session::Get();
  ReaderLock lock(&session->graphs().disguised_nodes().mutex());
  const auto it = session->graphs().disguised_nodes().nodes().find(reinterpret_cast<uint64_t>(hNode));
  // The list is the node's own.
  if (it != session->graphs().disguised_nodes().nodes().end()) params_out->accessDescs = it->second.accesses.data();
  return CUDA_SUCCESS;
}

CUresult Custom_cuGraphAddMemFreeNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                      size_t numDependencies, CUdeviceptr dptr) {
  return AddFree("cuGraphAddMemFreeNode", phGraphNode, hGraph, dependencies, nullptr, numDependencies, dptr);
}

CUresult Custom_cuGraphMemFreeNodeGetParams(CUgraphNode hNode, CUdeviceptr* dptr_out) {
  if (!dptr_out) return CUDA_ERROR_INVALID_VALUE;
  DisguisedNode found;
  const CUresult result = FindOfType("cuGraphMemFreeNodeGetParams", hNode, CU_GRAPH_NODE_TYPE_MEM_FREE, &found);
  if (result == CUDA_SUCCESS) *dptr_out = found.allocation.dptr;
  return result;
}

CUresult AddMemoryNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, const CUgraphEdgeData* edges,
                       size_t count, CUgraphNodeParams* params) {
  constexpr char kName[] = "cuGraphAddNode";
  if (params->type == CU_GRAPH_NODE_TYPE_MEM_FREE) {
    return AddFree(kName, node, graph, dependencies, edges, count, params->free.dptr);
  }
  CUDA_MEM_ALLOC_NODE_PARAMS_v1 v1{};
  v1.poolProps = params->alloc.poolProps;
  v1.accessDescs = params->alloc.accessDescs;
  v1.accessDescCount = params->alloc.accessDescCount;
  v1.bytesize = params->alloc.bytesize;
  const CUresult result = AddAllocation(kName, node, graph, dependencies, edges, count, &v1);
  if (result == CUDA_SUCCESS) params->alloc.dptr = v1.dptr;
  return result;
}

CUresult Custom_cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void* value) {
  if (!value || unsigned(attr) > CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuDeviceGetGraphMemAttribute);
  if (const CUresult result = CheckDevice(call, device); result != CUDA_SUCCESS) return result;
  ReaderLock lock(&call.session().graphs().disguised_nodes().mutex());
  *static_cast<cuuint64_t*>(value) = call.session().graphs().disguised_nodes().memory().Figure(device, attr);
  return CUDA_SUCCESS;
}

CUresult Custom_cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void* value) {
  // Only the high-water marks can be set, and only to 0.
  const bool high = attr == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH || attr == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH;
  if (!value || !high || *static_cast<const cuuint64_t*>(value) != 0) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuDeviceSetGraphMemAttribute);
  if (const CUresult result = CheckDevice(call, device); result != CUDA_SUCCESS) return result;
  WriterLock lock(&call.session().graphs().disguised_nodes().mutex());
  call.session().graphs().disguised_nodes().memory().ResetHigh(device, attr);
  return CUDA_SUCCESS;
}

CUresult Custom_cuDeviceGraphMemTrim(CUdevice device) {
  Call call(info::k_cuDeviceGraphMemTrim);
  if (const CUresult result = CheckDevice(call, device); result != CUDA_SUCCESS) return result;
  WriterLock lock(&call.session().graphs().disguised_nodes().mutex());
  call.session().graphs().disguised_nodes().memory().Trim(device);
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::client
