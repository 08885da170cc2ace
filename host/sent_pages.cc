// SPDX-License-Identifier: Apache-2.0
#include "host/sent_pages.h"

#include <algorithm>
#include <tuple>

namespace cuda_remote::host {
namespace {

std::tuple<uint64_t, uint64_t, uint32_t, uint32_t> Order(const SentPages::Page& page) {
  return {page.hash.high, page.hash.low, page.file, page.number};
}

bool IsBefore(const SentPages::Page& a, const SentPages::Page& b) { return Order(a) < Order(b); }

}  // namespace

void SentPages::Sort() { std::sort(pages_.begin(), pages_.end(), IsBefore); }

const SentPages::Page* SentPages::Find(const Page& page, const Page* last) const {
  const auto found = [&](uint32_t file, uint32_t number) -> const Page* {
    const auto at = std::lower_bound(pages_.begin(), pages_.end(), Page{page.hash, file, number}, IsBefore);
    return at != pages_.end() && at->hash == page.hash ? &*at : nullptr;
  };
  if (last) {
    const Page* const next = found(last->file, last->number + 1);
    if (next && next->file == last->file && next->number == last->number + 1) return next;
  }
  return found(0, 0);
}

void SentPages::AddFilesOf(const SentPages& other, const std::set<uint32_t>& files) {
  for (const Page& page : other.pages_) {
    if (files.count(page.file) != 0) pages_.push_back(page);
  }
}

}  // namespace cuda_remote::host
