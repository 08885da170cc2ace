// SPDX-License-Identifier: Apache-2.0
// Call against a fake server. Linked without the bodies of calls and without entry points: the session needs neither.
#include "client/core/call.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "client/core/call_info.gen.h"
#include "client/core/session.h"
#include "client/core/testing/fake_server.h"
#include "proto/api/call_ids.gen.h"
#include "proto/codec/codec.h"
#include "proto/codec/decode_as.h"

namespace cuda_remote::client {
namespace {

// The process has one session, so all tests share it.
class CallTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    for (const char* name : {"CUDA_REMOTE_JOB_DIR", "CUDA_REMOTE_SYNC", "CUDA_REMOTE_GPU", "CUDA_VISIBLE_DEVICES"})
      unsetenv(name);
    server_ = new FakeServer;
    setenv("CUDA_REMOTE_SERVER", server_->address().c_str(), 1);
    wire::OpSessionInfo_Reply info;
    info.driver_version = 13000;
    info.devices.resize(2);
    server_->On(kOpSessionInfo, {CUDA_SUCCESS, Encoded(info)});
    {
      Call call(info::k_cuStreamCreate);
      without_session_ = call.Enter();
    }
    ASSERT_EQ(Session::Connect(&session_), CUDA_SUCCESS);
    {
      Call call(info::k_cuStreamCreate);
      before_init_ = call.Enter();
    }
    session_->set_initialized();
  }
  static void TearDownTestSuite() { delete server_; }

  // Every test has a context of its own, which is the thread's current one.
  void SetUp() override {
    context_ = NewContext(0);
    stack() = {context_};
    Sent();
  }
  void TearDown() override { stack().clear(); }

  static std::vector<uint64_t>& stack() { return ThreadState::Get()->context_stack; }

  static uint64_t NewContext(int device) {
    WriterLock lock(&session_->objects().mutex());
    const uint64_t context = session_->objects().handles().New(Kind::kContext, 0);
    session_->objects().handles().Find(Kind::kContext, context)->device = device;
    return context;
  }
  static void Drop(uint64_t handle) {
    WriterLock lock(&session_->objects().mutex());
    session_->objects().DropLocked({KindOf(handle), handle});
  }
  // A live object of the current context, without a record.
  static uint64_t NewObject(Kind kind) {
    Call call(info::k_cuStreamCreate);
    EXPECT_EQ(call.Enter(), CUDA_SUCCESS);
    const uint64_t handle = call.NewHandle(kind, 0);
    call.Keep(handle);
    return handle;
  }
  static bool InLog(Kind kind, uint64_t handle) {
    ReaderLock lock(&session_->objects().mutex());
    return session_->objects().log().Find({kind, handle}) != nullptr;
  }

  // Which requests the server got since the last time. Waits for an answer, so that all before it are among them.
  static std::vector<FakeServer::Request> SentRequests() {
    EXPECT_EQ(session_->requests().WaitForWork(), CUDA_SUCCESS);
    std::vector<FakeServer::Request> requests = server_->Take();
    requests.erase(std::remove_if(requests.begin(), requests.end(),
                                  [](const auto& one) { return one.header.call == kOpManagedUnmap; }),
                   requests.end());
    return requests;
  }
  static Calls Sent() {
    Calls calls;
    for (const FakeServer::Request& one : SentRequests()) calls.push_back(one.header.call);
    return calls;
  }

  static FakeServer* server_;
  static Session* session_;
  static CUresult without_session_, before_init_;
  uint64_t context_ = 0;
};

FakeServer* CallTest::server_ = nullptr;
Session* CallTest::session_ = nullptr;
CUresult CallTest::without_session_, CallTest::before_init_;

TEST_F(CallTest, NothingWorksBeforeCuInit) {
  EXPECT_EQ(without_session_, CUDA_ERROR_NOT_INITIALIZED);
  EXPECT_EQ(before_init_, CUDA_ERROR_NOT_INITIALIZED);
  Call call(info::k_cuStreamCreate);
  EXPECT_EQ(call.Enter(), CUDA_SUCCESS);
}

