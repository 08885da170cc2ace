#include "server/supervisor/control_service.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <string>

#include "proto/channel/handshake.h"

namespace cuda_remote::server {
namespace {

// cr-nvml may have to load the driver first.
constexpr int kAnswerTimeoutMs = 30000;
constexpr int kLookMs = 100;

}  // namespace

grpc::Status ControlService::GetServerInfo(grpc::ServerContext*, const control::ServerInfoRequest*,
                                           control::ServerInfo* reply) {
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
  return grpc::Status::OK;
}

grpc::Status ControlService::ListSessions(grpc::ServerContext*, const control::ListSessionsRequest*,
                                          control::ListSessionsReply* reply) {
  for (const SessionInfo& info : supervisor_->Sessions()) {
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
  }
  return grpc::Status::OK;
}

grpc::Status ControlService::Query(grpc::ServerContext* context, const control::QueryRequest* request,
                                   control::QueryReply* reply) {
  int sockets[2];
  if (!SocketPair(sockets)) return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "no descriptors left");
  supervisor_->SubmitQuestion(sockets[0], request->question());
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
  return grpc::Status::OK;
}

grpc::Status ControlService::EndSession(grpc::ServerContext* context, const control::EndSessionRequest* request,
                                        control::EndSessionReply* reply) {
  const std::string reason =
      request->reason().empty() ? "ended by the operator" : "ended by the operator: " + request->reason();
  reply->set_found(supervisor_->EndSession(request->id(), reason));
  if (reply->found()) spdlog::info("session {} is ended by request of {}", request->id(), context->peer());
  return grpc::Status::OK;
}

}  // namespace cuda_remote::server
