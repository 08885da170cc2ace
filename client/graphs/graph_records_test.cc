// SPDX-License-Identifier: Apache-2.0
#include "client/graphs/graph_records.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "proto/codec/decode_as.h"
#include "proto/codec/graph.gen.h"
#include "proto/codec/operations.gen.h"
#include "proto/codec/stream.gen.h"

namespace cuda_remote::client {
namespace {

class GraphRecordsTest : public ::testing::Test {
 protected:
  uint64_t Make(Kind kind, uint64_t parent = 0) {
    const uint64_t handle = handles_.New(kind, parent);
    handles_.Find(kind, handle)->parent = parent;
    log_.Create({kind, handle}, {}, FrameHeader(), "", "", {});
    return handle;
  }
  // The application destroys it: whether it has to stay.
  bool Destroy(uint64_t handle) {
    if (records_.MarkDestroyed({KindOf(handle), handle})) return true;
    Drop(handle);
    return false;
  }
  void Drop(uint64_t handle) {
    dropped_.push_back(handle);
    log_.Destroy({KindOf(handle), handle});
    handles_.Drop(handle);
    records_.Forget(handle);
  }
  void Set(uint64_t node, uint64_t key, const std::string& message) {
    FrameHeader header;
    header.call = 500;
    records_.ModifyNode({Kind::kGraphNode, node}, key, header, message, {});
  }
  // A node with a record of its own, after others.
  uint64_t AddNode(uint64_t graph, const std::vector<uint64_t>& after = {}) {
    const uint64_t handle = handles_.New(Kind::kGraphNode, graph);
    handles_.Find(Kind::kGraphNode, handle)->parent = graph;
    wire::cuGraphAddNode_v2_Request request;
    request.node = handle;
    request.graph = graph;
    request.dependencies = after;
    // Edge data that tells the edges apart.
    std::string edges(after.size() * 8, '\0');
    for (size_t i = 0; i < after.size(); ++i) edges[8 * i] = char('a' + i);
    request.edges = edges;
    const replay::ObjectKey key{Kind::kGraphNode, handle};
    Record(key, request, {{Kind::kGraph, graph}}, true);
    records_.NoteEdges(*log_.Find(key));
    return handle;
  }
  template <typename Request>
  void Connect(uint64_t graph, uint64_t key, const std::vector<uint64_t>& from, const std::vector<uint64_t>& to) {
    Request request;
    request.hGraph = graph;
    request.numDependencies = from.size();
    request.from = {reinterpret_cast<const char*>(from.data()), from.size() * 8};
    request.to = {reinterpret_cast<const char*>(to.data()), to.size() * 8};
    Record({Kind::kGraph, graph}, request, {}, false, key);
    records_.NoteEdges(*log_.FindSetting({Kind::kGraph, graph}, Request::kCallId, key));
  }
  void Remove(uint64_t graph, uint64_t node) {
    wire::cuGraphDestroyNode_Request request;
    request.hNode = node;
    Record({Kind::kGraph, graph}, request, {}, false, node);
    records_.NodeRemoved({Kind::kGraph, graph}, {Kind::kGraphNode, node});
  }
  // A capture adds nodes to a graph, by requests that name some.
  std::vector<uint64_t> Capture(uint64_t graph, size_t count, const std::vector<uint64_t>& named = {},
                                const std::vector<uint64_t>& behind = {}) {
    records_.BeforeCapture(graph, true);
    const uint64_t capture = handles_.New(Kind::kCapture, graph);
    handles_.Find(Kind::kCapture, capture)->parent = graph;
    wire::cuStreamBeginCaptureToGraph_Request begin;
    begin.hGraph = graph;
    begin.numDependencies = behind.size();
    begin.has_dependencies = !behind.empty();
    begin.dependencies = {reinterpret_cast<const char*>(behind.data()), behind.size() * 8};
    std::string message;
    begin.Encode(&message);
    FrameHeader header;
    header.call = begin.kCallId;
    header.message_bytes = uint32_t(message.size());
    std::string requests(reinterpret_cast<const char*>(&header), sizeof header);
    requests += message;
    requests.resize((requests.size() + 7) / 8 * 8);
    requests.append(reinterpret_cast<const char*>(named.data()), named.size() * 8);
    log_.Create({Kind::kCapture, capture}, {{Kind::kGraph, graph}}, FrameHeader(), "", "", log_.AddImage(requests));
    std::vector<uint64_t> nodes;
    for (size_t i = 0; i < count; ++i) {
      nodes.push_back(handles_.New(Kind::kGraphNode, graph));
      handles_.Find(Kind::kGraphNode, nodes.back())->parent = graph;
    }
    if (!nodes.empty()) {
      wire::OpGraphNames_Request request;
      request.graph = graph;
      request.nodes = nodes;
      Record({Kind::kGraph, graph}, request, {}, false, nodes[0]);
    }
    records_.CapturedInto(graph, capture, true);
    return nodes;
  }
  uint64_t Instantiate(uint64_t graph) {
    const uint64_t exec = Make(Kind::kGraphExec);
    records_.Retain(exec, 0, graph);
    return exec;
  }
  template <typename Request>
  void Record(replay::ObjectKey object, const Request& request, const std::vector<replay::ObjectKey>& needs, bool makes,
              uint64_t key = 0) {
    FrameHeader header;
    header.call = Request::kCallId;
    std::string message;
    request.Encode(&message);
    if (makes) {
      log_.Create(object, needs, header, message, "", {});
    } else {
      log_.Modify(object, key, header, message, needs);
    }
  }
  bool Recorded(uint64_t handle) { return log_.Find({KindOf(handle), handle}) != nullptr; }
  // What a node's record says that it comes after, and the edges' data.
  std::pair<std::vector<uint64_t>, std::string> After(uint64_t node) {
    wire::cuGraphAddNode_v2_Request request;
    EXPECT_TRUE(request.Decode(log_.Find({Kind::kGraphNode, node})->message));
    std::string data;
    for (size_t i = 0; i < request.edges.size(); i += 8) data += request.edges[i];
    return {request.dependencies, data};
  }

