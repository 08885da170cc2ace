// SPDX-License-Identifier: Apache-2.0
// Who asks cr-hostd, and what is around that process: a job that cr-hostd starts for it must not have more than it has.
#ifndef CUDA_REMOTE_HOST_PEER_H_
#define CUDA_REMOTE_HOST_PEER_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/job/account.h"

namespace cuda_remote::host {

struct Peer {
  pid_t pid = 0;
  int pidfd = -1;
  // With the groups that it had when it connected: the kernel says so, not the user database.
  checkpoint::Account account;
  bool no_new_privileges = false;
};

// The process at the other end of `socket`. Refuses one that is somewhere else than cr-hostd (another mount, PID,
// network or user namespace, a chroot), where names mean other things; one with a seccomp filter, which a process of
// cr-hostd's would not have; and one that has more than one user's rights. *peer then has what is known of it.
absl::Status FindPeer(int socket, Peer* peer);

// In a child that is to work for the peer, still as root: goes to its control groups, and takes on its resource limits
// (of a job), processors, niceness and no-new-privileges.
absl::Status JoinPeer(const Peer& peer, bool limits);

// Likewise for a job of this user's that comes from another host, for which no process asks here: goes to the control
// group `path`, in which %u is the user's number, wherever there is one of that name; in version 2 to a leaf below it.
// Empty: the user's slice of systemd's, if there is one; else it stays where it is.
absl::Status JoinUserControlGroup(const checkpoint::Account& account, const std::string& path);

// Fails if a rule of cr-hostd --operator, USER or @GROUP, names or numbers, means nobody.
absl::Status CheckOperatorRule(const std::string& rule);
// Whether one of these rules means the user, or a group that the process has which asks.
bool IsOperator(const std::vector<std::string>& rules, const checkpoint::Account& account);

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_PEER_H_
