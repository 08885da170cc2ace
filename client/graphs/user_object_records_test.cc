// SPDX-License-Identifier: Apache-2.0
#include "client/graphs/user_object_records.h"

#include <cuda.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>

#include "client/graphs/graph_records.h"
#include "proto/codec/decode_as.h"
#include "proto/codec/graph.gen.h"

namespace cuda_remote::client {
namespace {

// What references there are: the program's, and those of each graph and executable.
struct References {
  int program = 0;
  std::map<uint64_t, int> held;
  int Total() const {
    int total = program;
    for (const auto& [handle, count] : held) total += count;
    return total;
  }
};

class UserObjectRecordsTest : public ::testing::Test {
 protected:
  template <typename Request>
  void Modify(replay::ObjectKey object, const Request& request) {
    FrameHeader header;
    header.call = Request::kCallId;
    std::string message;
    request.Encode(&message);
    ASSERT_TRUE(records_.Modify(object, header, message, {}));
  }
  void Create(int count) {
    wire::cuUserObjectCreate_Request request;
    request.object = object_;
    request.count = uint32_t(count);
    FrameHeader header;
    header.call = request.kCallId;
    std::string message;
    request.Encode(&message);
    log_.Create({Kind::kUserObject, object_}, {}, header, message, "", {});
    real_.program = count;
  }
  void Retain(int count) {
    wire::cuUserObjectRetain_Request request;
    request.object = object_;
    request.count = uint32_t(count);
    Modify({Kind::kUserObject, object_}, request);
    real_.program += count;
  }
  void Release(int count) {
    wire::cuUserObjectRelease_Request request;
    request.object = object_;
    request.count = uint32_t(count);
    Modify({Kind::kUserObject, object_}, request);
    real_.program -= count;
  }
  void GraphRetain(uint64_t graph, int count, bool move) {
    wire::cuGraphRetainUserObject_Request request;
    request.graph = graph;
    request.object = object_;
    request.count = uint32_t(count);
    request.flags = move ? CU_GRAPH_USER_OBJECT_MOVE : 0;
    Modify({Kind::kGraph, graph}, request);
    real_.held[graph] += count;
    if (move) real_.program -= count;
  }
  void GraphRelease(uint64_t graph, int count) {
    wire::cuGraphReleaseUserObject_Request request;
    request.graph = graph;
    request.object = object_;
    request.count = uint32_t(count);
    Modify({Kind::kGraph, graph}, request);
    real_.held[graph] -= count;
  }
  uint64_t Make(Kind kind) {
    const uint64_t handle = handles_.New(kind, 0);
    FrameHeader header;
    header.call = kMakes;
    log_.Create({kind, handle}, {}, header, "", "", {});
    real_.held[handle] = 0;
    return handle;
  }
  uint64_t Instantiate(uint64_t graph) {
    const uint64_t exec = Make(Kind::kGraphExec);
    graphs_.Retain(exec, 0, graph);
    real_.held[exec] = real_.held[graph];
    made_from_[exec] = graph;
    return exec;
  }
  void Destroy(uint64_t handle) {
    const replay::ObjectKey key{KindOf(handle), handle};
    real_.held.erase(handle);
    if (graphs_.MarkDestroyed(key)) {
      FrameHeader header;
      header.call = kDestroys;
      log_.Modify(key, 0, header, "");
    } else {
      Drop(handle);
    }
  }
  void Drop(uint64_t handle) {
    log_.Destroy({KindOf(handle), handle});
    handles_.Drop(handle);
    records_.GraphGone(handle);
    graphs_.Forget(handle);
  }
  // What a replay of the log makes.
  References Replay() {
    References now;
    bool made = false;
    for (const replay::Record* record : log_.InOrder()) {
      wire::cuUserObjectCreate_Request created;
      wire::cuUserObjectRelease_Request released;
      wire::cuGraphRetainUserObject_Request graph_retained;
      wire::cuGraphReleaseUserObject_Request graph_released;
      const uint32_t call = record->header.call;
      const uint64_t handle = record->object.id;
      if (call == kMakes) {
        now.held[handle] = made_from_.count(handle) ? now.held.at(made_from_.at(handle)) : 0;
      } else if (call == kDestroys) {
        now.held.erase(handle);
      } else if (wire::DecodeAs(call, record->message, &created)) {
        now.program = int(created.count);
        made = true;
      } else if (wire::DecodeAs(call, record->message, &released)) {
        now.program -= int(released.count);
      } else if (wire::DecodeAs(call, record->message, &graph_retained)) {
        now.held.at(graph_retained.graph) += int(graph_retained.count);
      } else if (wire::DecodeAs(call, record->message, &graph_released)) {
        now.held.at(graph_released.graph) -= int(graph_released.count);
        EXPECT_GE(now.held.at(graph_released.graph), 0);
      }
      EXPECT_GE(now.program, 0);
      EXPECT_TRUE(!made || now.Total() > 0) << "the object is gone too early, at call " << call;
    }
    return now;
  }
  void Check() {
    const References now = Replay();
    EXPECT_EQ(now.program, real_.program);
    EXPECT_EQ(now.held, real_.held);
  }

