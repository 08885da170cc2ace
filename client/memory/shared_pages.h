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
// they are, and the caller mirrors them instead (client/memory/managed_mirror.h).
//
// Locked pages (mlock) stay locked. Other advice and NUMA policies do not survive the move.
//
// A direct read from a device (O_DIRECT, io_uring's fixed buffers) that is on its way into the pages while they move is
// not stopped: the kernel has looked up its pages already.
#ifndef CUDA_REMOTE_CLIENT_MEMORY_SHARED_PAGES_H_
#define CUDA_REMOTE_CLIENT_MEMORY_SHARED_PAGES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "client/memory/page_faults.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::client {

// What is behind a piece of the address space.
struct PageBacking {
  enum Kind {
    kOther,    // anything else: it cannot be shared
    kPrivate,  // private anonymous memory that is no stack of a process's first thread
    kFile,     // a file, mapped shared
    kMoved,    // the file that pages are moved into
  };
  Kind kind = kOther;
  uint64_t start = 0, bytes = 0;
  bool writable = false;
  // kFile: the file, open as the mapping may be used. kFile, kMoved: where in it `start` is.
  UniqueFd fd;
  uint64_t offset = 0;
};

// Looks up what is behind the `bytes` (whole pages) at `start`, in address order. Empty if some of it is not mapped or
// cannot be read. `moved`: the file for MovePages, -1 for none. Any thread.
std::vector<PageBacking> FindBacking(uint64_t start, uint64_t bytes, int moved);

// Replaces private anonymous pages by a shared mapping of the file `fd` at `offset`, with the same contents. `window`
// is another mapping of that piece of the file, readable and writable. The pages must have the same protection.
// `source` gives the device of userfaultfd where this process may not open it. False, and nothing has changed, if that
// cannot be done without losing a write, or if the calling thread's stack lies there. A child made by fork gets a
// private copy, as it would have without this. Any thread.
bool MovePages(uint64_t start, uint64_t bytes, bool writable, int fd, uint64_t offset, char* window,
               const PageFaults::DeviceSource& source = nullptr);

// Makes pages that MovePages has moved, or some of them, private again, with the contents that they have now. False if
// that cannot be done without losing a write; those that remain shared are still moved pages.
bool MovePagesBack(uint64_t start, uint64_t bytes, const PageFaults::DeviceSource& source = nullptr);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_MEMORY_SHARED_PAGES_H_
