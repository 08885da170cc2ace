// SPDX-License-Identifier: Apache-2.0
#include "proto/control/server_control.h"

#include <sys/stat.h>

#include <chrono>
#include <utility>

#include "proto/base/clock.h"
#include "proto/control/grpc_call.h"
#include "proto/control/socket_call.h"
#include "proto/control/status_text.h"

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

bool ServerControl::Call(const ControlCall& call, ControlAnswer* answer, std::string* error) {
  const auto limit = std::chrono::milliseconds(kDeadline);
  bool ok = false;
  if (stub_) {
    grpc::ClientContext context;
    context.set_deadline(WallNow() + limit);
    const grpc::Status status = CallOverGrpc(stub_.get(), &context, call, checked_, answer);
    ok = status.ok();
    if (!ok) *error = StatusText(status);
  } else {
    ok = CallOnSocket(path_, call, int(limit.count()), answer, error);
  }
  if (!ok) *error = "no answer from the server at " + address_ + ": " + *error;
  return ok;
}

bool ServerControl::Info(ServerInfo* info, std::string* error) {
  ControlCall call;
  ControlAnswer answer;
  call.mutable_get_server_info();
  if (!Call(call, &answer, error)) return false;
  *info = std::move(*answer.mutable_server_info());
  return true;
}

bool ServerControl::List(ListSessionsReply* list, std::string* error) {
  ControlCall call;
  ControlAnswer answer;
  call.mutable_list_sessions();
  do {
    answer.Clear();
    if (!Call(call, &answer, error)) return false;
    const ListSessionsReply& page = answer.sessions();
    list->mutable_sessions()->MergeFrom(page.sessions());
    if (page.sessions_size() == 0) break;
    call.mutable_list_sessions()->set_after(page.sessions(page.sessions_size() - 1).id());
  } while (answer.sessions().more());
  return true;
}

bool ServerControl::End(uint64_t session, const std::string& reason, bool* found, std::string* error) {
  ControlCall call;
  ControlAnswer answer;
  call.mutable_end_session()->set_id(session);
  call.mutable_end_session()->set_reason(reason);
  if (!Call(call, &answer, error)) return false;
  *found = answer.ended().found();
  return true;
}

}  // namespace cuda_remote::control
