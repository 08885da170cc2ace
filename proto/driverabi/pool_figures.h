// SPDX-License-Identifier: Apache-2.0
// What a memory pool says of itself (CU_MEMPOOL_ATTR_{USED,RESERVED}_MEM_{CURRENT,HIGH}): the arithmetic alone, for
// those whose pools' memory is not the driver's. Memory that a pool has reserved is counted here and held by nobody: it
// is what the application is told that its pools keep, by the rules of the driver's documentation.
//
// Not thread-safe. Used by the client library and by the software GPU: libc and libstdc++ only.
#ifndef CUDA_REMOTE_PROTO_DRIVERABI_POOL_FIGURES_H_
#define CUDA_REMOTE_PROTO_DRIVERABI_POOL_FIGURES_H_

#include <algorithm>
#include <cstdint>

namespace cuda_remote::driverabi {

class PoolFigures {
 public:
  // What the driver (580) counts in: used is to the byte, what is behind it in units of 512, and reserved in chunks.
  static constexpr uint64_t kUnit = 512;
  static constexpr uint64_t kChunk = uint64_t{32} << 20;

  // An allocation from the pool, and the end of one that had as many bytes, at the call and not in the stream's order.
  void Allocated(uint64_t bytes) {
    used_ += bytes;
    used_high_ = std::max(used_high_, used_);
    backing_ += RoundUp(bytes, kUnit);
    reserved_ = std::max(reserved_, needed());
    reserved_high_ = std::max(reserved_high_, reserved_);
  }
  void Freed(uint64_t bytes) {
    used_ -= std::min(bytes, used_);
    backing_ -= std::min(RoundUp(bytes, kUnit), backing_);
  }

  // The host has waited for a stream, an event or a context: what is above the threshold goes, as far as it can.
  void Synchronized() {
    if (reserved_ > threshold_) Shrink(threshold_ / kChunk * kChunk);
  }

  // cuMemPoolTrimTo: nothing happens to a pool that has less than `keep`; another has at least that much afterwards.
  void TrimTo(uint64_t keep) {
    if (reserved_ > keep) Shrink(RoundUp(keep, kChunk));
  }

  // The high-water marks are set to what is now.
  void ResetUsedHigh() { used_high_ = used_; }
  void ResetReservedHigh() { reserved_high_ = reserved_; }
  void set_threshold(uint64_t bytes) { threshold_ = bytes; }

  uint64_t used() const { return used_; }
  uint64_t used_high() const { return used_high_; }
  uint64_t reserved() const { return reserved_; }
  uint64_t reserved_high() const { return reserved_high_; }
  uint64_t threshold() const { return threshold_; }
  // Whether a pool made with a limit (CUmemPoolProps::maxSize, 0: none) and so much in use has room. Limits are in
  // chunks.
  static bool Fits(uint64_t limit, uint64_t used, uint64_t bytes) {
    if (limit == 0) return true;
    limit = RoundUp(limit, kChunk);
    return used <= limit && bytes <= limit - used;
  }
  // Reserved for later allocations; and whether some of it goes with the next wait.
  uint64_t idle() const { return reserved_ - needed(); }
  bool releasable() const { return reserved_ > threshold_ && idle() != 0; }

 private:
  static uint64_t RoundUp(uint64_t bytes, uint64_t unit) {
    return bytes > UINT64_MAX - unit ? UINT64_MAX / unit * unit : (bytes + unit - 1) / unit * unit;
  }
  uint64_t needed() const { return RoundUp(backing_, kChunk); }
  void Shrink(uint64_t keep) { reserved_ = std::max(needed(), std::min(reserved_, keep)); }

  uint64_t used_ = 0, used_high_ = 0;
  uint64_t backing_ = 0;
  uint64_t reserved_ = 0, reserved_high_ = 0;
  uint64_t threshold_ = 0;
};

}  // namespace cuda_remote::driverabi

#endif  // CUDA_REMOTE_PROTO_DRIVERABI_POOL_FIGURES_H_
