// SPDX-License-Identifier: Apache-2.0
#include "client/calls/staged_node.h"

#include <memory>
#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/calls/captured_node.h"
#include "client/calls/copy.h"
#include "client/calls/copy_shape.h"
#include "client/calls/graph_memory.h"
#include "client/calls/mapped_memory.h"
#include "client/calls/pointer.h"
#include "client/core/session.h"

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

// Whether a side is pageable, pinned or registered memory.
bool IsOfHost(Session& session, CUmemorytype type, CUdeviceptr device, const void* host) {
  if (type != CU_MEMORYTYPE_HOST && type != CU_MEMORYTYPE_UNIFIED) return false;
  return !IsDevicePointer(session, type == CU_MEMORYTYPE_HOST ? reinterpret_cast<uint64_t>(host) : device);
}

using Sides = StagedSides;

// Only a look, before the call that adds or changes a node: it sends nothing.
constexpr CallInfo kLook{0, "cuGraphAddMemcpyNode", ContextOf::kNone};

// What a node is to do. `context`: NULL means the current one.
bool Describe(const CUDA_MEMCPY3D& copy, CUcontext context, StagedParams* params) {
  Call call(kLook);
  if (call.Enter() != CUDA_SUCCESS) return false;
  params->copy = copy;
  params->sides = {IsPageable(call, copy.srcMemoryType, copy.srcDevice, copy.srcHost),
                   IsPageable(call, copy.dstMemoryType, copy.dstDevice, copy.dstHost)};
  params->at_launch =
      params->sides.from_host && !IsOfHost(call.session(), copy.dstMemoryType, copy.dstDevice, copy.dstHost);
  params->context = reinterpret_cast<uint64_t>(call.OrCurrent(context));
  return true;
}

// Whether a node with these sides can do this copy. Any memory of the host can be staged; other memory cannot.
bool Fits(const Sides& sides, const CUDA_MEMCPY3D& copy) {
  Call call(kLook);
  if (call.Enter() != CUDA_SUCCESS) return false;
  const auto fits = [&call](bool staged, CUmemorytype type, CUdeviceptr device, const void* host) {
    return staged ? IsOfHost(call.session(), type, device, host) : !IsPageable(call, type, device, host);
  };
  return fits(sides.from_host, copy.srcMemoryType, copy.srcDevice, copy.srcHost) &&
         fits(sides.to_host, copy.dstMemoryType, copy.dstDevice, copy.dstHost);
}

bool IsOneRow(const CUDA_MEMCPY3D& copy) { return copy.Height <= 1 && copy.Depth <= 1; }

// Registered memory may be named by the GPU's address of it.
char* OfProcess(uint64_t address) { return reinterpret_cast<char*>(HostAddressOf(*Session::Get(), address)); }

StagedCopy::Side Source(const CUDA_MEMCPY3D& copy) {
  const uint64_t address =
      copy.srcMemoryType == CU_MEMORYTYPE_HOST ? reinterpret_cast<uint64_t>(copy.srcHost) : copy.srcDevice;
  StagedCopy::Side side;
  side.pitch = copy.srcPitch;
  side.slice = side.pitch * copy.srcHeight;
  side.address = OfProcess(address) + copy.srcZ * side.slice + copy.srcY * side.pitch + copy.srcXInBytes;
  return side;
}

