// SPDX-License-Identifier: Apache-2.0
// Threads that wait for the GPU, so that the executor does not. As many as there are waits at the same time, up to a
// limit; idle ones stay. Tasks begin in the order in which they were given, and may end in any other one. Thread-safe.
#ifndef CUDA_REMOTE_SERVER_WORKER_WAITERS_H_
#define CUDA_REMOTE_SERVER_WORKER_WAITERS_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace cuda_remote::server {

class Waiters {
 public:
  // `start` runs first in each thread.
  Waiters(size_t max_threads, std::function<void()> start) : max_threads_(max_threads), start_(std::move(start)) {}
  // Waits for all tasks that have begun.
  ~Waiters();
  Waiters(const Waiters&) = delete;
  Waiters& operator=(const Waiters&) = delete;

  void Run(std::function<void()> task);
  // Begins when all tasks that were given before have ended.
  void RunBehind(std::function<void()> task);

 private:
  struct Task {
    uint64_t number;  // from 1 on
    bool behind;      // all with smaller numbers
    std::function<void()> run;
  };
  void Add(bool behind, std::function<void()> run);
  void Loop(size_t thread);
  // Whether a task before `number` has begun and not ended.
  bool EarlierRuns(uint64_t number) const;

  const size_t max_threads_;
  const std::function<void()> start_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable ended_;  // a task, while somebody wants to know
  std::deque<Task> tasks_;
  std::vector<std::thread> threads_;
  std::vector<uint64_t> running_;  // the number of each thread's task, 0: none
  uint64_t last_number_ = 0;
  size_t behind_ = 0;  // threads that wait for the ends of earlier tasks
  size_t idle_ = 0;
  bool stop_ = false;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_WAITERS_H_
