// SPDX-License-Identifier: Apache-2.0
// Graph nodes with parameters. The driver has a family of calls for each type of node, in several versions, and a
// general one; here all of them fill in one message (NodeParams) and make one of three requests.
//
// What a node points to in this process's memory can be used by the server only if it is managed, pinned or
// registered; other copies to and from host memory are staged (staged_node.h). A host function goes as a number.

#include <cuda.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/calls/copy.h"
#include "client/calls/copy_shape.h"
#include "client/calls/function_info.h"
#include "client/calls/graph_memory.h"
#include "client/calls/graph_names.h"
#include "client/calls/kernel_params.h"
#include "client/calls/mapped_memory.h"
#include "client/calls/pointer.h"
#include "client/calls/runtime.h"
#include "client/calls/staged_node.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {
namespace {

// Parameters on their way into a message, with the storage that the message's views point to.
struct NodeMessage {
  wire::NodeParams params;
  std::string block;
  CUDA_MEMCPY3D copy = {};
  CUDA_MEMSET_NODE_PARAMS_v1 memset = {};
  std::vector<uint64_t> needs;  // handles that the node depends on, besides its graph
};

CUresult CheckContext(Call& call, CUcontext context, NodeMessage* out) {
  context = call.OrCurrent(context);  // a replay is told which that was
  if (!call.Valid(Kind::kContext, context)) return CUDA_ERROR_INVALID_CONTEXT;
  out->params.context = reinterpret_cast<uint64_t>(context);
  out->needs.push_back(out->params.context);
  return CUDA_SUCCESS;
}

// The three versions of the kernel's struct begin alike.
template <typename Kernel>
CUresult FillKernel(Call& call, const Kernel& kernel, CUkernel kern, CUcontext context, NodeMessage* out) {
  const uint64_t function =
      kernel.func != nullptr ? reinterpret_cast<uint64_t>(kernel.func) : reinterpret_cast<uint64_t>(kern);
  std::shared_ptr<FunctionInfo> info;
  if (const CUresult result = FindFunctionInfo(call, function, &info); result != CUDA_SUCCESS) return result;
  if (const CUresult result = PackParameters(*info, kernel.kernelParams, kernel.extra, &out->block);
      result != CUDA_SUCCESS) {
    return result;
  }
  if (out->block.size() > info->params_bytes) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = MapParameters(call, out->block, true); result != CUDA_SUCCESS) return result;
  wire::NodeParams& p = out->params;
  p.type = CU_GRAPH_NODE_TYPE_KERNEL;
  p.function = function;
  p.grid_x = kernel.gridDimX;
  p.grid_y = kernel.gridDimY;
  p.grid_z = kernel.gridDimZ;
  p.block_x = kernel.blockDimX;
  p.block_y = kernel.blockDimY;
  p.block_z = kernel.blockDimZ;
  p.shared_bytes = kernel.sharedMemBytes;
  p.params = out->block;
  out->needs.push_back(function);
  // A function is of one context anyway.
  if (context == nullptr && KindOf(function) == Kind::kFunction) return CUDA_SUCCESS;
  return CheckContext(call, context, out);
}

// One side of a copy: device memory, host memory that the server has at the same address, an array, or something that
// only this process can read.
CUresult FillSide(Call& call, const CUDA_MEMCPY3D& copy, CUmemorytype* type, CUdeviceptr* device, const void* host,
                  CUarray array, NodeMessage* out) {
  if (*type == CU_MEMORYTYPE_ARRAY) {
    if (!array) return CUDA_ERROR_INVALID_VALUE;
    if (!call.Valid(Kind::kArray, array)) return CUDA_ERROR_INVALID_HANDLE;
    out->needs.push_back(reinterpret_cast<uint64_t>(array));
    return CUDA_SUCCESS;
  }
  if (*type == CU_MEMORYTYPE_DEVICE) return CUDA_SUCCESS;
  if (*type != CU_MEMORYTYPE_HOST && *type != CU_MEMORYTYPE_UNIFIED) return CUDA_ERROR_INVALID_VALUE;
  if (*type == CU_MEMORYTYPE_HOST) *device = reinterpret_cast<CUdeviceptr>(host);
  const void* const address = reinterpret_cast<const void*>(*device);
  uint64_t reached;
  if (IsSharedHostMemory(call.session(), address, 1, &reached) ||
      MapForDevice(call, *device, &reached) == CUDA_SUCCESS) {
    *device = reached;
  } else if (!IsDevicePointer(call.session(), *device)) {
    // Pageable memory: nodes that were made with it do not come here (staged_node.h).
    const CUresult result = CheckStaged(copy);
    return result != CUDA_SUCCESS
               ? result
               : Call::Unsupported(call.info().name, "pageable memory in a copy node that was made with other memory");
  }
  *type = CU_MEMORYTYPE_DEVICE;
  return CUDA_SUCCESS;
}

