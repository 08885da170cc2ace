// SPDX-License-Identifier: Apache-2.0
// The pages of the image that a move has sent last (move.proto), by their contents. What the next image has of them,
// the destination copies from its own files. 24 bytes for each page.
//
// A page counts as the same if its XXH3-128 is the same. A job can make pages with equal hashes on purpose. Then its
// file does not have the signed hash at the destination, and its own move fails.
//
// Not thread-safe.
#ifndef CUDA_REMOTE_HOST_SENT_PAGES_H_
#define CUDA_REMOTE_HOST_SENT_PAGES_H_

#include <cstdint>
#include <set>
#include <string_view>
#include <vector>

#include "proto/base/hash.h"

namespace cuda_remote::host {

inline constexpr size_t kPageBytes = 4096;

class SentPages {
 public:
  struct Page {
    Hash128 hash;
    uint32_t file, number;  // the file's number in the move; the page's in the file
  };
  static Page Describe(std::string_view bytes, uint32_t file, uint64_t offset) {
    return {HashOf(bytes), file, uint32_t(offset / kPageBytes)};
  }

  // In any order. Not found before Sort.
  void Add(const Page& page) { pages_.push_back(page); }
  const Page& last() const { return pages_.back(); }  // that was added
  void Sort();
  // A page with the same contents; null: there is none. If there are several: the one that follows `last`, if that is
  // one of them.
  const Page* Find(const Page& page, const Page* last) const;
  // Adds those of `other` that are of these files.
  void AddFilesOf(const SentPages& other, const std::set<uint32_t>& files);

 private:
  std::vector<Page> pages_;
};

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_SENT_PAGES_H_
