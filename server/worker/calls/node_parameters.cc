// SPDX-License-Identifier: Apache-2.0
// Graph nodes with parameters: kernels, copies, fills, events, child graphs, batches of memory operations. One message
// (NodeParams) stands for all of them; the typed functions of the driver do the work.
//
// Copies to and from host memory are refused: a client must not make the driver read this process's memory.

#include <cuda.h>

#include <cstring>
#include <string>
#include <vector>

#include "proto/codec/graph.gen.h"
#include "proto/codec/operations.gen.h"
#include "proto/codec/wire.h"
#include "server/dispatch/runtime.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/calls/kernel_parameters.h"
#include "server/worker/graphs/conditional_bodies.h"

namespace cuda_remote::server {
namespace {

// Bodies of a conditional node.
constexpr uint32_t kMostBodies = 1 << 16;

// A node's parameters as the driver takes them. Not copyable: it points into itself.
struct NodeParameters {
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  CUDA_KERNEL_NODE_PARAMS_v2 kernel = {};
  CUDA_MEMCPY3D copy = {};
  CUDA_MEMSET_NODE_PARAMS_v1 memset = {};
  CUDA_BATCH_MEM_OP_NODE_PARAMS_v1 batch = {};
  CUDA_HOST_NODE_PARAMS_v1 host = {};
  CUDA_CONDITIONAL_NODE_PARAMS conditional = {};
  CUevent event = nullptr;
  CUgraph graph = nullptr;
  CUcontext context = nullptr;

  NodeParameters() = default;
  NodeParameters(const NodeParameters&) = delete;
  NodeParameters& operator=(const NodeParameters&) = delete;

