// SPDX-License-Identifier: Apache-2.0
// Conditional nodes: IF with and without a second body, WHILE with an IF inside, SWITCH; bodies built node by node and
// captured; a value that only the default sets. The graph is carried over many launches, and made anew now and then.
#include <cuda.h>

#include <vector>

#include "tests/apps/support/driver.h"

extern "C" const unsigned char graph_conditional_image[];

namespace {

CUcontext g_context;
CUfunction g_decide, g_arm, g_count_down, g_choose, g_mix;
CUdeviceptr g_state;

CUgraphNode AddKernel(CUgraph graph, CUgraphNode after, CUfunction function, void** arguments) {
  CUDA_KERNEL_NODE_PARAMS params = {};
  params.func = function;
  params.gridDimX = params.gridDimY = params.gridDimZ = 1;
  params.blockDimX = params.blockDimY = params.blockDimZ = 1;
  params.kernelParams = arguments;
  CUgraphNode node;
  CU_CHECK(cuGraphAddKernelNode(&node, graph, &after, after ? 1 : 0, &params));
  return node;
}

CUgraphNode AddMix(CUgraph graph, CUgraphNode after, unsigned factor, unsigned add) {
  void* arguments[] = {&g_state, &factor, &add};
  return AddKernel(graph, after, g_mix, arguments);
}

CUgraphNode AddConditional(CUgraph graph, CUgraphNode after, CUgraphConditionalHandle handle,
                           CUgraphConditionalNodeType type, unsigned size, std::vector<CUgraph>* bodies) {
  CUgraphNodeParams params = {};
  params.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
  params.conditional.handle = handle;
  params.conditional.type = type;
  params.conditional.size = size;
  params.conditional.ctx = g_context;
  CUgraphNode node;
  CU_CHECK(cuGraphAddNode(&node, graph, &after, nullptr, after ? 1 : 0, &params));
  bodies->assign(params.conditional.phGraph_out, params.conditional.phGraph_out + size);
  CUgraphNodeType is;
  CU_CHECK(cuGraphNodeGetType(node, &is));
  APP_CHECK(is == CU_GRAPH_NODE_TYPE_CONDITIONAL);
  CUgraphNode again;
  APP_CHECK(cuGraphAddNode(&again, graph, nullptr, nullptr, 0, &params) == CUDA_ERROR_INVALID_VALUE);  // used
  return node;
}

CUgraphConditionalHandle NewHandle(CUgraph graph, unsigned value, unsigned flags) {
  CUgraphConditionalHandle handle = 0;
  CU_CHECK(cuGraphConditionalHandleCreate(&handle, graph, g_context, value, flags));
  return handle;
}

CUgraph Build(CUstream stream, unsigned variant) {
  CUgraph graph;
  CU_CHECK(cuGraphCreate(&graph, 0));
  std::vector<CUgraph> bodies;

  // state % 3 == 0 ? state * 5 + variant : state + 7
  CUgraphConditionalHandle handle = NewHandle(graph, 0, 0);
  void* decide[] = {&handle, &g_state};
  CUgraphNode node = AddKernel(graph, nullptr, g_decide, decide);
  node = AddConditional(graph, node, handle, CU_GRAPH_COND_TYPE_IF, 2, &bodies);
  AddMix(bodies[0], nullptr, 5, variant);
  AddMix(bodies[1], nullptr, 1, 7);

  // state % 6 times; and inside, if the topmost bit is set, state * 3 + 1
  CUgraphConditionalHandle loop = NewHandle(graph, 0, 0), inner = NewHandle(graph, 0, CU_GRAPH_COND_ASSIGN_DEFAULT);
  void* arm[] = {&loop, &g_state};
  node = AddKernel(graph, node, g_arm, arm);
  node = AddConditional(graph, node, loop, CU_GRAPH_COND_TYPE_WHILE, 1, &bodies);
  const CUgraph body = bodies[0];
  void* count[] = {&loop, &inner, &g_state};
  CUgraphNode in_body = AddKernel(body, nullptr, g_count_down, count);
  AddConditional(body, in_body, inner, CU_GRAPH_COND_TYPE_IF, 1, &bodies);
  AddMix(bodies[0], nullptr, 3, 1);

  // One of four, or none; the last one is captured.
  CUgraphConditionalHandle choice = NewHandle(graph, 9, CU_GRAPH_COND_ASSIGN_DEFAULT);
  void* choose[] = {&choice, &g_state};
  node = AddKernel(graph, node, g_choose, choose);
  node = AddConditional(graph, node, choice, CU_GRAPH_COND_TYPE_SWITCH, 4, &bodies);
  for (unsigned i = 0; i < 3; ++i) AddMix(bodies[i], nullptr, 1, 100 + i);
  CU_CHECK(cuStreamBeginCaptureToGraph(stream, bodies[3], nullptr, nullptr, 0, CU_STREAM_CAPTURE_MODE_RELAXED));
  unsigned factor = 9, add = variant;
  void* mix[] = {&g_state, &factor, &add};
  CU_CHECK(cuLaunchKernel(g_mix, 1, 1, 1, 1, 1, 1, 0, stream, mix, nullptr));
  CUgraph captured;
  CU_CHECK(cuStreamEndCapture(stream, &captured));
  APP_CHECK(captured == bodies[3]);

  // Nobody sets this one: the default counts at every launch.
  CUgraphConditionalHandle fixed = NewHandle(graph, 1, CU_GRAPH_COND_ASSIGN_DEFAULT);
  AddConditional(graph, node, fixed, CU_GRAPH_COND_TYPE_IF, 1, &bodies);
  AddMix(bodies[0], nullptr, 1, 1000);
  APP_CHECK(cuGraphDestroy(bodies[0]) == CUDA_ERROR_INVALID_VALUE);
  CUgraph clone;
  APP_CHECK(cuGraphClone(&clone, graph) == CUDA_ERROR_NOT_SUPPORTED);
  return graph;
}

unsigned Expected(unsigned state, unsigned variant) {
  state = state % 3 == 0 ? state * 5 + variant : state + 7;
  for (unsigned left = state % 6; left > 0; --left) {
    state = state * 1664525u + 1013904223u;
    if (state >> 31) state = state * 3 + 1;
  }
  const unsigned choice = state % 5;
  if (choice < 3) state += 100 + choice;
  if (choice == 3) state = state * 9 + variant;
  return state + 1000;
}

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {40, 1});
  CU_CHECK(cuInit(0));
  CU_CHECK(cuDevicePrimaryCtxRetain(&g_context, 0));
  CU_CHECK(cuCtxSetCurrent(g_context));
  CUmodule module;
  CU_CHECK(cuModuleLoadData(&module, graph_conditional_image));
  CU_CHECK(cuModuleGetFunction(&g_decide, module, "Decide"));
  CU_CHECK(cuModuleGetFunction(&g_arm, module, "Arm"));
  CU_CHECK(cuModuleGetFunction(&g_count_down, module, "CountDown"));
  CU_CHECK(cuModuleGetFunction(&g_choose, module, "Choose"));
  CU_CHECK(cuModuleGetFunction(&g_mix, module, "Mix"));
  CU_CHECK(cuMemAlloc(&g_state, 8));
  unsigned expected = unsigned(options.size);
  CU_CHECK(cuMemcpyHtoD(g_state, &expected, 4));
  CU_CHECK(cuCtxSynchronize());  // the stream does not wait for the default one
  CUstream stream;
  CU_CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));

  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  unsigned variant = 0;
  for (int step = 1; step <= options.steps; ++step) {
    if (step % 7 == 1) {
      if (graph) {
        CU_CHECK(cuGraphExecDestroy(exec));
        CU_CHECK(cuGraphDestroy(graph));
      }
      variant = unsigned(step);
      graph = Build(stream, variant);
      CU_CHECK(cuGraphInstantiate(&exec, graph, 0));
      CUgraphExec second;
      APP_CHECK(cuGraphInstantiate(&second, graph, 0) == CUDA_ERROR_NOT_SUPPORTED);
    }
    for (int i = 0; i < 2; ++i) {
      CU_CHECK(cuGraphLaunch(exec, stream));
      expected = Expected(expected, variant);
    }
    CU_CHECK(cuStreamSynchronize(stream));
    unsigned state;
    CU_CHECK(cuMemcpyDtoH(&state, g_state, 4));
    APP_CHECK(state == expected);
    printf("step %d: %08x\n", step, state);
    app::Step(step);
  }
  return 0;
}