TEST_F(CallTest, TheContextIsTheThreadsCurrentOne) {
  {
    Call call(info::k_cuCtxSynchronize);
    ASSERT_EQ(call.Enter(), CUDA_SUCCESS);
    EXPECT_EQ(call.header().context_or_result, SlotOf(context_));
  }
  Drop(context_);
  {
    Call call(info::k_cuCtxSynchronize);
    EXPECT_EQ(call.Enter(), CUDA_ERROR_CONTEXT_IS_DESTROYED);
  }
  {
    Call call(info::k_cuMemCreate);  // needs none
    ASSERT_EQ(call.Enter(), CUDA_SUCCESS);
    EXPECT_EQ(call.header().context_or_result, 0u);
  }
  stack().clear();
  Call call(info::k_cuCtxSynchronize);
  EXPECT_EQ(call.Enter(), CUDA_ERROR_INVALID_CONTEXT);
}

TEST_F(CallTest, WithoutAContextACallIsMadeInThatOfItsFirstObject) {
  const uint64_t event = NewObject(Kind::kEvent);
  const uint64_t other = NewContext(1);
  stack() = {other};
  const uint64_t others = NewObject(Kind::kEvent);
  stack().clear();
  {
    Call call(info::k_cuStreamQuery);
    ASSERT_EQ(call.Enter(), CUDA_SUCCESS);
    EXPECT_TRUE(call.WithoutContext());
    EXPECT_EQ(call.Send(), CUDA_ERROR_INVALID_CONTEXT);
    EXPECT_EQ(call.Transact(), CUDA_ERROR_INVALID_CONTEXT);
    EXPECT_TRUE(call.Valid(Kind::kEvent, event));
    EXPECT_TRUE(call.Valid(Kind::kEvent, others)) << "the first one counts";
    EXPECT_FALSE(call.WithoutContext());
    EXPECT_EQ(call.thread().current_context(), context_);
    EXPECT_EQ(call.Transact(), CUDA_SUCCESS);
    // A call inside of it is made there, too.
    Call inner(info::k_cuCtxSynchronize);
    EXPECT_EQ(inner.Enter(), CUDA_SUCCESS);
    EXPECT_EQ(inner.header().context_or_result, SlotOf(context_));
  }
  EXPECT_EQ(ThreadState::Get()->current_context(), 0u);
  const auto requests = SentRequests();
  ASSERT_EQ(requests.size(), 1u);
  EXPECT_EQ(requests[0].header.context_or_result, SlotOf(context_));
}

TEST_F(CallTest, HandlesThatAreNoneOrGone) {
  const uint64_t stream = NewObject(Kind::kStream);
  Call call(info::k_cuStreamSynchronize);
  ASSERT_EQ(call.Enter(), CUDA_SUCCESS);
  EXPECT_TRUE(call.Valid(Kind::kStream, stream));
  EXPECT_FALSE(call.Valid(Kind::kEvent, stream)) << "of another kind";
  EXPECT_FALSE(call.Valid(Kind::kStream, uint64_t(0)));
  EXPECT_FALSE(call.Valid(Kind::kStream, ~uint64_t(0)));
  EXPECT_FALSE(call.Valid(Kind::kStream, &call)) << "a pointer";
  Drop(stream);
  EXPECT_FALSE(call.Valid(Kind::kStream, stream));
  const uint64_t next = call.NewHandle(Kind::kStream, 0);
  EXPECT_NE(next, stream) << "the place may be the same, the handle is not";
  EXPECT_FALSE(call.Valid(Kind::kStream, stream));
  uint64_t wire = 0;
  EXPECT_EQ(call.StreamToWire(reinterpret_cast<CUstream>(stream), false, &wire), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(call.StreamToWire(reinterpret_cast<CUstream>(next), false, &wire), CUDA_SUCCESS);
  EXPECT_EQ(wire, next);
}

TEST_F(CallTest, NewHandlesAreGivenBackUnlessSomethingWasCreated) {
  std::vector<uint64_t> handles;
  {
    Call call(info::k_cuEventCreate);
    ASSERT_EQ(call.Enter(), CUDA_SUCCESS);
    for (int i = 0; i < 8; ++i) handles.push_back(call.NewHandle(Kind::kEvent, 0));
    EXPECT_EQ(std::count(handles.begin(), handles.end(), 0u), 0);
    EXPECT_EQ(call.NewHandle(Kind::kEvent, 0), 0u) << "no call needs more";
    ASSERT_EQ(call.Transact(), CUDA_SUCCESS);
    call.Created({Kind::kEvent, handles[3]});
    call.Keep(handles[5]);
  }
  for (size_t i = 0; i < handles.size(); ++i) {
    EXPECT_EQ(session_->objects().Usable(Kind::kEvent, handles[i]), i == 3 || i == 5) << i;
    EXPECT_EQ(InLog(Kind::kEvent, handles[i]), i == 3) << i;
  }
  Drop(context_);
  EXPECT_FALSE(session_->objects().Usable(Kind::kEvent, handles[3])) << "it dies with its context";
  EXPECT_FALSE(InLog(Kind::kEvent, handles[3]));
}

TEST_F(CallTest, CallsInsideOfCalls) {
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < ThreadState::kMaxDepth; ++i) {
    calls.push_back(std::make_unique<Call>(info::k_cuStreamCreate));
    ASSERT_EQ(calls.back()->Enter(), CUDA_SUCCESS) << i;
    calls.back()->message() = std::string(size_t(i) + 1, char('a' + i));
  }
  {
    Call one_more(info::k_cuStreamCreate);
    EXPECT_EQ(one_more.Enter(), CUDA_ERROR_OUT_OF_MEMORY);
  }
  EXPECT_EQ(calls[1]->message(), "bb") << "each has a message of its own";
  calls.pop_back();
  Call again(info::k_cuStreamCreate);
  EXPECT_EQ(again.Enter(), CUDA_SUCCESS);
  EXPECT_EQ(again.message(), "") << "empty, though its storage has been used";
  EXPECT_GT(session_->gate().inside(), 0u);
  while (!calls.empty()) calls.pop_back();
}

