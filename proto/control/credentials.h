// TLS from files, and how a server's address is written.
//
// Both sides show certificates: the server accepts clients whose certificate the given authority signed, the client
// checks the server's the same way. Not part of the client library.
#ifndef CUDA_REMOTE_PROTO_CONTROL_CREDENTIALS_H_
#define CUDA_REMOTE_PROTO_CONTROL_CREDENTIALS_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

namespace cuda_remote::control {

struct TlsFiles {
  std::string cert;  // PEM: own certificate (chain)
  std::string key;   // PEM: its key
  std::string ca;    // PEM: who signs the other side's certificates
  bool empty() const { return cert.empty() && key.empty() && ca.empty(); }
};

// CUDA_REMOTE_TLS_CERT, CUDA_REMOTE_TLS_KEY and CUDA_REMOTE_TLS_CA for what is empty in `files`.
void FillFromEnvironment(TlsFiles* files);

// Null and one sentence in *error if a file cannot be read or one of the three is missing.
std::shared_ptr<grpc::ServerCredentials> ServerTls(const TlsFiles& files, std::string* error);
// Without any files: no encryption.
std::shared_ptr<grpc::ChannelCredentials> ClientTls(const TlsFiles& files, std::string* error);

// "unix:/path/session.sock" or "unix:/path" (a folder) or "host:port" as gRPC wants it, for cr-server's gRPC services:
// on a local server these listen on control.sock beside session.sock. *local: nothing leaves the machine.
std::string ControlTarget(const std::string& address, bool* local);

// Channel settings that relay, cr-ps and server share: message size, keep-alive.
grpc::ChannelArguments ClientArguments();
void SetServerArguments(grpc::ServerBuilder* builder);

}  // namespace cuda_remote::control

#endif  // CUDA_REMOTE_PROTO_CONTROL_CREDENTIALS_H_
