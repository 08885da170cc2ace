// SPDX-License-Identifier: Apache-2.0
#include "client/custom/staged_node.h"

#include "client/custom/bodies.gen.h"
#include "client/custom/captured_node.h"
#include "client/custom/copy.h"
#include "client/custom/copy_shape.h"
#include "client/custom/graph_memory.h"
#include "client/custom/mapped_memory.h"
#include "client/custom/pointer.h"
#include "client/session/session.h"

namespace cuda_remote::client {
namespace {

// Whether a side is memory of this process's alone.
bool IsPageable(Call& call, CUmemorytype type, CUdeviceptr device, const void* host) {
  if (type != CU_MEMORYTYPE_HOST && type != CU_MEMORYTYPE_UNIFIED) return false;
  const uint64_t address = type == CU_MEMORYTYPE_HOST ? reinterpret_cast<uint64_t>(host) : device;
  uint64_t reached;
  if (IsSharedHostMemory(call.session(), reinterpret_cast<const void*>(address), 1, &reached)) return false;
  if (MapForDevice(call, address, &reached) == CUDA_SUCCESS) return false;
  return !IsDevicePointer(call.session(), address);
}

using Sides = StagedSides;

Sides SidesOf(Call& call, const CUDA_MEMCPY3D& copy) {
  return {IsPageable(call, copy.srcMemoryType, copy.srcDevice, copy.srcHost),
          IsPageable(call, copy.dstMemoryType, copy.dstDevice, copy.dstHost)};
}

bool HostSides(const CUDA_MEMCPY3D& copy, Sides* sides) {
  // Only a look, before the call that adds the node: it sends nothing.
  static constexpr CallInfo kInfo{0, "cuGraphAddMemcpyNode", ContextOf::kNone};
  Call call(kInfo);
  if (call.Enter() != CUDA_SUCCESS) return false;
  *sides = SidesOf(call, copy);
  return true;
}

StagedCopy::Side Source(const CUDA_MEMCPY3D& copy) {
  const uint64_t address =
      copy.srcMemoryType == CU_MEMORYTYPE_HOST ? reinterpret_cast<uint64_t>(copy.srcHost) : copy.srcDevice;
  StagedCopy::Side side;
  side.pitch = copy.srcPitch;
  side.slice = side.pitch * copy.srcHeight;
  side.address = reinterpret_cast<char*>(address) + copy.srcZ * side.slice + copy.srcY * side.pitch + copy.srcXInBytes;
  return side;
}

StagedCopy::Side Destination(const CUDA_MEMCPY3D& copy) {
  const uint64_t address =
      copy.dstMemoryType == CU_MEMORYTYPE_HOST ? reinterpret_cast<uint64_t>(copy.dstHost) : copy.dstDevice;
  StagedCopy::Side side;
  side.pitch = copy.dstPitch;
  side.slice = side.pitch * copy.dstHeight;
  side.address = reinterpret_cast<char*>(address) + copy.dstZ * side.slice + copy.dstY * side.pitch + copy.dstXInBytes;
  return side;
}

// Fills in `staged`, which has its pinned memory, and makes `copy`, which CheckStaged has seen, one of that memory.
void Divert(const Sides& sides, StagedCopy* staged, CUDA_MEMCPY3D* copy) {
  CompleteSides(copy);
  staged->width = copy->WidthInBytes;
  staged->height = copy->Height;
  staged->depth = copy->Depth;
  StagedCopy::Side packed;
  packed.address = staged->pinned;
  packed.pitch = copy->WidthInBytes;
  packed.slice = packed.pitch * copy->Height;
  staged->from = sides.from_host ? Source(*copy) : packed;
  staged->to = sides.to_host ? Destination(*copy) : packed;
  if (sides.from_host && !sides.to_host) {
    copy->srcMemoryType = CU_MEMORYTYPE_HOST;
    copy->srcHost = staged->pinned;
    copy->srcXInBytes = copy->srcY = copy->srcZ = copy->srcLOD = 0;
    copy->srcPitch = packed.pitch;
    copy->srcHeight = copy->Height;
  }
  if (sides.to_host && !sides.from_host) {
    copy->dstMemoryType = CU_MEMORYTYPE_HOST;
    copy->dstHost = staged->pinned;
    copy->dstXInBytes = copy->dstY = copy->dstZ = copy->dstLOD = 0;
    copy->dstPitch = packed.pitch;
    copy->dstHeight = copy->Height;
  }
}

size_t PackedBytes(const CUDA_MEMCPY3D& copy) { return copy.WidthInBytes * copy.Height * copy.Depth; }

// What the driver refuses, of which it never hears here: it is given a copy of packed rows of pinned memory. Sides that
// it does hear of may be wrong still.
CUresult CheckStaged(CUDA_MEMCPY3D copy) {
  const auto is_wrong = [](CUmemorytype type, CUdeviceptr device, const void* host) {
    if (type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_ARRAY) return false;
    if (type != CU_MEMORYTYPE_HOST && type != CU_MEMORYTYPE_UNIFIED) return true;
    return type == CU_MEMORYTYPE_HOST ? !host : device == 0;
  };
  if (is_wrong(copy.srcMemoryType, copy.srcDevice, copy.srcHost) ||
      is_wrong(copy.dstMemoryType, copy.dstDevice, copy.dstHost)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (copy.WidthInBytes == 0 || copy.Height == 0 || copy.Depth == 0) return CUDA_ERROR_INVALID_VALUE;
  return CompleteSides(&copy) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUDA_HOST_NODE_PARAMS HostNode(StagedCopy* staged) {
  CUDA_HOST_NODE_PARAMS params{};
  params.fn = &StagedCopy::Run;
  params.userData = staged;
  return params;
}

// Fills an empty graph with nodes that do the copy by way of `staged`.
CUresult Fill(const Sides& sides, CUDA_MEMCPY3D copy, CUcontext context, StagedCopy* staged, CUgraph graph) {
  Divert(sides, staged, &copy);
  const CUDA_HOST_NODE_PARAMS host = HostNode(staged);
  CUgraphNode first = nullptr, second = nullptr;
  if (!sides.from_host) {
    const CUresult result = Custom_cuGraphAddMemcpyNode(&first, graph, nullptr, 0, &copy, context);
    return result == CUDA_SUCCESS ? Custom_cuGraphAddHostNode(&second, graph, &first, 1, &host) : result;
  }
  const CUresult result = Custom_cuGraphAddHostNode(&first, graph, nullptr, 0, &host);
  if (result != CUDA_SUCCESS || sides.to_host) return result;
  return Custom_cuGraphAddMemcpyNode(&second, graph, &first, 1, &copy, context);
}

void Remember(CUgraphNode node, CUgraph graph, const CUDA_MEMCPY3D& copy, CUuserObject owned) {
  Session* const session = Session::Get();
  WriterLock lock(&session->disguised_nodes().mutex());
  session->disguised_nodes().set_any();
  DisguisedNode& kept = session->disguised_nodes().nodes()[reinterpret_cast<uint64_t>(node)];
  if (graph) kept.graph = reinterpret_cast<uint64_t>(graph);
  kept.type = CU_GRAPH_NODE_TYPE_MEMCPY;
  kept.copy = copy;
  kept.user_object = reinterpret_cast<uint64_t>(owned);
}

// A piece of pinned memory of at least `bytes`.
CUresult TakeStaged(Session& session, size_t bytes, StagedCopy** copy) {
  *copy = session.staged_copies().Take(bytes);
  if (*copy) return CUDA_SUCCESS;
  void* pinned = nullptr;
  const CUresult result = Custom_cuMemHostAlloc(&pinned, bytes, CU_MEMHOSTALLOC_PORTABLE);
  if (result != CUDA_SUCCESS) return result;
  *copy = new StagedCopy;
  (*copy)->pinned = static_cast<char*>(pinned);
  (*copy)->capacity = bytes;
  return CUDA_SUCCESS;
}

// Leaves a piece to a graph, and to what will be made from it, before anything there names it: they have a reference to
// *object. The piece is free again when they are gone; after an error, as soon as no graph has it.
CUresult OwnStaged(CUgraph graph, StagedCopy* staged, CUuserObject* object) {
  const auto give_back = [](void* data) {
    if (Session* const session = Session::Get()) session->staged_copies().Give({static_cast<StagedCopy*>(data)});
  };
  CUresult result = Custom_cuUserObjectCreate(object, staged, give_back, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
  if (result != CUDA_SUCCESS) {
    give_back(staged);
    return result;
  }
  result = Call_cuGraphRetainUserObject(graph, *object, 1, CU_GRAPH_USER_OBJECT_MOVE);
  if (result != CUDA_SUCCESS) Call_cuUserObjectRelease(*object, 1);
  return result;
}

// A graph that does the copy, with a piece of pinned memory that it and its copies own (OwnStaged). *child may be set
// after an error, too; the caller destroys it.
CUresult MakeChild(Session& session, const Sides& sides, const CUDA_MEMCPY3D& copy, CUcontext context, CUgraph* child,
                   CUuserObject* owned) {
  StagedCopy* staged = nullptr;
  CUresult result = TakeStaged(session, PackedBytes(copy), &staged);
  if (result != CUDA_SUCCESS) return result;
  result = Call_cuGraphCreate(child, 0);
  if (result != CUDA_SUCCESS) {
    session.staged_copies().Give({staged});
    return result;
  }
  result = OwnStaged(*child, staged, owned);
  return result == CUDA_SUCCESS ? Fill(sides, copy, context, staged, *child) : result;
}

}  // namespace

bool NeedsStaging(const CUDA_MEMCPY3D& copy) {
  Sides sides;
  return PackedBytes(copy) != 0 && HostSides(copy, &sides) && (sides.from_host || sides.to_host);
}

CUresult AddStagedNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, const CUgraphEdgeData* edges,
                       size_t count, const CUDA_MEMCPY3D& copy, CUcontext context, const StagedSides* known) {
  Session* const session = Session::Get();
  Sides sides;
  if (!HostSides(copy, &sides)) return CUDA_ERROR_NOT_INITIALIZED;
  if (known) sides = *known;
  CUresult result = CheckStaged(copy);
  if (result != CUDA_SUCCESS) return result;
  CUgraph child = nullptr;
  CUuserObject owned = nullptr;
  result = MakeChild(*session, sides, copy, context, &child, &owned);
  if (!child) return result;
  CUgraphNodeParams params{};
  params.type = CU_GRAPH_NODE_TYPE_GRAPH;
  params.graph.graph = child;
  if (result == CUDA_SUCCESS) {
    result = Custom_cuGraphAddNode_v2(node, graph, dependencies, edges, count, &params);
  }
  if (!session->captures().DestroyLater(reinterpret_cast<uint64_t>(graph), reinterpret_cast<uint64_t>(child))) {
    Call_cuGraphDestroy(child);
  }
  if (result == CUDA_SUCCESS) Remember(*node, graph, copy, owned);
  return result;
}

CUresult SetStagedNode(CUgraphNode node, const CUDA_MEMCPY3D& copy) {
  constexpr char kName[] = "cuGraphMemcpyNodeSetParams";
  Session* const session = Session::Get();
  if (!session) return CUDA_ERROR_NOT_INITIALIZED;
  if (const CUresult result = CheckStaged(copy); result != CUDA_SUCCESS) return result;
  DisguisedNode before;
  Sides was, is;
  if (!FindDisguised(*session, node, &before) || before.type != CU_GRAPH_NODE_TYPE_MEMCPY ||
      !HostSides(before.copy, &was) || !HostSides(copy, &is) || was.from_host != is.from_host ||
      was.to_host != is.to_host) {
    return Call::Unsupported(kName, "a copy node whose sides change between pageable and other memory");
  }
  CUgraph child = nullptr;
  CUresult result = Custom_cuGraphChildGraphNodeGetGraph(node, &child);
  size_t count = 2;
  CUgraphNode nodes[2] = {};
  if (result == CUDA_SUCCESS) result = Call_cuGraphGetNodes(child, nodes, &count);
  if (result != CUDA_SUCCESS) return result;
  StagedCopy* staged = nullptr;
  CUuserObject owned = nullptr;
  result = TakeStaged(*session, PackedBytes(copy), &staged);
  if (result == CUDA_SUCCESS) result = OwnStaged(child, staged, &owned);
  if (result != CUDA_SUCCESS) return result;
  CUDA_MEMCPY3D diverted = copy;
  Divert(is, staged, &diverted);
  const CUDA_HOST_NODE_PARAMS host = HostNode(staged);
  for (size_t i = 0; i < count && result == CUDA_SUCCESS; ++i) {
    CUgraphNodeType type;
    result = Custom_cuGraphNodeGetType(nodes[i], &type);
    if (result != CUDA_SUCCESS) break;
    result = type == CU_GRAPH_NODE_TYPE_HOST ? Custom_cuGraphHostNodeSetParams(nodes[i], &host)
                                             : Custom_cuGraphMemcpyNodeSetParams(nodes[i], &diverted);
  }
  if (result != CUDA_SUCCESS) return result;
  Remember(node, nullptr, copy, owned);
  // What was made from the graph before has references of its own to the old piece.
  if (before.user_object) Call_cuGraphReleaseUserObject(child, reinterpret_cast<CUuserObject>(before.user_object), 1);
  return CUDA_SUCCESS;
}

CUresult SetStagedNodeOfExec(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D& copy, CUcontext context) {
  Sides sides;
  if (!HostSides(copy, &sides)) return CUDA_ERROR_NOT_INITIALIZED;
  if (const CUresult result = CheckStaged(copy); result != CUDA_SUCCESS) return result;
  // As natively: the kinds of memory cannot change, and both copies are of one row.
  DisguisedNode found;
  const auto is_line = [](const CUDA_MEMCPY3D& one) { return one.Height <= 1 && one.Depth <= 1; };
  if ((!sides.from_host && !sides.to_host) || !FindDisguised(*Session::Get(), node, &found) || !is_line(copy) ||
      !is_line(found.copy)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // The executable takes a reference to the piece in the place of the one that it had. It keeps both until launches
  // from before have ended (CUDA's manual on user objects).
  CUgraph child = nullptr;
  CUuserObject owned = nullptr;
  CUresult result = MakeChild(*Session::Get(), sides, copy, context, &child, &owned);
  if (!child) return result;
  if (result == CUDA_SUCCESS) result = Custom_cuGraphExecChildGraphNodeSetParams(exec, node, child);
  Call_cuGraphDestroy(child);
  return result;
}

CUresult CaptureStagedNode(uint64_t stream, const CUDA_MEMCPY3D& copy, const StagedSides* known) {
  return AddToCapture(stream, [&](CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies,
                                  const CUgraphEdgeData* edges, size_t count) {
    return AddStagedNode(node, graph, dependencies, edges, count, copy, nullptr, known);
  });
}

}  // namespace cuda_remote::client
