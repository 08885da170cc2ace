// SPDX-License-Identifier: Apache-2.0
// Finds addresses of a known set in memory: eight bytes that are one of them, wherever they begin.
//
// The set is kept complemented, bit by bit, so that a process which searches its own memory does not find the set.
// After Add, any thread may search.
#ifndef CUDA_REMOTE_PROTO_DRIVERABI_ADDRESS_SEARCH_H_
#define CUDA_REMOTE_PROTO_DRIVERABI_ADDRESS_SEARCH_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "proto/base/hash.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace cuda_remote::driverabi {

// Hash64Of the addresses, eight bytes each; never 0.
inline uint64_t HashOfAddresses(const std::vector<uint64_t>& addresses) {
  const uint64_t hash =
      Hash64Of({reinterpret_cast<const char*>(addresses.data()), addresses.size() * sizeof(uint64_t)});
  return hash != 0 ? hash : 1;
}

// Whether eight bytes that look like an address are parts of two aligned words that mean something else: each of the
// two is a pointer (`is_pointer`), or none of its bytes there is other than zero. `words`: the two; `at`: where in them
// the eight bytes begin, 0 to 7. A GPU function at 0x2802d5600000 looks like two zeros and the pointer 0x2802d560, and
// the heap of a program that is not position-independent has such addresses. False for an aligned word: it is itself.
template <typename IsPointer>
bool IsPartOfPointers(uint64_t at, const uint64_t words[2], const IsPointer& is_pointer) {
  if (at == 0) return false;
  const unsigned shift = unsigned(at) * 8;
  const bool of_first = words[0] >> shift != 0, of_second = words[1] << (64 - shift) != 0;
  return (!of_first || is_pointer(words[0])) && (!of_second || is_pointer(words[1]));
}

class AddressSearch {
 public:
  static constexpr size_t kNone = ~size_t{0};

  bool empty() const { return complements_.empty(); }

  void Add(uint64_t complement) {
    const auto at = std::lower_bound(complements_.begin(), complements_.end(), complement);
    if (at == complements_.end() || *at != complement) complements_.insert(at, complement);
  }

  bool Contains(uint64_t complement) const {
    return std::binary_search(complements_.begin(), complements_.end(), complement);
  }

  // Where the first one begins, at `from` or behind it; kNone.
  size_t Find(const char* bytes, size_t count, size_t from = 0) const {
    if (empty() || count < sizeof(uint64_t)) return kNone;
    const uint64_t lowest = complements_.front(), span = complements_.back() - lowest;
    const bool alike = (complements_.front() ^ complements_.back()) >> 32 == 0;
    for (size_t at = from; at <= count - sizeof(uint64_t); ++at) {
      if (alike) at = SkipOthers(bytes, count, at);
      if (at > count - sizeof(uint64_t)) break;
      uint64_t word;
      std::memcpy(&word, bytes + at, sizeof(word));
      if (~word - lowest <= span && Contains(~word)) return at;
    }
    return kNone;
  }

 private:
  // Where all addresses have the same upper half: the next place at which two of its bytes are right, or one near the
  // end.
  size_t SkipOthers(const char* bytes, size_t count, size_t at) const {
#ifdef __SSE2__
    constexpr size_t kLane = sizeof(__m128i);
    const __m128i fifth = _mm_set1_epi8(char(~complements_.front() >> 32));
    const __m128i sixth = _mm_set1_epi8(char(~complements_.front() >> 40));
    for (; at + 5 + kLane <= count; at += kLane) {
      const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + at + 4));
      const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + at + 5));
      const int found = _mm_movemask_epi8(_mm_and_si128(_mm_cmpeq_epi8(a, fifth), _mm_cmpeq_epi8(b, sixth)));
      if (found != 0) return at + size_t(__builtin_ctz(unsigned(found)));
    }
#endif
    return at;
  }

  std::vector<uint64_t> complements_;  // in order
};

}  // namespace cuda_remote::driverabi

#endif  // CUDA_REMOTE_PROTO_DRIVERABI_ADDRESS_SEARCH_H_
