#include "proto/control/credentials.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <fstream>
#include <iterator>

namespace cuda_remote::control {
namespace {

constexpr int kMaxMessageBytes = 8 << 20;
constexpr int kKeepAliveMs = 10000;
constexpr int kKeepAliveTimeoutMs = 10000;
// How much of a stream may be under way; large enough for a fast network with some distance.
constexpr int kLookaheadBytes = 8 << 20;

bool ReadFile(const std::string& path, const char* option, std::string* out, std::string* error) {
  if (path.empty()) {
    *error = std::string("TLS needs a certificate, its key and an authority; ") + option + " is missing";
    return false;
  }
  std::ifstream in(path, std::ios::binary);
  out->assign(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  if (!in || out->find("-----BEGIN") == std::string::npos) {
    *error =
        "cannot read a PEM file from " + path + " (" + option + ")" + (in ? "" : std::string(": ") + strerror(errno));
    return false;
  }
  return true;
}

bool ReadAll(const TlsFiles& files, std::string* cert, std::string* key, std::string* ca, std::string* error) {
  return ReadFile(files.cert, "--tls-cert", cert, error) && ReadFile(files.key, "--tls-key", key, error) &&
         ReadFile(files.ca, "--tls-ca", ca, error);
}

}  // namespace

void FillFromEnvironment(TlsFiles* files) {
  const auto fill = [](std::string* value, const char* name) {
    const char* const text = getenv(name);
    if (value->empty() && text) *value = text;
  };
  fill(&files->cert, "CUDA_REMOTE_TLS_CERT");
  fill(&files->key, "CUDA_REMOTE_TLS_KEY");
  fill(&files->ca, "CUDA_REMOTE_TLS_CA");
}

std::shared_ptr<grpc::ServerCredentials> ServerTls(const TlsFiles& files, std::string* error) {
  std::string cert, key, ca;
  if (!ReadAll(files, &cert, &key, &ca, error)) return nullptr;
  grpc::SslServerCredentialsOptions options(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = ca;
  options.pem_key_cert_pairs.push_back({key, cert});
  return grpc::SslServerCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> ClientTls(const TlsFiles& files, std::string* error) {
  if (files.empty()) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions options;
  if (!ReadAll(files, &options.pem_cert_chain, &options.pem_private_key, &options.pem_root_certs, error))
    return nullptr;
  return grpc::SslCredentials(options);
}

std::string ControlTarget(const std::string& address, bool* local) {
  static constexpr char kUnix[] = "unix:";
  *local = address.compare(0, sizeof(kUnix) - 1, kUnix) == 0 || (!address.empty() && address[0] == '/');
  if (!*local) return address;
  std::string path = address[0] == '/' ? address : address.substr(sizeof(kUnix) - 1);
  struct stat status;
  if (stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) return kUnix + path + "/control.sock";
  const size_t slash = path.rfind('/');
  const std::string leaf = slash == std::string::npos ? path : path.substr(slash + 1);
  if (leaf == "session.sock") path.replace(path.size() - leaf.size(), leaf.size(), "control.sock");
  return kUnix + path;
}

grpc::ChannelArguments ClientArguments() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepAliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepAliveTimeoutMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kLookaheadBytes);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, 1 << 20);
  // Each relay session is a connection of its own: several share neither a window nor a processor.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  // A server is named by its address; there is nothing to look up elsewhere.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return arguments;
}

void SetServerArguments(grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepAliveMs);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepAliveTimeoutMs);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kKeepAliveMs / 2);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kLookaheadBytes);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, 1 << 20);
  // Two servers on one port would each get some of the clients.
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
}

}  // namespace cuda_remote::control
