// SPDX-License-Identifier: Apache-2.0
#include "proto/control/grpc_call.h"

#include "proto/control/message_check.h"
#include "proto/control/socket_call.h"

namespace cuda_remote::control {
namespace {

template <typename Method, typename Request, typename Reply>
grpc::Status CallOne(Control::Stub* stub, Method method, grpc::ClientContext* context, bool checked, Request* request,
                     Reply* reply) {
  if (checked) AddChecksum(request);
  const grpc::Status status = (stub->*method)(context, *request, reply);
  if (status.ok() && checked && !ChecksumIsRight(*reply))
    return grpc::Status(grpc::StatusCode::DATA_LOSS, "its answer has no checksum, or arrived damaged");
  return status;
}

}  // namespace

grpc::Status CallOverGrpc(Control::Stub* stub, grpc::ClientContext* context, ControlCall call, bool checked,
                          ControlAnswer* answer) {
  switch (call.call_case()) {
    case ControlCall::kGetServerInfo:
      return CallOne(stub, &Control::Stub::GetServerInfo, context, checked, call.mutable_get_server_info(),
                     answer->mutable_server_info());
    case ControlCall::kListSessions:
      return CallOne(stub, &Control::Stub::ListSessions, context, checked, call.mutable_list_sessions(),
                     answer->mutable_sessions());
    case ControlCall::kEndSession:
      return CallOne(stub, &Control::Stub::EndSession, context, checked, call.mutable_end_session(),
                     answer->mutable_ended());
    case ControlCall::kNoteSaved:
      return CallOne(stub, &Control::Stub::NoteSaved, context, checked, call.mutable_note_saved(),
                     answer->mutable_noted());
    case ControlCall::CALL_NOT_SET:
      break;
  }
  return grpc::Status(grpc::StatusCode::UNIMPLEMENTED, kUnknownCall);
}

}  // namespace cuda_remote::control
