// SPDX-License-Identifier: Apache-2.0
// How many images a move sends while the job runs (pre-copy rounds), before the one for which it stands still.
#ifndef CUDA_REMOTE_HOST_MOVE_ROUNDS_H_
#define CUDA_REMOTE_HOST_MOVE_ROUNDS_H_

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

namespace cuda_remote::host {

class MoveRounds {
 public:
  static constexpr size_t kMost = 5;
  // So few bytes take no time worth another round.
  static constexpr uint64_t kFewBytes = 32u << 20;
  // A round that sends more than this part of the one before shows that the job changes its memory as fast as it is
  // sent.
  static constexpr double kShrinks = 0.7;

  // An image has been sent, with so many bytes.
  void Add(uint64_t bytes) { bytes_.push_back(bytes); }

  // Whether another image is to be sent while the job runs: if the last one was so large that the pause would be long,
  // and so much smaller than the one before that the next one may be smaller again. Not before the first one.
  bool NeedsAnother() const {
    const size_t count = bytes_.size();
    if (count == 0 || count >= kMost || bytes_.back() < kFewBytes) return false;
    return count == 1 || double(bytes_.back()) <= kShrinks * double(bytes_[count - 2]);
  }

  bool empty() const { return bytes_.empty(); }
  const std::vector<uint64_t>& bytes() const { return bytes_; }
  uint64_t total() const { return std::accumulate(bytes_.begin(), bytes_.end(), uint64_t{0}); }

 private:
  std::vector<uint64_t> bytes_;
};

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_MOVE_ROUNDS_H_
