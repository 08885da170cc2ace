// SPDX-License-Identifier: Apache-2.0
// Captures and graphs.
#include <algorithm>
#include <atomic>
#include <vector>

#include "softgpu/testing/fixture.h"

namespace cuda_remote::softgpu {
namespace {

class GraphTest : public SoftGpuTest {
 protected:
  void SetUp() override {
    SoftGpuTest::SetUp();
    CU_OK(cuMemAlloc_v2(&word_, 64));
    CU_OK(cuMemsetD32_v2(word_, 0, 16));
    CU_OK(cuStreamCreate(&a_, CU_STREAM_NON_BLOCKING));
    CU_OK(cuStreamCreate(&b_, CU_STREAM_NON_BLOCKING));
    CU_OK(cuCtxSynchronize());
  }
  uint32_t Word(int i = 0) {
    uint32_t value = 0;
    EXPECT_EQ(CUDA_SUCCESS, Cu().cuMemcpyDtoH_v2(&value, word_ + 4 * i, 4));
    return value;
  }
  CUdeviceptr word_ = 0;
  CUstream a_ = nullptr, b_ = nullptr;
};

TEST_F(GraphTest, CaptureAcrossStreams) {
  CUevent fork, join;
  CU_OK(cuEventCreate(&fork, CU_EVENT_DISABLE_TIMING));
  CU_OK(cuEventCreate(&join, CU_EVENT_DISABLE_TIMING));
  std::atomic<int> calls{0};
  CU_OK(cuStreamBeginCapture_v2(a_, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CU_OK(cuMemsetD32Async(word_, 5, 2, a_));
  CU_OK(cuEventRecord(fork, a_));
  CU_OK(cuStreamWaitEvent(b_, fork, 0));
  CUstreamCaptureStatus status;
  CU_OK(cuStreamIsCapturing(b_, &status));
  EXPECT_EQ(CU_STREAM_CAPTURE_STATUS_ACTIVE, status);
  ASSERT_EQ(CUDA_SUCCESS, Bump(word_, 10, a_));
  ASSERT_EQ(CUDA_SUCCESS, Bump(word_ + 4, 20, b_));
  CU_OK(cuEventRecord(join, b_));
  CU_OK(cuStreamWaitEvent(a_, join, 0));
  CU_OK(cuMemcpyDtoDAsync_v2(word_ + 8, word_, 8, a_));
  CU_OK(cuLaunchHostFunc(
      a_, [](void* p) { ++*static_cast<std::atomic<int>*>(p); }, &calls));
  const CUgraphNode* last;
  size_t count;
  cuuint64_t id;
  CUgraph graph, seen;
  CU_OK(cuStreamGetCaptureInfo_v2(a_, &status, &id, &seen, &last, &count));
  EXPECT_EQ(1u, count);
  CUgraphNodeType type;
  CU_OK(cuGraphNodeGetType(last[0], &type));
  EXPECT_EQ(CU_GRAPH_NODE_TYPE_HOST, type);
  CU_OK(cuStreamEndCapture(a_, &graph));
  EXPECT_EQ(seen, graph);
  EXPECT_EQ(0u, Word(0));  // nothing has run yet
  CU_OK(cuGraphGetNodes(graph, nullptr, &count));
  EXPECT_EQ(5u, count);
  CU_OK(cuGraphGetEdges_v2(graph, nullptr, nullptr, nullptr, &count));
  EXPECT_EQ(5u, count);
  CUgraphExec exec;
  CU_OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
  CU_OK(cuGraphDestroy(graph));
  for (int i = 1; i <= 3; ++i) {
    CU_OK(cuMemsetD32_v2(word_, 0, 16));
    CU_OK(cuCtxSynchronize());
    CU_OK(cuGraphLaunch(exec, i % 2 ? a_ : nullptr));
    CU_OK(cuCtxSynchronize());
    EXPECT_EQ(15u, Word(2));
    EXPECT_EQ(25u, Word(3));
    EXPECT_EQ(i, calls);
  }
  CU_OK(cuGraphExecDestroy(exec));
}

// A copy of pageable memory to the GPU reads it at the launch, as 580 does, also inside a child graph; one of pinned
// memory reads it at its turn.
TEST_F(GraphTest, ALaunchReadsPageableMemory) {
  uint32_t pageable = 1, *pinned = nullptr;
  CU_OK(cuMemHostAlloc(reinterpret_cast<void**>(&pinned), 4, 0));
  CUgraph child, graph;
  CUgraphNode nodes[4];
  CU_OK(cuGraphCreate(&child, 0));
  CU_OK(cuGraphCreate(&graph, 0));
  const auto add = [&](CUgraphNode* node, CUgraph to, const void* from, int word) {
    CUDA_MEMCPY3D copy = {};
    copy.srcMemoryType = CU_MEMORYTYPE_HOST;
    copy.srcHost = from;
    copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.dstDevice = word_ + 4 * word;
    copy.WidthInBytes = 4;
    copy.Height = copy.Depth = 1;
    CU_OK(cuGraphAddMemcpyNode(node, to, nullptr, 0, &copy, context_));
  };
  add(&nodes[0], child, &pageable, 1);
  add(&nodes[1], graph, &pageable, 2);
  add(&nodes[2], graph, pinned, 3);
  CU_OK(cuGraphAddChildGraphNode(&nodes[3], graph, nullptr, 0, child));
  CUgraphExec exec;
  CU_OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
  for (const uint32_t step : {10u, 20u}) {
    pageable = step;
    *pinned = step;
    CU_OK(cuStreamWaitValue32_v2(a_, word_, step, CU_STREAM_WAIT_VALUE_EQ));
    CU_OK(cuGraphLaunch(exec, a_));
    pageable = step + 1;
    *pinned = step + 1;
    CU_OK(cuStreamWriteValue32_v2(b_, word_, step, 0));
    CU_OK(cuStreamSynchronize(a_));
    EXPECT_EQ(step, Word(1));
    EXPECT_EQ(step, Word(2));
    EXPECT_EQ(step + 1, Word(3));
  }
  CU_OK(cuGraphExecDestroy(exec));
  CU_OK(cuGraphDestroy(graph));
  CU_OK(cuGraphDestroy(child));
  CU_OK(cuMemFreeHost(pinned));
}

// Handles of executables that kernels may launch are slots, as 580 gives them: the lowest that is free.
TEST_F(GraphTest, LaunchableExecutablesHaveSlots) {
  CUgraph graph;
  CU_OK(cuGraphCreate(&graph, 0));
  CUgraphExec all[4], other;
  for (CUgraphExec& exec : all) {
    CU_OK(cuGraphInstantiateWithFlags(&exec, graph, CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH));
  }
  CU_OK(cuGraphInstantiateWithFlags(&other, graph, 0));
  for (int i = 1; i < 4; ++i) {
    EXPECT_EQ(reinterpret_cast<uint64_t>(all[i]), reinterpret_cast<uint64_t>(all[i - 1]) + 0xc0);
  }
  CU_OK(cuGraphExecDestroy(all[2]));
  CU_OK(cuGraphExecDestroy(all[1]));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuGraphLaunch(all[1], a_));
  for (int i = 1; i < 3; ++i) {
    CUgraphExec again;
    CU_OK(cuGraphInstantiateWithFlags(&again, graph, CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH));
    EXPECT_EQ(again, all[i]);
    CU_OK(cuGraphLaunch(again, a_));
  }
  for (CUgraphExec exec : all) CU_OK(cuGraphExecDestroy(exec));
  CU_OK(cuGraphExecDestroy(other));
  CU_OK(cuGraphDestroy(graph));
}

TEST_F(GraphTest, CaptureErrors) {
  CUgraph graph;
  CU_IS(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamBeginCapture_v2(nullptr, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CU_IS(CUDA_ERROR_ILLEGAL_STATE, cuStreamEndCapture(a_, &graph));
  // A synchronisation spoils it.
  CU_OK(cuStreamBeginCapture_v2(a_, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CU_IS(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamSynchronize(a_));
  EXPECT_EQ(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, Bump(word_, 1, a_));
  CU_IS(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(a_, &graph));
  EXPECT_EQ(nullptr, graph);
  // So do a wait for the context, and a question for the stream's flags, whatever the mode.
  CU_OK(cuStreamBeginCapture_v2(a_, CU_STREAM_CAPTURE_MODE_RELAXED));
  CU_IS(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuCtxSynchronize());
  CU_IS(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(a_, &graph));
  CU_OK(cuStreamBeginCapture_v2(a_, CU_STREAM_CAPTURE_MODE_RELAXED));
  unsigned flags;
  CU_OK(cuStreamGetFlags(b_, &flags));
  CU_IS(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamGetFlags(a_, &flags));
  CU_IS(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(a_, &graph));
  CU_OK(cuCtxSynchronize());
  // A fork that does not come back.
  CUevent fork;
  CU_OK(cuEventCreate(&fork, 0));
  CU_OK(cuStreamBeginCapture_v2(a_, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CU_OK(cuEventRecord(fork, a_));
  CU_IS(CUDA_ERROR_CAPTURED_EVENT, cuEventQuery(fork));
  CU_OK(cuStreamWaitEvent(b_, fork, 0));
  ASSERT_EQ(CUDA_SUCCESS, Bump(word_, 1, b_));
  CU_IS(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, cuStreamEndCapture(b_, &graph));
  CU_IS(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(a_, &graph));
  CU_OK(cuStreamBeginCapture_v2(a_, CU_STREAM_CAPTURE_MODE_RELAXED));
  CU_OK(cuEventRecord(fork, a_));
  CU_OK(cuStreamWaitEvent(b_, fork, 0));
  ASSERT_EQ(CUDA_SUCCESS, Bump(word_, 1, b_));
  CU_IS(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, cuStreamEndCapture(a_, &graph));
  // Both streams work as before.
  ASSERT_EQ(CUDA_SUCCESS, Bump(word_, 1, b_));
  CU_OK(cuStreamSynchronize(b_));
  EXPECT_EQ(1u, Word());
}

// It stays refused after the capture, until it is recorded for others.
TEST_F(GraphTest, AnEventLastRecordedInACapture) {
  CUevent event, other;
  CUgraph graph;
  float milliseconds;
  CU_OK(cuEventCreate(&event, 0));
  CU_OK(cuEventCreate(&other, 0));
  CU_OK(cuEventRecord(event, a_));
  CU_OK(cuEventRecord(other, a_));
  CU_OK(cuStreamBeginCapture_v2(a_, CU_STREAM_CAPTURE_MODE_RELAXED));
  CU_OK(cuEventRecord(event, a_));
  CU_OK(cuStreamEndCapture(a_, &graph));
  CU_OK(cuEventSynchronize(other));
  CU_IS(CUDA_ERROR_CAPTURED_EVENT, cuEventQuery(event));
  CU_IS(CUDA_ERROR_CAPTURED_EVENT, cuEventSynchronize(event));
  CU_IS(CUDA_ERROR_CAPTURED_EVENT, cuStreamWaitEvent(b_, event, 0));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuEventElapsedTime_v1(&milliseconds, event, other));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuEventElapsedTime_v1(&milliseconds, other, event));
  CU_OK(cuEventRecord(event, a_));
  CU_OK(cuEventSynchronize(event));
  CU_OK(cuEventElapsedTime_v1(&milliseconds, other, event));
  CU_OK(cuGraphDestroy(graph));
}

// A captured record of an event for others than the capture's streams becomes a node, which may name one of another
// context. Other records may not.
TEST_F(GraphTest, AnExternalEventOfAnotherContext) {
  CUcontext other, before;
  CUevent event;
  CUgraph graph;
  CU_OK(cuCtxCreate_v2(&other, 0, 0));
  CU_OK(cuEventCreate(&event, 0));
  CU_OK(cuCtxPopCurrent_v2(&before));
  CU_IS(CUDA_ERROR_INVALID_HANDLE, cuEventRecord(event, a_));
  CU_IS(CUDA_ERROR_INVALID_HANDLE, cuEventRecordWithFlags(event, a_, 0));
  CU_IS(CUDA_ERROR_INVALID_HANDLE, cuEventRecordWithFlags(event, a_, CU_EVENT_RECORD_EXTERNAL));
  CU_OK(cuStreamBeginCapture_v2(a_, CU_STREAM_CAPTURE_MODE_RELAXED));
  CU_IS(CUDA_ERROR_INVALID_HANDLE, cuEventRecord(event, a_));
  CU_IS(CUDA_ERROR_INVALID_HANDLE, cuEventRecordWithFlags(event, a_, 0));
  CU_OK(cuEventRecordWithFlags(event, a_, CU_EVENT_RECORD_EXTERNAL));
  CU_OK(cuStreamEndCapture(a_, &graph));
  CUgraphNode built;
  CU_OK(cuGraphAddEventRecordNode(&built, graph, nullptr, 0, event));
  CUgraphNode nodes[2];
  size_t count = 2;
  CU_OK(cuGraphGetNodes(graph, nodes, &count));
  ASSERT_EQ(2u, count);
  for (const CUgraphNode node : nodes) {
    CUevent named = nullptr;
    CU_OK(cuGraphEventRecordNodeGetEvent(node, &named));
    EXPECT_EQ(event, named);
  }
  CUgraphExec exec;
  CU_OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
  CU_OK(cuGraphLaunch(exec, a_));
  CU_OK(cuStreamSynchronize(a_));
  CU_OK(cuEventQuery(event));
  CU_OK(cuGraphExecDestroy(exec));
  CU_OK(cuGraphDestroy(graph));
  CU_OK(cuCtxDestroy_v2(other));
}

TEST_F(GraphTest, BuiltByHandAndUpdated) {
  CUgraph graph;
  CU_OK(cuGraphCreate(&graph, 0));
  CUgraphNode fill, kernel, copy, host, empty;
  CUDA_MEMSET_NODE_PARAMS set = {word_, 0, 3, 4, 4, 1};
  CU_OK(cuGraphAddMemsetNode(&fill, graph, nullptr, 0, &set, context_));
  CUdeviceptr address = word_;
  unsigned times = 4;
  void* params[] = {&address, &times};
  CUDA_KERNEL_NODE_PARAMS_v2 launch = {};
  launch.func = bump_;
  launch.gridDimX = launch.gridDimY = launch.gridDimZ = 1;
  launch.blockDimX = launch.blockDimY = launch.blockDimZ = 1;
  launch.kernelParams = params;
  CU_OK(cuGraphAddKernelNode_v2(&kernel, graph, nullptr, 0, &launch));
  CU_OK(cuGraphAddDependencies_v2(graph, &fill, &kernel, nullptr, 1));
  CUDA_MEMCPY3D move = {};
  move.srcMemoryType = move.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  move.srcDevice = word_;
  move.dstDevice = word_ + 32;
  move.WidthInBytes = 16;
  move.Height = move.Depth = 1;
  CU_OK(cuGraphAddMemcpyNode(&copy, graph, &kernel, 1, &move, context_));
  std::atomic<int> calls{0};
  CUDA_HOST_NODE_PARAMS call = {[](void* p) { ++*static_cast<std::atomic<int>*>(p); }, &calls};
  CU_OK(cuGraphAddHostNode(&host, graph, &copy, 1, &call));
  CU_OK(cuGraphAddEmptyNode(&empty, graph, &host, 1));
  CUgraphExec exec;
  CU_OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
  CU_OK(cuGraphLaunch(exec, a_));
  CU_OK(cuStreamSynchronize(a_));
  EXPECT_EQ(7u, Word(8));
  EXPECT_EQ(3u, Word(9));
  EXPECT_EQ(1, calls);
  // New parameters for the executable graph alone.
  times = 10;
  CU_OK(cuGraphExecKernelNodeSetParams_v2(exec, kernel, &launch));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuGraphNodeSetEnabled(exec, host, 0));  // kernels, copies and fills alone
  CU_OK(cuGraphLaunch(exec, a_));
  CU_OK(cuStreamSynchronize(a_));
  EXPECT_EQ(13u, Word(8));
  EXPECT_EQ(2, calls);
  CUDA_KERNEL_NODE_PARAMS_v2 got = {};
  CU_OK(cuGraphKernelNodeGetParams_v2(kernel, &got));
  EXPECT_EQ(4u, *static_cast<unsigned*>(got.kernelParams[1]));
  // The whole graph at once.
  CU_OK(cuGraphKernelNodeSetParams_v2(kernel, &launch));
  CUgraphExecUpdateResultInfo info;
  CU_OK(cuGraphExecUpdate_v2(exec, graph, &info));
  EXPECT_EQ(CU_GRAPH_EXEC_UPDATE_SUCCESS, info.result);
  CUgraphNode extra;
  CU_OK(cuGraphAddEmptyNode(&extra, graph, nullptr, 0));
  CU_IS(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, cuGraphExecUpdate_v2(exec, graph, &info));
  EXPECT_EQ(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, info.result);
  // As a child of another one.
  CUgraph parent;
  CUgraphNode child;
  CU_OK(cuGraphCreate(&parent, 0));
  CU_OK(cuGraphAddChildGraphNode(&child, parent, nullptr, 0, graph));
  CUgraphExec parent_exec;
  CU_OK(cuGraphInstantiateWithFlags(&parent_exec, parent, 0));
  CU_OK(cuGraphLaunch(parent_exec, nullptr));
  CU_OK(cuCtxSynchronize());
  EXPECT_EQ(3, calls);
  // Circles are found.
  CU_OK(cuGraphAddDependencies_v2(graph, &empty, &fill, nullptr, 1));
  CUgraphExec circle;
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuGraphInstantiateWithFlags(&circle, graph, 0));
  CU_OK(cuGraphExecDestroy(exec));
  CU_OK(cuGraphExecDestroy(parent_exec));
  CU_OK(cuGraphDestroy(graph));
  CU_OK(cuGraphDestroy(parent));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuGraphDestroy(parent));
}

TEST_F(GraphTest, NodesInsideAChildGraphAreNodesOfTheExecutable) {
  CUgraph inner, middle, graph;
  CUgraphNode copy, call, in_middle, in_graph;
  for (CUgraph* one : {&inner, &middle, &graph}) CU_OK(cuGraphCreate(one, 0));
  CUDA_MEMCPY3D move = {};
  move.srcMemoryType = move.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  move.srcDevice = word_;
  move.dstDevice = word_ + 32;
  move.WidthInBytes = 16;  // one row: executables take no others
  move.Height = move.Depth = 1;
  CU_OK(cuGraphAddMemcpyNode(&copy, inner, nullptr, 0, &move, context_));
  std::atomic<int> calls{0}, other_calls{0};
  const CUhostFn count = [](void* p) { ++*static_cast<std::atomic<int>*>(p); };
  CUDA_HOST_NODE_PARAMS params = {count, &calls};
  CU_OK(cuGraphAddHostNode(&call, inner, &copy, 1, &params));
  CU_OK(cuGraphAddChildGraphNode(&in_middle, middle, nullptr, 0, inner));
  CU_OK(cuGraphAddChildGraphNode(&in_graph, graph, nullptr, 0, middle));
  // The nodes of the copies inside.
  CUgraph of_graph, of_middle;
  CUgraphNode nodes[2];
  size_t nodes_count = 1;
  CU_OK(cuGraphChildGraphNodeGetGraph(in_graph, &of_graph));
  CU_OK(cuGraphGetNodes(of_graph, nodes, &nodes_count));
  CU_OK(cuGraphChildGraphNodeGetGraph(nodes[0], &of_middle));
  nodes_count = 2;
  CU_OK(cuGraphGetNodes(of_middle, nodes, &nodes_count));
  CUgraphExec exec;
  CU_OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
  const auto launch = [&](unsigned value) {
    CU_OK(cuMemsetD32_v2(word_, value, 8));
    CU_OK(cuMemsetD32_v2(word_ + 32, 0, 1));
    CU_OK(cuCtxSynchronize());
    CU_OK(cuGraphLaunch(exec, a_));
    CU_OK(cuStreamSynchronize(a_));
  };
  launch(5);
  EXPECT_EQ(5u, Word(8));
  EXPECT_EQ(1, calls);
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuGraphNodeSetEnabled(exec, nodes[1], 0));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuGraphNodeSetEnabled(exec, copy, 0));  // the child has a copy of it
  CU_OK(cuGraphNodeSetEnabled(exec, nodes[0], 0));
  params.userData = &other_calls;
  CU_OK(cuGraphExecHostNodeSetParams(exec, nodes[1], &params));
  launch(6);
  EXPECT_EQ(0u, Word(8));
  EXPECT_EQ(1, calls);
  EXPECT_EQ(1, other_calls);
  // Neither another child graph nor an update enables it, or takes its name.
  CU_OK(cuGraphExecChildGraphNodeSetParams(exec, in_graph, middle));
  launch(7);
  EXPECT_EQ(0u, Word(8));
  EXPECT_EQ(2, calls);
  CUgraphExecUpdateResultInfo info;
  CU_OK(cuGraphExecHostNodeSetParams(exec, nodes[1], &params));
  CU_OK(cuGraphExecUpdate_v2(exec, graph, &info));
  launch(8);
  EXPECT_EQ(0u, Word(8));
  EXPECT_EQ(3, calls);
  unsigned enabled = 2;
  CU_OK(cuGraphNodeGetEnabled(exec, nodes[0], &enabled));
  EXPECT_EQ(0u, enabled);
  CU_OK(cuGraphNodeSetEnabled(exec, nodes[0], 1));
  launch(9);
  EXPECT_EQ(9u, Word(8));
  // A launch that waits does what the executable was.
  move.srcDevice = word_ + 16;
  CU_OK(cuMemsetD32_v2(word_ + 16, 30, 4));
  CU_OK(cuMemsetD32_v2(word_ + 48, 0, 1));
  CU_OK(cuCtxSynchronize());  // the streams do not wait for a memset
  CU_OK(cuStreamWaitValue32_v2(a_, word_ + 48, 1, CU_STREAM_WAIT_VALUE_EQ));
  CU_OK(cuGraphLaunch(exec, a_));
  CU_OK(cuGraphExecMemcpyNodeSetParams(exec, nodes[0], &move, context_));
  CU_OK(cuStreamWriteValue32_v2(b_, word_ + 48, 1, 0));
  CU_OK(cuStreamSynchronize(a_));
  EXPECT_EQ(9u, Word(8));
  CU_OK(cuGraphLaunch(exec, a_));
  CU_OK(cuStreamSynchronize(a_));
  EXPECT_EQ(30u, Word(8));
  // Another topology inside.
  CU_OK(cuGraphAddEmptyNode(&call, of_middle, nullptr, 0));
  CU_IS(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, cuGraphExecUpdate_v2(exec, graph, &info));
  EXPECT_EQ(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, info.result);
  CU_IS(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, cuGraphExecChildGraphNodeSetParams(exec, in_graph, inner));
  CU_OK(cuGraphExecDestroy(exec));
  for (CUgraph one : {inner, middle, graph}) CU_OK(cuGraphDestroy(one));
}

TEST_F(GraphTest, MemoryAttributesAndUserObjects) {
  CUgraph graph;
  CU_OK(cuGraphCreate(&graph, 0));
  CUDA_MEM_ALLOC_NODE_PARAMS memory = {};
  memory.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  memory.poolProps.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
  memory.bytesize = 4096;
  CUgraphNode allocate, kernel, give;
  memory.poolProps.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CU_IS(CUDA_ERROR_NOT_SUPPORTED, cuGraphAddMemAllocNode(&allocate, graph, nullptr, 0, &memory));
  memory.poolProps.handleTypes = CU_MEM_HANDLE_TYPE_NONE;
  CU_OK(cuGraphAddMemAllocNode(&allocate, graph, nullptr, 0, &memory));
  ASSERT_NE(0u, memory.dptr);
  CU_OK(cuMemsetD32_v2(memory.dptr, 1, 1));
  CU_OK(cuCtxSynchronize());
  unsigned times = 6;
  void* params[] = {&memory.dptr, &times};
  CUDA_KERNEL_NODE_PARAMS_v2 launch = {bump_, 1, 1, 1, 1, 1, 1, 0, params, nullptr, nullptr, nullptr};
  CU_OK(cuGraphAddKernelNode_v2(&kernel, graph, &allocate, 1, &launch));
  CUkernelNodeAttrValue value = {};
  value.cooperative = 1;
  CU_OK(cuGraphKernelNodeSetAttribute(kernel, CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &value));
  value = {};
  CU_OK(cuGraphKernelNodeGetAttribute(kernel, CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &value));
  EXPECT_EQ(1, value.cooperative);
  CU_OK(cuGraphAddMemFreeNode(&give, graph, &kernel, 1, memory.dptr));
  CUgraphNodeType type;
  CU_OK(cuGraphNodeGetType(give, &type));
  EXPECT_EQ(CU_GRAPH_NODE_TYPE_MEM_FREE, type);
  std::atomic<int> destroyed{0};
  CUuserObject object;
  CU_OK(cuUserObjectCreate(
      &object, &destroyed, [](void* p) { ++*static_cast<std::atomic<int>*>(p); }, 1,
      CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
  CU_OK(cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE));
  CUgraphExec exec;
  CU_OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
  CU_OK(cuGraphDestroy(graph));
  EXPECT_EQ(0, destroyed);
  CU_OK(cuGraphLaunch(exec, a_));
  CU_OK(cuStreamSynchronize(a_));
  uint32_t got;
  CU_OK(cuMemcpyDtoH_v2(&got, memory.dptr, 4));
  EXPECT_EQ(7u, got);
  CU_OK(cuGraphExecDestroy(exec));
  EXPECT_EQ(1, destroyed);
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2(&got, memory.dptr, 4));
}

TEST_F(GraphTest, ClonesKnowTheirOrigin) {
  CUgraph graph, clone;
  CUgraphNode first, second, found;
  CU_OK(cuGraphCreate(&graph, 0));
  CU_OK(cuGraphAddEmptyNode(&first, graph, nullptr, 0));
  CU_OK(cuGraphAddEmptyNode(&second, graph, &first, 1));
  CU_OK(cuGraphClone(&clone, graph));
  CU_OK(cuGraphNodeFindInClone(&found, second, clone));
  CUgraphNode before = nullptr;
  size_t count = 1;
  CU_OK(cuGraphNodeGetDependencies_v2(found, &before, nullptr, &count));
  EXPECT_EQ(1u, count);
  EXPECT_NE(first, before);
  CU_OK(cuGraphDestroyNode(first));
  count = 0;
  CU_OK(cuGraphGetRootNodes(graph, nullptr, &count));
  EXPECT_EQ(1u, count);
  CU_OK(cuGraphDestroy(graph));
  CU_OK(cuGraphDestroy(clone));
}

CUDA_MEM_ALLOC_NODE_PARAMS Memory(size_t bytes) {
  CUDA_MEM_ALLOC_NODE_PARAMS params = {};
  params.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  params.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  params.bytesize = bytes;
  return params;
}

// What an H100 answers.
TEST_F(GraphTest, MemoryLivesUntilItIsFreed) {
  CUgraph graph;
  CUgraphNode node, other;
  CU_OK(cuGraphCreate(&graph, 0));
  CUDA_MEM_ALLOC_NODE_PARAMS memory = Memory(4096);
  CU_OK(cuGraphAddMemAllocNode(&node, graph, nullptr, 0, &memory));
  const CUDA_MEMSET_NODE_PARAMS fill = {memory.dptr, 0, 9, 1, 4096, 1};
  CU_OK(cuGraphAddMemsetNode(&other, graph, &node, 1, &fill, nullptr));
  CUgraphExec exec, second;
  CU_OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
  CU_IS(CUDA_ERROR_NOT_SUPPORTED, cuGraphInstantiateWithFlags(&second, graph, 0));
  CUgraph clone;
  CU_IS(CUDA_ERROR_NOT_SUPPORTED, cuGraphClone(&clone, graph));
  CU_IS(CUDA_ERROR_NOT_SUPPORTED, cuGraphDestroyNode(other));
  CU_IS(CUDA_ERROR_NOT_SUPPORTED, cuGraphRemoveDependencies_v2(graph, &node, &other, nullptr, 1));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemFreeAsync(memory.dptr, a_));
  CU_OK(cuGraphLaunch(exec, a_));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuGraphLaunch(exec, a_));
  CU_OK(cuStreamSynchronize(a_));
  unsigned char byte = 0;
  CU_OK(cuMemcpyDtoH_v2(&byte, memory.dptr + 4095, 1));
  EXPECT_EQ(9, byte);
  CU_OK(cuMemFreeAsync(memory.dptr, a_));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemFreeAsync(memory.dptr, a_));
  CU_OK(cuGraphLaunch(exec, a_));
  CU_OK(cuGraphExecDestroy(exec));
  CU_OK(cuGraphDestroy(graph));
  // It is alive, and nobody's but the program's.
  CU_OK(cuStreamSynchronize(a_));
  CU_OK(cuMemcpyDtoH_v2(&byte, memory.dptr, 1));
  CU_OK(cuMemFree_v2(memory.dptr));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(memory.dptr));
}

