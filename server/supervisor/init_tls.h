// SPDX-License-Identifier: Apache-2.0
// cr-server --init-tls: an authority of one's own, and what it signs for the server and its clients.
//
//     DIR/ca.pem, ca.key            the authority; the key signs, and is needed nowhere else
//     DIR/server.pem, server.key    for cr-server
//     DIR/NAME.pem, NAME.key        for a client; its sessions belong to cert:CN=NAME
//
// What is there already stays, but for a certificate that ends within kRenewDays or lacks one of the server's names:
// that one is made anew, with its key. The authority always stays.
// Keys are EC P-256. Not thread-safe.
#ifndef CUDA_REMOTE_SERVER_SUPERVISOR_INIT_TLS_H_
#define CUDA_REMOTE_SERVER_SUPERVISOR_INIT_TLS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace cuda_remote::server {

inline constexpr int kAuthorityDays = 3650;
inline constexpr int kRenewDays = 30;

struct TlsPlan {
  std::string directory;             // made with mode 0700 if it is not there
  std::vector<std::string> names;    // by which clients reach the server: host names, addresses
  std::vector<std::string> clients;  // names of client certificates
  int days = 365;                    // how long certificates are valid
};

struct MadeCertificate {
  std::string path;
  std::string subject;  // as identities are written: CN=alice
  std::string expires;  // "2027-11-22", UTC
  int days_left = 0;
  bool made = false;  // else it was there
};

// The names that a server on this machine has: its host name, also with the domain, and the loopback interface's.
std::vector<std::string> OwnNames();

// Makes what is missing, and gives all that is there then. After a failure nothing is left half written.
absl::StatusOr<std::vector<MadeCertificate>> InitTls(const TlsPlan& plan);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_SUPERVISOR_INIT_TLS_H_
