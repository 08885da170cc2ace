// SPDX-License-Identifier: Apache-2.0
// What the worker finds out about graphs.

#include <cuda.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/worker/testing/client.h"
#include "server/worker/testing/worker_process.h"

namespace cuda_remote::server {
namespace {

class GraphTest : public testing::Test {
 protected:
  GraphTest()
      : worker_({WorkerPath(), "--driver", "softgpu/libsoftgpu.so", "--log-level", "warn"}),
        client_(worker_.Connect()) {}
  void SetUp() override {
    client_.OpenContext();
    wire::cuGraphCreate_Request create;
    create.phGraph = graph_ = client_.NewHandle(Kind::kGraph);
    ASSERT_EQ(client_.Call(kCall_cuGraphCreate, create), CUDA_SUCCESS);
  }

  uint64_t Add(const std::vector<uint64_t>& behind) {
    wire::cuGraphAddNode_v2_Request request;
    request.graph = graph_;
    request.node = client_.NewHandle(Kind::kGraphNode);
    request.dependencies = behind;
    request.params.type = CU_GRAPH_NODE_TYPE_EMPTY;
    EXPECT_EQ(client_.Call(kCall_cuGraphAddNode_v2, request), CUDA_SUCCESS);
    return request.node;
  }
  uint64_t Before(const std::vector<uint64_t>& nodes, const std::vector<uint64_t>& others) {
    wire::OpNodeBefore_Request request;
    request.nodes = nodes;
    request.others = others;
    EXPECT_EQ(client_.Call(kOpNodeBefore, request), CUDA_SUCCESS);
    return client_.Decode<wire::OpNodeBefore_Reply>().node;
  }

  WorkerProcess worker_;
  TestClient client_;
  uint64_t graph_ = 0;
};

TEST_F(GraphTest, NodesThatComeBeforeOthers) {
  const uint64_t first = Add({}), second = Add({first}), third = Add({second}), apart = Add({});
  const uint64_t both = Add({apart, third});
  EXPECT_EQ(Before({first}, {third}), first);
  EXPECT_EQ(Before({first}, {first}), first);
  EXPECT_EQ(Before({first, second}, {third}), second);  // the nearer one
  EXPECT_EQ(Before({apart, both}, {third}), 0u);
  EXPECT_EQ(Before({apart}, {both}), apart);
  EXPECT_EQ(Before({first, client_.NewHandle(Kind::kGraphNode)}, {apart, third}), first);
  EXPECT_EQ(Before({first}, {}), 0u);
  wire::OpNodeBefore_Request wrong;
  wrong.others = {client_.NewHandle(Kind::kGraphNode)};
  EXPECT_EQ(client_.Call(kOpNodeBefore, wrong), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(GraphTest, NodesFarAwayAreNotLookedFor) {
  const uint64_t first = Add({});
  uint64_t last = first;
  for (int i = 0; i < 900; ++i) last = Add({last});
  EXPECT_EQ(Before({first}, {last}), first);
  for (int i = 0; i < 200; ++i) last = Add({last});
  EXPECT_EQ(Before({first}, {last}), 0u);
}

}  // namespace
}  // namespace cuda_remote::server
