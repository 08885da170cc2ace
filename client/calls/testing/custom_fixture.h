// SPDX-License-Identifier: Apache-2.0
// What tests of the bodies share: one session with a fake server, a current context, and what the session has sent and
// recorded.
//
// A process has one session. So each test program has one fake server, which all of its tests share, in the order in
// which they are written: the last one may end the session.
#ifndef CUDA_REMOTE_CLIENT_CALLS_TESTING_CUSTOM_FIXTURE_H_
#define CUDA_REMOTE_CLIENT_CALLS_TESTING_CUSTOM_FIXTURE_H_

#include <cuda.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "client/core/session.h"
#include "client/core/testing/fake_server.h"
#include "proto/api/call_ids.gen.h"
#include "proto/codec/codec.h"
#include "proto/codec/decode_as.h"
#include "proto/driverabi/job_addresses.h"
#include "replay/log/log.h"

namespace cuda_remote::client {

// A handle of the driver's as the log and the wire have it.
template <typename T>
uint64_t HandleOf(T* object) {
  return reinterpret_cast<uint64_t>(object);
}

// The memory of an object that outlives the result, and a copy of an object's memory.
template <typename T>
std::string_view BytesOf(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
template <typename T>
std::string Bytes(const T& value) {
  return std::string(BytesOf(value));
}

// A module with one kernel, which has one parameter of so many bytes. Of the current context.
class OneKernel {
 public:
  OneKernel(FakeServer* server, uint32_t parameter_bytes) {
    wire::OpFunctionInfo_Reply info;
    info.name = "kernel";
    info.parameters.emplace_back();
    info.parameters[0].size = parameter_bytes;
    info.attributes.assign(CU_FUNC_ATTRIBUTE_MAX, 64);
    server->On(kOpFunctionInfo, FakeServer::Answer(CUDA_SUCCESS, Encoded(info)));
    EXPECT_EQ(cuModuleLoadData(&module_, kImage), CUDA_SUCCESS);
    EXPECT_EQ(cuModuleGetFunction(&kernel_, module_, "kernel"), CUDA_SUCCESS);
  }
  ~OneKernel() { EXPECT_EQ(cuModuleUnload(module_), CUDA_SUCCESS); }
  OneKernel(const OneKernel&) = delete;
  OneKernel& operator=(const OneKernel&) = delete;

  static constexpr char kImage[] = ".version 7.0\n.target sm_70\n.address_size 64\n";
  CUmodule module() const { return module_; }
  CUfunction kernel() const { return kernel_; }

 private:
  CUmodule module_ = nullptr;
  CUfunction kernel_ = nullptr;
};

class CustomTest : public ::testing::Test {
 protected:
  // `shared_memory`: whether the server is on this machine. A fixture that needs another server, or environment
  // variables of the client library, has a SetUpTestSuite of its own, which calls this one.
  static void Connect(bool shared_memory) {
    server_ = new FakeServer(shared_memory);
    for (const char* name : {"CUDA_REMOTE_JOB_DIR", "CUDA_REMOTE_SYNC", "CUDA_REMOTE_GPU", "CUDA_VISIBLE_DEVICES"})
      unsetenv(name);
    setenv("CUDA_REMOTE_SERVER", server_->address().c_str(), 1);
    wire::OpSessionInfo_Reply info;
    info.driver_version = 13000;
    wire::DeviceInfo device;
    device.name = "Fake GPU";
    device.total_memory = uint64_t(16) << 30;
    device.attributes.assign(200, 1);
    info.devices.assign(2, device);
    server_->On(kOpSessionInfo, {CUDA_SUCCESS, Encoded(info)});
    next_memory_ = driverabi::kReservationBase;
    AllocateFrom(&next_memory_);
    ASSERT_EQ(cuInit(0), CUDA_SUCCESS);
  }
  // The server gives memory from there on, each time 2 MiB further.
  static void AllocateFrom(uint64_t* next) {
    server_->On(kOpMemAlloc, [next](const FakeServer::Request& request) {
      wire::OpMemAlloc_Request in;
      wire::OpMemAlloc_Reply out;
      EXPECT_TRUE(in.Decode(request.message));
      out.address = *next;
      out.bytes = in.bytes;
      *next += uint64_t(1) << 21;
      return FakeServer::Answer{CUDA_SUCCESS, Encoded(out)};
    });
  }
  static void SetUpTestSuite() { Connect(true); }
  static void TearDownTestSuite() { delete server_; }

  void SetUp() override {
    if (!context_) {
      ASSERT_EQ(cuDevicePrimaryCtxRetain(&context_, 0), CUDA_SUCCESS);
    }
    ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
    Sent();
  }

  // The requests that the server got since the last time, without those that only wait for the GPU. Waits for an
  // answer, so that all before it are among them. They stay until the next time.
  const std::vector<FakeServer::Request>& SentRequests() {
    EXPECT_EQ(Session::Get()->requests().WaitForWork(), CUDA_SUCCESS);
    sent_ = server_->Take();
    const auto only_waits = [](const FakeServer::Request& one) {
      wire::OpManagedUnmap_Request request;
      return wire::DecodeAs(one.header.call, one.message, &request) && request.action == 2;
    };
    sent_.erase(std::remove_if(sent_.begin(), sent_.end(), only_waits), sent_.end());
    return sent_;
  }
  // Their calls.
  Calls Sent() {
    Calls calls;
    for (const FakeServer::Request& one : SentRequests()) calls.push_back(one.header.call);
    return calls;
  }
  // The only request since the last time, which must be of this kind. Its views, as sent_, stay until the next time.
  template <typename Message>
  Message SentOne() {
    SentRequests();
    EXPECT_EQ(sent_.size(), 1u);
    return SentAt<Message>(0);
  }
  // One of those that SentRequests or Sent returned last.
  template <typename Message>
  Message SentAt(size_t index) {
    Message message;
    const bool is_one =
        index < sent_.size() && wire::DecodeAs(sent_[index].header.call, sent_[index].message, &message);
    EXPECT_TRUE(is_one) << "request " << index << " of " << sent_.size() << " is another one";
    return message;
  }

  // A copy of the log's record of the call that made the object, if it has one; of one setting of it.
  static std::optional<replay::Record> RecordOf(Kind kind, uint64_t id) {
    Session* const session = Session::Get();
    ReaderLock lock(&session->objects().mutex());
    const replay::Record* const record = session->objects().log().Find({kind, id});
    return record ? std::make_optional(*record) : std::nullopt;
  }
  static std::optional<replay::Record> SettingOf(Kind kind, uint64_t id, uint32_t call, uint64_t key) {
    Session* const session = Session::Get();
    ReaderLock lock(&session->objects().mutex());
    const replay::Record* const record = session->objects().log().FindSetting({kind, id}, call, key);
    return record ? std::make_optional(*record) : std::nullopt;
  }
  static bool InLog(Kind kind, uint64_t id) { return RecordOf(kind, id).has_value(); }
  static bool DependsOn(const replay::Record& record, Kind kind, uint64_t id) {
    const replay::ObjectKey key{kind, id};
    return std::find(record.depends_on.begin(), record.depends_on.end(), key) != record.depends_on.end();
  }
  static size_t Records() {
    Session* const session = Session::Get();
    ReaderLock lock(&session->objects().mutex());
    return session->objects().log().records();
  }

  static inline FakeServer* server_ = nullptr;
  static inline uint64_t next_memory_ = 0;
  static inline CUcontext context_ = nullptr;
  std::vector<FakeServer::Request> sent_;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CALLS_TESTING_CUSTOM_FIXTURE_H_
