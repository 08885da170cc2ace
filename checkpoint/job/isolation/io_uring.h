// SPDX-License-Identifier: Apache-2.0
// Keeps a program from making an io_uring, which no snapshot engine can save. Programs that use one where the kernel
// has it (libuv, and with it PyTorch's TCPStore) then do as on a kernel without.
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_IO_URING_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_IO_URING_H_

namespace cuda_remote::checkpoint {

// From here on io_uring_setup fails with ENOSYS for the calling process and all that it starts, by a seccomp filter.
// Programs with the setuid bit work on: no_new_privs is not set, so the caller needs CAP_SYS_ADMIN. False with errno if
// the kernel does not take the filter; nothing has changed then. Only makes system calls, so it may follow a fork.
bool WithholdIoUring();

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_IO_URING_H_
