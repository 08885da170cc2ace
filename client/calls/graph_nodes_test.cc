// SPDX-License-Identifier: Apache-2.0
// Nodes with parameters: the message that each type makes, what the log keeps of it, and what is refused here.
#include <cuda.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/calls/testing/custom_fixture.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"
#include "proto/codec/decode_as.h"

namespace cuda_remote::client {
namespace {

// An address of device memory, which nobody looks up.
constexpr uint64_t kDevice = driverabi::kReservationBase;

void First(void*) {}
void Second(void*) {}

class GraphNodesTest : public CustomTest {
 protected:
  void SetUp() override {
    CustomTest::SetUp();
    ASSERT_EQ(cuGraphCreate(&graph_, 0), CUDA_SUCCESS);
    Sent();
  }
  void TearDown() override {
    for (const uint32_t call : {uint32_t(kCall_cuGraphAddNode_v2), uint32_t(kCall_cuGraphNodeSetParams),
                                uint32_t(kCall_cuGraphExecNodeSetParams), uint32_t(kOpGraphNodeParams)})
      server_->On(call, FakeServer::Answer());
    EXPECT_EQ(cuGraphDestroy(graph_), CUDA_SUCCESS);
    EXPECT_EQ(Session::Get()->lost(), CUDA_SUCCESS);
  }

  // The only request that was sent since the last time, as one of this call. `bytes` holds it, for its views.
  template <typename Request>
  void Only(Request* request, uint64_t context = HandleOf(context_)) {
    const std::vector<FakeServer::Request> requests = SentRequests();
    ASSERT_EQ(requests.size(), 1u);
    bytes_ = requests[0].message;
    *request = {};
    ASSERT_TRUE(wire::DecodeAs(requests[0].header.call, bytes_, request)) << requests[0].header.call;
    EXPECT_EQ(requests[0].header.context_or_result, SlotOf(context));
  }

  // How the server answers questions about a node's parameters. Checks which it is asked about.
  void AnswerParams(CUgraphNode node, int type, const std::function<void(wire::NodeParams*)>& fill) {
    server_->On(kOpGraphNodeParams, [=](const FakeServer::Request& request) {
      wire::OpGraphNodeParams_Request in;
      wire::OpGraphNodeParams_Reply out;
      EXPECT_TRUE(in.Decode(request.message));
      EXPECT_EQ(in.node, HandleOf(node));
      EXPECT_EQ(in.type, type);
      fill(&out.params);
      return FakeServer::Answer(CUDA_SUCCESS, Encoded(out));
    });
  }

  CUgraphNode Empty(CUgraph graph) {
    CUgraphNode node = nullptr;
    CUgraphNodeParams params{};
    params.type = CU_GRAPH_NODE_TYPE_EMPTY;
    EXPECT_EQ(cuGraphAddNode(&node, graph, nullptr, nullptr, 0, &params), CUDA_SUCCESS);
    return node;
  }
  CUgraphExec Executable() {
    CUgraphExec exec = nullptr;
    EXPECT_EQ(cuGraphInstantiate(&exec, graph_, 0), CUDA_SUCCESS);
    return exec;
  }
  // What the log has for an object: the last parameters that were set of it. Empty: none.
  std::string Setting(Kind kind, uint64_t object, uint32_t call) {
    ReaderLock lock(&Session::Get()->objects().mutex());
    std::string found;
    for (const replay::Record* record : Session::Get()->objects().log().InOrder()) {
      if (record->modifies && record->object == replay::ObjectKey{kind, object} && record->header.call == call)
        found = record->message;
    }
    return found;
  }

  // Makes the calls, one after the other, of which each is to be refused so, and none sent.
  struct Refused {
    const char* what;
    std::function<CUresult()> call;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
  };
  void ExpectRefused(const std::vector<Refused>& all) {
    Sent();
    const uint64_t records = Records();
    for (const Refused& one : all) {
      EXPECT_EQ(one.call(), one.result) << one.what;
      EXPECT_EQ(Sent(), Calls()) << one.what;
    }
    EXPECT_EQ(Records(), records);
  }