  // The messages of settings in the log, oldest first.
  std::vector<std::string> Settings() {
    std::vector<std::string> messages;
    for (const replay::Record* record : log_.InOrder()) {
      if (record->modifies) messages.push_back(record->message);
    }
    return messages;
  }

  replay::Log log_;
  ObjectTable handles_;
  std::vector<uint64_t> dropped_;
  GraphRecords records_{&log_, &handles_, [this](replay::ObjectKey object) { Drop(object.id); }};
};

using Handles = std::vector<uint64_t>;

TEST_F(GraphRecordsTest, AGraphStaysAsLongAsAnExecutableNeedsIt) {
  const uint64_t graph = Make(Kind::kGraph), exec = Make(Kind::kGraphExec), other = Make(Kind::kGraph);
  records_.Retain(exec, 0, graph);
  EXPECT_EQ(records_.UsersOf(graph), Handles{exec});
  EXPECT_TRUE(Destroy(graph));
  EXPECT_FALSE(Destroy(other));
  EXPECT_EQ(dropped_, Handles{other});
  EXPECT_FALSE(Destroy(exec));
  EXPECT_EQ(dropped_, (Handles{other, exec, graph}));
}

TEST_F(GraphRecordsTest, AnUpdateTakesTheGraphsPlace) {
  const uint64_t first = Make(Kind::kGraph), second = Make(Kind::kGraph), exec = Make(Kind::kGraphExec);
  records_.Retain(exec, 0, first);
  EXPECT_TRUE(Destroy(first));
  records_.Retain(exec, 0, second);
  EXPECT_EQ(dropped_, Handles{first});
  EXPECT_TRUE(records_.UsersOf(first).empty());
  EXPECT_TRUE(Destroy(second));
}

TEST_F(GraphRecordsTest, AGraphThatTwoNeedStaysForTheSecond) {
  const uint64_t graph = Make(Kind::kGraph), one = Make(Kind::kGraphExec), two = Make(Kind::kGraphExec);
  records_.Retain(one, 0, graph);
  records_.Retain(two, 0, graph);
  EXPECT_TRUE(Destroy(graph));
  Destroy(one);
  EXPECT_EQ(dropped_, Handles{one});
  Destroy(two);
  EXPECT_EQ(dropped_, (Handles{one, two, graph}));
}

TEST_F(GraphRecordsTest, AChainGoesAtOnce) {
  const uint64_t graph = Make(Kind::kGraph), clone = Make(Kind::kGraph), exec = Make(Kind::kGraphExec);
  records_.Retain(clone, 0, graph);
  records_.Retain(exec, 0, clone);
  EXPECT_TRUE(Destroy(graph));
  EXPECT_TRUE(Destroy(clone));
  Destroy(exec);
  EXPECT_EQ(dropped_, (Handles{exec, clone, graph}));
}

TEST_F(GraphRecordsTest, OnlyTheLastSettingStays) {
  const uint64_t graph = Make(Kind::kGraph), node = Make(Kind::kGraphNode, graph);
  Set(node, 1, "a");
  Set(node, 1, "b");
  Set(node, 2, "other key");
  EXPECT_EQ(Settings(), (std::vector<std::string>{"b", "other key"}));
}

TEST_F(GraphRecordsTest, ASettingThatACopyHasInItStays) {
  const uint64_t graph = Make(Kind::kGraph), node = Make(Kind::kGraphNode, graph);
  Set(node, 1, "a");
  const uint64_t exec = Make(Kind::kGraphExec);
  records_.Retain(exec, 0, graph);
  Set(node, 1, "b");
  EXPECT_EQ(Settings(), (std::vector<std::string>{"a", "b"}));
  Set(node, 1, "c");
  EXPECT_EQ(Settings(), (std::vector<std::string>{"a", "c"})) << "nothing was made from the graph as it was with b";
  Destroy(exec);
  Set(node, 1, "d");
  EXPECT_EQ(Settings(), std::vector<std::string>{"d"});
}

// What kernels launch is what was uploaded: a setting made since then does not replace what was there at the upload.
TEST_F(GraphRecordsTest, SettingsBeforeAndAfterAnUpload) {
  const uint64_t exec = Make(Kind::kGraphExec);
  const replay::ObjectKey key{Kind::kGraphExec, exec};
  FrameHeader header;
  header.call = 500;
  std::set<uint64_t> log_keys;
  const auto set = [&](uint64_t node, const std::string& message) {
    log_keys.insert(records_.ModifyExec(key, node, header, message, {}));
  };
  const auto settings = [this] {
    std::vector<std::string> all = Settings();
    for (const replay::Record* record : log_.InOrder()) {
      wire::cuGraphUpload_Request request;
      if (!record->modifies || !wire::DecodeAs(record->header.call, record->message, &request)) continue;
      EXPECT_EQ(request.hGraph, record->object.id);
      EXPECT_EQ(request.hStream, 0u);
      std::replace(all.begin(), all.end(), record->message, std::string("upload"));
    }
    return all;
  };
  using Messages = std::vector<std::string>;
  records_.Uploaded(key);
  EXPECT_EQ(settings(), Messages{}) << "kernels may not launch it";
  records_.MakeLaunchable(exec);
  set(1, "a");
  set(1, "b");
  EXPECT_EQ(settings(), Messages{"b"});
  records_.Uploaded(key);
  EXPECT_EQ(settings(), (Messages{"b", "upload"}));
  set(1, "c");
  set(1, "d");
  set(2, "e");
  EXPECT_EQ(settings(), (Messages{"b", "upload", "d", "e"}));
  records_.Uploaded(key);
  records_.Uploaded(key);
  EXPECT_EQ(settings(), (Messages{"d", "e", "upload"}));
  for (int i = 0; i < 5; ++i) {
    set(2, "f");
    EXPECT_EQ(settings(), (Messages{"d", "e", "upload", "f"}));
    set(2, "e");
    records_.Uploaded(key);
    EXPECT_EQ(settings(), (Messages{"d", "e", "upload"}));
  }
  EXPECT_LE(log_keys.size(), 4u);
  Destroy(exec);
  EXPECT_EQ(log_.records(), 0u);
}

TEST_F(GraphRecordsTest, ARemovedNodeLeavesNothing) {
  const uint64_t graph = Make(Kind::kGraph);
  for (int i = 0; i < 3; ++i) {
    const uint64_t node = AddNode(graph);
    Set(node, 1, "setting");
    EXPECT_GE(log_.records(), 3u);
    Remove(graph, node);
    EXPECT_EQ(log_.records(), 1u) << "the graph's";
    EXPECT_FALSE(handles_.Find(Kind::kGraphNode, node));
  }
  // A node that was found in a clone is made again with the clone: only the removal takes it away.
  const uint64_t found = Make(Kind::kGraphNode, graph);
  Remove(graph, found);
  EXPECT_TRUE(Recorded(found));
  EXPECT_EQ(Settings().size(), 1u);
}

TEST_F(GraphRecordsTest, ARemovedNodeStaysForWhatWasMadeWhileItWasThere) {
  const uint64_t graph = Make(Kind::kGraph);
  const uint64_t before = Instantiate(graph), node = AddNode(graph), one = Instantiate(graph), two = Instantiate(graph);
  Remove(graph, node);
  const uint64_t after = Instantiate(graph);
  EXPECT_TRUE(Recorded(node));
  Destroy(one);
  EXPECT_TRUE(Recorded(node));
  EXPECT_EQ(Settings().size(), 1u) << "the removal";
  Destroy(two);
  EXPECT_FALSE(Recorded(node));
  EXPECT_TRUE(Settings().empty());
  EXPECT_EQ(records_.UsersOf(graph), (Handles{before, after}));
}

// A program that edits a graph in a loop, and updates an executable from it each time.
TEST_F(GraphRecordsTest, AnUpdateLetsGoOfTheNodesThatWereThereAtTheLast) {
  const uint64_t graph = Make(Kind::kGraph), first = AddNode(graph), exec = Instantiate(graph);
  uint64_t node = first;
  for (int i = 0; i < 10; ++i) {
    Remove(graph, node);
    const uint64_t last = node;
    node = AddNode(graph);
    log_.Modify({Kind::kGraphExec, exec}, 0, FrameHeader(), "update");
    records_.Retain(exec, 1, graph);
    EXPECT_EQ(Recorded(last), last == first);
  }
  EXPECT_TRUE(Recorded(first)) << "the executable was made with it";
  EXPECT_EQ(log_.records(), 6u) << "graph, executable, update, the first node and its removal, the last node";
  Destroy(exec);
  EXPECT_FALSE(Recorded(first));
  EXPECT_TRUE(Recorded(node));
}

TEST_F(GraphRecordsTest, EdgesOfARemovedNodeGo) {
  using wire::cuGraphAddDependencies_Request;
  using wire::cuGraphAddDependencies_v2_Request;
  using wire::cuGraphRemoveDependencies_Request;
  const uint64_t graph = Make(Kind::kGraph);
  const uint64_t a = AddNode(graph), b = AddNode(graph), c = AddNode(graph, {a, b, a}), d = AddNode(graph, {a});
  Connect<cuGraphRemoveDependencies_Request>(graph, 1, {a, b}, {c, c});
  Connect<cuGraphAddDependencies_Request>(graph, 2, {a}, {b});
  Connect<cuGraphAddDependencies_v2_Request>(graph, 3, {b, a, b}, {c, d, d});
  EXPECT_EQ(After(c), std::make_pair(Handles{a, b, a}, std::string("abc")));
  Remove(graph, a);
  EXPECT_EQ(After(c), std::make_pair(Handles{b}, std::string("b")));
  EXPECT_EQ(After(d), std::make_pair(Handles{}, std::string()));
  const std::vector<std::string> settings = Settings();
  ASSERT_EQ(settings.size(), 2u);
  cuGraphRemoveDependencies_Request removed;
  cuGraphAddDependencies_v2_Request added;
  ASSERT_TRUE(removed.Decode(settings[0]) && added.Decode(settings[1]));
  const auto bytes = [](const Handles& nodes) {
    return std::string_view(reinterpret_cast<const char*>(nodes.data()), nodes.size() * 8);
  };
  const Handles only_b{b}, only_c{c}, both_b{b, b}, c_and_d{c, d};
  EXPECT_EQ(removed.numDependencies, 1u);
  EXPECT_EQ(removed.from, bytes(only_b));
  EXPECT_EQ(removed.to, bytes(only_c));
  EXPECT_EQ(added.numDependencies, 2u);
  EXPECT_EQ(added.from, bytes(both_b));
  EXPECT_EQ(added.to, bytes(c_and_d));
  Remove(graph, b);
  EXPECT_TRUE(Settings().empty());
  Remove(graph, c);
  Remove(graph, d);
  EXPECT_EQ(log_.records(), 1u);
}

TEST_F(GraphRecordsTest, EdgesThatComeAndGoLeaveNothing) {
  using wire::cuGraphAddDependencies_Request;
  using wire::cuGraphAddDependencies_v2_Request;
  using wire::cuGraphRemoveDependencies_Request;
  using wire::cuGraphRemoveDependencies_v2_Request;
  const uint64_t graph = Make(Kind::kGraph), a = AddNode(graph), b = AddNode(graph), c = AddNode(graph, {a});
  const size_t records = log_.records();
  for (uint64_t i = 0; i < 10; i += 2) {
    Connect<cuGraphAddDependencies_Request>(graph, i, {a}, {b});
    Connect<cuGraphRemoveDependencies_Request>(graph, i + 1, {a}, {b});
    EXPECT_EQ(log_.records(), records);
  }
  // The second versions, without data.
  Connect<cuGraphAddDependencies_v2_Request>(graph, 20, {a, b}, {b, c});
  Connect<cuGraphRemoveDependencies_v2_Request>(graph, 21, {b}, {c});
  EXPECT_EQ(Settings().size(), 1u);
  Connect<cuGraphRemoveDependencies_Request>(graph, 22, {a}, {b});
  EXPECT_EQ(log_.records(), records);
  // One that the node was made with: what is left is one removal, or that and an addition.
  for (uint64_t i = 0; i < 10; i += 2) {
    Connect<cuGraphRemoveDependencies_Request>(graph, i, {a}, {c});
    EXPECT_EQ(log_.records(), records + 1);
    Connect<cuGraphAddDependencies_Request>(graph, i + 1, {a}, {c});
    EXPECT_EQ(log_.records(), records + 2);
  }
  Connect<cuGraphRemoveDependencies_Request>(graph, 30, {a, a}, {b, c});
  EXPECT_EQ(log_.records(), records + 2) << "one removal, and the edge that nobody had added";
  // No edge at all.
  Connect<cuGraphAddDependencies_Request>(graph, 31, {}, {});
  EXPECT_EQ(log_.records(), records + 2);
}

TEST_F(GraphRecordsTest, EdgesStayForWhatWasMadeWhileTheyWereThere) {
  using wire::cuGraphAddDependencies_Request;
  using wire::cuGraphRemoveDependencies_Request;
  const uint64_t graph = Make(Kind::kGraph), a = AddNode(graph), b = AddNode(graph), exec = Instantiate(graph);
  const size_t records = log_.records();
  for (uint64_t i = 0; i < 10; i += 2) {
    Connect<cuGraphAddDependencies_Request>(graph, i, {a}, {b});
    log_.Modify({Kind::kGraphExec, exec}, 0, FrameHeader(), "update");
    records_.Retain(exec, 1, graph);
    Connect<cuGraphRemoveDependencies_Request>(graph, i + 1, {a}, {b});
    EXPECT_EQ(log_.records(), records + 3) << "the last update, and the edge that it has in it";
  }
  const uint64_t clone = Make(Kind::kGraph);
  records_.Retain(clone, 0, graph);
  Destroy(exec);
  EXPECT_EQ(Settings().size(), 0u) << "the clone was made without it";
  // With an end of the edge.
  Connect<cuGraphAddDependencies_Request>(graph, 20, {a}, {b});
  const uint64_t other = Instantiate(graph);
  Connect<cuGraphRemoveDependencies_Request>(graph, 21, {a}, {b});
  Remove(graph, b);
  EXPECT_EQ(Settings().size(), 3u);
  Destroy(other);
  EXPECT_EQ(Settings().size(), 1u) << "the clone has the node";
  Destroy(clone);
  EXPECT_EQ(Settings().size(), 0u);
  EXPECT_FALSE(Recorded(b));
}

TEST_F(GraphRecordsTest, AnEdgeWithOtherDataIsAnotherOne) {
  const uint64_t graph = Make(Kind::kGraph), a = AddNode(graph), b = AddNode(graph);
  const auto connect = [&](auto request, uint64_t key, char data) {
    request.hGraph = graph;
    request.numDependencies = 1;
    const std::string edge(1, data);
    const std::string all = edge + std::string(7, '\0');
    request.from = {reinterpret_cast<const char*>(&a), 8};
    request.to = {reinterpret_cast<const char*>(&b), 8};
    request.edgeData = all;
    request.has_edgeData = true;
    Record({Kind::kGraph, graph}, request, {}, false, key);
    records_.NoteEdges(*log_.FindSetting({Kind::kGraph, graph}, request.kCallId, key));
  };
  connect(wire::cuGraphAddDependencies_v2_Request(), 1, 'x');
  connect(wire::cuGraphAddDependencies_v2_Request(), 2, 'y');
  connect(wire::cuGraphRemoveDependencies_v2_Request(), 3, 'z');
  EXPECT_EQ(Settings().size(), 3u);
  connect(wire::cuGraphRemoveDependencies_v2_Request(), 4, 'x');
  EXPECT_EQ(Settings().size(), 2u);
  EXPECT_TRUE(log_.FindSetting({Kind::kGraph, graph}, wire::cuGraphAddDependencies_v2_Request::kCallId, 2));
}

TEST_F(GraphRecordsTest, ACaptureGoesWithTheLastOfItsNodes) {
  const uint64_t graph = Make(Kind::kGraph), stays = AddNode(graph);
  const size_t records = log_.records();
  std::vector<uint64_t> last;
  for (int i = 0; i < 5; ++i) {
    // The older ones go when the newer ones are there.
    std::vector<uint64_t> behind{stays};
    behind.insert(behind.end(), last.begin(), last.end());
    const std::vector<uint64_t> nodes = Capture(graph, 2, {}, behind);
    Connect<wire::cuGraphAddDependencies_Request>(graph, 1, {stays, nodes[0]}, {nodes[0], nodes[1]});
    const uint64_t after = AddNode(graph, {nodes[1], stays});
    Set(nodes[0], 1, "setting");
    for (const uint64_t node : last) Remove(graph, node);
    last = nodes;
    last.push_back(after);
    EXPECT_EQ(log_.records(), records + 5) << "capture, names, edges, the node behind them, a setting";
  }
  Remove(graph, last[1]);
  EXPECT_EQ(log_.records(), records + 6) << "its other node is there";
  EXPECT_EQ(After(last[2]).first, (Handles{last[1], stays}));
  Remove(graph, last[0]);
  EXPECT_EQ(log_.records(), records + 1);
  EXPECT_EQ(After(last[2]).first, Handles{stays});
  EXPECT_FALSE(handles_.Find(Kind::kGraphNode, last[0]));
  Capture(graph, 0);
  EXPECT_EQ(log_.records(), records + 1) << "it has added nothing";
}

TEST_F(GraphRecordsTest, ACaptureStaysForWhatNeedsItsNodes) {
  const uint64_t graph = Make(Kind::kGraph);
  const uint64_t first = Capture(graph, 1)[0];
  const uint64_t exec = Instantiate(graph);
  Remove(graph, first);
  EXPECT_EQ(Settings().size(), 2u) << "the executable has it";
  Destroy(exec);
  EXPECT_EQ(log_.records(), 1u);
  // Another capture names it, and a node that was added to the graph.
  const uint64_t second = Capture(graph, 1)[0], own = AddNode(graph);
  const uint64_t third = Capture(graph, 1, {second, own})[0];
  const size_t records = log_.records();
  Remove(graph, second);
  Remove(graph, own);
  EXPECT_EQ(log_.records(), records + 2);
  Remove(graph, third);
  EXPECT_EQ(log_.records(), 1u);
  // One that has done more than to add nodes.
  records_.BeforeCapture(graph, true);
  records_.CapturedInto(graph, Make(Kind::kCapture, graph), false);
  EXPECT_EQ(log_.records(), 2u);
  // The graph goes with all that is held.
  const uint64_t fourth = Capture(graph, 1)[0];
  const uint64_t other = Instantiate(graph);
  Remove(graph, fourth);
  EXPECT_TRUE(Destroy(graph));
  Destroy(other);
  EXPECT_FALSE(Recorded(graph));
}

TEST_F(GraphRecordsTest, AGraphInsideOfARemovedNodeMayBeACopysOriginal) {
  const uint64_t graph = Make(Kind::kGraph), node = AddNode(graph);
  const uint64_t body = Make(Kind::kGraph, node), inner = AddNode(body), clone = Make(Kind::kGraph);
  records_.Retain(clone, 0, body);
  // What uses a part of the node and is one, too, goes with it.
  records_.Retain(inner, 5, body);
  Remove(graph, node);
  EXPECT_TRUE(Recorded(node));
  Destroy(clone);
  EXPECT_FALSE(Recorded(node));
  // A node of a body, and an executable of the graph around it.
  const uint64_t around = AddNode(graph), loop = Make(Kind::kGraph, around), part = AddNode(loop);
  const uint64_t exec = Instantiate(graph);
  Remove(loop, part);
  EXPECT_TRUE(Recorded(part));
  Destroy(exec);
  EXPECT_FALSE(Recorded(part));
}

TEST_F(GraphRecordsTest, ACaptureIntoTheGraphMayNameNodes) {
  const uint64_t graph = Make(Kind::kGraph), named = AddNode(graph);
  records_.BeforeCapture(graph, false);
  records_.CapturedInto(graph, Make(Kind::kCapture, graph), false);
  const uint64_t later = AddNode(graph);
  Remove(graph, named);
  Remove(graph, later);
  EXPECT_TRUE(Recorded(named));
  EXPECT_FALSE(Recorded(later));
}

TEST_F(GraphRecordsTest, AGraphThatGoesTakesHeldNodesWithIt) {
  const uint64_t graph = Make(Kind::kGraph), node = AddNode(graph), exec = Instantiate(graph);
  Remove(graph, node);
  EXPECT_TRUE(Destroy(graph));
  Destroy(exec);
  EXPECT_EQ(dropped_, (Handles{exec, graph}));
  EXPECT_EQ(log_.records(), 0u);
}

// A setting takes something of another node: that stays as long as the setting does, also an older one that a copy has.
TEST_F(GraphRecordsTest, WhatAKeptSettingNamesStays) {
  const uint64_t graph = Make(Kind::kGraph), node = AddNode(graph);
  const auto take_from = [&](uint64_t source) {
    FrameHeader header;
    header.call = 500;
    const uint64_t key = records_.ModifyNode({Kind::kGraphNode, node}, 1, header, "take", {});
    records_.Retain(node, GraphRecords::SlotOfSetting(500, key), source);
  };
  const uint64_t one = AddNode(graph);
  take_from(one);
  Remove(graph, one);
  EXPECT_TRUE(Recorded(one));
  const uint64_t exec = Instantiate(graph), two = AddNode(graph), three = AddNode(graph);
  take_from(two);
  take_from(three);
  Remove(graph, two);
  Remove(graph, three);
  EXPECT_TRUE(Recorded(one)) << "the executable has the first setting";
  EXPECT_FALSE(Recorded(two));
  EXPECT_TRUE(Recorded(three));
  Destroy(exec);
  const uint64_t four = AddNode(graph);
  take_from(four);
  EXPECT_FALSE(Recorded(one));
  EXPECT_FALSE(Recorded(three));
  EXPECT_TRUE(Recorded(four));
}

}  // namespace
}  // namespace cuda_remote::client
