// SPDX-License-Identifier: Apache-2.0
// What cr-server and its workers give up before they do anything: capabilities, new privileges, system calls that none
// of them needs, and, for sessions of others, the user.
//
// A worker computes for a client that is treated as hostile, in one address space with a driver that parses what the
// client sends. Should it fall, it must not be a way to more than its own session:
//   - no capabilities, none to be had again (bounding set, no_new_privs), whoever the user is;
//   - no system calls that trace, read or signal other processes, mount, load modules or BPF programs, make namespaces,
//     or have had many holes (io_uring, userfaultfd, keyrings); what the kernel gets in future does not exist for it;
//   - no sockets but Unix sockets, so no network: a remote session's bytes come from cr-server.
// It is a list of what is forbidden and not of what is allowed: drivers use what they like of the rest, and another one
// with each release. Forbidden calls fail with EPERM, unknown ones with ENOSYS.
//
// Thread-safe: no state.
#ifndef CUDA_REMOTE_SERVER_SUPERVISOR_RESTRICT_H_
#define CUDA_REMOTE_SERVER_SUPERVISOR_RESTRICT_H_

#include <linux/filter.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace cuda_remote::server {

// A user to run as, looked up ahead of time.
struct Account {
  std::string name;
  uid_t uid = 0;
  gid_t gid = 0;
  std::vector<gid_t> groups;
};
// A user's name or number. Fails if there is none.
absl::StatusOr<Account> FindAccount(const std::string& name);

// The calls that are forbidden, as a program for the kernel. `network`: Internet sockets are allowed, and signals to
// other processes, as cr-server needs them.
std::vector<sock_filter> ForbiddenCalls(bool network);

struct Restrictions {
  std::vector<sock_filter> calls;  // empty: all are allowed
  std::optional<Account> account;  // empty: stays as it is
  bool drop_capabilities = true;
};

// Between fork and exec, or before the first thread: gives all of it up. Only system calls, no allocation. Returns 0,
// or errno and in *what which step failed: then the program must not start.
int GiveUp(const Restrictions& restrictions, const char** what);

// For cr-server itself, before its first thread: keeps the capabilities that it needs for its workers and its ports.
absl::Status RestrictServer();

// Makes the device files that the driver wants, as the driver would by itself if it had the privileges; workers have
// none. Where there is nothing to make, nothing happens.
void MakeDeviceFiles();

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_SUPERVISOR_RESTRICT_H_
