// SPDX-License-Identifier: Apache-2.0
// Graphs, their nodes, executable graphs, and streams being captured into graphs.
//
// One mutex (CaptureMutex) guards the structure of all graphs and all capture state: these calls are rare, and it keeps
// captures that span several streams simple.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_GRAPH_H_
#define CUDA_REMOTE_SOFTGPU_CORE_GRAPH_H_

#include <cuda.h>

#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "proto/driverabi/graph_memory.h"
#include "proto/threads/mutex.h"
#include "softgpu/core/event.h"
#include "softgpu/core/memory_map.h"
#include "softgpu/core/stream.h"
#include "softgpu/core/user_object.h"
#include "softgpu/core/work.h"

namespace cuda_remote::softgpu {

RecursiveMutex& CaptureMutex();

struct GraphNode : std::enable_shared_from_this<GraphNode> {
  Graph* graph = nullptr;
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  Work work;
  std::vector<GraphNode*> dependencies;
  std::map<const GraphNode*, CUgraphEdgeData> edges;  // from dependencies whose edges are not plain ones
  bool enabled = true;
  // The parameters as the caller gave them, for the getters.
  CUDA_MEMCPY3D copy = {};
  CUDA_MEM_ALLOC_NODE_PARAMS allocation = {};
  std::vector<CUmemAccessDesc> accesses;  // of the allocation
  std::vector<CUgraph> bodies;            // handles, of a conditional node
  std::vector<void*> param_pointers;      // of a kernel: into its parameter block
  const GraphNode* origin = nullptr;      // in a clone: the node it was made from

  CUgraphNode handle() { return reinterpret_cast<CUgraphNode>(this); }
  CUgraphEdgeData EdgeFrom(const GraphNode* dependency) const;
  void SetEdge(const GraphNode* dependency, const CUgraphEdgeData& data);
};

// Memory of a graph's allocation node: in the map for as long as anything holds it - a graph, an executable, a launch
// that runs, or GraphMemoryState, which has it until nobody can use it any more.
struct GraphAllocation {
  explicit GraphAllocation(AllocationPtr taken) : allocation(std::move(taken)) {}
  GraphAllocation(const GraphAllocation&) = delete;
  GraphAllocation& operator=(const GraphAllocation&) = delete;
  ~GraphAllocation();
  const AllocationPtr allocation;
};
using GraphAllocations = std::vector<std::shared_ptr<GraphAllocation>>;

// Under CaptureMutex().
struct GraphMemoryState {
  driverabi::GraphMemory rules;
  std::map<uint64_t, std::shared_ptr<GraphAllocation>> held;  // by address

  static GraphMemoryState& Get();
  // Takes out what is gone; whoever has the result lets go of it.
  GraphAllocations TakeOut(const driverabi::GraphMemory::Addresses& gone);
};

struct GraphExec;

// Another number for each graph and each executable, also where one comes to the address that an earlier one had:
// what GraphMemoryState knows of the earlier one must not become the later one's.
inline uint64_t NextGraphNumber() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

struct Graph : std::enable_shared_from_this<Graph> {
  std::vector<std::shared_ptr<GraphNode>> nodes;  // a node comes after its dependencies unless they were added later
  GraphAllocations memory;
  // Conditional handles, which are their numbers from 1 on. A body of a conditional node uses those of the whole graph.
  struct Conditional {
    uint32_t initial = 0;
    bool assign = false;  // `initial`, at the beginning of every launch
    bool used = false;    // by a node
  };
  std::vector<Conditional> conditionals;
  // A child graph that was moved into a node (CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE): the graph of that node. It has the
  // memory nodes in the child graph, too.
  Graph* moved_into = nullptr;
  bool embedded = false;          // a node's own: a child graph, moved or cloned
  Graph* whole = nullptr;         // of a body: the graph that it is part of, or that graph's own
  std::weak_ptr<GraphExec> only;  // of a graph with conditional nodes: there may be one executable at a time
  std::vector<UserReference> user_objects;

  ~Graph();
  CUgraph handle() { return reinterpret_cast<CUgraph>(this); }
  uint64_t number() const { return number_; }
  // Whether it has nodes that allocate or free memory.
  bool has_memory() const { return GraphMemoryState::Get().rules.HasNodes(number()); }
  bool has_conditionals() const;
  // The handles of the nodes, and of the graphs in them, are no handles any more.
  void Unregister();
  GraphNode* Add(CUgraphNodeType type, Work work, std::vector<GraphNode*> dependencies);
  // *made gets which node became which, also those of graphs inside.
  std::shared_ptr<Graph> Clone(std::map<const GraphNode*, GraphNode*>* made = nullptr) const;
  // Whether both have nodes of the same types with the same dependencies, and so have the graphs inside. *where: the
  // node of `other` that differs, or null, and *type_differs whether its type does.
  bool IsLike(const Graph& other, GraphNode** where, bool* type_differs) const;
  // Nodes so that each one comes after its dependencies; false if there is a circle.
  bool Order(std::vector<GraphNode*>* order) const;

