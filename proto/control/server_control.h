// SPDX-License-Identifier: Apache-2.0
// What a cr-server says about its sessions, and ending one: for cr-ps and cr-hostd.
//
// A server on this machine is asked over its session socket, where the kernel says who asks; one on another machine
// over gRPC. The answers are the same. Not thread-safe.
#ifndef CUDA_REMOTE_PROTO_CONTROL_SERVER_CONTROL_H_
#define CUDA_REMOTE_PROTO_CONTROL_SERVER_CONTROL_H_

#include <memory>
#include <string>

#include "proto/control/control.grpc.pb.h"
#include "proto/control/credentials.h"

namespace cuda_remote::control {

class ServerControl {
 public:
  // `address`: unix:PATH of a socket or folder, or HOST:PORT. Null and one sentence in *error if the files for TLS are
  // of no use. Nothing is connected yet.
  static std::unique_ptr<ServerControl> Open(const std::string& address, TlsFiles tls, std::string* error);

  // False and one sentence in *error if there is no answer.
  bool Info(ServerInfo* info, std::string* error);
  bool List(ListSessionsReply* list, std::string* error);
  // *found: there was one of this number that the caller may end.
  bool End(uint64_t session, const std::string& reason, bool* found, std::string* error);

 private:
  ServerControl() = default;
  bool Call(const ControlCall& call, ControlAnswer* answer, std::string* error);

  std::string address_;
  std::string path_;      // of the session socket; empty: another machine's
  bool checked_ = false;  // nothing else notices what is damaged on the way
  std::unique_ptr<Control::Stub> stub_;
};

}  // namespace cuda_remote::control

#endif  // CUDA_REMOTE_PROTO_CONTROL_SERVER_CONTROL_H_