StagedCopy::Side Destination(const CUDA_MEMCPY3D& copy) {
  const uint64_t address =
      copy.dstMemoryType == CU_MEMORYTYPE_HOST ? reinterpret_cast<uint64_t>(copy.dstHost) : copy.dstDevice;
  StagedCopy::Side side;
  side.pitch = copy.dstPitch;
  side.slice = side.pitch * copy.dstHeight;
  side.address = OfProcess(address) + copy.dstZ * side.slice + copy.dstY * side.pitch + copy.dstXInBytes;
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

// What the driver says of a copy that is refused otherwise, if a side is an address that only the driver can know.
CUresult TryUnknown(Session& session, const CUDA_MEMCPY3D& copy) {
  const auto is_unknown = [&session](CUmemorytype type, CUdeviceptr address) {
    if (type != CU_MEMORYTYPE_DEVICE) return false;
    ReaderLock lock(&session.memory().mutex());
    return !session.memory().device_ranges().Find(address) && !session.memory().host_ranges().Find(address);
  };
  if (!is_unknown(copy.srcMemoryType, copy.srcDevice) && !is_unknown(copy.dstMemoryType, copy.dstDevice)) {
    return CUDA_SUCCESS;
  }
  CUgraph graph = nullptr;
  CUresult result = Call_cuGraphCreate(&graph, 0);
  if (result != CUDA_SUCCESS) return result;
  CUgraphNode node;
  result = Custom_cuGraphAddMemcpyNode(&node, graph, nullptr, 0, &copy, nullptr);
  Call_cuGraphDestroy(graph);
  return result;
}

void MoveNothing(void*) {}

CUDA_HOST_NODE_PARAMS HostNode(StagedCopy* staged, bool enabled) {
  CUDA_HOST_NODE_PARAMS params{};
  params.fn = enabled ? &StagedCopy::Run : &MoveNothing;
  params.userData = enabled ? staged : nullptr;
  return params;
}

// Fills an empty graph with nodes that do the copy by way of params.piece.
CUresult Fill(const StagedParams& params, bool enabled, CUgraph graph) {
  const Sides& sides = params.sides;
  const auto context = reinterpret_cast<CUcontext>(params.context);
  CUDA_MEMCPY3D copy = params.copy;
  Divert(sides, params.piece, &copy);
  const CUDA_HOST_NODE_PARAMS host = HostNode(params.piece, enabled);
  CUgraphNode first = nullptr, second = nullptr;
  if (!sides.from_host) {
    const CUresult result = Custom_cuGraphAddMemcpyNode(&first, graph, nullptr, 0, &copy, context);
    return result == CUDA_SUCCESS ? Custom_cuGraphAddHostNode(&second, graph, &first, 1, &host) : result;
  }
  const CUresult result = Custom_cuGraphAddHostNode(&first, graph, nullptr, 0, &host);
  if (result != CUDA_SUCCESS || sides.to_host) return result;
  return Custom_cuGraphAddMemcpyNode(&second, graph, &first, 1, &copy, context);
}

// What a piece serves for. `owned` has it.
void Dedicate(const StagedParams& params, CUuserObject owned) {
  params.piece->params = params;
  params.piece->user_object = reinterpret_cast<uint64_t>(owned);
}

// `number`: DisguisedNode::number of a new node; 0: the next one.
void Remember(CUgraphNode node, CUgraph graph, const StagedParams& params, CUuserObject owned, uint64_t number = 0) {
  Session* const session = Session::Get();
  WriterLock lock(&session->graphs().disguised_nodes().mutex());
  session->graphs().disguised_nodes().set_any();
  DisguisedNode& kept = session->graphs().disguised_nodes().nodes()[reinterpret_cast<uint64_t>(node)];
  if (graph) {
    kept.graph = reinterpret_cast<uint64_t>(graph);
    kept.number = number != 0 ? number : session->graphs().disguised_nodes().NextNumberLocked();
  }
  kept.type = CU_GRAPH_NODE_TYPE_MEMCPY;
  kept.staged = params;
  kept.user_object = reinterpret_cast<uint64_t>(owned);
}

// A piece of pinned memory of at least `bytes`.
CUresult TakeStaged(Session& session, size_t bytes, StagedCopy** copy) {
  *copy = session.graphs().staged_copies().Take(bytes);
  if (*copy) return CUDA_SUCCESS;
  void* pinned = nullptr;
  const CUresult result = Custom_cuMemHostAlloc(&pinned, bytes, CU_MEMHOSTALLOC_PORTABLE);
  if (result != CUDA_SUCCESS) return result;
  *copy = new StagedCopy;
  (*copy)->home = &session.graphs().staged_copies();
  (*copy)->pinned = static_cast<char*>(pinned);
  (*copy)->capacity = bytes;
  return CUDA_SUCCESS;
}

// Leaves a piece to a graph, and to what will be made from it, before anything there names it: they have a reference to
// *object. The piece is free again when they are gone; after an error, as soon as no graph has it.
CUresult OwnStaged(CUgraph graph, StagedCopy* staged, CUuserObject* object) {
  const auto give_back = [](void* data) {
    if (Session* const session = Session::Get())
      session->graphs().staged_copies().Give({static_cast<StagedCopy*>(data)});
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

// A graph that does the copy. Its piece of pinned memory, which params->piece says, is owned by it and its copies
// (OwnStaged). `enabled`: otherwise its host function moves nothing. *child may be set after an error, too; the caller
// destroys it.
CUresult MakeChild(Session& session, bool enabled, StagedParams* params, CUgraph* child, CUuserObject* owned) {
  CUresult result = TakeStaged(session, PackedBytes(params->copy), &params->piece);
  if (result != CUDA_SUCCESS) return result;
  result = Call_cuGraphCreate(child, 0);
  if (result != CUDA_SUCCESS) {
    session.graphs().staged_copies().Give({params->piece});
    return result;
  }
  result = OwnStaged(*child, params->piece, owned);
  if (result != CUDA_SUCCESS) return result;
  Dedicate(*params, *owned);
  return Fill(*params, enabled, *child);
}

// The nodes of a staged node's child graph. `copy` is null if both sides are pageable memory.
struct Inside {
  CUgraph graph = nullptr;
  CUgraphNode host = nullptr, copy = nullptr;
};

// *is_like: whether the node's child graph has the shape of a staged node's. Null: it is one.
CUresult FindInside(CUgraphNode node, Inside* inside, bool* is_like = nullptr) {
  CUresult result = Custom_cuGraphChildGraphNodeGetGraph(node, &inside->graph);
  size_t count = 3;
  CUgraphNode nodes[3] = {};
  if (result == CUDA_SUCCESS) result = Call_cuGraphGetNodes(inside->graph, nodes, &count);
  if (is_like) *is_like = count == 1 || count == 2;
  for (size_t i = 0; i < count && result == CUDA_SUCCESS && (!is_like || *is_like); ++i) {
    CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
    result = Custom_cuGraphNodeGetType(nodes[i], &type);
    CUgraphNode* const place = type == CU_GRAPH_NODE_TYPE_HOST ? &inside->host : &inside->copy;
    if (is_like) *is_like = !*place && (type == CU_GRAPH_NODE_TYPE_HOST || type == CU_GRAPH_NODE_TYPE_MEMCPY);
    if (result == CUDA_SUCCESS) *place = nodes[i];
  }
  if (is_like) *is_like &= inside->host != nullptr;
  return result;
}

// Calls `use` with what is known of a node in an executable, under the lock. False: it is no staged node there.
template <typename Use>
bool WithStagedInExec(Session& session, CUgraphExec exec, CUgraphNode node, Use use) {
  if (!session.graphs().disguised_nodes().any()) return false;
  WriterLock lock(&session.graphs().disguised_nodes().mutex());
  const auto found = session.graphs().disguised_nodes().staged().find(reinterpret_cast<uint64_t>(exec));
  if (found == session.graphs().disguised_nodes().staged().end()) return false;
  for (StagedInExec& one : found->second) {
    if (one.node != reinterpret_cast<uint64_t>(node)) continue;
    use(one);
    return true;
  }
  return false;
}

// All nodes of a graph.
CUresult ListNodes(CUgraph graph, std::vector<CUgraphNode>* nodes) {
  size_t count = 0;
  CUresult result = Call_cuGraphGetNodes(graph, nullptr, &count);
  nodes->resize(count);
  if (result == CUDA_SUCCESS && count != 0) result = Call_cuGraphGetNodes(graph, nodes->data(), &count);
  nodes->resize(count);
  return result;
}

// Gives a staged node another piece, and these parameters.
CUresult SetPiece(Session& session, CUgraphNode node, const DisguisedNode& before, StagedParams params) {
  Inside inside;
  CUresult result = FindInside(node, &inside);
  if (result != CUDA_SUCCESS) return result;
  CUuserObject owned = nullptr;
  result = TakeStaged(session, PackedBytes(params.copy), &params.piece);
  if (result == CUDA_SUCCESS) result = OwnStaged(inside.graph, params.piece, &owned);
  if (result != CUDA_SUCCESS) return result;
  Dedicate(params, owned);
  CUDA_MEMCPY3D diverted = params.copy;
  Divert(params.sides, params.piece, &diverted);
  const CUDA_HOST_NODE_PARAMS host = HostNode(params.piece, true);
  result = Custom_cuGraphHostNodeSetParams(inside.host, &host);
  if (result == CUDA_SUCCESS && inside.copy) result = Custom_cuGraphMemcpyNodeSetParams(inside.copy, &diverted);
  if (result != CUDA_SUCCESS) return result;
  Remember(node, nullptr, params, owned);
  // What was made from the graph before has references of its own to the old piece.
  if (before.user_object) {
    Call_cuGraphReleaseUserObject(inside.graph, reinterpret_cast<CUuserObject>(before.user_object), 1);
  }
  return CUDA_SUCCESS;
}

// Looks for staged nodes in a graph that others were copied into: they have the pieces of those that they were copied
// from. `number`: of the next one that is inside a node.
CUresult Explore(Session& session, CUgraph graph, bool is_inside, uint64_t* number) {
  std::vector<CUgraphNode> nodes;
  CUresult result = ListNodes(graph, &nodes);
  for (size_t i = 0; i < nodes.size() && result == CUDA_SUCCESS; ++i) {
    DisguisedNode known;
    if (FindDisguised(session, nodes[i], &known)) {
      if (!is_inside || known.type != CU_GRAPH_NODE_TYPE_MEMCPY) continue;
      WriterLock lock(&session.graphs().disguised_nodes().mutex());
      session.graphs().disguised_nodes().nodes()[reinterpret_cast<uint64_t>(nodes[i])].number = (*number)++;
      continue;
    }
    CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
    result = Custom_cuGraphNodeGetType(nodes[i], &type);
    if (result != CUDA_SUCCESS || type != CU_GRAPH_NODE_TYPE_GRAPH) continue;
    Inside inside;
    bool is_staged = false;
    CUDA_HOST_NODE_PARAMS host{};
    result = FindInside(nodes[i], &inside, &is_staged);
    if (result == CUDA_SUCCESS && is_staged) result = Custom_cuGraphHostNodeGetParams(inside.host, &host);
    if (result != CUDA_SUCCESS) continue;
    if (!is_staged || host.fn != &StagedCopy::Run) {
      result = Explore(session, inside.graph, true, number);
      continue;
    }
    const StagedCopy& piece = *static_cast<StagedCopy*>(host.userData);
    Remember(nodes[i], graph, piece.params, reinterpret_cast<CUuserObject>(piece.user_object),
             is_inside ? (*number)++ : 0);
  }
  return result;
}

CUresult FindCopied(Session& session, CUgraph graph) {
  const std::vector<uint64_t> made =
      session.graphs().disguised_nodes().Unexplored(reinterpret_cast<uint64_t>(graph), &session.objects());
  if (made.empty()) return CUDA_SUCCESS;
  uint64_t number = DisguisedNodes::kFirstInside;
  const CUresult result = Explore(session, graph, false, &number);
  if (result == CUDA_SUCCESS) session.graphs().disguised_nodes().NoteExplored(made);
  return result;
}

// Before an executable is made from a graph (`exec` 0) or updated from it: nodes whose pieces others have get new ones,
// since launches of both may be under way at once.
CUresult RenewPieces(Session& session, CUgraph graph, uint64_t exec) {
  DisguisedNodes& nodes = session.graphs().disguised_nodes();
  if (!nodes.any()) return CUDA_SUCCESS;
  CUresult result = FindCopied(session, graph);
  if (result != CUDA_SUCCESS) return result;
  for (const StagedInExec& one : nodes.StagedUnder(reinterpret_cast<uint64_t>(graph), &session.objects())) {
    if (!one.params.at_launch || !nodes.IsOfOthers(*one.params.piece, exec)) continue;
    DisguisedNode before;
    const CUgraphNode node = reinterpret_cast<CUgraphNode>(one.node);
    if (!FindDisguised(session, node, &before)) continue;
    result = SetPiece(session, node, before, before.staged);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

}  // namespace

CUresult CheckStaged(const CUDA_MEMCPY3D& copy) {
  const auto is_wrong = [](CUmemorytype type, CUdeviceptr device, const void* host) {
    if (type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_ARRAY) return false;
    if (type != CU_MEMORYTYPE_HOST && type != CU_MEMORYTYPE_UNIFIED) return true;
    return type == CU_MEMORYTYPE_HOST ? !host : device == 0;
  };
  if (is_wrong(copy.srcMemoryType, copy.srcDevice, copy.srcHost) ||
      is_wrong(copy.dstMemoryType, copy.dstDevice, copy.dstHost)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CheckCopyNode(*Session::Get(), copy);
}

bool NeedsStaging(const CUDA_MEMCPY3D& copy) {
  StagedParams params;
  return PackedBytes(copy) != 0 && Describe(copy, nullptr, &params) && (params.sides.from_host || params.sides.to_host);
}

CUresult AddStagedNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, const CUgraphEdgeData* edges,
                       size_t count, const CUDA_MEMCPY3D& copy, CUcontext context, const StagedSides* known) {
  Session* const session = Session::Get();
  StagedParams params;
  if (!Describe(copy, context, &params)) return CUDA_ERROR_NOT_INITIALIZED;
  if (known) params.sides = *known;  // registered memory may be on a side that is staged: it is read at its turn
  CUresult result = CheckStaged(copy);
  if (result != CUDA_SUCCESS) return result;
  CUgraph child = nullptr;
  CUuserObject owned = nullptr;
  result = MakeChild(*session, true, &params, &child, &owned);
  if (!child) return result;
  CUgraphNodeParams added{};
  added.type = CU_GRAPH_NODE_TYPE_GRAPH;
  added.graph.graph = child;
  if (result == CUDA_SUCCESS) {
    result = Custom_cuGraphAddNode_v2(node, graph, dependencies, edges, count, &added);
  }
  if (!session->graphs().captures().DestroyLater(reinterpret_cast<uint64_t>(graph),
                                                 reinterpret_cast<uint64_t>(child))) {
    Call_cuGraphDestroy(child);
  }
  if (result == CUDA_SUCCESS) Remember(*node, graph, params, owned);
  return result;
}

CUresult SetStagedNode(CUgraphNode node, const CUDA_MEMCPY3D& copy) {
  constexpr char kName[] = "cuGraphMemcpyNodeSetParams";
  Session* const session = Session::Get();
  DisguisedNode before;
  if (!session || !FindDisguised(*session, node, &before)) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = CheckStaged(copy); result != CUDA_SUCCESS) return result;
  if (!Fits(before.staged.sides, copy)) {
    if (const CUresult result = TryUnknown(*session, copy); result != CUDA_SUCCESS) return result;
    return Call::Unsupported(kName, "a copy node whose sides change between pageable and other memory");
  }
  StagedParams params = before.staged, now;
  if (!Describe(copy, nullptr, &now)) return CUDA_ERROR_NOT_INITIALIZED;
  params.copy = copy;
  params.at_launch = now.at_launch;
  return SetPiece(*session, node, before, params);
}

CUresult SetStagedNodeOfExec(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D& copy, CUcontext context) {
  Session* const session = Session::Get();
  StagedParams params;
  if (!Describe(copy, context, &params)) return CUDA_ERROR_NOT_INITIALIZED;
  if (const CUresult result = CheckStaged(copy); result != CUDA_SUCCESS) return result;
  DisguisedNode found;
  if (!FindDisguised(*session, node, &found)) return CUDA_ERROR_INVALID_VALUE;
  StagedInExec before;
  before.params = found.staged;
  WithStagedInExec(*session, exec, node, [&before](const StagedInExec& one) { before = one; });
  params.sides = before.params.sides;
  // As natively: the kinds of memory cannot change, and both copies are of one row.
  if (!IsOneRow(before.params.copy) || !IsOneRow(copy) || !Fits(params.sides, copy)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // The executable takes a reference to the child's piece in the place of the one that it had. It keeps both until
  // launches from before have ended (CUDA's manual on user objects). A disabled copy stays that.
  CUgraph child = nullptr;
  CUuserObject owned = nullptr;
  CUresult result = MakeChild(*session, before.enabled, &params, &child, &owned);
  if (!child) return result;
  if (result == CUDA_SUCCESS) result = Custom_cuGraphExecChildGraphNodeSetParams(exec, node, child);
  Call_cuGraphDestroy(child);
  if (result == CUDA_SUCCESS) {
    WithStagedInExec(*session, exec, node, [exec, &params](StagedInExec& one) {
      params.piece->owner = reinterpret_cast<uint64_t>(exec);
      one.params = params;
    });
    if (params.at_launch) session->graphs().disguised_nodes().set_any_at_launch();
  }
  return result;
}

bool IsStagedInExec(CUgraphExec exec, CUgraphNode node, bool* enabled) {
  Session* const session = Session::Get();
  DisguisedNode found;
  return session && FindDisguised(*session, node, &found) &&
         WithStagedInExec(*session, exec, node, [enabled](const StagedInExec& one) { *enabled = one.enabled; });
}

CUresult EnableStagedNode(CUgraphExec exec, CUgraphNode node, bool enabled) {
  Session* const session = Session::Get();
  StagedInExec found;
  if (!session || !WithStagedInExec(*session, exec, node, [&found](const StagedInExec& one) { found = one; })) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (found.enabled == enabled) return CUDA_SUCCESS;
  Inside inside;
  CUresult result = FindInside(node, &inside);
  if (result != CUDA_SUCCESS) return result;
  const CUDA_HOST_NODE_PARAMS before = HostNode(found.params.piece, !enabled);
  const CUDA_HOST_NODE_PARAMS after = HostNode(found.params.piece, enabled);
  result = Custom_cuGraphExecHostNodeSetParams(exec, inside.host, &after);
  if (result == CUDA_SUCCESS && inside.copy) {
    result = Custom_cuGraphNodeSetEnabled(exec, inside.copy, enabled);
    if (result != CUDA_SUCCESS) Custom_cuGraphExecHostNodeSetParams(exec, inside.host, &before);
  }
  if (result == CUDA_SUCCESS) {
    WithStagedInExec(*session, exec, node, [enabled](StagedInExec& one) { one.enabled = enabled; });
  }
  return result;
}

namespace {

// Around what updates an executable, or (`inside`) the graph in one of its nodes, from a graph: what is disabled stays
// that.
CUresult UpdatePaused(CUgraphExec exec, CUgraph graph, CUgraphNode inside, const std::function<CUresult()>& update) {
  Session& session = *Session::Get();
  DisguisedNodes& nodes = session.graphs().disguised_nodes();
  const auto its_exec = reinterpret_cast<uint64_t>(exec), its_graph = reinterpret_cast<uint64_t>(graph);
  const auto its_node = reinterpret_cast<uint64_t>(inside);
  struct Paused {
    CUgraphNode host;
    StagedCopy* piece;
  };
  std::vector<Paused> paused;
  CUresult result = CUDA_SUCCESS;
  for (const StagedInExec& one : nodes.WouldStayDisabled(its_graph, its_exec, its_node, &session.objects())) {
    Inside of_node;
    const CUDA_HOST_NODE_PARAMS idle = HostNode(nullptr, false);
    result = FindInside(reinterpret_cast<CUgraphNode>(one.node), &of_node);
    if (result == CUDA_SUCCESS) result = Custom_cuGraphHostNodeSetParams(of_node.host, &idle);
    if (result != CUDA_SUCCESS) break;
    paused.push_back({of_node.host, one.params.piece});
  }
  if (result == CUDA_SUCCESS) result = update();
  if (result == CUDA_SUCCESS) nodes.Updated(its_graph, its_exec, its_node, &session.objects());
  for (const Paused& one : paused) {
    const CUDA_HOST_NODE_PARAMS host = HostNode(one.piece, true);
    const CUresult restored = Custom_cuGraphHostNodeSetParams(one.host, &host);
    if (result == CUDA_SUCCESS) result = restored;
  }
  return result;
}

}  // namespace

CUresult UpdateStaged(CUgraphExec exec, CUgraph graph, const std::function<CUresult()>& update) {
  Session& session = *Session::Get();
  const CUresult result = RenewPieces(session, graph, reinterpret_cast<uint64_t>(exec));
  return result == CUDA_SUCCESS ? UpdatePaused(exec, graph, nullptr, update) : result;
}

CUresult SetChildOfExec(CUgraphExec exec, CUgraphNode node, CUgraph child, const std::function<CUresult()>& set) {
  Session* const session = Session::Get();
  if (!session) return CUDA_ERROR_NOT_INITIALIZED;
  const CUresult result = RenewPieces(*session, child, reinterpret_cast<uint64_t>(exec));
  return result == CUDA_SUCCESS ? UpdatePaused(exec, child, node, set) : result;
}

CUresult PrepareCopies(Session& session, uint64_t graph) {
  if (!session.graphs().disguised_nodes().any()) return CUDA_SUCCESS;
  const CUresult result = FindCopied(session, reinterpret_cast<CUgraph>(graph));
  if (result == CUDA_SUCCESS) session.graphs().disguised_nodes().NoteCopied(graph, &session.objects());
  return result;
}

CUresult PrepareInstantiation(CUgraph graph) {
  Session* const session = Session::Get();
  return session ? RenewPieces(*session, graph, 0) : CUDA_SUCCESS;
}

bool LaunchStaged(CUgraphExec exec, CUstream stream, bool per_thread, const std::function<CUresult()>& launch,
                  CUresult* result) {
  Session& session = *Session::Get();
  DisguisedNodes& nodes = session.graphs().disguised_nodes();
  const auto its_exec = reinterpret_cast<uint64_t>(exec);
  std::vector<StagedCopy*> pieces;  // whose bytes are taken now
  {
    ReaderLock lock(&nodes.mutex());
    const auto found = nodes.staged().find(its_exec);
    if (found == nodes.staged().end()) return false;
    for (const StagedInExec& one : found->second) {
      if (one.enabled && one.params.at_launch && !one.in_body) pieces.push_back(one.params.piece);
    }
  }
  if (pieces.empty()) return false;
  {
    Call call(kLook);
    uint64_t its_stream;
    *result = call.Enter();
    if (*result == CUDA_SUCCESS) *result = call.StreamToWire(stream, per_thread, &its_stream);
    if (*result != CUDA_SUCCESS) return true;
    if (session.graphs().captures().IsCaptured(its_stream)) {
      // It becomes a child graph of the captured one: launches of that take the bytes.
      nodes.NoteCaptured(its_exec);
      return false;
    }
  }
  const std::shared_ptr<Mutex> order = nodes.OrderOf(its_exec);
  MutexLock in_order(order.get());
  StagedCopies& copies = session.graphs().staged_copies();
  const uint64_t number = copies.TakeBytes(pieces);
  if (number == 0) {
    *result = CUDA_ERROR_OUT_OF_MEMORY;
    return true;
  }
  // A checkpoint finds all of the launch or nothing.
  Call call(info::k_cuGraphLaunch);
  *result = call.Enter();
  if (*result == CUDA_SUCCESS) *result = launch();
  if (*result != CUDA_SUCCESS) copies.DropBytes(pieces, number);
  return true;
}

CUresult CaptureStagedNode(uint64_t stream, const CUDA_MEMCPY3D& copy, const StagedSides* known) {
  return AddToCapture(stream, [&](CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies,
                                  const CUgraphEdgeData* edges, size_t count) {
    return AddStagedNode(node, graph, dependencies, edges, count, copy, nullptr, known);
  });
}

}  // namespace cuda_remote::client
