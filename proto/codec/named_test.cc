// SPDX-License-Identifier: Apache-2.0
// What requests name, by the tables.
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "proto/codec/named.gen.h"

namespace cuda_remote::wire {
namespace {

struct All : IgnoreNamed {
  std::vector<uint64_t> addresses, functions, events;
  std::vector<std::string> fills, copies;
  bool external = false;
  int nodes = 0;
  void Address(uint64_t address) { addresses.push_back(address); }
  void Fill(std::string_view params) { fills.emplace_back(params); }
  void Copy2d(std::string_view params) { copies.emplace_back(params); }
  void Node(const NodeParams& params) { nodes += int(params.type); }
  void Function(uint64_t function) { functions.push_back(function); }
  void Event(uint64_t event) { events.push_back(event); }
  void ExternalFlag(uint32_t flags) { external = flags == 1; }
};

template <typename Request>
All Visit(uint32_t call, const Request& request) {
  std::string message;
  request.Encode(&message);
  All all;
  EXPECT_TRUE(VisitNamed(call, message, &all));
  return all;
}

TEST(Named, EachKindIsHandedOver) {
  cuMemcpyAsync_Request copy;
  copy.dst = 1;
  copy.src = 2;
  EXPECT_EQ(Visit(kCall_cuMemcpyAsync, copy).addresses, (std::vector<uint64_t>{1, 2}));
  cuGraphMemsetNodeSetParams_Request fill;
  fill.nodeParams = "params";
  EXPECT_EQ(Visit(kCall_cuGraphMemsetNodeSetParams, fill).fills, std::vector<std::string>{"params"});
  cuMemcpy2DAsync_v2_Request shaped;
  shaped.copy = "copy";
  EXPECT_EQ(Visit(kCall_cuMemcpy2DAsync_v2, shaped).copies, std::vector<std::string>{"copy"});
  cuGraphNodeSetParams_Request node;
  node.params.type = 7;
  EXPECT_EQ(Visit(kCall_cuGraphNodeSetParams, node).nodes, 7);
  cuLaunchKernel_Request launch;
  launch.f = 3;
  EXPECT_EQ(Visit(kCall_cuLaunchKernel, launch).functions, std::vector<uint64_t>{3});
  cuStreamWaitEvent_Request wait;
  wait.hEvent = 4;
  wait.Flags = 1;
  const All waited = Visit(kCall_cuStreamWaitEvent, wait);
  EXPECT_EQ(waited.events, std::vector<uint64_t>{4});
  EXPECT_TRUE(waited.external);
}

TEST(Named, MalformedRequestsNameNothing) {
  cuMemcpyAsync_Request copy;
  copy.dst = 1000;
  copy.src = 2000;
  std::string message;
  copy.Encode(&message);
  message.pop_back();
  All all;
  EXPECT_FALSE(VisitNamed(kCall_cuMemcpyAsync, message, &all));
  EXPECT_TRUE(all.addresses.empty());
}

TEST(Named, OtherRequestsNameNothing) {
  All all;
  EXPECT_FALSE(VisitNamed(kCall_cuMemGetInfo_v2, "", &all));
  EXPECT_FALSE(VisitNamed(0xffffffff, "", &all));
}

}  // namespace
}  // namespace cuda_remote::wire