  CUgraph graph_ = nullptr;
  std::string bytes_;
};

CUDA_KERNEL_NODE_PARAMS Launch(CUfunction function, void** parameters) {
  CUDA_KERNEL_NODE_PARAMS params{};
  params.func = function;
  params.gridDimX = 1;
  params.gridDimY = 2;
  params.gridDimZ = 3;
  params.blockDimX = 4;
  params.blockDimY = 5;
  params.blockDimZ = 6;
  params.sharedMemBytes = 7;
  params.kernelParams = parameters;
  return params;
}

void ExpectLaunch(const wire::NodeParams& params, uint64_t function, int value) {
  EXPECT_EQ(params.type, CU_GRAPH_NODE_TYPE_KERNEL);
  EXPECT_EQ(params.function, function);
  EXPECT_EQ(params.grid_x, 1u);
  EXPECT_EQ(params.grid_y, 2u);
  EXPECT_EQ(params.grid_z, 3u);
  EXPECT_EQ(params.block_x, 4u);
  EXPECT_EQ(params.block_y, 5u);
  EXPECT_EQ(params.block_z, 6u);
  EXPECT_EQ(params.shared_bytes, 7u);
  EXPECT_EQ(params.params, Bytes(value));
}

// A device copy of one row.
CUDA_MEMCPY3D Row(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  CUDA_MEMCPY3D copy{};
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = from;
  copy.dstDevice = to;
  copy.WidthInBytes = bytes;
  copy.Height = copy.Depth = 1;
  return copy;
}

TEST_F(GraphNodesTest, AKernelNodeIsAddedAfterItsDependencies) {
  const OneKernel one(server_, sizeof(int));
  int value = 42;
  void* parameters[] = {&value};
  const CUgraphNode before[] = {Empty(graph_), Empty(graph_)};
  const CUDA_KERNEL_NODE_PARAMS params = Launch(one.kernel(), parameters);
  int attribute;
  ASSERT_EQ(cuFuncGetAttribute(&attribute, CU_FUNC_ATTRIBUTE_NUM_REGS, one.kernel()), CUDA_SUCCESS);  // now it is known
  Sent();
  CUgraphNode node = nullptr;
  ASSERT_EQ(cuGraphAddKernelNode(&node, graph_, before, 2, &params), CUDA_SUCCESS);
  wire::cuGraphAddNode_v2_Request request;
  Only(&request);
  EXPECT_EQ(request.node, HandleOf(node));
  EXPECT_EQ(request.graph, HandleOf(graph_));
  EXPECT_EQ(request.dependencies, (std::vector<uint64_t>{HandleOf(before[0]), HandleOf(before[1])}));
  EXPECT_EQ(request.edges, "");
  ExpectLaunch(request.params, HandleOf(one.kernel()), 42);
  EXPECT_EQ(request.params.context, 0u) << "a function is of one context";
  EXPECT_EQ(KindOf(HandleOf(node)), Kind::kGraphNode);
  EXPECT_TRUE(InLog(Kind::kGraphNode, HandleOf(node)));

  // Edges go as they are.
  CUgraphEdgeData edges[2] = {};
  edges[1].from_port = 1;
  edges[1].type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
  CUgraphNodeParams any{};
  any.type = CU_GRAPH_NODE_TYPE_KERNEL;
  memcpy(static_cast<void*>(&any.kernel), &params, sizeof params);
  value = 43;
  ASSERT_EQ(cuGraphAddNode(&node, graph_, before, edges, 2, &any), CUDA_SUCCESS);
  Only(&request);
  EXPECT_EQ(request.edges, std::string(reinterpret_cast<const char*>(edges), sizeof edges));
  ExpectLaunch(request.params, HandleOf(one.kernel()), 43);

  // The first version's struct ends before the kernel and the context.
  CUDA_KERNEL_NODE_PARAMS_v1 old;
  memcpy(&old, &params, sizeof old);
  ASSERT_EQ(Custom_cuGraphAddKernelNode(&node, graph_, nullptr, 0, &old), CUDA_SUCCESS);
  Only(&request);
  ExpectLaunch(request.params, HandleOf(one.kernel()), 43);
  EXPECT_TRUE(request.dependencies.empty());

  // It cannot be made again without its function.
  {
    const OneKernel two(server_, sizeof(int));
    const CUDA_KERNEL_NODE_PARAMS of_two = Launch(two.kernel(), parameters);
    ASSERT_EQ(cuGraphAddKernelNode(&node, graph_, nullptr, 0, &of_two), CUDA_SUCCESS);
    EXPECT_TRUE(InLog(Kind::kGraphNode, HandleOf(node)));
  }
  EXPECT_FALSE(InLog(Kind::kGraphNode, HandleOf(node)));
}

TEST_F(GraphNodesTest, AKernelNodeOfALibrarysKernelNamesItsContext) {
  const OneKernel other(server_, sizeof(int));  // for what the server says of kernels
  CUlibrary library = nullptr;
  CUkernel kernel = nullptr;
  ASSERT_EQ(cuLibraryLoadData(&library, OneKernel::kImage, nullptr, nullptr, 0, nullptr, nullptr, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuLibraryGetKernel(&kernel, library, "kernel"), CUDA_SUCCESS);
  int value = 42;
  void* parameters[] = {&value};
  CUDA_KERNEL_NODE_PARAMS params = Launch(nullptr, parameters);
  params.kern = kernel;
  CUgraphNode node = nullptr;
  wire::cuGraphAddNode_v2_Request request;
  ASSERT_EQ(cuGraphAddKernelNode(&node, graph_, nullptr, 0, &params), CUDA_SUCCESS);
  server_->Take();
  ASSERT_EQ(cuGraphAddKernelNode(&node, graph_, nullptr, 0, &params), CUDA_SUCCESS);
  Only(&request);
  ExpectLaunch(request.params, HandleOf(kernel), 42);
  EXPECT_EQ(request.params.context, HandleOf(context_)) << "a replay is told which was current";
  CUcontext second = nullptr;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&second, 1), CUDA_SUCCESS);
  Sent();
  params.ctx = second;
  ASSERT_EQ(cuGraphAddKernelNode(&node, graph_, nullptr, 0, &params), CUDA_SUCCESS);
  Only(&request);
  EXPECT_EQ(request.params.context, HandleOf(second));
  EXPECT_TRUE(InLog(Kind::kGraphNode, HandleOf(node)));
  EXPECT_EQ(cuDevicePrimaryCtxReset(1), CUDA_SUCCESS);
  EXPECT_FALSE(InLog(Kind::kGraphNode, HandleOf(node))) << "it needed that context";
  ExpectRefused({{"a context that is gone", [&] { return cuGraphAddKernelNode(&node, graph_, nullptr, 0, &params); },
                  CUDA_ERROR_INVALID_CONTEXT}});
  EXPECT_EQ(cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
  EXPECT_EQ(cuLibraryUnload(library), CUDA_SUCCESS);
}

TEST_F(GraphNodesTest, KernelNodesThatAreRefusedHere) {
  const OneKernel one(server_, sizeof(int));
  int value = 42;
  void* parameters[] = {&value};
  void* none[] = {nullptr};
  char block[8] = {};
  size_t bytes = sizeof block;
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, block, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
  const CUDA_KERNEL_NODE_PARAMS good = Launch(one.kernel(), parameters);
  CUgraphNode node = nullptr;
  ASSERT_EQ(cuGraphAddKernelNode(&node, graph_, nullptr, 0, &good), CUDA_SUCCESS);
  const CUgraphExec exec = Executable();
  CUgraph gone = nullptr;
  ASSERT_EQ(cuGraphCreate(&gone, 0), CUDA_SUCCESS);
  const CUgraphNode gone_node = Empty(gone);
  ASSERT_EQ(cuGraphDestroy(gone), CUDA_SUCCESS);
  const CUgraphNode no_node = reinterpret_cast<CUgraphNode>(graph_);
  CUgraphNode made = nullptr;
  const auto add = [&](CUgraph graph, const CUgraphNode* after, size_t count, const CUDA_KERNEL_NODE_PARAMS* params) {
    return cuGraphAddKernelNode(&made, graph, after, count, params);
  };
  const auto with = [&](const std::function<void(CUDA_KERNEL_NODE_PARAMS*)>& change) {
    CUDA_KERNEL_NODE_PARAMS params = good;
    change(&params);
    return add(graph_, nullptr, 0, &params);
  };
  ExpectRefused({
      {"no place for the node", [&] { return cuGraphAddKernelNode(nullptr, graph_, nullptr, 0, &good); }},
      {"no parameters", [&] { return add(graph_, nullptr, 0, nullptr); }},
      {"no graph", [&] { return add(nullptr, nullptr, 0, &good); }},
      {"a graph that is gone", [&] { return add(gone, nullptr, 0, &good); }},
      {"a node for a graph", [&] { return add(reinterpret_cast<CUgraph>(node), nullptr, 0, &good); }},
      {"no list", [&] { return add(graph_, nullptr, 1, &good); }},
      {"a graph for a node", [&] { return add(graph_, &no_node, 1, &good); }},
      {"a node that is gone", [&] { return add(graph_, &gone_node, 1, &good); }},
      {"no function", [&] { return with([](auto* p) { p->func = nullptr; }); }, CUDA_ERROR_INVALID_HANDLE},
      {"a module for a function",
       [&] { return with([&](auto* p) { p->func = reinterpret_cast<CUfunction>(one.module()); }); },
       CUDA_ERROR_INVALID_HANDLE},
      {"a parameter that is null", [&] { return with([&](auto* p) { p->kernelParams = none; }); }},
      {"parameters in both ways", [&] { return with([&](auto* p) { p->extra = extra; }); }},
      {"too long a block", [&] { return with([&](auto* p) { p->kernelParams = nullptr, p->extra = extra; }); }},
      {"a stream for a context", [&] { return with([&](auto* p) { p->ctx = reinterpret_cast<CUcontext>(graph_); }); },
       CUDA_ERROR_INVALID_CONTEXT},
      {"set: no node", [&] { return cuGraphKernelNodeSetParams(nullptr, &good); }},
      {"set: a node that is gone", [&] { return cuGraphKernelNodeSetParams(gone_node, &good); }},
      {"set: no parameters", [&] { return cuGraphKernelNodeSetParams(node, nullptr); }},
      {"exec: none", [&] { return cuGraphExecKernelNodeSetParams(nullptr, node, &good); }},
      {"exec: a graph",
       [&] { return cuGraphExecKernelNodeSetParams(reinterpret_cast<CUgraphExec>(graph_), node, &good); }},
      {"exec: a node that is gone", [&] { return cuGraphExecKernelNodeSetParams(exec, gone_node, &good); }},
      {"exec: no parameters", [&] { return cuGraphExecKernelNodeSetParams(exec, node, nullptr); }},
      {"get: no node",
       [&] {
         auto p = good;
         return cuGraphKernelNodeGetParams(nullptr, &p);
       }},
      {"get: no place", [&] { return cuGraphKernelNodeGetParams(node, nullptr); }},
  });
  EXPECT_EQ(made, nullptr);
  EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxSetCurrent(nullptr), CUDA_SUCCESS);
  CUDA_MEMCPY3D copy = Row(kDevice, kDevice, 1);
  ExpectRefused({{"no context at all", [&] { return cuGraphAddMemcpyNode(&made, graph_, nullptr, 0, &copy, nullptr); },
                  CUDA_ERROR_INVALID_CONTEXT}});
}

TEST_F(GraphNodesTest, WhatTheServerRefusesLeavesNothing) {
  const OneKernel one(server_, sizeof(int));
  int value = 42;
  void* parameters[] = {&value};
  const CUDA_KERNEL_NODE_PARAMS params = Launch(one.kernel(), parameters);
  CUgraphNode node = nullptr, made = nullptr;
  ASSERT_EQ(cuGraphAddKernelNode(&node, graph_, nullptr, 0, &params), CUDA_SUCCESS);
  const CUgraphExec exec = Executable();
  const uint64_t records = Records();
  uint64_t offered = 0;
  server_->On(kCall_cuGraphAddNode_v2, [&offered](const FakeServer::Request& request) {
    wire::cuGraphAddNode_v2_Request in;
    EXPECT_TRUE(in.Decode(request.message));
    offered = in.node;
    return FakeServer::Answer(CUDA_ERROR_NOT_SUPPORTED);
  });
  server_->On(kCall_cuGraphNodeSetParams, CUDA_ERROR_INVALID_VALUE);
  server_->On(kCall_cuGraphExecNodeSetParams, CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  EXPECT_EQ(cuGraphAddKernelNode(&made, graph_, nullptr, 0, &params), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(made, nullptr);
  EXPECT_NE(offered, 0u);
  {
    ReaderLock lock(&Session::Get()->objects().mutex());
    EXPECT_EQ(Session::Get()->objects().handles().Find(Kind::kGraphNode, offered), nullptr);
  }
  EXPECT_EQ(cuGraphKernelNodeSetParams(node, &params), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuGraphExecKernelNodeSetParams(exec, node, &params), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  EXPECT_EQ(Records(), records);
  EXPECT_EQ(Setting(Kind::kGraphNode, HandleOf(node), kCall_cuGraphNodeSetParams), "");
  EXPECT_EQ(Setting(Kind::kGraphExec, HandleOf(exec), kCall_cuGraphExecNodeSetParams), "");
  EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
}

TEST_F(GraphNodesTest, TheLastParametersThatWereSetStayInTheLog) {
  const OneKernel one(server_, sizeof(int));
  int value = 1;
  void* parameters[] = {&value};
  const CUDA_KERNEL_NODE_PARAMS params = Launch(one.kernel(), parameters);
  CUDA_KERNEL_NODE_PARAMS_v1 old;
  memcpy(&old, &params, sizeof old);
  CUgraphNodeParams any{};
  any.type = CU_GRAPH_NODE_TYPE_KERNEL;
  memcpy(static_cast<void*>(&any.kernel), &params, sizeof params);
  CUgraphNode node = nullptr, other = nullptr;
  ASSERT_EQ(cuGraphAddKernelNode(&node, graph_, nullptr, 0, &params), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphAddKernelNode(&other, graph_, nullptr, 0, &params), CUDA_SUCCESS);
  Sent();
  const uint64_t records = Records();
  for (const std::function<CUresult()>& set :
       std::vector<std::function<CUresult()>>{[&] { return cuGraphKernelNodeSetParams(node, &params); },
                                              [&] { return Custom_cuGraphKernelNodeSetParams(node, &old); },
                                              [&] { return cuGraphNodeSetParams(node, &any); }}) {
    ++value;
    EXPECT_EQ(set(), CUDA_SUCCESS);
    wire::cuGraphNodeSetParams_Request request;
    Only(&request);
    EXPECT_EQ(request.node, HandleOf(node));
    ExpectLaunch(request.params, HandleOf(one.kernel()), value);
    EXPECT_EQ(Setting(Kind::kGraphNode, HandleOf(node), kCall_cuGraphNodeSetParams), bytes_);
  }
  EXPECT_EQ(Records(), records + 1) << "one for the node";

  const CUgraphExec exec = Executable();
  Sent();
  const uint64_t with_exec = Records();
  for (const CUgraphNode which : {node, other}) {
    for (const std::function<CUresult()>& set : std::vector<std::function<CUresult()>>{
             [&] { return cuGraphExecKernelNodeSetParams(exec, which, &params); },
             [&] { return Custom_cuGraphExecKernelNodeSetParams(exec, which, &old); },
             [&] { return cuGraphExecNodeSetParams(exec, which, &any); }}) {
      ++value;
      EXPECT_EQ(set(), CUDA_SUCCESS);
      wire::cuGraphExecNodeSetParams_Request request;
      Only(&request);
      EXPECT_EQ(request.exec, HandleOf(exec));
      EXPECT_EQ(request.node, HandleOf(which));
      ExpectLaunch(request.params, HandleOf(one.kernel()), value);
      EXPECT_EQ(Setting(Kind::kGraphExec, HandleOf(exec), kCall_cuGraphExecNodeSetParams), bytes_);
    }
  }
  EXPECT_EQ(Records(), with_exec + 2) << "one for each node in the executable";
  EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
}

TEST_F(GraphNodesTest, TheParametersOfAKernelNodeStayWhereTheyAre) {
  const OneKernel one(server_, sizeof(int));
  int value = 42;
  void* parameters[] = {&value};
  const CUDA_KERNEL_NODE_PARAMS params = Launch(one.kernel(), parameters);
  CUgraphNode node = nullptr, other = nullptr;
  ASSERT_EQ(cuGraphAddKernelNode(&node, graph_, nullptr, 0, &params), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphAddKernelNode(&other, graph_, nullptr, 0, &params), CUDA_SUCCESS);
  std::string block = Bytes(5);
  uint64_t function = HandleOf(one.kernel()), context = 0;
  const auto fill = [&](wire::NodeParams* p) {
    p->function = function;
    p->grid_x = 11, p->grid_y = 12, p->grid_z = 13;
    p->block_x = 14, p->block_y = 15, p->block_z = 16;
    p->shared_bytes = 17;
    p->params = block;
    p->context = context;
  };
  AnswerParams(node, CU_GRAPH_NODE_TYPE_KERNEL, fill);
  CUDA_KERNEL_NODE_PARAMS seen;
  memset(static_cast<void*>(&seen), 0xff, sizeof seen);
  ASSERT_EQ(cuGraphKernelNodeGetParams(node, &seen), CUDA_SUCCESS);
  EXPECT_EQ(seen.func, one.kernel());
  EXPECT_EQ(seen.kern, nullptr);
  EXPECT_EQ(seen.ctx, nullptr);
  EXPECT_EQ(seen.extra, nullptr);
  EXPECT_EQ(seen.gridDimX, 11u);
  EXPECT_EQ(seen.gridDimY, 12u);
  EXPECT_EQ(seen.gridDimZ, 13u);
  EXPECT_EQ(seen.blockDimX, 14u);
  EXPECT_EQ(seen.blockDimY, 15u);
  EXPECT_EQ(seen.blockDimZ, 16u);
  EXPECT_EQ(seen.sharedMemBytes, 17u);
  EXPECT_EQ(*static_cast<int*>(seen.kernelParams[0]), 5);
  // What was answered for another node does not touch them.
  block = Bytes(6);
  AnswerParams(other, CU_GRAPH_NODE_TYPE_KERNEL, fill);
  CUDA_KERNEL_NODE_PARAMS_v1 old;
  ASSERT_EQ(Custom_cuGraphKernelNodeGetParams(other, &old), CUDA_SUCCESS);
  EXPECT_EQ(*static_cast<int*>(old.kernelParams[0]), 6);
  EXPECT_EQ(*static_cast<int*>(seen.kernelParams[0]), 5);

  // A library's kernel has a place of its own in the second version's struct, as the context has.
  CUlibrary library = nullptr;
  CUkernel kernel = nullptr;
  ASSERT_EQ(cuLibraryLoadData(&library, OneKernel::kImage, nullptr, nullptr, 0, nullptr, nullptr, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuLibraryGetKernel(&kernel, library, "kernel"), CUDA_SUCCESS);
  function = HandleOf(kernel);
  context = HandleOf(context_);
  AnswerParams(node, CU_GRAPH_NODE_TYPE_KERNEL, fill);
  ASSERT_EQ(cuGraphKernelNodeGetParams(node, &seen), CUDA_SUCCESS);
  EXPECT_EQ(seen.func, nullptr);
  EXPECT_EQ(seen.kern, kernel);
  EXPECT_EQ(seen.ctx, context_);
  EXPECT_EQ(*static_cast<int*>(seen.kernelParams[0]), 6);
  ASSERT_EQ(Custom_cuGraphKernelNodeGetParams(node, &old), CUDA_SUCCESS);
  EXPECT_EQ(old.func, reinterpret_cast<CUfunction>(kernel));
  // No server that means well answers so.
  block = "xyz";
  EXPECT_EQ(cuGraphKernelNodeGetParams(node, &seen), CUDA_ERROR_UNKNOWN);
  server_->On(kOpGraphNodeParams, CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuGraphKernelNodeGetParams(node, &seen), CUDA_ERROR_INVALID_VALUE) << "a node of another type";
  EXPECT_EQ(cuLibraryUnload(library), CUDA_SUCCESS);
}

// What was answered goes with the node, or with its graph.
TEST_F(GraphNodesTest, NoArraysAreLeftOfNodesThatAreGone) {
  const OneKernel one(server_, sizeof(int));
  int value = 42;
  void* parameters[] = {&value};
  const CUDA_KERNEL_NODE_PARAMS params = Launch(one.kernel(), parameters);
  const uint64_t function = HandleOf(one.kernel());
  const std::string block = Bytes(5);
  const std::vector<CUstreamBatchMemOpParams> operations(3);
  server_->On(kOpGraphNodeParams, [&](const FakeServer::Request&) {
    wire::OpGraphNodeParams_Reply out;
    out.params.function = function;
    out.params.params = block;
    out.params.memory_operations = {reinterpret_cast<const char*>(operations.data()),
                                    operations.size() * sizeof operations[0]};
    return FakeServer::Answer(CUDA_SUCCESS, Encoded(out));
  });
  const AskedNodes& asked = Session::Get()->graphs().asked_nodes();
  const auto ask = [&](CUgraph graph) {
    CUgraphNode node = nullptr;
    CUDA_KERNEL_NODE_PARAMS its, again;
    CUDA_BATCH_MEM_OP_NODE_PARAMS batch;
    EXPECT_EQ(cuGraphAddKernelNode(&node, graph, nullptr, 0, &params), CUDA_SUCCESS);
    EXPECT_EQ(cuGraphKernelNodeGetParams(node, &its), CUDA_SUCCESS);
    EXPECT_EQ(cuGraphKernelNodeGetParams(node, &again), CUDA_SUCCESS);
    EXPECT_EQ(its.kernelParams, again.kernelParams);
    EXPECT_EQ(its.kernelParams[0], again.kernelParams[0]);
    EXPECT_EQ(cuGraphBatchMemOpNodeGetParams(node, &batch), CUDA_SUCCESS);
    EXPECT_EQ(batch.count, 3u);
    return node;
  };
  const size_t before = asked.count();
  for (int i = 0; i < 100; ++i) {
    const CUgraphNode node = ask(graph_);
    EXPECT_EQ(asked.count(), before + 1);
    EXPECT_EQ(cuGraphDestroyNode(node), CUDA_SUCCESS);
    EXPECT_EQ(asked.count(), before);
  }
  for (int i = 0; i < 100; ++i) {
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    ASSERT_EQ(cuGraphCreate(&graph, 0), CUDA_SUCCESS);
    ask(graph);
    const CUgraphNode removed = ask(graph);
    EXPECT_EQ(asked.count(), before + 2);
    // The log keeps the graph and the node for the executable.
    if (i % 2 == 0) {
      ASSERT_EQ(cuGraphInstantiate(&exec, graph, 0), CUDA_SUCCESS);
      EXPECT_EQ(cuGraphDestroyNode(removed), CUDA_SUCCESS);
      EXPECT_EQ(asked.count(), before + 1);
    }
    EXPECT_EQ(cuGraphDestroy(graph), CUDA_SUCCESS);
    EXPECT_EQ(asked.count(), before);
    if (exec) {
      EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
    }
  }
  EXPECT_EQ(asked.count(), before);
}

TEST_F(GraphNodesTest, ThreadsAskForParametersOfTheirOwnNodes) {
  const OneKernel one(server_, sizeof(int));
  int value = 0;
  void* parameters[] = {&value};
  const CUDA_KERNEL_NODE_PARAMS params = Launch(one.kernel(), parameters);
  constexpr int kThreads = 2, kNodes = 200;
  // The answer is the node's own handle.
  const uint64_t function = HandleOf(one.kernel());
  server_->On(kOpGraphNodeParams, [function](const FakeServer::Request& request) {
    wire::OpGraphNodeParams_Request in;
    wire::OpGraphNodeParams_Reply out;
    EXPECT_TRUE(in.Decode(request.message));
    const std::string block = Bytes(uint32_t(SlotOf(in.node)));
    out.params.function = function;
    out.params.params = block;
    return FakeServer::Answer(CUDA_SUCCESS, Encoded(out));
  });
  CUgraph graphs[kThreads];
  std::vector<CUgraphNode> nodes[kThreads];
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    ASSERT_EQ(cuGraphCreate(&graphs[t], 0), CUDA_SUCCESS);
    threads.emplace_back([&, t] {
      EXPECT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
      std::vector<void**> seen;
      for (int i = 0; i < kNodes; ++i) {
        CUgraphNode node = nullptr;
        CUDA_KERNEL_NODE_PARAMS its;
        EXPECT_EQ(
            cuGraphAddKernelNode(&node, graphs[t], nodes[t].data(), std::min<size_t>(nodes[t].size(), 1), &params),
            CUDA_SUCCESS);
        nodes[t].push_back(node);
        ASSERT_EQ(cuGraphKernelNodeGetParams(node, &its), CUDA_SUCCESS);
        seen.push_back(its.kernelParams);
      }
      for (int i = 0; i < kNodes; ++i) {
        EXPECT_EQ(*static_cast<uint32_t*>(seen[size_t(i)][0]), SlotOf(HandleOf(nodes[t][size_t(i)])));
      }
    });
  }
  for (std::thread& one_thread : threads) one_thread.join();
  std::set<CUgraphNode> all;
  for (int t = 0; t < kThreads; ++t) {
    for (const CUgraphNode node : nodes[t]) EXPECT_TRUE(InLog(Kind::kGraphNode, HandleOf(node)));
    all.insert(nodes[t].begin(), nodes[t].end());
    EXPECT_EQ(cuGraphDestroy(graphs[t]), CUDA_SUCCESS);
    EXPECT_FALSE(InLog(Kind::kGraphNode, HandleOf(nodes[t][0])));
  }
  EXPECT_EQ(all.size(), size_t(kThreads * kNodes));
}

TEST_F(GraphNodesTest, CopiesOfMemoryThatTheServerReaches) {
  CUDA_MEMCPY3D copy = Row(kDevice, kDevice + 4096, 100);
  CUgraphNode node = nullptr;
  wire::cuGraphAddNode_v2_Request request;
  ASSERT_EQ(cuGraphAddMemcpyNode(&node, graph_, nullptr, 0, &copy, nullptr), CUDA_SUCCESS);
  Only(&request);
  EXPECT_EQ(request.node, HandleOf(node));
  EXPECT_EQ(request.params.type, CU_GRAPH_NODE_TYPE_MEMCPY);
  EXPECT_EQ(request.params.copy, Bytes(copy));
  EXPECT_EQ(request.params.context, HandleOf(context_));
  // Pinned memory, and what only looks like host memory, is named by its address.
  void* pinned = nullptr;
  ASSERT_EQ(cuMemHostAlloc(&pinned, 4096, 0), CUDA_SUCCESS);
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuMemAlloc(&memory, 4096), CUDA_SUCCESS);
  Sent();
  CUDA_MEMCPY3D host = copy;
  host.srcMemoryType = CU_MEMORYTYPE_HOST;
  host.srcHost = static_cast<char*>(pinned) + 100;
  host.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  host.dstDevice = memory + 8;
  ASSERT_EQ(cuGraphAddMemcpyNode(&node, graph_, nullptr, 0, &host, nullptr), CUDA_SUCCESS);
  Only(&request);
  CUDA_MEMCPY3D sent;
  ASSERT_EQ(request.params.copy.size(), sizeof sent);
  memcpy(&sent, request.params.copy.data(), sizeof sent);
  EXPECT_EQ(sent.srcMemoryType, CU_MEMORYTYPE_DEVICE);
  EXPECT_EQ(sent.srcDevice, reinterpret_cast<CUdeviceptr>(pinned) + 100);
  EXPECT_EQ(sent.dstMemoryType, CU_MEMORYTYPE_DEVICE);
  EXPECT_EQ(sent.dstDevice, memory + 8);
  EXPECT_EQ(sent.WidthInBytes, 100u);
  // Asked for, it is memory of the host again, which says in which direction the copy goes.
  const auto ask = [&](CUgraphNode of) {
    AnswerParams(of, CU_GRAPH_NODE_TYPE_MEMCPY, [&](wire::NodeParams* p) {
      p->copy = {reinterpret_cast<char*>(&sent), sizeof sent};
    });
    CUDA_MEMCPY3D seen{};
    EXPECT_EQ(cuGraphMemcpyNodeGetParams(of, &seen), CUDA_SUCCESS);
    return seen;
  };
  CUDA_MEMCPY3D seen = ask(node);
  EXPECT_EQ(seen.srcMemoryType, CU_MEMORYTYPE_HOST);
  EXPECT_EQ(seen.srcHost, host.srcHost);
  EXPECT_EQ(seen.dstMemoryType, CU_MEMORYTYPE_DEVICE);
  EXPECT_EQ(seen.dstDevice, memory + 8);
  Sent();
  CUDA_MEMCPY3D of_no_type = host;
  of_no_type.srcMemoryType = CUmemorytype(0);
  of_no_type.srcDevice = reinterpret_cast<CUdeviceptr>(pinned);
  ExpectRefused(
      {{"no memory type", [&] { return cuGraphAddMemcpyNode(&node, graph_, nullptr, 0, &of_no_type, nullptr); }}});
  // Registered memory has the same address there.
  constexpr size_t kPage = 4096;
  void* const mapped = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  CUdeviceptr device = 0;
  ASSERT_EQ(cuMemHostRegister(mapped, kPage, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuMemHostGetDevicePointer(&device, mapped, 0), CUDA_SUCCESS);
  EXPECT_EQ(device, reinterpret_cast<CUdeviceptr>(mapped));
  CUDA_MEMCPY3D registered = copy;
  registered.dstMemoryType = CU_MEMORYTYPE_HOST;
  registered.dstHost = static_cast<char*>(mapped) + 16;
  Sent();
  CUgraphNode to_registered = nullptr;
  ASSERT_EQ(cuGraphAddMemcpyNode(&to_registered, graph_, nullptr, 0, &registered, nullptr), CUDA_SUCCESS);
  Only(&request);
  memcpy(&sent, request.params.copy.data(), sizeof sent);
  EXPECT_EQ(sent.dstMemoryType, CU_MEMORYTYPE_DEVICE);
  EXPECT_EQ(sent.dstDevice, device + 16);
  seen = ask(to_registered);
  EXPECT_EQ(seen.dstMemoryType, CU_MEMORYTYPE_HOST);
  EXPECT_EQ(seen.dstHost, registered.dstHost);

  EXPECT_TRUE(InLog(Kind::kGraphNode, HandleOf(node)));
  EXPECT_EQ(cuMemFreeHost(pinned), CUDA_SUCCESS);
  EXPECT_FALSE(InLog(Kind::kGraphNode, HandleOf(node))) << "it cannot be made again";
  EXPECT_EQ(cuMemHostUnregister(mapped), CUDA_SUCCESS);
  EXPECT_EQ(munmap(mapped, kPage), 0);
  EXPECT_EQ(cuMemFree(memory), CUDA_SUCCESS);
}

TEST_F(GraphNodesTest, CopiesOfArrays) {
  CUDA_MEMCPY3D copy = Row(0, 0, 16);
  CUgraphNode node = nullptr;
  wire::cuGraphAddNode_v2_Request request;
  CUDA_ARRAY_DESCRIPTOR shape{};
  shape.Width = 16;
  shape.Format = CU_AD_FORMAT_UNSIGNED_INT8;
  shape.NumChannels = 1;
  CUarray from = nullptr, to = nullptr;
  ASSERT_EQ(cuArrayCreate(&from, &shape), CUDA_SUCCESS);
  ASSERT_EQ(cuArrayCreate(&to, &shape), CUDA_SUCCESS);
  Sent();
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_ARRAY;
  copy.srcArray = from;
  copy.dstArray = to;
  CUgraphNodeParams any{};
  any.type = CU_GRAPH_NODE_TYPE_MEMCPY;
  any.memcpy.copyParams = copy;
  any.memcpy.copyCtx = context_;
  ASSERT_EQ(cuGraphAddNode(&node, graph_, nullptr, nullptr, 0, &any), CUDA_SUCCESS);
  Only(&request);
  EXPECT_EQ(request.params.copy, Bytes(copy));
  // The node's parameters as the server has them.
  AnswerParams(node, CU_GRAPH_NODE_TYPE_MEMCPY, [&](wire::NodeParams* p) {
    p->copy = {reinterpret_cast<char*>(&copy), sizeof copy};
  });
  CUDA_MEMCPY3D seen{};
  EXPECT_EQ(cuGraphMemcpyNodeGetParams(node, &seen), CUDA_SUCCESS);
  EXPECT_EQ(Bytes(seen), Bytes(copy));
  EXPECT_TRUE(InLog(Kind::kGraphNode, HandleOf(node)));
  EXPECT_EQ(cuArrayDestroy(to), CUDA_SUCCESS);
  EXPECT_FALSE(InLog(Kind::kGraphNode, HandleOf(node))) << "it cannot be made again";
  ExpectRefused({
      {"an array that is gone", [&] { return cuGraphAddNode(&node, graph_, nullptr, nullptr, 0, &any); },
       CUDA_ERROR_INVALID_HANDLE},
      {"no parameters", [&] { return cuGraphAddMemcpyNode(&node, graph_, nullptr, 0, nullptr, nullptr); }},
      {"set: none", [&] { return cuGraphMemcpyNodeSetParams(node, nullptr); }},
      {"exec: none", [&] { return cuGraphExecMemcpyNodeSetParams(nullptr, node, nullptr, nullptr); }},
      {"get: no place", [&] { return cuGraphMemcpyNodeGetParams(node, nullptr); }},
  });
  EXPECT_EQ(cuArrayDestroy(from), CUDA_SUCCESS);
}

TEST_F(GraphNodesTest, CopiesAreSetInGraphsAndExecutables) {
  const CUDA_MEMCPY3D copy = Row(kDevice, kDevice + 4096, 100), changed = Row(kDevice, kDevice + 8192, 50);
  CUgraphNode node = nullptr;
  ASSERT_EQ(cuGraphAddMemcpyNode(&node, graph_, nullptr, 0, &copy, nullptr), CUDA_SUCCESS);
  const CUgraphExec exec = Executable();
  Sent();
  CUgraphNodeParams any{};
  any.type = CU_GRAPH_NODE_TYPE_MEMCPY;
  any.memcpy.copyParams = changed;
  for (const std::function<CUresult()>& set :
       std::vector<std::function<CUresult()>>{[&] { return cuGraphMemcpyNodeSetParams(node, &changed); },
                                              [&] { return cuGraphNodeSetParams(node, &any); }}) {
    EXPECT_EQ(set(), CUDA_SUCCESS);
    wire::cuGraphNodeSetParams_Request request;
    Only(&request);
    EXPECT_EQ(request.node, HandleOf(node));
    EXPECT_EQ(request.params.copy, Bytes(changed));
    EXPECT_EQ(request.params.context, HandleOf(context_));
  }
  for (const std::function<CUresult()>& set : std::vector<std::function<CUresult()>>{
           [&] { return cuGraphExecMemcpyNodeSetParams(exec, node, &changed, context_); },
           [&] { return cuGraphExecNodeSetParams(exec, node, &any); }}) {
    EXPECT_EQ(set(), CUDA_SUCCESS);
    wire::cuGraphExecNodeSetParams_Request request;
    Only(&request);
    EXPECT_EQ(request.exec, HandleOf(exec));
    EXPECT_EQ(request.params.copy, Bytes(changed));
  }
  EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
}

TEST_F(GraphNodesTest, MemsetsAndEventsOfTheGeneralCall) {
  CUgraphNodeParams any{};
  any.type = CU_GRAPH_NODE_TYPE_MEMSET;
  any.memset.dst = kDevice;
  any.memset.pitch = 64;
  any.memset.value = 0x1234;
  any.memset.elementSize = 2;
  any.memset.width = 8;
  any.memset.height = 3;
  CUgraphNode node = nullptr;
  ASSERT_EQ(cuGraphAddNode(&node, graph_, nullptr, nullptr, 0, &any), CUDA_SUCCESS);
  wire::cuGraphAddNode_v2_Request request;
  Only(&request);
  EXPECT_EQ(request.params.type, CU_GRAPH_NODE_TYPE_MEMSET);
  const CUDA_MEMSET_NODE_PARAMS_v1 expected{kDevice, 64, 0x1234, 2, 8, 3};
  EXPECT_EQ(request.params.memset, Bytes(expected));
  EXPECT_EQ(request.params.context, HandleOf(context_));
  CUevent event = nullptr;
  ASSERT_EQ(cuEventCreate(&event, 0), CUDA_SUCCESS);
  for (const CUgraphNodeType type : {CU_GRAPH_NODE_TYPE_EVENT_RECORD, CU_GRAPH_NODE_TYPE_WAIT_EVENT}) {
    any = {};
    any.type = type;
    (type == CU_GRAPH_NODE_TYPE_WAIT_EVENT ? any.eventWait.event : any.eventRecord.event) = event;
    Sent();
    ASSERT_EQ(cuGraphAddNode(&node, graph_, nullptr, nullptr, 0, &any), CUDA_SUCCESS);
    Only(&request);
    EXPECT_EQ(request.params.type, type);
    EXPECT_EQ(request.params.event, HandleOf(event));
    EXPECT_TRUE(InLog(Kind::kGraphNode, HandleOf(node)));
  }
  ASSERT_EQ(cuEventDestroy(event), CUDA_SUCCESS);
  EXPECT_FALSE(InLog(Kind::kGraphNode, HandleOf(node))) << "it cannot be made again";
  ExpectRefused({{"an event that is gone", [&] { return cuGraphAddNode(&node, graph_, nullptr, nullptr, 0, &any); }}});
}

TEST_F(GraphNodesTest, AHostFunctionGoesAsANumber) {
  int data = 0;
  const auto add = [&](CUhostFn function, void* argument, uint64_t* number) {
    const CUDA_HOST_NODE_PARAMS params{function, argument};
    CUgraphNode node = nullptr;
    EXPECT_EQ(cuGraphAddHostNode(&node, graph_, nullptr, 0, &params), CUDA_SUCCESS);
    wire::cuGraphAddNode_v2_Request request;
    Only(&request);
    EXPECT_EQ(request.params.type, CU_GRAPH_NODE_TYPE_HOST);
    EXPECT_EQ(request.params.context, 0u);
    *number = request.params.host_function;
    return node;
  };
  uint64_t first = 0, again = 0, second = 0, other = 0;
  const CUgraphNode node = add(First, &data, &first);
  add(First, &data, &again);
  add(Second, &data, &second);
  add(First, nullptr, &other);
  EXPECT_NE(first, 0u);
  EXPECT_EQ(again, first) << "the same function and data";
  EXPECT_NE(second, first);
  EXPECT_NE(other, first);
  // And back.
  AnswerParams(node, CU_GRAPH_NODE_TYPE_HOST, [second](wire::NodeParams* p) { p->host_function = second; });
  CUDA_HOST_NODE_PARAMS seen{};
  EXPECT_EQ(cuGraphHostNodeGetParams(node, &seen), CUDA_SUCCESS);
  EXPECT_EQ(seen.fn, Second);
  EXPECT_EQ(seen.userData, &data);
  Sent();
  const CUDA_HOST_NODE_PARAMS params{First, &data};
  wire::cuGraphNodeSetParams_Request set;
  ASSERT_EQ(cuGraphHostNodeSetParams(node, &params), CUDA_SUCCESS);
  Only(&set);
  EXPECT_EQ(set.params.host_function, first);
  const CUgraphExec exec = Executable();
  Sent();
  CUgraphNodeParams any{};
  any.type = CU_GRAPH_NODE_TYPE_HOST;
  any.host.fn = Second;
  any.host.userData = &data;
  wire::cuGraphExecNodeSetParams_Request set_exec;
  ASSERT_EQ(cuGraphExecHostNodeSetParams(exec, node, &params), CUDA_SUCCESS);
  Only(&set_exec);
  EXPECT_EQ(set_exec.params.host_function, first);
  ASSERT_EQ(cuGraphExecNodeSetParams(exec, node, &any), CUDA_SUCCESS);
  Only(&set_exec);
  EXPECT_EQ(set_exec.params.host_function, second);
  const CUDA_HOST_NODE_PARAMS none{nullptr, &data};
  CUgraphNode made = nullptr;
  ExpectRefused({
      {"no function", [&] { return cuGraphAddHostNode(&made, graph_, nullptr, 0, &none); }},
      {"no parameters", [&] { return cuGraphAddHostNode(&made, graph_, nullptr, 0, nullptr); }},
      {"set: no function", [&] { return cuGraphHostNodeSetParams(node, &none); }},
      {"set: no parameters", [&] { return cuGraphHostNodeSetParams(node, nullptr); }},
      {"exec: no function", [&] { return cuGraphExecHostNodeSetParams(exec, node, &none); }},
      {"exec: no parameters", [&] { return cuGraphExecHostNodeSetParams(exec, node, nullptr); }},
      {"get: no place", [&] { return cuGraphHostNodeGetParams(node, nullptr); }},
  });
  EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
}

TEST_F(GraphNodesTest, BatchesOfMemoryOperations) {
  std::vector<CUstreamBatchMemOpParams> operations(257);
  for (size_t i = 0; i < operations.size(); ++i) {
    operations[i].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    operations[i].writeValue.address = kDevice + 4 * i;
    operations[i].writeValue.value = uint32_t(i);
  }
  CUDA_BATCH_MEM_OP_NODE_PARAMS params{};
  params.count = 256;
  params.paramArray = operations.data();
  params.flags = 3;
  CUgraphNode node = nullptr;
  ASSERT_EQ(cuGraphAddBatchMemOpNode(&node, graph_, nullptr, 0, &params), CUDA_SUCCESS);
  wire::cuGraphAddNode_v2_Request request;
  Only(&request);
  EXPECT_EQ(request.params.type, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP);
  EXPECT_EQ(request.params.memory_operations,
            std::string(reinterpret_cast<const char*>(operations.data()), 256 * sizeof operations[0]));
  EXPECT_EQ(request.params.flags, 3u);
  EXPECT_EQ(request.params.context, HandleOf(context_));
  // The list that is answered stays for as long as nobody asks about the node again.
  std::string answered(reinterpret_cast<const char*>(&operations[5]), 2 * sizeof operations[0]);
  const auto fill = [&](wire::NodeParams* p) {
    p->memory_operations = answered;
    p->flags = 9;
    p->context = HandleOf(context_);
  };
  AnswerParams(node, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, fill);
  CUDA_BATCH_MEM_OP_NODE_PARAMS seen{};
  ASSERT_EQ(cuGraphBatchMemOpNodeGetParams(node, &seen), CUDA_SUCCESS);
  const std::string kept = answered;
  answered.assign(answered.size(), 'x');
  EXPECT_EQ(seen.count, 2u);
  EXPECT_EQ(std::string(reinterpret_cast<char*>(seen.paramArray), kept.size()), kept);
  EXPECT_EQ(seen.flags, 9u);
  EXPECT_EQ(seen.ctx, context_);
  answered.clear();
  ASSERT_EQ(cuGraphBatchMemOpNodeGetParams(node, &seen), CUDA_SUCCESS);
  EXPECT_EQ(seen.count, 0u);
  const CUgraphExec exec = Executable();
  Sent();
  params.count = 1;
  wire::cuGraphNodeSetParams_Request set;
  ASSERT_EQ(cuGraphBatchMemOpNodeSetParams(node, &params), CUDA_SUCCESS);
  Only(&set);
  EXPECT_EQ(set.params.memory_operations, Bytes(operations[0]));
  wire::cuGraphExecNodeSetParams_Request set_exec;
  ASSERT_EQ(cuGraphExecBatchMemOpNodeSetParams(exec, node, &params), CUDA_SUCCESS);
  Only(&set_exec);
  EXPECT_EQ(set_exec.exec, HandleOf(exec));
  EXPECT_EQ(set_exec.params.memory_operations, Bytes(operations[0]));
  CUgraphNode made = nullptr;
  CUDA_BATCH_MEM_OP_NODE_PARAMS many = params, none = params, foreign = params;
  many.count = 257;
  none.paramArray = nullptr;
  foreign.ctx = reinterpret_cast<CUcontext>(graph_);
  ExpectRefused({
      {"more than the driver takes", [&] { return cuGraphAddBatchMemOpNode(&made, graph_, nullptr, 0, &many); }},
      {"no list", [&] { return cuGraphAddBatchMemOpNode(&made, graph_, nullptr, 0, &none); }},
      {"no context", [&] { return cuGraphAddBatchMemOpNode(&made, graph_, nullptr, 0, &foreign); },
       CUDA_ERROR_INVALID_CONTEXT},
      {"no parameters", [&] { return cuGraphAddBatchMemOpNode(&made, graph_, nullptr, 0, nullptr); }},
      {"set: no parameters", [&] { return cuGraphBatchMemOpNodeSetParams(node, nullptr); }},
      {"exec: no parameters", [&] { return cuGraphExecBatchMemOpNodeSetParams(exec, node, nullptr); }},
      {"get: no place", [&] { return cuGraphBatchMemOpNodeGetParams(node, nullptr); }},
  });
  EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
}

TEST_F(GraphNodesTest, CopiedAttributesStayWhatTheyWere) {
  const OneKernel one(server_, sizeof(int));
  int value = 7;
  void* parameters[] = {&value};
  const CUDA_KERNEL_NODE_PARAMS launch = Launch(one.kernel(), parameters);
  CUgraph other = nullptr;
  ASSERT_EQ(cuGraphCreate(&other, 0), CUDA_SUCCESS);
  CUgraphNode from = nullptr, to = nullptr, far = nullptr;
  ASSERT_EQ(cuGraphAddKernelNode(&from, graph_, nullptr, 0, &launch), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphAddKernelNode(&to, graph_, nullptr, 0, &launch), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphAddKernelNode(&far, other, nullptr, 0, &launch), CUDA_SUCCESS);
  const auto set = [](CUgraphNode node, int priority) {
    CUkernelNodeAttrValue attribute{};
    attribute.priority = priority;
    EXPECT_EQ(cuGraphKernelNodeSetAttribute(node, CU_LAUNCH_ATTRIBUTE_PRIORITY, &attribute), CUDA_SUCCESS);
  };
  // What the log sends again of both calls, in its order: the priorities that are set, and 0 for a copy.
  const auto replayed = [] {
    ReaderLock lock(&Session::Get()->objects().mutex());
    std::vector<int> all;
    for (const replay::Record* record : Session::Get()->objects().log().InOrder()) {
      wire::cuGraphKernelNodeSetAttribute_Request request;
      CUkernelNodeAttrValue attribute{};
      if (record->header.call == kCall_cuGraphKernelNodeCopyAttributes) all.push_back(0);
      if (!wire::DecodeAs(record->header.call, record->message, &request)) continue;
      memcpy(&attribute, request.value.data(), std::min(sizeof attribute, request.value.size()));
      all.push_back(attribute.priority);
    }
    return all;
  };
  using Priorities = std::vector<int>;
  set(from, -1);
  set(from, -2);
  EXPECT_EQ(replayed(), Priorities{-2});
  ASSERT_EQ(cuGraphKernelNodeCopyAttributes(to, from), CUDA_SUCCESS);
  set(from, -3);
  set(from, -4);
  EXPECT_EQ(replayed(), (Priorities{-2, 0, -4}));
  ASSERT_EQ(cuGraphKernelNodeCopyAttributes(to, from), CUDA_SUCCESS);
  set(from, -5);
  EXPECT_EQ(replayed(), (Priorities{-4, 0, -5})) << "the first copy does not matter any more";
  // Into another graph, which outlives the source's.
  ASSERT_EQ(cuGraphKernelNodeCopyAttributes(far, to), CUDA_SUCCESS);
  const CUgraph gone = graph_;
  ASSERT_EQ(cuGraphDestroy(gone), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphCreate(&graph_, 0), CUDA_SUCCESS);
  EXPECT_TRUE(InLog(Kind::kGraphNode, HandleOf(to))) << "a replay copies from it";
  EXPECT_EQ(cuGraphKernelNodeCopyAttributes(nullptr, far), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(cuGraphDestroy(other), CUDA_SUCCESS);
  EXPECT_FALSE(InLog(Kind::kGraph, HandleOf(gone)));
  EXPECT_FALSE(InLog(Kind::kGraphNode, HandleOf(from)));
}

TEST_F(GraphNodesTest, AChildGraphIsClonedOrMoved) {
  CUgraph child = nullptr;
  ASSERT_EQ(cuGraphCreate(&child, 0), CUDA_SUCCESS);
  Sent();
  CUgraphNodeParams any{};
  any.type = CU_GRAPH_NODE_TYPE_GRAPH;
  any.graph.graph = child;
  CUgraphNode node = nullptr;
  wire::cuGraphAddNode_v2_Request request;
  ASSERT_EQ(cuGraphAddNode(&node, graph_, nullptr, nullptr, 0, &any), CUDA_SUCCESS);
  Only(&request);
  EXPECT_EQ(request.params.type, CU_GRAPH_NODE_TYPE_GRAPH);
  EXPECT_EQ(request.params.graph, HandleOf(child));
  EXPECT_FALSE(request.params.moved);
  any.graph.ownership = CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
  CUgraphNode moved = nullptr;
  const auto parent = [](CUgraph graph) {
    ReaderLock lock(&Session::Get()->objects().mutex());
    const Object* const object = Session::Get()->objects().handles().Find(Kind::kGraph, HandleOf(graph));
    return object ? object->parent : ~uint64_t(0);
  };
  // Refused, it stays the application's.
  CUgraph kept = nullptr;
  ASSERT_EQ(cuGraphCreate(&kept, 0), CUDA_SUCCESS);
  any.graph.graph = kept;
  server_->On(kCall_cuGraphAddNode_v2, CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuGraphAddNode(&moved, graph_, nullptr, nullptr, 0, &any), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(moved, nullptr);
  server_->On(kCall_cuGraphAddNode_v2, FakeServer::Answer());
  EXPECT_EQ(parent(kept), 0u);
  CUgraphExec of_kept = nullptr;
  ASSERT_EQ(cuGraphInstantiate(&of_kept, kept, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuGraphExecDestroy(of_kept), CUDA_SUCCESS);
  EXPECT_TRUE(InLog(Kind::kGraph, HandleOf(kept)));
  EXPECT_EQ(cuGraphDestroy(kept), CUDA_SUCCESS);
  any.graph.graph = child;
  Sent();
  ASSERT_EQ(cuGraphAddNode(&moved, graph_, nullptr, nullptr, 0, &any), CUDA_SUCCESS);
  Only(&request);
  EXPECT_TRUE(request.params.moved);
  EXPECT_EQ(request.params.graph, HandleOf(child));
  EXPECT_EQ(parent(child), HandleOf(moved));
  // In an executable, only what a graph is can be taken over.
  const CUgraphExec exec = Executable();
  CUgraph other = nullptr, gone = nullptr;
  ASSERT_EQ(cuGraphCreate(&other, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphCreate(&gone, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphDestroy(gone), CUDA_SUCCESS);
  Sent();
  ASSERT_EQ(cuGraphExecChildGraphNodeSetParams(exec, node, other), CUDA_SUCCESS);
  wire::cuGraphExecNodeSetParams_Request set;
  Only(&set);
  EXPECT_EQ(set.exec, HandleOf(exec));
  EXPECT_EQ(set.node, HandleOf(node));
  EXPECT_EQ(set.params.graph, HandleOf(other));
  EXPECT_EQ(cuGraphDestroy(other), CUDA_SUCCESS);
  EXPECT_TRUE(InLog(Kind::kGraph, HandleOf(other))) << "the executable has in it what it was";
  CUgraphNode made = nullptr;
  CUgraphNodeParams of_gone = any;
  of_gone.graph.graph = gone;
  ExpectRefused({
      {"a graph that is gone", [&] { return cuGraphAddNode(&made, graph_, nullptr, nullptr, 0, &of_gone); }},
      {"moved into a node that exists", [&] { return cuGraphNodeSetParams(node, &any); }, CUDA_ERROR_NOT_SUPPORTED},
      {"exec: moved", [&] { return cuGraphExecNodeSetParams(exec, node, &any); }, CUDA_ERROR_NOT_SUPPORTED},
      {"exec: a graph that is gone", [&] { return cuGraphExecChildGraphNodeSetParams(exec, node, gone); }},
      {"exec: no graph", [&] { return cuGraphExecChildGraphNodeSetParams(exec, node, nullptr); }},
  });
  of_gone.graph.ownership = CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE;
  ExpectRefused({{"cloned when gone", [&] { return cuGraphAddNode(&made, graph_, nullptr, nullptr, 0, &of_gone); }}});
  EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
  EXPECT_FALSE(InLog(Kind::kGraph, HandleOf(other)));
}

TEST_F(GraphNodesTest, AConditionalNodeHasBodies) {
  CUgraphNodeParams any{};
  any.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
  any.conditional.handle = 0x77;
  any.conditional.type = CU_GRAPH_COND_TYPE_SWITCH;
  any.conditional.size = 3;
  any.conditional.ctx = context_;
  std::vector<uint32_t> asked;
  server_->On(kCall_cuGraphChildGraphNodeGetGraph, [&asked](const FakeServer::Request& request) {
    wire::cuGraphChildGraphNodeGetGraph_Request in;
    wire::cuGraphChildGraphNodeGetGraph_Reply out;
    EXPECT_TRUE(in.Decode(request.message));
    asked.push_back(in.body);
    out.graph = in.graph;
    return FakeServer::Answer(CUDA_SUCCESS, Encoded(out));
  });
  CUgraphNode node = nullptr;
  ASSERT_EQ(cuGraphAddNode(&node, graph_, nullptr, nullptr, 0, &any), CUDA_SUCCESS);
  const std::vector<FakeServer::Request> requests = SentRequests();
  ASSERT_EQ(requests.size(), 4u);
  wire::cuGraphAddNode_v2_Request request;
  ASSERT_TRUE(wire::DecodeAs(requests[0].header.call, requests[0].message, &request));
  EXPECT_EQ(request.params.type, CU_GRAPH_NODE_TYPE_CONDITIONAL);
  EXPECT_EQ(request.params.conditional, 0x77u);
  EXPECT_EQ(request.params.conditional_type, CU_GRAPH_COND_TYPE_SWITCH);
  EXPECT_EQ(request.params.bodies, 3u);
  EXPECT_EQ(request.params.context, HandleOf(context_));
  EXPECT_EQ(asked, (std::vector<uint32_t>{1, 2, 3}));
  ASSERT_NE(any.conditional.phGraph_out, nullptr);
  std::set<CUgraph> bodies(any.conditional.phGraph_out, any.conditional.phGraph_out + 3);
  EXPECT_EQ(bodies.size(), 3u);
  for (const CUgraph body : bodies) EXPECT_TRUE(InLog(Kind::kGraph, HandleOf(body)));
  EXPECT_NE(Empty(any.conditional.phGraph_out[2]), nullptr) << "nodes can be added to it";
  server_->On(kCall_cuGraphChildGraphNodeGetGraph, FakeServer::Answer());
}

TEST_F(GraphNodesTest, NodesThatCannotBeMadeOrChanged) {
  const CUgraphNode node = Empty(graph_);
  const CUgraphExec exec = Executable();
  const auto of = [](int type) {
    CUgraphNodeParams params{};
    params.type = CUgraphNodeType(type);
    return params;
  };
  CUgraphNodeParams conditional = of(CU_GRAPH_NODE_TYPE_CONDITIONAL), allocation = of(CU_GRAPH_NODE_TYPE_MEM_ALLOC),
                    free = of(CU_GRAPH_NODE_TYPE_MEM_FREE), semaphores = of(CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL),
                    unknown = of(CU_GRAPH_NODE_TYPE_CONDITIONAL + 1), negative = of(-1);
  CUgraphNode made = nullptr;
  ExpectRefused({
      {"add: nothing", [&] { return cuGraphAddNode(&made, graph_, nullptr, nullptr, 0, nullptr); }},
      {"add: an unknown type", [&] { return cuGraphAddNode(&made, graph_, nullptr, nullptr, 0, &unknown); }},
      {"add: a negative type", [&] { return cuGraphAddNode(&made, graph_, nullptr, nullptr, 0, &negative); }},
      {"add: semaphores", [&] { return cuGraphAddNode(&made, graph_, nullptr, nullptr, 0, &semaphores); },
       CUDA_ERROR_NOT_SUPPORTED},
      {"set: nothing", [&] { return cuGraphNodeSetParams(node, nullptr); }},
      {"set: an unknown type", [&] { return cuGraphNodeSetParams(node, &unknown); }},
      {"set: conditional", [&] { return cuGraphNodeSetParams(node, &conditional); }, CUDA_ERROR_NOT_SUPPORTED},
      {"set: allocation", [&] { return cuGraphNodeSetParams(node, &allocation); }, CUDA_ERROR_NOT_SUPPORTED},
      {"set: free", [&] { return cuGraphNodeSetParams(node, &free); }, CUDA_ERROR_NOT_SUPPORTED},
      {"exec: nothing", [&] { return cuGraphExecNodeSetParams(exec, node, nullptr); }},
      {"exec: conditional", [&] { return cuGraphExecNodeSetParams(exec, node, &conditional); },
       CUDA_ERROR_NOT_SUPPORTED},
      {"exec: allocation", [&] { return cuGraphExecNodeSetParams(exec, node, &allocation); }, CUDA_ERROR_NOT_SUPPORTED},
  });
  EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
}

TEST_F(GraphNodesTest, MemoryThatTheGraphHasFreedIsAllocatedAgain) {
  CUDA_MEM_ALLOC_NODE_PARAMS params{};
  params.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  params.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  params.bytesize = 100000;
  const auto allocate = [&](CUgraphNode* node, CUgraphNode behind) {
    const CUresult result = cuGraphAddMemAllocNode(node, graph_, &behind, behind ? 1 : 0, &params);
    return result == CUDA_SUCCESS ? params.dptr : 0;
  };
  // What the server finds before the node that the next one is to be behind.
  CUgraphNode behind = nullptr, found = nullptr, allocation, freed, node = nullptr;
  server_->On(kOpNodeBefore, [&](const FakeServer::Request& request) {
    wire::OpNodeBefore_Request in;
    wire::OpNodeBefore_Reply out;
    EXPECT_TRUE(in.Decode(request.message));
    EXPECT_EQ(in.nodes, std::vector<uint64_t>{HandleOf(freed)});
    EXPECT_EQ(in.others, std::vector<uint64_t>{HandleOf(behind)});
    out.node = HandleOf(found);
    return FakeServer::Answer(CUDA_SUCCESS, Encoded(out));
  });
  const CUdeviceptr address = allocate(&allocation, nullptr);
  ASSERT_NE(address, 0u);
  behind = Empty(graph_);
  // Nothing is freed yet, so nobody is asked.
  Sent();
  const CUdeviceptr other = allocate(&node, behind);
  EXPECT_EQ(Sent(), (Calls{kOpMemAlloc, kCall_cuGraphAddNode_v2}));
  EXPECT_NE(other, address);
  ASSERT_EQ(cuGraphAddMemFreeNode(&freed, graph_, &allocation, 1, address), CUDA_SUCCESS);
  // Not before that node.
  Sent();
  EXPECT_NE(allocate(&node, behind), address);
  EXPECT_EQ(Sent(), (Calls{kOpNodeBefore, kOpMemAlloc, kCall_cuGraphAddNode_v2}));
  ExpectRefused(
      {{"dependencies without an array", [&] { return cuGraphAddMemAllocNode(&node, graph_, nullptr, 1, &params); }}});
  // The server refuses the node: the memory is as before.
  found = freed;
  server_->On(kCall_cuGraphAddNode_v2, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(allocate(&node, behind), 0u);
  server_->On(kCall_cuGraphAddNode_v2, FakeServer::Answer());
  Sent();
  EXPECT_EQ(allocate(&allocation, behind), address);
  EXPECT_EQ(Sent(), (Calls{kOpNodeBefore, kCall_cuGraphAddNode_v2}));
  // It is in use now.
  EXPECT_NE(allocate(&node, behind), address);
  EXPECT_EQ(Sent(), (Calls{kOpMemAlloc, kCall_cuGraphAddNode_v2}));
  // It is freed once more, and a wrong answer of the server is none.
  EXPECT_EQ(cuGraphAddMemFreeNode(&freed, graph_, &allocation, 1, address), CUDA_SUCCESS);
  EXPECT_EQ(cuGraphAddMemFreeNode(&node, graph_, &allocation, 1, address), CUDA_ERROR_INVALID_VALUE);
  found = behind;
  EXPECT_NE(allocate(&node, behind), address);
}

TEST_F(GraphNodesTest, SoManyDependenciesAsAMessageHolds) {
  const CUgraphNode node = Empty(graph_);
  constexpr size_t kMost = kMaxMessageBytes / 32;
  const std::vector<CUgraphNode> after(kMost + 1, node);
  const std::vector<CUgraphEdgeData> edges(kMost + 1);
  CUgraphNodeParams any{};
  any.type = CU_GRAPH_NODE_TYPE_EMPTY;
  CUgraphNode made = nullptr;
  ExpectRefused(
      {{"too many", [&] { return cuGraphAddNode(&made, graph_, after.data(), edges.data(), kMost + 1, &any); },
        CUDA_ERROR_NOT_SUPPORTED}});
  EXPECT_EQ(made, nullptr);
  ASSERT_EQ(cuGraphAddNode(&made, graph_, after.data(), edges.data(), kMost, &any), CUDA_SUCCESS);
  wire::cuGraphAddNode_v2_Request request;
  Only(&request);
  EXPECT_EQ(request.dependencies.size(), kMost);
  EXPECT_EQ(request.edges.size(), kMost * sizeof edges[0]);
}

}  // namespace
}  // namespace cuda_remote::client
