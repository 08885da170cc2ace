// SPDX-License-Identifier: Apache-2.0
// TLS from files, and how a server's address is written.
//
// Both sides show certificates: the server accepts clients whose certificate the given authority signed, the client
// checks the server's the same way. A client may show a token instead. Not part of the client library.
#ifndef CUDA_REMOTE_PROTO_CONTROL_CREDENTIALS_H_
#define CUDA_REMOTE_PROTO_CONTROL_CREDENTIALS_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::control {

struct TlsFiles {
  std::string cert;   // PEM: own certificate (chain)
  std::string key;    // PEM: its key
  std::string ca;     // PEM: who signs the other side's certificates
  std::string token;  // a client's: a token, which it may show instead of a certificate
  bool empty() const { return cert.empty() && key.empty() && ca.empty() && token.empty(); }
};

// CUDA_REMOTE_TLS_CERT, CUDA_REMOTE_TLS_KEY, CUDA_REMOTE_TLS_CA and CUDA_REMOTE_TOKEN_FILE for what is empty in
// `files`.
void FillFromEnvironment(TlsFiles* files);

// What the three files hold, checked: the certificate is valid now and belongs to the key, the authority is one.
struct TlsContents {
  std::string cert, key, ca;
};
// Fails if a file is missing, cannot be read, or does not hold what it should.
absl::StatusOr<TlsContents> ReadTls(const TlsFiles& files);

// A server's credentials, whose certificates can be exchanged while it runs.
class ServerTls {
 public:
  // Fails as ReadTls, or if there are no descriptors.
  static absl::StatusOr<std::unique_ptr<ServerTls>> Create(const TlsFiles& files);
  ServerTls(const ServerTls&) = delete;
  ServerTls& operator=(const ServerTls&) = delete;

  // Starts a thread, which Create does not. Null if gRPC does not take the certificates.
  // `tokens`: clients need no certificate, since they may show a token.
  std::shared_ptr<grpc::ServerCredentials> Credentials(bool tokens) const;
  // Reads the files again; new connections get to see what is in them within about a second. On failure everything
  // stays as it was. One thread at a time.
  absl::Status Reload(const TlsFiles& files);

 private:
  ServerTls() = default;
  // gRPC watches files. These are in memory and ours alone, so it never sees one that is half written, or a key
  // without its certificate. Certificate, key, authority.
  UniqueFd fds_[3];
};

// Without any files: no encryption. With a token, the authority's file is enough. Fails as ReadTls.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> ClientTls(const TlsFiles& files);

// "unix:/path/session.sock" or "unix:/path" (a folder) or "host:port" as gRPC wants it, for cr-server's gRPC services:
// on a local server these listen on control.sock beside session.sock. *local: nothing leaves the machine.
std::string ControlTarget(const std::string& address, bool* local);

// gRPC's own log lines go to `log` from now on, as one sentence without a line break; any thread. First thing in main.
void SendGrpcLogTo(void (*log)(bool error, const char* line));

// Channel settings that relay, cr-ps and server share: message size, keep-alive. The server's also bound how long a
// connection may take to begin, and how many streams it has.
grpc::ChannelArguments ClientArguments();
void SetServerArguments(grpc::ServerBuilder* builder);

}  // namespace cuda_remote::control

#endif  // CUDA_REMOTE_PROTO_CONTROL_CREDENTIALS_H_
