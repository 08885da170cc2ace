// SPDX-License-Identifier: Apache-2.0
#include "server/supervisor/init_tls.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <openssl/bio.h>
#include <openssl/ec.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/errors/absl_status.h"
#include "proto/folder/private_folder.h"

namespace cuda_remote::server {
namespace {

constexpr int kSerialBytes = 16;
constexpr int kDaySeconds = 24 * 3600;
// Clocks differ a little.
constexpr int kEarlierSeconds = 3600;

template <typename T, void (*free_it)(T*)>
struct Free {
  void operator()(T* object) const { free_it(object); }
};
void FreeBio(BIO* bio) { BIO_free(bio); }
void FreeNumber(BIGNUM* number) { BN_free(number); }
using Bio = std::unique_ptr<BIO, Free<BIO, FreeBio>>;
using Certificate = std::unique_ptr<X509, Free<X509, X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Free<EVP_PKEY, EVP_PKEY_free>>;
using Number = std::unique_ptr<BIGNUM, Free<BIGNUM, FreeNumber>>;

struct Pair {
  Certificate certificate;
  Key key;
};

enum class Purpose { kAuthority, kServer, kClient };

absl::Status SslError(const std::string& doing) {
  char text[256] = "OpenSSL does not say why";
  if (const unsigned long code = ERR_get_error(); code != 0) ERR_error_string_n(code, text, sizeof(text));
  ERR_clear_error();
  return absl::InternalError("cannot " + doing + ": " + text);
}

bool IsAddress(const std::string& name) {
  unsigned char bytes[16];
  return inet_pton(AF_INET, name.c_str(), bytes) == 1 || inet_pton(AF_INET6, name.c_str(), bytes) == 1;
}

// What may stand in a subject, a file's name and an extension's text without being anything else.
bool IsPlainName(const std::string& name) {
  static constexpr char kAllowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.@";
  return !name.empty() && name.size() <= 64 && name[0] != '.' && name[0] != '-' &&
         name.find_first_not_of(kAllowed) == std::string::npos;
}

bool AddExtension(X509* certificate, X509* issuer, int kind, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, &context, kind, value.c_str());
  if (!extension) return false;
  const bool added = X509_add_ext(certificate, extension, -1) == 1;
  X509_EXTENSION_free(extension);
  return added;
}

bool AddExtensions(X509* certificate, X509* issuer, Purpose purpose, const std::vector<std::string>& names) {
  const bool authority = purpose == Purpose::kAuthority;
  bool ok =
      AddExtension(certificate, issuer, NID_basic_constraints, authority ? "critical,CA:TRUE" : "critical,CA:FALSE") &&
      AddExtension(certificate, issuer, NID_key_usage,
                   authority ? "critical,keyCertSign,cRLSign" : "critical,digitalSignature") &&
      AddExtension(certificate, issuer, NID_subject_key_identifier, "hash") &&
      AddExtension(certificate, issuer, NID_authority_key_identifier, "keyid");
  // A client's certificate must not pass for a server's.
  if (!authority)
    ok = ok && AddExtension(certificate, issuer, NID_ext_key_usage,
                            purpose == Purpose::kServer ? "serverAuth" : "clientAuth");
  std::string alternatives;
  for (const std::string& name : names)
    alternatives += (alternatives.empty() ? "" : ",") + std::string(IsAddress(name) ? "IP:" : "DNS:") + name;
  return ok && (alternatives.empty() || AddExtension(certificate, issuer, NID_subject_alt_name, alternatives));
}

// `issuer` null: signs itself.
absl::StatusOr<Pair> Make(const std::string& common_name, Purpose purpose, const std::vector<std::string>& names,
                          int days, const Pair* issuer) {
  Pair made;
  made.key.reset(EVP_EC_gen("P-256"));
  made.certificate.reset(X509_new());
  X509* const certificate = made.certificate.get();
  unsigned char serial[kSerialBytes];
  if (!made.key || !certificate || RAND_bytes(serial, sizeof(serial)) != 1) return SslError("make a key");
  serial[0] &= 0x7f;
  const Number number(BN_bin2bn(serial, sizeof(serial), nullptr));
  X509_NAME* const subject = X509_get_subject_name(certificate);
  X509* const signer = issuer ? issuer->certificate.get() : certificate;
  const bool ok =
      number && BN_to_ASN1_INTEGER(number.get(), X509_get_serialNumber(certificate)) &&
      X509_set_version(certificate, X509_VERSION_3) == 1 &&
      X509_gmtime_adj(X509_getm_notBefore(certificate), -kEarlierSeconds) &&
      X509_time_adj_ex(X509_getm_notAfter(certificate), days, 0, nullptr) &&
      X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_UTF8,
                                 reinterpret_cast<const unsigned char*>(common_name.c_str()), -1, -1, 0) == 1 &&
      X509_set_issuer_name(certificate, X509_get_subject_name(signer)) == 1 &&
      X509_set_pubkey(certificate, made.key.get()) == 1 && AddExtensions(certificate, signer, purpose, names) &&
      X509_sign(certificate, issuer ? issuer->key.get() : made.key.get(), EVP_sha256()) > 0;
  if (!ok) return SslError("make the certificate of " + common_name);
  return made;
}

