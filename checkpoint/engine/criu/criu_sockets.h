// SPDX-License-Identifier: Apache-2.0
// The part of the library in CRIU that looks at the job's sockets and terminals while the job is saved, and protects
// its TCP connections while it is restored. With nothing but the C library. CRIU has one thread.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CRIU_SOCKETS_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CRIU_SOCKETS_H_

#include <stddef.h>
#include <sys/socket.h>
#include <sys/types.h>

namespace cuda_remote::checkpoint {

// Notes the options and memberships of a socket of the job's, once for each. False, and errno, if that cannot be
// written.
bool NoteSocket(int fd);

// Whether `fd` is a terminal that CRIU is about to read empty, to write all back afterwards, and that would change what
// the job finds. Then it is noted, and CRIU is to find nothing.
bool HoldsBackTerminal(int fd);

// As recvmsg. Where CRIU looks at the queue of a Unix socket, it finds empty datagrams as kEmptyDatagram, and files
// that it cannot save are noted.
ssize_t ReceiveForCriu(int fd, msghdr* message, int flags);

// Gives a socket that is about to become a restored TCP connection the filter kNoReset. One that had a filter when it
// was saved gets that back from CRIU, in place of this one.
void KeepResetsOut(int fd);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CRIU_SOCKETS_H_