 private:
  const uint64_t number_ = NextGraphNumber();
};
using GraphPtr = std::shared_ptr<Graph>;

// The handles of the child graph or the bodies of a node are no handles any more.
void UnregisterGraphsIn(const GraphNode& node);
// What a child graph's node does with a copy of `graph`. Under CaptureMutex(). `made` as for Graph::Clone.
ChildGraphWork CloneOf(const Graph& graph, std::map<const GraphNode*, GraphNode*>* made = nullptr);
// The graphs in a node: a child graph, or bodies.
std::vector<GraphPtr> GraphsIn(const GraphNode& node);

struct GraphExec {
  ContextPtr context;
  GraphPtr graph;                               // a clone
  std::map<const GraphNode*, GraphNode*> made;  // from the original's nodes, also inside others, to the clone's
  std::vector<std::weak_ptr<const GraphNode>> originals;  // those nodes: no other comes to the address of one
  GraphPtr source;                                        // keeps the original's nodes, and captured memory, alive
  std::vector<GraphNode*> order;
  unsigned long long flags = 0;
  const std::shared_ptr<GraphValues> values = std::make_shared<GraphValues>();

  Mutex launch_mutex;
  TaskPtr last CR_GUARDED_BY(launch_mutex);  // the latest launch

  uint64_t slot = 0;  // of one that kernels may launch: its handle (exec_slots.h), which goes with it

  ~GraphExec();
  CUgraphExec handle() { return slot != 0 ? reinterpret_cast<CUgraphExec>(slot) : reinterpret_cast<CUgraphExec>(this); }
  uint64_t number() const { return number_; }
  // What a launch does: a copy, so that the graph can be changed while it runs. Takes the bytes of pageable sources.
  // *inside gets the graphs inside, whose user objects the launch has.
  std::vector<Work> Works(std::vector<GraphPtr>* inside) const;
  // Before a change inside a child graph, which launches share: gives the executable graphs of its own. What `made`
  // leads to changes. Under CaptureMutex().
  void Unshare();
  // The node for one of the original's, which is in `made`, for a change of it.
  GraphNode* Own(const GraphNode* original);
  // Makes the nodes of `to`, which is its graph or one inside that, do what those of `from` do. Both have the same
  // nodes. Leaves them enabled or disabled. `named`: the nodes of `from` name those of `to`, too. After Unshare().
  void Adopt(const Graph& from, Graph* to, bool named);

 private:
  const uint64_t number_ = NextGraphNumber();
};
using GraphExecPtr = std::shared_ptr<GraphExec>;

struct Capture {
  uint64_t id = 0;
  GraphPtr graph;
  StreamPtr origin;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  bool invalid = false;
  bool own_graph = true;  // else the caller's (cuStreamBeginCaptureToGraph)
  std::vector<StreamPtr> streams;
  std::vector<CUgraphEdgeData> edges;  // what cuStreamGetCaptureInfo points to
};

// The running capture of the stream; null if there is none.
std::shared_ptr<Capture> CaptureOf(const StreamPtr& stream);

// Adds an operation to the capture of `stream`. CUDA_ERROR_STREAM_CAPTURE_INVALIDATED.
CUresult CaptureWork(const StreamPtr& stream, const std::shared_ptr<Capture>& capture, Work work);

// Nodes that allocate and free memory: an empty node becomes one. An allocation has the memory that was taken for it,
// or some that a node before it frees. Under CaptureMutex().
CUresult TakeGraphMemory(const CUDA_MEM_ALLOC_NODE_PARAMS& params, AllocationPtr* allocation);
void BecomeAllocation(Graph* graph, const CUDA_MEM_ALLOC_NODE_PARAMS& params, AllocationPtr allocation,
                      GraphNode* node);
void BecomeFree(Graph* graph, CUdeviceptr address, GraphNode* node);
// cuMemAllocAsync and cuMemFreeAsync in a captured stream.
CUresult CaptureAllocation(const StreamPtr& stream, const std::shared_ptr<Capture>& capture, int device, size_t bytes,
                           CUdeviceptr* address);
CUresult CaptureFree(const StreamPtr& stream, const std::shared_ptr<Capture>& capture, CUdeviceptr address);
// Frees memory of a graph outside of graphs: false if it is none. What is gone goes when *gone does.
bool FreeOfGraph(CUdeviceptr address, CUresult* result, GraphAllocations* gone);

// For calls that a captured stream cannot do: invalidates the capture and says CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.
CUresult ForbiddenInCapture(const StreamPtr& stream);

// CUDA_ERROR_STREAM_CAPTURE_IMPLICIT if `stream` is the legacy stream and a capture of a blocking stream runs in its
// context.
CUresult CheckLegacyCapture(const StreamPtr& stream);
// A context that has streams being captured cannot be waited for, whatever the mode:
// CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED invalidates these captures (seen with driver 580).
CUresult CheckContextCapture(const ContextPtr& context);

// Puts a stream into capture, into a new graph (null) or an existing one; takes all streams of a capture out of it.
CUresult BeginCapture(const StreamPtr& stream, CUstreamCaptureMode mode, const GraphPtr& graph,
                      std::vector<GraphNode*> dependencies);
CUresult EndCapture(const std::shared_ptr<Capture>& capture);

// cuStreamWaitEvent where the stream, the event or both belong to a capture: the stream joins the event's.
CUresult WaitEventInCapture(const StreamPtr& stream, const EventPtr& event);

// The stream is being destroyed: its capture can no longer be ended well.
void ForgetStreamCapture(const StreamPtr& stream);

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_GRAPH_H_
