// SPDX-License-Identifier: Apache-2.0
// Copy nodes of pageable memory: what the server is given in their place, what the application sees, and who has the
// pinned memory when.
#include "client/calls/staged_node.h"

#include <cuda.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "client/calls/testing/custom_fixture.h"
#include "client/core/coverage.h"
#include "client/core/session.h"
#include "client/graphs/staged_copies.h"
#include "proto/codec/codec.h"
#include "proto/codec/decode_as.h"

namespace cuda_remote::client {
namespace {

// What the server knows of graphs: enough to answer for the copy of a child graph that a node has in it.
struct Graphs {
  struct Node {
    uint64_t handle;  // 0: it has none yet
    int type;
    uint64_t from = 0;  // the node that it is a copy of
  };
  std::map<uint64_t, std::vector<Node>> nodes;  // by graph
  std::map<uint64_t, uint64_t> child;           // by node: the graph that it was made with, then its own
  std::map<uint64_t, bool> asked;               // by node: whether its own graph has a handle
  std::map<uint64_t, std::string> copies;       // by node
  std::map<uint64_t, uint64_t> functions;       // by node: what a host node calls

  FakeServer::Answer Add(const FakeServer::Request& request) {
    wire::cuGraphAddNode_v2_Request in;
    EXPECT_TRUE(in.Decode(request.message));
    nodes[in.graph].push_back({in.node, in.params.type});
    child[in.node] = in.params.graph;
    copies[in.node] = in.params.copy;
    functions[in.node] = in.params.host_function;
    return {};
  }
  FakeServer::Answer Set(const FakeServer::Request& request) {
    wire::cuGraphNodeSetParams_Request in;
    EXPECT_TRUE(in.Decode(request.message));
    if (in.params.type == CU_GRAPH_NODE_TYPE_HOST) functions[in.node] = in.params.host_function;
    return {};
  }
  FakeServer::Answer Params(const FakeServer::Request& request) {
    wire::OpGraphNodeParams_Request in;
    wire::OpGraphNodeParams_Reply out;
    EXPECT_TRUE(in.Decode(request.message));
    out.params.copy = copies[in.node];
    out.params.host_function = functions[in.node];
    return {CUDA_SUCCESS, Encoded(out)};
  }
  FakeServer::Answer GetGraph(const FakeServer::Request& request) {
    wire::cuGraphChildGraphNodeGetGraph_Request in;
    wire::cuGraphChildGraphNodeGetGraph_Reply out;
    EXPECT_TRUE(in.Decode(request.message));
    if (!asked[in.node]) {
      std::vector<Node> copies = nodes[child[in.node]];
      for (Node& one : copies) {
        one.from = one.handle;
        one.handle = 0;
      }
      nodes[in.graph] = copies;
      child[in.node] = in.graph;
      asked[in.node] = true;
    }
    out.graph = child[in.node];
    return {CUDA_SUCCESS, Encoded(out)};
  }
  FakeServer::Answer Name(const FakeServer::Request& request) {
    wire::OpGraphNames_Request in;
    wire::OpGraphNames_Reply out;
    EXPECT_TRUE(in.Decode(request.message));
    auto given = in.nodes.begin();
    for (Node& one : nodes[in.graph]) {
      if (one.handle == 0 && given != in.nodes.end()) {
        one.handle = *given++;
        child[one.handle] = child[one.from];
        copies[one.handle] = copies[one.from];
        functions[one.handle] = functions[one.from];
      }
      if (one.handle == 0) ++out.unnamed;
    }
    return {CUDA_SUCCESS, Encoded(out)};
  }
  FakeServer::Answer List(const FakeServer::Request& request) {
    wire::cuGraphGetNodes_Request in;
    wire::cuGraphGetNodes_Reply out;
    EXPECT_TRUE(in.Decode(request.message));
    std::string handles;
    for (const Node& one : nodes[in.hGraph]) handles += Bytes(one.handle);
    out.nodes = handles;
    out.numNodes = nodes[in.hGraph].size();
    return {CUDA_SUCCESS, Encoded(out)};
  }
  FakeServer::Answer Type(const FakeServer::Request& request) {
    wire::cuGraphNodeGetType_Request in;
    wire::cuGraphNodeGetType_Reply out;
    EXPECT_TRUE(in.Decode(request.message));
    for (const auto& [graph, all] : nodes) {
      for (const Node& one : all) {
        if (one.handle == in.hNode) out.type = one.type;
      }
    }
    return {CUDA_SUCCESS, Encoded(out)};
  }
};

class StagedNodeTest : public CustomTest {
 protected:
  void SetUp() override {
    CustomTest::SetUp();
    // Memory that is not freed keeps its address.
    static uint64_t next = driverabi::kReservationBase;
    AllocateFrom(&next);
    ASSERT_EQ(cuGraphCreate(&graph_, 0), CUDA_SUCCESS);
    ASSERT_EQ(cuMemAlloc(&memory_, 1 << 16), CUDA_SUCCESS);
    // Every test begins without pieces: those of earlier tests are out of the way.
    while (StagedCopy* const one = Session::Get()->graphs().staged_copies().Take(0)) earlier_.push_back(one);
    Answer();
    Sent();
  }
  void TearDown() override {
    if (pinned_) {
      EXPECT_EQ(cuMemFreeHost(pinned_), CUDA_SUCCESS);
    }
    server_->On(kCall_cuGraphNodeGetEnabled, FakeServer::Answer());
    EXPECT_EQ(cuGraphDestroy(graph_), CUDA_SUCCESS);
    EXPECT_EQ(cuMemFree(memory_), CUDA_SUCCESS);
    EXPECT_EQ(Session::Get()->lost(), CUDA_SUCCESS);
  }

  // Has the server answer as it should.
  void Answer() {
    server_->On(kCall_cuGraphAddNode_v2, [this](const auto& request) { return graphs_.Add(request); });
    server_->On(kCall_cuGraphChildGraphNodeGetGraph, [this](const auto& request) { return graphs_.GetGraph(request); });
    server_->On(kOpGraphNodeParams, [this](const auto& request) { return graphs_.Params(request); });
    server_->On(kOpGraphNames, [this](const auto& request) { return graphs_.Name(request); });
    server_->On(kCall_cuGraphGetNodes, [this](const auto& request) { return graphs_.List(request); });
    server_->On(kCall_cuGraphNodeGetType, [this](const auto& request) { return graphs_.Type(request); });
    server_->On(kCall_cuGraphNodeSetParams, [this](const auto& request) { return graphs_.Set(request); });
    for (const uint32_t call :
         {uint32_t(kCall_cuGraphCreate), uint32_t(kCall_cuUserObjectCreate), uint32_t(kCall_cuGraphRetainUserObject),
          uint32_t(kCall_cuGraphExecNodeSetParams), uint32_t(kCall_cuGraphNodeSetEnabled)})
      server_->On(call, FakeServer::Answer());
  }

  // One row between pageable and device memory.
  CUDA_MEMCPY3D ToDevice(const void* from, size_t bytes) const {
    CUDA_MEMCPY3D copy{};
    copy.srcMemoryType = CU_MEMORYTYPE_HOST;
    copy.srcHost = from;
    copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.dstDevice = memory_;
    copy.WidthInBytes = bytes;
    copy.Height = copy.Depth = 1;
    return copy;
  }
  CUDA_MEMCPY3D ToHost(void* to, size_t bytes) const {
    CUDA_MEMCPY3D copy{};
    copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = memory_;
    copy.dstMemoryType = CU_MEMORYTYPE_HOST;
    copy.dstHost = to;
    copy.WidthInBytes = bytes;
    copy.Height = copy.Depth = 1;
    return copy;
  }
  CUgraphNode Add(const CUDA_MEMCPY3D& copy) {
    CUgraphNode node = nullptr;
    EXPECT_EQ(cuGraphAddMemcpyNode(&node, graph_, nullptr, 0, &copy, nullptr), CUDA_SUCCESS);
    return node;
  }

  // Requests of the driver's own calls.
  struct Requests {
    Calls calls;
    std::vector<FakeServer::Request> all;
    template <typename Request>
    bool Read(size_t index, Request* request) const {
      *request = {};
      return index < all.size() && wire::DecodeAs(all[index].header.call, all[index].message, request);
    }
    // The nodes' parameters among them, in their order. Views: they live as long as this.
    std::vector<wire::NodeParams> Params(int type) const {
      std::vector<wire::NodeParams> found;
      for (const FakeServer::Request& one : all) {
        wire::cuGraphAddNode_v2_Request added;
        wire::cuGraphNodeSetParams_Request set;
        wire::cuGraphExecNodeSetParams_Request set_exec;
        const wire::NodeParams* params = nullptr;
        if (wire::DecodeAs(one.header.call, one.message, &added)) params = &added.params;
        if (wire::DecodeAs(one.header.call, one.message, &set)) params = &set.params;
        if (wire::DecodeAs(one.header.call, one.message, &set_exec)) params = &set_exec.params;
        if (params && params->type == type) found.push_back(*params);
      }
      return found;
    }
    // The pinned memory's copy: the last one.
    CUDA_MEMCPY3D Copy() const {
      CUDA_MEMCPY3D copy{};
      const std::vector<wire::NodeParams> found = Params(CU_GRAPH_NODE_TYPE_MEMCPY);
      EXPECT_FALSE(found.empty());
      if (!found.empty() && found.back().copy.size() == sizeof copy)
        memcpy(&copy, found.back().copy.data(), sizeof copy);
      return copy;
    }
    // Runs the host function as a launch would.
    void Run() const {
      const std::vector<wire::NodeParams> found = Params(CU_GRAPH_NODE_TYPE_HOST);
      ASSERT_FALSE(found.empty());
      CUhostFn function = nullptr;
      void* data = nullptr;
      ASSERT_TRUE(Session::Get()->host_functions().FindForGraph(found.back().host_function, &function, &data));
      function(data);
    }
    uint64_t Object() const {
      wire::cuUserObjectCreate_Request created;
      for (size_t i = 0; i < all.size(); ++i) {
        if (Read(i, &created)) return created.object;
      }
      return 0;
    }
  };
  Requests Take() {
    Requests taken;
    for (const FakeServer::Request& one : SentRequests()) {
      if (one.header.call >= kFirstOperation) continue;  // how host memory comes to the server, if it has to
      taken.calls.push_back(one.header.call);
      taken.all.push_back(one);
    }
    return taken;
  }

