// SPDX-License-Identifier: Apache-2.0
// Tests of the replayer against a server made of a list.
#include "replay/replayer/replayer.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>

#include "proto/api/call_ids.gen.h"
#include "proto/base/testing/value_of.h"
#include "proto/codec/graph.gen.h"
#include "proto/codec/memory.gen.h"
#include "proto/codec/operations.gen.h"
#include "proto/codec/pool.gen.h"
#include "proto/codec/virtual.gen.h"
#include "replay/replayer/sharing_groups.h"

namespace cuda_remote::replay {
namespace {

struct Sent {
  FrameHeader header;
  std::string message;
  std::string payload;
};

class FakeServer : public ReplayTarget {
 public:
  uint64_t Begin(const FrameHeader& header, std::string_view message, std::string_view payload) override {
    if (sent.size() == gone_at) return 0;
    sent.push_back({header, std::string(message), std::string(payload)});
    most_under_way = std::max(most_under_way, sent.size() - finished);
    return sent.size();
  }
  StatusOr<Answer> Finish(uint64_t ticket) override {
    EXPECT_EQ(ticket, ++finished);
    if (ticket == lost_at) return Error("closed");
    return Answer{results[ticket], answers[ticket]};
  }
  size_t window() const override { return size; }

  std::vector<Sent> sent;
  std::map<uint64_t, uint32_t> results;
  std::map<uint64_t, std::string> answers;
  size_t size = 4;
  size_t finished = 0;
  size_t most_under_way = 0;
  size_t gone_at = SIZE_MAX;
  size_t lost_at = SIZE_MAX;
};

FrameHeader Frame(uint32_t call, uint32_t context = 0) {
  FrameHeader header;
  header.call = call;
  header.context_or_result = context;
  return header;
}

Log Sample() {
  Log log;
  log.Create({Kind::kContext, 0x10}, {}, Frame(kCall_cuCtxCreate_v4), "context", "", std::nullopt);
  log.Create({Kind::kModule, 0x20}, {{Kind::kContext, 0x10}}, Frame(kCall_cuModuleLoadData, 1), "module", "log text",
             log.AddImage("image"));
  log.Create({Kind::kDeviceMemory, 0x1000}, {}, Frame(kOpMemAlloc, 1), "memory", "address", std::nullopt);
  log.Modify({Kind::kContext, 0x10}, 1, Frame(kCall_cuCtxSetLimit, 1), "limit");
  for (uint64_t i = 0; i < 10; ++i) {
    log.Create({Kind::kStream, 0x100 + (i << 4)}, {{Kind::kContext, 0x10}}, Frame(kCall_cuStreamCreate, 1), "stream",
               "", std::nullopt);
  }
  return log;
}

TEST(Replay, SendsAllInOrder) {
  FakeServer server;
  server.answers[3] = "address";
  server.answers[2] = "another log text";  // a compiler may say what it likes
  uint64_t last = 0;
  const auto progress = [&](uint64_t done, uint64_t total) {
    EXPECT_EQ(total, 14u);
    EXPECT_EQ(done, last + 1);
    last = done;
  };
  ASSERT_EQ(Replay(Sample(), server, progress).message(), "");
  EXPECT_EQ(last, 14u);
  ASSERT_EQ(server.sent.size(), 14u);
  EXPECT_EQ(server.finished, 14u);
  EXPECT_EQ(server.most_under_way, 4u);
  EXPECT_EQ(server.sent[1].payload, "image");
  EXPECT_EQ(server.sent[1].message, "module");
  EXPECT_EQ(server.sent[1].header.context_or_result, 1u);
  EXPECT_EQ(server.sent[3].message, "limit");
  for (const Sent& sent : server.sent) EXPECT_EQ(sent.header.flags, uint32_t(kFlagReplay));
}

TEST(Replay, TexturesAndSurfacesComeByTheirNumbers) {
  Log log = Sample();
  const auto make = [&log](Kind kind, uint64_t number, const char* message) {
    const uint32_t call = kind == Kind::kTexture ? kCall_cuTexObjectCreate : kCall_cuSurfObjectCreate;
    log.Create({kind, 0x10000000000 + number}, {{Kind::kContext, 0x10}}, Frame(call, 1), message, "", std::nullopt);
  };
  make(Kind::kTexture, 5, "5");
  make(Kind::kTexture, 2, "2");
  log.Create({Kind::kArray, 0x300}, {{Kind::kContext, 0x10}}, Frame(kCall_cuArray3DCreate_v2, 1), "array", "",
             std::nullopt);
  make(Kind::kSurface, 4, "4");
  make(Kind::kTexture, 1, "1");
  log.Create({Kind::kEvent, 0x400}, {{Kind::kContext, 0x10}}, Frame(kCall_cuEventCreate, 1), "event", "", std::nullopt);
  FakeServer server;
  server.answers[3] = "address";
  server.answers[2] = "log text";
  ASSERT_EQ(Replay(log, server, nullptr).message(), "");
  std::vector<std::string> messages;
  for (size_t i = 14; i < server.sent.size(); ++i) messages.push_back(server.sent[i].message);
  EXPECT_EQ(messages, (std::vector<std::string>{"array", "1", "2", "4", "5", "event"}));
}

TEST(Replay, StopsWhereAnAnswerDiffers) {
  FakeServer server;
  server.answers[3] = "other address";
  const std::string error = Replay(Sample(), server, nullptr).message();
  EXPECT_NE(error.find("OpMemAlloc"), std::string::npos) << error;
  EXPECT_NE(error.find("diverged"), std::string::npos) << error;
  EXPECT_EQ(server.finished, server.sent.size());
  EXPECT_LT(server.sent.size(), 14u);
}

TEST(Replay, NamesTheHandleOfAGraphThatKernelsLaunch) {
  wire::cuGraphInstantiateWithParams_Request request;
  request.exec = 0x220;
  request.expected = 0x7f0000001180;
  wire::cuGraphInstantiateWithParams_Reply reply;
  reply.handle = request.expected;
  std::string message, answer, other;
  request.Encode(&message);
  reply.Encode(&answer);
  reply.handle = 0x7f0040001180;
  reply.Encode(&other);
  Log log;
  log.Create({Kind::kGraphExec, 0x220}, {}, Frame(kCall_cuGraphInstantiateWithParams), message, answer, std::nullopt);
  FakeServer same, elsewhere;
  same.answers[1] = answer;
  elsewhere.answers[1] = other;
  EXPECT_EQ(Replay(log, same, nullptr).message(), "");
  const std::string error = Replay(log, elsewhere, nullptr).message();
  EXPECT_NE(error.find("has the handle 0x7f0040001180 on this server, but 0x7f0000001180 before"), std::string::npos)
      << error;
}

// Texture references that show pinned memory wait for it, and their other settings with them.
TEST(Replay, ReferencesWaitForPinnedMemory) {
  Log log;
  const ObjectKey reference{Kind::kTextureReference, 0x200}, array{Kind::kArray, 0x210};
  log.Create(reference, {}, Frame(kCall_cuModuleGetTexRef), "reference", "", std::nullopt);
  log.Modify(reference, 0, Frame(kCall_cuTexRefSetAddress_v2), "pinned", {ObjectKey{Kind::kHostMemory, 0x5000}});
  log.Create(array, {}, Frame(kCall_cuArrayCreate_v2), "array", "", std::nullopt);
  log.Modify(reference, 0, Frame(kCall_cuTexRefSetArray), "bound to the array", {array});
  FakeServer before, after;
  ASSERT_EQ(Replay(log, before, nullptr, Part::kBeforePinned).message(), "");
  ASSERT_EQ(Replay(log, after, nullptr, Part::kAfterPinned).message(), "");
  ASSERT_EQ(before.sent.size(), 1u);
  EXPECT_EQ(before.sent[0].message, "array");
  std::vector<std::string> late;
  for (const Sent& sent : after.sent) late.push_back(sent.message);
  EXPECT_EQ(late, (std::vector<std::string>{"reference", "pinned", "bound to the array"}));
}

// Graphs that copy pinned memory wait for the process, and with them all graphs and the user objects that they hold;
// without such a copy nothing waits.
TEST(Replay, GraphsWaitForPinnedMemory) {
  for (const bool pinned : {false, true}) {
    Log log = Sample();
    const ObjectKey copies{Kind::kGraph, 0x200}, other{Kind::kGraph, 0x210}, exec{Kind::kGraphExec, 0x220};
    const ObjectKey user_object{Kind::kUserObject, 0x240};
    log.Create(user_object, {}, Frame(kCall_cuUserObjectCreate), "user object", "", std::nullopt);
    log.Create(copies, {pinned ? ObjectKey{Kind::kHostMemory, 0x5000} : ObjectKey{Kind::kDeviceMemory, 0x1000}},
               Frame(kOpGraphCapture), "copies", "", std::nullopt);
    log.Modify(copies, 1, Frame(kCall_cuGraphRetainUserObject), "retain");
    log.Modify(user_object, 0, Frame(kCall_cuUserObjectRelease), "release");
    log.Create(other, {}, Frame(kCall_cuGraphCreate), "other", "", std::nullopt);
    log.Create({Kind::kEvent, 0x230}, {}, Frame(kCall_cuEventCreate), "event", "", std::nullopt);
    log.Create(exec, {}, Frame(kCall_cuGraphInstantiateWithParams), "exec", "", std::nullopt);
    log.Modify(exec, 7, Frame(kCall_cuGraphExecNodeSetParams), "node");
    FakeServer before, after, all;
    before.answers[3] = all.answers[3] = "address";
    ASSERT_EQ(Replay(log, before, nullptr, Part::kBeforePinned).message(), "");
    ASSERT_EQ(Replay(log, after, nullptr, Part::kAfterPinned).message(), "");
    ASSERT_EQ(Replay(log, all, nullptr).message(), "");
    EXPECT_EQ(all.sent.size(), 22u);
    EXPECT_EQ(before.sent.size(), pinned ? 15u : 22u);
    EXPECT_EQ(before.sent.back().message, pinned ? "event" : "node");
    std::vector<std::string> late;
    for (const Sent& sent : after.sent) late.push_back(sent.message);
    EXPECT_EQ(late,
              pinned ? (std::vector<std::string>{"user object", "copies", "retain", "release", "other", "exec", "node"})
                     : std::vector<std::string>());
  }
}

// Code first, while the job runs on; what has come since, and the rest, later. Each record is sent once.
TEST(Replay, CodeGoesAhead) {
  Log log = Sample();
  const ObjectKey context{Kind::kContext, 0x10}, module{Kind::kModule, 0x20};
  log.Create({Kind::kFunction, 0x600}, {module}, Frame(kCall_cuModuleGetFunction, 1), "function", "", std::nullopt);
  log.Create({Kind::kVariable, 0x2000}, {module}, Frame(kCall_cuModuleGetGlobal_v2, 1), "variable", "", std::nullopt);
  // Something of code's that needs what is not there yet.
  log.Modify({Kind::kFunction, 0x600}, 1, Frame(kCall_cuFuncSetAttribute, 1), "attribute",
             {{Kind::kDeviceMemory, 0x1000}});
  std::string bytes;
  log.Serialize(&bytes);
  const Log before = ValueOf(Log::Parse(bytes));

  const auto messages = [](const FakeServer& server) {
    std::vector<std::string> all;
    for (const Sent& sent : server.sent) {
      if (sent.message != "stream") all.push_back(sent.message);
    }
    return all;
  };
  FakeServer ahead;
  ASSERT_EQ(ReplayCode(before, ahead).message(), "");
  EXPECT_EQ(messages(ahead), (std::vector<std::string>{"context", "module", "limit", "function"}));
  EXPECT_EQ(ahead.sent[1].payload, "image");
  for (const Sent& sent : ahead.sent) EXPECT_EQ(sent.header.flags, uint32_t(kFlagReplay));

  EXPECT_TRUE(HasCodeOf(before, log));
  log.Create({Kind::kModule, 0x700}, {context}, Frame(kCall_cuModuleLoadData, 1), "late module", "",
             log.AddImage("other image"));
  log.Destroy({Kind::kStream, 0x100});
  EXPECT_TRUE(HasCodeOf(before, log));
  FakeServer rest;
  rest.answers[1] = "address";
  ASSERT_EQ(Replay(log, rest, nullptr, Part::kAll, &before).message(), "");
  EXPECT_EQ(messages(rest), (std::vector<std::string>{"memory", "variable", "attribute", "late module"}));
  EXPECT_EQ(ahead.sent.size() + rest.sent.size(), log.records());
}

TEST(Replay, CodeThatIsNoLongerTheSame) {
  const auto now = [](const std::function<void(Log*)>& change) {
    Log log = Sample();
    change(&log);
    return log;
  };
  const ObjectKey context{Kind::kContext, 0x10}, module{Kind::kModule, 0x20};
  const Log before = Sample();
  EXPECT_TRUE(HasCodeOf(before, Sample()));
  EXPECT_FALSE(HasCodeOf(before, Log()));
  EXPECT_TRUE(HasCodeOf(Log(), before));
  EXPECT_FALSE(HasCodeOf(before, now([&](Log* log) { log->Destroy(module); })));
  EXPECT_FALSE(HasCodeOf(
      before, now([&](Log* log) { log->Modify(context, 1, Frame(kCall_cuCtxSetLimit, 1), "another limit"); })));
  EXPECT_FALSE(HasCodeOf(before, now([&](Log* log) { log->ForgetSetting(context, kCall_cuCtxSetLimit, 1); })));
  EXPECT_FALSE(HasCodeOf(before, now([&](Log* log) { log->SetMessage(module, "moved module"); })));
  // The same handle, another module.
  EXPECT_FALSE(HasCodeOf(before, now([&](Log* log) {
                           log->Destroy(module);
                           log->Create(module, {context}, Frame(kCall_cuModuleLoadData, 1), "module", "log text",
                                       log->AddImage("image"));
                         })));
  EXPECT_TRUE(HasCodeOf(before, now([&](Log* log) { log->Destroy({Kind::kDeviceMemory, 0x1000}); })));
}

TEST(Replay, StopsAtAnError) {
  FakeServer server;
  server.size = 1;
  server.results[2] = 209;
  const std::string error = Replay(Sample(), server, nullptr).message();
  EXPECT_NE(error.find("cuModuleLoadData"), std::string::npos) << error;
  EXPECT_NE(error.find("209"), std::string::npos) << error;
  EXPECT_EQ(server.sent.size(), 2u);
}

TEST(Replay, SaysWhatAGpuThatIsTooSmallLacks) {
  FakeServer server;
  server.results[3] = 2;  // CUDA_ERROR_OUT_OF_MEMORY
  const std::string error = Replay(Sample(), server, nullptr).message();
  EXPECT_NE(error.find("OpMemAlloc"), std::string::npos) << error;
  EXPECT_NE(error.find("out of memory); the job needs a GPU with more free memory"), std::string::npos) << error;
}

TEST(Replay, NamesTheCallAtWhichTheServerWasLost) {
  for (size_t at : {size_t{1}, size_t{4}, size_t{14}}) {
    FakeServer server;
    server.answers[3] = "address";
    server.lost_at = at;
    const std::string error = Replay(Sample(), server, nullptr).message();
    EXPECT_NE(error.find("lost"), std::string::npos) << error;
    EXPECT_EQ(server.finished, server.sent.size());
    server = FakeServer();
    server.answers[3] = "address";
    server.gone_at = at - 1;
    EXPECT_FALSE(Replay(Sample(), server, nullptr).ok());
    EXPECT_EQ(server.finished, server.sent.size());
  }
}

TEST(Replay, CallsThatCannotBeReplayedAreNamedBeforeAnythingIsSent) {
  Log log = Sample();
  EXPECT_TRUE(NotReplayable(log).empty());
  for (uint64_t i = 1; i < 3; ++i) {
    log.Create({Kind::kGraph, 0x1000 + (i << 4)}, {}, Frame(kCall_cuStreamEndCapture), "", "", std::nullopt);
  }
  EXPECT_EQ(NotReplayable(log), std::vector<std::string>{"cuStreamEndCapture"});
  FakeServer server;
  const std::string error = Replay(log, server, nullptr).message();
  EXPECT_NE(error.find("cuStreamEndCapture"), std::string::npos) << error;
  EXPECT_TRUE(server.sent.empty());
}

TEST(Replay, AnEmptyLogIsDoneAtOnce) {
  FakeServer server;
  EXPECT_EQ(Replay(Log(), server, nullptr).message(), "");
}

// A key as it stands in a request of the log.
template <typename Request>
std::string WithKey(const std::string& key) {
  Request request;
  request.key = key;
  std::string message;
  request.Encode(&message);
  return message;
}

void Opens(Log* log, uint64_t handle, const std::string& key) {
  log->Create({Kind::kPhysicalMemory, handle}, {}, Frame(kCall_cuMemImportFromShareableHandle),
              WithKey<wire::cuMemImportFromShareableHandle_Request>(key), "", std::nullopt);
}

void Shares(Log* log, uint64_t handle, const std::string& key) {
  log->Create({Kind::kPhysicalMemory, handle}, {}, Frame(kCall_cuMemCreate), "", "", std::nullopt);
  log->Modify({Kind::kPhysicalMemory, handle}, 0, Frame(kCall_cuMemExportToShareableHandle),
              WithKey<wire::cuMemExportToShareableHandle_Request>(key));
}

TEST(Sharing, ALogSharesOrNot) {
  Log first, second;
  Shares(&first, 0x10, "of the first");
  Opens(&second, 0x10, "of the first");
  EXPECT_TRUE(replay::Shares(first));
  EXPECT_TRUE(replay::Shares(second));
  EXPECT_FALSE(replay::Shares(Sample()));
  EXPECT_FALSE(replay::Shares(Log()));
}

TEST(Sharing, GroupsAreOfThoseThatShareWithEachOther) {
  Log alone, first, second, third, fourth, fifth;
  Shares(&alone, 0x10, "nobody's");
  Shares(&first, 0x10, "one");
  Shares(&second, 0x10, "two");
  Opens(&third, 0x10, "two");
  Opens(&third, 0x20, "another's");
  Opens(&fourth, 0x10, "another's");
  Opens(&fifth, 0x10, "one");
  EXPECT_EQ(SharingGroups({&alone, &first, &second, &third, &fourth, &fifth}), (std::vector<size_t>{0, 1, 2, 2, 2, 1}));
  // One that has to do with both of them makes them one.
  Opens(&fifth, 0x20, "two");
  EXPECT_EQ(SharingGroups({&alone, &first, &second, &third, &fourth, &fifth}), (std::vector<size_t>{0, 1, 1, 1, 1, 1}));
  EXPECT_EQ(SharingGroups({}), std::vector<size_t>{});
}

// Each way of sharing has messages of its own.
TEST(Sharing, GroupsAreMadeByEveryWayOfSharing) {
  const auto has = [](Log* log, uint32_t call, const std::string& message) {
    log->Create({Kind::kPhysicalMemory, 0x10}, {}, Frame(call), message, "", std::nullopt);
  };
  const auto check = [&](uint32_t shares, const std::string& one, uint32_t opens, const std::string& other) {
    Log first, second;
    has(&first, shares, one);
    has(&second, opens, other);
    EXPECT_EQ(SharingGroups({&first, &second}), (std::vector<size_t>{0, 0})) << shares;
  };
  check(kCall_cuIpcGetMemHandle, WithKey<wire::cuIpcGetMemHandle_Request>("k"), kCall_cuIpcOpenMemHandle_v2,
        WithKey<wire::cuIpcOpenMemHandle_v2_Request>("k"));
  check(kCall_cuIpcGetEventHandle, WithKey<wire::cuIpcGetEventHandle_Request>("k"), kCall_cuIpcOpenEventHandle,
        WithKey<wire::cuIpcOpenEventHandle_Request>("k"));
  check(kCall_cuMemExportToShareableHandle, WithKey<wire::cuMemExportToShareableHandle_Request>("k"),
        kCall_cuMemImportFromShareableHandle, WithKey<wire::cuMemImportFromShareableHandle_Request>("k"));
  check(kCall_cuMemPoolExportToShareableHandle, WithKey<wire::cuMemPoolExportToShareableHandle_Request>("k"),
        kCall_cuMemPoolImportFromShareableHandle, WithKey<wire::cuMemPoolImportFromShareableHandle_Request>("k"));
  check(kCall_cuMemPoolExportPointer, WithKey<wire::cuMemPoolExportPointer_Request>("k"), kCall_cuMemPoolImportPointer,
        WithKey<wire::cuMemPoolImportPointer_Request>("k"));
}

TEST(Sharing, TheScopeIsSentFirst) {
  FakeServer server;
  ASSERT_EQ(ShareIn("sixteen bytes...", server).message(), "");
  ASSERT_EQ(server.sent.size(), 1u);
  EXPECT_EQ(server.sent[0].header.call, uint32_t(kOpShareIn));
  wire::OpShareIn_Request request;
  ASSERT_TRUE(request.Decode(server.sent[0].message));
  EXPECT_EQ(request.scope, "sixteen bytes...");
  server.results[2] = 401;
  const std::string error = ShareIn("sixteen bytes...", server).message();
  EXPECT_NE(error.find("cannot share"), std::string::npos) << error;
  server.gone_at = 2;
  EXPECT_EQ(ShareIn("sixteen bytes...", server).message(),
            "the new server was lost before the replay: the connection has ended");
}

TEST(Sharing, AFailureSaysWhatItWaitedFor) {
  Log log;
  Opens(&log, 0x10, "key");
  FakeServer server;
  server.results[1] = 909;
  server.answers[1] = "waited 1 s for the session\n";
  const std::string error = Replay(log, server, nullptr).message();
  EXPECT_NE(error.find("cuMemImportFromShareableHandle (object 0x10"), std::string::npos) << error;
  EXPECT_NE(error.find(": waited 1 s for the session?"), std::string::npos) << error;
}

}  // namespace
}  // namespace cuda_remote::replay
