// SPDX-License-Identifier: Apache-2.0
#include "server/supervisor/identity.h"

#include <grpc/grpc_security_constants.h>
#include <pwd.h>
#include <unistd.h>

#include <vector>

#include "absl/status/status.h"
#include "proto/codec/text.h"
#include "proto/control/address_list.h"

namespace cuda_remote::server {
namespace {

constexpr char kUser[] = "uid:";
constexpr char kCertificate[] = "cert:";
constexpr char kAddress[] = "address:";
constexpr char kToken[] = "token:";
// As gRPC's clients write an access token.
constexpr char kBearer[] = "Bearer ";

bool TakePrefix(std::string_view* text, std::string_view prefix) {
  if (text->substr(0, prefix.size()) != prefix) return false;
  text->remove_prefix(prefix.size());
  return true;
}

}  // namespace

std::string UserIdentity(uint32_t uid) { return kUser + std::to_string(uid); }
std::string TokenIdentity(const std::string& name) { return kToken + name; }

Peer PeerOf(const grpc::ServerContext& context, bool tls) {
  Peer peer;
  const std::string name = context.peer();
  if (name.compare(0, 5, "unix:") == 0) {
    peer.local = true;
    peer.identity = UserIdentity(geteuid());
    return peer;
  }
  const bool known = control::ReadPeer(name, &peer.address, &peer.port);
  const std::shared_ptr<const grpc::AuthContext> facts = context.auth_context();
  if (facts && facts->IsPeerAuthenticated()) {
    const std::vector<grpc::string_ref> subjects = facts->FindPropertyValues(GRPC_X509_SUBJECT_PROPERTY_NAME);
    if (subjects.size() != 1 || subjects[0].empty()) return peer;
    const std::string subject(subjects[0].data(), subjects[0].size());
    // It is compared and logged as it is, so it must be what it looks like. RFC 2253's form escapes everything else.
    if (Printable(subject) == subject) peer.identity = kCertificate + subject;
    return peer;
  }
  if (tls) {
    const auto shown = context.client_metadata().find("authorization");
    if (shown == context.client_metadata().end()) return peer;
    std::string_view text(shown->second.data(), shown->second.size());
    if (TakePrefix(&text, kBearer)) peer.token.assign(text);
    return peer;
  }
  peer.unprotected = true;
  if (known) peer.identity = kAddress + control::IpAddressText(peer.address);
  return peer;
}

absl::StatusOr<std::string> ParseIdentity(std::string_view text) {
  const std::string quoted = "\"" + std::string(text) + "\"";
  std::string_view rest = text;
  if (TakePrefix(&rest, kUser)) {
    if (!rest.empty() && rest.size() < 10 && rest.find_first_not_of("0123456789") == std::string_view::npos)
      return UserIdentity(uint32_t(std::stoul(std::string(rest))));
    const passwd* const user = getpwnam(std::string(rest).c_str());
    if (!user) return absl::NotFoundError(quoted + " names no user of this machine");
    return UserIdentity(user->pw_uid);
  }
  if (TakePrefix(&rest, kAddress)) {
    control::IpAddress address;
    if (!control::ParseIpAddress(rest, &address))
      return absl::InvalidArgumentError(quoted + " has no IP address behind its colon");
    return kAddress + control::IpAddressText(address);
  }
  if (TakePrefix(&rest, kToken)) {
    if (rest.empty()) return absl::InvalidArgumentError(quoted + " has no name behind its colon");
    return TokenIdentity(std::string(rest));
  }
  TakePrefix(&rest, kCertificate);
  if (rest.find('=') != std::string_view::npos) return kCertificate + std::string(rest);
  return absl::InvalidArgumentError(
      quoted +
      " is not an identity: write uid:USER, token:NAME, address:IP, or a certificate's subject such as "
      "CN=alice,O=lab (openssl x509 -noout -subject -nameopt RFC2253)");
}

}  // namespace cuda_remote::server