// Under its name only when it is whole.
absl::Status WriteFile(const std::string& path, mode_t mode, const std::string& bytes) {
  const std::string fresh = path + ".new";
  unlink(fresh.c_str());
  const int fd = open(fresh.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, mode);
  bool ok = fd >= 0 && write(fd, bytes.data(), bytes.size()) == ssize_t(bytes.size()) && fsync(fd) == 0;
  if (fd >= 0) close(fd);
  ok = ok && rename(fresh.c_str(), path.c_str()) == 0;
  if (ok) return absl::OkStatus();
  const absl::Status failed = ErrnoStatus("cannot write " + path);
  unlink(fresh.c_str());
  return failed;
}

std::string Contents(BIO* bio) {
  char* bytes = nullptr;
  const long size = BIO_get_mem_data(bio, &bytes);
  return std::string(bytes, size_t(std::max(size, 0L)));
}

absl::Status Save(const Pair& pair, const std::string& path) {
  const Bio key(BIO_new(BIO_s_mem())), certificate(BIO_new(BIO_s_mem()));
  if (PEM_write_bio_PrivateKey(key.get(), pair.key.get(), nullptr, nullptr, 0, nullptr, nullptr) != 1 ||
      PEM_write_bio_X509(certificate.get(), pair.certificate.get()) != 1) {
    return SslError("write " + path);
  }
  // The key first: a certificate without its key would be kept the next time.
  CR_RETURN_IF_ERROR(WriteFile(path + ".key", 0600, Contents(key.get())));
  return WriteFile(path + ".pem", 0644, Contents(certificate.get()));
}

bool Exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

// Fails if something is there that is not a certificate with its key.
absl::StatusOr<Pair> Load(const std::string& path) {
  Pair pair;
  const Bio certificate(BIO_new_file((path + ".pem").c_str(), "r")), key(BIO_new_file((path + ".key").c_str(), "r"));
  if (certificate) pair.certificate.reset(PEM_read_bio_X509(certificate.get(), nullptr, nullptr, nullptr));
  if (key) pair.key.reset(PEM_read_bio_PrivateKey(key.get(), nullptr, nullptr, nullptr));
  ERR_clear_error();
  if (pair.certificate && pair.key && X509_check_private_key(pair.certificate.get(), pair.key.get()) == 1) return pair;
  ERR_clear_error();
  return absl::FailedPreconditionError(path + ".pem and " + path +
                                       ".key are no certificate with its key; remove both to have new ones");
}

MadeCertificate Describe(const std::string& path, X509* certificate, bool made) {
  MadeCertificate facts;
  facts.path = path + ".pem";
  facts.made = made;
  const Bio subject(BIO_new(BIO_s_mem()));
  X509_NAME_print_ex(subject.get(), X509_get_subject_name(certificate), 0, XN_FLAG_RFC2253);
  facts.subject = Contents(subject.get());
  tm end{};
  char text[32] = "?";
  if (ASN1_TIME_to_tm(X509_get0_notAfter(certificate), &end) == 1) {
    strftime(text, sizeof(text), "%Y-%m-%d", &end);
    facts.days_left = int((timegm(&end) - UnixMs() / 1000) / kDaySeconds);
  }
  facts.expires = text;
  return facts;
}

