// SPDX-License-Identifier: Apache-2.0
// Makes and destroys a million objects (events, streams, memory, modules, graphs and their nodes) and watches the
// process's own memory: what is destroyed must leave nothing behind, neither in the replay log nor in the handle
// tables. Edges of nodes that stay, too.
//
// Usage: million [COUNT (1000000)]. Prints the growth after a warm-up; exit code 1 if it is more than four bytes an
// object.
#include <cuda.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "tests/faults/driver.h"

namespace {

const char kModule[] =
    ".version 7.0\n.target sm_52\n.address_size 64\n"
    ".visible .global .align 4 .u32 word = 3;\n"
    ".visible .entry nothing() { ret; }\n";

long ResidentKiB() {
  FILE* status = fopen("/proc/self/status", "r");
  char line[256];
  long kib = -1;
  while (status && fgets(line, sizeof(line), status)) {
    if (sscanf(line, "RssAnon: %ld", &kib) == 1) break;
  }
  if (status) fclose(status);
  return kib;
}

// A graph captured over two streams, made into an executable; an older executable, which goes on living, gets its
// content.
void Capture(int i) {
  static CUstream origin, side;
  static CUdeviceptr memory;
  static CUgraphExec kept;
  if (!origin) {
    CU_CHECK(cuStreamCreate(&origin, CU_STREAM_NON_BLOCKING));
    CU_CHECK(cuMemAlloc(&memory, 4096));
  }
  CU_CHECK(cuStreamCreate(&side, CU_STREAM_NON_BLOCKING));
  CUevent fork, join;
  CU_CHECK(cuEventCreate(&fork, CU_EVENT_DISABLE_TIMING));
  CU_CHECK(cuEventCreate(&join, CU_EVENT_DISABLE_TIMING));
  CUgraph graph;
  CUgraphExec exec;
  CU_CHECK(cuStreamBeginCapture(origin, CU_STREAM_CAPTURE_MODE_RELAXED));
  CU_CHECK(cuEventRecord(fork, origin));
  CU_CHECK(cuStreamWaitEvent(side, fork, 0));
  CU_CHECK(cuMemsetD32Async(memory, unsigned(i), 16, origin));
  CU_CHECK(cuMemsetD32Async(memory + 1024, unsigned(i), 16, side));
  CU_CHECK(cuEventRecord(join, side));
  CU_CHECK(cuStreamWaitEvent(origin, join, 0));
  CU_CHECK(cuStreamEndCapture(origin, &graph));
  CU_CHECK(cuEventDestroy(fork));
  CU_CHECK(cuEventDestroy(join));
  CU_CHECK(cuStreamDestroy(side));
  size_t count = 0;
  CU_CHECK(cuGraphGetNodes(graph, nullptr, &count));
  EXPECT(count == 2);
  CUgraphNode nodes[2];
  CU_CHECK(cuGraphGetNodes(graph, nodes, &count));
  CUDA_MEMSET_NODE_PARAMS fill;
  CU_CHECK(cuGraphMemsetNodeGetParams(nodes[0], &fill));
  CU_CHECK(cuGraphInstantiate(&exec, graph, 0));
  // What the executable has in it stays recorded for as long as there is one, and no longer.
  for (int value = 0; value < 3; ++value) {
    fill.value = unsigned(value);
    CU_CHECK(cuGraphMemsetNodeSetParams(nodes[0], &fill));
  }
  if (!kept) CU_CHECK(cuGraphInstantiate(&kept, graph, 0));
  CUgraphExecUpdateResultInfo info;
  CU_CHECK(cuGraphExecUpdate(kept, graph, &info));
  if (i % 2) CU_CHECK(cuGraphDestroy(graph));
  CU_CHECK(cuGraphLaunch(exec, origin));
  CU_CHECK(cuGraphLaunch(kept, origin));
  CU_CHECK(cuGraphExecDestroy(exec));
  if (i % 2 == 0) CU_CHECK(cuGraphDestroy(graph));
}

// A graph that lives on has nodes added and removed, one after the other in a chain, and an executable of it is updated
// each time. Program and graph take references to a user object and give them back.
void Edit() {
  static CUgraph graph;
  static CUgraphExec exec;
  static CUdeviceptr memory;
  static CUcontext context;
  static CUgraphNode first, last;
  static CUuserObject object;
  CUDA_MEMSET_NODE_PARAMS fill = {};
  fill.elementSize = 4;
  fill.width = 16;
  fill.height = 1;
  if (!graph) {
    CU_CHECK(cuCtxGetCurrent(&context));
    CU_CHECK(cuMemAlloc(&memory, 4096));
    CU_CHECK(cuGraphCreate(&graph, 0));
    fill.dst = memory;
    CU_CHECK(cuGraphAddMemsetNode(&first, graph, nullptr, 0, &fill, context));
    CU_CHECK(cuGraphAddMemsetNode(&last, graph, &first, 1, &fill, context));
    CU_CHECK(cuGraphInstantiate(&exec, graph, 0));
    const CUhostFn nothing = [](void*) {};
    CU_CHECK(cuUserObjectCreate(&object, nullptr, nothing, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
  }
  fill.dst = memory;
  CUgraphNode next;
  CU_CHECK(cuGraphAddMemsetNode(&next, graph, &last, 1, &fill, context));
  CU_CHECK(cuGraphAddDependencies(graph, &first, &next, nullptr, 1));
  CU_CHECK(cuGraphRemoveDependencies(graph, &first, &next, nullptr, 1));
  fill.value = 7;
  CU_CHECK(cuGraphMemsetNodeSetParams(next, &fill));
  CU_CHECK(cuGraphDestroyNode(first));
  first = last;
  last = next;
  CU_CHECK(cuUserObjectRetain(object, 1));
  CU_CHECK(cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE));
  CUgraphExecUpdateResultInfo info;
  CU_CHECK(cuGraphExecUpdate(exec, graph, &info));
  CU_CHECK(cuGraphReleaseUserObject(graph, object, 1));
}

// Nodes that stay get an edge and lose it again, and a graph is captured into whose older nodes are removed.
void EditOn() {
  static CUgraph graph;
  static CUgraphExec exec;
  static CUgraphNode ends[2], older[2];
  static CUstream stream;
  static CUdeviceptr memory;
  if (!graph) {
    CU_CHECK(cuMemAlloc(&memory, 4096));
    CU_CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CU_CHECK(cuGraphCreate(&graph, 0));
    for (CUgraphNode& node : ends) CU_CHECK(cuGraphAddEmptyNode(&node, graph, nullptr, 0));
    for (CUgraphNode& node : older) CU_CHECK(cuGraphAddEmptyNode(&node, graph, nullptr, 0));
    CU_CHECK(cuGraphInstantiate(&exec, graph, 0));
  }
  CU_CHECK(cuGraphAddDependencies(graph, &ends[0], &ends[1], nullptr, 1));
  CU_CHECK(cuStreamBeginCaptureToGraph(stream, graph, older, nullptr, 2, CU_STREAM_CAPTURE_MODE_RELAXED));
  CU_CHECK(cuMemsetD32Async(memory, 1, 16, stream));
  CU_CHECK(cuMemsetD32Async(memory, 2, 16, stream));
  CUgraph same;
  CU_CHECK(cuStreamEndCapture(stream, &same));
  EXPECT(same == graph);
  CUgraphNode nodes[6];
  size_t count = 6;
  CU_CHECK(cuGraphGetNodes(graph, nodes, &count));
  EXPECT(count == 6);
  for (CUgraphNode& node : older) CU_CHECK(cuGraphDestroyNode(node));
  CU_CHECK(cuGraphExecDestroy(exec));
  CU_CHECK(cuGraphInstantiate(&exec, graph, 0));
  CU_CHECK(cuGraphRemoveDependencies(graph, &ends[0], &ends[1], nullptr, 1));
  int found = 0;
  for (const CUgraphNode node : nodes) {
    const bool known = node == ends[0] || node == ends[1] || node == older[0] || node == older[1];
    if (!known && found < 2) nodes[found++] = node;
  }
  EXPECT(found == 2);
  older[0] = nodes[0];
  older[1] = nodes[1];
}

void Round(int i) {
  CUevent event;
  CU_CHECK(cuEventCreate(&event, i % 2 ? CU_EVENT_DISABLE_TIMING : CU_EVENT_DEFAULT));
  if (i % 64 == 0) {
    CUstream stream;
    CU_CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CU_CHECK(cuEventRecord(event, stream));
    CU_CHECK(cuStreamDestroy(stream));
  }
  if (i % 128 == 0) {
    CUdeviceptr memory;
    CU_CHECK(cuMemAlloc(&memory, 256 + i % 4096));
    CU_CHECK(cuMemFree(memory));
  }
  if (i % 4096 == 0) {
    CUmodule module;
    CUfunction function;
    CU_CHECK(cuModuleLoadData(&module, kModule));
    CU_CHECK(cuModuleGetFunction(&function, module, "nothing"));
    CU_CHECK(cuModuleUnload(module));
  }
  if (i % 512 == 0) Capture(i / 512);
  if (i % 32 == 0) Edit();
  if (i % 64 == 0) EditOn();
  CU_CHECK(cuEventDestroy(event));
}

}  // namespace

int main(int argc, char** argv) {
  const int count = argc > 1 ? atoi(argv[1]) : 1000000;
  CUdevice device;
  CUcontext context;
  CU_CHECK(cuInit(0));
  CU_CHECK(cuDeviceGet(&device, 0));
  CU_CHECK(cuCtxCreate(&context, nullptr, 0, device));
  const int warm_up = count / 10;
  for (int i = 0; i < warm_up; ++i) Round(i);
  CU_CHECK(cuCtxSynchronize());
  const long before = ResidentKiB();
  for (int i = warm_up; i < count; ++i) Round(i);
  CU_CHECK(cuCtxSynchronize());
  const long growth = ResidentKiB() - before;
  fprintf(stderr, "million: %d objects, %ld KiB before, growth %ld KiB\n", count, before, growth);
  EXPECT(growth <= count / 256);
  printf("million ok\n");
  return 0;
}
