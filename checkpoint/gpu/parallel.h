// SPDX-License-Identifier: Apache-2.0
// Work that several threads share.
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_PARALLEL_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <future>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/status/status.h"

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

// Calls each(index) for all indices below `count` at the same time, on the calling thread and on others, since they may
// wait for each other. Fails if the system gives not that many threads; then nothing has been called. `each` throws
// nothing.
template <typename Each>
absl::Status AllAtOnce(size_t count, const Each& each) {
  std::promise<bool> start;
  const std::shared_future<bool> started = start.get_future().share();
  std::vector<std::thread> threads;
  std::string problem;
  try {
    while (threads.size() + 1 < count) {
      threads.emplace_back([&each, started, index = threads.size() + 1] {
        if (started.get()) each(index);
      });
    }
  } catch (const std::system_error& error) {
    problem = error.what();
  }
  start.set_value(problem.empty());
  if (problem.empty() && count != 0) each(0);
  for (std::thread& thread : threads) thread.join();
  if (problem.empty()) return absl::OkStatus();
  return absl::ResourceExhaustedError("the system gives " + std::to_string(threads.size()) + " of " +
                                      std::to_string(count - 1) + " threads, one for each process that uses CUDA (" +
                                      problem + "); see ulimit -u and the cgroup's pids.max");
}

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_PARALLEL_H_
