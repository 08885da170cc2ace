// SPDX-License-Identifier: Apache-2.0
#include "proto/control/credentials.h"

#include <ctype.h>
#include <fcntl.h>
#include <grpc/support/log.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/base/status_macros.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::control {
namespace {

constexpr int kMaxMessageBytes = 8 << 20;
constexpr int kKeepAliveMs = 10000;
constexpr int kKeepAliveTimeoutMs = 10000;
// How much of a stream may be under way; large enough for a fast network with some distance.
constexpr int kLookaheadBytes = 8 << 20;

// How often gRPC looks whether a server's certificates are new.
constexpr unsigned kRefreshSeconds = 1;
// A connection that has not finished its handshakes by then is closed; likewise one that carries no call for so long.
constexpr int kHandshakeTimeoutMs = 10000;
constexpr int kIdleConnectionMs = 60000;
// Calls of one connection at a time; a relay's session needs one or two.
constexpr int kMostStreams = 16;
constexpr size_t kMaxPemBytes = 4 << 20;
constexpr size_t kMaxTokenBytes = 512;

template <typename T, void (*free_it)(T*)>
struct Free {
  void operator()(T* object) const { free_it(object); }
};
void FreeBio(BIO* bio) { BIO_free(bio); }
using Bio = std::unique_ptr<BIO, Free<BIO, FreeBio>>;
using Certificate = std::unique_ptr<X509, Free<X509, X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Free<EVP_PKEY, EVP_PKEY_free>>;

absl::StatusOr<std::string> ReadFile(const std::string& path, const char* option) {
  if (path.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("TLS needs a certificate, its key and an authority; ", option,
                                                   " is missing (cr-server --init-tls makes all three)"));
  }
  const std::string what = path + " (" + option + ")";
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.ok()) return ErrnoStatus("cannot read " + what);
  std::string text;
  char piece[16 << 10];
  ssize_t n;
  while ((n = read(fd.get(), piece, sizeof(piece))) > 0 && text.size() <= kMaxPemBytes) text.append(piece, size_t(n));
  if (n < 0) return ErrnoStatus("cannot read " + what);
  if (text.find("-----BEGIN") == std::string::npos) return absl::InvalidArgumentError(what + " is no PEM file");
  if (text.size() > kMaxPemBytes) return absl::InvalidArgumentError(what + " is far too long for a PEM file");
  return text;
}

Bio Memory(const std::string& pem) { return Bio(BIO_new_mem_buf(pem.data(), int(pem.size()))); }

// The first certificate; null if there is none. *count: how many the file has; -1 if one of them is broken.
Certificate ReadCertificates(const std::string& pem, int* count) {
  const Bio bio = Memory(pem);
  Certificate first;
  *count = 0;
  ERR_clear_error();
  while (X509* const next = PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)) {
    Certificate owned(next);
    if (++*count == 1) first = std::move(owned);
  }
  // The end of the file shows as the lack of a further beginning.
  if (ERR_GET_REASON(ERR_peek_last_error()) != PEM_R_NO_START_LINE) *count = -1;
  ERR_clear_error();
  return first;
}