// The other way round, for an application that asks: memory of the host is the host's again.
template <typename Pointer>
void RestoreSide(Session& session, CUmemorytype* type, CUdeviceptr* device, Pointer* host) {
  if (*type != CU_MEMORYTYPE_DEVICE) return;
  ReaderLock lock(&session.memory().mutex());
  if (session.memory().device_ranges().Find(*device)) return;
  const auto* const range = session.memory().host_ranges().Find(*device);
  if (!range) return;
  const uint64_t start = range->value.alias_of ? range->value.alias_of : range->start;
  *type = CU_MEMORYTYPE_HOST;
  *host = reinterpret_cast<Pointer>(start + (*device - range->start));
  *device = 0;
}

CUresult FillCopy(Call& call, const CUDA_MEMCPY3D& copy, CUcontext context, NodeMessage* out) {
  if (const CUresult result = CheckCopyNode(call.session(), copy); result != CUDA_SUCCESS) return result;
  out->copy = copy;
  out->params.type = CU_GRAPH_NODE_TYPE_MEMCPY;
  if (const CUresult result =
          FillSide(call, copy, &out->copy.srcMemoryType, &out->copy.srcDevice, copy.srcHost, copy.srcArray, out);
      result != CUDA_SUCCESS) {
    return result;
  }
  if (const CUresult result =
          FillSide(call, copy, &out->copy.dstMemoryType, &out->copy.dstDevice, copy.dstHost, copy.dstArray, out);
      result != CUDA_SUCCESS) {
    return result;
  }
  out->params.copy = {reinterpret_cast<const char*>(&out->copy), sizeof out->copy};
  return CheckContext(call, context, out);
}

CUresult FillHost(Call& call, CUhostFn function, void* data, NodeMessage* out) {
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!call.session().host_functions().Start()) return CUDA_ERROR_OUT_OF_MEMORY;
  out->params.type = CU_GRAPH_NODE_TYPE_HOST;
  out->params.host_function = call.session().host_functions().RegisterForGraph(function, data);
  return CUDA_SUCCESS;
}

