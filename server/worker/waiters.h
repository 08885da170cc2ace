// Threads that wait for the GPU, so that the executor does not. As many as there are waits at the same time, up to a
// limit; idle ones stay. Thread-safe.
#ifndef CUDA_REMOTE_SERVER_WORKER_WAITERS_H_
#define CUDA_REMOTE_SERVER_WORKER_WAITERS_H_

#include <condition_variable>
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

 private:
  void Loop();

  const size_t max_threads_;
  const std::function<void()> start_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;
  bool stop_ = false;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_WAITERS_H_