// Whether the server may be reached by this name.
bool IsFor(X509* certificate, const std::string& name) {
  return (IsAddress(name) ? X509_check_ip_asc(certificate, name.c_str(), 0)
                          : X509_check_host(certificate, name.c_str(), name.size(), 0, nullptr)) == 1;
}

// Loads what is at `path`, or makes it, and adds it to `certificates`.
absl::StatusOr<Pair> MakeUnlessThere(const std::string& path, const std::string& common_name, Purpose purpose,
                                     const TlsPlan& plan, const Pair* issuer,
                                     std::vector<MadeCertificate>* certificates) {
  const bool there = Exists(path + ".pem") || Exists(path + ".key");
  Pair pair;
  if (there) {
    CR_ASSIGN_OR_RETURN(pair, Load(path));
  }
  bool make = !there;
  const bool authority = purpose == Purpose::kAuthority;
  const std::vector<std::string> names = purpose == Purpose::kServer ? plan.names : std::vector<std::string>();
  if (there && issuer) {
    make = Describe(path, pair.certificate.get(), false).days_left < kRenewDays ||
           !std::all_of(names.begin(), names.end(),
                        [&](const std::string& name) { return IsFor(pair.certificate.get(), name); });
  }
  if (make) {
    CR_ASSIGN_OR_RETURN(pair, Make(common_name, purpose, names, authority ? kAuthorityDays : plan.days, issuer));
    CR_RETURN_IF_ERROR(Save(pair, path));
  }
  if (!make && issuer && X509_verify(pair.certificate.get(), X509_get0_pubkey(issuer->certificate.get())) != 1) {
    ERR_clear_error();
    return absl::FailedPreconditionError(path + ".pem was not signed by " + plan.directory +
                                         "/ca.pem; remove it and its key to have new ones");
  }
  certificates->push_back(Describe(path, pair.certificate.get(), make));
  return pair;
}

}  // namespace

std::vector<std::string> OwnNames() {
  std::vector<std::string> names;
  char host[256] = "";
  if (gethostname(host, sizeof(host) - 1) == 0 && IsPlainName(host)) names.push_back(host);
  addrinfo hints{}, *found = nullptr;
  hints.ai_flags = AI_CANONNAME;
  if (!names.empty() && getaddrinfo(host, nullptr, &hints, &found) == 0) {
    if (found->ai_canonname && IsPlainName(found->ai_canonname) && names[0] != found->ai_canonname)
      names.push_back(found->ai_canonname);
    freeaddrinfo(found);
  }
  for (const char* name : {"localhost", "127.0.0.1", "::1"}) names.push_back(name);
  return names;
}

absl::StatusOr<std::vector<MadeCertificate>> InitTls(const TlsPlan& plan) {
  for (const std::string& name : plan.names) {
    if (IsPlainName(name) || IsAddress(name)) continue;
    return absl::InvalidArgumentError("\"" + name + "\" is neither a host name nor an address");
  }
  for (const std::string& client : plan.clients) {
    if (IsPlainName(client) && client != "ca" && client != "server") continue;
    return absl::InvalidArgumentError(
        "\"" + client + "\" cannot be a client's name: letters, digits, and - _ . @ within it; not ca, not server");
  }
  CR_RETURN_IF_ERROR(ToAbsl(CheckFolder(plan.directory, FolderUse::kMake)));
  const std::string host = plan.names.empty() ? "server" : plan.names[0];
  std::vector<MadeCertificate> certificates;
  CR_ASSIGN_OR_RETURN(const Pair authority, MakeUnlessThere(plan.directory + "/ca", "cuda-remote " + host,
                                                            Purpose::kAuthority, plan, nullptr, &certificates));
  const auto make = [&](const std::string& name, const std::string& common_name, Purpose purpose) {
    return MakeUnlessThere(plan.directory + "/" + name, common_name, purpose, plan, &authority, &certificates).status();
  };
  CR_RETURN_IF_ERROR(make("server", host, Purpose::kServer));
  for (const std::string& client : plan.clients) CR_RETURN_IF_ERROR(make(client, client, Purpose::kClient));
  return certificates;
}

}  // namespace cuda_remote::server
