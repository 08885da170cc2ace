// SPDX-License-Identifier: Apache-2.0
// Which pages of this process's memory were written since somebody looked last: the kernel knows. It protects the pages
// against writes (userfaultfd in asynchronous mode), takes the protection away itself at the first write, and
// PAGEMAP_SCAN names the pages without protection and protects them again, in one step. So no thread ever waits, and
// writes by system calls are seen, too. Needs Linux 6.7.
//
// Only writes through the watched mapping count, so memory that is written through other mappings, through a file or by
// other processes must not be watched. And a transfer by a device (O_DIRECT, libaio, a network card) counts when it
// begins: memory must not be watched that may be the target of one that has not ended at a Collect.
//
// In a child made by fork nothing is watched, and Watch always fails. Not thread-safe. One object at a time watches.
// Errors are false, and never errno.
#ifndef CUDA_REMOTE_CLIENT_MEMORY_PAGE_WRITES_H_
#define CUDA_REMOTE_CLIENT_MEMORY_PAGE_WRITES_H_

#include <cstdint>
#include <utility>
#include <vector>

namespace cuda_remote::client {

class PageWrites {
 public:
  static constexpr uint64_t kPage = 4096;

  PageWrites() = default;
  ~PageWrites() { Close(); }
  PageWrites(const PageWrites&) = delete;
  PageWrites& operator=(const PageWrites&) = delete;

  // Begins to watch whole pages. False: not with this kernel, or not this kind of memory. What the first Collect then
  // says counts for nothing.
  bool Watch(uint64_t address, uint64_t bytes);
  void Unwatch(uint64_t address, uint64_t bytes);

  // Sets `runs` to the parts [begin, end) of watched pages that may have been written since the last call. False: the
  // memory is not watched any more, because it was mapped anew, for example.
  bool Collect(uint64_t address, uint64_t bytes, std::vector<std::pair<uint64_t, uint64_t>>* runs);

  // Whether this process has made a child by fork since it began to watch for the first time. The child may write to
  // mappings that both share, which is not reported here.
  static bool forked();

  // Nothing is watched any more, and no descriptor is open.
  void Close();

 private:
  bool Open();
  // Whether the descriptors are this process's: a child made by fork has closed them.
  bool open() const;

  int fd_ = -1;
  int pagemap_ = -1;
  bool refused_ = false;  // by the kernel: it is not asked again
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_MEMORY_PAGE_WRITES_H_