  std::string block;            // the kernel's parameters
  std::vector<void*> pointers;  // into it
  size_t block_bytes = 0;
  void* extra[5] = {};
  std::vector<CUstreamBatchMemOpParams> operations;
};

// The node's own context, or the current one.
CUresult FindContext(Session& session, uint64_t handle, CUcontext* context) {
  const uint64_t wanted = handle != 0 ? handle : session.CurrentContext();
  return session.Real(Kind::kContext, wanted, context) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult ReadKernel(Session& session, const wire::NodeParams& in, NodeParameters* out) {
  if (!session.Real(Kind::kFunction, in.function, &out->kernel.func) &&
      !session.Real(Kind::kKernel, in.function, &out->kernel.kern)) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  out->kernel.gridDimX = in.grid_x;
  out->kernel.gridDimY = in.grid_y;
  out->kernel.gridDimZ = in.grid_z;
  out->kernel.blockDimX = in.block_x;
  out->kernel.blockDimY = in.block_y;
  out->kernel.blockDimZ = in.block_z;
  out->kernel.sharedMemBytes = in.shared_bytes;
  if (in.context != 0) {
    if (const CUresult result = FindContext(session, in.context, &out->kernel.ctx); result != CUDA_SUCCESS)
      return result;
  }
  out->block.assign(in.params);
  if (PointToParameters(session.driver(), out->kernel.func, out->kernel.kern, out->block.data(), out->block.size(),
                        &out->pointers)) {
    out->kernel.kernelParams = out->pointers.data();
    return CUDA_SUCCESS;
  }
  out->block_bytes = out->block.size();
  out->extra[0] = CU_LAUNCH_PARAM_BUFFER_POINTER;
  out->extra[1] = out->block.data();
  out->extra[2] = CU_LAUNCH_PARAM_BUFFER_SIZE;
  out->extra[3] = &out->block_bytes;
  out->extra[4] = CU_LAUNCH_PARAM_END;
  out->kernel.extra = out->extra;
  return CUDA_SUCCESS;
}

// Translates the arrays inside, one way or the other.
template <typename Translate>
bool TranslateArrays(CUDA_MEMCPY3D* copy, Translate translate) {
  if (copy->srcMemoryType == CU_MEMORYTYPE_ARRAY && !translate(&copy->srcArray)) return false;
  if (copy->dstMemoryType == CU_MEMORYTYPE_ARRAY && !translate(&copy->dstArray)) return false;
  return true;
}

CUresult ReadCopy(Session& session, const wire::NodeParams& in, NodeParameters* out) {
  if (!CopyExactly(in.copy, &out->copy, sizeof out->copy)) return kMalformedRequest;
  for (CUmemorytype type : {out->copy.srcMemoryType, out->copy.dstMemoryType}) {
    if (type != CU_MEMORYTYPE_DEVICE && type != CU_MEMORYTYPE_ARRAY) return CUDA_ERROR_NOT_SUPPORTED;
  }
  const bool known = TranslateArrays(&out->copy, [&session](CUarray* array) {
    return session.Real(Kind::kArray, reinterpret_cast<uint64_t>(*array), array);
  });
  return known ? FindContext(session, in.context, &out->context) : CUDA_ERROR_INVALID_HANDLE;
}

CUresult ReadParameters(Session& session, const wire::NodeParams& in, NodeParameters* out) {
  if (in.moved) return kMalformedRequest;  // for AddMovedGraph alone
  out->type = CUgraphNodeType(in.type);
  switch (out->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      return ReadKernel(session, in, out);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return ReadCopy(session, in, out);
    case CU_GRAPH_NODE_TYPE_MEMSET:
      if (!CopyExactly(in.memset, &out->memset, sizeof out->memset)) return kMalformedRequest;
      return FindContext(session, in.context, &out->context);
    case CU_GRAPH_NODE_TYPE_GRAPH:
      return session.Real(Kind::kGraph, in.graph, &out->graph) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return session.Real(Kind::kEvent, in.event, &out->event) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    case CU_GRAPH_NODE_TYPE_EMPTY:
      return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_HOST:
      // What the driver calls is the worker's own function, which has the client call the application's.
      out->host.fn = session.HostFunction(in.host_function, &out->host.userData);
      return out->host.fn != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
      if (!CopyArray(in.memory_operations, in.memory_operations.size() / sizeof(CUstreamBatchMemOpParams),
                     &out->operations)) {
        return kMalformedRequest;
      }
      out->batch.count = unsigned(out->operations.size());
      out->batch.paramArray = out->operations.data();
      out->batch.flags = in.flags;
      return FindContext(session, in.context, &out->batch.ctx);
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
      if (in.bodies > kMostBodies) return CUDA_ERROR_INVALID_VALUE;
      out->conditional.handle = in.conditional;
      out->conditional.type = CUgraphConditionalNodeType(in.conditional_type);
      out->conditional.size = in.bodies;
      return FindContext(session, in.context, &out->conditional.ctx);
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult AddNode(const DriverTable& driver, CUgraphNode* node, CUgraph graph, const std::vector<CUgraphNode>& after,
                 const NodeParameters& p) {
  const CUgraphNode* dependencies = after.empty() ? nullptr : after.data();
  const size_t count = after.size();
  switch (p.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      return driver.cuGraphAddKernelNode_v2(node, graph, dependencies, count, &p.kernel);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return driver.cuGraphAddMemcpyNode(node, graph, dependencies, count, &p.copy, p.context);
    case CU_GRAPH_NODE_TYPE_MEMSET:
      return driver.cuGraphAddMemsetNode(node, graph, dependencies, count, &p.memset, p.context);
    case CU_GRAPH_NODE_TYPE_GRAPH:
      return driver.cuGraphAddChildGraphNode(node, graph, dependencies, count, p.graph);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return driver.cuGraphAddEventWaitNode(node, graph, dependencies, count, p.event);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return driver.cuGraphAddEventRecordNode(node, graph, dependencies, count, p.event);
    case CU_GRAPH_NODE_TYPE_EMPTY:
      return driver.cuGraphAddEmptyNode(node, graph, dependencies, count);
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
      return driver.cuGraphAddBatchMemOpNode(node, graph, dependencies, count, &p.batch);
    case CU_GRAPH_NODE_TYPE_HOST:
      return driver.cuGraphAddHostNode(node, graph, dependencies, count, &p.host);
    case CU_GRAPH_NODE_TYPE_CONDITIONAL: {
      CUgraphNodeParams params = {};
      params.type = p.type;
      params.conditional = p.conditional;
      const CUresult result = driver.cuGraphAddNode_v2(node, graph, dependencies, nullptr, count, &params);
      if (result != CUDA_SUCCESS) return result;
      CUgraph* const bodies = params.conditional.phGraph_out;
      ConditionalBodies()[*node].assign(bodies, bodies + p.conditional.size);
      return CUDA_SUCCESS;
    }
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

// The parameters of a kernel node as one block.
std::string ParameterBlock(const DriverTable& driver, const CUDA_KERNEL_NODE_PARAMS_v2& kernel) {
  std::string block;
  if (kernel.kernelParams != nullptr) {
    size_t index = 0;
    for (const auto& [offset, bytes] : ParameterLayout(driver, kernel.func, kernel.kern)) {
      if (block.size() < offset + bytes) block.resize(offset + bytes);
      std::memcpy(&block[offset], kernel.kernelParams[index++], bytes);
    }
    return block;
  }
  const void* buffer = nullptr;
  size_t bytes = 0;
  for (void** item = kernel.extra; item != nullptr && *item != CU_LAUNCH_PARAM_END; item += 2) {
    if (item[0] == CU_LAUNCH_PARAM_BUFFER_POINTER) buffer = item[1];
    if (item[0] == CU_LAUNCH_PARAM_BUFFER_SIZE) bytes = *static_cast<size_t*>(item[1]);
  }
  if (buffer != nullptr) block.assign(static_cast<const char*>(buffer), bytes);
  return block;
}

CUresult WriteKernel(Session& session, CUgraphNode node, wire::NodeParams* out, std::string* block) {
  CUDA_KERNEL_NODE_PARAMS_v2 kernel = {};
  if (const CUresult result = session.driver().cuGraphKernelNodeGetParams_v2(node, &kernel); result != CUDA_SUCCESS) {
    return result;
  }
  out->function = session.Virtual(Kind::kKernel, reinterpret_cast<uint64_t>(kernel.kern));
  if (out->function == 0) out->function = session.Virtual(Kind::kFunction, reinterpret_cast<uint64_t>(kernel.func));
  // A kernel that was launched as such, and comes back as its function, which the client never asked for.
  if (out->function == 0 && kernel.func != nullptr) out->function = session.KernelOfFunction(kernel.func);
  if (out->function == 0) return CUDA_ERROR_NOT_SUPPORTED;
  out->grid_x = kernel.gridDimX;
  out->grid_y = kernel.gridDimY;
  out->grid_z = kernel.gridDimZ;
  out->block_x = kernel.blockDimX;
  out->block_y = kernel.blockDimY;
  out->block_z = kernel.blockDimZ;
  out->shared_bytes = kernel.sharedMemBytes;
  out->context = session.Virtual(Kind::kContext, reinterpret_cast<uint64_t>(kernel.ctx));
  *block = ParameterBlock(session.driver(), kernel);
  out->params = *block;
  return CUDA_SUCCESS;
}

// Gives a graph to a node of another one. Whatever its handle names dies with that node from then on.
CUresult AddMovedGraph(Session& session, const wire::cuGraphAddNode_v2_Request& in, CUgraph graph,
                       const std::vector<CUgraphNode>& after, const std::vector<CUgraphEdgeData>& edges) {
  CUgraphNodeParams params = {};
  params.type = CU_GRAPH_NODE_TYPE_GRAPH;
  params.graph.ownership = CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
  if (in.params.type != CU_GRAPH_NODE_TYPE_GRAPH) return kMalformedRequest;
  if (!session.Real(Kind::kGraph, in.params.graph, &params.graph.graph)) return CUDA_ERROR_INVALID_HANDLE;
  if (session.IsUnder(in.graph, in.params.graph)) return CUDA_ERROR_INVALID_VALUE;  // into itself
  CUgraphNode node = nullptr;
  const CUresult result =
      session.driver().cuGraphAddNode_v2(&node, graph, after.empty() ? nullptr : after.data(),
                                         edges.empty() ? nullptr : edges.data(), after.size(), &params);
  if (result != CUDA_SUCCESS) return result;
  session.Bind(Kind::kGraphNode, in.node, reinterpret_cast<uint64_t>(node), in.graph);
  session.SetParent(Kind::kGraph, in.params.graph, in.node);
  return CUDA_SUCCESS;
}

}  // namespace

CUresult Custom_cuGraphAddNode_v2(WorkerSession& session, const Request&, const wire::cuGraphAddNode_v2_Request& in,
                                  wire::cuGraphAddNode_v2_Reply*, ReplyBuilder*) {
  if (!session.MayBind(Kind::kGraphNode, in.node)) return kMalformedRequest;
  CUgraph graph;
  if (!session.Real(Kind::kGraph, in.graph, &graph)) return CUDA_ERROR_INVALID_HANDLE;
  std::vector<CUgraphNode> after(in.dependencies.size());
  for (size_t i = 0; i < after.size(); ++i) {
    if (!session.Real(Kind::kGraphNode, in.dependencies[i], &after[i])) return CUDA_ERROR_INVALID_HANDLE;
  }
  std::vector<CUgraphEdgeData> edges;
  if (!in.edges.empty() && !CopyArray(in.edges, after.size(), &edges)) return kMalformedRequest;
  if (in.params.moved) return AddMovedGraph(session, in, graph, after, edges);
  NodeParameters parameters;
  if (const CUresult result = ReadParameters(session, in.params, &parameters); result != CUDA_SUCCESS) return result;
  const DriverTable& driver = session.driver();
  CUgraphNode node = nullptr;
  const CUresult result = AddNode(driver, &node, graph, edges.empty() ? after : std::vector<CUgraphNode>(), parameters);
  if (result != CUDA_SUCCESS) return result;
  if (!edges.empty()) {
    const std::vector<CUgraphNode> to(after.size(), node);
    const CUresult linked =
        driver.cuGraphAddDependencies_v2(graph, after.data(), to.data(), edges.data(), after.size());
    if (linked != CUDA_SUCCESS) {
      driver.cuGraphDestroyNode(node);
      return linked;
    }
  }
  session.Bind(Kind::kGraphNode, in.node, reinterpret_cast<uint64_t>(node), in.graph);
  return CUDA_SUCCESS;
}

CUresult Custom_cuGraphNodeSetParams(WorkerSession& session, const Request&,
                                     const wire::cuGraphNodeSetParams_Request& in, wire::cuGraphNodeSetParams_Reply*,
                                     ReplyBuilder*) {
  CUgraphNode node;
  if (!session.Real(Kind::kGraphNode, in.node, &node)) return CUDA_ERROR_INVALID_HANDLE;
  NodeParameters p;
  if (const CUresult result = ReadParameters(session, in.params, &p); result != CUDA_SUCCESS) return result;
  const DriverTable& driver = session.driver();
  switch (p.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      return driver.cuGraphKernelNodeSetParams_v2(node, &p.kernel);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return driver.cuGraphMemcpyNodeSetParams(node, &p.copy);
    case CU_GRAPH_NODE_TYPE_MEMSET:
      return driver.cuGraphMemsetNodeSetParams(node, &p.memset);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return driver.cuGraphEventWaitNodeSetEvent(node, p.event);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return driver.cuGraphEventRecordNodeSetEvent(node, p.event);
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
      return driver.cuGraphBatchMemOpNodeSetParams(node, &p.batch);
    case CU_GRAPH_NODE_TYPE_HOST:
      return driver.cuGraphHostNodeSetParams(node, &p.host);
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult Custom_cuGraphExecNodeSetParams(WorkerSession& session, const Request&,
                                         const wire::cuGraphExecNodeSetParams_Request& in,
                                         wire::cuGraphExecNodeSetParams_Reply*, ReplyBuilder*) {
  CUgraphExec exec;
  CUgraphNode node;
  if (!session.Real(Kind::kGraphExec, in.exec, &exec) || !session.Real(Kind::kGraphNode, in.node, &node)) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  NodeParameters p;
  if (const CUresult result = ReadParameters(session, in.params, &p); result != CUDA_SUCCESS) return result;
  const DriverTable& driver = session.driver();
  switch (p.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      return driver.cuGraphExecKernelNodeSetParams_v2(exec, node, &p.kernel);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return driver.cuGraphExecMemcpyNodeSetParams(exec, node, &p.copy, p.context);
    case CU_GRAPH_NODE_TYPE_MEMSET:
      return driver.cuGraphExecMemsetNodeSetParams(exec, node, &p.memset, p.context);
    case CU_GRAPH_NODE_TYPE_GRAPH:
      return driver.cuGraphExecChildGraphNodeSetParams(exec, node, p.graph);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return driver.cuGraphExecEventWaitNodeSetEvent(exec, node, p.event);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return driver.cuGraphExecEventRecordNodeSetEvent(exec, node, p.event);
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
      return driver.cuGraphExecBatchMemOpNodeSetParams(exec, node, &p.batch);
    case CU_GRAPH_NODE_TYPE_HOST:
      return driver.cuGraphExecHostNodeSetParams(exec, node, &p.host);
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult OpGraphNodeParams(WorkerSession& session, const Request& request, const wire::OpGraphNodeParams_Request& in,
                           wire::OpGraphNodeParams_Reply* out, ReplyBuilder* reply) {
  CUgraphNode node;
  if (!session.Real(Kind::kGraphNode, in.node, &node)) return CUDA_ERROR_INVALID_HANDLE;
  const DriverTable& driver = session.driver();
  CUgraphNodeType type;
  if (const CUresult result = driver.cuGraphNodeGetType(node, &type); result != CUDA_SUCCESS) return result;
  if (int(type) != in.type) return CUDA_ERROR_INVALID_VALUE;
  out->params.type = int(type);
  std::string block;
  CUDA_MEMCPY3D copy = {};
  CUDA_BATCH_MEM_OP_NODE_PARAMS_v1 batch = {};
  CUDA_HOST_NODE_PARAMS_v1 host = {};
  CUresult result = CUDA_ERROR_NOT_SUPPORTED;
  switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      result = WriteKernel(session, node, &out->params, &block);
      break;
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      result = driver.cuGraphMemcpyNodeGetParams(node, &copy);
      if (result != CUDA_SUCCESS) break;
      if (!TranslateArrays(&copy, [&session](CUarray* array) {
            *array = reinterpret_cast<CUarray>(session.Virtual(Kind::kArray, reinterpret_cast<uint64_t>(*array)));
            return *array != nullptr;
          })) {
        return UnknownHandle(request);
      }
      out->params.copy = wire::BytesOf(copy);
      break;
    case CU_GRAPH_NODE_TYPE_HOST:
      result = driver.cuGraphHostNodeGetParams(node, &host);
      if (result != CUDA_SUCCESS) break;
      out->params.host_function = session.HostFunctionId(host.fn, host.userData);
      if (out->params.host_function == 0) return UnknownHandle(request);
      break;
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
      result = driver.cuGraphBatchMemOpNodeGetParams(node, &batch);
      if (result != CUDA_SUCCESS) break;
      out->params.memory_operations = {reinterpret_cast<const char*>(batch.paramArray),
                                       batch.count * sizeof *batch.paramArray};
      out->params.flags = batch.flags;
      out->params.context = session.Virtual(Kind::kContext, reinterpret_cast<uint64_t>(batch.ctx));
      break;
    default:
      break;
  }
  if (result == CUDA_SUCCESS) out->Encode(&reply->message);  // the views point to locals
  return result;
}

}  // namespace cuda_remote::server
