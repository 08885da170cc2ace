// SPDX-License-Identifier: Apache-2.0
#include "client/core/server_requests.h"

#include "client/trace/trace.h"
#include "proto/codec/operations.gen.h"
#include "proto/driverabi/requests.h"
#include "proto/frame/handle.h"

namespace cuda_remote::client {

CUresult ServerRequests::Operate(uint32_t operation, const std::string& message, Reply* reply, uint32_t context) {
  Reply unused;
  if (!reply) reply = &unused;
  FrameHeader header;
  header.call = operation;
  header.context_or_result = context;
  const ChannelStatus status = connection_->channel().Call(header, message, {}, nullptr, 0, reply);
  if (trace::On()) {
    trace::Sent(sizeof(FrameHeader) + message.size(), 0);
    trace::Received(sizeof(FrameHeader) + reply->message.size());
  }
  if (status != ChannelStatus::kOk) return Lose(status);
  if (mirror_->watches_shared()) mirror_->WorkMayHaveEnded();
  // An answer to this may be the first to tell of an earlier call that nobody waited for.
  if (reply->pending_error != CUDA_SUCCESS) connection_->SetPendingError(CUresult(reply->pending_error));
  return CUresult(reply->result);
}

void ServerRequests::Send(uint32_t operation, const std::string& message, uint32_t context) {
  FrameHeader header;
  header.call = operation;
  header.context_or_result = context;
  if (const ChannelStatus status = connection_->channel().Send(header, message, {}); status != ChannelStatus::kOk) {
    Lose(status);
  }
}

CUresult ServerRequests::SendFile(int fd, uint64_t* tag) {
  *tag = connection_->NextTag();
  const ChannelStatus status = connection_->channel().SendFd(*tag, fd);
  return status == ChannelStatus::kOk ? CUDA_SUCCESS : Lose(status);
}

CUresult ServerRequests::WaitForWork() {
  wire::OpManagedUnmap_Request request;
  request.action = driverabi::kUnmapWaitOnly;
  std::string message;
  request.Encode(&message);
  return Operate(kOpManagedUnmap, message, nullptr);
}

CUresult ServerRequests::AskEventAges(uint64_t context, const std::vector<uint64_t>& events,
                                      std::vector<double>* microseconds, std::set<uint64_t>* captured) {
  wire::OpEventTimes_Request request;
  request.events.assign(events.begin(), events.end());
  request.ask_captured = captured != nullptr;
  std::string message;
  request.Encode(&message);
  Reply reply;
  const CUresult result = Operate(kOpEventTimes, message, &reply, SlotOf(context));
  if (result != CUDA_SUCCESS) return result;
  wire::OpEventTimes_Reply ages;
  if (!ages.Decode(reply.message) || ages.microseconds.size() != events.size())
    return Lose(ChannelStatus::kProtocolError);
  microseconds->assign(ages.microseconds.begin(), ages.microseconds.end());
  if (captured) captured->insert(ages.captured.begin(), ages.captured.end());
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::client
