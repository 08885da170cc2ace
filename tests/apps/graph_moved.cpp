// SPDX-License-Identifier: Apache-2.0
// Child graphs that are moved into their node (CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE): with memory nodes, inside of each
// other, changed after they were moved, in clones and executables; and what can no longer be done with them. Graphs
// stay, come and go. The host computes everything as well.
#include <cuda.h>

#include <vector>

#include "tests/apps/support/driver.h"

namespace {

constexpr size_t kWords = 64;

CUdeviceptr g_words = 0;  // results, one slot of kWords for each thing that writes
CUcontext g_context = nullptr;

CUdeviceptr SlotAt(size_t slot) { return g_words + slot * kWords * 4; }

CUDA_MEMSET_NODE_PARAMS Fill(CUdeviceptr to, unsigned value) {
  CUDA_MEMSET_NODE_PARAMS fill = {};
  fill.dst = to;
  fill.value = value;
  fill.elementSize = 4;
  fill.width = kWords;
  fill.height = 1;
  return fill;
}

CUgraphNode AddFill(CUgraph graph, const std::vector<CUgraphNode>& after, CUdeviceptr to, unsigned value) {
  CUgraphNode node;
  const CUDA_MEMSET_NODE_PARAMS fill = Fill(to, value);
  CU_CHECK(cuGraphAddMemsetNode(&node, graph, after.data(), after.size(), &fill, g_context));
  return node;
}

CUgraphNode AddCopy(CUgraph graph, const std::vector<CUgraphNode>& after, CUdeviceptr to, CUdeviceptr from) {
  CUgraphNode node;
  CUDA_MEMCPY3D copy = {};
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = from;
  copy.dstDevice = to;
  copy.WidthInBytes = kWords * 4;
  copy.Height = copy.Depth = 1;
  CU_CHECK(cuGraphAddMemcpyNode(&node, graph, after.data(), after.size(), &copy, g_context));
  return node;
}

CUresult TryChild(CUgraphNode* node, CUgraph graph, const std::vector<CUgraphNode>& after, CUgraph child,
                  CUgraphChildGraphNodeOwnership ownership) {
  CUgraphNodeParams params = {};
  params.type = CU_GRAPH_NODE_TYPE_GRAPH;
  params.graph.graph = child;
  params.graph.ownership = ownership;
  return cuGraphAddNode(node, graph, after.data(), nullptr, after.size(), &params);
}

CUgraphNode Move(CUgraph graph, const std::vector<CUgraphNode>& after, CUgraph child) {
  CUgraphNode node;
  CU_CHECK(TryChild(&node, graph, after, child, CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE));
  CUgraph inside;
  CU_CHECK(cuGraphChildGraphNodeGetGraph(node, &inside));
  APP_CHECK(inside == child);  // its handle stays what it was
  return node;
}

// What a graph that was moved cannot do any more. The documentation names no codes.
void CheckMoved(CUgraph moved) {
  CUgraph other;
  CUgraphNode node;
  CUgraphExec exec;
  CU_CHECK(cuGraphCreate(&other, 0));
  APP_CHECK(cuGraphDestroy(moved) != CUDA_SUCCESS);
  APP_CHECK(cuGraphInstantiate(&exec, moved, 0) != CUDA_SUCCESS);
  APP_CHECK(TryChild(&node, other, {}, moved, CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE) != CUDA_SUCCESS);
  APP_CHECK(TryChild(&node, other, {}, moved, CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE) != CUDA_SUCCESS);
  CUDA_MEM_ALLOC_NODE_PARAMS allocation = {};
  allocation.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  allocation.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  allocation.bytesize = kWords * 4;
  APP_CHECK(cuGraphAddMemAllocNode(&node, moved, nullptr, 0, &allocation) != CUDA_SUCCESS);
  CU_CHECK(cuGraphInstantiate(&exec, other, 0));
  CUgraphExecUpdateResultInfo info;
  APP_CHECK(cuGraphExecUpdate(exec, moved, &info) != CUDA_SUCCESS);
  CU_CHECK(cuGraphExecDestroy(exec));
  CU_CHECK(cuGraphDestroy(other));
}

// A graph that allocates, fills the memory, copies it to a slot, and frees it.
struct WithMemory {
  CUgraph graph;
  CUgraphNode fill;
  CUdeviceptr memory;