  // The server says that nothing has the piece any more. Waits until the client knows.
  void Gone(uint64_t object) {
    wire::OpUserObjectGone_Request gone;
    gone.object = object;
    server_->Event(kOpUserObjectGone, Encoded(gone));
    const auto there = [object] {
      ReaderLock lock(&Session::Get()->objects().mutex());
      return Session::Get()->objects().handles().Find(Kind::kUserObject, object) != nullptr;
    };
    for (int i = 0; i < 30000 && there(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_FALSE(there());
  }
  // Whether there is a free piece.
  static bool HasPiece() {
    StagedCopy* const one = Session::Get()->graphs().staged_copies().Take(0);
    if (one) Session::Get()->graphs().staged_copies().Give({one});
    return one != nullptr;
  }

  static bool IsEnabled(CUgraphExec exec, CUgraphNode node) {
    unsigned enabled = 2;
    EXPECT_EQ(cuGraphNodeGetEnabled(exec, node, &enabled), CUDA_SUCCESS);
    EXPECT_LT(enabled, 2u);
    return enabled != 0;
  }
  // Disables or enables a node, and returns what that sent.
  Requests Enable(CUgraphExec exec, CUgraphNode node, unsigned enabled) {
    Take();
    EXPECT_EQ(cuGraphNodeSetEnabled(exec, node, enabled), CUDA_SUCCESS);
    EXPECT_EQ(IsEnabled(exec, node), enabled != 0);
    return Take();
  }
  CUgraphExec Instantiate() {
    CUgraphExec exec = nullptr;
    EXPECT_EQ(cuGraphInstantiate(&exec, graph_, 0), CUDA_SUCCESS);
    return exec;
  }
  // That the host function moves bytes from `from` to `to`, or, while the node is disabled, none.
  static void ExpectMoves(const Requests& sent, const void* from, void* to, size_t bytes, bool moves) {
    memset(const_cast<void*>(from), 'f', bytes);
    memset(to, 't', bytes);
    sent.Run();
    EXPECT_EQ(std::string(static_cast<char*>(to), bytes), std::string(bytes, moves ? 'f' : 't'));
  }

  static size_t Disguised() {
    ReaderLock lock(&Session::Get()->graphs().disguised_nodes().mutex());
    return Session::Get()->graphs().disguised_nodes().nodes().size();
  }
  // What the application is told about a node, which is known here.
  void ExpectSeen(CUgraphNode node, const CUDA_MEMCPY3D& copy) {
    Sent();
    CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
    CUDA_MEMCPY3D seen{};
    EXPECT_EQ(cuGraphNodeGetType(node, &type), CUDA_SUCCESS);
    EXPECT_EQ(type, CU_GRAPH_NODE_TYPE_MEMCPY);
    EXPECT_EQ(cuGraphMemcpyNodeGetParams(node, &seen), CUDA_SUCCESS);
    EXPECT_EQ(Bytes(seen), Bytes(copy));
    EXPECT_EQ(Sent(), Calls());
  }

  CUgraph graph_ = nullptr;
  CUdeviceptr memory_ = 0;
  void* pinned_ = nullptr;
  Graphs graphs_;  // the serving thread's while a call waits
  inline static std::vector<StagedCopy*> earlier_;
};

const Calls kAdded{kCall_cuGraphCreate,     kCall_cuUserObjectCreate, kCall_cuGraphRetainUserObject,
                   kCall_cuGraphAddNode_v2, kCall_cuGraphAddNode_v2,  kCall_cuGraphAddNode_v2,
                   kCall_cuGraphDestroy};

TEST_F(StagedNodeTest, ACopyToTheDeviceReadsTheMemoryAtEveryLaunch) {
  std::string host(1000, 'a');
  const CUDA_MEMCPY3D copy = ToDevice(host.data(), host.size());
  const CUgraphNode before = Add(ToDevice(host.data(), 1));
  Take();
  CUgraphNode node = nullptr;
  ASSERT_EQ(cuGraphAddMemcpyNode(&node, graph_, &before, 1, &copy, context_), CUDA_SUCCESS);
  const Requests sent = Take();
  ASSERT_EQ(sent.calls, kAdded);
  wire::cuGraphCreate_Request child;
  wire::cuUserObjectCreate_Request object;
  wire::cuGraphRetainUserObject_Request retained;
  wire::cuGraphAddNode_v2_Request first, second, added;
  wire::cuGraphDestroy_Request destroyed;
  ASSERT_TRUE(sent.Read(0, &child) && sent.Read(1, &object) && sent.Read(2, &retained) && sent.Read(3, &first) &&
              sent.Read(4, &second) && sent.Read(5, &added) && sent.Read(6, &destroyed));
  // The child graph: the host function, then the copy of pinned memory.
  EXPECT_EQ(first.graph, child.phGraph);
  EXPECT_EQ(first.params.type, CU_GRAPH_NODE_TYPE_HOST);
  EXPECT_TRUE(first.dependencies.empty());
  EXPECT_EQ(second.graph, child.phGraph);
  EXPECT_EQ(second.params.type, CU_GRAPH_NODE_TYPE_MEMCPY);
  EXPECT_EQ(second.dependencies, std::vector<uint64_t>{first.node});
  EXPECT_EQ(second.params.context, HandleOf(context_));
  const CUDA_MEMCPY3D pinned = sent.Copy();
  EXPECT_EQ(pinned.srcMemoryType, CU_MEMORYTYPE_DEVICE);
  EXPECT_TRUE(HostArena::Contains(pinned.srcDevice));
  EXPECT_EQ(pinned.dstMemoryType, CU_MEMORYTYPE_DEVICE);
  EXPECT_EQ(pinned.dstDevice, memory_);
  EXPECT_EQ(pinned.WidthInBytes, host.size());
  // It has the pinned memory as a user object.
  EXPECT_EQ(object.count, 1u);
  EXPECT_EQ(object.flags, unsigned(CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
  EXPECT_EQ(retained.graph, child.phGraph);
  EXPECT_EQ(retained.object, object.object);
  EXPECT_EQ(retained.count, 1u);
  EXPECT_EQ(retained.flags, unsigned(CU_GRAPH_USER_OBJECT_MOVE));
  // The node is the child graph, which then has served.
  EXPECT_EQ(added.graph, HandleOf(graph_));
  EXPECT_EQ(added.node, HandleOf(node));
  EXPECT_EQ(added.dependencies, std::vector<uint64_t>{HandleOf(before)});
  EXPECT_EQ(added.params.type, CU_GRAPH_NODE_TYPE_GRAPH);
  EXPECT_EQ(added.params.graph, child.phGraph);
  EXPECT_EQ(destroyed.hGraph, child.phGraph);
  EXPECT_TRUE(InLog(Kind::kGraphNode, HandleOf(node)));

  for (const char* text : {"one", "another"}) {
    host.replace(0, strlen(text), text);
    sent.Run();
    EXPECT_EQ(std::string(reinterpret_cast<char*>(pinned.srcDevice), host.size()), host);
  }
  ExpectSeen(node, copy);
}

TEST_F(StagedNodeTest, ACopyToTheDeviceGoesByPackedRows) {
  std::string host = "........ab..cd..........ef..gh..";
  CUDA_MEMCPY3D copy = ToDevice(host.data(), 2);
  copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  copy.Height = copy.Depth = 2;
  copy.srcPitch = 4;
  copy.srcHeight = 4;
  copy.srcY = 2;
  copy.dstPitch = 32;
  copy.dstHeight = 3;
  copy.dstXInBytes = 1;
  const CUgraphNode node = Add(copy);
  const Requests sent = Take();
  EXPECT_EQ(sent.calls, kAdded) << "the other side is known to be the device's";
  const CUDA_MEMCPY3D pinned = sent.Copy();
  EXPECT_EQ(pinned.srcPitch, 2u);
  EXPECT_EQ(pinned.srcHeight, 2u);
  EXPECT_EQ(pinned.srcXInBytes + pinned.srcY + pinned.srcZ, 0u);
  EXPECT_EQ(pinned.dstDevice, memory_);
  EXPECT_EQ(pinned.dstPitch, 32u);
  EXPECT_EQ(pinned.dstHeight, 3u);
  EXPECT_EQ(pinned.dstXInBytes, 1u);
  sent.Run();
  EXPECT_EQ(std::string(reinterpret_cast<char*>(pinned.srcDevice), 8), "abcdefgh");
  ExpectSeen(node, copy);
}

// Without a pitch, rows are as long as the copied one and what lies to its left; without a height, slices likewise.
TEST_F(StagedNodeTest, ARowWithoutAPitch) {
  const std::string host = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ";
  CUDA_MEMCPY3D copy = ToDevice(nullptr, 4);
  copy.srcMemoryType = CU_MEMORYTYPE_UNIFIED;
  copy.srcDevice = reinterpret_cast<CUdeviceptr>(host.data());
  copy.srcXInBytes = copy.srcZ = 1;
  copy.srcY = 2;
  Add(copy);
  const Requests sent = Take();
  sent.Run();
  EXPECT_EQ(std::string(reinterpret_cast<char*>(sent.Copy().srcDevice), 4), host.substr((1 * 3 + 2) * 5 + 1, 4));
}

TEST_F(StagedNodeTest, ACopyToTheHostWritesTheShapeOnly) {
  constexpr size_t kWidth = 5, kHeight = 3, kDepth = 2, kPitch = 11, kRows = 6, kSlices = 4;
  std::string host(kPitch * kRows * kSlices, '.');
  CUDA_MEMCPY3D copy = ToHost(&host[0], kWidth);
  copy.Height = kHeight;
  copy.Depth = kDepth;
  copy.dstPitch = kPitch;
  copy.dstHeight = kRows;
  copy.dstXInBytes = 2;
  copy.dstY = 1;
  copy.dstZ = 1;
  copy.srcPitch = 64;
  copy.srcHeight = 8;
  copy.srcXInBytes = 3;
  copy.srcY = 4;
  copy.srcZ = 1;
  CUgraphNodeParams any{};
  any.type = CU_GRAPH_NODE_TYPE_MEMCPY;
  any.memcpy.copyParams = copy;
  CUgraphNode node = nullptr;
  ASSERT_EQ(cuGraphAddNode(&node, graph_, nullptr, nullptr, 0, &any), CUDA_SUCCESS);
  const Requests sent = Take();
  ASSERT_EQ(sent.calls, kAdded);
  wire::cuGraphAddNode_v2_Request first, second;
  ASSERT_TRUE(sent.Read(3, &first) && sent.Read(4, &second));
  EXPECT_EQ(first.params.type, CU_GRAPH_NODE_TYPE_MEMCPY);
  EXPECT_EQ(second.params.type, CU_GRAPH_NODE_TYPE_HOST);
  EXPECT_EQ(second.dependencies, std::vector<uint64_t>{first.node});
  // The device's side as it was; the pinned one packed.
  const CUDA_MEMCPY3D pinned = sent.Copy();
  EXPECT_EQ(pinned.srcDevice, memory_);
  EXPECT_EQ(pinned.srcPitch, 64u);
  EXPECT_EQ(pinned.srcHeight, 8u);
  EXPECT_EQ(pinned.srcXInBytes, 3u);
  EXPECT_EQ(pinned.srcY, 4u);
  EXPECT_EQ(pinned.srcZ, 1u);
  EXPECT_EQ(pinned.dstMemoryType, CU_MEMORYTYPE_DEVICE);
  EXPECT_EQ(pinned.dstPitch, kWidth);
  EXPECT_EQ(pinned.dstHeight, kHeight);
  EXPECT_EQ(pinned.dstXInBytes + pinned.dstY + pinned.dstZ, 0u);
  EXPECT_EQ(pinned.WidthInBytes, kWidth);
  EXPECT_EQ(pinned.Height, kHeight);
  EXPECT_EQ(pinned.Depth, kDepth);
  char* const from = reinterpret_cast<char*>(pinned.dstDevice);
  std::string expected = host;
  for (size_t z = 0, i = 0; z < kDepth; ++z) {
    for (size_t y = 0; y < kHeight; ++y) {
      for (size_t x = 0; x < kWidth; ++x, ++i) {
        from[i] = char('A' + i);
        expected[((z + 1) * kRows + y + 1) * kPitch + 2 + x] = char('A' + i);
      }
    }
  }
  sent.Run();
  EXPECT_EQ(host, expected);
  ExpectSeen(node, copy);
}

TEST_F(StagedNodeTest, BetweenTwoPlacesOfTheHostThereIsOnlyTheFunction) {
  std::string from = "abcdefgh", to(8, '.');
  CUDA_MEMCPY3D copy = ToHost(&to[0], 2);
  copy.srcMemoryType = CU_MEMORYTYPE_UNIFIED;  // of a pointer that nobody knows
  copy.srcDevice = reinterpret_cast<CUdeviceptr>(from.data());
  copy.srcPitch = 4;
  copy.dstPitch = 3;
  copy.Height = 2;
  const CUgraphNode node = Add(copy);
  const Requests sent = Take();
  EXPECT_EQ(sent.calls, (Calls{kCall_cuGraphCreate, kCall_cuUserObjectCreate, kCall_cuGraphRetainUserObject,
                               kCall_cuGraphAddNode_v2, kCall_cuGraphAddNode_v2, kCall_cuGraphDestroy}));
  EXPECT_TRUE(sent.Params(CU_GRAPH_NODE_TYPE_MEMCPY).empty());
  sent.Run();
  EXPECT_EQ(to, "ab.ef...");
  ExpectSeen(node, copy);
}

TEST_F(StagedNodeTest, MemoryThatTheServerReachesIsNotStaged) {
  void* pinned = nullptr;
  ASSERT_EQ(cuMemHostAlloc(&pinned, 4096, 0), CUDA_SUCCESS);
  constexpr uint64_t kManaged = 0x330000000000;
  {
    DeviceRange range;
    range.source = DeviceRange::kManaged;
    range.managed = true;
    Session::Get()->memory().set_uses_managed();
    WriterLock lock(&Session::Get()->memory().mutex());
    Session::Get()->memory().device_ranges().Insert(kManaged, 4096, range);
  }
  for (const void* const from : {static_cast<const void*>(pinned), reinterpret_cast<const void*>(kManaged)}) {
    CUDA_MEMCPY3D copy = ToDevice(from, 100);
    for (const CUmemorytype type : {CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_UNIFIED}) {
      copy.srcMemoryType = type;
      copy.srcDevice = reinterpret_cast<CUdeviceptr>(from);
      Take();
      Add(copy);
      const Requests sent = Take();
      EXPECT_EQ(sent.calls, Calls{kCall_cuGraphAddNode_v2});
      EXPECT_EQ(sent.Copy().srcDevice, reinterpret_cast<CUdeviceptr>(from));
    }
  }
  {
    WriterLock lock(&Session::Get()->memory().mutex());
    Session::Get()->memory().device_ranges().Erase(kManaged);
  }
  EXPECT_EQ(cuMemFreeHost(pinned), CUDA_SUCCESS);
}

TEST_F(StagedNodeTest, CopiesThatAreWrong) {
  std::string host(100, 'a');
  const CUDA_MEMCPY3D to_device = ToDevice(host.data(), 10), to_host = ToHost(&host[0], 10);
  const CUgraphNode node = Add(to_device);
  CUgraphExec exec = nullptr;
  ASSERT_EQ(cuGraphInstantiate(&exec, graph_, 0), CUDA_SUCCESS);
  const auto with = [](CUDA_MEMCPY3D copy, const std::function<void(CUDA_MEMCPY3D*)>& change) {
    change(&copy);
    return copy;
  };
  const struct {
    const char* what;
    CUDA_MEMCPY3D copy;
  } all[] = {
      {"from nowhere", with(to_device, [](auto* c) { c->srcHost = nullptr; })},
      {"to nowhere", with(to_host, [](auto* c) { c->dstHost = nullptr; })},
      {"from nowhere in particular",
       with(to_device, [](auto* c) { c->srcMemoryType = CU_MEMORYTYPE_UNIFIED, c->srcDevice = 0; })},
      {"no memory type", with(to_device, [](auto* c) { c->srcMemoryType = CUmemorytype(0); })},
      {"no memory type there", with(to_device, [](auto* c) { c->dstMemoryType = CUmemorytype(0); })},
      {"an unknown memory type", with(to_host, [](auto* c) { c->dstMemoryType = CUmemorytype(5); })},
      {"rows that overlap", with(to_device, [](auto* c) { c->srcPitch = 9, c->Height = 2; })},
      {"rows that overlap", with(to_host, [](auto* c) { c->dstPitch = 9, c->Height = 2; })},
      {"rows that reach beyond their pitch",
       with(to_device, [](auto* c) { c->srcPitch = 10, c->srcXInBytes = 1, c->Height = 2; })},
      {"a row that is longer than its pitch", with(to_device, [](auto* c) { c->srcPitch = 9; })},
      {"a row that reaches beyond its pitch", with(to_host, [](auto* c) { c->dstPitch = 10, c->dstXInBytes = 1; })},
      {"a device's row that is longer than its pitch", with(to_device, [](auto* c) { c->dstPitch = 9; })},
      {"a slice that reaches beyond its height", with(to_device, [](auto* c) { c->srcHeight = c->srcY = 1; })},
      {"slices that reach beyond their height",
       with(to_host, [](auto* c) { c->dstHeight = 2, c->dstY = 1, c->Height = c->Depth = 2; })},
      {"a device's slices that reach beyond their height",
       with(to_device, [](auto* c) { c->dstHeight = 1, c->Height = c->Depth = 2; })},
      {"nothing, from memory that nobody knows", with(to_device,
                                                      [&host](auto* c) {
                                                        c->srcMemoryType = CU_MEMORYTYPE_UNIFIED;
                                                        c->srcDevice = reinterpret_cast<CUdeviceptr>(host.data());
                                                        c->WidthInBytes = 0;
                                                      })},
      {"nothing", with(to_device, [](auto* c) { c->WidthInBytes = 0; })},
      {"more than there is memory",
       with(to_device, [](auto* c) { c->WidthInBytes = (size_t(1) << 40) + 1, c->Height = size_t(1) << 24; })},
      {"more than there is memory",
       with(to_host, [](auto* c) { c->Height = size_t(1) << 40, c->Depth = (size_t(1) << 24) + 1; })},
  };
  Take();
  const uint64_t records = Records();
  for (const auto& one : all) {
    SCOPED_TRACE(one.what);
    CUgraphNode made = nullptr;
    CUgraphNodeParams any{};
    any.type = CU_GRAPH_NODE_TYPE_MEMCPY;
    any.memcpy.copyParams = one.copy;
    EXPECT_EQ(cuGraphAddMemcpyNode(&made, graph_, nullptr, 0, &one.copy, nullptr), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuGraphAddNode(&made, graph_, nullptr, nullptr, 0, &any), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(made, nullptr);
    EXPECT_EQ(cuGraphMemcpyNodeSetParams(node, &one.copy), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuGraphNodeSetParams(node, &any), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuGraphExecMemcpyNodeSetParams(exec, node, &one.copy, nullptr), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuGraphExecNodeSetParams(exec, node, &any), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(Take().calls, Calls());
  }
  EXPECT_EQ(Records(), records);
  ExpectSeen(node, to_device);
  EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
}

TEST_F(StagedNodeTest, WhatTheServerRefusesLeavesNothing) {
  std::string host(1000, 'a');
  const CUDA_MEMCPY3D copy = ToDevice(host.data(), host.size());
  const uint64_t records = Records();
  const size_t disguised = Disguised();
  Take();
  // Each of the requests up to the one that adds the node.
  for (size_t refused = 0; refused < 6; ++refused) {
    SCOPED_TRACE(refused);
    Answer();
    size_t begin = refused;
    while (begin > 0 && kAdded[begin - 1] == kAdded[refused]) --begin;
    size_t left = refused - begin;
    server_->On(kAdded[refused], [this, &left](const FakeServer::Request& request) {
      if (left-- == 0) return FakeServer::Answer(CUDA_ERROR_NOT_SUPPORTED);
      return request.header.call == kCall_cuGraphAddNode_v2 ? graphs_.Add(request) : FakeServer::Answer();
    });
    CUgraphNode node = nullptr;
    EXPECT_EQ(cuGraphAddMemcpyNode(&node, graph_, nullptr, 0, &copy, nullptr), CUDA_ERROR_NOT_SUPPORTED);
    EXPECT_EQ(node, nullptr);
    const Requests sent = Take();
    EXPECT_EQ(Calls(sent.calls.begin(), sent.calls.begin() + long(refused) + 1),
              Calls(kAdded.begin(), kAdded.begin() + long(refused) + 1));
    EXPECT_EQ(std::count(sent.calls.begin(), sent.calls.end(), kCall_cuGraphDestroy), refused > 0 ? 1 : 0);
    EXPECT_EQ(Disguised(), disguised);
    if (refused > 1) {
      // The server drops the object with the graph, or when the client releases it.
      EXPECT_EQ(std::count(sent.calls.begin(), sent.calls.end(), kCall_cuUserObjectRelease), refused == 2 ? 1 : 0);
      EXPECT_FALSE(HasPiece());
      Gone(sent.Object());
    }
    EXPECT_EQ(Records(), records);
    EXPECT_TRUE(HasPiece()) << "a later node can use it";
  }
  Answer();
  // Without pinned memory there is nothing at all.
  server_->On(kOpHostMap, CUDA_ERROR_OUT_OF_MEMORY);
  std::string large(8 << 20, 'a');
  CUgraphNode node = nullptr;
  CUDA_MEMCPY3D large_copy = ToDevice(large.data(), large.size());
  ASSERT_EQ(cuMemAlloc(&large_copy.dstDevice, large.size()), CUDA_SUCCESS);
  Take();
  EXPECT_EQ(cuGraphAddMemcpyNode(&node, graph_, nullptr, 0, &large_copy, nullptr), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(Take().calls, Calls());
  server_->On(kOpHostMap, FakeServer::Answer());
}

TEST_F(StagedNodeTest, APieceServesAgainWhenNothingHasIt) {
  std::string host(4096, 'a');
  Add(ToDevice(host.data(), 2000));
  const Requests first = Take();
  Add(ToDevice(host.data(), 2000));
  const Requests second = Take();
  EXPECT_NE(second.Copy().srcDevice, first.Copy().srcDevice) << "the first node still has its own";
  Gone(first.Object());
  Add(ToDevice(host.data(), 2001));
  const Requests longer = Take();
  EXPECT_NE(longer.Copy().srcDevice, first.Copy().srcDevice) << "it is too short";
  Add(ToDevice(host.data(), 1000));
  EXPECT_EQ(Take().Copy().srcDevice, first.Copy().srcDevice);
  // Of several, the shortest that is long enough.
  Gone(longer.Object());
  Gone(second.Object());
  Add(ToDevice(host.data(), 1500));
  EXPECT_EQ(Take().Copy().srcDevice, second.Copy().srcDevice);
  Add(ToDevice(host.data(), 1500));
  EXPECT_EQ(Take().Copy().srcDevice, longer.Copy().srcDevice);
}

TEST_F(StagedNodeTest, ANodeIsForgottenWithItsGraph) {
  std::string host(100, 'a');
  const size_t disguised = Disguised();
  CUgraph graph = nullptr;
  ASSERT_EQ(cuGraphCreate(&graph, 0), CUDA_SUCCESS);
  const CUDA_MEMCPY3D copy = ToDevice(host.data(), 10);
  CUgraphNode node = nullptr;
  ASSERT_EQ(cuGraphAddMemcpyNode(&node, graph, nullptr, 0, &copy, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(Disguised(), disguised + 1);
  ASSERT_EQ(cuGraphDestroy(graph), CUDA_SUCCESS);
  EXPECT_EQ(Disguised(), disguised);
  CUDA_MEMCPY3D seen{};
  EXPECT_EQ(cuGraphMemcpyNodeGetParams(node, &seen), CUDA_ERROR_INVALID_VALUE);
}

// Nothing is sent for a copy node that was made with other memory, and it stays what it is. Each call counts under its
// own name.
TEST_F(StagedNodeTest, ANodeOfOtherMemoryTakesNoPageableMemory) {
  ASSERT_EQ(cuMemHostAlloc(&pinned_, 2000, 0), CUDA_SUCCESS);
  std::string host(1000, 'a');
  CUDA_MEMCPY3D in = ToDevice(pinned_, 1000), on_device = ToDevice(nullptr, 1000);
  on_device.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  on_device.srcDevice = memory_ + 8192;
  const CUgraphNode nodes[] = {Add(in), Add(ToHost(static_cast<char*>(pinned_) + 1000, 1000)), Add(on_device)};
  const CUgraphExec exec = Instantiate();
  Take();
  const auto refused = [&](const CUDA_MEMCPY3D& copy, CUresult expected) {
    CUgraphNodeParams any{};
    any.type = CU_GRAPH_NODE_TYPE_MEMCPY;
    any.memcpy.copyParams = copy;
    for (const CUgraphNode node : nodes) {
      EXPECT_EQ(cuGraphMemcpyNodeSetParams(node, &copy), expected);
      EXPECT_EQ(cuGraphNodeSetParams(node, &any), expected);
      EXPECT_EQ(cuGraphExecMemcpyNodeSetParams(exec, node, &copy, nullptr), expected);
      EXPECT_EQ(cuGraphExecNodeSetParams(exec, node, &any), expected);
    }
    EXPECT_EQ(Take().calls, Calls());
  };
  const uint64_t before = UnsupportedCalls();
  ::testing::internal::CaptureStderr();
  refused(ToDevice(host.data(), 600), CUDA_ERROR_NOT_SUPPORTED);
  refused(ToHost(&host[0], 600), CUDA_ERROR_NOT_SUPPORTED);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(UnsupportedCalls() - before, 24u);
  for (const char* const name : {"cuGraphMemcpyNodeSetParams", "cuGraphNodeSetParams", "cuGraphExecMemcpyNodeSetParams",
                                 "cuGraphExecNodeSetParams"}) {
    const std::string line = std::string("unsupported call ") + name + " ";
    const size_t found = said.find(line);
    EXPECT_NE(found, std::string::npos) << name << " in " << said;
    EXPECT_EQ(said.find(line, found + 1), std::string::npos) << name << " twice in " << said;
  }
  // What no driver takes is said to be that.
  refused(ToDevice(nullptr, 600), CUDA_ERROR_INVALID_VALUE);
  refused(ToDevice(host.data(), 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(UnsupportedCalls() - before, 24u);
  EXPECT_EQ(Disguised(), 0u);
  EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
}

TEST_F(StagedNodeTest, ANodeIsChangedInItsGraph) {
  std::string host(1000, 'a'), other(2000, 'b');
  const CUDA_MEMCPY3D copy = ToDevice(host.data(), host.size());
  const CUgraphNode node = Add(copy);
  const Requests added = Take();
  CUDA_MEMCPY3D changed = ToDevice(other.data(), other.size());
  changed.dstXInBytes = 8;
  ASSERT_EQ(cuGraphMemcpyNodeSetParams(node, &changed), CUDA_SUCCESS);
  const Requests sent = Take();
  EXPECT_EQ(std::count(sent.calls.begin(), sent.calls.end(), kCall_cuGraphNodeSetParams), 2);
  EXPECT_EQ(std::count(sent.calls.begin(), sent.calls.end(), kCall_cuGraphRetainUserObject), 1);
  const CUDA_MEMCPY3D pinned = sent.Copy();
  EXPECT_NE(pinned.srcDevice, added.Copy().srcDevice) << "what was made from the graph has the old one";
  EXPECT_EQ(pinned.dstDevice, memory_);
  EXPECT_EQ(pinned.dstXInBytes, 8u);
  EXPECT_EQ(pinned.WidthInBytes, other.size());
  sent.Run();
  EXPECT_EQ(std::string(reinterpret_cast<char*>(pinned.srcDevice), other.size()), other);
  ExpectSeen(node, changed);
  // The graph lets go of the old piece, which is free when nothing that was made from the graph has it.
  wire::cuGraphReleaseUserObject_Request released;
  ASSERT_TRUE(sent.Read(sent.all.size() - 1, &released));
  EXPECT_EQ(released.object, added.Object());
  EXPECT_FALSE(HasPiece());
  Gone(added.Object());
  ASSERT_TRUE(HasPiece());
  earlier_.push_back(Session::Get()->graphs().staged_copies().Take(0));

  // Refused, it is what it was, and the pinned memory is the graph's until that is gone.
  for (const uint32_t call : {uint32_t(kCall_cuGraphNodeSetParams), uint32_t(kCall_cuUserObjectCreate)}) {
    server_->On(call, CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuGraphMemcpyNodeSetParams(node, &copy), CUDA_ERROR_INVALID_VALUE);
    const Requests failed = Take();
    ExpectSeen(node, changed);
    EXPECT_EQ(HasPiece(), call == kCall_cuUserObjectCreate);
    if (call == kCall_cuGraphNodeSetParams) {
      Gone(failed.Object());
      EXPECT_TRUE(HasPiece());
    }
    Answer();
  }
  // A node of another kind of copy.
  const CUDA_MEMCPY3D back = ToHost(&host[0], host.size());
  CUDA_MEMCPY3D on_device = back;
  on_device.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  on_device.dstDevice = memory_ + 8192;
  Take();
  EXPECT_EQ(cuGraphMemcpyNodeSetParams(node, &back), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(cuGraphMemcpyNodeSetParams(node, &on_device), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(Take().calls, Calls());
  ExpectSeen(node, changed);
}

TEST_F(StagedNodeTest, ANodeIsChangedInExecutables) {
  std::string host(1000, 'a'), other(2000, 'b');
  const CUDA_MEMCPY3D copy = ToDevice(host.data(), host.size());
  const CUgraphNode node = Add(copy);
  CUgraphExec exec = nullptr, second = nullptr;
  ASSERT_EQ(cuGraphInstantiate(&exec, graph_, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphInstantiate(&second, graph_, 0), CUDA_SUCCESS);
  Take();
  const auto set = [&](CUgraphExec which, const void* from, size_t bytes) {
    const CUDA_MEMCPY3D changed = ToDevice(from, bytes);
    EXPECT_EQ(cuGraphExecMemcpyNodeSetParams(which, node, &changed, nullptr), CUDA_SUCCESS);
    return Take();
  };
  const Requests first = set(exec, other.data(), 500);
  EXPECT_EQ(first.calls, (Calls{kCall_cuGraphCreate, kCall_cuUserObjectCreate, kCall_cuGraphRetainUserObject,
                                kCall_cuGraphAddNode_v2, kCall_cuGraphAddNode_v2, kCall_cuGraphExecNodeSetParams,
                                kCall_cuGraphDestroy}));
  wire::cuGraphCreate_Request child;
  wire::cuGraphExecNodeSetParams_Request changed;
  ASSERT_TRUE(first.Read(0, &child) && first.Read(5, &changed));
  EXPECT_EQ(changed.exec, HandleOf(exec));
  EXPECT_EQ(changed.node, HandleOf(node));
  EXPECT_EQ(changed.params.type, CU_GRAPH_NODE_TYPE_GRAPH);
  EXPECT_EQ(changed.params.graph, child.phGraph);
  const uint64_t pinned = first.Copy().srcDevice;
  first.Run();
  EXPECT_EQ(std::string(reinterpret_cast<char*>(pinned), 500), other.substr(0, 500));
  // Launches from before may still run. When they have ended, the server says that the piece is free.
  EXPECT_FALSE(HasPiece());
  const Requests again = set(exec, host.data(), 400);
  EXPECT_NE(again.Copy().srcDevice, pinned);
  again.Run();
  EXPECT_EQ(std::string(reinterpret_cast<char*>(pinned), 500), other.substr(0, 500));
  Gone(first.Object());
  EXPECT_EQ(set(second, other.data(), 500).Copy().srcDevice, pinned) << "any executable can use it";
  EXPECT_FALSE(HasPiece());
  // So an executable that is changed often needs two pieces, and its records do not become more.
  std::set<uint64_t> pieces;
  size_t records = 0;
  uint64_t before = again.Object();
  for (int i = 0; i < 6; ++i) {
    const Requests sent = set(exec, host.data(), 300);
    Gone(before);
    before = sent.Object();
    pieces.insert(sent.Copy().srcDevice);
    if (i == 0) records = Records();
    EXPECT_EQ(Records(), records);
  }
  EXPECT_EQ(pieces.size(), 2u);
  ExpectSeen(node, copy);

  // As natively: the kinds of memory stay, and both copies are of one row.
  CUDA_MEMCPY3D rows = copy, on_device = copy;
  rows.WidthInBytes = 10;
  rows.Height = 2;
  on_device.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  on_device.srcDevice = memory_ + 8192;
  const CUgraphNode of_rows = Add(rows), plain = Add(on_device);
  Take();
  EXPECT_EQ(cuGraphExecMemcpyNodeSetParams(exec, node, &rows, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuGraphExecMemcpyNodeSetParams(exec, node, &on_device, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuGraphExecMemcpyNodeSetParams(exec, of_rows, &copy, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuGraphExecMemcpyNodeSetParams(exec, plain, &copy, nullptr), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(Take().calls, Calls());
  EXPECT_EQ(cuGraphExecMemcpyNodeSetParams(nullptr, node, &copy, nullptr), CUDA_ERROR_INVALID_VALUE);
  // What the server refuses: the child graph is gone all the same.
  server_->On(kCall_cuGraphExecNodeSetParams, CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  Take();
  EXPECT_EQ(cuGraphExecMemcpyNodeSetParams(exec, node, &copy, nullptr), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  const Calls calls = Take().calls;
  EXPECT_EQ(std::count(calls.begin(), calls.end(), kCall_cuGraphCreate), 1);
  EXPECT_EQ(std::count(calls.begin(), calls.end(), kCall_cuGraphDestroy), 1);
  EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
  EXPECT_EQ(cuGraphExecDestroy(second), CUDA_SUCCESS);
}

// What an executable is given in the place of a node's child.
const Calls kExchanged{kCall_cuGraphCreate,     kCall_cuUserObjectCreate, kCall_cuGraphRetainUserObject,
                       kCall_cuGraphAddNode_v2, kCall_cuGraphAddNode_v2,  kCall_cuGraphExecNodeSetParams,
                       kCall_cuGraphDestroy};

// What disables or enables a node: its child's nodes are found, the host function changes, and the copy is switched.
const Calls kSwitched{
    kCall_cuGraphChildGraphNodeGetGraph, kCall_cuGraphGetNodes,      kCall_cuGraphNodeGetType, kCall_cuGraphNodeGetType,
    kCall_cuGraphExecNodeSetParams,      kCall_cuGraphNodeSetEnabled};

TEST_F(StagedNodeTest, ADisabledNodeMovesNothing) {
  std::string host(1000, 'a'), other(1000, 'b');
  CUDA_MEMCPY3D rows = ToHost(&other[0], 10);
  rows.Height = 20;
  Take();
  const CUgraphNode in = Add(ToDevice(host.data(), host.size()));
  const uint64_t piece = Take().Copy().srcDevice;
  const CUgraphNode out = Add(rows);
  const uint64_t from = Take().Copy().dstDevice;
  const CUgraphExec exec = Instantiate(), second = Instantiate();
  EXPECT_TRUE(IsEnabled(exec, in));
  EXPECT_EQ(Enable(exec, in, 1).calls, Calls()) << "it is enabled";
  const Requests disabled = Enable(exec, in, 0);
  ASSERT_EQ(disabled.calls, kSwitched);
  wire::cuGraphExecNodeSetParams_Request set;
  wire::cuGraphNodeSetEnabled_Request switched;
  ASSERT_TRUE(disabled.Read(4, &set) && disabled.Read(5, &switched));
  EXPECT_EQ(set.exec, HandleOf(exec));
  EXPECT_EQ(set.params.type, CU_GRAPH_NODE_TYPE_HOST);
  EXPECT_EQ(switched.hGraphExec, HandleOf(exec));
  EXPECT_EQ(switched.isEnabled, 0u);
  const std::vector<Graphs::Node>& inside = graphs_.nodes[graphs_.child[HandleOf(in)]];
  ASSERT_EQ(inside.size(), 2u);
  EXPECT_EQ(set.node, inside[0].handle);
  EXPECT_EQ(switched.hNode, inside[1].handle);
  ExpectMoves(disabled, host.data(), reinterpret_cast<void*>(piece), host.size(), false);
  EXPECT_TRUE(IsEnabled(second, in));
  EXPECT_TRUE(IsEnabled(exec, out));
  EXPECT_EQ(Enable(exec, in, 0).calls, Calls());
  // To the host: nothing comes into the application's memory.
  const Requests quiet = Enable(exec, out, 0);
  EXPECT_EQ(quiet.calls, kSwitched);
  ExpectMoves(quiet, reinterpret_cast<void*>(from), &other[0], 200, false);
  // Enabled, they are what they were.
  const Requests enabled = Enable(exec, in, 7);
  ASSERT_EQ(enabled.calls, kSwitched);
  ASSERT_TRUE(enabled.Read(5, &switched));
  EXPECT_NE(switched.isEnabled, 0u);
  ExpectMoves(enabled, host.data(), reinterpret_cast<void*>(piece), host.size(), true);
  ExpectMoves(Enable(exec, out, 1), reinterpret_cast<void*>(from), &other[0], 200, true);
  // However often that is done, the log does not grow.
  const size_t records = Records();
  for (int i = 0; i < 6; ++i) Enable(exec, in, i % 2);
  EXPECT_EQ(Records(), records);
  EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
  EXPECT_EQ(cuGraphExecDestroy(second), CUDA_SUCCESS);
  unsigned unknown;
  EXPECT_EQ(cuGraphNodeSetEnabled(exec, in, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuGraphNodeGetEnabled(exec, in, &unknown), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuGraphNodeGetEnabled(exec, in, nullptr), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(StagedNodeTest, ADisabledNodeKeepsItsParameters) {
  std::string host(1000, 'a'), other(1000, 'b');
  const CUDA_MEMCPY3D copy = ToDevice(host.data(), host.size()), changed = ToDevice(other.data(), 500);
  const CUgraphNode node = Add(copy);
  const uint64_t first = Take().Copy().srcDevice;
  const CUgraphExec exec = Instantiate();
  Take();
  const CUgraphExec before = Instantiate();
  const uint64_t of_before = Take().Copy().srcDevice;
  EXPECT_NE(of_before, first) << "launches of both may be under way at once";
  Enable(exec, node, 0);
  // The driver sees what is set meanwhile; the copy stays disabled.
  ASSERT_EQ(cuGraphExecMemcpyNodeSetParams(exec, node, &changed, nullptr), CUDA_SUCCESS);
  const Requests sent = Take();
  EXPECT_EQ(sent.calls, kExchanged);
  EXPECT_EQ(sent.Copy().dstDevice, memory_);
  EXPECT_EQ(sent.Copy().WidthInBytes, 500u);
  const uint64_t piece = sent.Copy().srcDevice;
  ExpectMoves(sent, other.data(), reinterpret_cast<void*>(piece), 500, false);
  EXPECT_FALSE(IsEnabled(exec, node));
  // What is refused changes nothing.
  server_->On(kCall_cuGraphExecNodeSetParams, CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  EXPECT_EQ(cuGraphExecMemcpyNodeSetParams(exec, node, &copy, nullptr), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  EXPECT_EQ(cuGraphNodeSetEnabled(exec, node, 1), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  EXPECT_FALSE(IsEnabled(exec, node));
  Answer();
  server_->On(kCall_cuGraphNodeSetEnabled, CUDA_ERROR_INVALID_VALUE);
  Take();
  EXPECT_EQ(cuGraphNodeSetEnabled(before, node, 0), CUDA_ERROR_INVALID_VALUE);
  Calls undone = kSwitched;
  undone.push_back(kCall_cuGraphExecNodeSetParams);
  const Requests tried = Take();
  EXPECT_EQ(tried.calls, undone);
  ExpectMoves(tried, host.data(), reinterpret_cast<void*>(of_before), 1000, true);
  EXPECT_TRUE(IsEnabled(before, node));
  Answer();
  ExpectMoves(Enable(exec, node, 1), other.data(), reinterpret_cast<void*>(piece), 500, true);
  // An executable has what the graph was when it was made.
  Take();
  ASSERT_EQ(cuGraphMemcpyNodeSetParams(node, &changed), CUDA_SUCCESS);
  const uint64_t second = Take().Copy().srcDevice;
  const CUgraphExec after = Instantiate();
  Enable(before, node, 0);
  ExpectMoves(Enable(before, node, 1), host.data(), reinterpret_cast<void*>(of_before), 1000, true);
  Enable(after, node, 0);
  ExpectMoves(Enable(after, node, 1), other.data(), reinterpret_cast<void*>(second), 500, true);
  for (const CUgraphExec one : {exec, before, after}) EXPECT_EQ(cuGraphExecDestroy(one), CUDA_SUCCESS);
}

TEST_F(StagedNodeTest, BetweenTwoPlacesOfTheHostOnlyTheFunctionIsDisabled) {
  std::string host(1000, 'a'), other(1000, 'b');
  CUDA_MEMCPY3D between = ToHost(&host[0], 10);
  between.Height = 2;
  between.srcMemoryType = CU_MEMORYTYPE_HOST;
  between.srcHost = other.data();
  const CUgraphNode node = Add(between);
  const CUgraphExec exec = Instantiate();
  const Calls switched{kCall_cuGraphChildGraphNodeGetGraph, kCall_cuGraphGetNodes, kCall_cuGraphNodeGetType,
                       kCall_cuGraphExecNodeSetParams};
  Requests sent = Enable(exec, node, 0);
  EXPECT_EQ(sent.calls, switched);
  ExpectMoves(sent, other.data(), &host[0], 10, false);
  sent = Enable(exec, node, 1);
  EXPECT_EQ(sent.calls, switched);
  ExpectMoves(sent, other.data(), &host[0], 10, true);
  // A node that is no node any more.
  const size_t disguised = Disguised();
  ASSERT_EQ(cuGraphDestroyNode(node), CUDA_SUCCESS);
  EXPECT_EQ(Disguised(), disguised - 1);
  CUDA_MEMCPY3D seen;
  EXPECT_EQ(cuGraphNodeSetEnabled(exec, node, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuGraphMemcpyNodeGetParams(node, &seen), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
}

TEST_F(StagedNodeTest, AnUpdateLeavesNodesDisabled) {
  std::string host(1000, 'a'), other(1000, 'b');
  const CUgraphNode one = Add(ToDevice(host.data(), 100)), two = Add(ToDevice(host.data(), 200));
  const uint64_t of_two = Take().Copy().srcDevice;
  const CUgraphExec exec = Instantiate();
  Enable(exec, two, 0);
  CUgraph graph = nullptr;
  ASSERT_EQ(cuGraphCreate(&graph, 0), CUDA_SUCCESS);
  CUgraphNode first, second;
  CUDA_MEMCPY3D copy = ToDevice(other.data(), 300);
  ASSERT_EQ(cuGraphAddMemcpyNode(&first, graph, nullptr, 0, &copy, nullptr), CUDA_SUCCESS);
  copy.WidthInBytes = 400;
  Take();
  ASSERT_EQ(cuGraphAddMemcpyNode(&second, graph, nullptr, 0, &copy, nullptr), CUDA_SUCCESS);
  const uint64_t of_second = Take().Copy().srcDevice;
  CUgraphExecUpdateResultInfo info;
  // What the graph's node is given, and what it is again.
  const Calls paused{kCall_cuGraphChildGraphNodeGetGraph,
                     kCall_cuGraphGetNodes,
                     kCall_cuGraphNodeGetType,
                     kCall_cuGraphNodeGetType,
                     kCall_cuGraphNodeSetParams,
                     kCall_cuGraphExecUpdate_v2,
                     kCall_cuGraphNodeSetParams};
  size_t records = 0;
  for (int i = 0; i < 6; ++i) {
    const CUgraph from = i % 2 ? graph_ : graph;
    Take();
    ASSERT_EQ(cuGraphExecUpdate(exec, from, &info), CUDA_SUCCESS);
    const Requests sent = Take();
    ASSERT_EQ(sent.calls, paused);
    wire::cuGraphNodeSetParams_Request set, restored;
    ASSERT_TRUE(sent.Read(4, &set) && sent.Read(6, &restored));
    const uint64_t node = HandleOf(from == graph ? second : two);
    EXPECT_EQ(set.node, graphs_.nodes[graphs_.child[node]][0].handle);
    EXPECT_EQ(restored.node, set.node);
    EXPECT_NE(restored.params.host_function, set.params.host_function);
    void* const piece = reinterpret_cast<void*>(from == graph ? of_second : of_two);
    const void* const memory = from == graph ? other.data() : host.data();
    Requests before = sent;
    before.all.resize(5);
    ExpectMoves(before, memory, piece, 200, false);
    ExpectMoves(sent, memory, piece, 200, true);
    EXPECT_FALSE(IsEnabled(exec, two));
    EXPECT_TRUE(IsEnabled(exec, one));
    // They have the parameters of the nodes in their places.
    ExpectMoves(Enable(exec, two, 1), memory, piece, 200, true);
    Enable(exec, two, 0);
    if (i == 1) records = Records();
    if (i % 2 == 1) {
      EXPECT_EQ(Records(), records) << "the log does not grow";
    }
  }
  // What is refused changes nothing.
  server_->On(kCall_cuGraphExecUpdate_v2, CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  Take();
  EXPECT_EQ(cuGraphExecUpdate(exec, graph, &info), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  const Requests refused = Take();
  EXPECT_EQ(refused.calls, paused);
  ExpectMoves(refused, other.data(), reinterpret_cast<void*>(of_second), 200, true);
  server_->On(kCall_cuGraphExecUpdate_v2, FakeServer::Answer());
  ExpectMoves(Enable(exec, two, 1), host.data(), reinterpret_cast<void*>(of_two), 200, true);
  // Also when the node is gone.
  Enable(exec, two, 0);
  ASSERT_EQ(cuGraphDestroyNode(two), CUDA_SUCCESS);
  Take();
  ASSERT_EQ(cuGraphExecUpdate(exec, graph, &info), CUDA_SUCCESS);
  EXPECT_EQ(Take().calls, paused);
  EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
  EXPECT_EQ(cuGraphDestroy(graph), CUDA_SUCCESS);
}

TEST_F(StagedNodeTest, PinnedMemoryInThePlaceOfPageableMemoryIsStagedToo) {
  std::string host(1000, 'a');
  void* pinned = nullptr;
  ASSERT_EQ(cuMemHostAlloc(&pinned, 1000, 0), CUDA_SUCCESS);
  const CUgraphNode node = Add(ToDevice(host.data(), 1000));
  const CUgraphExec exec = Instantiate();
  CUDA_MEMCPY3D changed = ToDevice(pinned, 600), other = ToDevice(host.data(), 600);
  for (const CUmemorytype type : {CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_UNIFIED}) {
    changed.srcMemoryType = type;
    changed.srcDevice = reinterpret_cast<CUdeviceptr>(pinned);
    Take();
    ASSERT_EQ(cuGraphExecMemcpyNodeSetParams(exec, node, &changed, nullptr), CUDA_SUCCESS);
    Requests sent = Take();
    EXPECT_EQ(sent.calls, kExchanged);
    EXPECT_NE(sent.Copy().srcDevice, changed.srcDevice);
    ExpectMoves(sent, pinned, reinterpret_cast<void*>(sent.Copy().srcDevice), 600, true);
    void* const piece = reinterpret_cast<void*>(sent.Copy().srcDevice);
    Enable(exec, node, 0);
    ExpectMoves(Enable(exec, node, 1), pinned, piece, 600, true);
    // And back.
    ASSERT_EQ(cuGraphExecMemcpyNodeSetParams(exec, node, &other, nullptr), CUDA_SUCCESS);
    ASSERT_EQ(cuGraphMemcpyNodeSetParams(node, &changed), CUDA_SUCCESS);
    ExpectSeen(node, changed);
    ASSERT_EQ(cuGraphMemcpyNodeSetParams(node, &other), CUDA_SUCCESS);
  }
  EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
  EXPECT_EQ(cuMemFreeHost(pinned), CUDA_SUCCESS);
}

// The host function runs when the copy's turn comes; the bytes are those of the call.
TEST_F(StagedNodeTest, ALaunchTakesTheBytesAtTheCall) {
  std::string host(1000, 'a');
  StagedCopies& copies = Session::Get()->graphs().staged_copies();
  CUDA_MEMCPY3D rows = ToDevice(host.data(), 2);
  rows.Height = 3;
  rows.srcPitch = 100;
  const CUgraphNode line = Add(ToDevice(host.data(), host.size())), box = Add(rows);
  const Requests sent = Take();
  Requests first = sent;
  first.all.resize(sent.all.size() / 2);
  char* const of_line = reinterpret_cast<char*>(first.Copy().srcDevice);
  char* const of_box = reinterpret_cast<char*>(sent.Copy().srcDevice);
  const CUgraphExec exec = Instantiate(), second = Instantiate();
  const Requests renewed = Take();
  const auto expect = [&](char what) {
    first.Run();
    sent.Run();
    EXPECT_EQ(std::string(of_line, 1000), std::string(1000, what));
    EXPECT_EQ(std::string(of_box, 6), std::string(6, what));
  };
  for (const char what : {'1', '2', '3'}) {
    host.assign(1000, what);
    EXPECT_EQ(cuGraphLaunch(exec, nullptr), CUDA_SUCCESS);
    host.assign(1000, '-');
  }
  // The other executable has pieces of its own.
  EXPECT_EQ(cuGraphLaunch(second, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(copies.waiting_bytes(), 4 * 1006u);
  for (const char what : {'1', '2', '3'}) expect(what);
  EXPECT_EQ(copies.waiting_bytes(), 1006u);
  // What the server refuses takes nothing.
  host.assign(1000, '4');
  EXPECT_EQ(cuGraphLaunch(exec, nullptr), CUDA_SUCCESS);
  host.assign(1000, '5');
  server_->On(kCall_cuGraphLaunch, CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuGraphLaunch(exec, nullptr), CUDA_ERROR_INVALID_VALUE);
  server_->On(kCall_cuGraphLaunch, FakeServer::Answer());
  host.assign(1000, '6');
  EXPECT_EQ(cuGraphLaunch(exec, nullptr), CUDA_SUCCESS);
  expect('4');
  expect('6');
  // A disabled node reads nothing.
  Enable(exec, line, 0);
  EXPECT_EQ(cuGraphLaunch(exec, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(copies.waiting_bytes(), 1006u + 6);
  Enable(exec, box, 0);
  EXPECT_EQ(cuGraphLaunch(exec, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(copies.waiting_bytes(), 1006u + 6);
  // Nor is pinned memory read before its turn.
  ASSERT_EQ(cuMemHostAlloc(&pinned_, 1000, 0), CUDA_SUCCESS);
  const CUDA_MEMCPY3D pinned = ToDevice(pinned_, 1000);
  Enable(exec, line, 1);
  ASSERT_EQ(cuGraphExecMemcpyNodeSetParams(exec, line, &pinned, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(cuGraphLaunch(exec, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(copies.waiting_bytes(), 1006u + 6);
  for (const CUgraphExec one : {exec, second}) EXPECT_EQ(cuGraphExecDestroy(one), CUDA_SUCCESS);
  // A piece that serves others has no bytes from before.
  wire::cuUserObjectCreate_Request created;
  for (size_t i = 0; i < renewed.all.size(); ++i) {
    if (renewed.Read(i, &created)) Gone(created.object);
  }
  EXPECT_EQ(copies.waiting_bytes(), 6u);
  sent.Run();
  EXPECT_EQ(copies.waiting_bytes(), 0u);
}

TEST_F(StagedNodeTest, AnExecutableThatIsMadeOftenLeavesNoRecords) {
  std::string host(1000, 'a');
  Add(ToDevice(host.data(), host.size()));
  uint64_t object = Take().Object();
  size_t records = 0;
  std::set<uint64_t> pieces;
  for (int i = 0; i < 6; ++i) {
    const CUgraphExec exec = Instantiate();
    EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
    const Requests sent = Take();
    if (i == 0) continue;  // it has the piece that the node was made with
    pieces.insert(sent.Copy().srcDevice);
    Gone(object);
    object = sent.Object();
    if (i == 1) records = Records();
    EXPECT_EQ(Records(), records);
  }
  EXPECT_EQ(pieces.size(), 2u);
}

TEST_F(StagedNodeTest, LaunchesTakeTheBytesOfGraphsInside) {
  std::string host(1000, 'a');
  const size_t disguised = Disguised();
  const uint64_t before = Records();
  CUgraph parent = nullptr, child = nullptr;
  ASSERT_EQ(cuGraphCreate(&parent, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphCreate(&child, 0), CUDA_SUCCESS);
  CUgraphNode nodes[3];
  const CUDA_MEMCPY3D copy = ToDevice(host.data(), 1000);
  Take();
  ASSERT_EQ(cuGraphAddMemcpyNode(&nodes[0], child, nullptr, 0, &copy, nullptr), CUDA_SUCCESS);
  const uint64_t object = Take().Object();
  CUgraphNodeParams params{};
  params.type = CU_GRAPH_NODE_TYPE_GRAPH;
  params.graph.graph = child;
  for (CUgraphNode* const node : {&nodes[1], &nodes[2]}) {
    ASSERT_EQ(cuGraphAddNode(node, parent, nullptr, nullptr, 0, &params), CUDA_SUCCESS);
  }
  CUgraphExec exec = nullptr, of_child = nullptr;
  ASSERT_EQ(cuGraphInstantiate(&of_child, child, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphInstantiate(&exec, parent, 0), CUDA_SUCCESS);
  EXPECT_EQ(Disguised(), disguised + 3) << "the copies of the node are found";
  StagedCopies& copies = Session::Get()->graphs().staged_copies();
  EXPECT_EQ(cuGraphLaunch(of_child, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(copies.waiting_bytes(), 1000u);
  EXPECT_EQ(cuGraphLaunch(exec, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(copies.waiting_bytes(), 3000u);
  // They have pieces of their own, and are nodes like others.
  std::set<uint64_t> pieces;
  std::vector<uint64_t> objects = {object};
  for (const FakeServer::Request& one : Take().all) {
    wire::cuGraphNodeSetParams_Request set;
    wire::cuUserObjectCreate_Request created;
    if (wire::DecodeAs(one.header.call, one.message, &created)) objects.push_back(created.object);
    CUDA_MEMCPY3D pinned;
    if (!wire::DecodeAs(one.header.call, one.message, &set) || set.params.type != CU_GRAPH_NODE_TYPE_MEMCPY) continue;
    ASSERT_EQ(set.params.copy.size(), sizeof pinned);
    memcpy(&pinned, set.params.copy.data(), sizeof pinned);
    pieces.insert(pinned.srcDevice);
  }
  EXPECT_EQ(pieces.size(), 2u);
  CUgraph inside = nullptr;
  size_t count = 1;
  CUgraphNode found = nullptr;
  ASSERT_EQ(cuGraphChildGraphNodeGetGraph(nodes[2], &inside), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphGetNodes(inside, &found, &count), CUDA_SUCCESS);
  ExpectSeen(found, copy);
  Enable(exec, found, 0);
  EXPECT_EQ(cuGraphLaunch(exec, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(copies.waiting_bytes(), 4000u);
  // All of it goes with the graphs, also from the log.
  for (const CUgraphExec one : {exec, of_child}) EXPECT_EQ(cuGraphExecDestroy(one), CUDA_SUCCESS);
  for (const CUgraph one : {parent, child}) EXPECT_EQ(cuGraphDestroy(one), CUDA_SUCCESS);
  for (const uint64_t one : objects) Gone(one);
  EXPECT_EQ(Disguised(), disguised);
  EXPECT_EQ(Records(), before);
  EXPECT_EQ(copies.waiting_bytes(), 0u);
}

// A launch that finds too much of earlier ones waits until their turn has come.
TEST_F(StagedNodeTest, WhatLaunchesTakeHasABound) {
  StagedCopies copies(100);
  std::string from(60, 'a'), pinned(60, '-');
  StagedCopy piece;
  piece.home = &copies;
  piece.pinned = &pinned[0];
  piece.from.address = &from[0];
  piece.width = 60;
  std::vector<uint64_t> launches = {copies.TakeBytes({&piece})};
  std::thread second([&] { launches.push_back(copies.TakeBytes({&piece})); });
  StagedCopy::Run(&piece);
  second.join();
  EXPECT_EQ(pinned, from);
  EXPECT_EQ(launches, (std::vector<uint64_t>{1, 2}));
  EXPECT_EQ(copies.waiting_bytes(), 60u);
  // One alone may be as long as it is, and nothing has a launch wait for ever.
  copies.DropBytes({&piece}, 2);
  EXPECT_EQ(copies.waiting_bytes(), 0u);
  EXPECT_EQ(copies.TakeBytes({&piece, &piece, &piece}), 3u);
  EXPECT_EQ(copies.TakeBytes({&piece}), 4u);
  EXPECT_EQ(copies.waiting_bytes(), 240u);
}

TEST_F(StagedNodeTest, ACapturedCopyIsANodeOfTheCapturesGraph) {
  std::string host(1000, 'a');
  CUstream stream = nullptr;
  ASSERT_EQ(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  ASSERT_EQ(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
  CUgraphEdgeData edge{};
  int status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  uint64_t graph = 0, last = 0;
  server_->On(kCall_cuStreamGetCaptureInfo_v3, [&](const FakeServer::Request& request) {
    wire::cuStreamGetCaptureInfo_v3_Request in;
    wire::cuStreamGetCaptureInfo_v3_Reply out;
    EXPECT_TRUE(in.Decode(request.message));
    if (graph == 0) graph = in.graph;
    if (last == 0) last = in.nodes[0];
    out.status = status;
    out.graph = graph;
    out.dependencies = {last};
    out.dependency_count = 1;
    const std::string edges = Bytes(edge);
    out.edges = edges;
    return FakeServer::Answer(CUDA_SUCCESS, Encoded(out));
  });
  Take();
  std::vector<uint64_t> children;
  const auto captured = [&](bool to_host, const CUgraphEdgeData* its_edge) {
    const uint64_t after = last;
    const Requests sent = Take();
    Calls expected(kAdded.begin(), kAdded.end() - 1);  // the child graph's end comes with the capture's
    expected.insert(expected.begin(), kCall_cuStreamGetCaptureInfo_v3);
    expected.push_back(kCall_cuStreamUpdateCaptureDependencies_v2);
    EXPECT_EQ(sent.calls, expected);
    wire::cuGraphCreate_Request child;
    wire::cuGraphAddNode_v2_Request first, added;
    wire::cuStreamUpdateCaptureDependencies_v2_Request updated;
    ASSERT_TRUE(sent.Read(1, &child) && sent.Read(4, &first) && sent.Read(6, &added) && sent.Read(7, &updated));
    EXPECT_EQ(first.params.type, to_host ? CU_GRAPH_NODE_TYPE_MEMCPY : CU_GRAPH_NODE_TYPE_HOST);
    EXPECT_EQ(added.graph, graph);
    if (after != 0) {
      EXPECT_EQ(added.dependencies, std::vector<uint64_t>{after});
    }
    EXPECT_EQ(added.edges, its_edge ? Bytes(*its_edge) : "");
    EXPECT_EQ(updated.hStream, HandleOf(stream));
    EXPECT_EQ(updated.dependencies, Bytes(added.node));
    EXPECT_EQ(updated.flags, unsigned(CU_STREAM_SET_CAPTURE_DEPENDENCIES));
    children.push_back(child.phGraph);
    last = added.node;
  };
  EXPECT_EQ(cuMemcpyHtoDAsync(memory_, host.data(), host.size(), stream), CUDA_SUCCESS);
  captured(false, nullptr);
  edge.from_port = 1;
  edge.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
  EXPECT_EQ(cuMemcpyDtoHAsync(&host[0], memory_, host.size(), stream), CUDA_SUCCESS);
  captured(true, &edge);
  edge = {};
  CUDA_MEMCPY3D shaped = ToDevice(host.data(), 10);
  shaped.Height = 3;
  EXPECT_EQ(cuMemcpy3DAsync(&shaped, stream), CUDA_SUCCESS);
  captured(false, nullptr);
  // Between two places of the host.
  std::string other(1000, 'b');
  Take();
  EXPECT_EQ(cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(&other[0]), reinterpret_cast<CUdeviceptr>(host.data()),
                          host.size(), stream),
            CUDA_SUCCESS);
  {
    const Requests sent = Take();
    EXPECT_EQ(sent.calls, (Calls{kCall_cuStreamGetCaptureInfo_v3, kCall_cuGraphCreate, kCall_cuUserObjectCreate,
                                 kCall_cuGraphRetainUserObject, kCall_cuGraphAddNode_v2, kCall_cuGraphAddNode_v2,
                                 kCall_cuStreamUpdateCaptureDependencies_v2}));
    wire::cuGraphCreate_Request child;
    wire::cuGraphAddNode_v2_Request added;
    ASSERT_TRUE(sent.Read(1, &child) && sent.Read(5, &added));
    children.push_back(child.phGraph);
    last = added.node;
    sent.Run();
    EXPECT_EQ(other, host);
  }
  // What is refused is not captured.
  Take();
  status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
  EXPECT_EQ(cuMemcpyHtoDAsync(memory_, host.data(), host.size(), stream), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_EQ(Take().calls, Calls{kCall_cuStreamGetCaptureInfo_v3});
  const auto record = Session::Get()->graphs().captures().End(HandleOf(stream));
  ASSERT_NE(record, nullptr);
  EXPECT_EQ(record->children, children) << "the capture's record names them";
  server_->On(kCall_cuStreamGetCaptureInfo_v3, FakeServer::Answer());
  for (const uint64_t child : children) EXPECT_EQ(cuGraphDestroy(reinterpret_cast<CUgraph>(child)), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
}

TEST_F(StagedNodeTest, ThreadsHavePiecesOfTheirOwn) {
  constexpr int kThreads = 2, kNodes = 50;
  std::vector<std::thread> threads;
  std::vector<std::string> host(kThreads, std::string(3000, 0));
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      EXPECT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
      for (int i = 0; i < kNodes; ++i) {
        const CUDA_MEMCPY3D copy = ToDevice(host[size_t(t)].data(), host[size_t(t)].size());
        CUgraphNode node = nullptr;
        EXPECT_EQ(cuGraphAddMemcpyNode(&node, graph_, nullptr, 0, &copy, nullptr), CUDA_SUCCESS);
        CUDA_MEMCPY3D seen{};
        EXPECT_EQ(cuGraphMemcpyNodeGetParams(node, &seen), CUDA_SUCCESS);
        EXPECT_EQ(seen.srcHost, host[size_t(t)].data());
      }
    });
  }
  for (std::thread& one : threads) one.join();
  std::vector<uint64_t> pieces;
  const Requests sent = Take();
  for (const wire::NodeParams& one : sent.Params(CU_GRAPH_NODE_TYPE_MEMCPY)) {
    CUDA_MEMCPY3D copy{};
    ASSERT_EQ(one.copy.size(), sizeof copy);
    memcpy(&copy, one.copy.data(), sizeof copy);
    pieces.push_back(copy.srcDevice);
  }
  EXPECT_EQ(pieces.size(), size_t(kThreads * kNodes));
  std::sort(pieces.begin(), pieces.end());
  for (size_t i = 1; i < pieces.size(); ++i) EXPECT_GE(pieces[i], pieces[i - 1] + host[0].size());
}

}  // namespace
}  // namespace cuda_remote::client
