// SPDX-License-Identifier: Apache-2.0
#include "client/session/graph_records.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "proto/codec/decode_as.h"
#include "proto/codec/graph.gen.h"

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

TEST_F(GraphRecordsTest, SettingsThatNameAUserObjectGoWithIt) {
  const uint64_t graph = Make(Kind::kGraph);
  FrameHeader header;
  header.call = 600;
  log_.Modify({Kind::kGraph, graph}, 77, header, "retain", {});
  records_.NoteUserObject(5, {Kind::kGraph, graph}, 600, 77);
  records_.UserObjectGone(6);
  EXPECT_EQ(Settings().size(), 1u);
  records_.UserObjectGone(5);
  EXPECT_TRUE(Settings().empty());
}

}  // namespace
}  // namespace cuda_remote::client