  WithMemory(size_t slot, unsigned value) {
    CU_CHECK(cuGraphCreate(&graph, 0));
    CUDA_MEM_ALLOC_NODE_PARAMS allocation = {};
    allocation.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    allocation.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    allocation.bytesize = kWords * 4;
    CUgraphNode node, last;
    CU_CHECK(cuGraphAddMemAllocNode(&node, graph, nullptr, 0, &allocation));
    memory = allocation.dptr;
    fill = AddFill(graph, {node}, memory, value);
    node = AddCopy(graph, {fill}, SlotAt(slot), memory);
    CU_CHECK(cuGraphAddMemFreeNode(&last, graph, &node, 1, memory));
  }
};

// A graph that fills two slots, the second one in a graph that was moved into it.
struct Pair {
  CUgraph graph, inner;
  CUgraphNode inner_fill, inner_node;

  Pair(size_t slot, unsigned value) {
    CU_CHECK(cuGraphCreate(&graph, 0));
    const CUgraphNode first = AddFill(graph, {}, SlotAt(slot), value);
    CU_CHECK(cuGraphCreate(&inner, 0));
    inner_fill = AddFill(inner, {}, SlotAt(slot + 1), value + 1);
    inner_node = Move(graph, {first}, inner);
  }
};

class Model {
 public:
  void Set(size_t slot, unsigned value) { values_[slot] = value; }
  void Check(int step, app::Digest* digest) {
    std::vector<unsigned> words(kWords * values_.size());
    CU_CHECK(cuCtxSynchronize());
    CU_CHECK(cuMemcpyDtoH(words.data(), g_words, words.size() * 4));
    for (size_t i = 0; i < words.size(); ++i) {
      if (words[i] == values_[i / kWords]) continue;
      fprintf(stderr, "step %d: slot %zu has %u instead of %u\n", step, i / kWords, words[i], values_[i / kWords]);
      app::Fail(__FILE__, __LINE__, "slot", "wrong");
    }
    digest->Add(words.data(), words.size() * 4);
  }
  size_t slots() const { return values_.size(); }

