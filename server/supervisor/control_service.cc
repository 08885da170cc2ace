#include "server/supervisor/control_service.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <string>

#include "proto/channel/handshake.h"
#include "proto/codec/text.h"
#include "proto/control/message_check.h"

namespace cuda_remote::server {
namespace {

// cr-nvml may have to load the driver first.
constexpr int kAnswerTimeoutMs = 30000;
constexpr int kLookMs = 100;
constexpr size_t kMostReason = 1000;

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
  const ServerFacts facts = supervisor_->Facts();
  reply->set_name(facts.name);
  reply->set_pid(uint32_t(facts.pid));
  reply->set_wire_version(kWireVersion);
  reply->set_warm_workers(uint32_t(facts.warm_workers));
  reply->set_sessions(uint32_t(facts.sessions));
  reply->set_sessions_ever(facts.sessions_ever);
  reply->set_seconds(facts.seconds);
  reply->set_driver(facts.driver);
  reply->set_software_gpu(facts.software);
  reply->set_worker_error(facts.worker_error);
  return Done(caller, reply);
}

grpc::Status ControlService::ListSessions(grpc::ServerContext* context, const control::ListSessionsRequest* request,
                                          control::ListSessionsReply* reply) {
  Caller caller;
  if (const grpc::Status status = Identify(supervisor_, *context, *request, &caller); !status.ok()) return status;
  for (const SessionInfo& info : supervisor_->Sessions(caller)) {
    control::SessionInfo* const out = reply->add_sessions();
    out->set_id(info.id);
    out->set_pid(info.hello.pid);
    out->set_program(info.hello.program);
    out->set_job(info.hello.job);
    out->set_transport(info.transport);
    out->set_peer(info.peer);
    out->set_worker_pid(uint32_t(info.worker_pid));
    out->set_gpu(info.gpu);
    out->set_driver(info.driver);
    out->set_seconds(info.seconds);
    out->set_device_bytes(info.stats.device_bytes);
    out->set_calls(info.stats.calls);
    out->set_bytes_in(info.stats.bytes_in);
    out->set_bytes_out(info.stats.bytes_out);
    out->set_calls_per_second(info.calls_per_second);
    out->set_bytes_per_second(info.bytes_per_second);
    out->set_replaying(info.hello.replaying);
    out->set_saved_unix_ms(info.saved_unix_ms);
    out->set_saved_bytes(info.saved_bytes);
    out->set_owner(info.owner);
  }
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
  if (packet.fd >= 0) close(packet.fd);
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
  const std::string by = caller.is_operator ? "ended by the operator" : "ended by its owner";
  const std::string reason = Printable(std::string_view(request->reason()).substr(0, kMostReason));
  reply->set_found(supervisor_->EndSession(request->id(), reason.empty() ? by : by + ": " + reason, caller));
  if (reply->found()) {
    spdlog::info("session {} is ended by request of {} ({})", request->id(), caller.identity, context->peer());
  }
  return Done(caller, reply);
}

}  // namespace cuda_remote::server
