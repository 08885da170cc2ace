// SPDX-License-Identifier: Apache-2.0
// Work that several threads share.
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_PARALLEL_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace cuda_remote::checkpoint {

// Calls each(index, here) for the indices below `count`, on the calling thread (here: true) and on others, `most` in
// all and no more than the machine has processors. After one that returned false none is begun. Returns how many were
// begun, once all have ended. `each` throws nothing.
template <typename Each>
size_t InParallel(size_t count, unsigned most, const Each& each) {
  std::atomic<size_t> next{0};
  std::atomic<bool> stop{false};
  const auto work = [&](bool here) {
    for (size_t index; !stop && (index = next.fetch_add(1)) < count;) {
      if (!each(index, here)) stop = true;
    }
  };
  std::vector<std::thread> threads;
  try {
    const size_t wanted = std::min<size_t>(count, std::clamp(std::thread::hardware_concurrency(), 1u, most));
    while (threads.size() + 1 < wanted) threads.emplace_back(work, false);
  } catch (const std::system_error&) {
    // Fewer will do.
  }
  work(true);
  for (std::thread& thread : threads) thread.join();
  return std::min<size_t>(next, count);
}

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_PARALLEL_H_
