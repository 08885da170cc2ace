// SPDX-License-Identifier: Apache-2.0
// Keeps a program from making MPTCP sockets, which no snapshot engine can save. Programs that ask for one where the
// kernel has it (Go's servers do by default) then use TCP, as on a kernel without.
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_MPTCP_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_MPTCP_H_

namespace cuda_remote::checkpoint {

// From here on socket() fails with EPROTONOSUPPORT for IPPROTO_MPTCP, for the calling process and all that it starts,
// by a seccomp filter. The rest is as with WithholdIoUring (io_uring.h).
bool WithholdMptcp();

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_MPTCP_H_
