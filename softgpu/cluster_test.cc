// SPDX-License-Identifier: Apache-2.0
// Launch attributes: clusters, what is asked of them, and what nodes and edges of graphs keep of them.
#include <vector>

#include "softgpu/testing/fixture.h"

namespace cuda_remote::softgpu {
namespace {

// Each block adds to the word of its rank what it is: its own number.
constexpr char kClusterPtx[] = R"(
.version 8.5
.target sm_90
.address_size 64
.visible .entry any(.param .u64 data)
{
  .reg .b32 %r<4>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [data];
  mov.u32 %r1, %cluster_ctarank;
  mul.wide.u32 %rd2, %r1, 4;
  add.u64 %rd3, %rd1, %rd2;
  mov.u32 %r2, %ctaid.x;
  red.global.add.u32 [%rd3], %r2;
  ret;
}
.visible .entry pairs(.param .u64 data)
.explicitcluster
.reqnctapercluster 2, 1, 1
{
  .reg .b32 %r<4>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [data];
  mov.u32 %r1, %cluster_ctarank;
  mul.wide.u32 %rd2, %r1, 4;
  add.u64 %rd3, %rd1, %rd2;
  red.global.add.u32 [%rd3], 1;
  ret;
}
)";

class ClusterTest : public SoftGpuTest {
 protected:
  void SetUp() override {
    SoftGpuTest::SetUp();
    CU_OK(cuModuleLoadData(&clusters_, kClusterPtx));
    CU_OK(cuModuleGetFunction(&any_, clusters_, "any"));
    CU_OK(cuModuleGetFunction(&pairs_, clusters_, "pairs"));
    CU_OK(cuMemAlloc_v2(&data_, 64));
    CU_OK(cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING));
    CU_OK(cuMemsetD32Async(data_, 0, 16, stream_));
  }
  uint32_t Word(int i) {
    uint32_t value = 0;
    EXPECT_EQ(CUDA_SUCCESS, Cu().cuMemcpyDtoH_v2(&value, data_ + 4 * i, 4));
    return value;
  }
  CUlaunchAttribute Cluster(unsigned x, unsigned y = 1, unsigned z = 1) {
    CUlaunchAttribute attribute = {};
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim.x = x;
    attribute.value.clusterDim.y = y;
    attribute.value.clusterDim.z = z;
    return attribute;
  }
  CUlaunchConfig Config(unsigned blocks, std::vector<CUlaunchAttribute>* attributes) {
    CUlaunchConfig config = {};
    config.gridDimX = blocks;
    config.gridDimY = config.gridDimZ = config.blockDimX = config.blockDimY = config.blockDimZ = 1;
    config.hStream = stream_;
    config.attrs = attributes->data();
    config.numAttrs = static_cast<unsigned>(attributes->size());
    return config;
  }
  CUresult Launch(CUfunction function, unsigned blocks, std::vector<CUlaunchAttribute> attributes) {
    const CUlaunchConfig config = Config(blocks, &attributes);
    void* params[] = {&data_};
    return Cu().cuLaunchKernelEx(&config, function, params, nullptr);
  }

  CUmodule clusters_ = nullptr;
  CUfunction any_ = nullptr, pairs_ = nullptr;
  CUdeviceptr data_ = 0;
  CUstream stream_ = nullptr;
};

TEST_F(ClusterTest, Launches) {
  int value = 0;
  CU_OK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, 0));
  EXPECT_EQ(1, value);
  ASSERT_EQ(CUDA_SUCCESS, Launch(any_, 8, {Cluster(4)}));
  CU_OK(cuStreamSynchronize(stream_));
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(2u * rank + 4, Word(rank));
  CU_OK(cuMemsetD32Async(data_, 0, 16, stream_));
  ASSERT_EQ(CUDA_SUCCESS, Launch(pairs_, 6, {}));
  CU_OK(cuStreamSynchronize(stream_));
  EXPECT_EQ(3u, Word(0));
  EXPECT_EQ(3u, Word(1));
  // What cannot be.
  EXPECT_EQ(CUDA_ERROR_INVALID_CLUSTER_SIZE, Launch(any_, 6, {Cluster(4)}));
  EXPECT_EQ(CUDA_ERROR_INVALID_CLUSTER_SIZE, Launch(any_, 4, {Cluster(0)}));
  EXPECT_EQ(CUDA_ERROR_INVALID_CLUSTER_SIZE, Launch(pairs_, 5, {}));
  EXPECT_EQ(CUDA_ERROR_INVALID_CLUSTER_SIZE, Launch(pairs_, 8, {Cluster(4)}));
  EXPECT_EQ(CUDA_ERROR_INVALID_CLUSTER_SIZE, Launch(any_, 16, {Cluster(16)}));
  CU_OK(cuFuncSetAttribute(any_, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1));
  EXPECT_EQ(CUDA_SUCCESS, Launch(any_, 16, {Cluster(16)}));
  EXPECT_EQ(CUDA_ERROR_INVALID_CLUSTER_SIZE, Launch(any_, 32, {Cluster(32)}));
  CU_OK(cuStreamSynchronize(stream_));
}

