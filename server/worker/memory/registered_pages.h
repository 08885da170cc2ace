// SPDX-License-Identifier: Apache-2.0
// Pages of the program's own that it has registered (cuMemHostRegister), which are mapped here at the same addresses.
//
// Kernels then use the program's pointers, as natively. Registrations need not begin and end at the border of a page,
// so two may share one: the client says which pages are to be mapped and which to be unmapped, and this class notes
// which there are. Only mapping and unmapping is by page; with the driver registrations are registered as the program
// has them.
//
// For the executor's thread.
#ifndef CUDA_REMOTE_SERVER_WORKER_MEMORY_REGISTERED_PAGES_H_
#define CUDA_REMOTE_SERVER_WORKER_MEMORY_REGISTERED_PAGES_H_

#include <cstdint>
#include <map>
#include <vector>

namespace cuda_remote::server {

class RegisteredPages {
 public:
  struct Range {
    uint64_t address;
    uint64_t bytes;
  };

  // Whether a program's memory at these addresses may be mapped here: not where memory of jobs lies that has addresses
  // of its own, nor where this process's program, heap, libraries, stacks or the driver's blocks for variables lie or
  // may come to lie. The last are the top 16 GiB of the address space, where a program with randomised addresses has
  // nothing but the stack of its first thread.
  static bool MayLieAt(uint64_t address, uint64_t bytes);

  // Notes whole pages that have been mapped. `own`: they are memory of this process, not of a file of the client's.
  void Add(uint64_t address, uint64_t bytes, bool own) { pages_[address] = {bytes, own}; }
  // Whether all pages on which [start, start + bytes) lies are there, and all are this process's own or none is.
  bool Hold(uint64_t start, uint64_t bytes, bool* own) const;
  // Forgets those of these pages that are there. Returns them, for the caller to unmap; *own_bytes of them are this
  // process's own.
  std::vector<Range> Take(uint64_t address, uint64_t bytes, uint64_t* own_bytes);

 private:
  struct Pages {
    uint64_t bytes;
    bool own;
  };
  std::map<uint64_t, Pages> pages_;  // by address
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MEMORY_REGISTERED_PAGES_H_