template <typename Batch>
CUresult FillBatch(Call& call, const Batch& batch, NodeMessage* out) {
  if (batch.count != 0 && batch.paramArray == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (batch.count > 256) return CUDA_ERROR_INVALID_VALUE;  // the driver's own limit
  out->params.type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP;
  out->params.memory_operations = {reinterpret_cast<const char*>(batch.paramArray),
                                   batch.count * sizeof *batch.paramArray};
  out->params.flags = batch.flags;
  return CheckContext(call, batch.ctx, out);
}

CUresult FillEvent(Call& call, CUgraphNodeType type, CUevent event, NodeMessage* out) {
  if (!call.Valid(Kind::kEvent, event)) return CUDA_ERROR_INVALID_VALUE;
  out->params.type = type;
  out->params.event = reinterpret_cast<uint64_t>(event);
  out->needs.push_back(out->params.event);
  return CUDA_SUCCESS;
}

// The general struct: a node of any type.
CUresult FillAny(Call& call, const CUgraphNodeParams& node, NodeMessage* out) {
  out->params.type = node.type;
  switch (node.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      return FillKernel(call, node.kernel, node.kernel.kern, node.kernel.ctx, out);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return FillCopy(call, node.memcpy.copyParams, node.memcpy.copyCtx, out);
    case CU_GRAPH_NODE_TYPE_MEMSET:
      out->memset = {node.memset.dst,         node.memset.pitch, node.memset.value,
                     node.memset.elementSize, node.memset.width, node.memset.height};
      if (const CUresult result = CheckFill(call, out->memset); result != CUDA_SUCCESS) return result;
      out->params.type = node.type;
      out->params.memset = {reinterpret_cast<const char*>(&out->memset), sizeof out->memset};
      return CheckContext(call, node.memset.ctx, out);
    case CU_GRAPH_NODE_TYPE_GRAPH:
      if (!call.Valid(Kind::kGraph, node.graph.graph)) return CUDA_ERROR_INVALID_VALUE;
      if (node.graph.ownership != CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE) {
        return Call::Unsupported(call.info().name, "a child graph that is moved into a node that exists");
      }
      if (const CUresult result = CheckChildGraph(call, reinterpret_cast<uint64_t>(node.graph.graph));
          result != CUDA_SUCCESS) {
        return result;
      }
      out->params.type = node.type;
      out->params.graph = reinterpret_cast<uint64_t>(node.graph.graph);
      out->needs.push_back(out->params.graph);
      return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return FillEvent(call, node.type, node.eventWait.event, out);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return FillEvent(call, node.type, node.eventRecord.event, out);
    case CU_GRAPH_NODE_TYPE_EMPTY:
      out->params.type = node.type;
      return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_HOST:
      return FillHost(call, node.host.fn, node.host.userData, out);
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
      return FillBatch(call, node.memOp, out);
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
      out->params.type = node.type;
      out->params.conditional = node.conditional.handle;
      out->params.conditional_type = node.conditional.type;
      out->params.bodies = node.conditional.size;
      return CheckContext(call, node.conditional.ctx, out);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
      return CUDA_ERROR_NOT_SUPPORTED;  // as natively: these nodes cannot be changed
    default:
      if (unsigned(node.type) > CU_GRAPH_NODE_TYPE_CONDITIONAL) return CUDA_ERROR_INVALID_VALUE;
      return Call::Unsupported(call.info().name, "a node of this type is not carried over yet");
  }
}

// A node has at most three needs: a function or two arrays, and a context.
template <typename Record>
void WithNeeds(const NodeMessage& message, Record record) {
  const auto key = [&message](size_t i) {
    const uint64_t handle = message.needs[i];
    return replay::ObjectKey{KindOf(handle), handle};
  };
  switch (message.needs.size()) {
    case 0:
      return record({});
    case 1:
      return record({key(0)});
    case 2:
      return record({key(0), key(1)});
    default:
      return record({key(0), key(1), key(2)});
  }
}

// Adds a node; `fill` makes its parameters.
template <typename Fill>
CUresult Add(const CallInfo& info, CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies,
             const CUgraphEdgeData* edges, size_t count, Fill fill) {
  if (node == nullptr || (count != 0 && dependencies == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (!call.Valid(Kind::kGraph, graph)) return CUDA_ERROR_INVALID_VALUE;
  if (count > kMostDependencies) return Call::Unsupported(info.name, "more dependencies than a message holds");
  NodeMessage message;
  if (const CUresult result = fill(call, &message); result != CUDA_SUCCESS) return result;
  wire::cuGraphAddNode_v2_Request request;
  request.graph = reinterpret_cast<uint64_t>(graph);
  for (size_t i = 0; i < count; ++i) {
    if (!call.Valid(Kind::kGraphNode, dependencies[i])) return CUDA_ERROR_INVALID_VALUE;
    request.dependencies.push_back(reinterpret_cast<uint64_t>(dependencies[i]));
  }
  if (edges != nullptr) request.edges = {reinterpret_cast<const char*>(edges), count * sizeof *edges};
  request.params = message.params;
  request.node = call.NewHandle(Kind::kGraphNode, request.graph);
  if (request.node == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  WithNeeds(message, [&call, &request](std::initializer_list<replay::ObjectKey> needs) {
    call.Created({Kind::kGraphNode, request.node}, needs);
  });
  *node = reinterpret_cast<CUgraphNode>(request.node);
  return CUDA_SUCCESS;
}

// A node that takes its graph over, with the memory that the graph allocates and frees.
CUresult AddMovedGraph(const CallInfo& info, CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies,
                       const CUgraphEdgeData* edges, size_t count, CUgraph child) {
  const auto parent = reinterpret_cast<uint64_t>(graph), moved = reinterpret_cast<uint64_t>(child);
  const auto fill = [&](Call& call, NodeMessage* out) {
    if (!call.Valid(Kind::kGraph, moved)) return CUDA_ERROR_INVALID_VALUE;
    Session& session = call.session();
    if (session.graphs().captures().IsGraphOfOne(parent) || session.graphs().captures().IsGraphOfOne(moved)) {
      return Call::Unsupported(info.name, "moving a child graph in or out of the graph of a capture in progress");
    }
    if (const CUresult result = PrepareCopies(session, moved); result != CUDA_SUCCESS) return result;
    bool with_memory = false;
    if (session.graphs().disguised_nodes().uses_memory()) {
      ReaderLock lock(&session.graphs().disguised_nodes().mutex());
      with_memory = session.graphs().disguised_nodes().memory().HasNodes(moved);
    }
    // As natively: memory nodes cannot be added to a graph inside another one.
    if (with_memory) {
      ReaderLock lock(&session.objects().mutex());
      if (session.objects().IsEmbeddedLocked(parent)) return CUDA_ERROR_NOT_SUPPORTED;
    }
    out->params.type = CU_GRAPH_NODE_TYPE_GRAPH;
    out->params.graph = moved;
    out->params.moved = true;
    out->needs.push_back(moved);
    return CUDA_SUCCESS;
  };
  const CUresult result = Add(info, node, graph, dependencies, edges, count, fill);
  if (result == CUDA_SUCCESS) Session::Get()->graphs().Moved(moved, reinterpret_cast<uint64_t>(*node), parent);
  return result;
}

// Changes a node of a graph.
template <typename Fill>
CUresult Set(const CallInfo& info, CUgraphNode node, Fill fill) {
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (!call.Valid(Kind::kGraphNode, node)) return CUDA_ERROR_INVALID_VALUE;
  NodeMessage message;
  if (const CUresult result = fill(call, &message); result != CUDA_SUCCESS) return result;
  wire::cuGraphNodeSetParams_Request request;
  request.node = reinterpret_cast<uint64_t>(node);
  request.params = message.params;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  WithNeeds(message, [&call, &request](std::initializer_list<replay::ObjectKey> needs) {
    call.Modified({Kind::kGraphNode, request.node}, 0, needs);
  });
  return CUDA_SUCCESS;
}

// Changes a node of an executable graph.
template <typename Fill>
CUresult SetExec(const CallInfo& info, CUgraphExec exec, CUgraphNode node, Fill fill) {
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (!call.Valid(Kind::kGraphExec, exec) || !call.Valid(Kind::kGraphNode, node)) return CUDA_ERROR_INVALID_VALUE;
  NodeMessage message;
  if (const CUresult result = fill(call, &message); result != CUDA_SUCCESS) return result;
  wire::cuGraphExecNodeSetParams_Request request;
  request.exec = reinterpret_cast<uint64_t>(exec);
  request.node = reinterpret_cast<uint64_t>(node);
  request.params = message.params;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  WithNeeds(message, [&call, &request](std::initializer_list<replay::ObjectKey> needs) {
    call.Modified({Kind::kGraphExec, request.exec}, request.node, needs);
  });
  return CUDA_SUCCESS;
}

// Asks for a node's parameters; `take` reads them while the reply is there.
template <typename Take>
CUresult Get(const char* name, CUgraphNode node, CUgraphNodeType type, Take take) {
  const CallInfo info = Under(info::k_OpGraphNodeParams, name);
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (!call.Valid(Kind::kGraphNode, node)) return CUDA_ERROR_INVALID_VALUE;
  wire::OpGraphNodeParams_Request request;
  request.node = reinterpret_cast<uint64_t>(node);
  request.type = type;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::OpGraphNodeParams_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  return take(call, reply.params);
}

template <typename Kernel>
CUresult GetKernel(const char* name, CUgraphNode node, Kernel* out, CUkernel* kern, CUcontext* context) {
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return Get(name, node, CU_GRAPH_NODE_TYPE_KERNEL, [&](Call& call, const wire::NodeParams& p) {
    const std::string block(p.params);
    const uint64_t function = p.function, its_context = p.context;
    std::shared_ptr<FunctionInfo> info;
    *out = {};
    if (KindOf(function) == Kind::kKernel && kern != nullptr) {
      *kern = reinterpret_cast<CUkernel>(function);
    } else {
      out->func = reinterpret_cast<CUfunction>(function);
    }
    out->gridDimX = p.grid_x;
    out->gridDimY = p.grid_y;
    out->gridDimZ = p.grid_z;
    out->blockDimX = p.block_x;
    out->blockDimY = p.block_y;
    out->blockDimZ = p.block_z;
    out->sharedMemBytes = p.shared_bytes;
    if (context != nullptr) *context = reinterpret_cast<CUcontext>(its_context);
    if (const CUresult result = FindFunctionInfo(call, function, &info); result != CUDA_SUCCESS) return result;
    if (block.size() < info->params_bytes) return CUDA_ERROR_UNKNOWN;
    call.session().graphs().asked_nodes().Keep(reinterpret_cast<uint64_t>(node), [&](AskedArrays* kept) {
      kept->block = block;
      kept->pointers.clear();
      for (const KernelParam& parameter : info->params) kept->pointers.push_back(&kept->block[parameter.offset]);
      out->kernelParams = kept->pointers.empty() ? nullptr : kept->pointers.data();
    });
    return CUDA_SUCCESS;
  });
}

const auto FromKernelV1 = [](const CUDA_KERNEL_NODE_PARAMS_v1* p) {
  return [p](Call& call, NodeMessage* out) { return FillKernel(call, *p, nullptr, nullptr, out); };
};
const auto FromKernelV2 = [](const CUDA_KERNEL_NODE_PARAMS_v2* p) {
  return [p](Call& call, NodeMessage* out) { return FillKernel(call, *p, p->kern, p->ctx, out); };
};
const auto FromCopy = [](const CUDA_MEMCPY3D* p, CUcontext context) {
  return [p, context](Call& call, NodeMessage* out) { return FillCopy(call, *p, context, out); };
};
const auto FromBatch = [](const CUDA_BATCH_MEM_OP_NODE_PARAMS* p) {
  return [p](Call& call, NodeMessage* out) { return FillBatch(call, *p, out); };
};
const auto FromHost = [](const CUDA_HOST_NODE_PARAMS* p) {
  return [p](Call& call, NodeMessage* out) { return FillHost(call, p->fn, p->userData, out); };
};
const auto FromAny = [](const CUgraphNodeParams* p) {
  return [p](Call& call, NodeMessage* out) { return FillAny(call, *p, out); };
};

// The bodies of a new conditional node, in an array that lives as long as the node.
CUresult FindBodies(CUgraphNode node, CUDA_CONDITIONAL_NODE_PARAMS* params) {
  std::vector<CUgraph> bodies(params->size);
  for (unsigned i = 0; i < params->size; ++i) {
    if (const CUresult result = GraphOfNode(node, i + 1, &bodies[i]); result != CUDA_SUCCESS) return result;
  }
  Session::Get()->graphs().asked_nodes().Keep(reinterpret_cast<uint64_t>(node), [&](AskedArrays* kept) {
    kept->bodies = std::move(bodies);
    params->phGraph_out = kept->bodies.data();
  });
  return CUDA_SUCCESS;
}

// A copy node that is staged.
bool FindStaged(CUgraphNode node, DisguisedNode* found) {
  Session* const session = Session::Get();
  return session != nullptr && FindDisguised(*session, node, found) && found->type == CU_GRAPH_NODE_TYPE_MEMCPY;
}

bool IsStaged(CUgraphNode node) {
  DisguisedNode found;
  return FindStaged(node, &found);
}

// The requests carry these ids whatever the application's call was named.
constexpr CallInfo AddInfo(const char* name) { return Under(info::k_cuGraphAddNode_v2, name); }
constexpr CallInfo SetInfo(const char* name) { return Under(info::k_cuGraphNodeSetParams, name); }
constexpr CallInfo ExecInfo(const char* name) { return Under(info::k_cuGraphExecNodeSetParams, name); }

}  // namespace

CUresult CheckCopyNode(Session& session, CUDA_MEMCPY3D copy) {
  if (copy.WidthInBytes == 0 || copy.Height == 0 || copy.Depth == 0 || !CompleteSides(&copy)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto leaves = [&](CUmemorytype type, CUdeviceptr device, const void* host, uint64_t pitch, uint64_t rows,
                          uint64_t x, uint64_t y, uint64_t z) {
    if (type == CU_MEMORYTYPE_ARRAY) return false;
    const uint64_t address = type == CU_MEMORYTYPE_HOST ? reinterpret_cast<uint64_t>(host) : device;
    const uint64_t last_row = (z + copy.Depth - 1) * rows + y + copy.Height - 1;
    return LeavesMemory(session, address, last_row * pitch + x + copy.WidthInBytes, type == CU_MEMORYTYPE_DEVICE);
  };
  const bool wrong = leaves(copy.srcMemoryType, copy.srcDevice, copy.srcHost, copy.srcPitch, copy.srcHeight,
                            copy.srcXInBytes, copy.srcY, copy.srcZ) ||
                     leaves(copy.dstMemoryType, copy.dstDevice, copy.dstHost, copy.dstPitch, copy.dstHeight,
                            copy.dstXInBytes, copy.dstY, copy.dstZ);
  return wrong ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult Custom_cuGraphAddNode_v2(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                  const CUgraphEdgeData* dependencyData, size_t numDependencies,
                                  CUgraphNodeParams* nodeParams) {
  static constexpr CallInfo kInfo = AddInfo("cuGraphAddNode");
  if (nodeParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (nodeParams->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || nodeParams->type == CU_GRAPH_NODE_TYPE_MEM_FREE) {
    return AddMemoryNode(phGraphNode, hGraph, dependencies, dependencyData, numDependencies, nodeParams);
  }
  if (nodeParams->type == CU_GRAPH_NODE_TYPE_MEMCPY && NeedsStaging(nodeParams->memcpy.copyParams)) {
    return AddStagedNode(phGraphNode, hGraph, dependencies, dependencyData, numDependencies,
                         nodeParams->memcpy.copyParams, nodeParams->memcpy.copyCtx);
  }
  if (nodeParams->type == CU_GRAPH_NODE_TYPE_GRAPH &&
      nodeParams->graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE) {
    return AddMovedGraph(kInfo, phGraphNode, hGraph, dependencies, dependencyData, numDependencies,
                         nodeParams->graph.graph);
  }
  const CUresult result =
      Add(kInfo, phGraphNode, hGraph, dependencies, dependencyData, numDependencies, FromAny(nodeParams));
  if (result != CUDA_SUCCESS || nodeParams->type != CU_GRAPH_NODE_TYPE_CONDITIONAL) return result;
  return FindBodies(*phGraphNode, &nodeParams->conditional);
}

CUresult Custom_cuGraphAddNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                               size_t numDependencies, CUgraphNodeParams* nodeParams) {
  return Custom_cuGraphAddNode_v2(phGraphNode, hGraph, dependencies, nullptr, numDependencies, nodeParams);
}

CUresult Custom_cuGraphNodeSetParams(CUgraphNode hNode, CUgraphNodeParams* nodeParams) {
  static constexpr CallInfo kInfo = SetInfo("cuGraphNodeSetParams");
  if (nodeParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (nodeParams->type == CU_GRAPH_NODE_TYPE_CONDITIONAL) return CUDA_ERROR_NOT_SUPPORTED;  // as natively
  if (nodeParams->type == CU_GRAPH_NODE_TYPE_MEMCPY && IsStaged(hNode)) {
    return SetStagedNode(hNode, nodeParams->memcpy.copyParams);
  }
  const CUresult result = Set(kInfo, hNode, FromAny(nodeParams));
  if (result == CUDA_SUCCESS && nodeParams->type == CU_GRAPH_NODE_TYPE_GRAPH) {
    Session& session = *Session::Get();
    session.graphs().disguised_nodes().ForgetGraphOf(reinterpret_cast<uint64_t>(hNode), &session.objects());
  }
  return result;
}

CUresult Custom_cuGraphExecNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeParams* nodeParams) {
  static constexpr CallInfo kInfo = ExecInfo("cuGraphExecNodeSetParams");
  if (nodeParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (nodeParams->type == CU_GRAPH_NODE_TYPE_CONDITIONAL) return CUDA_ERROR_NOT_SUPPORTED;  // as natively
  if (nodeParams->type == CU_GRAPH_NODE_TYPE_MEMCPY && IsStaged(hNode)) {
    return SetStagedNodeOfExec(hGraphExec, hNode, nodeParams->memcpy.copyParams, nodeParams->memcpy.copyCtx);
  }
  if (nodeParams->type == CU_GRAPH_NODE_TYPE_GRAPH) {
    return SetChildOfExec(hGraphExec, hNode, nodeParams->graph.graph,
                          [&] { return SetExec(kInfo, hGraphExec, hNode, FromAny(nodeParams)); });
  }
  return SetExec(kInfo, hGraphExec, hNode, FromAny(nodeParams));
}

// The executable has in it what the child is now: its record stays for as long as the executable's.
CUresult Custom_cuGraphExecChildGraphNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraph childGraph) {
  static constexpr CallInfo kInfo = ExecInfo("cuGraphExecChildGraphNodeSetParams");
  CUgraphNodeParams params{};
  params.type = CU_GRAPH_NODE_TYPE_GRAPH;
  params.graph.graph = childGraph;
  return SetChildOfExec(hGraphExec, hNode, childGraph,
                        [&] { return SetExec(kInfo, hGraphExec, hNode, FromAny(&params)); });
}

CUresult Custom_cuGraphAddKernelNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                     size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS_v1* nodeParams) {
  static constexpr CallInfo kInfo = AddInfo("cuGraphAddKernelNode");
  if (nodeParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return Add(kInfo, phGraphNode, hGraph, dependencies, nullptr, numDependencies, FromKernelV1(nodeParams));
}

CUresult Custom_cuGraphAddKernelNode_v2(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                        size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS_v2* nodeParams) {
  static constexpr CallInfo kInfo = AddInfo("cuGraphAddKernelNode");
  if (nodeParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return Add(kInfo, phGraphNode, hGraph, dependencies, nullptr, numDependencies, FromKernelV2(nodeParams));
}

CUresult Custom_cuGraphKernelNodeGetParams(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS_v1* nodeParams) {
  return GetKernel("cuGraphKernelNodeGetParams", hNode, nodeParams, nullptr, nullptr);
}

CUresult Custom_cuGraphKernelNodeGetParams_v2(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS_v2* nodeParams) {
  CUkernel kernel = nullptr;
  CUcontext context = nullptr;
  const CUresult result = GetKernel("cuGraphKernelNodeGetParams", hNode, nodeParams, &kernel, &context);
  if (result == CUDA_SUCCESS) {
    nodeParams->kern = kernel;
    nodeParams->ctx = context;
  }
  return result;
}

CUresult Custom_cuGraphKernelNodeSetParams(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1* nodeParams) {
  static constexpr CallInfo kInfo = SetInfo("cuGraphKernelNodeSetParams");
  if (nodeParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return Set(kInfo, hNode, FromKernelV1(nodeParams));
}

CUresult Custom_cuGraphKernelNodeSetParams_v2(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v2* nodeParams) {
  static constexpr CallInfo kInfo = SetInfo("cuGraphKernelNodeSetParams");
  if (nodeParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return Set(kInfo, hNode, FromKernelV2(nodeParams));
}

CUresult Custom_cuGraphExecKernelNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                               const CUDA_KERNEL_NODE_PARAMS_v1* nodeParams) {
  static constexpr CallInfo kInfo = ExecInfo("cuGraphExecKernelNodeSetParams");
  if (nodeParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return SetExec(kInfo, hGraphExec, hNode, FromKernelV1(nodeParams));
}

CUresult Custom_cuGraphExecKernelNodeSetParams_v2(CUgraphExec hGraphExec, CUgraphNode hNode,
                                                  const CUDA_KERNEL_NODE_PARAMS_v2* nodeParams) {
  static constexpr CallInfo kInfo = ExecInfo("cuGraphExecKernelNodeSetParams");
  if (nodeParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return SetExec(kInfo, hGraphExec, hNode, FromKernelV2(nodeParams));
}

CUresult Custom_cuGraphAddMemcpyNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                     size_t numDependencies, const CUDA_MEMCPY3D* copyParams, CUcontext ctx) {
  static constexpr CallInfo kInfo = AddInfo("cuGraphAddMemcpyNode");
  if (copyParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (NeedsStaging(*copyParams)) {
    return AddStagedNode(phGraphNode, hGraph, dependencies, nullptr, numDependencies, *copyParams, ctx);
  }
  return Add(kInfo, phGraphNode, hGraph, dependencies, nullptr, numDependencies, FromCopy(copyParams, ctx));
}

CUresult Custom_cuGraphMemcpyNodeGetParams(CUgraphNode hNode, CUDA_MEMCPY3D* nodeParams) {
  if (nodeParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (DisguisedNode staged; FindStaged(hNode, &staged)) {
    *nodeParams = staged.staged.copy;
    return CUDA_SUCCESS;
  }
  return Get("cuGraphMemcpyNodeGetParams", hNode, CU_GRAPH_NODE_TYPE_MEMCPY,
             [&](Call& call, const wire::NodeParams& p) {
               if (p.copy.size() != sizeof *nodeParams) return call.session().Lose(ChannelStatus::kProtocolError);
               std::memcpy(nodeParams, p.copy.data(), sizeof *nodeParams);
               CUDA_MEMCPY3D& copy = *nodeParams;
               RestoreSide(call.session(), &copy.srcMemoryType, &copy.srcDevice, &copy.srcHost);
               RestoreSide(call.session(), &copy.dstMemoryType, &copy.dstDevice, &copy.dstHost);
               return CUDA_SUCCESS;
             });
}

CUresult Custom_cuGraphMemcpyNodeSetParams(CUgraphNode hNode, const CUDA_MEMCPY3D* nodeParams) {
  static constexpr CallInfo kInfo = SetInfo("cuGraphMemcpyNodeSetParams");
  if (nodeParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (IsStaged(hNode)) return SetStagedNode(hNode, *nodeParams);
  return Set(kInfo, hNode, FromCopy(nodeParams, nullptr));
}

CUresult Custom_cuGraphExecMemcpyNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                               const CUDA_MEMCPY3D* copyParams, CUcontext ctx) {
  static constexpr CallInfo kInfo = ExecInfo("cuGraphExecMemcpyNodeSetParams");
  if (copyParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (IsStaged(hNode)) return SetStagedNodeOfExec(hGraphExec, hNode, *copyParams, ctx);
  return SetExec(kInfo, hGraphExec, hNode, FromCopy(copyParams, ctx));
}

CUresult Custom_cuGraphNodeSetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int isEnabled) {
  if (bool enabled; IsStagedInExec(hGraphExec, hNode, &enabled)) {
    return EnableStagedNode(hGraphExec, hNode, isEnabled != 0);
  }
  Call call(info::k_cuGraphNodeSetEnabled);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuGraphNodeSetEnabled_Request request;
  request.hGraphExec = reinterpret_cast<uint64_t>(hGraphExec);
  request.hNode = reinterpret_cast<uint64_t>(hNode);
  if (!call.Valid(Kind::kGraphExec, request.hGraphExec) || !call.Valid(Kind::kGraphNode, request.hNode)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  request.isEnabled = isEnabled;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  call.Modified({Kind::kGraphExec, request.hGraphExec}, request.hNode);
  return CUDA_SUCCESS;
}

CUresult Custom_cuGraphNodeGetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int* isEnabled) {
  if (!isEnabled) return CUDA_ERROR_INVALID_VALUE;
  if (bool enabled; IsStagedInExec(hGraphExec, hNode, &enabled)) {
    *isEnabled = enabled;
    return CUDA_SUCCESS;
  }
  Call call(info::k_cuGraphNodeGetEnabled);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuGraphNodeGetEnabled_Request request;
  request.hGraphExec = reinterpret_cast<uint64_t>(hGraphExec);
  request.hNode = reinterpret_cast<uint64_t>(hNode);
  if (!call.Valid(Kind::kGraphExec, request.hGraphExec) || !call.Valid(Kind::kGraphNode, request.hNode)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuGraphNodeGetEnabled_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  *isEnabled = unsigned(reply.isEnabled);
  return CUDA_SUCCESS;
}

CUresult Custom_cuGraphAddBatchMemOpNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                         size_t numDependencies, const CUDA_BATCH_MEM_OP_NODE_PARAMS* nodeParams) {
  static constexpr CallInfo kInfo = AddInfo("cuGraphAddBatchMemOpNode");
  if (nodeParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return Add(kInfo, phGraphNode, hGraph, dependencies, nullptr, numDependencies, FromBatch(nodeParams));
}

CUresult Custom_cuGraphBatchMemOpNodeGetParams(CUgraphNode hNode, CUDA_BATCH_MEM_OP_NODE_PARAMS* nodeParams_out) {
  if (nodeParams_out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return Get("cuGraphBatchMemOpNodeGetParams", hNode, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
             [&](Call& call, const wire::NodeParams& p) {
               call.session().graphs().asked_nodes().Keep(reinterpret_cast<uint64_t>(hNode), [&](AskedArrays* asked) {
                 std::vector<CUstreamBatchMemOpParams>& kept = asked->operations;
                 kept.resize(p.memory_operations.size() / sizeof kept[0]);
                 if (!kept.empty()) std::memcpy(&kept[0], p.memory_operations.data(), kept.size() * sizeof kept[0]);
                 nodeParams_out->count = unsigned(kept.size());
                 nodeParams_out->paramArray = kept.data();
               });
               nodeParams_out->ctx = reinterpret_cast<CUcontext>(p.context);
               nodeParams_out->flags = p.flags;
               return CUDA_SUCCESS;
             });
}

CUresult Custom_cuGraphBatchMemOpNodeSetParams(CUgraphNode hNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS* nodeParams) {
  static constexpr CallInfo kInfo = SetInfo("cuGraphBatchMemOpNodeSetParams");
  if (nodeParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return Set(kInfo, hNode, FromBatch(nodeParams));
}

CUresult Custom_cuGraphExecBatchMemOpNodeSetParams(CUgraphExec graphExec, CUgraphNode node,
                                                   const CUDA_BATCH_MEM_OP_NODE_PARAMS* nodeParams) {
  static constexpr CallInfo kInfo = ExecInfo("cuGraphExecBatchMemOpNodeSetParams");
  if (nodeParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return SetExec(kInfo, graphExec, node, FromBatch(nodeParams));
}

CUresult Custom_cuGraphAddHostNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                   size_t numDependencies, const CUDA_HOST_NODE_PARAMS* nodeParams) {
  static constexpr CallInfo kInfo = AddInfo("cuGraphAddHostNode");
  if (nodeParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return Add(kInfo, phGraphNode, hGraph, dependencies, nullptr, numDependencies, FromHost(nodeParams));
}

CUresult Custom_cuGraphHostNodeGetParams(CUgraphNode hNode, CUDA_HOST_NODE_PARAMS* nodeParams) {
  if (nodeParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return Get("cuGraphHostNodeGetParams", hNode, CU_GRAPH_NODE_TYPE_HOST, [&](Call& call, const wire::NodeParams& p) {
    const bool found =
        call.session().host_functions().FindForGraph(p.host_function, &nodeParams->fn, &nodeParams->userData);
    return found ? CUDA_SUCCESS : call.session().Lose(ChannelStatus::kProtocolError);
  });
}

CUresult Custom_cuGraphHostNodeSetParams(CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS* nodeParams) {
  static constexpr CallInfo kInfo = SetInfo("cuGraphHostNodeSetParams");
  if (nodeParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return Set(kInfo, hNode, FromHost(nodeParams));
}

CUresult Custom_cuGraphExecHostNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                             const CUDA_HOST_NODE_PARAMS* nodeParams) {
  static constexpr CallInfo kInfo = ExecInfo("cuGraphExecHostNodeSetParams");
  if (nodeParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return SetExec(kInfo, hGraphExec, hNode, FromHost(nodeParams));
}

CUresult Custom_cuGraphNodeGetType(CUgraphNode hNode, CUgraphNodeType* type) {
  if (!type) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuGraphNodeGetType);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuGraphNodeGetType_Request request;
  request.hNode = reinterpret_cast<uint64_t>(hNode);
  if (!call.Valid(Kind::kGraphNode, request.hNode)) return CUDA_ERROR_INVALID_VALUE;
  if (DisguisedNode found; FindDisguised(call.session(), hNode, &found)) {
    *type = found.type;
    return CUDA_SUCCESS;
  }
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuGraphNodeGetType_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  *type = CUgraphNodeType(reply.type);
  return CUDA_SUCCESS;
}

// The record of a node stays while something needs it (client/graphs/graph_records.h). Until then a replay takes the
// node away when its turn has come.
CUresult Custom_cuGraphDestroyNode(CUgraphNode hNode) {
  Call call(info::k_cuGraphDestroyNode);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuGraphDestroyNode_Request request;
  request.hNode = reinterpret_cast<uint64_t>(hNode);
  if (!call.Valid(Kind::kGraphNode, request.hNode)) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = CheckWithoutMemory(call.session(), request.hNode); result != CUDA_SUCCESS) return result;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  uint64_t graph = 0;
  {
    WriterLock lock(&call.session().objects().mutex());
    Object* const node = call.session().objects().handles().Find(Kind::kGraphNode, request.hNode);
    if (node) {
      call.session().objects().SetActiveLocked(request.hNode, node, false);
      call.session().graphs().ForgetAskedLocked(call.session().objects(), request.hNode);
      graph = node->parent;
    }
  }
  call.Modified({Kind::kGraph, graph}, request.hNode);
  call.session().graphs().disguised_nodes().ForgetNode(request.hNode);
  WriterLock lock(&call.session().objects().mutex());
  call.session().objects().graph_records().NodeRemoved({Kind::kGraph, graph}, {Kind::kGraphNode, request.hNode});
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::client