TEST_F(GraphTest, CapturedAllocations) {
  CUdeviceptr p = 0, plain = 0;
  CU_OK(cuMemAllocAsync(&plain, 64, a_));
  CU_OK(cuStreamBeginCapture_v2(a_, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CU_OK(cuMemAllocAsync(&p, 64, a_));
  CU_OK(cuMemsetD32Async(p, 77, 16, a_));
  CU_OK(cuMemcpyDtoDAsync_v2(word_, p, 64, a_));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemFreeAsync(plain, a_));  // and the capture goes on
  CU_OK(cuMemFreeAsync(p, a_));
  CUgraph graph;
  CU_OK(cuStreamEndCapture(a_, &graph));
  CUgraphNode nodes[8];
  size_t count = 8;
  CU_OK(cuGraphGetNodes(graph, nodes, &count));
  ASSERT_EQ(4u, count);
  CUgraphNodeType type;
  CU_OK(cuGraphNodeGetType(nodes[0], &type));
  EXPECT_EQ(CU_GRAPH_NODE_TYPE_MEM_ALLOC, type);
  CU_OK(cuGraphNodeGetType(nodes[3], &type));
  EXPECT_EQ(CU_GRAPH_NODE_TYPE_MEM_FREE, type);
  CUgraphExec exec;
  CU_OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
  for (int i = 0; i < 3; ++i) CU_OK(cuGraphLaunch(exec, a_));
  CU_OK(cuStreamSynchronize(a_));
  EXPECT_EQ(77u, Word(15));
  CU_OK(cuGraphExecDestroy(exec));
  CU_OK(cuGraphDestroy(graph));
  CU_OK(cuMemFreeAsync(plain, a_));
}

TEST_F(GraphTest, ConditionalNodes) {
  static const char kText[] = R"(.version 8.4
.target sm_90
.address_size 64
.extern .func cudaGraphSetConditional(.param .b64 handle, .param .b32 value);
.visible .entry count(.param .u64 p_handle, .param .u64 p_word, .param .u32 p_limit)
{
  .reg .pred %p<2>;
  .reg .b32 %r<4>;
  .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [p_handle];
  ld.param.u64 %rd2, [p_word];
  ld.param.u32 %r1, [p_limit];
  ld.global.u32 %r2, [%rd2];
  add.s32 %r2, %r2, 1;
  st.global.u32 [%rd2], %r2;
  setp.lt.u32 %p1, %r2, %r1;
  selp.u32 %r3, 1, 0, %p1;
  {
    .param .b64 in0;
    .param .b32 in1;
    st.param.b64 [in0], %rd1;
    st.param.b32 [in1], %r3;
    call.uni cudaGraphSetConditional, (in0, in1);
  }
  ret;
}
)";
  CUmodule module;
  CUfunction count;
  CU_OK(cuModuleLoadData(&module, kText));
  CU_OK(cuModuleGetFunction(&count, module, "count"));
  CUgraph graph;
  CU_OK(cuGraphCreate(&graph, 0));
  CUgraphConditionalHandle handle = 0, unused = 0;
  CUcontext context;
  CU_OK(cuCtxGetCurrent(&context));
  CU_IS(CUDA_ERROR_INVALID_CONTEXT, cuGraphConditionalHandleCreate(&handle, graph, nullptr, 1, 0));  // as on an H200
  CU_OK(cuGraphConditionalHandleCreate(&handle, graph, context, 1, CU_GRAPH_COND_ASSIGN_DEFAULT));
  CU_OK(cuGraphConditionalHandleCreate(&unused, graph, context, 0, 0));
  EXPECT_EQ(1u, handle);  // as on an H100
  EXPECT_EQ(2u, unused);
  CUgraphNodeParams params = {};
  params.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
  params.conditional.handle = handle;
  params.conditional.type = CU_GRAPH_COND_TYPE_WHILE;
  params.conditional.size = 2;
  CUgraphNode node, kernel;
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuGraphAddNode_v2(&node, graph, nullptr, nullptr, 0, &params));
  params.conditional.size = 1;
  CU_OK(cuGraphAddNode_v2(&node, graph, nullptr, nullptr, 0, &params));
  const CUgraph body = params.conditional.phGraph_out[0];
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuGraphAddNode_v2(&kernel, graph, nullptr, nullptr, 0, &params));
  uint32_t limit = 10;
  void* arguments[] = {&handle, &word_, &limit};
  const CUDA_KERNEL_NODE_PARAMS_v2 launch = {count, 1, 1, 1, 1, 1, 1, 0, arguments, nullptr, nullptr, nullptr};
  CU_OK(cuGraphAddKernelNode_v2(&kernel, body, nullptr, 0, &launch));
  CU_IS(CUDA_ERROR_INVALID_VALUE, cuGraphDestroy(body));
  CUgraph clone;
  CU_IS(CUDA_ERROR_NOT_SUPPORTED, cuGraphClone(&clone, graph));
  CUgraphExec exec, second;
  CU_OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
  CU_IS(CUDA_ERROR_NOT_SUPPORTED, cuGraphInstantiateWithFlags(&second, graph, 0));
  CU_OK(cuGraphLaunch(exec, a_));
  CU_OK(cuStreamSynchronize(a_));
  EXPECT_EQ(10u, Word());
  CU_OK(cuGraphLaunch(exec, a_));
  CU_OK(cuStreamSynchronize(a_));
  EXPECT_EQ(11u, Word());  // the default lets it in once
  CU_OK(cuGraphExecDestroy(exec));
  CU_OK(cuGraphDestroy(graph));
  CU_OK(cuModuleUnload(module));
}

}  // namespace
}  // namespace cuda_remote::softgpu
