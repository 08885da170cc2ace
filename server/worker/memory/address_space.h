// SPDX-License-Identifier: Apache-2.0
// Who owns which part of a range of addresses: best fit, lowest address first, adjacent free parts merged. Pure logic:
// the same calls give the same addresses. Not thread-safe.
#ifndef CUDA_REMOTE_SERVER_WORKER_MEMORY_ADDRESS_SPACE_H_
#define CUDA_REMOTE_SERVER_WORKER_MEMORY_ADDRESS_SPACE_H_

#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace cuda_remote::server {

class AddressSpace {
 public:
  // `unit`: all sizes and addresses are multiples of it (a power of two). `boundary`: free parts are not merged across
  // multiples of it, so no part given out crosses one; 0: none.
  explicit AddressSpace(uint64_t unit, uint64_t boundary = 0) : unit_(unit), boundary_(boundary) {}

  // Takes the smallest free part that holds `bytes` (rounded up to units) at `alignment`. 0 if there is none.
  uint64_t Take(uint64_t bytes, uint64_t alignment = 0);

  // Takes exactly [address, address + bytes). False if not all of it is free.
  bool TakeAt(uint64_t address, uint64_t bytes);

  // Adds a free part: at first, and what Take and TakeAt gave out.
  void Give(uint64_t address, uint64_t bytes);

  // Adds what of [address, address + bytes) is not free already.
  void GiveRest(uint64_t address, uint64_t bytes);

  uint64_t free_bytes() const { return free_bytes_; }
  uint64_t RoundUp(uint64_t bytes) const { return (bytes + unit_ - 1) & ~(unit_ - 1); }

 private:
  void Insert(uint64_t address, uint64_t bytes);
  void Erase(std::map<uint64_t, uint64_t>::iterator part);
  bool MayMergeAt(uint64_t address) const { return boundary_ == 0 || address % boundary_ != 0; }

  const uint64_t unit_;
  const uint64_t boundary_;
  std::map<uint64_t, uint64_t> free_;                // address -> bytes
  std::set<std::pair<uint64_t, uint64_t>> by_size_;  // bytes, address
  uint64_t free_bytes_ = 0;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MEMORY_ADDRESS_SPACE_H_
