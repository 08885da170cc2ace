// SPDX-License-Identifier: Apache-2.0
// What a cr-server says about its sessions, and ending one: for cr-ps and cr-hostd.
//
// A server on this machine is asked over its session socket, where the kernel says who asks; one on another machine
// over gRPC. The answers are the same. Not thread-safe.
#ifndef CUDA_REMOTE_PROTO_CONTROL_SERVER_CONTROL_H_
#define CUDA_REMOTE_PROTO_CONTROL_SERVER_CONTROL_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "proto/control/control.grpc.pb.h"
#include "proto/control/credentials.h"

namespace cuda_remote::control {

class ServerControl {
 public:
  // `address`: unix:PATH of a socket or folder, or HOST:PORT. Fails if the files for TLS are of no use. Nothing is
  // connected yet.
  static absl::StatusOr<std::unique_ptr<ServerControl>> Open(const std::string& address, TlsFiles tls);

  // These fail if there is no answer.
  absl::StatusOr<ServerInfo> Info();
  absl::StatusOr<ListSessionsReply> List();
  // Whether there was a session of this number that the caller may end.
  absl::StatusOr<bool> End(uint64_t session, const std::string& reason);

 private:
  ServerControl() = default;
  absl::StatusOr<ControlAnswer> Call(const ControlCall& call);

  std::string address_;
  std::string path_;      // of the session socket; empty: another machine's
  bool checked_ = false;  // nothing else notices what is damaged on the way
  std::unique_ptr<Control::Stub> stub_;
};

}  // namespace cuda_remote::control

#endif  // CUDA_REMOTE_PROTO_CONTROL_SERVER_CONTROL_H_