absl::Status CheckAuthority(const TlsFiles& files, const std::string& pem) {
  int count;
  if (ReadCertificates(pem, &count) && count >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(files.ca + " (--tls-ca) holds no intact certificate of an authority");
}

absl::StatusOr<TlsContents> ReadAuthority(const TlsFiles& files) {
  if (files.ca.empty()) {
    return absl::InvalidArgumentError(
        "a token is only sent with TLS: --tls-ca (CUDA_REMOTE_TLS_CA), which checks the server, is missing");
  }
  TlsContents contents;
  CR_ASSIGN_OR_RETURN(contents.ca, ReadFile(files.ca, "--tls-ca"));
  CR_RETURN_IF_ERROR(CheckAuthority(files, contents.ca));
  return contents;
}

// A token goes into a header as it is.
absl::StatusOr<std::string> ReadToken(const std::string& path) {
  const std::string what = path + " (CUDA_REMOTE_TOKEN_FILE)";
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat facts;
  char bytes[kMaxTokenBytes + 1];
  const ssize_t count = fd.ok() && fstat(fd.get(), &facts) == 0 ? read(fd.get(), bytes, sizeof(bytes)) : -1;
  if (count < 0) return ErrnoStatus("cannot read " + what);
  if ((facts.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    return absl::PermissionDeniedError(what + " is open to other users; chmod 600 closes it");
  }
  std::string token(bytes, size_t(count));
  while (!token.empty() && isspace(static_cast<unsigned char>(token.back()))) token.pop_back();
  const bool plain = std::all_of(token.begin(), token.end(), [](unsigned char c) { return c > ' ' && c < 0x7f; });
  if (plain && !token.empty() && token.size() <= kMaxTokenBytes) return token;
  return absl::InvalidArgumentError(what + " does not hold one token, as cr-server --new-token prints it");
}

// An encrypted key is not asked for its password.
int NoPassword(char*, int, int, void*) { return -1; }

// That the key is the certificate's, and the certificate valid now.
absl::Status CheckPair(const TlsFiles& files, const TlsContents& contents, const X509* cert) {
  const Bio bio = Memory(contents.key);
  const Key key(PEM_read_bio_PrivateKey(bio.get(), nullptr, NoPassword, nullptr));
  if (!key) {
    const bool encrypted = contents.key.find("ENCRYPTED") != std::string::npos;
    return absl::InvalidArgumentError(
        absl::StrCat(files.key, " (--tls-key) holds no intact private key",
                     encrypted ? ": it is protected with a password; use a key without one" : ""));
  }
  if (X509_check_private_key(cert, key.get()) != 1) {
    return absl::InvalidArgumentError("the key in " + files.key + " (--tls-key) is not that of the certificate in " +
                                      files.cert + " (--tls-cert)");
  }
  const std::string what = "the certificate in " + files.cert + " (--tls-cert)";
  if (X509_cmp_current_time(X509_get0_notAfter(cert)) < 0) {
    return absl::FailedPreconditionError(what + " has expired");
  }
  if (X509_cmp_current_time(X509_get0_notBefore(cert)) > 0) {
    return absl::FailedPreconditionError(what + " is not valid yet; is this machine's clock right?");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TlsContents> ReadTls(const TlsFiles& files) {
  TlsContents contents;
  CR_ASSIGN_OR_RETURN(contents.cert, ReadFile(files.cert, "--tls-cert"));
  CR_ASSIGN_OR_RETURN(contents.key, ReadFile(files.key, "--tls-key"));
  CR_ASSIGN_OR_RETURN(contents.ca, ReadFile(files.ca, "--tls-ca"));
  int count;
  const Certificate cert = ReadCertificates(contents.cert, &count);
  if (!cert || count < 0) {
    return absl::InvalidArgumentError(files.cert + " (--tls-cert) holds no intact certificate");
  }
  CR_RETURN_IF_ERROR(CheckAuthority(files, contents.ca));
  const absl::Status pair = CheckPair(files, contents, cert.get());
  ERR_clear_error();
  CR_RETURN_IF_ERROR(pair);
  return contents;
}

void FillFromEnvironment(TlsFiles* files) {
  const auto fill = [](std::string* value, const char* name) {
    const char* const text = getenv(name);
    if (value->empty() && text) *value = text;
  };
  fill(&files->cert, "CUDA_REMOTE_TLS_CERT");
  fill(&files->key, "CUDA_REMOTE_TLS_KEY");
  fill(&files->ca, "CUDA_REMOTE_TLS_CA");
  fill(&files->token, "CUDA_REMOTE_TOKEN_FILE");
}

absl::StatusOr<std::unique_ptr<ServerTls>> ServerTls::Create(const TlsFiles& files) {
  std::unique_ptr<ServerTls> tls(new ServerTls);
  for (UniqueFd& fd : tls->fds_) {
    fd.Reset(memfd_create("cuda-remote-tls", MFD_CLOEXEC));
    if (!fd.ok()) return ErrnoStatus("no memory for certificates");
  }
  CR_RETURN_IF_ERROR(tls->Reload(files));
  return tls;
}

std::shared_ptr<grpc::ServerCredentials> ServerTls::Credentials(bool tokens) const {
  std::string paths[3];
  for (int i = 0; i < 3; ++i) paths[i] = "/proc/self/fd/" + std::to_string(fds_[i].get());
  grpc::experimental::TlsServerCredentialsOptions options(
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(paths[1], paths[0], paths[2],
                                                                           kRefreshSeconds));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(tokens ? GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_AND_VERIFY
                                       : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  return grpc::experimental::TlsServerCredentials(options);
}

absl::Status ServerTls::Reload(const TlsFiles& files) {
  CR_ASSIGN_OR_RETURN(const TlsContents contents, ReadTls(files));
  const std::string* const texts[3] = {&contents.cert, &contents.key, &contents.ca};
  for (int i = 0; i < 3; ++i) {
    if (pwrite(fds_[i].get(), texts[i]->data(), texts[i]->size(), 0) != ssize_t(texts[i]->size()) ||
        ftruncate(fds_[i].get(), off_t(texts[i]->size())) != 0) {
      return ErrnoStatus("no memory for certificates");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> ClientTls(const TlsFiles& files) {
  if (files.empty()) return grpc::InsecureChannelCredentials();
  const bool token_only = !files.token.empty() && files.cert.empty() && files.key.empty();
  CR_ASSIGN_OR_RETURN(const TlsContents contents, token_only ? ReadAuthority(files) : ReadTls(files));
  grpc::SslCredentialsOptions options;
  options.pem_cert_chain = contents.cert;
  options.pem_private_key = contents.key;
  options.pem_root_certs = contents.ca;
  if (files.token.empty()) return grpc::SslCredentials(options);
  CR_ASSIGN_OR_RETURN(const std::string token, ReadToken(files.token));
  return grpc::CompositeChannelCredentials(grpc::SslCredentials(options), grpc::AccessTokenCredentials(token));
}

namespace {

void (*g_log)(bool error, const char* line) = nullptr;

void GrpcLog(gpr_log_func_args* args) {
  std::string line = args->message;
  for (char& c : line) {
    if (uint8_t(c) < ' ') c = ' ';
  }
  g_log(args->severity == GPR_LOG_SEVERITY_ERROR, line.c_str());
}

}  // namespace

void SendGrpcLogTo(void (*log)(bool error, const char* line)) {
  g_log = log;
  gpr_set_log_function(GrpcLog);
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
  builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeTimeoutMs);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleConnectionMs);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMostStreams);
}

}  // namespace cuda_remote::control
