#include "server/worker/waiters.h"

#include <system_error>
#include <utility>

namespace cuda_remote::server {

Waiters::~Waiters() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    tasks_.clear();
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Waiters::Run(std::function<void()> task) {
  std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  if (tasks_.size() > idle_ && threads_.size() < max_threads_) {
    try {
      threads_.emplace_back([this] { Loop(); });
    } catch (const std::system_error&) {
      // No more threads to be had: the ones that exist do it when they are free. The first must exist.
      if (threads_.empty()) throw;
    }
  }
  changed_.notify_one();
}

void Waiters::Loop() {
  if (start_) start_();
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    ++idle_;
    changed_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
    --idle_;
    if (stop_) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

}  // namespace cuda_remote::server