TEST_F(CallTest, ARequestThatIsTooLongFailsAlone) {
  const auto fails = [](size_t message, size_t payload, bool waits) {
    Call call(info::k_cuCtxResetPersistingL2Cache);
    EXPECT_EQ(call.Enter(), CUDA_SUCCESS);
    call.message().assign(message, 'm');
    call.SetPayload({"", payload});  // nobody looks at it
    return waits ? call.Transact() : call.Send();
  };
  for (const bool waits : {false, true}) {
    EXPECT_EQ(fails(kMaxMessageBytes + 1, 0, waits), CUDA_ERROR_NOT_SUPPORTED);
    EXPECT_EQ(fails(0, kMaxTotalPayloadBytes + 1, waits), CUDA_ERROR_NOT_SUPPORTED);
  }
  EXPECT_EQ(session_->lost(), CUDA_SUCCESS) << "the session goes on";
  EXPECT_EQ(Sent(), Calls());
  EXPECT_EQ(fails(kMaxMessageBytes, 0, true), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls{kCall_cuCtxResetPersistingL2Cache});
}

TEST_F(CallTest, PayloadsOfAnyLength) {
  std::string payload(3 * kMaxPayloadBytes + 5, '\0');
  for (size_t i = 0; i < payload.size(); ++i) payload[i] = char(i * 7 + (i >> 12));
  server_->On(kCall_cuModuleLoadData, [](const FakeServer::Request& request) {
    return FakeServer::Answer{0, "reply", 0, request.payload.substr(0, request.payload.size() - 10)};
  });
  std::string answer(payload.size() + 100, '?');
  {
    Call call(info::k_cuModuleLoadData);
    ASSERT_EQ(call.Enter(), CUDA_SUCCESS);
    call.message() = "request";
    call.SetPayload(payload);
    call.SetReplyPayload(&answer[0], answer.size());
    ASSERT_EQ(call.Transact(), CUDA_SUCCESS);
    EXPECT_EQ(call.reply(), "reply");
    EXPECT_EQ(call.reply_payload_bytes(), payload.size() - 10);
  }
  EXPECT_TRUE(std::equal(payload.begin(), payload.end() - 10, answer.begin()));
  EXPECT_EQ(answer.find_first_not_of('?', payload.size() - 10), std::string::npos) << "the rest is as it was";
  const auto requests = SentRequests();
  ASSERT_EQ(requests.size(), 1u);
  EXPECT_EQ(requests[0].message, "request");
  EXPECT_TRUE(requests[0].payload == payload);
  server_->On(kCall_cuModuleLoadData, FakeServer::Answer());
}

