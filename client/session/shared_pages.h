// SPDX-License-Identifier: Apache-2.0
// The application's own pages, shared with a GPU server on the same machine.
//
// cuMemHostRegister gives kernels access to memory that the application already has. For host and kernels to see each
// other's writes without a CUDA call, as natively, the server must map the very same pages. A mapping of a file (shared
// memory, a memfd) is shared by its descriptor. Private anonymous pages have none, so MovePages puts their contents
// into a file and maps that in their place, at the same address.
//
// Threads of the application may write to those pages at any moment; also to what else lies on the first and the last
// of them. While the contents are copied, the kernel stops every write to them (userfaultfd in write-protect mode, also
// for writes by system calls), so none is lost. Where the process may not use userfaultfd in this way, pages stay where
// they are, and the caller mirrors them instead (client/session/managed_mirror.h).
//
// A direct read from a device (O_DIRECT, io_uring's fixed buffers) that is on its way into the pages while they move is
// not stopped: the kernel has looked up its pages already.
#ifndef CUDA_REMOTE_CLIENT_SESSION_SHARED_PAGES_H_
#define CUDA_REMOTE_CLIENT_SESSION_SHARED_PAGES_H_

#include <cstddef>
#include <cstdint>

#include "proto/base/unique_fd.h"

namespace cuda_remote::client {

// What is behind a piece of the address space.
struct PageBacking {
  enum Kind {
    kOther,    // anything else, or several kinds: it cannot be shared
    kPrivate,  // private anonymous memory, readable and writable, that is no stack
    kFile,     // one file, mapped shared, readable and writable, in one piece
  };
  Kind kind = kOther;
  // kFile: the file, and where in it `start` is.
  UniqueFd fd;
  uint64_t offset = 0;
};

// Looks up what is behind the `bytes` (whole pages) at `start`. `except`: a file that does not count as one, -1 for
// none. Any thread.
PageBacking FindBacking(uint64_t start, uint64_t bytes, int except);

// Replaces private anonymous pages by a shared mapping of the file `fd` at `offset`, with the same contents. `window`
// is another mapping of that piece of the file, readable and writable. False, and nothing has changed, if that cannot
// be done without losing a write. A child made by fork gets a private copy, as it would have without this. Any thread.
bool MovePages(uint64_t start, uint64_t bytes, int fd, uint64_t offset, void* window);

// Makes pages that MovePages has moved private again, with the contents that they have now. False, and they stay as
// they are, if that cannot be done without losing a write.
bool MovePagesBack(uint64_t start, uint64_t bytes);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_SESSION_SHARED_PAGES_H_
