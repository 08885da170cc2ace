// SPDX-License-Identifier: Apache-2.0
#include "server/supervisor/control_service.h"

#include <unistd.h>

#include <string>

#include "proto/channel/handshake.h"
#include "proto/control/message_check.h"
#include "server/supervisor/control_messages.h"

namespace cuda_remote::server {
namespace {

// cr-nvml may have to load the driver first.
constexpr int kAnswerTimeoutMs = 30000;
constexpr int kLookMs = 100;
// Of a list of sessions; a message may be larger (credentials.h).
constexpr size_t kMostListBytes = 1 << 20;

// Who asks; not OK: the call is refused so.
template <typename Request>
grpc::Status Identify(Supervisor* supervisor, const grpc::ServerContext& context, const Request& request,
                      Caller* caller) {
  *caller = supervisor->CallerOf(context);
  if (!caller->refusal.empty()) return grpc::Status(grpc::StatusCode::UNAUTHENTICATED, caller->refusal);
  if (!caller->unprotected || control::ChecksumIsRight(request)) return grpc::Status::OK;
  return grpc::Status(grpc::StatusCode::DATA_LOSS,
                      "the request arrived damaged, or without the checksum that connections without TLS need; both "
                      "sides need the same release of cuda-remote");
}

template <typename Reply>
grpc::Status Done(const Caller& caller, Reply* reply) {
  if (caller.unprotected) control::AddChecksum(reply);
  return grpc::Status::OK;
}

}  // namespace

grpc::Status ControlService::GetServerInfo(grpc::ServerContext* context, const control::ServerInfoRequest* request,
                                           control::ServerInfo* reply) {
  Caller caller;
  if (const grpc::Status status = Identify(supervisor_, *context, *request, &caller); !status.ok()) return status;
  ToMessage(supervisor_->Facts(caller), reply);
  return Done(caller, reply);
}

grpc::Status ControlService::ListSessions(grpc::ServerContext* context, const control::ListSessionsRequest* request,
                                          control::ListSessionsReply* reply) {
  Caller caller;
  if (const grpc::Status status = Identify(supervisor_, *context, *request, &caller); !status.ok()) return status;
  AddSessions(supervisor_->Sessions(caller), request->after(), kMostListBytes, reply);
  return Done(caller, reply);
}

grpc::Status ControlService::Query(grpc::ServerContext* context, const control::QueryRequest* request,
                                   control::QueryReply* reply) {
  Caller caller;
  if (const grpc::Status status = Identify(supervisor_, *context, *request, &caller); !status.ok()) return status;
  int sockets[2];
  if (!SocketPair(sockets)) return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "no descriptors left");
  supervisor_->SubmitQuestion(sockets[0], request->question(), caller);
  Packet packet;
  ChannelStatus status = ChannelStatus::kTimeout;
  for (int waited = 0; status == ChannelStatus::kTimeout && waited < kAnswerTimeoutMs && !context->IsCancelled();
       waited += kLookMs) {
    status = ReceivePacket(sockets[1], &packet, kLookMs);
  }
  close(sockets[1]);
  if (status != ChannelStatus::kOk || packet.type != PacketType::kAnswer)
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server's cr-nvml gave no answer");
  reply->set_answer(packet.body);
  return Done(caller, reply);
}

grpc::Status ControlService::EndSession(grpc::ServerContext* context, const control::EndSessionRequest* request,
                                        control::EndSessionReply* reply) {
  Caller caller;
  if (const grpc::Status status = Identify(supervisor_, *context, *request, &caller); !status.ok()) return status;
  reply->set_found(supervisor_->EndSession(request->id(), request->reason(), caller));
  return Done(caller, reply);
}

grpc::Status ControlService::NoteSaved(grpc::ServerContext* context, const control::NoteSavedRequest* request,
                                       control::NoteSavedReply* reply) {
  Caller caller;
  if (const grpc::Status status = Identify(supervisor_, *context, *request, &caller); !status.ok()) return status;
  reply->set_found(supervisor_->NoteSaved(*request, caller));
  return Done(caller, reply);
}

}  // namespace cuda_remote::server