TEST_F(CallTest, PiecesOnTheirWayAtOnce) {
  server_->On(kCall_cuMemcpyDtoHAsync_v2, [](const FakeServer::Request& request) {
    const bool bad = request.message == "1";
    return FakeServer::Answer{uint32_t(bad ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS), "", 0,
                              bad ? "" : "piece " + request.message};
  });
  char pieces[3][8] = {};
  Call call(info::k_cuMemcpyDtoHAsync_v2);
  ASSERT_EQ(call.Enter(), CUDA_SUCCESS);
  uint64_t sequences[3];
  for (int i = 0; i < 3; ++i) {
    call.message() = std::to_string(i);
    sequences[i] = call.Begin(pieces[i], sizeof(pieces[i]));
    ASSERT_NE(sequences[i], 0u);
  }
  // In another order than they were sent.
  EXPECT_EQ(call.Finish(sequences[2]), CUDA_SUCCESS);
  EXPECT_EQ(call.reply_payload_bytes(), 7u);
  EXPECT_EQ(call.Finish(sequences[1]), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(call.reply_payload_bytes(), 0u);
  EXPECT_EQ(call.Finish(sequences[0]), CUDA_SUCCESS);
  EXPECT_STREQ(pieces[0], "piece 0");
  EXPECT_STREQ(pieces[1], "");
  EXPECT_STREQ(pieces[2], "piece 2");
  server_->On(kCall_cuMemcpyDtoHAsync_v2, FakeServer::Answer());
}

TEST_F(CallTest, ErrorsOfCallsThatNobodyWaitedFor) {
  const auto send = [](const CallInfo& info) {
    Call call(info);
    EXPECT_EQ(call.Enter(), CUDA_SUCCESS);
    return call.Send();
  };
  const auto transact = [](const CallInfo& info) {
    Call call(info);
    EXPECT_EQ(call.Enter(), CUDA_SUCCESS);
    return call.Transact();
  };
  server_->On(kCall_cuMemsetD8Async, {CUDA_ERROR_ILLEGAL_ADDRESS});
  server_->On(kCall_cuMemsetD32Async, {CUDA_ERROR_MISALIGNED_ADDRESS});
  EXPECT_EQ(send(info::k_cuMemsetD8Async), CUDA_SUCCESS);
  EXPECT_EQ(transact(info::k_cuEventCreate), CUDA_SUCCESS) << "it does not fail for another's sake";
  EXPECT_EQ(send(info::k_cuMemsetD32Async), CUDA_SUCCESS);
  EXPECT_EQ(transact(info::k_cuEventCreate), CUDA_SUCCESS);
  // A call that synchronises and fails itself says so, and leaves the other error for the next one.
  server_->On(kCall_cuStreamSynchronize, {CUDA_ERROR_INVALID_HANDLE});
  EXPECT_EQ(transact(info::k_cuStreamSynchronize), CUDA_ERROR_INVALID_HANDLE);
  server_->On(kCall_cuStreamSynchronize, FakeServer::Answer());
  EXPECT_EQ(transact(info::k_cuStreamSynchronize), CUDA_ERROR_ILLEGAL_ADDRESS) << "the first one counts";
  EXPECT_EQ(transact(info::k_cuStreamSynchronize), CUDA_SUCCESS) << "and is reported once";
  // The answer of the synchronising call itself may be the first to tell.
  EXPECT_EQ(send(info::k_cuMemsetD32Async), CUDA_SUCCESS);
  EXPECT_EQ(transact(info::k_cuCtxSynchronize), CUDA_ERROR_MISALIGNED_ADDRESS);
  server_->On(kCall_cuMemsetD8Async, FakeServer::Answer());
  server_->On(kCall_cuMemsetD32Async, FakeServer::Answer());
}

TEST_F(CallTest, AnswersAreKeptUntilSomethingFails) {
  const auto ask = [](const std::string& message) {
    Call call(info::k_cuCtxGetLimit);
    EXPECT_EQ(call.Enter(), CUDA_SUCCESS);
    call.message() = message;
    const CUresult result = call.Recall();
    return std::make_pair(result, std::string(call.reply()));
  };
  int asked = 0;
  server_->On(kCall_cuCtxGetLimit, [&asked](const FakeServer::Request& request) {
    ++asked;
    const bool refused = request.message == "refused";
    return FakeServer::Answer{uint32_t(refused ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS), "of " + request.message};
  });
  EXPECT_EQ(ask("a"), std::make_pair(CUDA_SUCCESS, std::string("of a")));
  EXPECT_EQ(ask("a"), std::make_pair(CUDA_SUCCESS, std::string("of a")));
  EXPECT_EQ(ask("b").second, "of b");
  EXPECT_EQ(asked, 2);
  // In another context it is another question.
  stack() = {NewContext(1)};
  EXPECT_EQ(ask("a").second, "of a");
  EXPECT_EQ(asked, 3);
  // A refusal is not kept, and what is known may not be true any more.
  EXPECT_EQ(ask("refused").first, CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(ask("refused").first, CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(asked, 5);
  EXPECT_EQ(ask("a").second, "of a");
  EXPECT_EQ(asked, 6);
  server_->On(kCall_cuCtxGetLimit, FakeServer::Answer());
}

TEST_F(CallTest, WhatIsKeptForLaterIsGivenBackWhereMemoryIsMissing) {
  FreedMemory::Block block;
  block.address = 0x310000000000;
  block.bytes = 4096;
  block.context = context_;
  {
    WriterLock lock(&session_->memory().mutex());
    std::vector<FreedMemory::Block> out;
    session_->memory().freed().Keep(block, &out);
  }
  int refused = 1;
  server_->On(kCall_cuMemCreate, [&refused](const FakeServer::Request& request) {
    return FakeServer::Answer{uint32_t(refused-- > 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS), request.message};
  });
  const auto create = [](std::string* reply) {
    Call call(info::k_cuMemCreate);
    EXPECT_EQ(call.Enter(), CUDA_SUCCESS);
    call.message() = "this much";
    const CUresult result = call.Transact();
    *reply = call.reply();
    return result;
  };
  std::string reply;
  EXPECT_EQ(create(&reply), CUDA_SUCCESS);
  EXPECT_EQ(reply, "this much") << "the same request again";
  EXPECT_EQ(Sent(), (Calls{kCall_cuMemCreate, kOpMemFree, kCall_cuMemCreate}));
  refused = 2;
  EXPECT_EQ(create(&reply), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(Sent(), Calls{kCall_cuMemCreate}) << "with nothing to give back it is not asked again";
  server_->On(kCall_cuMemCreate, FakeServer::Answer());
}

TEST_F(CallTest, WhatACaptureConsistsOf) {
  const uint64_t stream = NewObject(Kind::kStream), other = NewObject(Kind::kStream);
  const uint64_t event = NewObject(Kind::kEvent);
  const auto send = [](const CallInfo& info, uint64_t on, const std::string& message, std::string_view payload = {}) {
    Call call(info);
    EXPECT_EQ(call.Enter(), CUDA_SUCCESS);
    uint64_t wire;
    EXPECT_EQ(call.StreamToWire(reinterpret_cast<CUstream>(on), false, &wire), CUDA_SUCCESS);
    call.message() = message;
    call.SetPayload(payload);
    EXPECT_EQ(call.Transact(), CUDA_SUCCESS);
  };
  Captures& captures = session_->graphs().captures();
  server_->On(kCall_cuStreamBeginCapture_v2, {CUDA_ERROR_ILLEGAL_STATE});
  {
    Call refused(info::k_cuStreamBeginCapture_v2);
    ASSERT_EQ(refused.Enter(), CUDA_SUCCESS);
    uint64_t wire;
    ASSERT_EQ(refused.StreamToWire(reinterpret_cast<CUstream>(stream), false, &wire), CUDA_SUCCESS);
    EXPECT_EQ(refused.Transact(), CUDA_ERROR_ILLEGAL_STATE);
  }
  EXPECT_FALSE(captures.active()) << "a capture that was refused has not begun";
  server_->On(kCall_cuStreamBeginCapture_v2, FakeServer::Answer());
  send(info::k_cuStreamBeginCapture_v2, stream, "");
  EXPECT_TRUE(captures.IsCaptured(stream));
  EXPECT_FALSE(captures.IsCaptured(other));
  // Another stream joins by an event.
  wire::cuEventRecord_Request record;
  record.hEvent = event;
  send(info::k_cuEventRecord, stream, Encoded(record));
  wire::cuStreamWaitEvent_Request wait;
  wait.hEvent = event;
  send(info::k_cuStreamWaitEvent, other, Encoded(wait));
  EXPECT_TRUE(captures.IsCaptured(other));
  EXPECT_EQ(captures.OriginOf(other), stream);
  send(info::k_cuStreamIsCapturing, other, "");  // left out
  EXPECT_EQ(captures.End(other), nullptr) << "it did not begin there";
  std::unique_ptr<CaptureRecord> ended = captures.End(stream);
  ASSERT_NE(ended, nullptr);
  EXPECT_EQ(ended->streams, (std::vector<uint64_t>{stream, other}));
  EXPECT_EQ(ended->events, std::vector<uint64_t>{event});
  EXPECT_EQ(ended->obstacle, "");
  EXPECT_TRUE(ended->own_graph);
  EXPECT_FALSE(captures.active());
  // A wait for the event is refused at once now, until the event is recorded anew.
  const auto send_on = [&](const CallInfo& info, const std::string& message) {
    Call call(info);
    EXPECT_EQ(call.Enter(), CUDA_SUCCESS);
    uint64_t wire;
    EXPECT_EQ(call.StreamToWire(reinterpret_cast<CUstream>(other), false, &wire), CUDA_SUCCESS);
    call.message() = message;
    return call.Send();
  };
  for (const uint32_t one : {uint32_t(kCall_cuStreamWaitEvent), uint32_t(kCall_cuEventRecord)})
    server_->On(one, CUDA_ERROR_INVALID_VALUE);
  wire::cuStreamWaitEvent_Request of_other;
  of_other.hEvent = NewObject(Kind::kEvent);
  EXPECT_EQ(send_on(info::k_cuStreamWaitEvent, Encoded(of_other)), CUDA_SUCCESS);
  EXPECT_EQ(send_on(info::k_cuStreamWaitEvent, Encoded(wait)), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(send_on(info::k_cuStreamWaitEvent, Encoded(wait)), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(send_on(info::k_cuEventRecord, Encoded(record)), CUDA_SUCCESS);
  EXPECT_EQ(send_on(info::k_cuStreamWaitEvent, Encoded(wait)), CUDA_SUCCESS);
  EXPECT_FALSE(captures.concern_events());
  for (const uint32_t one : {uint32_t(kCall_cuStreamWaitEvent), uint32_t(kCall_cuEventRecord)})
    server_->On(one, FakeServer::Answer());
  // What cannot be sent again is named; a payload is gone.
  send(info::k_cuStreamBeginCapture_v2, stream, "");
  send(info::k_cuMemcpyAsync, stream, "", "bytes");
  send(info::k_cuGraphUpload, stream, "");
  ended = captures.End(stream);
  ASSERT_NE(ended, nullptr);
  EXPECT_EQ(ended->obstacle, "cuMemcpyAsync") << "the first one";
}

// The last one: nothing works after it.
TEST_F(CallTest, WithoutItsServerEveryCallFails) {
  Call begun(info::k_cuCtxSynchronize);
  ASSERT_EQ(begun.Enter(), CUDA_SUCCESS);
  server_->End("the test is over");
  EXPECT_EQ(begun.Transact(), CUDA_ERROR_DEVICE_UNAVAILABLE);
  EXPECT_EQ(session_->lost(), CUDA_ERROR_DEVICE_UNAVAILABLE);
  EXPECT_EQ(begun.Send(), CUDA_ERROR_DEVICE_UNAVAILABLE);
  EXPECT_EQ(begun.Begin(nullptr, 0), 0u);
  Call later(info::k_cuMemCreate);
  EXPECT_EQ(later.Enter(), CUDA_ERROR_DEVICE_UNAVAILABLE);
}

}  // namespace
}  // namespace cuda_remote::client
