// SPDX-License-Identifier: Apache-2.0
// Who asks cr-hostd, and what is around that process: a job that cr-hostd starts for it must not have more than it has.
//
// Functions return false and one sentence in *error.
#ifndef CUDA_REMOTE_HOST_PEER_H_
#define CUDA_REMOTE_HOST_PEER_H_

#include <sys/types.h>

#include <string>
#include <vector>

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
// cr-hostd's would not have; and one that has more than one user's rights.
bool FindPeer(int socket, Peer* peer, std::string* error);

// In a child that is to work for the peer, still as root: goes to its control groups, and takes on its resource limits
// (of a job), processors, niceness and no-new-privileges.
bool JoinPeer(const Peer& peer, bool limits, std::string* error);

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_PEER_H_
