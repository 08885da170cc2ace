// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/moved_code.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "proto/base/text.h"

namespace cuda_remote::checkpoint {
namespace {

std::string PlaceOf(const ckptfmt::Region& region, uint64_t offset) {
  if (!region.symbol.empty()) return "the variable " + region.symbol + " at its byte " + std::to_string(offset);
  if (region.kind == ckptfmt::RegionKind::kArray) return "a CUDA array";
  return "GPU memory at " + Hex(region.address + offset);
}

}  // namespace

void MovedCode::Add(uint64_t module, uint64_t context, const std::string& symbol, const std::vector<Word>& words) {
  variables_[{module, context, symbol}] = words;
  for (const Word& word : words) {
    if (word.before == word.now) continue;
    moved_[{module, context}][word.before] = word.now;
    names_.emplace(word.before, symbol);
    search_.Add(~word.before);
  }
}

absl::Status MovedCode::Translate(const ckptfmt::Region& region, uint64_t offset, char* bytes, size_t count) const {
  if (empty()) return absl::OkStatus();
  // Words that are done: [begin, end) of each is no address any more that anybody searches for.
  std::vector<std::pair<size_t, uint64_t>> translated;
  const auto variable = variables_.find({region.object, region.context, region.symbol});
  const auto moved = moved_.find({region.object, region.context});
  if (variable != variables_.end() && !region.symbol.empty() && moved != moved_.end()) {
    const std::vector<Word>& words = variable->second;
    auto word = std::lower_bound(words.begin(), words.end(), offset,
                                 [](const Word& one, uint64_t at) { return one.offset < at; });
    for (; word != words.end() && word->offset - offset + sizeof(uint64_t) <= count; ++word) {
      const size_t at = size_t(word->offset - offset);
      uint64_t value;
      std::memcpy(&value, bytes + at, sizeof(value));
      const auto now = moved->second.find(value);
      if (now == moved->second.end()) continue;
      // Out of the search's way; another function may lie there now.
      std::memset(bytes + at, 0, sizeof(value));
      translated.emplace_back(at, now->second);
    }
  }
  const size_t found = search_.Find(bytes, count);
  for (const auto& [at, now] : translated) std::memcpy(bytes + at, &now, sizeof(now));
  if (found == driverabi::AddressSearch::kNone) return absl::OkStatus();
  uint64_t value;
  std::memcpy(&value, bytes + found, sizeof(value));
  const auto name = names_.find(value);
  return absl::FailedPreconditionError(
      PlaceOf(region, offset + found) + " holds the address of a GPU function that lies elsewhere on this server " +
      "than before" + (name != names_.end() ? " (one of those in the variable " + name->second + ")" : std::string()));
}

}  // namespace cuda_remote::checkpoint
