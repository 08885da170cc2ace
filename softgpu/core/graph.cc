// SPDX-License-Identifier: Apache-2.0
#include "softgpu/core/graph.h"

#include <algorithm>
#include <atomic>
#include <set>

#include "proto/threads/mutex.h"
#include "softgpu/core/allocate.h"
#include "softgpu/core/device.h"
#include "softgpu/core/exec_slots.h"

namespace cuda_remote::softgpu {
namespace {

// Captures that run. Guarded by CaptureMutex(); the count can be read without it.
std::vector<std::shared_ptr<Capture>>& Running() {
  static auto* list = new std::vector<std::shared_ptr<Capture>>;
  return *list;
}
std::atomic<int> g_running{0};

void Invalidate(const std::shared_ptr<Capture>& capture) { capture->invalid = true; }

CUgraphNodeType TypeOf(const Work& work) {
  struct Visitor {
    CUgraphNodeType operator()(const EmptyWork&) const { return CU_GRAPH_NODE_TYPE_EMPTY; }
    CUgraphNodeType operator()(const KernelWork&) const { return CU_GRAPH_NODE_TYPE_KERNEL; }
    CUgraphNodeType operator()(const CopyWork&) const { return CU_GRAPH_NODE_TYPE_MEMCPY; }
    CUgraphNodeType operator()(const MemsetWork&) const { return CU_GRAPH_NODE_TYPE_MEMSET; }
    CUgraphNodeType operator()(const HostWork&) const { return CU_GRAPH_NODE_TYPE_HOST; }
    CUgraphNodeType operator()(const EventRecordWork&) const { return CU_GRAPH_NODE_TYPE_EVENT_RECORD; }
    CUgraphNodeType operator()(const EventWaitWork&) const { return CU_GRAPH_NODE_TYPE_WAIT_EVENT; }
    CUgraphNodeType operator()(const ChildGraphWork&) const { return CU_GRAPH_NODE_TYPE_GRAPH; }
    CUgraphNodeType operator()(const ConditionalWork&) const { return CU_GRAPH_NODE_TYPE_CONDITIONAL; }
    CUgraphNodeType operator()(const ValueWork&) const { return CU_GRAPH_NODE_TYPE_BATCH_MEM_OP; }
  };
  return std::visit(Visitor{}, work);
}

}  // namespace

RecursiveMutex& CaptureMutex() {
  static auto* mutex = new RecursiveMutex;
  return *mutex;
}

GraphAllocation::~GraphAllocation() {
  MemoryMap::Get().Release(MemoryMap::Get().RemoveIf(
      allocation->begin, [this](const Allocation& found) { return found.id == allocation->id; }));
}

GraphMemoryState& GraphMemoryState::Get() {
  static auto* state = new GraphMemoryState;
  return *state;
}

GraphAllocations GraphMemoryState::TakeOut(const driverabi::GraphMemory::Addresses& gone) {
  GraphAllocations out;
  for (const uint64_t address : gone) {
    const auto found = held.find(address);
    if (found == held.end()) continue;
    out.push_back(std::move(found->second));
    held.erase(found);
  }
  return out;
}

Graph::~Graph() { Unregister(); }

void Graph::Unregister() {
  for (const std::shared_ptr<GraphNode>& node : nodes) {
    Registry<GraphNode>::Get().Remove(node.get());
    UnregisterGraphsIn(*node);
  }
}

std::vector<GraphPtr> GraphsIn(const GraphNode& node) {
  if (const auto* conditional = std::get_if<ConditionalWork>(&node.work)) return conditional->bodies;
  if (const auto* child = std::get_if<ChildGraphWork>(&node.work)) return {child->graph};
  return {};
}

void UnregisterGraphsIn(const GraphNode& node) {
  for (const GraphPtr& graph : GraphsIn(node)) {
    Registry<Graph>::Get().Remove(graph.get());
    graph->Unregister();
  }
}

ChildGraphWork CloneOf(const Graph& graph, std::map<const GraphNode*, GraphNode*>* made) {
  ChildGraphWork work{graph.Clone(made)};
  work.graph->embedded = true;
  return work;
}

bool Graph::has_conditionals() const {
  return std::any_of(nodes.begin(), nodes.end(), [](const std::shared_ptr<GraphNode>& node) {
    return node->type == CU_GRAPH_NODE_TYPE_CONDITIONAL;
  });
}

CUgraphEdgeData GraphNode::EdgeFrom(const GraphNode* dependency) const {
  const auto found = edges.find(dependency);
  return found == edges.end() ? CUgraphEdgeData{} : found->second;
}

void GraphNode::SetEdge(const GraphNode* dependency, const CUgraphEdgeData& data) {
  if (data.from_port == 0 && data.to_port == 0 && data.type == 0) {
    edges.erase(dependency);
  } else {
    edges[dependency] = data;
  }
}

GraphNode* Graph::Add(CUgraphNodeType type, Work work, std::vector<GraphNode*> dependencies) {
  auto node = std::make_shared<GraphNode>();
  node->graph = this;
  node->type = type;
  node->work = std::move(work);
  std::sort(dependencies.begin(), dependencies.end());
  dependencies.erase(std::unique(dependencies.begin(), dependencies.end()), dependencies.end());
  node->dependencies = std::move(dependencies);
  nodes.push_back(node);
  Registry<GraphNode>::Get().Add(node);
  return node.get();
}

std::shared_ptr<Graph> Graph::Clone(std::map<const GraphNode*, GraphNode*>* made) const {
  std::map<const GraphNode*, GraphNode*> own;
  if (made == nullptr) made = &own;
  auto clone = std::make_shared<Graph>();
  clone->user_objects = user_objects;
  clone->memory = memory;
  clone->conditionals = conditionals;
  for (const std::shared_ptr<GraphNode>& node : nodes) {
    GraphNode* copy = clone->Add(node->type, node->work, {});
    copy->enabled = node->enabled;
    copy->copy = node->copy;
    copy->allocation = node->allocation;
    copy->origin = node.get();
    (*made)[node.get()] = copy;
    if (auto* child = std::get_if<ChildGraphWork>(&copy->work)) *child = CloneOf(*child->graph, made);
    if (auto* conditional = std::get_if<ConditionalWork>(&copy->work)) {
      for (GraphPtr& body : conditional->bodies) body = body->Clone(made);
    }
  }
  for (const std::shared_ptr<GraphNode>& node : nodes) {
    GraphNode* copy = (*made)[node.get()];
    for (GraphNode* dependency : node->dependencies) copy->dependencies.push_back((*made)[dependency]);
    for (const auto& [dependency, data] : node->edges) copy->edges[(*made)[dependency]] = data;
  }
  return clone;
}

bool Graph::IsLike(const Graph& other, GraphNode** where, bool* type_differs) const {
  *where = nullptr;
  *type_differs = false;
  if (nodes.size() != other.nodes.size()) return false;
  std::map<const GraphNode*, size_t> index, other_index;
  for (size_t i = 0; i < nodes.size(); ++i) {
    index[nodes[i].get()] = i;
    other_index[other.nodes[i].get()] = i;
  }
  for (size_t i = 0; i < nodes.size(); ++i) {
    *where = other.nodes[i].get();
    *type_differs = nodes[i]->type != other.nodes[i]->type;
    if (*type_differs) return false;
    std::set<size_t> mine, others;
    for (const GraphNode* node : nodes[i]->dependencies) mine.insert(index[node]);
    for (const GraphNode* node : other.nodes[i]->dependencies) others.insert(other_index[node]);
    if (mine != others) return false;
    const std::vector<GraphPtr> inside = GraphsIn(*nodes[i]), other_inside = GraphsIn(*other.nodes[i]);
    if (inside.size() != other_inside.size()) return false;
    for (size_t k = 0; k < inside.size(); ++k) {
      GraphNode* below;
      if (!inside[k]->IsLike(*other_inside[k], &below, type_differs)) return false;
    }
  }
  return true;
}

bool Graph::Order(std::vector<GraphNode*>* order) const {
  std::map<GraphNode*, size_t> missing;
  std::map<GraphNode*, std::vector<GraphNode*>> dependents;
  std::vector<GraphNode*> ready;
  for (const std::shared_ptr<GraphNode>& node : nodes) {
    missing[node.get()] = node->dependencies.size();
    for (GraphNode* dependency : node->dependencies) dependents[dependency].push_back(node.get());
    if (node->dependencies.empty()) ready.push_back(node.get());
  }
  for (size_t i = 0; i < ready.size(); ++i) {
    order->push_back(ready[i]);
    for (GraphNode* next : dependents[ready[i]]) {
      if (--missing[next] == 0) ready.push_back(next);
    }
  }
  return order->size() == nodes.size();
}

namespace {

// Under CaptureMutex(). What is in the bodies of conditional nodes, which CUDA keeps free of pageable memory, stays.
void AppendWorks(const std::vector<GraphNode*>& order, std::vector<Work>* works, std::vector<GraphPtr>* inside) {
  for (const GraphNode* node : order) {
    if (!node->enabled) continue;
    if (const auto* const child = std::get_if<ChildGraphWork>(&node->work)) {
      std::vector<GraphNode*> its_order;
      child->graph->Order(&its_order);
      inside->push_back(child->graph);
      AppendWorks(its_order, works, inside);
      continue;
    }
    works->push_back(node->work);
    if (auto* const copy = std::get_if<CopyWork>(&works->back()); copy != nullptr && copy->from_pageable) Stage(copy);
  }
}

}  // namespace

GraphExec::~GraphExec() {
  if (slot != 0) GiveExecSlot(slot);
}

void GraphExec::Unshare() {
  std::map<const GraphNode*, GraphNode*> own;
  graph = graph->Clone(&own);
  for (auto& [original, node] : made) node = own.at(node);
  order.clear();
  graph->Order(&order);
}

GraphNode* GraphExec::Own(const GraphNode* original) {
  if (made.at(original)->graph != graph.get()) Unshare();
  return made.at(original);
}

void GraphExec::Adopt(const Graph& from, Graph* to, bool named) {
  for (size_t i = 0; i < from.nodes.size(); ++i) {
    const GraphNode& source = *from.nodes[i];
    GraphNode* const node = to->nodes[i].get();
    const std::vector<GraphPtr> sources = GraphsIn(source), graphs = GraphsIn(*node);
    if (graphs.empty()) node->work = source.work;
    if (auto* const conditional = std::get_if<ConditionalWork>(&node->work)) {
      conditional->handle = std::get<ConditionalWork>(source.work).handle;
    }
    for (size_t k = 0; k < graphs.size(); ++k) {
      Adopt(*sources[k], graphs[k].get(), named);
      graphs[k]->user_objects = sources[k]->user_objects;
      graphs[k]->memory = sources[k]->memory;
    }
    if (named && made.insert_or_assign(&source, node).second) originals.push_back(source.weak_from_this());
  }
}

std::vector<Work> GraphExec::Works(std::vector<GraphPtr>* inside) const {
  std::vector<Work> works;
  AppendWorks(order, &works, inside);
  return works;
}

std::shared_ptr<Capture> CaptureOf(const StreamPtr& stream) {
  if (g_running.load(std::memory_order_acquire) == 0) return nullptr;
  RecursiveMutexLock lock(&CaptureMutex());
  return stream->capture;
}

CUresult CaptureWork(const StreamPtr& stream, const std::shared_ptr<Capture>& capture, Work work) {
  RecursiveMutexLock lock(&CaptureMutex());
  if (capture->invalid || stream->capture != capture) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  CUgraphNodeType type = TypeOf(work);
  bool early = false;
  if (auto* kernel = std::get_if<KernelWork>(&work)) {
    // What a launch may do before the kernel ahead of it has ended is a property of the edge between the two.
    const auto found = kernel->attributes.find(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
    if (found != kernel->attributes.end()) {
      early = found->second.programmaticStreamSerializationAllowed != 0;
      kernel->attributes.erase(found);
    }
    CUlaunchAttributeValue priority = {};
    priority.priority = stream->priority();
    kernel->attributes.emplace(CU_LAUNCH_ATTRIBUTE_PRIORITY, priority);  // unless the launch has its own
  }
  GraphNode* node = capture->graph->Add(type, std::move(work), stream->capture_dependencies);
  for (const GraphNode* dependency : node->dependencies) {
    if (!early || dependency->type != CU_GRAPH_NODE_TYPE_KERNEL) continue;
    CUgraphEdgeData edge = {};
    edge.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
    edge.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
    node->SetEdge(dependency, edge);
  }
  stream->capture_dependencies = {node};
  return CUDA_SUCCESS;
}

CUresult ForbiddenInCapture(const StreamPtr& stream) {
  RecursiveMutexLock lock(&CaptureMutex());
  if (stream->capture) Invalidate(stream->capture);
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult CheckLegacyCapture(const StreamPtr& stream) {
  if (g_running.load(std::memory_order_acquire) == 0 || stream->kind() != StreamKind::kLegacy) return CUDA_SUCCESS;
  RecursiveMutexLock lock(&CaptureMutex());
  for (const std::shared_ptr<Capture>& capture : Running()) {
    if (capture->origin->context() != stream->context() || capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED) continue;
    for (const StreamPtr& captured : capture->streams) {
      if (!captured->blocking()) continue;
      Invalidate(capture);
      return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
  }
  return CUDA_SUCCESS;
}

CUresult CheckContextCapture(const ContextPtr& context) {
  if (g_running.load(std::memory_order_acquire) == 0) return CUDA_SUCCESS;
  RecursiveMutexLock lock(&CaptureMutex());
  CUresult result = CUDA_SUCCESS;
  for (const std::shared_ptr<Capture>& capture : Running()) {
    if (capture->origin->context() != context) continue;
    Invalidate(capture);
    result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return result;
}

CUresult WaitEventInCapture(const StreamPtr& stream, const EventPtr& event) {
  RecursiveMutexLock lock(&CaptureMutex());
  std::shared_ptr<Capture> capture = event->capture;
  if (!capture) {
    // An event from outside: the graph cannot depend on it.
    Invalidate(stream->capture);
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  }
  if (std::find(Running().begin(), Running().end(), capture) == Running().end()) {
    if (stream->capture) Invalidate(stream->capture);
    return CUDA_ERROR_CAPTURED_EVENT;
  }
  if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (stream->kind() == StreamKind::kLegacy) {
    Invalidate(capture);
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  if (stream->capture && stream->capture != capture) {
    Invalidate(stream->capture);
    Invalidate(capture);
    return CUDA_ERROR_STREAM_CAPTURE_MERGE;
  }
  if (!stream->capture) {
    stream->capture = capture;
    stream->capture_dependencies.clear();
    capture->streams.push_back(stream);
  }
  for (GraphNode* node : event->capture_nodes) {
    auto& list = stream->capture_dependencies;
    if (std::find(list.begin(), list.end(), node) == list.end()) list.push_back(node);
  }
  return CUDA_SUCCESS;
}

void ForgetStreamCapture(const StreamPtr& stream) {
  RecursiveMutexLock lock(&CaptureMutex());
  if (!stream->capture) return;
  std::shared_ptr<Capture> capture = stream->capture;
  if (capture->origin == stream) EndCapture(capture);
}

CUresult BeginCapture(const StreamPtr& stream, CUstreamCaptureMode mode, const GraphPtr& graph,
                      std::vector<GraphNode*> dependencies) {
  RecursiveMutexLock lock(&CaptureMutex());
  if (stream->kind() == StreamKind::kLegacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
  static uint64_t next_id = 1;
  auto capture = std::make_shared<Capture>();
  capture->id = next_id++;
  capture->own_graph = !graph;
  capture->graph = graph ? graph : std::make_shared<Graph>();
  // The graph can be asked for, and looked at, while it is being captured.
  if (!graph) Registry<Graph>::Get().Add(capture->graph);
  capture->origin = stream;
  capture->mode = mode;
  capture->streams = {stream};
  stream->capture = capture;
  stream->capture_dependencies = std::move(dependencies);
  Running().push_back(capture);
  g_running.store(static_cast<int>(Running().size()), std::memory_order_release);
  return CUDA_SUCCESS;
}

CUresult EndCapture(const std::shared_ptr<Capture>& capture) {
  RecursiveMutexLock lock(&CaptureMutex());
  CUresult result = capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
  // What every other stream did last must come before what the origin did last.
  std::set<GraphNode*> before;
  std::vector<GraphNode*> todo = capture->origin->capture_dependencies;
  while (!todo.empty()) {
    GraphNode* node = todo.back();
    todo.pop_back();
    if (!before.insert(node).second) continue;
    todo.insert(todo.end(), node->dependencies.begin(), node->dependencies.end());
  }
  for (const StreamPtr& stream : capture->streams) {
    for (GraphNode* node : stream->capture_dependencies) {
      if (before.count(node) == 0 && result == CUDA_SUCCESS) result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    }
  }
  for (const StreamPtr& stream : capture->streams) {
    stream->capture = nullptr;
    stream->capture_dependencies.clear();
  }
  if (result != CUDA_SUCCESS && capture->own_graph) Registry<Graph>::Get().Remove(capture->graph.get());
  capture->streams.clear();
  Running().erase(std::remove(Running().begin(), Running().end(), capture), Running().end());
  g_running.store(static_cast<int>(Running().size()), std::memory_order_release);
  return result;
}

CUresult TakeGraphMemory(const CUDA_MEM_ALLOC_NODE_PARAMS& params, AllocationPtr* allocation) {
  const CUmemPoolProps& props = params.poolProps;
  if (params.bytesize == 0 || (params.accessDescCount != 0 && params.accessDescs == nullptr) ||
      props.allocType != CU_MEM_ALLOCATION_TYPE_PINNED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // A graph's memory is not shared with other processes.
  if (props.handleTypes != CU_MEM_HANDLE_TYPE_NONE) return CUDA_ERROR_NOT_SUPPORTED;
  if (props.location.type == CU_MEM_LOCATION_TYPE_INVALID) return CUDA_ERROR_INVALID_VALUE;
  if (props.location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  if (GetDevice(props.location.id) == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::set<int> reach;
  for (size_t i = 0; i < params.accessDescCount; ++i) {
    const CUmemAccessDesc& access = params.accessDescs[i];
    if (access.flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return CUDA_ERROR_NOT_SUPPORTED;
    if (GetDevice(access.location.id) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    if (!reach.insert(access.location.id).second) return CUDA_ERROR_INVALID_VALUE;
  }
  const CUresult result = AllocateUnmapped(props.location.id, params.bytesize, MemoryKind::kPool, true, allocation);
  if (result != CUDA_SUCCESS) return result;
  (*allocation)->of_graph = true;
  return MemoryMap::Get().Add(*allocation) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

// One of these that is freed by a node which `node` depends on; 0: none.
static uint64_t FreedBefore(const std::vector<driverabi::GraphMemory::Freed>& freed, const GraphNode* node) {
  std::vector<const GraphNode*> seen = {node};
  std::set<const GraphNode*> known;
  for (size_t i = 0; i < seen.size() && !freed.empty(); ++i) {
    for (const driverabi::GraphMemory::Freed& one : freed) {
      if (one.node == reinterpret_cast<uint64_t>(seen[i])) return one.address;
    }
    for (const GraphNode* before : seen[i]->dependencies) {
      if (known.insert(before).second) seen.push_back(before);
    }
  }
  return 0;
}

void BecomeAllocation(Graph* graph, const CUDA_MEM_ALLOC_NODE_PARAMS& params, AllocationPtr allocation,
                      GraphNode* node) {
  GraphMemoryState& state = GraphMemoryState::Get();
  const int device = params.poolProps.location.id;
  uint64_t address = allocation->begin;
  auto holder = std::make_shared<GraphAllocation>(std::move(allocation));
  // What was freed before is allocated again, as by driver 580.
  const uint64_t again = FreedBefore(state.rules.FreedFor(graph->number(), params.bytesize, device), node);
  if (again != 0 && state.rules.AllocatesAgain(graph->number(), again)) {
    address = again;
    holder = state.held[address];
  } else {
    state.rules.Allocates(graph->number(), address, params.bytesize, device);
    state.held[address] = holder;
  }
  graph->memory.push_back(std::move(holder));
  node->type = CU_GRAPH_NODE_TYPE_MEM_ALLOC;
  node->allocation = params;
  node->accesses.assign(params.accessDescs, params.accessDescs + params.accessDescCount);
  node->allocation.accessDescs = node->accesses.data();
  node->allocation.dptr = address;
}

void BecomeFree(Graph* graph, CUdeviceptr address, GraphNode* node) {
  GraphMemoryState& state = GraphMemoryState::Get();
  state.rules.Frees(graph->number(), address, reinterpret_cast<uint64_t>(node));
  // An executable that frees it runs after whoever made it is gone.
  graph->memory.push_back(state.held[address]);
  node->type = CU_GRAPH_NODE_TYPE_MEM_FREE;
  node->allocation.dptr = address;
}

CUresult CaptureAllocation(const StreamPtr& stream, const std::shared_ptr<Capture>& capture, int device, size_t bytes,
                           CUdeviceptr* address) {
  RecursiveMutexLock lock(&CaptureMutex());
  CUDA_MEM_ALLOC_NODE_PARAMS params = {};
  params.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  params.poolProps.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
  params.bytesize = bytes;
  AllocationPtr allocation;
  if (CUresult result = TakeGraphMemory(params, &allocation); result != CUDA_SUCCESS) return result;
  if (CUresult result = CaptureWork(stream, capture, EmptyWork{}); result != CUDA_SUCCESS) {
    GraphAllocation unused(std::move(allocation));
    return result;
  }
  GraphNode* const node = stream->capture_dependencies.front();
  BecomeAllocation(capture->graph.get(), params, std::move(allocation), node);
  *address = node->allocation.dptr;
  return CUDA_SUCCESS;
}

CUresult CaptureFree(const StreamPtr& stream, const std::shared_ptr<Capture>& capture, CUdeviceptr address) {
  RecursiveMutexLock lock(&CaptureMutex());
  CUresult result = GraphMemoryState::Get().rules.MayFree(capture->graph->number(), address);
  if (result == CUDA_SUCCESS) result = CaptureWork(stream, capture, EmptyWork{});
  if (result == CUDA_SUCCESS) BecomeFree(capture->graph.get(), address, stream->capture_dependencies.front());
  return result;
}

bool FreeOfGraph(CUdeviceptr address, CUresult* result, GraphAllocations* gone) {
  RecursiveMutexLock lock(&CaptureMutex());
  GraphMemoryState& state = GraphMemoryState::Get();
  if (!state.rules.Contains(address)) return false;
  driverabi::GraphMemory::Addresses addresses;
  *result = state.rules.Free(address, &addresses);
  *gone = state.TakeOut(addresses);
  return true;
}

}  // namespace cuda_remote::softgpu