 private:
  std::vector<unsigned> values_ = std::vector<unsigned>(10);
};

void SetFill(CUgraphNode node, CUdeviceptr to, unsigned value) {
  const CUDA_MEMSET_NODE_PARAMS fill = Fill(to, value);
  CU_CHECK(cuGraphMemsetNodeSetParams(node, &fill));
}

CUgraphExec Instantiate(CUgraph graph) {
  CUgraphExec exec;
  CU_CHECK(cuGraphInstantiate(&exec, graph, 0));
  return exec;
}

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {20, 1});
  CU_CHECK(cuInit(0));
  CU_CHECK(cuDevicePrimaryCtxRetain(&g_context, 0));
  CU_CHECK(cuCtxSetCurrent(g_context));
  CUstream stream;
  CU_CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  Model model;
  CU_CHECK(cuMemAlloc(&g_words, kWords * 4 * model.slots()));
  CU_CHECK(cuMemsetD8(g_words, 0, kWords * 4 * model.slots()));
  CU_CHECK(cuCtxSynchronize());

  // A graph with memory nodes in a graph in a graph.
  CUgraph outer, middle;
  WithMemory memory(0, 100);
  CU_CHECK(cuGraphCreate(&outer, 0));
  CU_CHECK(cuGraphCreate(&middle, 0));
  CUgraphNode node;
  // It can be moved, and not be cloned.
  APP_CHECK(TryChild(&node, middle, {}, memory.graph, CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE) != CUDA_SUCCESS);
  const CUgraphNode middle_fill = AddFill(middle, {}, SlotAt(1), 200);
  Move(middle, {middle_fill}, memory.graph);
  CheckMoved(memory.graph);
  CUgraph clone;
  APP_CHECK(cuGraphClone(&clone, middle) != CUDA_SUCCESS);  // it has the memory nodes now
  Move(outer, {AddFill(outer, {}, SlotAt(2), 300)}, middle);
  CheckMoved(middle);
  APP_CHECK(TryChild(&node, middle, {}, outer, CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE) != CUDA_SUCCESS);  // a circle
  CUgraphExec outer_exec = Instantiate(outer);

  // A graph whose executable outlives it, and another one that stays beside its clone and executables of both.
  CUgraphExec orphan;
  {
    Pair pair(3, 400);
    orphan = Instantiate(pair.graph);
    SetFill(pair.inner_fill, SlotAt(4), 77);  // too late for the executable
    CU_CHECK(cuGraphDestroy(pair.graph));
  }
  Pair kept(5, 500);
  CheckMoved(kept.inner);
  CU_CHECK(cuGraphClone(&clone, kept.graph));
  CUgraphExec kept_exec = Instantiate(kept.graph), clone_exec = Instantiate(clone);

  for (int step = 1; step <= options.steps; ++step) {
    const unsigned salt = unsigned(step) * 1000;
    CU_CHECK(cuGraphLaunch(outer_exec, stream));
    CU_CHECK(cuGraphLaunch(orphan, stream));
    if (step == 1) {
      model.Set(0, 100);
      model.Set(1, 200);
      model.Set(2, 300);
      model.Set(3, 400);
      model.Set(4, 401);
      model.Set(5, 500);
      model.Set(6, 501);
    }
    CU_CHECK(cuGraphLaunch(step % 2 == 0 ? clone_exec : kept_exec, stream));
    app::Digest digest;
    model.Check(step, &digest);

    // Changed inside: for the next executable, or by an update.
    SetFill(memory.fill, memory.memory, salt + 1);
    SetFill(middle_fill, SlotAt(1), salt + 2);
    CUgraphExecUpdateResultInfo info;
    CU_CHECK(cuGraphExecUpdate(outer_exec, outer, &info));
    model.Set(0, salt + 1);
    model.Set(1, salt + 2);
    if (step % 4 == 3) {
      CU_CHECK(cuGraphExecDestroy(outer_exec));
      outer_exec = Instantiate(outer);
    }
    // The clone is its own.
    SetFill(kept.inner_fill, SlotAt(6), salt + 3);
    CU_CHECK(cuGraphExecUpdate(kept_exec, kept.graph, &info));
    model.Set(6, step % 2 == 0 ? salt + 3 : 501);  // what the next step launches

    // One that comes, is changed, and goes with its node; another one with its graph.
    Pair guest(7, salt + 4);
    SetFill(guest.inner_fill, SlotAt(8), salt + 6);
    if (step % 3 == 0) CU_CHECK(cuGraphDestroyNode(guest.inner_node));
    const CUgraphExec guest_exec = Instantiate(guest.graph);
    CU_CHECK(cuGraphLaunch(guest_exec, stream));
    CU_CHECK(cuGraphDestroy(guest.graph));
    CU_CHECK(cuStreamSynchronize(stream));
    CU_CHECK(cuGraphExecDestroy(guest_exec));
    model.Set(7, salt + 4);
    if (step % 3 != 0) model.Set(8, salt + 6);
    WithMemory passing(9, salt + 9);
    CUgraph carrier;
    CU_CHECK(cuGraphCreate(&carrier, 0));
    Move(carrier, {}, passing.graph);
    const CUgraphExec passing_exec = Instantiate(carrier);
    CU_CHECK(cuGraphLaunch(passing_exec, stream));
    CU_CHECK(cuGraphDestroy(carrier));
    CU_CHECK(cuStreamSynchronize(stream));
    CU_CHECK(cuGraphExecDestroy(passing_exec));
    model.Set(9, salt + 9);

    printf("step %d: %016" PRIx64 "\n", step, digest.value());
    fflush(stdout);
    app::Step(step);
  }
}