  static constexpr uint32_t kMakes = 100000, kDestroys = 100001;
  const uint64_t object_ = MakeHandle(Kind::kUserObject, 1, 0);
  replay::Log log_;
  ObjectTable handles_;
  References real_;
  std::map<uint64_t, uint64_t> made_from_;
  GraphRecords graphs_{&log_, &handles_, [this](replay::ObjectKey key) { Drop(key.id); }};
  UserObjectRecords records_{&log_, [this](uint64_t graph, uint64_t after, uint64_t before) {
                               return graphs_.CopiedBetween(graph, after, before);
                             }};
};

TEST_F(UserObjectRecordsTest, TakingAndGivingBackLeavesNothing) {
  Create(1);
  const uint64_t graph = Make(Kind::kGraph);
  for (int i = 0; i < 100; ++i) {
    Retain(2);
    Release(1);
    GraphRetain(graph, 1, true);
    GraphRetain(graph, 2, false);
    GraphRelease(graph, 3);
    Check();
    EXPECT_LE(log_.records(), 3u);
  }
}

TEST_F(UserObjectRecordsTest, AnUpdateInALoopKeepsWhatTheExecutableHas) {
  Create(1);
  const uint64_t graph = Make(Kind::kGraph), exec = Instantiate(graph);
  for (int i = 0; i < 100; ++i) {
    GraphRetain(graph, 1, false);
    log_.Modify({Kind::kGraphExec, exec}, 0, FrameHeader(), "update");
    graphs_.Retain(exec, 1, graph);
    GraphRelease(graph, 1);
    EXPECT_LE(log_.records(), 8u);
  }
  EXPECT_TRUE(log_.FindSetting({Kind::kGraph, graph}, wire::cuGraphRetainUserObject_Request::kCallId, 199));
  EXPECT_TRUE(log_.FindSetting({Kind::kGraph, graph}, wire::cuGraphReleaseUserObject_Request::kCallId, 200));
}

// The executable alone has it. Who had it before that is gone from the log.
TEST_F(UserObjectRecordsTest, ACopyAloneHasIt) {
  Create(1);
  const uint64_t first = Make(Kind::kGraph), second = Make(Kind::kGraph);
  GraphRetain(first, 1, true);
  const uint64_t between = Instantiate(first);
  GraphRelease(first, 1);
  GraphRetain(second, 1, false);
  const uint64_t exec = Instantiate(second);
  Destroy(between);
  Check();
  GraphRelease(second, 1);
  Check();
  Destroy(second);
  Check();
  EXPECT_EQ(real_.Total(), 1);
  EXPECT_EQ(real_.held[exec], 1);
}

TEST_F(UserObjectRecordsTest, NothingNamesAnObjectThatIsGone) {
  Create(1);
  const uint64_t graph = Make(Kind::kGraph), exec = Instantiate(graph);
  GraphRetain(graph, 1, true);
  GraphRelease(graph, 1);
  Retain(1);
  GraphRetain(graph, 1, false);
  Release(1);
  log_.Destroy({Kind::kUserObject, object_});
  records_.ObjectGone(object_);
  EXPECT_EQ(log_.records(), 2u) << "graph and executable";
  GraphRelease(graph, 1);
  Release(1);
  EXPECT_EQ(log_.records(), 2u) << "the destructor's thread was first";
  Destroy(exec);
  Destroy(graph);
  EXPECT_EQ(log_.records(), 0u);
}

TEST_F(UserObjectRecordsTest, RandomCallsAreReplayedToTheSame) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto one_of = [&random](unsigned n) { return int(random() % n); };
    Create(1 + one_of(3));
    std::vector<uint64_t> graphs, execs;
    for (int i = 0; i < 60 && !HasFailure(); ++i) {
      if (graphs.size() < 2) graphs.push_back(Make(Kind::kGraph));
      const size_t picked = random() % graphs.size();
      const uint64_t graph = graphs[picked];
      switch (one_of(9)) {
        case 0:
          Retain(1 + one_of(2));
          break;
        case 1:
          if (real_.program > 0 && real_.Total() > 1) Release(1);
          break;
        case 2:
          GraphRetain(graph, 1 + one_of(2), false);
          break;
        case 3:
          if (real_.program > 0) GraphRetain(graph, 1, true);
          break;
        case 4:
        case 5:
          if (real_.held[graph] > 0 && real_.Total() > real_.held[graph])
            GraphRelease(graph, 1 + one_of(unsigned(real_.held[graph])));
          break;
        case 6:
          execs.push_back(Instantiate(graph));
          break;
        case 7:
          if (!execs.empty() && real_.Total() > real_.held[execs.back()]) {
            std::swap(execs.back(), execs[random() % execs.size()]);
            if (real_.Total() == real_.held[execs.back()]) break;
            Destroy(execs.back());
            execs.pop_back();
          }
          break;
        case 8:
          if (real_.Total() > real_.held[graph]) {
            Destroy(graph);
            graphs.erase(graphs.begin() + long(picked));
          }
          break;
      }
      Check();
    }
    for (const uint64_t one : execs) Destroy(one);
    for (const uint64_t one : graphs) Destroy(one);
    log_.Destroy({Kind::kUserObject, object_});
    records_.ObjectGone(object_);
    EXPECT_EQ(log_.records(), 0u);
    real_ = {};
    made_from_.clear();
  }
}

}  // namespace
}  // namespace cuda_remote::client
