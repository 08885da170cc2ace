// SPDX-License-Identifier: Apache-2.0
// Requests to a worker under test, in a line each.
#ifndef CUDA_REMOTE_SERVER_WORKER_TESTING_CLIENT_H_
#define CUDA_REMOTE_SERVER_WORKER_TESTING_CLIENT_H_

#include <cuda.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "proto/channel/client_channel.h"
#include "proto/codec/codec.h"
#include "proto/frame/handle.h"

namespace cuda_remote::server {

// Calls of a program with one context. Handles are chosen here, as the client library would.
class TestClient {
 public:
  explicit TestClient(std::unique_ptr<ClientChannel> channel) : channel_(std::move(channel)) {
    channel_->SetStdoutSink([](const char* bytes, size_t count) { Printed().append(bytes, count); });
  }

  static std::string& Printed() {
    static std::string* const printed = new std::string;
    return *printed;
  }

  uint64_t NewHandle(Kind kind) { return MakeHandle(kind, next_slot_++, 0); }

  template <typename In>
  CUresult Call(uint32_t call, const In& in, std::string_view payload = {}, void* out = nullptr, size_t out_bytes = 0) {
    std::string message;
    in.Encode(&message);
    return Raw(call, message, payload, out, out_bytes);
  }
  CUresult Raw(uint32_t call, std::string_view message, std::string_view payload = {}, void* out = nullptr,
               size_t out_bytes = 0) {
    FrameHeader header;
    header.call = call;
    header.flags = flags;
    header.context_or_result = context_slot;
    status = channel_->Call(header, message, payload, out, out_bytes, &reply);
    if (reply.pending_error != 0) pending = CUresult(reply.pending_error);
    return status == ChannelStatus::kOk ? CUresult(reply.result) : CUresult(-1);
  }
  template <typename In>
  void Send(uint32_t call, const In& in, std::string_view payload = {}) {
    std::string message;
    in.Encode(&message);
    FrameHeader header;
    header.call = call;
    header.context_or_result = context_slot;
    status = channel_->Send(header, message, payload);
  }
  template <typename Out>
  Out Decode() {
    Out out;
    EXPECT_TRUE(out.Decode(reply.message));
    return out;
  }

  uint64_t OpenContext() {
    wire::cuDevicePrimaryCtxRetain_Request in;
    in.context = NewHandle(Kind::kContext);
    EXPECT_EQ(Call(kCall_cuDevicePrimaryCtxRetain, in), CUDA_SUCCESS);
    context_slot = SlotOf(in.context);
    return in.context;
  }
  uint64_t Allocate(uint64_t bytes, uint64_t at = 0) {
    wire::OpMemAlloc_Request in;
    in.bytes = bytes;
    in.at = at;
    last = Call(kOpMemAlloc, in);
    return last == CUDA_SUCCESS ? Decode<wire::OpMemAlloc_Reply>().address : 0;
  }
  CUresult Free(uint64_t address) {
    wire::OpMemFree_Request in;
    in.address = address;
    return Call(kOpMemFree, in);
  }
  CUresult Write(uint64_t address, const std::string& bytes) {
    wire::cuMemcpyHtoDAsync_v2_Request in;
    in.dst = address;
    in.bytes = bytes.size();
    return Call(kCall_cuMemcpyHtoDAsync_v2, in, bytes);
  }
  std::string Read(uint64_t address, size_t bytes) {
    wire::cuMemcpyDtoHAsync_v2_Request in;
    in.src = address;
    in.bytes = bytes;
    in.blocking = true;
    std::string out(bytes, 0);
    last = Call(kCall_cuMemcpyDtoHAsync_v2, in, {}, &out[0], bytes);
    return last == CUDA_SUCCESS ? out : std::string();
  }
  uint64_t LoadModule(const std::string& image) {
    wire::cuModuleLoadData_Request in;
    in.module = NewHandle(Kind::kModule);
    last = Call(kCall_cuModuleLoadData, in, image);
    return last == CUDA_SUCCESS ? in.module : 0;
  }
  uint64_t Function(uint64_t module, const std::string& name) {
    wire::cuModuleGetFunction_Request in;
    in.hfunc = NewHandle(Kind::kFunction);
    in.hmod = module;
    in.name = name;
    last = Call(kCall_cuModuleGetFunction, in);
    return last == CUDA_SUCCESS ? in.hfunc : 0;
  }
  uint64_t Stream() {
    wire::cuStreamCreate_Request in;
    in.phStream = NewHandle(Kind::kStream);
    last = Call(kCall_cuStreamCreate, in);
    return last == CUDA_SUCCESS ? in.phStream : 0;
  }
  wire::cuLaunchKernel_Request Launch(uint64_t function, std::string_view params, uint64_t stream = 0) {
    wire::cuLaunchKernel_Request in;
    in.f = function;
    in.grid_x = in.grid_y = in.grid_z = in.block_x = in.block_y = in.block_z = 1;
    in.params = params;
    in.stream = stream;
    return in;
  }
  CUresult Synchronize() { return Call(kCall_cuCtxSynchronize, wire::cuCtxSynchronize_Request()); }

  ClientChannel& channel() { return *channel_; }

  uint32_t context_slot = 0;
  uint32_t flags = 0;
  ChannelStatus status = ChannelStatus::kOk;
  Reply reply;
  CUresult last = CUDA_SUCCESS;
  CUresult pending = CUDA_SUCCESS;

 private:
  std::unique_ptr<ClientChannel> channel_;
  uint32_t next_slot_ = 1;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_TESTING_CLIENT_H_
