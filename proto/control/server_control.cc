// SPDX-License-Identifier: Apache-2.0
#include "proto/control/server_control.h"

#include <sys/stat.h>
#include <unistd.h>

#include <chrono>

#include "proto/channel/handshake.h"
#include "proto/control/message_check.h"
#include "proto/control/status_text.h"
#include "proto/nvml/query.h"

namespace cuda_remote::control {
namespace {

constexpr auto kDeadline = std::chrono::seconds(5);
constexpr char kUnix[] = "unix:";

}  // namespace

std::unique_ptr<ServerControl> ServerControl::Open(const std::string& address, TlsFiles tls, std::string* error) {
  std::unique_ptr<ServerControl> server(new ServerControl);
  server->address_ = address;
  const bool prefixed = address.compare(0, sizeof(kUnix) - 1, kUnix) == 0;
  if (prefixed || (!address.empty() && address[0] == '/')) {
    server->path_ = prefixed ? address.substr(sizeof(kUnix) - 1) : address;
    struct stat facts;
    if (stat(server->path_.c_str(), &facts) == 0 && S_ISDIR(facts.st_mode)) server->path_ += "/session.sock";
    return server;
  }
  FillFromEnvironment(&tls);
  server->checked_ = tls.empty();
  SendGrpcLogTo([](bool, const char*) {});  // the call's status says the same
  const auto credentials = ClientTls(tls, error);
  if (!credentials) return nullptr;
  server->stub_ = Control::NewStub(grpc::CreateCustomChannel(address, credentials, ClientArguments()));
  return server;
}

bool ServerControl::Ask(const char* question, const std::string& request, std::string* reply, std::string* error) {
  const int socket = ConnectServer(path_, error);
  if (socket < 0) return false;
  nvml::Question asked;
  asked.pid = uint32_t(getpid());
  asked.call = question;
  asked.input = request;
  std::string body;
  EncodeQuestion(asked, &body);
  Packet packet;
  nvml::Answer answer;
  const int limit_ms = int(std::chrono::milliseconds(kDeadline).count());
  // A server that does not serve this user says so at once, and may have closed its end before the question came.
  SendPacket(socket, PacketType::kQuery, body, -1);
  const ChannelStatus status = ReceivePacket(socket, &packet, limit_ms);
  if (packet.fd >= 0) close(packet.fd);
  close(socket);
  Welcome refusal;
  if (status != ChannelStatus::kOk) {
    *error = std::string("it does not answer (") + ChannelStatusName(status) + ")";
  } else if (packet.type == PacketType::kWelcome && DecodeWelcome(packet.body, &refusal)) {
    *error = refusal.error;
  } else if (packet.type != PacketType::kAnswer || !DecodeAnswer(packet.body, &answer)) {
    *error = "its answer cannot be understood; both sides need the same release of cuda-remote";
  } else if (answer.result != nvml::kSuccess) {
    *error = !answer.error.empty() ? answer.error
                                   : "it does not know the question; both sides need the same release of cuda-remote";
  } else {
    *reply = answer.output;
    return true;
  }
  return false;
}

template <typename Method, typename Request, typename Reply>
bool ServerControl::Call(const char* question, Method method, Request request, Reply* reply, std::string* error) {
  if (!stub_) {
    std::string bytes;
    bool ok = Ask(question, request.SerializeAsString(), &bytes, error);
    if (ok && !reply->ParseFromString(bytes)) {
      *error = "its answer cannot be understood; both sides need the same release of cuda-remote";
      ok = false;
    }
    if (!ok) *error = "no answer from the server at " + address_ + ": " + *error;
    return ok;
  }
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  if (checked_) AddChecksum(&request);
  grpc::Status status = (stub_.get()->*method)(&context, request, reply);
  if (status.ok() && checked_ && !ChecksumIsRight(*reply))
    status = grpc::Status(grpc::StatusCode::DATA_LOSS, "its answer has no checksum, or arrived damaged");
  if (!status.ok()) *error = "no answer from the server at " + address_ + ": " + StatusText(status);
  return status.ok();
}

bool ServerControl::Info(ServerInfo* info, std::string* error) {
  return Call(nvml::kServerInfo, &Control::Stub::GetServerInfo, ServerInfoRequest(), info, error);
}

bool ServerControl::List(ListSessionsReply* list, std::string* error) {
  ListSessionsRequest request;
  ListSessionsReply page;
  do {
    page.Clear();
    if (!Call(nvml::kListSessions, &Control::Stub::ListSessions, request, &page, error)) return false;
    list->mutable_sessions()->MergeFrom(page.sessions());
    if (page.sessions_size() == 0) break;
    request.set_after(page.sessions(page.sessions_size() - 1).id());
  } while (page.more());
  return true;
}

bool ServerControl::End(uint64_t session, const std::string& reason, bool* found, std::string* error) {
  EndSessionRequest request;
  request.set_id(session);
  request.set_reason(reason);
  EndSessionReply reply;
  if (!Call(nvml::kEndSession, &Control::Stub::EndSession, request, &reply, error)) return false;
  *found = reply.found();
  return true;
}

}  // namespace cuda_remote::control
