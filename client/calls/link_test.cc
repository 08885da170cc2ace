// SPDX-License-Identifier: Apache-2.0
// The JIT linker: what is sent, where logs and results go, which inputs the log keeps, and the image after linking.
#include <cuda.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "client/calls/testing/custom_fixture.h"
#include "proto/base/clock.h"

namespace cuda_remote::client {
namespace {

void* Number(uint64_t value) { return reinterpret_cast<void*>(value); }

class LinkTest : public CustomTest {
 protected:
  void SetUp() override {
    CustomTest::SetUp();
    for (const uint32_t call : {kCall_cuLinkCreate_v2, kCall_cuLinkAddData_v2, kCall_cuLinkDestroy})
      server_->On(call, FakeServer::Answer());
    AnswerImage("the linked image");
  }

  // What every state is linked to.
  static void AnswerImage(const std::string& image) {
    server_->On(kCall_cuLinkComplete, [image](const FakeServer::Request& request) {
      wire::cuLinkComplete_Request in;
      EXPECT_TRUE(in.Decode(request.message));
      wire::cuLinkComplete_Reply reply;
      reply.bytes = image.size();
      return FakeServer::Answer(CUDA_SUCCESS, Encoded(reply), 0, in.fetch ? image : "");
    });
  }

  static CUlinkState NewState() {
    CUlinkState state = nullptr;
    EXPECT_EQ(cuLinkCreate(0, nullptr, nullptr, &state), CUDA_SUCCESS);
    return state;
  }
  static CUresult Add(CUlinkState state, std::string text) {
    return cuLinkAddData(state, CU_JIT_INPUT_PTX, &text[0], text.size(), "name", 0, nullptr, nullptr);
  }
  // How many inputs of the state the log has.
  static size_t Inputs(CUlinkState state) {
    Session* const session = Session::Get();
    ReaderLock lock(&session->objects().mutex());
    size_t inputs = 0;
    for (const replay::Record* record : session->objects().log().InOrder()) {
      inputs += record->header.call == kCall_cuLinkAddData_v2 && DependsOn(*record, Kind::kLinkState, HandleOf(state));
    }
    return inputs;
  }
};

TEST_F(LinkTest, AStateLivesFromItsCreationToItsEnd) {
  char log[16] = {};
  CUjit_option options[] = {CU_JIT_OPTIMIZATION_LEVEL, CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  void* values[] = {Number(3), log, Number(sizeof(log))};
  CUlinkState state = nullptr;
  ASSERT_EQ(cuLinkCreate(3, options, values, &state), CUDA_SUCCESS);
  const auto request = SentOne<wire::cuLinkCreate_v2_Request>();
  EXPECT_EQ(sent_[0].header.context_or_result, SlotOf(reinterpret_cast<uint64_t>(context_)));
  EXPECT_EQ(request.state, HandleOf(state));
  EXPECT_EQ(KindOf(request.state), Kind::kLinkState);
  EXPECT_EQ(request.options, (std::vector<uint32_t>(options, options + 3)));
  EXPECT_EQ(request.option_values, (std::vector<uint64_t>{3, 0, sizeof(log)})) << "a buffer's address says nothing";
  EXPECT_TRUE(InLog(Kind::kLinkState, HandleOf(state)));

  server_->On(kCall_cuLinkDestroy, {CUDA_ERROR_ILLEGAL_ADDRESS});
  EXPECT_EQ(cuLinkDestroy(state), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_TRUE(InLog(Kind::kLinkState, HandleOf(state))) << "the server still has it";
  EXPECT_EQ(Add(state, "text"), CUDA_SUCCESS);
  server_->On(kCall_cuLinkDestroy, FakeServer::Answer());
  Sent();
  EXPECT_EQ(cuLinkDestroy(state), CUDA_SUCCESS);
  EXPECT_EQ(SentOne<wire::cuLinkDestroy_Request>().state, HandleOf(state));
  EXPECT_FALSE(InLog(Kind::kLinkState, HandleOf(state)));
  EXPECT_EQ(Inputs(state), 0u);
  void* image = nullptr;
  EXPECT_EQ(cuLinkDestroy(state), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(Add(state, "text"), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(cuLinkComplete(state, &image, nullptr), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(Sent(), Calls()) << "the client knows that there is no such state";
}

TEST_F(LinkTest, InputsAreSentAndRecorded) {
  const CUlinkState state = NewState();
  Sent();
  std::string text = std::string("text with a zero \0 in it", 24);
  CUjit_option option = CU_JIT_MAX_REGISTERS;
  void* value = Number(32);
  ASSERT_EQ(cuLinkAddData(state, CU_JIT_INPUT_CUBIN, &text[0], text.size(), "input", 1, &option, &value), CUDA_SUCCESS);
  auto request = SentOne<wire::cuLinkAddData_v2_Request>();
  EXPECT_EQ(request.state, HandleOf(state));
  EXPECT_EQ(request.type, int(CU_JIT_INPUT_CUBIN));
  EXPECT_TRUE(request.has_name);
  EXPECT_EQ(request.name, "input");
  EXPECT_EQ(request.options, std::vector<uint32_t>{CU_JIT_MAX_REGISTERS});
  EXPECT_EQ(request.option_values, std::vector<uint64_t>{32});
  EXPECT_EQ(sent_[0].payload, text);
  ASSERT_EQ(cuLinkAddData(state, CU_JIT_INPUT_PTX, &text[0], 4, nullptr, 0, nullptr, nullptr), CUDA_SUCCESS);
  request = SentOne<wire::cuLinkAddData_v2_Request>();
  EXPECT_FALSE(request.has_name);
  EXPECT_EQ(sent_[0].payload, "text");
  EXPECT_EQ(Inputs(state), 2u);
  {
    Session* const session = Session::Get();
    ReaderLock lock(&session->objects().mutex());
    std::vector<std::string> images;
    for (const replay::Record* record : session->objects().log().InOrder()) {
      if (record->header.call != kCall_cuLinkAddData_v2) continue;
      ASSERT_TRUE(record->image);
      images.push_back(*session->objects().log().FindImage(*record->image));
    }
    EXPECT_EQ(images, (std::vector<std::string>{text, "text"})) << "in the order in which they were added";
  }
  // What is refused is not recorded, and the state is as it was.
  server_->On(kCall_cuLinkAddData_v2, {CUDA_ERROR_INVALID_PTX});
  EXPECT_EQ(Add(state, "no PTX"), CUDA_ERROR_INVALID_PTX);
  EXPECT_EQ(Inputs(state), 2u);
  server_->On(kCall_cuLinkAddData_v2, FakeServer::Answer());
  EXPECT_EQ(Add(state, "PTX"), CUDA_SUCCESS);
  EXPECT_EQ(Inputs(state), 3u);
  EXPECT_EQ(cuLinkDestroy(state), CUDA_SUCCESS);
}

TEST_F(LinkTest, LogsAndResultsGoToTheirOwnOptions) {
  char state_log[8], input_log[8];
  memset(state_log, '?', sizeof(state_log));
  memset(input_log, '?', sizeof(input_log));
  CUjit_option state_options[] = {CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES};
  void* state_values[] = {state_log, Number(sizeof(state_log))};
  CUjit_option input_options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, CU_JIT_WALL_TIME,
                                  CU_JIT_OPTIMIZATION_LEVEL};
  void* input_values[] = {input_log, Number(4), nullptr, Number(2)};
  CUlinkState state = nullptr;
  ASSERT_EQ(cuLinkCreate(2, state_options, state_values, &state), CUDA_SUCCESS);
  wire::cuLinkAddData_v2_Reply reply;
  reply.error_log = "too long";
  reply.option_values = {0, 4, 99, 7};
  reply.state_info_log = "one";
  reply.state_option_values = {0, 3};
  // Also of an input that is refused: the log says why.
  server_->On(kCall_cuLinkAddData_v2, {CUDA_ERROR_INVALID_PTX, Encoded(reply)});
  char data[] = "data";
  EXPECT_EQ(cuLinkAddData(state, CU_JIT_INPUT_PTX, data, 4, nullptr, 4, input_options, input_values),
            CUDA_ERROR_INVALID_PTX);
  EXPECT_EQ(std::string_view(input_log, 8), "too ????") << "no more than there is room for";
  EXPECT_EQ(input_values[0], input_log);
  EXPECT_EQ(input_values[1], Number(4));
  EXPECT_EQ(input_values[2], Number(99));
  EXPECT_EQ(input_values[3], Number(2)) << "no result of the driver's";
  EXPECT_EQ(std::string_view(state_log, 8), std::string_view("one\0????", 8));
  EXPECT_EQ(state_values[0], state_log);
  EXPECT_EQ(state_values[1], Number(3));

  // The state's buffer is as long as it was said to be at first, whatever was written to the options since.
  wire::cuLinkComplete_Reply failed;
  failed.info_log = "one, two, three";
  failed.option_values = {0, 8};
  server_->On(kCall_cuLinkComplete, {CUDA_ERROR_NO_BINARY_FOR_GPU, Encoded(failed)});
  void* image = nullptr;
  EXPECT_EQ(cuLinkComplete(state, &image, nullptr), CUDA_ERROR_NO_BINARY_FOR_GPU);
  EXPECT_EQ(std::string_view(state_log, 8), "one, two");
  EXPECT_EQ(state_values[1], Number(8));
  EXPECT_EQ(image, nullptr);
  EXPECT_EQ(cuLinkDestroy(state), CUDA_SUCCESS);
}

TEST_F(LinkTest, FilesAreReadHere) {
  char path[] = "/tmp/link-test-XXXXXX";
  const int fd = mkstemp(path);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(write(fd, "contents", 8), 8);
  close(fd);
  const CUlinkState state = NewState();
  Sent();
  ASSERT_EQ(cuLinkAddFile(state, CU_JIT_INPUT_CUBIN, path, 0, nullptr, nullptr), CUDA_SUCCESS);
  auto request = SentOne<wire::cuLinkAddData_v2_Request>();
  EXPECT_EQ(request.state, HandleOf(state));
  EXPECT_EQ(request.type, int(CU_JIT_INPUT_CUBIN));
  EXPECT_EQ(request.name, path);
  EXPECT_EQ(sent_[0].payload, "contents");
  ASSERT_EQ(cuLinkAddFile(state, CU_JIT_INPUT_PTX, path, 0, nullptr, nullptr), CUDA_SUCCESS);
  request = SentOne<wire::cuLinkAddData_v2_Request>();
  EXPECT_EQ(request.type, int(CU_JIT_INPUT_PTX));
  EXPECT_EQ(sent_[0].payload, std::string("contents", 9)) << "text ends with a zero";
  EXPECT_EQ(Inputs(state), 2u);
  ASSERT_EQ(truncate(path, 0), 0);
  EXPECT_EQ(cuLinkAddFile(state, CU_JIT_INPUT_CUBIN, path, 0, nullptr, nullptr), CUDA_ERROR_INVALID_VALUE) << "empty";
  ASSERT_EQ(unlink(path), 0);
  EXPECT_EQ(cuLinkAddFile(state, CU_JIT_INPUT_PTX, path, 0, nullptr, nullptr), CUDA_ERROR_FILE_NOT_FOUND);
  EXPECT_EQ(cuLinkAddFile(state, CU_JIT_INPUT_PTX, "/tmp", 0, nullptr, nullptr), CUDA_ERROR_FILE_NOT_FOUND);
  EXPECT_EQ(cuLinkAddFile(state, CU_JIT_INPUT_PTX, nullptr, 0, nullptr, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Sent(), Calls());
  EXPECT_EQ(cuLinkDestroy(state), CUDA_SUCCESS);
}

TEST_F(LinkTest, TheImageIsFetchedOnce) {
  const CUlinkState state = NewState(), other = NewState();
  ASSERT_EQ(Add(state, "text"), CUDA_SUCCESS);
  ASSERT_EQ(Add(other, "text"), CUDA_SUCCESS);
  // What cannot be linked stays as it is.
  server_->On(kCall_cuLinkComplete, {CUDA_ERROR_NO_BINARY_FOR_GPU});
  void* image = nullptr;
  size_t bytes = 77;
  EXPECT_EQ(cuLinkComplete(state, &image, &bytes), CUDA_ERROR_NO_BINARY_FOR_GPU);
  EXPECT_EQ(image, nullptr);
  EXPECT_EQ(bytes, 77u);
  EXPECT_EQ(Inputs(state), 1u);
  EXPECT_EQ(Add(state, "more"), CUDA_SUCCESS);
  EXPECT_EQ(Inputs(state), 2u);
  AnswerImage("the linked image");
  Sent();

  ASSERT_EQ(cuLinkComplete(state, &image, &bytes), CUDA_SUCCESS);
  EXPECT_EQ(std::string_view(static_cast<char*>(image), bytes), "the linked image");
  EXPECT_EQ(Sent(), (Calls{kCall_cuLinkComplete, kCall_cuLinkComplete}));
  for (const size_t at : {0, 1}) {
    const auto request = SentAt<wire::cuLinkComplete_Request>(at);
    EXPECT_EQ(request.state, HandleOf(state));
    EXPECT_EQ(request.fetch, at == 1);
  }
  EXPECT_EQ(Inputs(state), 0u) << "a replay needs them no more";
  EXPECT_TRUE(InLog(Kind::kLinkState, HandleOf(state)));
  EXPECT_EQ(Inputs(other), 1u);

  void* again = nullptr;
  EXPECT_EQ(cuLinkComplete(state, &again, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(again, image) << "the pointer is good until the state is destroyed";
  EXPECT_EQ(std::string_view(static_cast<char*>(image), bytes), "the linked image");
  EXPECT_EQ(Add(state, "late"), CUDA_ERROR_INVALID_VALUE) << "it is linked";
  EXPECT_EQ(cuLinkComplete(state, nullptr, &bytes), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Sent(), Calls());
  EXPECT_EQ(cuLinkDestroy(state), CUDA_SUCCESS);
  EXPECT_EQ(cuLinkDestroy(other), CUDA_SUCCESS);
}

TEST_F(LinkTest, WhatTheServerRefusesLeavesNothing) {
  const size_t records = Records();
  server_->On(kCall_cuLinkCreate_v2, {CUDA_ERROR_OUT_OF_MEMORY});
  auto state = reinterpret_cast<CUlinkState>(77);
  EXPECT_EQ(cuLinkCreate(0, nullptr, nullptr, &state), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(state, reinterpret_cast<CUlinkState>(77));
  EXPECT_EQ(Records(), records);
  const auto request = SentOne<wire::cuLinkCreate_v2_Request>();
  EXPECT_EQ(Add(reinterpret_cast<CUlinkState>(request.state), "text"), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(Sent(), Calls());
}

// Each call is reported once, so this test comes before those that do not look.
TEST_F(LinkTest, AnUnsupportedOptionIsReportedUnderTheCallsName) {
  const CUlinkState state = NewState();
  CUjit_option names = CU_JIT_REFERENCED_KERNEL_NAMES;
  void* value = nullptr;
  char data[] = "data";
  CUmodule module = nullptr;
  CUlibrary library = nullptr;
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(cuLinkAddData(state, CU_JIT_INPUT_PTX, data, 4, nullptr, 1, &names, &value), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(cuModuleLoadDataEx(&module, OneKernel::kImage, 1, &names, &value), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(cuLibraryLoadData(&library, OneKernel::kImage, &names, &value, 1, nullptr, nullptr, 0),
            CUDA_ERROR_NOT_SUPPORTED);
  const std::string said = ::testing::internal::GetCapturedStderr();
  for (const char* name : {"cuLinkAddData", "cuModuleLoadDataEx", "cuLibraryLoadData"})
    EXPECT_NE(said.find(std::string("unsupported call ") + name), std::string::npos) << name << " in " << said;
  EXPECT_EQ(cuLinkDestroy(state), CUDA_SUCCESS);
}

TEST_F(LinkTest, ArgumentsThatAreWrong) {
  const CUlinkState state = NewState();
  CUstream stream = nullptr;
  ASSERT_EQ(cuStreamCreate(&stream, 0), CUDA_SUCCESS);
  ASSERT_EQ(Add(state, "text"), CUDA_SUCCESS);
  Sent();
  const size_t records = Records();
  char data[] = "data";
  CUjit_option option = CU_JIT_MAX_REGISTERS, names = CU_JIT_GLOBAL_SYMBOL_NAMES;
  void* value = nullptr;
  CUlinkState out = nullptr;
  EXPECT_EQ(cuLinkCreate(0, nullptr, nullptr, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuLinkCreate(1, nullptr, &value, &out), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuLinkCreate(1, &option, nullptr, &out), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuLinkCreate(1, &names, &value, &out), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(out, nullptr);
  const auto add = [&](CUlinkState to, void* bytes, size_t size, unsigned count, CUjit_option* options, void** values) {
    return cuLinkAddData(to, CU_JIT_INPUT_PTX, bytes, size, nullptr, count, options, values);
  };
  EXPECT_EQ(add(state, nullptr, 4, 0, nullptr, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(add(state, data, 0, 0, nullptr, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(add(state, data, 4, 1, nullptr, &value), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(add(state, data, 4, 1, &option, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(add(state, data, 4, 1, &names, &value), CUDA_ERROR_NOT_SUPPORTED);
  // Handles that are no states: none, another object's, and an input's, which has a handle in the log only.
  uint64_t input = 0;
  {
    Session* const session = Session::Get();
    ReaderLock lock(&session->objects().mutex());
    for (const replay::Record* record : session->objects().log().InOrder()) {
      if (record->header.call == kCall_cuLinkAddData_v2) input = record->object.id;
    }
  }
  ASSERT_EQ(KindOf(input), Kind::kLinkState);
  void* image = nullptr;
  for (const uint64_t handle : {uint64_t(0), reinterpret_cast<uint64_t>(stream), input}) {
    const auto none = reinterpret_cast<CUlinkState>(handle);
    EXPECT_EQ(add(none, data, 4, 0, nullptr, nullptr), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_EQ(cuLinkComplete(none, &image, nullptr), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_EQ(cuLinkDestroy(none), CUDA_ERROR_INVALID_HANDLE);
  }
  ASSERT_EQ(cuCtxSetCurrent(nullptr), CUDA_SUCCESS);
  EXPECT_EQ(cuLinkCreate(0, nullptr, nullptr, &out), CUDA_ERROR_INVALID_CONTEXT);
  ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls());
  EXPECT_EQ(Records(), records);
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
  EXPECT_EQ(cuLinkDestroy(state), CUDA_SUCCESS);
}

TEST_F(LinkTest, AStateDiesWithItsContext) {
  CUcontext other = nullptr;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&other, 1), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxSetCurrent(other), CUDA_SUCCESS);
  const CUlinkState state = NewState();
  ASSERT_EQ(Add(state, "text"), CUDA_SUCCESS);
  ASSERT_EQ(cuDevicePrimaryCtxReset(1), CUDA_SUCCESS);
  EXPECT_FALSE(InLog(Kind::kLinkState, HandleOf(state)));
  EXPECT_EQ(Inputs(state), 0u);
  ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
  Sent();
  void* image = nullptr;
  EXPECT_EQ(cuLinkComplete(state, &image, nullptr), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(Sent(), Calls());
}

TEST_F(LinkTest, WhileTheServerLinksOtherThreadsGoOn) {
  const CUlinkState linked = NewState(), other_state = NewState();
  void *image = nullptr, *again = nullptr, *other_image = nullptr;
  ASSERT_EQ(Add(linked, "text"), CUDA_SUCCESS);
  ASSERT_EQ(Add(other_state, "text"), CUDA_SUCCESS);
  ASSERT_EQ(cuLinkComplete(linked, &image, nullptr), CUDA_SUCCESS);
  std::atomic<bool> linking{false}, has_gone_on{false};
  server_->On(kCall_cuLinkComplete, [&](const FakeServer::Request&) {
    linking = true;
    // So long that only a thread that waits for this one is too late.
    const Moment begin = Now();
    while (!has_gone_on && SecondsSince(begin) < 20) std::this_thread::yield();
    EXPECT_TRUE(has_gone_on);
    return FakeServer::Answer(CUDA_ERROR_NO_BINARY_FOR_GPU);
  });
  std::thread other([&] {
    EXPECT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
    EXPECT_EQ(cuLinkComplete(other_state, &other_image, nullptr), CUDA_ERROR_NO_BINARY_FOR_GPU);
  });
  while (!linking) std::this_thread::yield();
  EXPECT_EQ(cuLinkComplete(linked, &again, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(again, image);
  has_gone_on = true;
  other.join();
  AnswerImage("the linked image");
  EXPECT_EQ(cuLinkDestroy(other_state), CUDA_SUCCESS);
  EXPECT_EQ(cuLinkDestroy(linked), CUDA_SUCCESS);
}

// The last one: nothing works after it.
TEST_F(LinkTest, AnImageOfAnotherLengthEndsTheSession) {
  const CUlinkState state = NewState();
  ASSERT_EQ(Add(state, "text"), CUDA_SUCCESS);
  wire::cuLinkComplete_Reply reply;
  reply.bytes = 100;
  server_->On(kCall_cuLinkComplete, {CUDA_SUCCESS, Encoded(reply), 0, "short"});
  void* image = nullptr;
  EXPECT_EQ(cuLinkComplete(state, &image, nullptr), CUDA_ERROR_DEVICE_UNAVAILABLE);
  EXPECT_EQ(image, nullptr);
  EXPECT_EQ(Session::Get()->lost(), CUDA_ERROR_DEVICE_UNAVAILABLE);
}

}  // namespace
}  // namespace cuda_remote::client
