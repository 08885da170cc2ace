// SPDX-License-Identifier: Apache-2.0
#include "proto/control/server_control.h"

#include <chrono>
#include <utility>

#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/channel/handshake.h"
#include "proto/control/grpc_call.h"
#include "proto/control/socket_call.h"
#include "proto/control/status_text.h"
#include "proto/errors/annotate.h"

namespace cuda_remote::control {
namespace {

constexpr auto kDeadline = std::chrono::seconds(5);

}  // namespace

absl::StatusOr<std::unique_ptr<ServerControl>> ServerControl::Open(const std::string& address, TlsFiles tls) {
  std::unique_ptr<ServerControl> server(new ServerControl);
  server->address_ = address;
  if (std::optional<std::string> path = SocketPathOf(address[0] == '/' ? "unix:" + address : address)) {
    server->path_ = *std::move(path);
    return server;
  }
  FillFromEnvironment(&tls);
  server->checked_ = tls.empty();
  SendGrpcLogTo([](bool, const char*) {});  // the call's status says the same
  CR_ASSIGN_OR_RETURN(const auto credentials, ClientTls(tls));
  server->stub_ = Control::NewStub(grpc::CreateCustomChannel(address, credentials, ClientArguments()));
  return server;
}

absl::StatusOr<ControlAnswer> ServerControl::Call(const ControlCall& call) {
  const auto limit = std::chrono::milliseconds(kDeadline);
  absl::StatusOr<ControlAnswer> answer = ControlAnswer();
  if (stub_) {
    grpc::ClientContext context;
    context.set_deadline(WallNow() + limit);
    const grpc::Status status = CallOverGrpc(stub_.get(), &context, call, checked_, &*answer);
    if (!status.ok()) {
      const std::string problem = StatusText(status);
      const bool unreached = status.error_code() == grpc::StatusCode::UNAVAILABLE;
      answer = absl::Status(absl::StatusCode(status.error_code()), problem + (unreached ? WhatToCheck(problem) : ""));
    }
  } else {
    answer = CallOnSocket(path_, call, int(limit.count()));
  }
  if (answer.ok()) return answer;
  return Annotate("no answer from the server at " + address_ + ": ", answer.status());
}

absl::StatusOr<ServerInfo> ServerControl::Info() {
  ControlCall call;
  call.mutable_get_server_info();
  CR_ASSIGN_OR_RETURN(ControlAnswer answer, Call(call));
  return std::move(*answer.mutable_server_info());
}

absl::StatusOr<ListSessionsReply> ServerControl::List() {
  ControlCall call;
  call.mutable_list_sessions();
  ListSessionsReply list;
  for (bool more = true; more;) {
    CR_ASSIGN_OR_RETURN(const ControlAnswer answer, Call(call));
    const ListSessionsReply& page = answer.sessions();
    list.mutable_sessions()->MergeFrom(page.sessions());
    more = page.more() && page.sessions_size() > 0;
    if (more) call.mutable_list_sessions()->set_after(page.sessions(page.sessions_size() - 1).id());
  }
  return list;
}

absl::StatusOr<bool> ServerControl::End(uint64_t session, const std::string& reason) {
  ControlCall call;
  call.mutable_end_session()->set_id(session);
  call.mutable_end_session()->set_reason(reason);
  CR_ASSIGN_OR_RETURN(const ControlAnswer answer, Call(call));
  return answer.ended().found();
}

}  // namespace cuda_remote::control