TEST_F(ClusterTest, Questions) {
  int value = 0;
  CU_OK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH, pairs_));
  EXPECT_EQ(2, value);
  CU_OK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET, pairs_));
  EXPECT_EQ(1, value);
  CU_IS(CUDA_ERROR_NOT_PERMITTED, cuFuncSetAttribute(pairs_, CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH, 4));
  std::vector<CUlaunchAttribute> attributes = {Cluster(8)};
  CUlaunchConfig config = Config(8, &attributes);
  int one = 0, eight = 0;
  CU_OK(cuOccupancyMaxActiveClusters(&eight, any_, &config));
  attributes = {Cluster(1)};
  CU_OK(cuOccupancyMaxActiveClusters(&one, any_, &config));
  EXPECT_LT(0, eight);
  EXPECT_EQ(one / 8, eight);
  CU_OK(cuOccupancyMaxPotentialClusterSize(&value, any_, &config));
  EXPECT_EQ(8, value);
  CU_OK(cuFuncSetAttribute(any_, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1));
  CU_OK(cuOccupancyMaxPotentialClusterSize(&value, any_, &config));
  EXPECT_EQ(16, value);
}

// A capture keeps what its launches said, a change of parameters keeps it too, and the graph runs with it.
TEST_F(ClusterTest, Graphs) {
  CUlaunchAttribute early = {}, policy = {};
  early.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  early.value.programmaticStreamSerializationAllowed = 1;
  policy.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE;
  policy.value.clusterSchedulingPolicyPreference = CU_CLUSTER_SCHEDULING_POLICY_LOAD_BALANCING;
  CUgraph graph;
  CU_OK(cuStreamBeginCapture_v2(stream_, CU_STREAM_CAPTURE_MODE_GLOBAL));
  ASSERT_EQ(CUDA_SUCCESS, Launch(pairs_, 2, {}));
  ASSERT_EQ(CUDA_SUCCESS, Launch(any_, 8, {Cluster(4), policy, early}));
  CU_OK(cuStreamEndCapture(stream_, &graph));
  CUgraphNode nodes[2], from[1], to[1];
  size_t count = 2;
  CU_OK(cuGraphGetNodes(graph, nodes, &count));
  CUkernelNodeAttrValue value = {};
  CU_OK(cuGraphKernelNodeGetAttribute(nodes[0], CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, &value));
  EXPECT_EQ(2u, value.clusterDim.x);
  CU_OK(cuGraphKernelNodeGetAttribute(nodes[1], CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, &value));
  EXPECT_EQ(4u, value.clusterDim.x);
  CU_OK(cuGraphKernelNodeGetAttribute(nodes[1], CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE, &value));
  EXPECT_EQ(CU_CLUSTER_SCHEDULING_POLICY_LOAD_BALANCING, value.clusterSchedulingPolicyPreference);
  CU_OK(cuGraphKernelNodeGetAttribute(nodes[0], CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE, &value));
  EXPECT_EQ(CU_CLUSTER_SCHEDULING_POLICY_SPREAD, value.clusterSchedulingPolicyPreference);  // the default's meaning
  // The edge says that the second kernel may start early; a question that cannot be told so is refused.
  CUgraphEdgeData edge = {};
  count = 1;
  CU_IS(CUDA_ERROR_LOSSY_QUERY, cuGraphGetEdges_v2(graph, from, to, nullptr, &count));
  CU_OK(cuGraphGetEdges_v2(graph, from, to, &edge, &count));
  EXPECT_EQ(CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC, edge.type);
  EXPECT_EQ(CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, edge.from_port);
  // A grid that its clusters do not fill is refused, and nothing changes.
  CUDA_KERNEL_NODE_PARAMS params = {};
  CU_OK(cuGraphKernelNodeGetParams_v2(nodes[1], &params));
  params.gridDimX = 6;
  CU_IS(CUDA_ERROR_INVALID_CLUSTER_SIZE, cuGraphKernelNodeSetParams_v2(nodes[1], &params));
  params.gridDimX = 4;
  CU_OK(cuGraphKernelNodeSetParams_v2(nodes[1], &params));
  CU_IS(CUDA_ERROR_INVALID_CLUSTER_SIZE, cuGraphKernelNodeCopyAttributes(nodes[0], nodes[1]));
  CUgraphExec exec;
  CU_OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
  CU_OK(cuGraphLaunch(exec, stream_));
  CU_OK(cuStreamSynchronize(stream_));
  for (uint32_t rank = 0; rank < 4; ++rank) EXPECT_EQ(rank + (rank < 2 ? 1 : 0), Word(int(rank)));
  CU_OK(cuGraphExecDestroy(exec));
  CU_OK(cuGraphDestroy(graph));
}

}  // namespace
}  // namespace cuda_remote::softgpu
