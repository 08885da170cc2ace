// SPDX-License-Identifier: Apache-2.0
// Who a client is, and what it may see.
//
// An identity is a text, the same one in log lines, in cr-ps and for --operator:
//
//     uid:1000               a user of this machine at a Unix socket, by the kernel's word (peer credentials)
//     cert:CN=alice,O=lab    the subject of a TLS client certificate, as RFC 2253 writes it
//     token:alice            the name of a token (tokens.h)
//     address:10.1.2.3       a host that --insecure-tcp lists: nothing better is known of it
//
// A session belongs to the identity that opened it. Its owner sees it, may end it and may go on with it; operators may
// see and end all. The user who runs cr-server, and root, are operators.
//
// Thread-safe: no state.
#ifndef CUDA_REMOTE_SERVER_SUPERVISOR_IDENTITY_H_
#define CUDA_REMOTE_SERVER_SUPERVISOR_IDENTITY_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "proto/control/address_list.h"

namespace cuda_remote::server {

std::string UserIdentity(uint32_t uid);

struct Peer {
  std::string identity;          // empty: there is none; its certificate has no usable subject, or it shows none
  std::string token;             // what it has shown instead of a certificate; it may be anything
  bool local = false;            // at the server's own gRPC socket, so the user who runs it, or root
  bool unprotected = false;      // TCP without TLS: what is sent needs checksums
  control::IpAddress address{};  // unless local
  uint16_t port = 0;
};
// `tls`: the server's TCP connections have TLS.
Peer PeerOf(const grpc::ServerContext& context, bool tls);
std::string TokenIdentity(const std::string& name);

// What --operator names: one of these forms, or a certificate's subject alone. Fails if it is none.
absl::StatusOr<std::string> ParseIdentity(std::string_view text);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_SUPERVISOR_IDENTITY_H_
